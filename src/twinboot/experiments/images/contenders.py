"""What is trained on the same images to be compared, by name: single models in several ways, and twins."""

from __future__ import annotations

from functools import partial

from . import rivals
from .recipes import TWINS
from .task import Method
from .twins import twins

METHODS: dict[str, Method] = {
    "hold-out": rivals.hold_out,
    "single": rivals.single,
    "dropout": rivals.dropout,
    "dropout-seen": rivals.dropout_seen,
    "ivon": rivals.ivon,
    **{method: partial(twins, name=name, recipe=recipe) for method, (name, recipe) in TWINS.items()},
}
