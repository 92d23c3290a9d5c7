"""What twins need to go on, in a checkpoint of a Hugging Face Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..loader import PairedLoader
from ..twins import Twins

TWINS = "twins.pt"


def write_twins(folder: str, twins: Twins, loader: PairedLoader) -> None:
    torch.save({"twins": without_frozen(twins), "loader": loader.state_dict()}, Path(folder) / TWINS)


def read_twins(folder: str, twins: Twins, loader: PairedLoader) -> None:
    if not (path := Path(folder) / TWINS).is_file():
        raise FileNotFoundError(
            f"{folder} has no {TWINS}, as a plain Trainer or save_only_model=True leaves it: twins cannot go "
            "on from it, but a new run can start with its model."
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    loader.load_state_dict(state["loader"])  # which refuses another dataset, bootstrap or batch size
    twins.load_state_dict({**twins.state_dict(), **state["twins"]})


def without_frozen(twins: Twins) -> dict[str, Any]:
    """The state of twins without what they share with the model that they are of."""
    frozen = {name for name, p in twins.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: t for name, t in twins.state_dict().items() if name not in frozen}
