"""The mean of the twins in Lightning: what is validated, tested, predicted with and saved.

It is made when it is first asked for, with BatchNorm statistics of its own, and kept until the twins move on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from ...estimate.estimate import Estimate
from ...training.validation import ENOUGH, Judge
from ...twins import Twins
from .lending import lend
from .wrapper import Loss, Wrapper


class Mean(Wrapper):
    """Twins of a LightningModule, which has the weights of their mean whenever it is not being trained."""

    def __init__(self, module: Any, twins: Twins, loss: Loss | None, judge: Judge) -> None:
        super().__init__(module, twins, loss)
        self._judge = judge
        self._mean: list[Estimate] = []  # of the twins as they are, once asked for; in a list, so as to be no submodule
        self._saved: Mapping[str, Any] = {}  # the mean's state in a checkpoint that is being loaded

    def estimate(self) -> Estimate:
        """What you keep and ship: the mean of the twins and sigma, with BatchNorm statistics from all that they saw."""
        estimate = self.twins.estimate(scale=self._judge.bootstrap.scale)
        self._give_statistics(estimate)
        return estimate

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The mean model."""
        self.lend_mean()
        return self.module(*args, **kwargs)

    # Validation, test and prediction: on the mean

    def val_dataloader(self) -> Any:
        if is_overridden("val_dataloader", self.module):
            return self.module.val_dataloader()
        return self._judge.batches(self._judge.bootstrap.unseen) if len(self._judge.bootstrap.unseen) else []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Only here where the user's module has none: then there is the unseen loss alone."""

    def on_validation_model_eval(self) -> None:
        self.lend_mean()
        self.module.on_validation_model_eval()

    def on_test_model_eval(self) -> None:
        self.lend_mean()
        self.module.on_test_model_eval()

    def on_predict_model_eval(self) -> None:
        self.lend_mean()
        self.module.on_predict_model_eval()

    def on_validation_epoch_end(self) -> None:
        self.module.on_validation_epoch_end()
        if len(self._judge.bootstrap.unseen) and not self.trainer.sanity_checking:
            mean = self.known_mean().module
            with self.shown(mean) as step:
                unseen = self._judge.unseen_loss(mean, step, self.device)
            self.log("unseen_loss", unseen, prog_bar=True, sync_dist=True, batch_size=1)

    def on_validation_end(self) -> None:
        self.module.on_validation_end()
        lend(self.module, self.twins[0])

    # Where the twins are moved or loaded

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        self.forget_mean()
        answer = super().load_state_dict(state_dict, strict, assign)
        self._renew_mean(self._saved)
        self._saved = {}
        return answer

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        known = dict(self._mean.pop().module.named_buffers()) if self._mean else {}
        super()._apply(fn, recurse)
        self._renew_mean(known)
        return self

    def running(self) -> bool:
        return self._trainer is not None and self._trainer.state.status == TrainerStatus.RUNNING

    def fitting(self) -> bool:
        return self.running() and self.trainer.state.fn == TrainerFn.FITTING

    # The mean of the twins as they are

    def _renew_mean(self, known: Mapping[str, Tensor]) -> None:
        """After the twins have been moved or loaded, without a step of the module's, which may not be ready for one:
        the mean, with the statistics that it is known to have. The module has it again, unless it is being trained."""
        with torch.inference_mode(False), torch.no_grad():
            estimate = self.twins.estimate(scale=self._judge.bootstrap.scale)
            for name, buffer in estimate.module.named_buffers():
                if name in known:
                    buffer.copy_(known[name])
        if known:
            self._mean.append(estimate)
        if not self.fitting():
            lend(self.module, estimate.module)

    def known_mean(self) -> Estimate:
        if not self._mean:
            with torch.inference_mode(False):  # which Lightning validates in, and which the mean outlives
                estimate = self.twins.estimate(scale=self._judge.bootstrap.scale)
                self._give_statistics(estimate, ENOUGH)
            self._mean.append(estimate)
        return self._mean[0]

    def forget_mean(self) -> None:
        """The twins are other ones now."""
        self._mean.clear()

    def lend_mean(self) -> None:
        lend(self.module, self.known_mean().module)

    def _give_statistics(self, estimate: Estimate, at_most: int | None = None) -> None:
        with self.shown(estimate.module) as step:
            self._judge.give_statistics(estimate.module, step, self.device, at_most)
