"""The protocol: how twins are trained. One set of settings for all front ends, and why each default is what it is.

`fit`, `TwinModule`, `TwinTrainer`, the scikit-learn estimators and `invert` take a `Protocol` with the settings to
change. What it leaves open is the front end's own default, from the tables at the end of this file.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .. import resets
from .._core.checks import require_number, require_types, shown
from ..data.loader import Resample, require_resample
from ..groups import Blocks, Grouping, require_kind
from ..twins import require_share

_OPEN: Any = None  # the front end's default


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Settings of a Twin-Boot training. A setting that you leave out keeps the front end's default.

    Args:
        groups: which weights share one sigma, as in `Twins`.
        reset: after which epochs the twins are reset, such as `resets.every(2)`, or after which steps, such as
            `resets.steps(resets.growing(10, 1.1, most=80))`. `invert` counts steps in any case.
        mode: how they are reset: `"sample"` as in the paper, `"mean"` or `"centered"` (`Twins.reset`).
        noise: factor on sigma for the noise on the weights in training.
        local: draw the noise of linear layers at the end of a model per output, as `Twins.sampled` says.
        pooled: share of each twin's gradients that is replaced by the mean over the twins (`pool_gradients`).
        resample: `"draws"` or `"counts"`, as in `PairedLoader`.
        average: weight averaging over the epochs, with weights proportional to epoch^average. 0 counts all epochs
            alike, and `math.inf` takes the last epoch alone, as in the paper.

    >>> Protocol(mode="centered", noise=0.5)
    Protocol(mode='centered', noise=0.5)
    """

    groups: str | Grouping = _OPEN
    reset: resets.Schedule = _OPEN
    mode: resets.Mode = _OPEN
    noise: float = _OPEN
    local: bool = _OPEN
    pooled: float = _OPEN
    resample: Resample = _OPEN
    average: float = _OPEN

    def __post_init__(self) -> None:
        require_types(Protocol.__init__, self._given())
        if isinstance(self.groups, str):
            require_kind(self.groups)
        if self.reset is not None:
            resets.require_schedule(self.reset)
        if self.mode is not None:
            resets.require_mode(self.mode)
        if self.noise is not None:
            require_number("noise", self.noise)
        if self.pooled is not None:
            require_share(self.pooled)
        if self.resample is not None:
            require_resample(self.resample)
        if self.average is not None and self.average != math.inf:
            require_number("average", self.average)

    def __repr__(self) -> str:
        return f"Protocol({', '.join(f'{name}={value!r}' for name, value in self._given().items())})"

    def _given(self) -> dict[str, Any]:
        """The settings that were not left out."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value is not None}


def complete(protocol: Protocol | None, defaults: Protocol, front_end: str, without: Collection[str] = ()) -> Protocol:
    """The protocol with a front end's defaults for what it leaves open. `without` names settings that the front end
    does not have."""
    if protocol is None:
        return defaults
    if not isinstance(protocol, Protocol):
        raise TypeError(f'protocol must be a Protocol, such as Protocol(mode="centered"), not {shown(protocol)}.')
    for name in without:
        if name in protocol._given():
            raise ValueError(f"{front_end} has no setting {name!r}: leave it out of the protocol.")
    return replace(defaults, **protocol._given())


def refuse_settings(options: Mapping[str, Any], front_end: str, without: Collection[str] = ()) -> None:
    """Say where settings of the protocol belong. `without` is that of `complete`."""
    for name in options.keys() & {field.name for field in fields(Protocol)}.difference(without):
        raise TypeError(f"{front_end} has no option {name!r}: give protocol=Protocol({name}={shown(options[name])}).")


# The defaults, front end by front end. FIT has the paper's values where nothing better is known.
FIT = Protocol(
    groups="layer",  # as in the paper: with many entries per sigma, two twins are enough to know it
    # reset: `resets.usual`. After each epoch, as in the paper. In epochs of more than 100 steps also within the first
    # ones: from random weights, twins diverge within a few hundred steps (docs/first-epoch.md).
    mode="sample",  # line 13 of Algorithm 1
    noise=1.0,  # line 6
    local=False,  # less work in wide layers alone (docs/overhead.md); docs/local.md has what it does to predictions
    pooled=0.0,  # the paper pools nothing
    resample="counts",  # the objective of the paper's "draws" at 63 % of the work
    average=8.0,  # half of the weight on the last 7 % of a run; with 1 and 3 the average lagged behind
)
# Lightning: `training_step` gives one loss for a batch, which leaves no place for counts as weights ("counts" is for
# those who give `loss=`), and weight averaging is a callback of Lightning's own.
LIGHTNING = replace(FIT, resample="draws", average=math.inf)
# Hugging Face: the same holds for the Trainer's loss. Its learning rate falls to 0, and small steps cannot undo the
# noise of a sampling reset. Its models are pretrained, and do not diverge within an epoch.
HUGGING_FACE = replace(FIT, reset=resets.every(1), mode="centered", resample="draws", average=math.inf)
# scikit-learn: the choice with which the estimators were compared (docs/results.md, UCI). Tables have few rows, with
# which the mean should not also walk at random with each reset.
SCIKIT_LEARN = replace(FIT, groups="unit", mode="centered")
# `invert` trains a field, not a network, by full batches: no epochs to average over or to reset after, and many entries
# of the field that few measurements constrain, where the mean would walk with each sampling reset. The intervals grow
# as section 3.5 says. groups: blocks of three along each axis of the field, as in Appendix A.6. With a prior there are
# neither noise nor resets (`invert.NOT_WITH_PRIOR`), and with rounds each cell has its own sigma.
INVERT = Protocol(reset=resets.growing(50, 1.5), mode="centered", noise=1.0)


def blocks_of_three(dimensions: int) -> str | Blocks:
    """The groups of `invert` for a field of so many dimensions."""
    return Blocks((3,) * dimensions) if dimensions else "tensor"
