"""Twin-Boot with Lightning's own `Trainer`, around a LightningModule that stays as it is.

    from lightning.pytorch import Trainer
    from twinboot.integrations.lightning import TwinModule

    twins = TwinModule(Net(), dataset)
    Trainer(max_epochs=10).fit(twins)
    estimate = twins.estimate()

How the lines of Algorithm 1 (`twinboot.twins`) fit into Lightning's loop, for each pair of batches:

    on_train_batch_start   line 13: a reset, if one was due after the epoch before, or after the step before
    training_step          lines 6, 7: the noise comes; your `training_step`, with each twin's weights on its own batch
    backward               line 8: gradients, and the noise goes again, whatever happens
    optimizer_step         gradients are pooled, if they are to be, and clipped; line 9; line 10: sigma

A reset waits for the next batch, so that what is validated and saved is the mean that was trained, not one that a reset
has just moved.

Your module keeps its hooks, metrics, optimizers and schedulers, and its names in the logs: what it logs in
`training_step` is the mean over the twins. Validation, test and prediction see the mean of the twins, with BatchNorm
statistics of its own; where there are no validation data, the samples that no twin saw take their place. The logs also
have "sigma" (root mean square over all weights), "sigma/GROUP" after each epoch, and with each validation
"unseen_loss": the loss of `training_step` for the mean of the twins, on the samples that no twin saw.

A checkpoint has the mean under `state_dict`, so that `Net.load_from_checkpoint(path)` gives the mean model, and all
that a run needs to go on, bit for bit, beside it. A run that goes on must have the same data, `groups`, `reset`,
`mode`, `noise` and `pooled`. `TwinModule.restore`, which only looks at a checkpoint, needs none of the last four.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Self
from zipfile import is_zipfile

from torch import Tensor
from torch.utils.data import Dataset

from ..._core.extras import how_to_install

try:
    import lightning.pytorch as pl
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError(f"TwinModule needs Lightning 2.4 or newer: {how_to_install('lightning')}") from error

from ... import resets
from ..._core import ranks, seeds
from ..._core.checks import require_number
from ..._core.copies import replicate
from ..._core.randomness import own_randomness
from ...data.bootstrap import Bootstrap
from ...data.loader import PairedLoader, Resample, require_map_style
from ...groups import Grouping
from ...training.validation import Judge
from ...twins import Twins, pool_gradients, require_share
from ..resuming import OPTIONS, options_of, read_checkpoint, require_same_options, require_undamaged
from . import limits
from .epochs import Pairs
from .means import Mean
from .wrapper import Loss


class TwinModule(Mean):
    """A LightningModule that trains twins of another one, with any `Trainer`, and shows it the mean of them.

    Args:
        module: your own, as you would give it to the Trainer. It is copied, and itself stays as it is. What is
            frozen in it is copied once, for all twins together.
        dataset: the training data, map-style. Give the Trainer no training data: each twin has its own sample of these.
        batch_size: samples per twin and batch, in each process.
        groups: which weights share one sigma, as in `Twins`.
        reset: after which epochs the twins are reset, such as `resets.every(2)`; or after which steps, as
            `resets.steps(resets.growing(10, 1.1, most=80))`. By default after each epoch, as in the paper; where an
            epoch has more than 100 steps, after few of them at first, as in `fit`.
        mode: how: `"sample"` as in the paper, `"mean"` or `"centered"`.
        noise: times sigma is the noise on the weights in training; 1 in the paper.
        pooled: the share of each twin's gradients, before they are clipped, that is the mean of all, as in `fit`.
        resample: `"draws"`, or `"counts"` together with a `loss`.
        loss: a function of (module, batch) with one value for each sample, in the place of `training_step`.
        bootstrap: who sees which sample, if not the default; it also says how many twins there are.
        seed: of the bootstrap, the order, all noise, and what the module itself draws in training, such as dropout.
        options: of `PairedLoader`, such as `{"num_workers": 2}`.

    `module` is then a copy of yours that has the weights of the twin whose turn it is, and after training those of the
    mean; `twins`, `bootstrap` are what they are elsewhere. Gradients are clipped for each twin by itself. One process
    or `strategy="ddp"`; optimization must be automatic.

    >>> import torch
    >>> class Line(pl.LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = torch.nn.Linear(1, 1)
    ...     def training_step(self, batch, batch_idx):
    ...         x, y = batch
    ...         return (self.layer(x) - y).square().mean()
    ...     def configure_optimizers(self):
    ...         return torch.optim.Adam(self.parameters(), lr=0.1)
    >>> x = torch.linspace(-1, 1, 100)[:, None]
    >>> twins = TwinModule(Line(), torch.utils.data.TensorDataset(x, 2 * x), batch_size=10)
    >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    >>> pl.Trainer(max_epochs=10, accelerator="cpu", enable_checkpointing=False, **quiet).fit(twins)
    >>> abs(twins.estimate().module.layer.weight.item() - 2) < 0.3
    True
    """

    def __init__(
        self,
        module: pl.LightningModule,
        dataset: Dataset[Any],
        *,
        batch_size: int = 64,
        groups: str | Grouping = "layer",
        reset: Callable[[int], bool] | None = None,
        mode: resets.Mode = "sample",
        noise: float = 1.0,
        pooled: float = 0.0,
        resample: Resample = "draws",
        loss: Loss | None = None,
        bootstrap: Bootstrap | None = None,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        resets.require_mode(mode)
        require_number("noise", noise)
        require_share(pooled)
        require_map_style(dataset)
        limits.require_module(module)
        limits.require_loss(resample, loss)
        options = {} if options is None else options
        limits.require_options(options)
        seed = seeds.checked(seed)
        due = None if reset is None else resets.checked(reset, resets.every(1))  # None for the usual one
        bootstrap = Bootstrap(len(dataset), seed=seed) if bootstrap is None else bootstrap  # type: ignore[arg-type]
        made = partial(Pairs, dataset, bootstrap, batch_size, resample, seed=seed, **options)
        pairs = made()  # which refuses what does not go together, before anything is copied
        own: Any = replicate(module, share_frozen=False)[0]  # a checkpoint, or a step, may write into frozen weights
        if is_overridden("configure_model", own):
            own.configure_model()
        judge = Judge(dataset, bootstrap, batch_size, seed, options)
        super().__init__(own, Twins(own, bootstrap.replicas, groups, seed), loss, judge)
        self.bootstrap, self.seed, self.mode, self.noise, self.pooled = bootstrap, seed, mode, noise, pooled
        self.due, self._made, self.pairs = due, made, pairs
        self._place: dict[str, Any] | None = None  # in the epochs, from a checkpoint
        self._stepped = False  # since the last batch began
        self._noise = ExitStack()
        self._outputs: list[Any] = []  # of the twins' steps
        self._losses: list[Tensor] = []  # of theirs, until `backward`

    def restore(self, path: str | os.PathLike[str]) -> Self:
        """Take the twins from a checkpoint, for `estimate()`; to go on with a run, give `fit` its `ckpt_path`.

        A file that is damaged, or holds something else, is refused.
        """
        checkpoint = read_checkpoint(path)
        self.on_load_checkpoint(checkpoint)
        self.load_state_dict(checkpoint["state_dict"])
        return self

    # Training

    def configure_callbacks(self) -> Any:  # the first that Lightning asks for
        limits.require_strategy(self.trainer.strategy)
        limits.require_uncompiled(self)
        own = self.module.configure_callbacks()
        return [*(own if isinstance(own, (list, tuple)) else [own]), _Quiet()]

    def train_dataloader(self) -> PairedLoader:
        if self.pairs.share != ranks.share():  # the processes that train together have found each other since
            self.pairs = self._made()
        if self._place is not None:
            self.pairs.load_state_dict(self._place)
            self._place = None
        return self.pairs

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        if self.trainer.train_dataloader is not self.pairs:
            raise TypeError(
                "the Trainer has training data of its own, but each twin has its own sample of TwinModule's dataset: "
                "give fit() validation data only, as val_dataloaders."
            )
        if self._is_due():
            self.forget_mean()
            self.twins.reset(self.mode)
        stop = False
        if is_overridden("on_train_batch_start", self.module):
            stop = -1 in [self.module.on_train_batch_start(part, batch_idx) for part in self.each_twin(batch)]
        self.pairs.over = stop or self.pairs.step >= self.trainer.num_training_batches
        return -1 if stop else None

    def _is_due(self) -> bool:
        """Whether a reset comes before this batch: after the last epoch's end, or after a step."""
        steps = math.ceil(self.trainer.num_training_batches / self.trainer.accumulate_grad_batches)  # of an epoch
        by_step, by_epoch = resets.steps_and_epochs(self.due or resets.usual(steps))
        stepped, self._stepped = self._stepped, False
        if self.pairs.step == 1 and self.pairs.epoch > 1 and resets.is_due(by_epoch, self.pairs.epoch - 1):
            return True
        return stepped and resets.is_due(by_step, self.trainer.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        weighted = self.pairs.resample == "counts"
        drawn = own_randomness(self.device, self.seed, self.pairs.epoch, self.pairs.step, *ranks.own())
        with self.logging_means(), ExitStack() as noise:
            noise.enter_context(self.twins.sampled(self.noise))
            with drawn:
                self._outputs = [self.step(self.module, part, batch_idx, weighted) for part in self.each_twin(batch)]
            if None in self._outputs:
                return None
            self._noise = noise.pop_all()  # it stays until `backward`
        self._losses = [output["loss"] for output in self._outputs]
        loss: Tensor = sum(self._losses)  # type: ignore[assignment]
        self._outputs = [{**output, "loss": output["loss"].detach()} for output in self._outputs]
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        if is_overridden("on_before_backward", self.module):
            scaler = getattr(self.trainer.precision_plugin, "scaler", None)
            with self.logging_means():
                for part in self.each_twin(self._losses):
                    part = part / self.trainer.accumulate_grad_batches
                    self.module.on_before_backward(part if scaler is None else scaler.scale(part))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._losses = []
        with self._noise:
            self.module.backward(loss, *args, **kwargs)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:  # once for each step
        pool_gradients(self.twins, self.pooled)
        super().configure_gradient_clipping(*args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.module.optimizer_step(*args, **kwargs)
        self._stepped = True
        self.forget_mean()
        self.twins.update()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if is_overridden("on_train_batch_end", self.module):
            for output, part in zip(self._outputs, self.each_twin(batch), strict=True):
                self.module.on_train_batch_end(output, part, batch_idx)
        partition = self.twins.partition
        share = partition.sizes / partition.sizes.sum()
        self.log("sigma", (share * partition.sigma.square()).sum().sqrt(), prog_bar=True, batch_size=1)

    def on_train_epoch_end(self) -> None:
        self.module.on_train_epoch_end()
        sigma = {f"sigma/{group}": values.square().mean().sqrt() for group, values in self.twins.sigma.items()}
        self.log_dict(sigma, sync_dist=True)

    def on_fit_end(self) -> None:
        self.lend_mean()
        self.module.on_fit_end()

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["twins"] = checkpoint["state_dict"]
        checkpoint["pairs"], checkpoint["stepped"] = self.pairs.state_dict(), self._stepped
        checkpoint["scale"], checkpoint[OPTIONS] = self.bootstrap.scale, options_of(self)
        checkpoint["state_dict"] = self.known_mean().module.state_dict()
        self.module.on_save_checkpoint(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if not {"twins", "state_dict", "pairs"} <= checkpoint.keys():
            raise ValueError(
                "this is no checkpoint of a TwinModule: to start from a single model, load it before TwinModule(...)."
            )
        if checkpoint.get("scale", 1.0) != self.bootstrap.scale:
            raise ValueError(
                "the twins of this checkpoint divided their samples, or those here do and they did not, so that sigma "
                "would be wrong: give TwinModule the bootstrap of then."
            )
        path = self.trainer.ckpt_path if self.running() else None  # from where Lightning has read it
        if path is not None and is_zipfile(path):
            require_undamaged(path)
        if self.fitting():
            require_same_options(checkpoint, self)
        self.module.on_load_checkpoint(checkpoint)
        self._saved, checkpoint["state_dict"] = checkpoint["state_dict"], checkpoint["twins"]
        if self.fitting():
            self._place, self._stepped = checkpoint["pairs"], checkpoint.get("stepped", False)


class _Quiet(pl.Callback):
    """Takes the noise away where an error or an interruption comes between a step and its backward pass."""

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(pl_module, TwinModule):
            pl_module._noise.close()
