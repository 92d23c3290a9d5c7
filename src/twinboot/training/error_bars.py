"""Error bars for a model that is already trained.

for each round:
    two twins of the model, with a part of their weights drawn anew
    two new bootstrap samples
    for each epoch, for each pair of batches:
        losses, gradients, a step; the learning rate falls to 0 over the round
    both twins are kept as members of an ensemble

The spread of the members is the error bar. With `keep="sigma"` the members are not kept: sigma is the distance of the
twins, as in Algorithm 1, times a factor with which draws of the weights spread the predictions of out-of-bag samples
as much as the twins do.

Why the learning rate starts anew in each round: at the end of training it is so small that twins would barely move,
and the spread would be too small. Why it falls to 0: otherwise the members differ by the last steps of the optimizer.
Why a part of the weights is drawn anew: a model that is trained on other data also starts from other random weights.
Twins that start from the model itself stay too close to it. If the twins of the first round end as worse models than
the one they started from, that restart was too strong, and a gentler one is tried.
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
from .._core.checks import one_of, require_number, require_one_of, require_types, require_whole, shown
from .._core.copies import held, replicate
from .._core.states import pack, require_same, unpack
from .._core.tensors import checksum
from ..data.bootstrap import Bootstrap
from ..data.loader import require_map_style
from ..estimate.estimate import Estimate
from ..estimate.members import Members
from ..estimate.prediction import TASKS, Task
from ..groups import Grouping
from . import losses, optimizers
from .checkpoints import Checkpoints
from .epoch import Training
from .logs import show_finished, show_restart, show_round
from .options import require_amp, require_gradient_steps, require_options, require_whole_weights
from .protocol import FIT, Protocol, complete
from .rounds import (
    FACTORS,
    FAR,
    GENTLE,
    PERTURB,
    RESTART,
    Round,
    is_above,
    least_difference,
    perturb_,
    warn_if_far_above,
)

Keep = Literal["members", "sigma"]


def error_bars(
    model: nn.Module,
    dataset: Dataset[Any],
    loss: Task | losses.Loss = "classification",
    *,
    rounds: int = 3,
    epochs: int = 10,
    keep: Keep = "members",
    perturb: float = PERTURB,
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

    Twins of the model train again for a while, each on a bootstrap sample of its own. Where their predictions differ,
    the data leave the prediction open. `estimate.module` is a copy of the model and predicts exactly as the model does.
    `estimate.predict(x)` predicts with error bars.

    Args:
        model: the trained model. It is copied, except for frozen parameters, which the members share.
        dataset, loss: the training data and the loss of the training, as in `fit`. The rows with which a Trainer of
            Hugging Face trained will do, with its collator: `collate_fn=DataCollatorWithPadding(tokenizer)`.
        rounds: how often two twins start from the model, with new bootstrap samples. Each round gives two members.
        epochs: passes over the data in a round: about a third of the epochs of the training. Three rounds then read
            1.26 times the samples that the training read.
        keep: `"members"` keeps the twins of each round: `2 * rounds` times the trainable weights. They mostly say best
            where predictions are uncertain. `"sigma"` keeps one number per group of weights.
        perturb: the share of each weight matrix that is drawn anew before a round, for the part of the spread that is
            due to the random start of a training. Use 0 for a model that was pretrained on other data, such as an
            adapter.
        groups: which weights share one sigma, as in `Twins`.
        optimizer: a function that makes an optimizer from parameters: the one of the training. By default Adam with a
            learning rate of 0.001. In each round the rate starts at five times that, or at 5/3 with `perturb=0`, and
            falls to 0 along a cosine. If the loss at the end of the first round is far above that of the model, the
            round is repeated with a third, then with a ninth of that rate and of `perturb`.
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
    >>> data, adam = torch.utils.data.TensorDataset(x, y), lambda p: torch.optim.Adam(p, 0.02)
    >>> estimate = error_bars(line, data, "regression", epochs=100, optimizer=adam, progress=False)
    >>> bool((estimate(x) == line(x)).all()), len(estimate.members)
    (True, 6)
    >>> 0.005 < estimate.predict(x).std.mean() < 0.05  # about 0.1 / sqrt(50) in the middle, more at the ends
    tensor(True)
    """
    for name, number in {"rounds": rounds, "epochs": epochs, "batch_size": batch_size}.items():
        require_whole(name, number, 1)
    rounds, epochs, batch_size = int(rounds), int(epochs), int(batch_size)
    require_number("perturb", perturb)
    if perturb > 1:
        raise ValueError(f"perturb must lie between 0 and 1, not {perturb}.")
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
    seed, factors = seeds.require_seed(seed), FACTORS if perturb else GENTLE

    def begin(number: int, failed: int) -> Round:
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
        perturb_(run.twins, factors[failed] / RESTART * perturb, own)
        return Round(run, optimizer, epochs, 0.001, factors[failed])

    current, members = begin(1, 0), list[dict[str, Tensor]]()
    require_gradient_steps("error_bars", current.stepper)
    description = {
        "loss": loss if isinstance(loss, str) or checkpoint is None else fingerprints.of_function(loss),
        "model": None if checkpoint is None else fingerprints.of_model(model),
        "weights": None if checkpoint is None else {name: checksum(t) for name, t in held(model).items()},
        "checksum of the bootstrap": checksum(current.run.bootstrap.counts),
        "batch_size": batch_size,
        "epochs": epochs,
        "perturb": float(perturb),
        "amp": str(amp),
        "optimizer": type(current.stepper).__name__,
        "learning rate": current.rates,
        "optimizer's settings": [optimizers.settings(group) for group in current.stepper.param_groups],
    }
    saved = Checkpoints(checkpoint) if checkpoint is not None else None
    state = saved.latest(current.run.device) if saved else None
    done, failed = 0, 0  # epochs, in all rounds; first rounds that were too strong
    if state is not None:
        if missing := {"description", "members", "round", "failed"} - state.keys():
            raise ValueError(f"the checkpoint in {checkpoint} is of no run of error_bars: it has no {min(missing)!r}.")
        require_same(unpack(state["description"]), description, "use the options of then, or another directory")
        failed, members = int(state["failed"]), list(state["members"])
        done = int(state["epoch"]) - failed * epochs
        if done > rounds * epochs:
            raise ValueError(f"{checkpoint} holds a run of more than {rounds} rounds: choose another directory.")
        current = begin(math.ceil(done / epochs), failed)
        current.load_state_dict(state["round"])
    if not ranks.agree(done):
        raise ValueError(f"the ranks do not find the same checkpoints: {checkpoint} must be one directory for all.")
    writes = ranks.rank_and_size()[0] == 0
    if progress and writes and done == rounds * epochs:
        show_finished(checkpoint, f"{rounds} round{'s' * (rounds > 1)}")
    [original] = replicate(model)
    original.to(current.run.device)
    began, before = time.perf_counter(), failed * epochs + done
    while done < rounds * epochs:
        number, epoch = divmod(done, epochs)
        if epoch == 0 and number > 0:
            current = begin(number + 1, failed)
        try_gentler, compared = number == 0 and failed + 1 < len(factors), None
        try:
            train = current.epoch(epoch + 1)
            if done + 1 == epochs:  # the first round tells whether such a restart suits the model
                compared = current.losses(original)
        except FloatingPointError:
            if not try_gentler:
                raise
            compared = (math.inf, 0.0)
        if compared and try_gentler and is_above(*compared, FAR, least_difference(current.run)):
            failed, done = failed + 1, 0
            current = begin(1, failed)
            if progress and writes:
                show_restart(*compared, factors[failed])
            continue
        done += 1
        if compared:
            advice = "lower the learning rate, give more epochs, or perturb=0 for a model that was pretrained"
            warn_if_far_above(*compared, least_difference(current.run), advice, stacklevel=2)
        if done % epochs == 0 and (saved or keep == "members"):  # a checkpoint serves either kind
            twins = current.run.twins
            members.append(Members.of(model, list(twins), twins.partition.parameter_shapes))
        if saved and writes:
            parts = {"members": members, "round": current.state_dict()}
            saved.save(failed * epochs + done, {"description": pack(description), "failed": failed, **parts})
        if progress and writes:
            left = (time.perf_counter() - began) / max(failed * epochs + done - before, 1) * (rounds * epochs - done)
            show_round(number + 1, rounds, epoch + 1, epochs, train, left)
    estimate = _estimate(model, current.run, members, keep)
    if calibration is not None:
        estimate.conformalize(calibration, batch_size=batch_size, **current.run.validation.options)
    return estimate


def _estimate(model: nn.Module, run: Training, members: list[dict[str, Tensor]], keep: Keep) -> Estimate:
    """The model with its members, or with sigma."""
    [module] = replicate(model, own=run.twins.partition.parameter_shapes)
    estimate = Estimate(module.to(run.device), run.twins.partition.scaled(run.bootstrap.scale))
    estimate.task, estimate.df_per_weight = run.task, run.twins.replicas - 1
    if keep == "members":
        estimate.members = Members.joined(estimate.module, members)
    else:
        run.match_spread_(estimate)
    return estimate
