"""Error bars for a model that is already trained.

two twins start from the model
for each round:
    two new bootstrap samples
    for each epoch, for each pair of batches:
        losses, gradients, a step; the learning rate falls to 0 over the round
    both twins are kept as members of an ensemble

The spread of the members is the error bar. With `keep="sigma"` the members are not kept: sigma is the distance of the
twins, as in Algorithm 1, times a factor with which draws of the weights spread the predictions of out-of-bag samples
as much as the twins do.

Why the learning rate starts anew in each round: at the end of training it is so small that twins would barely move,
and the spread would be too small. Why it falls to 0: otherwise the members differ by the last steps of the optimizer.
Why the twins go on from round to round, instead of starting from the model each time: twins that start from one point
need time to forget it. After one round of a fifth of the training, their predictions differ by about 0.7 of the true
spread, and after four by 1.0 to 1.1 (docs/results/truth.md).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any, Literal, SupportsIndex

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from .. import resets
from .._core import fingerprints, ranks, seeds
from .._core.checks import require_known, require_one_of, require_types, require_whole, shown
from .._core.copies import replicate
from .._core.states import pack, require_same, unpack
from ..data.bootstrap import Bootstrap
from ..data.loader import PairedLoader, require_map_style
from ..estimate.estimate import Estimate
from ..estimate.members import Members
from ..estimate.prediction import Task
from ..groups import Grouping
from ..twins import Twins
from . import losses, optimizers
from .checkpoints import Checkpoints
from .epoch import Training
from .logs import show_round
from .protocol import FIT, Protocol, complete

Keep = Literal["members", "sigma"]
LR = 0.005  # five times the default of `fit`


def error_bars(
    model: nn.Module,
    dataset: Dataset[Any],
    loss: Task | losses.Loss = "classification",
    *,
    rounds: int = 4,
    epochs: int = 6,
    keep: Keep = "members",
    groups: str | Grouping = "layer",
    optimizer: optimizers.Make | None = None,
    batch_size: int = 64,
    bootstrap: Callable[[int], Bootstrap] | None = None,
    seed: SupportsIndex = 0,
    device: str | int | torch.device | None = None,
    amp: torch.dtype | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
    **options: Any,
) -> Estimate:
    """Error bars for a model that is already trained, however that was done.

    Two twins go on from the model, each on bootstrap samples of its own. Where their predictions differ, the data leave
    the prediction open. `estimate.module` is a copy of the model and predicts exactly as the model does.
    `estimate.predict(x)` predicts with error bars.

    Args:
        model: the trained model. It is copied, except for frozen parameters, which the members share.
        dataset, loss: the training data and the loss of the training, as in `fit`.
        rounds: how often the learning rate starts anew, with new bootstrap samples. Each round gives two members.
        epochs: passes over the data in a round: about a fifth of the epochs of the training. Four rounds then take
            about as long as the training did.
        keep: `"members"` keeps the twins of each round: `2 * rounds` times the trainable weights. They say best where
            predictions are uncertain. `"sigma"` keeps one number per group of weights.
        groups: which weights share one sigma, as in `Twins`.
        optimizer: a function that makes an optimizer from parameters. Give the optimizer of the training with about
            five times its learning rate. In each round the rate falls to 0 along a cosine. If the loss at the end of
            a round is far above that of the model, the rate was too large. By default Adam with a learning rate of
            0.005.
        batch_size: that of the training.
        bootstrap: a function that makes a `Bootstrap` from a seed. Default: `lambda seed: Bootstrap(len(dataset),
            seed=seed)`.
        seed, device, amp, progress: as in `fit`.
        checkpoint: a directory. A run that was stopped resumes from it, bit for bit.
        options: passed to `PairedLoader`, such as `num_workers`.

    >>> x = torch.linspace(-1, 1, 50).unsqueeze(1)
    >>> line = nn.Linear(1, 1)  # trained before, here by hand
    >>> _ = line.load_state_dict({"weight": torch.tensor([[2.0]]), "bias": torch.zeros(1)})
    >>> y = 2 * x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    >>> estimate = error_bars(line, torch.utils.data.TensorDataset(x, y), "regression", progress=False)
    >>> bool((estimate(x) == line(x)).all()), len(estimate.members)
    (True, 8)
    >>> 0.005 < estimate.predict(x).std.mean() < 0.05  # about 0.1 / sqrt(50) in the middle, more at the ends
    tensor(True)
    """
    for name, number in {"rounds": rounds, "epochs": epochs, "batch_size": batch_size}.items():
        require_whole(name, number, 1)
    rounds, epochs, batch_size = int(rounds), int(epochs), int(batch_size)
    require_one_of(("members", "sigma"), "keep", keep)
    require_map_style(dataset)
    if bootstrap is not None and not callable(bootstrap):
        raise TypeError(
            "bootstrap must be a function of a seed, such as lambda seed: Bootstrap(n, seed=seed), because each round "
            f"draws new samples, not {shown(bootstrap)}."
        )
    optimizers.require_function(optimizer)
    require_known(options, error_bars, PairedLoader, DataLoader)
    require_types(error_bars, locals())
    protocol = complete(Protocol(groups=groups, noise=0.0), FIT, "error_bars")
    seed = seeds.require_seed(seed)

    def begin(number: int, before: Twins | None = None) -> _Round:
        own = seeds.derive(seed, "round", number)
        resample = Bootstrap(len(dataset), seed=own) if bootstrap is None else bootstrap(own)  # type: ignore[arg-type]
        run = Training(
            model,
            dataset,
            loss,
            protocol=protocol,
            batch_size=batch_size,
            bootstrap=resample,
            seed=own,
            device=device,
            amp=amp,
            **options,
        )
        if before is not None:
            run.twins.load_state_dict(before.state_dict())
        return _Round(run, optimizer, epochs)

    current, members = begin(1), list[dict[str, Tensor]]()
    description = {
        "loss": loss if isinstance(loss, str) or checkpoint is None else fingerprints.of_function(loss),
        "model": None if checkpoint is None else fingerprints.of_model(model),
        "batch_size": batch_size,
        "epochs": epochs,
        "amp": str(amp),
        "optimizer": type(current.stepper).__name__,
        "learning rate": current.rates,
        "optimizer's settings": [optimizers.settings(group) for group in current.stepper.param_groups],
    }
    saved = Checkpoints(checkpoint) if checkpoint is not None else None
    state = saved.latest(current.run.device) if saved else None
    done = 0  # epochs, in all rounds
    if state is not None:
        if missing := {"description", "members", "round"} - state.keys():
            raise ValueError(f"the checkpoint in {checkpoint} is of no run of error_bars: it has no {min(missing)!r}.")
        require_same(unpack(state["description"]), description, "use the options of then, or another directory")
        done, members = int(state["epoch"]), list(state["members"])
        if done > rounds * epochs:
            raise ValueError(f"{checkpoint} holds a run of more than {rounds} rounds: choose another directory.")
        current = begin(len(members) + (done % epochs > 0))
        current.load_state_dict(state["round"])
    if not ranks.agree(done):
        raise ValueError(f"the ranks do not find the same checkpoints: {checkpoint} must be one directory for all.")
    writes = ranks.rank_and_size()[0] == 0
    began, before = time.perf_counter(), done
    while done < rounds * epochs:
        number, epoch = divmod(done, epochs)
        if epoch == 0 and number > 0:
            current = begin(number + 1, current.run.twins)
        train = current.epoch(epoch + 1)
        done += 1
        if done % epochs == 0:
            members.append(Members.of(list(current.run.twins), current.run.twins.partition.parameter_shapes))
        if saved and writes:
            parts = {"members": members, "round": current.state_dict()}
            saved.save(done, {"description": pack(description), **parts})
        if progress and writes:
            left = (time.perf_counter() - began) / (done - before) * (rounds * epochs - done)
            show_round(number + 1, rounds, epoch + 1, epochs, train, left)
    return _estimate(model, current.run, members, keep)


class _Round:
    """The twins on new bootstrap samples, with a learning rate that falls to 0."""

    def __init__(self, run: Training, optimizer: optimizers.Make | None, epochs: int) -> None:
        self.run = run
        parameters = [list(twin.parameters()) for twin in run.twins]
        self.stepper = optimizers.make_optimizer(optimizer, parameters, LR)
        self.rates = [float(group["lr"]) for group in self.stepper.param_groups]
        self.schedule = falling(self.stepper, epochs * len(run.loader))
        self.scaler = torch.amp.GradScaler(run.device.type, enabled=run.amp is torch.float16)

    def epoch(self, number: int) -> float:
        return self.run.epoch(number, self.stepper, self.scaler, resets.never(), self.schedule)

    def _parts(self) -> dict[str, Any]:
        parts = {"twins": self.run.twins, "optimizer": self.stepper, "loader": self.run.loader}
        return {**parts, "schedule": self.schedule, "scaler": self.scaler}

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state[name])


def falling(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A schedule of steps along which the learning rate falls to 0, as half a cosine."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * min(step / steps, 1.0))) / 2
    )


def _estimate(model: nn.Module, run: Training, members: list[dict[str, Tensor]], keep: Keep) -> Estimate:
    """The model with its members, or with sigma."""
    [module] = replicate(model, own=run.twins.partition.parameter_shapes)
    estimate = Estimate(module.to(run.device), run.twins.partition.scaled(run.bootstrap.scale))
    estimate.task = run.task
    if keep == "members":
        estimate.members = Members({name: torch.cat([own[name] for own in members]) for name in members[0]})
    else:
        estimate.scale = run.matched_scale(estimate)
    return estimate
