"""The ready-made loop: twins of a model on a dataset, judged after each epoch by the samples that no twin saw.

for each epoch:
    for each pair of batches: a reset if one is due by steps;
        noise, losses, gradients, a step, sigma                           (epoch.py)
    the mean of the twins, averaged over the epochs                       (averaging.py)
    its loss on the unseen samples; the best state is kept                (selection.py)
    a reset if one is due
    a checkpoint                                                          (checkpoints.py)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from .. import resets
from .._core import fingerprints, ranks, seeds
from .._core.checks import require_known, require_number, require_types, require_whole, shown
from .._core.sharding import is_sharded
from .._core.states import pack, require_same, unpack
from ..data.bootstrap import Bootstrap
from ..data.loader import PairedLoader, Resample, require_map_style
from ..estimate.estimate import Estimate
from ..estimate.prediction import Task
from ..groups import Grouping
from ..twins import Twins, require_share
from . import losses, optimizers
from .averaging import POWER, Average
from .checkpoints import Checkpoints
from .epoch import Training
from .logs import open_log, show, show_finished
from .selection import Best

MakeScheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
_OF_TRAINERS = {"accumulate_grad_batches", "gradient_accumulation_steps", "gradient_clip_val", "max_grad_norm"}


@dataclass(frozen=True, eq=False)
class Fit:
    """What training left: the estimate as it was best, how the run went, and who saw which sample.

    `history` maps "epoch", "train" (mean loss of the noisy twins), "unseen" (loss of the mean model on the samples that
    no twin saw), "accuracy" on those (classification only), "sigma_least", "sigma_most" (of the twins), "rate" (of
    learning) and "seconds" to one value for each epoch. Where every sample is seen there is no "unseen" and no
    "accuracy".
    """

    estimate: Estimate
    history: dict[str, list[float]]
    best_epoch: int
    bootstrap: Bootstrap

    def __repr__(self) -> str:
        judged = f", unseen {min(self.history['unseen']):.4g}" if "unseen" in self.history else ""
        return f"Fit(epoch {self.best_epoch} of {len(self.history['epoch'])}{judged})"


def fit(
    model: nn.Module,
    dataset: Dataset[Any],
    loss: Task | losses.Loss = "classification",
    *,
    optimizer: optimizers.Make | None = None,
    scheduler: MakeScheduler | None = None,
    epochs: int = 30,
    batch_size: int = 64,
    groups: str | Grouping = "layer",
    reset: Callable[[int], bool] | None = None,
    mode: resets.Mode = "sample",
    noise: float = 1.0,
    pooled: float = 0.0,
    resample: Resample = "counts",
    average: float = POWER,
    bootstrap: Bootstrap | None = None,
    seed: SupportsIndex = 0,
    device: str | int | torch.device | None = None,
    amp: torch.dtype | None = None,
    patience: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    keep: int = 2,
    progress: bool = True,
    log: str | os.PathLike[str] | None = None,
    callback: Callable[[int, Estimate, Twins], object] | None = None,
    **options: Any,
) -> Fit:
    """Train twins of a model and keep the epoch that predicts best what no twin saw.

    Started by `torchrun`, after `torch.distributed.init_process_group`, the ranks share the twins' batches, and all end
    with the same estimate; the first one writes checkpoints and logs.

    Args:
        model: any module. It is called with all elements of a batch but the last, which is the target.
        dataset: map-style; a sample is (input, target), or (input, ..., target). What it does to samples at random it
            does to those that no twin saw, too: augmentation for training alone belongs into the model, as a layer.
        loss: `"classification"` (logits and labels), `"regression"` (squared error), `"gaussian"` (a mean and the
            logarithm of a variance for each value), or a function of (output, target) with one value per sample, after
            which `predict` has to be told its `task`.
        optimizer: a function that makes one for parameters; by default Adam at 0.001.
        scheduler: a function that makes one for the optimizer; it steps after each epoch. Where the rate falls
            towards 0, take `mode="centered"` or `"mean"`: the last steps are too small to undo a sampling reset.
        epochs: at most so many passes over the twins' samples.
        batch_size: draws of each twin in a step, in each process. With counts a batch has the distinct ones of so many,
            about 63 %, so that an epoch has as many steps as with draws; twins that divide the samples divide it, too.
        groups: which weights share one sigma, as in `Twins`.
        reset: after which epochs the twins are reset, or after which steps, counted over all epochs:
            `resets.steps(resets.growing(10, 1.1, most=80))`. By default after each epoch, as in the paper; where an
            epoch has more than 100 steps, as in this example, with an epoch for the longest interval.
        mode: how: `"sample"` as in the paper, `"mean"` or `"centered"`.
        noise: times sigma, that of the twins, is the noise on the weights in training; 1 in the paper.
        pooled: the share of each twin's gradients that is the mean of all twins'; 0 in the paper. With Adam their mean
            then learns faster, above all with small batches, and the twins part more slowly: sigma, and with it the
            noise, is smaller until they have settled (`twinboot.pool_gradients`).
        resample: `"counts"` or `"draws"`, as in `PairedLoader`: the same objective, the first with less work.
        average: what is judged and kept is a mean over the epochs with weights s^average, as single ones walk with
            each reset (`averaging.py`); `math.inf` takes each epoch by itself, as in the paper.
        bootstrap: who sees which sample, if not the default. With `kind="split"` twins divide the samples, and an epoch
            reads each once. With `cover=True` or `kind="bayesian"` the twins see all
            of them, for a last training when all is chosen: nothing is judged, and the last epoch is what is kept.
        seed: of the bootstrap, the order, all noise, and what the model itself draws, such as dropout.
        device: where to train; by default where the model is.
        amp: a dtype for `torch.autocast`, such as `torch.bfloat16`.
        patience: stop when so many epochs have brought no better one.
        checkpoint: a directory. After each epoch the whole state is written there, and a run that was killed goes on
            from it, bit for bit as if it had not been. The model's code, the loss and all options must be as they were.
            How many samples there are is compared, not what they are.
        keep: so many checkpoints, the last ones.
        progress: a line for each epoch on standard error.
        log: a file.csv with the history, or `"tensorboard"`, or `"tensorboard:DIRECTORY"`.
        callback: called after each epoch with its number, the estimate that was judged, and the twins before a reset.
            That estimate may be the one that is kept in the end, so change a copy of it alone. Where nothing is
            judged, its BatchNorm statistics are the mean of the twins', until the end.
        options: of `PairedLoader`, such as `num_workers`.

    >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    >>> found = fit(nn.Linear(2, 2), data, epochs=20, optimizer=lambda p: torch.optim.Adam(p, 0.05), progress=False)
    >>> found.history["accuracy"][found.best_epoch - 1] > 0.9
    True
    """
    whole = {"epochs": epochs, "batch_size": batch_size, "keep": keep}
    for name, number in (whole | ({} if patience is None else {"patience": patience})).items():
        require_whole(name, int(number) if isinstance(number, np.integer) else number, 1)
    epochs, batch_size, keep = int(epochs), int(batch_size), int(keep)
    _check_options(options)
    if isinstance(model, nn.Module) and any(map(is_sharded, model.parameters())):
        raise ValueError("the model is sharded, but fit wraps twins in DDP: write the loop, and shard Twins there.")
    require_map_style(dataset)
    if bootstrap is not None and not isinstance(bootstrap, Bootstrap):
        raise TypeError(f"bootstrap must be a Bootstrap, such as Bootstrap(len(dataset)), not {shown(bootstrap)}.")
    resets.require_mode(mode)
    require_number("noise", noise)
    require_share(pooled)
    if not any(amp is known for known in (None, torch.bfloat16, torch.float16)):
        raise TypeError(f"amp must be a dtype, torch.bfloat16 or torch.float16, not {shown(amp)}.")
    if scheduler is not None and not callable(scheduler):
        raise TypeError("scheduler must be a function that makes one, such as lambda optimizer: StepLR(optimizer, 10).")
    resets.checked(reset, resets.never())
    optimizers.require_function(optimizer)
    require_types(fit, locals())
    seed = seeds.checked(seed)
    run = Training(
        model,
        dataset,
        loss,
        batch_size=batch_size,
        groups=groups,
        resample=resample,
        bootstrap=bootstrap,
        seed=seed,
        noise=noise,
        pooled=pooled,
        device=device,
        amp=amp,
        **options,
    )
    due = resets.checked(reset, resets.usual(len(run.loader)))
    by_step, by_epoch = resets.steps_and_epochs(due)
    if patience is not None and not run.judges:
        raise ValueError("patience needs samples that no twin sees, and this bootstrap leaves none.")
    stepper = optimizers.made(optimizer, [list(twin.parameters()) for twin in run.twins], rate=0.001)
    if isinstance(stepper, torch.optim.LBFGS):
        raise TypeError("fit takes one gradient for each step, which LBFGS is not made for: write the loop yourself.")
    description: dict[str, Any] = {
        "loss": loss if isinstance(loss, str) or checkpoint is None else fingerprints.of_function(loss),
        "model": None if checkpoint is None else fingerprints.of_model(model),
        "batch_size": batch_size,
        "reset": None if checkpoint is None else resets.described(due),
        "mode": mode,
        "noise": float(noise),
        "pooled": float(pooled),
        "average": str(average),
        "amp": str(amp),
        "optimizer": type(stepper).__name__,
        "learning rate": [float(group["lr"]) for group in stepper.param_groups],
        "optimizer's settings": [optimizers.settings(group) for group in stepper.param_groups],
    }
    schedule = None if scheduler is None else scheduler(stepper)
    if scheduler is not None and not (hasattr(schedule, "step") and hasattr(schedule, "state_dict")):
        raise TypeError(f"scheduler must be a function that makes one, but it made {shown(schedule)}.")
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) and not run.judges:
        raise ValueError("ReduceLROnPlateau needs samples that no twin sees, and this bootstrap leaves none.")
    description["scheduler"] = type(schedule).__name__
    description["scheduler's settings"] = optimizers.settings_of_scheduler(schedule)
    scaler = torch.amp.GradScaler(run.device.type, enabled=amp is torch.float16)
    parts: dict[str, Any] = {"twins": run.twins, "optimizer": stepper, "loader": run.loader, "scaler": scaler}
    parts |= {"scheduler": schedule} if schedule else {}
    best = Best(run, Average(average))
    saved = Checkpoints(checkpoint, keep) if checkpoint is not None else None
    state = saved.latest(run.device) if saved else None
    if state is not None:
        _require_keys(state, {"description"}, checkpoint)
        require_same(unpack(state["description"]), description, "use the options of then, or another directory")
        _require_keys(state, {"history", "best", "average", *parts}, checkpoint)
        if len(state["history"]["epoch"]) > epochs:
            raise ValueError(f"{checkpoint} holds a run of more than {epochs} epochs: choose another directory.")
        _restore(state, parts, best)
    done = len(best.history["epoch"])
    if not ranks.agree(done):
        raise ValueError(f"the ranks do not find the same checkpoints: {checkpoint} must be one directory for all.")
    writes = ranks.share()[0] == 0  # all ranks have the same to write
    with open_log(log if writes else None, best.history) as written:
        for epoch in range(done + 1, epochs + 1):
            if patience is not None and epoch - 1 - best.epoch >= patience:
                break
            began = time.perf_counter()
            train = run.epoch(epoch, stepper, scaler, by_step, mode)
            estimate = best.look(epoch, train, float(stepper.param_groups[0]["lr"]), began)
            if callback:
                callback(epoch, estimate, run.twins)
            if resets.is_due(by_epoch, epoch):
                run.twins.reset(mode)
            if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                schedule.step(best.history["unseen"][-1])
            elif schedule:
                schedule.step()
            if saved and writes:
                states = {name: part.state_dict() for name, part in parts.items()}
                saved.save(epoch, {"description": pack(description), **states, **best.state_dict()})
            written.add(best.last())
            if progress and writes:
                show(best.history, epochs)
    if progress and writes and done and done == len(best.history["epoch"]):
        show_finished(checkpoint, done, best.epoch)
    run.give_statistics(best.estimate)
    return Fit(best.estimate, best.history, best.epoch, run.bootstrap)


def _check_options(options: dict[str, Any]) -> None:
    for name in options.keys() & {"lr", "learning_rate"}:
        advice = f"give optimizer=lambda p: torch.optim.Adam(p, lr={shown(options[name])})"
        raise TypeError(f"fit has no option {name!r}: {advice}.")
    for name in options.keys() & {"share", "twin"}:  # of PairedLoader, for loops of one's own
        raise TypeError(f"fit has no option {name!r}: it trains all twins on every rank, and divides batches itself.")
    for name in options.keys() & _OF_TRAINERS:
        raise TypeError(f"fit has no option {name!r}: for accumulation and clipping write the loop, with Twins.")
    require_known(options, fit, PairedLoader, DataLoader)
    require_types(DataLoader.__init__, options)


def _require_keys(state: dict[str, Any], keys: set[str], checkpoint: object) -> None:
    if missing := keys - state.keys():
        raise ValueError(f"the checkpoint in {checkpoint} is of no run of fit: it has no {min(missing)!r}.")


def _restore(state: dict[str, Any], parts: dict[str, Any], best: Best) -> None:
    twins: Twins = parts["twins"]
    for name, p in twins.named_parameters():  # frozen ones are the user's own, and not to be written to
        if not p.requires_grad and not torch.equal(p, state["twins"].get(name, p.new_empty(0)).to(p)):
            raise ValueError(f"the checkpoint does not fit: the frozen parameter {name!r} differs from that of then.")
    for name, part in parts.items():
        part.load_state_dict(state[name])
    best.load_state_dict(state)
