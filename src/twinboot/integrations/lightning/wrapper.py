"""What Lightning asks of a module and the user's own has to answer, with the weights of whichever copy is due."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric

from ...data.loader import WEIGHT
from ...training.validation import Step
from ...twins import Twins
from . import limits
from .lending import Passed, imitate, lend, lent, optimizers_in, unite

# What the wrapper has nothing to add to. Passed on if the user's module has it, so that Lightning finds it missing if
# that has not.
HOOKS = [
    *("prepare_data", "on_fit_start", "on_train_start", "on_train_end", "on_train_epoch_start", "teardown"),
    *("lr_scheduler_step", "validation_step", "test_step", "predict_step"),
    *("test_dataloader", "predict_dataloader", "on_test_epoch_end", "on_test_end"),
    *("on_predict_epoch_end", "on_predict_end"),
    *("on_validation_model_train", "on_validation_model_zero_grad", "on_test_model_train"),
    *(
        f"on_{stage}_{what}"
        for stage in ("validation", "test", "predict")
        for what in ("start", "epoch_start", "batch_start", "batch_end")
    ),
]
# The same, for what looks at gradients or changes them: called for each twin in turn.
GRADIENT_HOOKS = ["on_before_zero_grad", "optimizer_zero_grad", "on_after_backward", "on_before_optimizer_step"]


Loss = Callable[[Any, Any], Tensor]  # of a module and a batch, with one value for each sample
Heard = dict[str, tuple[list[Any], dict[str, Any]]]  # name -> what the twins logged, and how


class Wrapper(pl.LightningModule):
    """Twins of a LightningModule, and that module itself, which is lent their weights."""

    module: Any

    def __init__(self, module: Any, twins: Twins, loss: Loss | None) -> None:
        super().__init__()
        self.twins, self.loss = twins, loss
        self.module = module  # after the twins: what it borrows is listed by the names that it has there
        self._heard: Heard | None = None
        self._log_hyperparams = module._log_hyperparams
        module.log = self._log_for_module
        for hook in HOOKS:
            if is_overridden(hook, module):
                setattr(self, hook, Passed(self, hook))
        for hook in GRADIENT_HOOKS:
            if is_overridden(hook, module):
                setattr(self, hook, _PassedToEach(self, hook))
        lend(module, twins[0])

    def each_twin(self, pair: Any) -> Iterator[Any]:
        """The part of a pair of batches that belongs to each twin; at its turn the module has that twin's weights."""
        for twin, part in zip(self.twins, pair, strict=True):
            with lent(self.module, twin):
                yield part
        lend(self.module, self.twins[0])

    # Steps of training

    def step(self, module: Any, batch: Any, batch_idx: int, weighted: bool = False) -> dict[str, Any] | None:
        """What a module's own `training_step` gives for a batch, or None where it leaves the batch out."""
        if self.loss is not None:
            weight, batch = _without_weight(batch) if weighted else (1.0, batch)
            output: Any = (weight * self.loss(module, batch)).mean()
        elif is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
            output = module.training_step(batch, batch_idx)
        else:
            output = module.training_step(batch)
        return None if output is None else dict(output) if isinstance(output, Mapping) else {"loss": output}

    @contextmanager
    def shown(self, mean: Any) -> Iterator[Step[tuple[float, int]]]:
        """A step of training without gradients or logs, for another module than the one that trains, so that metrics
        and whatever else that one counts are left alone."""
        trainer = self._trainer
        imitate(mean, self.module, (self, trainer), ("log",))  # such as what a hook sets each epoch and a step reads
        mean.trainer, mean.log = trainer, _nothing

        def step(module: Any, batch: Any, number: int) -> tuple[float, int]:
            batch = batch if trainer is None else trainer.precision_plugin.convert_input(batch)
            batch = module.on_before_batch_transfer(batch, 0)
            batch = module.transfer_batch_to_device(batch, self.device, 0)
            batch = module.on_after_batch_transfer(batch, 0)
            with torch.no_grad(), nullcontext() if trainer is None else trainer.precision_plugin.forward_context():
                output = self.step(module, batch, number)
            return (0.0, 0) if output is None else (output["loss"].item(), extract_batch_size(batch))

        try:
            yield step
        finally:
            del mean.log
            mean.trainer = None
            imitate(mean, self.module, (self, trainer), ("log",))  # without what the steps counted

    # Logs: what the module logs in a step of training is the mean over the twins, once all of them have spoken

    @contextmanager
    def logging_means(self) -> Iterator[None]:
        heard: Heard = {}
        self._heard = heard
        try:
            yield
        finally:
            self._heard = None
        for name, (values, options) in heard.items():
            spoken = [torch.as_tensor(v, dtype=torch.get_default_dtype(), device=self.device) for v in values]
            self.log(name, torch.stack(spoken).mean(), **options)

    def _log_for_module(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if self._heard is None or isinstance(value, Metric):  # which adds up over the twins by itself
            self.log(name, value, *args, **options)
            return
        options |= dict(zip(("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx"), args, strict=False))
        values, _ = self._heard.setdefault(name, ([], options))
        values.append(value.detach() if isinstance(value, Tensor) else value)

    # Optimizers

    def configure_optimizers(self) -> Any:
        made = [self.module.configure_optimizers() for _ in self.each_twin(self.twins)]
        unite(made)
        limits.require_weights_in(optimizers_in(made[0]), self.twins)
        return made[0]

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        if gradient_clip_val is not None or is_overridden("configure_gradient_clipping", self.module):
            for twin in self.each_twin(self.twins):
                part = _Part(optimizer, twin)
                self.module.configure_gradient_clipping(part, gradient_clip_val, gradient_clip_algorithm)

    # Batches: in training there is one for each twin

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._each(batch, lambda part: self.module.on_before_batch_transfer(part, dataloader_idx))

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return self._each(batch, lambda part: self.module.transfer_batch_to_device(part, device, dataloader_idx))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._each(batch, lambda part: self.module.on_after_batch_transfer(part, dataloader_idx))

    def _each(self, batch: Any, function: Callable[[Any], Any]) -> Any:
        return tuple(map(function, batch)) if self.trainer.training else function(batch)

    # Names and states

    @property
    def hparams(self) -> Any:
        return self.module.hparams

    @property
    def hparams_initial(self) -> Any:
        return self.module.hparams_initial

    @property
    def _hparams_name(self) -> Any:
        return self.module._hparams_name

    def setup(self, stage: str) -> None:
        lend(self.module, self.twins[0])
        self.module.setup(stage)
        limits.require_weights_of(self.twins[0], self.module)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.twins.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        answer = self.twins.load_state_dict(state_dict, strict, assign)
        lend(self.module, self.twins[0])
        return answer

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        lend(self.module, self.twins[0])
        return self


class _PassedToEach(Passed):
    """A hook that is called for each twin, with its weights in the module and its part of the optimizer."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        with self.owner.logging_means():
            for twin in self.owner.each_twin(self.owner.twins):
                parts = (_Part(arg, twin) if isinstance(arg, torch.optim.Optimizer) else arg for arg in args)
                self.__wrapped__(*parts, **kwargs)


class _Part:
    """Of an optimizer the parameters of one twin, for clipping and for hooks; the rest is that of the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, twin: nn.Module) -> None:
        self._optimizer = optimizer
        own = set(map(id, twin.parameters()))
        self.param_groups = [
            {**group, "params": [p for p in group["params"] if id(p) in own]} for group in optimizer.param_groups
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What the mean logs where it is only looked at."""


def _without_weight(batch: Any) -> tuple[Tensor, Any]:
    if isinstance(batch, Mapping):
        return batch[WEIGHT], {key: value for key, value in batch.items() if key != WEIGHT}
    return batch[-1], batch[:-1]
