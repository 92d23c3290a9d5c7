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
need time to forget it, and their predictions differ more after each round.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal, SupportsIndex

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from .._core import fingerprints, ranks, seeds
from .._core.checks import one_of, require_one_of, require_types, require_whole, shown
from .._core.copies import held, replicate
from .._core.states import pack, require_same, unpack
from .._core.tensors import checksum
from ..data.bootstrap import Bootstrap
from ..data.loader import require_map_style
from ..estimate.estimate import Estimate
from ..estimate.members import Members
from ..estimate.prediction import TASKS, Task
from ..groups import Grouping
from ..twins import Twins
from . import losses, optimizers
from .checkpoints import Checkpoints
from .epoch import Training
from .logs import show_finished, show_round
from .options import require_amp, require_gradient_steps, require_options, require_whole_weights
from .protocol import FIT, Protocol, complete
from .rounds import RESTART, Round, least_difference, warn_if_far_above

Keep = Literal["members", "sigma"]


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
    calibration: Dataset[Any] | None = None,
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
            five times its learning rate. In each round the rate falls to 0 along a cosine. If the training loss of
            the twins ends far above that of the model, a warning says so: then the rate was too large, or the rounds
            too short. By default Adam with a learning rate of 0.005.
        batch_size: that of the training.
        bootstrap: a function that makes a `Bootstrap` from a seed. Default: `lambda seed: Bootstrap(len(dataset),
            seed=seed)`.
        calibration: samples that the model was not trained on, and that chose nothing, for `prediction.set()` or
            `prediction.conformal_interval()` with a guaranteed coverage (`Estimate.conformalize`). Those of `dataset`
            do not serve, because the model has seen them all. Needs a loss that is given by its name.
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
    require_whole_weights("error_bars", model)
    if bootstrap is not None and not callable(bootstrap):
        raise TypeError(
            "bootstrap must be a function of a seed, such as lambda seed: Bootstrap(n, seed=seed), because each round "
            f"draws new samples, not {shown(bootstrap)}."
        )
    if calibration is not None and not isinstance(loss, str):
        raise ValueError(f"calibration needs to know what the model predicts: give the loss as {one_of(TASKS)}.")
    optimizers.require_function(optimizer)
    require_amp(amp)
    if "control" in options:
        raise TypeError("error_bars has no control: use fit(..., control=True), or a loop with ControlledTwins.")
    for name in options.keys() & {field.name for field in fields(Protocol)}:
        raise TypeError(f"error_bars has no option {name!r}: its twins train without noise and resets.")
    if "scheduler" in options:
        raise TypeError("error_bars has no option 'scheduler': in each round the learning rate falls to 0.")
    require_options(error_bars, options)
    require_types(error_bars, locals())
    protocol = complete(Protocol(groups=groups, noise=0.0), FIT, "error_bars")
    seed = seeds.require_seed(seed)

    def begin(number: int, before: Twins | None = None) -> Round:
        own = seeds.derive(seed, "round", number)
        resample = Bootstrap(len(dataset), seed=own) if bootstrap is None else bootstrap(own)  # type: ignore[arg-type]
        if not isinstance(resample, Bootstrap):
            raise TypeError(f"bootstrap must be a function that makes a Bootstrap, but it made {shown(resample)}.")
        if keep == "members" and resample.scale != 1:
            raise ValueError(
                'twins that divide the samples differ more than models of all samples would: give keep="sigma", which '
                "corrects for it, or another kind of Bootstrap."
            )
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
            needs_unseen=False,
            **options,
        )
        if before is not None:
            run.twins.load_state_dict(before.state_dict())
        return Round(run, optimizer, epochs, RESTART * 0.001)

    current, members = begin(1), list[dict[str, Tensor]]()
    require_gradient_steps("error_bars", current.stepper)
    description = {
        "loss": loss if isinstance(loss, str) or checkpoint is None else fingerprints.of_function(loss),
        "model": None if checkpoint is None else fingerprints.of_model(model),
        "weights": None if checkpoint is None else {name: checksum(t) for name, t in held(model).items()},
        "checksum of the bootstrap": checksum(current.run.bootstrap.counts),
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
        current = begin(math.ceil(done / epochs))
        current.load_state_dict(state["round"])
    if not ranks.agree(done):
        raise ValueError(f"the ranks do not find the same checkpoints: {checkpoint} must be one directory for all.")
    writes = ranks.rank_and_size()[0] == 0
    if progress and writes and done == rounds * epochs:
        show_finished(checkpoint, f"{rounds} round{'s' * (rounds > 1)}")
    began, before = time.perf_counter(), done
    while done < rounds * epochs:
        number, epoch = divmod(done, epochs)
        if epoch == 0 and number > 0:
            current = begin(number + 1, current.run.twins)
        train = current.epoch(epoch + 1)
        done += 1
        if done % epochs == 0 and (saved or keep == "members"):  # a checkpoint serves either kind
            twins = current.run.twins
            members.append(Members.of(model, list(twins), twins.partition.parameter_shapes))
        if saved and writes:
            parts = {"members": members, "round": current.state_dict()}
            saved.save(done, {"description": pack(description), **parts})
        if progress and writes:
            left = (time.perf_counter() - began) / (done - before) * (rounds * epochs - done)
            show_round(number + 1, rounds, epoch + 1, epochs, train, left)
    if done > before:  # not after each round: twins may need more than one to learn again what a large rate undid
        _warn_if_worse(current, model)
    estimate = _estimate(model, current.run, members, keep)
    if calibration is not None:
        estimate.conformalize(calibration, batch_size=batch_size)
    return estimate


def _warn_if_worse(current: Round, model: nn.Module) -> None:
    """Compare the twins at the end of a round with the model."""
    [copied] = replicate(model)
    before, after = current.losses(copied.to(current.run.device))
    advice = "lower the learning rate, or give more epochs"
    warn_if_far_above(after, before, least_difference(current.run), advice, stacklevel=3)


def _estimate(model: nn.Module, run: Training, members: list[dict[str, Tensor]], keep: Keep) -> Estimate:
    """The model with its members, or with sigma."""
    [module] = replicate(model, own=run.twins.partition.parameter_shapes)
    estimate = Estimate(module.to(run.device), run.twins.partition.scaled(run.bootstrap.scale))
    estimate.task, estimate.df_per_weight = run.task, run.twins.replicas - 1
    if keep == "members":
        estimate.members = Members.joined(estimate.module, members)
    else:
        estimate.scale = run.matched_scale(estimate)
    return estimate
