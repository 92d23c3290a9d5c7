"""What the loop of a Hugging Face Trainer takes for its model, and what it calls, when it trains twins."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from ...resets import is_due, steps_and_epochs
from ...twins import Twins, pool_gradients

if TYPE_CHECKING:
    from . import TwinTrainer


class Pair(nn.Module):
    """What the Trainer's loop takes for its model: the twin whose `turn` it is.

    Of several processes each twin has its own DistributedDataParallel, as each has a backward pass of its own.
    """

    def __init__(self, of: nn.Module, twins: Twins) -> None:
        super().__init__()
        self.twins, self.turn = twins, 0
        # In lists, which PyTorch does not look into: these are no further weights to train.
        self._of, self._ready, self._runners = [of], list[nn.Module](), list[Any](twins)

    @property
    def of(self) -> nn.Module:
        return self._of[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._runners[self.turn](*args, **kwargs)

    def prepared(self, accelerator: Any) -> nn.Module:
        """This module under autocast and compiled, as the arguments say, by accelerate."""
        if not self._ready:
            if accelerator.num_processes > 1:
                options = accelerator.ddp_handler.to_kwargs() if accelerator.ddp_handler else {}
                self._runners = [DistributedDataParallel(twin, **options) for twin in self.twins]
            self._ready.append(accelerator.prepare_model(self, evaluation_mode=True))
        return self._ready[0]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for runner in self._runners:
                stack.enter_context(runner.no_sync())
            yield

    def _get_name(self) -> str:  # by which the Trainer knows whose labels it must shift to smooth them
        core: Any = self.of
        core = core.get_base_model() if hasattr(core, "get_base_model") else core
        return type(core).__name__


class Algorithm(TrainerCallback):  # type: ignore[misc]
    """The lines of Algorithm 1 that are around a step: sigma, the data of an epoch, the reset; and what is pooled."""

    def __init__(self, trainer: TwinTrainer) -> None:
        self.trainer, self.inside, self.stepped = trainer, False, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.inside = (state.epoch or 0) % 1 != 0  # resumed in mid-epoch: its reset has been
        self.stepped = state.global_step > 0  # resumed after a step: a reset that it made due is still to come

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, inside, self.inside = self.trainer, self.inside, False
        done = math.floor(state.epoch) if inside else math.ceil(state.epoch or 0)
        trainer._paired.epoch = done + 1
        _, due = steps_and_epochs(trainer.due)
        if done and not inside and is_due(due, done):
            self._reset()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        stepped, self.stepped = self.stepped, False
        due, _ = steps_and_epochs(self.trainer.due)
        if stepped and is_due(due, state.global_step):
            self._reset()

    def _reset(self) -> None:
        self.trainer.twins.reset(self.trainer.mode)
        self.trainer._unsettle()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.max_grad_norm <= 0:  # else they were pooled before they were clipped
            pool_gradients(self.trainer.twins, self.trainer.pooled)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stepped = True
        self.trainer.twins.update()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._settle()
