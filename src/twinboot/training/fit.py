"""The complete training loop: twins of a model on a dataset, validated by the out-of-bag samples.

for each epoch:
    for each pair of batches: a reset if one is due by steps;
        noise, losses, gradients, a step, sigma                           (epoch.py)
    the mean of the twins, averaged over the epochs                       (selection.py)
    its loss on the out-of-bag samples; the best state is kept            (selection.py)
    a reset if one is due
    a checkpoint                                                          (checkpoints.py)
twins settle around the best state, for the size of the error bars        (rounds.py)
the scores of the calibration samples, if some were set aside             (estimate/conformal.py)

What makes up the method (groups, resets, noise, ...) is a `Protocol`     (protocol.py)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import nn
from torch.utils.data import Dataset

from .. import resets
from .._core import fingerprints, ranks, seeds
from .._core.checks import one_of, require_number, require_types, require_whole, shown
from .._core.states import pack, require_same, unpack
from .._core.tensors import checksum
from ..data.bootstrap import Bootstrap
from ..data.loader import require_map_style
from ..estimate.estimate import Estimate
from ..estimate.prediction import TASKS, Task
from ..twins import Twins
from . import losses, optimizers
from .checkpoints import Checkpoints
from .epoch import Training
from .logs import open_log, show, show_finished
from .options import require_amp, require_gradient_steps, require_options, require_whole_weights
from .protocol import FIT, Protocol, complete, refuse_settings
from .rounds import settle
from .selection import Average, Selection

MakeScheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass(frozen=True, eq=False)
class Fit:
    """The result of `fit`: the best estimate, the history of the run, and the bootstrap.

    `history` has one value per epoch for each of "epoch", "train" (mean loss of the noisy twins), "unseen" (loss of the
    mean model on the out-of-bag samples), "accuracy" (on those; classification only), "sigma_least" and "sigma_most"
    (of the twins), "lr" and "seconds". "unseen" and "accuracy" are left out where the twins see every sample. With
    `control=True` there is a column "data_share/GROUP" for each group of weights: the share of its sigma^2 that is due
    to the data, at the end of the epoch.
    """

    estimate: Estimate
    history: dict[str, list[float]]
    best_epoch: int
    bootstrap: Bootstrap

    def __repr__(self) -> str:
        loss = f", unseen {min(self.history['unseen']):.4g}" if "unseen" in self.history else ""
        return f"Fit(epoch {self.best_epoch} of {len(self.history['epoch'])}{loss})"


def fit(
    model: nn.Module,
    dataset: Dataset[Any],
    loss: Task | losses.Loss = "classification",
    *,
    protocol: Protocol | None = None,
    optimizer: optimizers.Make | None = None,
    scheduler: MakeScheduler | None = None,
    epochs: int = 30,
    batch_size: int = 64,
    bootstrap: Bootstrap | None = None,
    spread: float = 0.3,
    calibration: float = 0.0,
    seed: SupportsIndex = 0,
    device: str | int | torch.device | None = None,
    amp: torch.dtype | None = None,
    patience: int | None = None,
    control: bool = False,
    stacked: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    log: str | os.PathLike[str] | None = None,
    progress: bool = True,
    callback: Callable[[int, Estimate, Twins], object] | None = None,
    **options: Any,
) -> Fit:
    """Train twins of a model, and keep the epoch that predicts the out-of-bag samples best.

    Under `torchrun`, after `torch.distributed.init_process_group`, the ranks share the twins' batches, and all return
    the same estimate. The first rank writes checkpoints and logs.

    Args:
        model: any module. It is called with all elements of a batch but the last, which is the target.
        dataset: map-style; a sample is (input, target) or (input, ..., target), or a mapping with the target under
            "labels" and the model's arguments by their names. Random transforms in the dataset apply to the out-of-bag
            samples, too: put augmentation for training into the model, as a layer.
        loss: `"classification"` (logits and labels), `"regression"` (squared error), `"gaussian"` (a mean and a
            log-variance for each value), or a function of (output, target) that returns one value per sample; then
            `predict` needs a `task`.
        protocol: the settings of the method: groups, resets, noise, pooled gradients, resampling and weight averaging.
            See `Protocol`.
        optimizer: a function that makes an optimizer from parameters; by default Adam with a learning rate of 0.001.
        scheduler: a function that makes a scheduler from the optimizer; it steps after each epoch. If the learning rate
            falls to 0, use `Protocol(mode="centered")` or `"mean"`: the last steps are too small to undo a sampling
            reset.
        epochs: the maximum number of epochs.
        batch_size: the batch size of the plain training that the twins replace, in each process, as in `PairedLoader`.
        bootstrap: which twin sees which sample, by default `Bootstrap(len(dataset), seed=seed)`. With `kind="split"`
            the twins divide the samples, and an epoch reads each sample once. With `cover=True` or `kind="bayesian"`
            the twins see every sample: there is no validation, and the last epoch is kept.
        spread: after training, twins settle around the estimate for this share of `epochs`, with a learning rate that
            starts at five times that of the optimizer and falls to 0. The estimate gets their sigma, and a `scale` with
            which draws spread the predictions of out-of-bag samples as much as these twins do. The mean model does not
            change. With 0, draws have the sigma of the training, which is mostly the optimizer's (docs/sigma.md).
        calibration: the share of the out-of-bag samples to set aside, such as 0.5, for `prediction.set()` or
            `prediction.conformal_interval()` with a guaranteed coverage. They do not choose the epoch. With a bootstrap
            of your own, give it to that: `Bootstrap(n, calibration=0.5)`. Needs a loss that is given by its name.
        seed: seeds the bootstrap, the order of the samples, all noise, and random layers of the model such as dropout.
        device: where to train; by default where the model is.
        amp: a dtype for `torch.autocast`, such as `torch.bfloat16`.
        patience: stop after this many epochs without a better one.
        control: train a third copy, on the first twin's sample in another order, to see which share of sigma^2 is due
            to the data, group by group (`ControlledTwins`). The twins train as they do without it. Each step costs
            half as much again.
        stacked: hold the weights of both twins in one stack, as `Twins(stacked=True)` does. A chain of linear layers
            and elementwise functions then trains in about 0.85 of the time. For optimizers that treat each weight
            alone, such as Adam and SGD, and in one process.
        checkpoint: a directory. The complete state is written there after each epoch, and the last two are kept. A run
            that was stopped resumes from it, bit for bit. The code of the model, the loss and all options but `epochs`
            and `spread` must be unchanged. Of the dataset only the number of samples is compared.
        log: write the history to file.csv, to `"tensorboard"` or to `"tensorboard:DIRECTORY"`.
        progress: print a line per epoch to standard error.
        callback: called after each epoch with its number, the validated estimate, and the twins before a reset. Do not
            change that estimate, which may be the one that is returned: copy it. Without validation its BatchNorm
            statistics are the mean of the twins' until the end of the run.
        options: passed to `PairedLoader`, such as `num_workers`.

    >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    >>> found = fit(nn.Linear(2, 2), data, epochs=20, optimizer=lambda p: torch.optim.Adam(p, 0.05), progress=False)
    >>> found.history["accuracy"][found.best_epoch - 1] > 0.9
    True
    """
    for name, number in {"epochs": epochs, "batch_size": batch_size, "patience": patience}.items():
        if name != "patience" or number is not None:
            require_whole(name, number, 1)
    epochs, batch_size = int(epochs), int(batch_size)
    refuse_settings(options, "fit")
    require_options(fit, options)
    require_whole_weights("fit", model)
    require_map_style(dataset)
    if bootstrap is not None and not isinstance(bootstrap, Bootstrap):
        raise TypeError(f"bootstrap must be a Bootstrap, such as Bootstrap(len(dataset)), not {shown(bootstrap)}.")
    bootstrap = _with_calibration(bootstrap, calibration, dataset, loss, seed)
    protocol = complete(protocol, FIT, "fit")
    require_amp(amp)
    if scheduler is not None and not callable(scheduler):
        raise TypeError("scheduler must be a function that makes one, such as lambda optimizer: StepLR(optimizer, 10).")
    optimizers.require_function(optimizer)
    require_types(fit, locals())
    seed = seeds.require_seed(seed)
    require_number("spread", spread)
    run = Training(
        model,
        dataset,
        loss,
        protocol=protocol,
        batch_size=batch_size,
        bootstrap=bootstrap,
        seed=seed,
        device=device,
        amp=amp,
        control=control,
        stacked=stacked,
        **options,
    )
    reserved = run.bootstrap.calibration
    if len(reserved):  # before the training, in case that the samples are of no use
        run.conformalize(run.estimate(), reserved[:1], samples=0)
    due = resets.usual(len(run.loader)) if protocol.reset is None else protocol.reset
    by_step, by_epoch = resets.steps_and_epochs(due)
    if patience is not None and not run.validates:
        raise ValueError("patience needs samples that no twin sees, and this bootstrap leaves none.")
    stepper = optimizers.make_optimizer(optimizer, run.parameters(), lr=0.001)
    require_gradient_steps("fit", stepper)
    if stacked:
        optimizers.require_entry_by_entry(stepper)
    description: dict[str, Any] = {
        "loss": loss if isinstance(loss, str) or checkpoint is None else fingerprints.of_function(loss),
        "model": None if checkpoint is None else fingerprints.of_model(model),
        "batch_size": batch_size,
        "reset": None if checkpoint is None else resets.described(due),
        "mode": protocol.mode,
        "noise": float(protocol.noise),
        "local": protocol.local,
        "pooled": float(protocol.pooled),
        "average": str(float(protocol.average)),
        "calibration": checksum(reserved),
        "amp": str(amp),
        "control": control,
        "stacked": stacked,
        "optimizer": type(stepper).__name__,
        "learning rate": [float(group["lr"]) for group in stepper.param_groups],
        "optimizer's settings": [optimizers.settings(group) for group in stepper.param_groups],
    }
    schedule = None if scheduler is None else scheduler(stepper)
    if scheduler is not None and not (hasattr(schedule, "step") and hasattr(schedule, "state_dict")):
        raise TypeError(f"scheduler must be a function that makes one, but it made {shown(schedule)}.")
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) and not run.validates:
        raise ValueError("ReduceLROnPlateau needs samples that no twin sees, and this bootstrap leaves none.")
    description["scheduler"] = type(schedule).__name__
    description["scheduler's settings"] = optimizers.settings_of_scheduler(schedule)
    scaler = torch.amp.GradScaler(run.device.type, enabled=amp is torch.float16)
    parts: dict[str, Any] = {"twins": run.twins, "optimizer": stepper, "loader": run.loader, "scaler": scaler}
    parts |= {"scheduler": schedule} if schedule else {}
    best = Selection(run, Average(protocol.average))
    saved = Checkpoints(checkpoint) if checkpoint is not None else None
    state = saved.latest(run.device) if saved else None
    if state is not None:
        _require_keys(state, {"description"}, checkpoint)
        before = {"control": False, "local": False, "stacked": False}  # earlier versions had none of these
        then = {**before, **unpack(state["description"])}
        require_same(then, description, "use the options of then, or another directory")
        _require_keys(state, {"history", "best", "average", *parts}, checkpoint)
        if len(state["history"]["epoch"]) > epochs:
            raise ValueError(f"{checkpoint} holds a run of more than {epochs} epochs: choose another directory.")
        _restore(state, parts, best)
    done = len(best.history["epoch"])
    if not ranks.agree(done):
        raise ValueError(f"the ranks do not find the same checkpoints: {checkpoint} must be one directory for all.")
    writes = ranks.rank_and_size()[0] == 0  # all ranks have the same to write

    def save(epoch: int, **more: Any) -> None:
        if saved and writes:
            states = {name: part.state_dict() for name, part in parts.items()}
            saved.save(epoch, {"description": pack(description), **states, **best.state_dict(), **more})

    with open_log(log if writes else None, best.history) as written:
        for epoch in range(done + 1, epochs + 1):
            if patience is not None and epoch - 1 - best.epoch >= patience:
                break
            began = time.perf_counter()
            train = run.epoch(epoch, stepper, scaler, by_step)
            estimate = best.look(epoch, train, float(stepper.param_groups[0]["lr"]), began)
            if callback:
                callback(epoch, estimate, run.twins)
            if resets.is_due(by_epoch, epoch):
                run.twins.reset(protocol.mode)
            if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                schedule.step(best.history["unseen"][-1])
            elif schedule:
                schedule.step()
            save(epoch)
            written.add(best.last())
            if progress and writes:
                show(best.history, epochs)
    trained = len(best.history["epoch"])
    if progress and writes and done and done == trained:
        show_finished(checkpoint, f"{done} epochs (best: {best.epoch})")
    run.update_batchnorm(best.estimate)
    if spread:
        length = max(1, round(spread * epochs))
        settled = state.get("settled") if state is not None and done == trained else None
        if settled is None or settled.get("epochs") != length:
            settled = settle(run, best.estimate, optimizer, length, lr=0.001) | {"epochs": length}
            save(trained, settled=settled)  # beside the best state, from which a longer run goes on
        best.estimate.partition.sigma.copy_(settled["sigma"])
        best.estimate.scale = float(settled["scale"])
        best.estimate.centered = bool(settled.get("centered", False))  # not in early checkpoints
    if len(reserved):
        run.conformalize(best.estimate, reserved)
    return Fit(best.estimate, best.history, best.epoch, run.bootstrap)


def _with_calibration(
    bootstrap: Bootstrap | None, share: float, dataset: Any, loss: object, seed: SupportsIndex
) -> Bootstrap | None:
    """The bootstrap that sets samples aside, if `fit` has to make one."""
    if share and bootstrap is not None:
        raise ValueError(f"give the calibration to the bootstrap: Bootstrap(n, calibration={shown(share)}).")
    if share:
        bootstrap = Bootstrap(len(dataset), seed=seed, calibration=share)
    if bootstrap is not None and len(bootstrap.calibration) and not isinstance(loss, str):
        raise ValueError(f"calibration needs to know what the model predicts: give the loss as {one_of(TASKS)}.")
    return bootstrap


def _require_keys(state: dict[str, Any], keys: set[str], checkpoint: object) -> None:
    if missing := keys - state.keys():
        raise ValueError(f"the checkpoint in {checkpoint} is of no run of fit: it has no {min(missing)!r}.")


def _restore(state: dict[str, Any], parts: dict[str, Any], best: Selection) -> None:
    twins: Twins = parts["twins"]
    for name, p in twins.named_parameters():  # frozen ones are the user's own, and not to be written to
        if not p.requires_grad and not torch.equal(p, state["twins"].get(name, p.new_empty(0)).to(p)):
            raise ValueError(f"the checkpoint does not fit: the frozen parameter {name!r} differs from that of then.")
    for name, part in parts.items():
        part.load_state_dict(state[name])
    best.load_state_dict(state)
