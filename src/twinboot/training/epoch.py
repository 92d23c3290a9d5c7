"""An epoch of `fit`: the twins train on their samples, and the mean model is validated on the out-of-bag ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Subset

from .._core import ranks
from .._core.batches import finite_check_is_due, moved, parted, usable
from .._core.copies import call
from .._core.seeds import alone, may_draw, own_randomness
from ..data.bootstrap import Bootstrap
from ..data.loader import PairedLoader, without_weight
from ..estimate import spread
from ..estimate.estimate import Estimate
from ..estimate.prediction import Task
from ..resets import Schedule, is_due, never
from ..twins import Twins, pool_gradients
from . import losses
from .control import ControlledTwins
from .protocol import Protocol
from .validation import ENOUGH, STATISTICS, Validation

NOT_FINITE = (
    "the {} not finite in epoch {}, step {}: look for bad samples, or lower the learning rate. Checkpoints are of the "
    "epochs before: another rate needs another directory."
)


class Training:
    """The twins, their data, and one epoch of training."""

    def __init__(
        self,
        model: nn.Module,
        dataset: Any,
        loss: Task | losses.Loss,
        *,
        protocol: Protocol,
        batch_size: int,
        bootstrap: Bootstrap | None,
        seed: int,
        device: str | int | torch.device | None = None,
        amp: torch.dtype | None = None,
        control: bool = False,
        stacked: bool = False,
        needs_unseen: bool = True,
        **options: Any,
    ) -> None:
        self.named_loss, self.options = loss, options
        self.loss, self.classifies = losses.loss_function(loss), loss == "classification"
        self.task: Task | None = loss if isinstance(loss, str) else None
        several = ranks.rank_and_size()[1] > 1
        if stacked and control:
            raise ValueError("stacked twins have no control: leave out control or stacked.")
        if stacked and several:
            raise ValueError("stacked twins train in one process, and not under torchrun: leave out stacked.")
        replicas = bootstrap.replicas if bootstrap else 2
        if control:
            self.twins: Twins = ControlledTwins(model, replicas, protocol.groups, seed)
        else:
            self.twins = Twins(model, replicas, protocol.groups, seed, stacked=stacked)
        first = next(self.twins.parameters())
        self.device = usable(first.device if device is None else device)
        self.twins.to(self.device)
        # A loss of the user's own may draw, too.
        self.draws = may_draw(model) or not isinstance(loss, str)
        # Under torchrun PyTorch's own wrapper gives all ranks the mean of their gradients. Stacked twins run together.
        twins = () if stacked else self.twins
        self.runners = [DistributedDataParallel(twin) if several else twin for twin in twins]
        self.dataset, self.seed, self.amp, self.batch_size = dataset, seed, amp, batch_size
        self.protocol = protocol
        self.bootstrap = bootstrap or Bootstrap(len(dataset), seed=seed)
        self.validation = Validation(dataset, self.bootstrap, batch_size, seed, options)
        self.loader = PairedLoader(
            dataset, self.bootstrap, batch_size, protocol.resample, seed=seed, control=control, **options
        )
        self.validates = len(self.bootstrap.unseen) > 0
        if needs_unseen and not self.validates and not (self.bootstrap.cover or self.bootstrap.kind == "bayesian"):
            raise ValueError(
                "every sample is seen by some twin, so none is out-of-bag for validation: add data, or, to keep the "
                "last epoch without validation, give a Bootstrap with cover=True."
            )

    def around(self, model: nn.Module, seed: int) -> Training:
        """The same training, without noise, of twins that start from another model."""
        return Training(
            model,
            self.dataset,
            self.named_loss,
            protocol=replace(self.protocol, noise=0.0, pooled=0.0),
            batch_size=self.batch_size,
            bootstrap=self.bootstrap,
            seed=seed,
            device=self.device,
            amp=self.amp,
            stacked=self.twins.stacked,
            **self.options,
        )

    def parameters(self) -> list[list[nn.Parameter]]:
        """Those of each twin; of stacked twins, which share theirs, in one list."""
        return [list(model.parameters()) for model in ([self.twins] if self.twins.stacked else self.twins)]

    def models(self) -> list[nn.Module]:
        """The twins, or copies of stacked ones."""
        return self.twins.unstack() if self.twins.stacked else list(self.twins)

    def epoch(
        self,
        epoch: int,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        due: Schedule,
        each_step: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> float:
        """Train for one epoch; returns the mean loss of the noisy twins. `due` counts steps. A reset that is due waits
        for the next step, so that validation after the epoch sees the mean that was trained. `each_step` is a scheduler
        that steps with the optimizer."""
        self.twins.train()
        total, number = torch.zeros((), device=self.device), 0
        before = (epoch - 1) * len(self.loader)
        noise = self.protocol.noise
        # Without noise and resets, no step of the epoch uses sigma.
        each_sigma = noise > 0 or not isinstance(due, never)
        for step, pair in enumerate(self.loader, start=1):
            if before + step > 1 and is_due(due, before + step - 1):
                self.twins.reset(self.protocol.mode)
            optimizer.zero_grad()
            with (
                own_randomness(self.device, self.seed, epoch, step, *ranks.own()) if self.draws else alone(),
                self.twins.sampled(noise, local=self.protocol.local) if noise else nullcontext(),
            ):
                for place, value in enumerate(self._losses(pair)):
                    scaler.scale(value).backward()
                    if place < self.twins.replicas:  # not of the control
                        total = total + value.detach()
            number += self.twins.replicas
            if finite_check_is_due(self.device, step):
                self._require_finite(total, epoch, step)
            pool_gradients(self.twins, self.protocol.pooled)
            with alone():  # PyTorch goes through the hooks of all optimizers, of which `sampled` adds and removes one
                scaler.step(optimizer)
            scaler.update()
            if each_step is not None:
                each_step.step()
            try:
                if each_sigma or step == len(self.loader):
                    self.twins.update()
            except FloatingPointError:
                raise FloatingPointError(NOT_FINITE.format("weights are", epoch, self._about(step))) from None
        self._require_finite(total, epoch, step)
        return ranks.mean(total).item() / number

    def _require_finite(self, total: Tensor, epoch: int, step: int) -> None:
        if not math.isfinite(total.item()):
            raise FloatingPointError(NOT_FINITE.format("loss is", epoch, self._about(step)))

    def _about(self, step: int) -> str:
        return str(step) if self.device.type == "cpu" else f"{step} or one of the 99 before it"

    def _losses(self, pair: Sequence[Any]) -> Iterator[Tensor]:
        """The loss of each twin, one after another. Stacked twins have one pass, and give the sum of theirs."""
        parts = ((*parted(batch), weight) for batch, weight in map(self._weighted, pair))
        found = (moved(part, self.device) for part in parts)
        if not self.twins.stacked:
            for twin, (inputs, target, weight) in zip(self.runners, found, strict=True):
                with self._autocast():
                    value = self._loss(call(twin, inputs), target, weight)
                yield value
            return
        inputs, targets, weights = zip(*found, strict=True)
        with self._autocast():
            outputs = self.twins(*(x[0] if isinstance(x, tuple) and len(x) == 1 else x for x in inputs))
            value = torch.stack([self._loss(*own) for own in zip(outputs, targets, weights, strict=True)]).sum()
        yield value

    def _weighted(self, batch: Any) -> tuple[Any, Tensor | None]:
        return without_weight(batch) if self.loader.resample == "counts" else (batch, None)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.amp is None and not torch.is_autocast_enabled(self.device.type):
            return nullcontext()  # the other one takes as long as a small layer
        return torch.autocast(self.device.type, self.amp, enabled=self.amp is not None)

    def _loss(self, output: Any, target: Tensor, weight: Tensor | None) -> Tensor:
        values = self.loss(_values(output), target)
        return values.mean() if weight is None else (weight * values).mean()

    def estimate(self) -> Estimate:
        """The estimate of the twins, with its task."""
        estimate = self.twins.estimate(scale=self.bootstrap.scale)
        estimate.task = self.task
        return estimate

    @torch.no_grad()
    def validate(self, estimate: Estimate) -> tuple[float, float]:
        """The out-of-bag loss and accuracy of the mean model, with its own BatchNorm statistics."""
        self.update_batchnorm(estimate, STATISTICS)
        values, right = zip(*self.validation.unseen(estimate, self._loss_and_hit, self.device), strict=True)
        # On the CPU, as some devices have no float64.
        accuracy = torch.cat(right).cpu().double().mean().item() if self.classifies else math.nan
        return torch.cat(values).cpu().double().mean().item(), accuracy

    def _loss_and_hit(self, module: nn.Module, batch: Any, number: int) -> tuple[Tensor, Tensor]:
        """For each sample its loss, and whether the predicted class is right."""
        inputs, target = moved(parted(batch), self.device)
        output = _values(call(module, inputs))
        values = self.loss(output, target)
        return values, (output.argmax(1) == target).flatten() if self.classifies else values

    def match_spread_(self, estimate: Estimate) -> None:
        """Let the estimate's draws spread the predictions of out-of-bag samples as much as the twins do
        (estimate/spread.py)."""
        batches = [moved(parted(batch)[0], self.device) for batch in self.validation.spread_batches()]
        spread.match_spread_(estimate, self.models(), batches, self.seed, self.bootstrap.scale)

    def loss_of(self, models: Iterable[nn.Module]) -> float:
        """The mean loss of models on the twins' own samples, one model for each twin, in evaluation mode."""

        def run(model: nn.Module, batch: Any, number: int) -> tuple[float, int]:
            values = self._loss_and_hit(model, batch, number)[0]
            return values.mean().item(), len(values)

        return self.validation.loss_in_training(models, run, self.device)

    def target_variance(self) -> float:
        """The variance of the targets of some samples."""
        targets = torch.cat([parted(batch)[1].double() for batch in self.validation.spread_batches()])
        return targets.var(0, correction=0).mean().item()

    def conformalize(self, estimate: Estimate, calibration: Tensor, samples: int | None = None) -> None:
        """Calibrate prediction sets or intervals by some samples. The noise of values comes from the other out-of-bag
        samples, so that it does not depend on these."""
        noise, options = None, {"samples": samples, "batch_size": self.batch_size, **self.validation.options}
        with own_randomness(self.device, self.seed, "calibration"):
            if self.task == "regression":
                others = Subset(self.dataset, self.bootstrap.unseen[:ENOUGH].tolist())
                noise = estimate.noise(others, **options) or None  # 0 if all errors are 0
            estimate.conformalize(Subset(self.dataset, calibration.tolist()), noise=noise, **options)

    def update_batchnorm(self, estimate: Estimate, at_most: int | None = None) -> None:
        """Compute the mean model's own BatchNorm statistics, from all training samples or from at most this many."""
        with own_randomness(self.device, self.seed, "statistics"):
            # It changes nothing else that moves with a pass in training, as the vectors of spectral_norm do.
            estimate.update_batchnorm(self.validation.seen_batches(at_most), lambda batch: parted(batch)[0])


def _values(output: Any) -> Any:
    return getattr(output, "logits", output)  # of a Hugging Face model
