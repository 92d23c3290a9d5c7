"""Twin-Boot with Lightning's `Trainer` and your own LightningModule.

    from lightning.pytorch import Trainer
    from twinboot.integrations.lightning import TwinModule

    twins = TwinModule(Net(), dataset)
    Trainer(max_epochs=10).fit(twins)
    estimate = twins.settle(Trainer(max_epochs=3))      # or twins.estimate(), at the sigma of the training

Where the lines of Algorithm 1 (`twinboot.twins`) are in Lightning's loop:

    on_train_batch_start   line 13: reset, if one is due after the last epoch or the last step
    training_step          lines 6, 7: add the weight noise; call your `training_step` for each twin on its own batch
    backward               line 8: gradients; remove the noise
    optimizer_step         pool (optional) and clip the gradients; line 9: step; line 10: sigma

Resets wait for the next batch. So validation and checkpoints see the trained mean, not one that a reset has moved.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Self, cast
from zipfile import is_zipfile

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.utils.data import DataLoader, Dataset

from .._core.extras import how_to_install

try:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
    from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
    from lightning.pytorch.utilities.data import extract_batch_size
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
    from torchmetrics import Metric
except ImportError as error:
    raise ImportError(f"TwinModule needs Lightning 2.4 or newer: {how_to_install('lightning')}") from error

from .. import Bootstrap, Estimate, PairedLoader, Protocol, Twins, pool_gradients, resets
from .._core import ranks, seeds
from .._core.checks import require_number, require_one_of, shown
from .._core.copies import replicate
from .._core.seeds import own_randomness
from ..data.loader import WEIGHT, require_map_style
from ..estimate import spread
from ..estimate.prediction import TASKS, Task
from ..training.protocol import LIGHTNING, complete
from ..training.rounds import RESTART, average_buffers, falling, least_of, warn_if_far_above, without_noise
from ..training.validation import ENOUGH, Run, Validation
from .resuming import OPTIONS, options_of, read_checkpoint, require_same_options, require_undamaged

__all__ = ["TwinModule"]

Loss = Callable[[Any, Any], Tensor]  # (module, batch) -> one value per sample

# Lightning checks whether a module has these methods. TwinModule forwards them, and hooks named on_..., to the user's
# module if that has them.
FORWARDED = (
    *("prepare_data", "teardown", "lr_scheduler_step", "validation_step", "test_step", "predict_step"),
    *("test_dataloader", "predict_dataloader"),
)
# These may read or change gradients, so they are called for each twin, with its weights in the module.
FORWARDED_PER_TWIN = ("on_before_zero_grad", "optimizer_zero_grad", "on_after_backward", "on_before_optimizer_step")
SETTLING = ("groups", "reset", "mode", "noise", "pooled", "resample")  # settings of a protocol that TwinModule has
COMPILE_A_PART = "compile a part of your module instead, as in self.net = torch.compile(self.net)"


class TwinModule(pl.LightningModule):
    """Trains twins of a LightningModule with any Lightning `Trainer`.

    Your module is used unchanged: its hooks, metrics, optimizers, schedulers and log names all work. Values that it
    logs in `training_step` are averaged over the twins. Validation, test and prediction use the mean of the twins, with
    BatchNorm statistics recomputed for it. Without validation data, validation uses the out-of-bag samples, which
    neither twin trains on.

    Additional log entries: `sigma` (root mean square over all weights), `sigma/GROUP` after each epoch, and
    `unseen_loss` at each validation: the `training_step` loss of the mean model on the out-of-bag samples.

    A checkpoint stores the mean model under `state_dict`, so `Net.load_from_checkpoint(path)` loads it. It also stores
    the state of the run. A run resumed with `fit(..., ckpt_path=path)` equals the uninterrupted run bit for bit; it
    needs the same data and the same protocol.

    Gradients are clipped for each twin separately. Training runs in one process or with `strategy="ddp"`, and needs
    automatic optimization.

    Args:
        module: Your LightningModule. It is copied and not changed. All twins share one copy of its frozen weights.
        dataset: Map-style training data. Do not pass training data to the Trainer: each twin draws its own bootstrap
            sample of this dataset.
        protocol: The settings of the method, as in `fit`: groups, resets, noise, pooled gradients and resampling. By
            default `resample` is `"draws"`; `"counts"` needs `loss`. There is no weight averaging.
        batch_size: The batch size of the plain training that the twins replace, per process, as in `PairedLoader`.
        loss: A function of (module, batch) that returns one value per sample. It replaces `training_step`.
        bootstrap: Which twin sees which sample. Its `replicas` is the number of twins. By default
            `Bootstrap(len(dataset), seed=seed)`.
        seed: Seed of the bootstrap, the batch order, all noise, and the module's own random numbers in training, such
            as dropout.
        options: Options of `PairedLoader`, such as `{"num_workers": 2}`.

    Attributes:
        module: A copy of your module. It has the mean of the twins outside of training.
        twins: The `Twins` being trained.
        bootstrap: The `Bootstrap` in use.

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

    module: Any

    # No **options: load_from_checkpoint would then pass the hyperparameters of the user's module, too.
    def __init__(
        self,
        module: pl.LightningModule,
        dataset: Dataset[Any],
        *,
        protocol: Protocol | None = None,
        batch_size: int = 64,
        loss: Loss | None = None,
        bootstrap: Bootstrap | None = None,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        protocol = complete(protocol, LIGHTNING, "TwinModule", without=("average",))
        _require_loss(protocol.resample, loss)
        require_map_style(dataset)
        _require_module(module)
        options = {} if options is None else options
        _require_options(options)
        seed = seeds.require_seed(seed)
        bootstrap = Bootstrap(len(dataset), seed=seed) if bootstrap is None else bootstrap  # type: ignore[arg-type]
        make_loader = partial(_Loader, dataset, bootstrap, batch_size, protocol.resample, seed=seed, **options)
        loader = make_loader()  # checks its arguments before the module is copied
        # The copy has frozen weights of its own: a checkpoint or a step may write to them.
        own: Any = replicate(module, copy_frozen=True)[0]
        if is_overridden("configure_model", own):
            own.configure_model()
        super().__init__()
        self.twins = Twins(own, bootstrap.replicas, protocol.groups, seed)
        self.module = own  # after the twins: `named_parameters` lists shared weights by the first name
        self.bootstrap, self.seed, self.loss = bootstrap, seed, loss
        self.protocol = protocol
        self.loader, self._make_loader = loader, make_loader
        self._made_of: dict[str, Any] = {"dataset": dataset, "batch_size": batch_size, "options": options}
        self._validation = Validation(dataset, bootstrap, batch_size, seed, options)
        self._mean: list[Estimate] = []  # the current mean, if it was needed; in a list, to be no submodule
        self._mean_state: Mapping[str, Any] = {}  # the mean's state in a checkpoint that is being loaded
        self._loader_state: dict[str, Any] | None = None  # from the checkpoint that `fit` resumes
        self._stepped = False  # whether the optimizer has stepped since the last batch began
        self._noise_block = ExitStack()  # open from `training_step` to `backward`
        self._outputs: list[Any] = []  # each twin's output of `training_step`
        self._losses: list[Tensor] = []  # each twin's loss, until `backward`
        self._logged: dict[str, tuple[list[Any], dict[str, Any]]] | None = None  # name -> values of the twins, options
        self._log_hyperparams = own._log_hyperparams
        own.log = self._log_for_module
        for hook in dir(pl.LightningModule):
            is_hook = hook.startswith("on_") and hook not in vars(TwinModule) and callable(getattr(own, hook))
            if (is_hook or hook in FORWARDED or hook in FORWARDED_PER_TWIN) and is_overridden(hook, own):
                setattr(self, hook, _Forwarded(self, hook))
        use_weights(own, self.twins[0])

    def estimate(self) -> Estimate:
        """The result of training: the mean of the twins, with sigma and BatchNorm statistics of all training data."""
        return self._estimate(None)

    def settle(
        self,
        trainer: pl.Trainer,
        *,
        task: Task | None = None,
        inputs: Callable[[Any], Any] | None = None,
        factor: float = RESTART,
    ) -> Estimate:
        """The result of training, with error bars of the right size: twins settle around the mean, as in `fit`.

        Copies of the mean train on the samples of the twins, without noise and resets, with your `training_step` and
        the optimizer of your `configure_optimizers`. The learning rate starts at `factor` times that of the optimizer
        and falls to 0; your schedulers are not used. The estimate gets the sigma of these copies, and a `scale` with
        which draws spread the predictions of out-of-bag samples as much as they do. Neither the mean model nor the
        twins of this module change. Warns if the copies end as worse models than the mean: lower the `factor` then.

        Args:
            trainer: A new Trainer with about 0.3 times the epochs of the training, and with its precision, devices and
                clipping. Its callbacks and loggers see the copies, and `limit_val_batches=0` saves their validation.
            task: What the module predicts, as in `Estimate.predict`. The estimate remembers it. Without it, the spread
                of the outputs themselves is matched, such as that of logits.
            inputs: Picks the inputs of the module's `forward` from a batch, as one tensor, a tuple or a mapping. By
                default all elements of the batch but the last.
            factor: Multiplies the learning rate. For adapters of a pretrained model give 5 / 3, as `TwinTrainer` does.
        """
        if task is not None:
            require_one_of(TASKS, "task", task)
        require_number("factor", factor, positive=True)
        if not isinstance(trainer, pl.Trainer):
            raise TypeError(f"trainer must be a Trainer of the package lightning, not {shown(trainer)}.")
        if trainer.global_step:
            raise ValueError("this Trainer has been used: give a new one, such as Trainer(max_epochs=3).")
        estimate = self.estimate()
        estimate.task = task
        settling = _Settling(self, estimate.module, float(factor))
        trainer.fit(settling)
        settling.to(estimate.partition.sigma.device)
        average_buffers(settling.twins)
        before, after = (settling._loss_of(of) for of in ([estimate.module] * len(settling.twins), settling.twins))
        advice = "lower the factor, or give the Trainer more epochs"
        warn_if_far_above(after, before, least_of(task), advice, stacklevel=2)
        with settling._running(estimate.module):
            batches = [settling._on_device(estimate.module, batch) for batch in settling._validation.spread_batches()]
            models = [_with_weights(estimate.module, twin) for twin in settling.twins]
            estimate.partition.sigma.copy_(settling.twins.partition.scaled(self.bootstrap.scale).sigma)
            xs = list(map(inputs or _all_but_last, batches))
            spread.match_spread_(estimate, models, xs, settling.seed, self.bootstrap.scale)
        return estimate

    def restore(self, path: str | os.PathLike[str]) -> Self:
        """Load the twins from a checkpoint, for `estimate()`. To resume training, use `fit(..., ckpt_path=path)`.

        Needs the same `bootstrap` and `groups` as the run; other settings of the protocol may differ.
        """
        checkpoint = read_checkpoint(path)
        self.on_load_checkpoint(checkpoint)
        self.load_state_dict(checkpoint["state_dict"])
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the mean model."""
        self._use_mean()
        return self.module(*args, **kwargs)

    def each_twin(self, parts: Any) -> Iterator[Any]:
        """Iterate over `parts`, one per twin. During each iteration the module has the weights of that twin."""
        for twin, part in zip(self.twins, parts, strict=True):
            with using_weights(self.module, twin):
                yield part
        use_weights(self.module, self.twins[0])

    # Training

    def configure_callbacks(self) -> Any:  # the first hook that Lightning calls
        _require_strategy(self.trainer.strategy)
        if self._compiler_ctx is not None:
            raise TypeError(f"TwinModule itself cannot be compiled: {COMPILE_A_PART}.")
        own = self.module.configure_callbacks()
        return [*(own if isinstance(own, (list, tuple)) else [own]), _RemoveNoiseOnError()]

    def setup(self, stage: str) -> None:
        use_weights(self.module, self.twins[0])
        self.module.setup(stage)
        known = dict(self.twins[0].named_parameters())
        if late := [name for name, _ in self.module.named_parameters() if name not in known]:
            raise TypeError(f"{late[0]!r} was made in setup(), after the twins were copied: make it in __init__.")

    def configure_optimizers(self) -> Any:
        answers = [self.module.configure_optimizers() for _ in self.each_twin(self.twins)]
        merge_optimizers(answers)
        known = set(map(id, self.twins.parameters()))
        groups = [group for optimizer in optimizers_in(answers[0]) for group in optimizer.param_groups]
        if any(p.requires_grad and id(p) not in known for group in groups for p in group["params"]):
            raise TypeError(
                "configure_optimizers used weights that belong to no twin, such as a list made in __init__: use "
                "self.parameters(), or those of a part, inside configure_optimizers."
            )
        return answers[0]

    def train_dataloader(self) -> PairedLoader:
        if self.loader.share != ranks.rank_and_size():  # Lightning has started the other processes since
            self.loader = self._make_loader()
        if self._loader_state is not None:
            self.loader.load_state_dict(self._loader_state)
            self._loader_state = None
        return self.loader

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        if self.trainer.train_dataloader is not self.loader:
            raise TypeError(
                "the Trainer got training data, but each twin draws its sample from TwinModule's dataset: pass fit() "
                "validation data only, as val_dataloaders."
            )
        if self._is_reset_due():
            self._mean.clear()
            self.twins.reset(self.protocol.mode)
        stop = False
        if is_overridden("on_train_batch_start", self.module):
            stop = -1 in [self.module.on_train_batch_start(part, batch_idx) for part in self.each_twin(batch)]
        self.loader.is_last_batch = stop or self.loader.step >= self.trainer.num_training_batches
        return -1 if stop else None

    def _is_reset_due(self) -> bool:
        steps_per_epoch = math.ceil(self.trainer.num_training_batches / self.trainer.accumulate_grad_batches)
        usual, given = resets.usual(steps_per_epoch), self.protocol.reset
        by_step, by_epoch = resets.steps_and_epochs(usual if given is None else given)
        stepped, self._stepped = self._stepped, False
        if self.loader.step == 1 and self.loader.epoch > 1 and resets.is_due(by_epoch, self.loader.epoch - 1):
            return True
        return stepped and resets.is_due(by_step, self.trainer.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        weighted = self.loader.resample == "counts"
        randomness = own_randomness(self.device, self.seed, self.loader.epoch, self.loader.step, *ranks.own())
        with self._logging_means(), ExitStack() as block:
            block.enter_context(self.twins.sampled(self.protocol.noise, local=self.protocol.local))
            with randomness:
                self._outputs = [self._run(self.module, part, batch_idx, weighted) for part in self.each_twin(batch)]
            if None in self._outputs:
                return None
            self._noise_block = block.pop_all()  # `backward` closes it
        self._losses = [output["loss"] for output in self._outputs]
        loss: Tensor = sum(self._losses)  # type: ignore[assignment]
        self._outputs = [{**output, "loss": output["loss"].detach()} for output in self._outputs]
        return loss

    def _run(self, module: Any, batch: Any, batch_idx: int, weighted: bool = False) -> dict[str, Any] | None:
        """The output of a module's `training_step` as a mapping, or None if it skips the batch."""
        if self.loss is not None:
            weight, batch = _split_weight(batch) if weighted else (1.0, batch)
            output: Any = (weight * self.loss(module, batch)).mean()
        elif is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
            output = module.training_step(batch, batch_idx)
        else:
            output = module.training_step(batch)
        return None if output is None else dict(output) if isinstance(output, Mapping) else {"loss": output}

    def on_before_backward(self, loss: Tensor) -> None:
        if is_overridden("on_before_backward", self.module):
            scaler = getattr(self.trainer.precision_plugin, "scaler", None)
            with self._logging_means():
                for part in self.each_twin(self._losses):
                    part = part / self.trainer.accumulate_grad_batches
                    self.module.on_before_backward(part if scaler is None else scaler.scale(part))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._losses = []
        with self._noise_block:
            self.module.backward(loss, *args, **kwargs)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        pool_gradients(self.twins, self.protocol.pooled)  # Lightning calls this once per step
        if gradient_clip_val is not None or is_overridden("configure_gradient_clipping", self.module):
            for twin in self.each_twin(self.twins):
                part = _OptimizerOfTwin(optimizer, twin)
                self.module.configure_gradient_clipping(part, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.module.optimizer_step(*args, **kwargs)
        self._stepped = True
        self._mean.clear()
        self.twins.update()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if is_overridden("on_train_batch_end", self.module):
            for output, part in zip(self._outputs, self.each_twin(batch), strict=True):
                self.module.on_train_batch_end(output, part, batch_idx)
        partition = self.twins.partition
        weight = partition.sizes / partition.sizes.sum()
        self.log("sigma", (weight * partition.sigma.square()).sum().sqrt(), prog_bar=True, batch_size=1)

    def on_train_epoch_end(self) -> None:
        self.module.on_train_epoch_end()
        sigma = {f"sigma/{group}": values.square().mean().sqrt() for group, values in self.twins.sigma.items()}
        self.log_dict(sigma, sync_dist=True)

    def on_fit_end(self) -> None:
        self._use_mean()
        self.module.on_fit_end()

    # Batches: in training, a batch is a tuple with one batch per twin

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._map_twins(batch, lambda part: self.module.on_before_batch_transfer(part, dataloader_idx))

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return self._map_twins(batch, lambda part: self.module.transfer_batch_to_device(part, device, dataloader_idx))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._map_twins(batch, lambda part: self.module.on_after_batch_transfer(part, dataloader_idx))

    def _map_twins(self, batch: Any, function: Callable[[Any], Any]) -> Any:
        return tuple(map(function, batch)) if self.trainer.training else function(batch)

    # Logs

    @contextmanager
    def _logging_means(self) -> Iterator[None]:
        """Log the mean over the twins of each value that the module logs in the block."""
        logged: dict[str, tuple[list[Any], dict[str, Any]]] = {}
        self._logged = logged
        try:
            yield
        finally:
            self._logged = None
        for name, (values, options) in logged.items():
            numbers = [torch.as_tensor(v, dtype=torch.get_default_dtype(), device=self.device) for v in values]
            self.log(name, torch.stack(numbers).mean(), **options)

    def _log_for_module(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if self._logged is None or isinstance(value, Metric):  # a metric sums over the twins by itself
            self.log(name, value, *args, **options)
            return
        options |= dict(zip(("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx"), args, strict=False))
        values, _ = self._logged.setdefault(name, ([], options))
        values.append(value.detach() if isinstance(value, Tensor) else value)

    # Validation, test and prediction use the mean of the twins

    def val_dataloader(self) -> Any:
        if is_overridden("val_dataloader", self.module):
            return self.module.val_dataloader()
        return self._validation.batches(self.bootstrap.unseen) if len(self.bootstrap.unseen) else []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """For modules without one: Lightning validates only with a `validation_step`, and `unseen_loss` needs that."""

    def on_validation_model_eval(self) -> None:
        self._use_mean()
        self.module.on_validation_model_eval()

    def on_test_model_eval(self) -> None:
        self._use_mean()
        self.module.on_test_model_eval()

    def on_predict_model_eval(self) -> None:
        self._use_mean()
        self.module.on_predict_model_eval()

    def on_validation_epoch_end(self) -> None:
        self.module.on_validation_epoch_end()
        if len(self.bootstrap.unseen) and not self.trainer.sanity_checking:
            mean = self._current_mean().module
            with self._running(mean) as run:
                unseen_loss = self._validation.unseen_loss(mean, run, self.device)
            self.log("unseen_loss", unseen_loss, prog_bar=True, sync_dist=True, batch_size=1)

    def on_validation_end(self) -> None:
        self.module.on_validation_end()
        use_weights(self.module, self.twins[0])

    def _use_mean(self) -> None:
        use_weights(self.module, self._current_mean().module)

    def _current_mean(self) -> Estimate:
        """The mean of the twins as they are now."""
        if not self._mean:
            with torch.inference_mode(False):  # Lightning validates in it, but the mean is also used later
                self._mean.append(self._estimate(ENOUGH))
        return self._mean[0]

    def _replace_mean(self, buffers: Mapping[str, Tensor]) -> None:
        """After the twins were moved or loaded: the new mean, with known BatchNorm statistics. This runs no step of the
        module, which may not be ready for one."""
        with torch.inference_mode(False), torch.no_grad():
            estimate = self.twins.estimate(scale=self.bootstrap.scale)
            for name, buffer in estimate.module.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
        self._mean = [estimate] if buffers else []
        use_weights(self.module, self.twins[0] if self._is_fitting() else estimate.module)

    def _estimate(self, at_most: int | None) -> Estimate:
        """The mean of the twins, with BatchNorm statistics of `at_most` training samples, or of all."""
        estimate = self.twins.estimate(scale=self.bootstrap.scale)
        with self._running(estimate.module) as run:
            self._validation.update_batchnorm(estimate.module, run, self.device, at_most)
        return estimate

    @contextmanager
    def _running(self, mean: Any) -> Iterator[Run[tuple[float, int]]]:
        """A function that runs `training_step` of the mean model, without gradients, and returns loss and batch size.

        The mean model gets copies of the module's attributes, which a hook may have set. So the module's own metrics
        and counters do not change, and nothing is logged.
        """
        trainer = self._trainer
        copy_attributes(self.module, mean, (self, trainer), ("log",))
        mean.trainer, mean.log = trainer, lambda *args, **kwargs: None

        def run(module: Any, batch: Any, number: int) -> tuple[float, int]:
            batch = self._on_device(module, batch)
            with torch.no_grad(), nullcontext() if trainer is None else trainer.precision_plugin.forward_context():
                output = self._run(module, batch, number)
            return (0.0, 0) if output is None else (output["loss"].item(), extract_batch_size(batch))

        try:
            yield run
        finally:
            del mean.log
            mean.trainer = None
            copy_attributes(self.module, mean, (self, trainer), ("log",))  # undo what the runs counted

    def _on_device(self, module: Any, batch: Any) -> Any:
        """A batch after the hooks that Lightning calls for one."""
        batch = batch if self._trainer is None else self._trainer.precision_plugin.convert_input(batch)
        batch = module.on_before_batch_transfer(batch, 0)
        batch = module.transfer_batch_to_device(batch, self.device, 0)
        return module.on_after_batch_transfer(batch, 0)

    # Checkpoints and states

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["twins"] = checkpoint["state_dict"]
        checkpoint["pairs"], checkpoint["stepped"] = self.loader.state_dict(), self._stepped
        checkpoint["scale"], checkpoint[OPTIONS] = self.bootstrap.scale, options_of(self)
        checkpoint["state_dict"] = self._current_mean().module.state_dict()
        self.module.on_save_checkpoint(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if not {"twins", "state_dict", "pairs"} <= checkpoint.keys():
            raise ValueError(
                "this is not a checkpoint of a TwinModule: to start from a single model, load it into the module first."
            )
        if checkpoint.get("scale", 1.0) != self.bootstrap.scale:
            raise ValueError(
                "the twins of the checkpoint divide the samples in another way, so sigma would be wrong: give "
                "TwinModule the bootstrap of the checkpoint."
            )
        path = self.trainer.ckpt_path if self._is_running() else None  # the file that Lightning has read
        if path is not None and is_zipfile(path):
            require_undamaged(path)
        if self._is_fitting():
            require_same_options(checkpoint, self)
        self.module.on_load_checkpoint(checkpoint)
        self._mean_state, checkpoint["state_dict"] = checkpoint["state_dict"], checkpoint["twins"]
        if self._is_fitting():
            self._loader_state, self._stepped = checkpoint["pairs"], checkpoint.get("stepped", False)

    def _is_running(self) -> bool:
        return self._trainer is not None and self._trainer.state.status == TrainerStatus.RUNNING

    def _is_fitting(self) -> bool:
        return self._is_running() and self.trainer.state.fn == TrainerFn.FITTING

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.twins.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        self._mean.clear()
        answer = self.twins.load_state_dict(state_dict, strict, assign)
        self._replace_mean(self._mean_state)
        self._mean_state = {}
        return answer

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        buffers = dict(self._mean[0].module.named_buffers()) if self._mean else {}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._replace_mean(buffers)
        return self

    # The hyperparameters in logs and checkpoints are those of the user's module.
    hparams = property(lambda self: self.module.hparams)
    hparams_initial = property(lambda self: self.module.hparams_initial)
    _hparams_name = property(lambda self: self.module._hparams_name)


class _Settling(TwinModule):
    """Twins that settle around the mean of another TwinModule, while the learning rate falls to 0."""

    def __init__(self, of: TwinModule, mean: nn.Module, factor: float) -> None:
        protocol = Protocol(**{name: getattr(without_noise(of.protocol), name) for name in SETTLING})
        seed = seeds.derive(of.seed, "settle")
        super().__init__(
            cast(pl.LightningModule, mean),
            protocol=protocol,
            loss=of.loss,
            bootstrap=of.bootstrap,
            seed=seed,
            **of._made_of,
        )
        self.factor = factor
        modes = {name: part.training or not of.module.training for name, part in of.module.named_modules()}
        for module in (self.module, *self.twins):  # the mean was in evaluation mode, which Lightning would keep
            for name, part in module.named_modules():
                part.training = modes.get(name, True)
        vars(self).pop("lr_scheduler_step", None)  # the module's own is for its own scheduler

    def configure_optimizers(self) -> Any:
        optimizer, *others = optimizers_in(super().configure_optimizers())
        steps = self.trainer.estimated_stepping_batches
        if others or math.isinf(steps):
            raise ValueError("twins settle with one optimizer and a Trainer that ends: give it max_epochs.")
        for group in optimizer.param_groups:
            # Where the module's scheduler has changed the rate, its start is in `initial_lr`, or the peak in `max_lr`.
            own = group.get("max_lr", group.pop("initial_lr", group["lr"]))
            group.pop("initial_lr", None)
            group["lr"] = own * self.factor
        return [optimizer], [{"scheduler": falling(optimizer, int(steps)), "interval": "step"}]

    def _loss_of(self, models: Iterable[nn.Module]) -> float:
        """The mean loss of models on the twins' samples, one model for each twin, in evaluation mode."""
        scratch = self.twins.estimate().module.eval()
        with self._running(scratch) as run:

            def run_with_weights(source: nn.Module, batch: Any, number: int) -> tuple[float, int]:
                use_weights(scratch, source)
                return run(scratch, batch, number)

            return self._validation.loss_in_training(models, run_with_weights, self.device)


def _with_weights(module: nn.Module, source: nn.Module) -> nn.Module:
    """A copy of a module that uses the weights of `source`."""
    [copied] = replicate(module)
    use_weights(copied, source)
    return copied


def _all_but_last(batch: Any) -> Any:
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise TypeError(
            f"a batch is a {type(batch).__name__}: give settle inputs=, a function that picks the module's input."
        )
    return tuple(batch[:-1])


class _Loader(PairedLoader):
    """Counts an epoch as finished after as many batches as Lightning takes of it.

    Lightning does not ask for one batch more, which would end the iteration. And if it resumes after an epoch, it may
    count the first batch of the next epoch as one of the last.
    """

    is_last_batch = False

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        self._begun = self._begun and self.is_last_batch
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "epoch": self.epoch + 1, "step": 0} if self._begun and self.is_last_batch else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.is_last_batch = False


class _Forwarded:
    """A method of the module as a method of TwinModule. `inspect.signature` gives the signature of the original."""

    def __init__(self, owner: TwinModule, name: str) -> None:
        self.owner, self.name = owner, name

    @property
    def __wrapped__(self) -> Any:
        return getattr(self.owner.module, self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.name not in FORWARDED_PER_TWIN:
            return self.__wrapped__(*args, **kwargs)
        with self.owner._logging_means():
            for twin in self.owner.each_twin(self.owner.twins):
                parts = (_OptimizerOfTwin(arg, twin) if isinstance(arg, torch.optim.Optimizer) else arg for arg in args)
                self.__wrapped__(*parts, **kwargs)
        return None


class _OptimizerOfTwin:
    """An optimizer that shows only the parameters of one twin, for clipping and for hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer, twin: nn.Module) -> None:
        self._optimizer = optimizer
        own = set(map(id, twin.parameters()))
        self.param_groups = [
            {**group, "params": [p for p in group["params"] if id(p) in own]} for group in optimizer.param_groups
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)


class _RemoveNoiseOnError(pl.Callback):
    """Removes the weight noise if an error or an interruption comes between a step and its backward pass."""

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(pl_module, TwinModule):
            pl_module._noise_block.close()


def _split_weight(batch: Any) -> tuple[Tensor, Any]:
    """The sample weights of a batch, and the batch without them."""
    if isinstance(batch, Mapping):
        return batch[WEIGHT], {key: value for key, value in batch.items() if key != WEIGHT}
    return batch[-1], batch[:-1]


# Swapping weights: steps, hooks, metrics and optimizers are methods and attributes of one module: a step reads what a
# hook has set, and a metric sums over an epoch. So one module is kept, and its parameters and buffers are replaced by
# those of the twin whose turn it is, or of the mean of the twins. No tensor is copied.


def use_weights(module: nn.Module, source: nn.Module) -> None:
    """Make a module use the parameters and buffers of `source`, a copy of it, from now on."""
    for ours, theirs in _matching_parts(module, source):
        if type(ours).__setattr__ is nn.Module.__setattr__:
            ours._parameters.update(theirs._parameters)
        else:  # recurrent layers also keep their weights in a list
            for name, p in theirs._parameters.items():
                setattr(ours, name, p)
        ours._buffers.update(theirs._buffers)


@contextmanager
def using_weights(module: nn.Module, source: nn.Module) -> Iterator[None]:
    """As `use_weights`. If the module assigns a new tensor to a buffer inside the block, `source` gets it."""
    use_weights(module, source)
    yield
    for ours, theirs in _matching_parts(module, source):
        for name in theirs._buffers:
            theirs._buffers[name] = ours._buffers[name]


def _matching_parts(module: nn.Module, source: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Submodules of the same name. A hook may have added some to the module, such as metrics, that `source` lacks."""
    parts = dict(module.named_modules())
    return ((parts[name], part) for name, part in source.named_modules() if part._parameters or part._buffers)


def copy_attributes(module: nn.Module, to: nn.Module, shared: Iterable[Any] = (), skip: Iterable[str] = ()) -> None:
    """Copy what a module holds besides its weights to a copy of it: numbers, lists, metrics that a hook added.

    References to parts of `module` become references to the same parts of `to`. Objects in `shared` are not copied;
    attributes named in `skip` are left alone.
    """
    parts = dict(to.named_modules(remove_duplicate=False))
    memo: dict[int, Any] = {id(value): value for value in shared}
    for name, part in module.named_modules(remove_duplicate=False):
        if name in parts:
            memo[id(part)] = parts[name]
            for ours, theirs in ((part._parameters, parts[name]._parameters), (part._buffers, parts[name]._buffers)):
                memo |= {id(t): theirs[key] for key, t in ours.items() if t is not None and key in theirs}
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in ("training", *skip):
            vars(to)[name] = _deep_copy(value, memo)
    for name, added in module._modules.items():
        if name not in to._modules:
            to.add_module(name, _deep_copy(added, memo))


def _deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, Dataset, DataLoader)):
        return value  # large, and not changed by a step
    try:
        return copy.deepcopy(value, dict(memo))  # a copy of the memo: a failed attempt would leave half-built objects
    except Exception:  # it has a gradient history, a lock or a file: copy the rest of a container
        if isinstance(value, Tensor):
            return value.detach().clone()
        if type(value) is dict:
            return {key: _deep_copy(part, memo) for key, part in value.items()}
        return type(value)(_deep_copy(part, memo) for part in value) if type(value) in (list, tuple, set) else value


def merge_optimizers(answers: Sequence[Any]) -> None:
    """Make the optimizers of the first answer train the weights of all twins.

    `answers` are what `configure_optimizers` returned for each twin. The first keeps its parameter groups, so its
    learning rate schedulers still work; it takes over the parameters and the optimizer state of the others.
    """
    first, *others = [list(optimizers_in(answer)) for answer in answers]
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in first):
        raise TypeError("LBFGS needs several gradients per step, but twins compute one: use another optimizer.")
    for same in zip(first, *others, strict=True):
        for groups in zip(*(optimizer.param_groups for optimizer in same), strict=True):
            known = set(map(id, groups[0]["params"]))  # the twins share frozen parameters
            for group in groups[1:]:
                new = [i for i, p in enumerate(group["params"]) if id(p) not in known]
                for key in {"params", "param_names"} & group.keys():
                    groups[0][key].extend(group[key][i] for i in new)
        for optimizer in same[1:]:
            same[0].state.update(optimizer.state)


def optimizers_in(answer: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizers in an answer of `configure_optimizers`, which may be nested."""
    if isinstance(answer, torch.optim.Optimizer):
        yield answer
    elif isinstance(answer, Mapping):
        yield from optimizers_in(answer.get("optimizer"))
    elif isinstance(answer, (list, tuple)):
        for part in answer:
            yield from optimizers_in(part)


# Checks


def _require_module(module: Any) -> None:
    if isinstance(module, OptimizedModule):
        raise TypeError(f"the module is compiled as a whole: {COMPILE_A_PART}.")
    if not isinstance(module, pl.LightningModule):
        raise TypeError(
            f"module must be a LightningModule of the package lightning, not {type(module).__name__} of "
            f"{type(module).__module__}: for other models, use Twins or fit."
        )
    if not module.automatic_optimization:
        raise TypeError("the module uses manual optimization, which TwinModule does not support: use automatic.")
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if _is_compiled_method(value) and not isinstance(part, OptimizedModule):  # which can be copied
                path = [name] if key == "_compiled_call_impl" else [name, key]
                what = repr(".".join(filter(None, path))) if any(path) else "the module"
                raise TypeError(f"{what} is compiled for this module only, but twins are copies: {COMPILE_A_PART}.")


def _is_compiled_method(value: Any) -> bool:
    """Whether a copy of the module would lose it, or would run the original module."""
    if not hasattr(value, "_torchdynamo_orig_callable"):
        return False
    return isinstance(getattr(inspect.unwrap(value), "__self__", None), nn.Module)


def _require_strategy(strategy: Strategy) -> None:
    if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)) or isinstance(strategy, DeepSpeedStrategy):
        raise TypeError(
            f'TwinModule trains in one process or with strategy="ddp", not with {type(strategy).__name__}: to '
            "shard the twins, write a training loop with fully_shard."
        )


def _require_options(options: Any) -> None:
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise TypeError(f'options must map names to values, such as {{"num_workers": 2}}, not {shown(options)}.')
    for name in options.keys() & {"dataset", "bootstrap", "batch_size", "resample", "seed", "share", "twin"}:
        raise TypeError(f"options must not contain {name!r}: TwinModule passes it to the loader itself.")
    if "control" in options:
        raise TypeError("TwinModule has no control: use fit(..., control=True), or a loop with ControlledTwins.")


def _require_loss(resample: str, loss: Any) -> None:
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of (module, batch), not {shown(loss)}.")
    if resample == "counts" and loss is None:
        raise ValueError(
            'resample="counts" needs a loss for each sample, but a training_step returns one for the batch: use '
            '"draws", or give loss=, a function of (module, batch) that returns one value per sample.'
        )
