"""Twin-Boot with the `Trainer` of Hugging Face.

from twinboot.integrations.huggingface import TwinTrainer, load

trainer = TwinTrainer(model, args, train_dataset=data)
trainer.train()
prediction = trainer.predict(new)                    # .probs .std .entropy .mutual_information
# TwinTrainer(..., spread=0.3) gives .std the right size

trainer.estimate().calibrate(held_out)               # predict and save_model use its temperature and scale
trainer.save_model(folder)                           # for any from_pretrained, with sigma.safetensors beside it
estimate = load(folder, Model.from_pretrained(folder))
estimate.predict(texts, tokenizer=tokenizer)
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Subset

from .._core.extras import how_to_install

try:
    import accelerate  # noqa: F401 - the Trainer needs it only when one is made
    from transformers import DefaultFlowCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers import __version__ as installed
    from transformers.trainer_callback import CallbackHandler, TrainerControl
except ImportError as error:
    raise ImportError(
        f"TwinTrainer needs transformers 5.22 or newer, and accelerate: {how_to_install('huggingface')}"
    ) from error

from .. import Bootstrap, Estimate, PairedLoader, Prediction, Protocol, Twins, pool_gradients, resets
from .._core import ranks, seeds
from .._core.checks import one_of, require_number, require_whole, shown
from .._core.copies import Places, replicate
from .._core.seeds import own_randomness
from .._core.tensors import overwrite_
from ..data.loader import require_map_style
from ..estimate import files, spread
from ..estimate.forward import evaluating
from ..estimate.prediction import TASKS, Task
from ..groups import Partition, assign, fixed_entries
from ..training.options import require_whole_weights
from ..training.protocol import HUGGING_FACE, complete, refuse_settings
from ..training.rounds import GENTLE, Settled, average_buffers, falling, least_of, settle_around, without_noise
from ..training.validation import ENOUGH, FEW, Validation
from . import card
from .resuming import read_twins, write_twins

__all__ = ["TwinTrainer", "load"]

NOT_USED = ("resample", "average")  # settings of a protocol: `training/protocol.py` says why
SIGMA = "sigma.safetensors"
MULTI_LABEL = "multi_label_classification"
# The settings of an Estimate.
DEFAULTS = {
    "temperature": 1.0,
    "scale": 1.0,
    "centered": False,
    "dropout": False,
    "task": None,
    "df_per_weight": None,
    "scores": None,
}
SHARDED = "FSDP and DeepSpeed shard the weights, but twins need them whole: use torchrun with DDP."
DIVIDED = "args.parallelism_config divides the model among processes, but twins need it whole: use torchrun with DDP."

# What a Trainer does besides training: not while twins settle.
OFF = {
    **dict.fromkeys(("eval_strategy", "save_strategy", "logging_strategy"), "no"),
    **dict.fromkeys(("load_best_model_at_end", "eval_on_start", "auto_find_batch_size", "push_to_hub"), False),
}

# The methods of Trainer that TwinTrainer replaces. Under another name, the Trainer would never call ours.
REPLACED = (
    *("train", "get_train_dataloader", "create_optimizer", "_wrap_model", "training_step", "_get_num_items_in_batch"),
    *("_clip_grad_norm", "floating_point_ops", "_track_num_input_tokens", "evaluation_loop", "_save"),
    *("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler", "_load_best_model", "create_model_card"),
    *("num_examples", "get_total_train_batch_size"),
)
if missing := [name for name in REPLACED if not hasattr(Trainer, name)]:
    raise ImportError(
        f"the Trainer of transformers {installed} has no method {missing[0]}, which TwinTrainer replaces: use "
        "transformers 5.22, or a twinboot that supports this version."
    )


class TwinTrainer(Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` that trains twins of the model.

    Arguments, collators, callbacks, metrics and schedulers work as in `Trainer`. Each step trains each twin on a batch
    of its own bootstrap sample, one after the other, so that activations of only one twin are in memory.

    - `model` is the model that you passed. It has the mean of the twins in evaluation, in saved models, and after
      training, with BatchNorm statistics of up to 1024 training samples.
    - With adapters (peft), only the trained weights are copied; the twins share the frozen backbone.
    - Without an `eval_dataset`, evaluation uses the out-of-bag samples, which neither twin trains on.
    - `max_grad_norm` clips each twin separately. With gradient accumulation, each micro-batch gets new weight noise.
    - Resets wait for the next step. So evaluation and checkpoints see the trained mean.
    - With `spread=0.3`, twins settle around the model after training, and sigma comes from them. The model does not
      change. Checkpoints have the sigma of the training; a finished run that is resumed settles again, bit for bit.
    - A run resumed from a checkpoint equals the uninterrupted run bit for bit. It needs the same data and
      the same protocol. `twins.pt` in the checkpoint has the twins, without the backbone.
    - A step is one of all twins, for schedules, the bar of progress and checkpoints. Numbers of samples, tokens and
      operations are those of all twins.
    - `push_to_hub` sends sigma with each model, and `create_model_card` adds the error bars to the card.
    - Under `torchrun`, the processes share each twin's batches (DDP). FSDP, DeepSpeed and several GPUs in one process
      raise an error.
    - The loss is that of `Trainer`. Models that accept `num_items_in_batch` but do not use it, such as BERT for
      sequence classification, get a larger loss with accumulation or several processes, as in any `Trainer`
      (huggingface/transformers#47688). Set `model.accepts_loss_kwargs = False` for them.

    Args:
        model: The model, as in `Trainer`.
        args: The `TrainingArguments`. `args.seed` is also the seed of the bootstrap and of all noise.
        data_collator: As in `Trainer`.
        train_dataset: Map-style training data.
        eval_dataset: As in `Trainer`; by default the out-of-bag samples.
        protocol: The settings of the method, as in `fit`: groups, resets, noise and pooled gradients. By default `mode`
            is `"centered"`, because the learning rate of a `Trainer` falls to 0, and small steps cannot undo the noise
            that a sampling reset adds to the mean. For models that are not pretrained, reset within the first epoch:
            `protocol=Protocol(reset=resets.steps(resets.growing(10, 1.1, most=500)))`.
        bootstrap: Which twin sees which sample. Its `replicas` is the number of twins. By default
            `Bootstrap(len(train_dataset), seed=args.seed)`.
        spread: After `train()`, twins settle around the model for this share of its steps, such as 0.3, as in `fit`:
            without noise and resets, with the Trainer's own loss, optimizer and clipping, and a learning rate that
            starts at 5/3 of that of the training and falls to 0. If their loss ends far above that of the model, a
            lower rate is tried. Draws around the model's own outputs then spread predictions as much as these twins do.
            0 leaves it out. So does a model that `predict` does not support.
        options: Further arguments of `Trainer`. For another optimizer, use `optimizer_cls_and_kwargs`.

    >>> from tempfile import mkdtemp
    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    >>> model = BertForSequenceClassification(BertConfig(vocab_size=9, num_labels=3, **size))
    >>> data = [{"input_ids": [1, 2 + i % 3, 3], "labels": i % 3} for i in range(60)]
    >>> args = TrainingArguments(mkdtemp(), use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True)
    >>> trainer = TwinTrainer(model, args, train_dataset=data)
    >>> _ = trainer.train()
    {'train_runtime': ...}
    >>> trainer.predict(data[:5]).probs.shape
    torch.Size([5, 3])
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        protocol: Protocol | None = None,
        bootstrap: Bootstrap | None = None,
        spread: float = 0.0,
        **options: Any,
    ) -> None:
        refuse_settings(options, "TwinTrainer", NOT_USED)
        require_number("spread", spread)
        self.spread = float(spread)
        self.protocol = complete(protocol, HUGGING_FACE, "TwinTrainer", without=NOT_USED)
        args = TrainingArguments("tmp_trainer") if args is None else args
        _require_arguments(model, args)
        self._unseen: Subset[Any] | None = None  # the evaluation data, if none were given
        if train_dataset is not None:
            require_map_style(train_dataset)
            bootstrap = Bootstrap(len(train_dataset), seed=args.seed) if bootstrap is None else bootstrap
            # Only to check the arguments: each training makes its own loader.
            PairedLoader(train_dataset, bootstrap, args.train_batch_size, drop_last=args.dataloader_drop_last)
            if eval_dataset is None and len(bootstrap.unseen):
                self._unseen = eval_dataset = Subset(train_dataset, bootstrap.unseen.tolist())
        self.bootstrap = bootstrap
        self._current: _CurrentTwin | None = None
        self._current_model: nn.Module | None = None  # the one that `_current` has twins of
        self._loader: PairedLoader  # made for each training
        self._steps: DataLoader[Any] | None = None  # of that loader
        self._trained: TrainedModel | None = None  # what `model` holds; None before training and while twins are ahead
        self._twins_are_ahead = False  # whether the twins have changed since `model` got their mean
        super().__init__(model, args, data_collator, train_dataset, eval_dataset, **options)
        self._refuse_unsupported()
        if train_dataset is not None:
            assign(self.model, self.protocol.groups)  # refuses unknown groups now: the twins are made later
        self.add_callback(_TwinCallback(self))

    def _refuse_unsupported(self) -> None:
        if self.optimizer is not None:
            raise ValueError("the optimizer must train the twins, which are made later: use optimizer_cls_and_kwargs.")
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:  # by a config of accelerate, or by its launcher
            raise ValueError(SHARDED)
        if self.args.n_gpu > 1:
            raise ValueError(f"one process has {self.args.n_gpu} GPUs: use torchrun, with one process for each GPU.")
        if (strategy := self.args.train_sampling_strategy) not in ("random", "sequential"):
            raise ValueError(f'train_sampling_strategy must be "random" or "sequential" for twins, not {strategy!r}.')

    @property
    def twins(self) -> Twins:
        """The twins of `model`. They are made at the start of training."""
        return self._current_twin().twins

    def estimate(self) -> Estimate:
        """The mean model with sigma, as they are now, or the best ones with `load_best_model_at_end`.

        Until training continues, this returns the same object. `predict`, `save_model` and checkpoints use its
        settings, such as temperature, scale and dropout, which you or `calibrate` may change. The task comes from the
        model's config; it is None without one.
        """
        return self._require_trained().estimate()

    def predict(
        self,
        test_dataset: Any,
        samples: int = 32,
        *,
        task: Task | None = None,
        scale: float | None = None,
        seed: int | None = None,
    ) -> Prediction:
        """Predict for a dataset with draws of the weights. Labels in the dataset are ignored.

        Settings are those of `estimate()`. With several processes, each predicts the whole dataset.

        Args:
            test_dataset: The inputs. Without labels, T5 needs `decoder_input_ids`.
            samples: Number of draws of the weights; 0 uses the mean model.
            task: By default that of `estimate()`. It comes from the model's config: one output or
                `problem_type="regression"` is regression.
            scale: Factor on sigma; by default that of `estimate()`.
            seed: Seed of the draws; by default `args.seed`, or that of `estimate().conformalize()`, so that the
                prediction has sets or intervals.

        Returns:
            A `Prediction` with the classes along dimension 1. For token classification, pad all inputs to one length.
        """
        trained = self._require_trained()
        self._match_precision()
        collate = self._get_collator_with_removed_columns(self.data_collator, "prediction")
        loader = DataLoader(test_dataset, self.args.eval_batch_size, collate_fn=collate, generator=torch.Generator())
        batches = [self._without_labels(batch) for batch in loader]
        if seed is None:
            scores = trained.settings["scores"]
            seed = self.args.seed if scores is None else scores.settings["seed"]
        return trained.predict(lambda i: self._prepare_inputs(batches[i]), len(batches), samples, task, scale, seed)

    def _without_labels(self, batch: Any) -> dict[str, Any]:
        return {name: value for name, value in batch.items() if name not in self.label_names}

    def _current_twin(self) -> _CurrentTwin:
        if self._current is None or self._current_model is not self.model:  # `model_init` makes one for each training
            replicas = self.bootstrap.replicas if self.bootstrap else 2
            self._current = _CurrentTwin(self.model, Twins(self.model, replicas, self.protocol.groups, self.args.seed))
            self._current_model = self.model
        return self._current

    def _require_trained(self) -> TrainedModel:
        self._update_model()
        if self._trained is None or self._trained.model is not self.model:
            raise RuntimeError("this model was not trained yet, so there is no sigma: call train() first.")
        return self._trained

    def _note_change_of_twins(self) -> None:
        self._trained, self._twins_are_ahead = None, True

    def _update_model(self) -> None:
        """Copy the mean of the twins into `model`, if they have changed."""
        if self._twins_are_ahead:
            estimate = self.twins.estimate(scale=self._loader.bootstrap.scale)
            self._update_batchnorm(estimate.module)
            self._trained = TrainedModel.from_estimate(estimate, self.model)
            self._twins_are_ahead = False

    def _update_batchnorm(self, mean: nn.Module) -> None:
        self._validation().update_batchnorm(mean, self._run, self.args.device, ENOUGH)

    def _validation(self) -> Validation:
        collate = self._get_collator_with_removed_columns(self.data_collator, "training")
        options = {"collate_fn": collate, "num_workers": self.args.dataloader_num_workers}
        return Validation(self.train_dataset, self._loader.bootstrap, self._train_batch_size, self.args.seed, options)

    @torch.no_grad()
    def _run(self, module: nn.Module, batch: Any, number: int) -> tuple[float, int]:
        """The loss of a module on a batch, and the number of samples."""
        size = next((len(t) for t in batch.values() if isinstance(t, Tensor) and t.ndim), 1)
        with self.accelerator.autocast():
            return self.compute_loss(module, self._prepare_inputs(batch)).item(), size

    def _settle(self) -> None:
        """Give the model the sigma and the scale of twins that settle around it."""
        trained, device = self._require_trained(), self.args.device
        self._match_precision()
        batches = [self._without_labels(batch) for batch in self._validation().spread_batches(FEW)]
        fetch = lambda number: self._prepare_inputs(batches[number])  # noqa: E731
        if not trained.can_predict(fetch):
            return

        def attempt(factor: float) -> Settled[TwinTrainer]:
            around = self._around(trained, factor)
            with own_randomness(device, self.args.seed, "settle", *ranks.own()):
                Trainer.train(around)
            average_buffers(around.twins)
            validation, twins = around._validation(), list(around.twins)
            models = [trained.model] * len(twins), twins
            return Settled(around, *(validation.loss_in_training(of, around._run, device) for of in models))

        settled = settle_around(attempt, least_of(trained.settings["task"]), stacklevel=3, factors=GENTLE)
        if settled is not None:
            scale, seed = self._loader.bootstrap.scale, seeds.derive(self.args.seed, "spread")
            trained.take_spread(settled.twins, fetch, len(batches), seed, scale)

    def _around(self, trained: TrainedModel, factor: float) -> TwinTrainer:
        """A copy of this trainer for twins that settle around the model, with so many times its learning rate."""
        around, args = copy.copy(self), copy.copy(self.args)
        for name, value in OFF.items():
            setattr(args, name, value)
        args.max_steps = max(1, round(self.spread * self.state.global_step))
        args.seed = args.data_seed = seeds.derive(self.args.seed, "settle") % 2**32
        around.args, around.protocol, around.model_init = args, without_noise(self.protocol), None
        [around.model] = replicate(trained.model, own=trained.partition.parameter_shapes)
        around.model_wrapped, around._current, around._trained = around.model, None, None
        for p in Places(around.model, list(trained.partition.parameter_shapes)).read():
            p.requires_grad_()  # peft freezes an adapter that it loads
        around.optimizer = around.lr_scheduler = None
        callbacks = [DefaultFlowCallback(), *([] if args.disable_tqdm else [ProgressCallback()])]
        callbacks += [_TwinCallback(around, "twins settle")]
        around.callback_handler = CallbackHandler(callbacks, around.model, around.processing_class, None, None)
        around.control = TrainerControl()

        def create_optimizer(model: Any = None) -> torch.optim.Optimizer:
            optimizer = type(self).create_optimizer(around, model)
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
            return optimizer

        def create_scheduler(num_training_steps: int, optimizer: Any = None) -> Any:
            around.lr_scheduler = falling(around.optimizer, num_training_steps)
            return around.lr_scheduler

        silent = lambda *args, **kwargs: None  # noqa: E731 - the user's loggers are for the training
        around.__dict__ |= {"create_optimizer": create_optimizer, "create_scheduler": create_scheduler, "log": silent}
        return around

    def _match_precision(self) -> None:
        """Run `model` under autocast if the twins train with it, as a Trainer's own model does."""
        if self.accelerator.native_amp and not hasattr(self.model, "_original_forward"):
            self.accelerator.prepare_model(self.model, evaluation_mode=True)

    # The methods that the Trainer calls: REPLACED

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        """Train as `Trainer.train`, and let twins settle around the model (`spread`)."""
        output = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        if self.spread and trial is None:  # in a search, only the trained model counts
            self._settle()
        return output

    def get_train_dataloader(self) -> DataLoader[Any]:
        """A tuple of batches for each step: one batch per twin, from its own bootstrap sample."""
        if self.train_dataset is None or self.bootstrap is None:
            raise ValueError("training needs a train_dataset.")
        self._loader = PairedLoader(
            self.train_dataset,
            self.bootstrap,
            self._train_batch_size,
            shuffle=self.args.train_sampling_strategy != "sequential",
            drop_last=self.args.dataloader_drop_last,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, "training"),
        )
        options = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "multiprocessing_context")
        self._steps = self._loader.dataloader(**{name: getattr(self.args, f"dataloader_{name}") for name in options})
        return self._steps

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """The samples of an epoch: in training, those that all twins read."""
        own = dataloader is self._steps
        return int(self._loader.bootstrap.counts.sum() if own else super().num_examples(dataloader))

    def get_total_train_batch_size(self, args: Any) -> int:
        """The samples of a step: those of all twins."""
        of_one = int(super().get_total_train_batch_size(args))
        return of_one * self.bootstrap.replicas // self.bootstrap.parts if self.bootstrap else of_one

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        return super().create_optimizer(self.twins)  # type: ignore[no-any-return]

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if not training:
            return super()._wrap_model(self.model, training=False)
        return self._current_twin().prepared(self.accelerator)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        current, losses = self._current_twin(), []
        self._note_change_of_twins()
        with current.twins.sampled(self.protocol.noise, local=self.protocol.local):
            counts = [None] * len(inputs) if num_items_in_batch is None else num_items_in_batch
            for current.number, (batch, count) in enumerate(zip(inputs, counts, strict=True)):
                losses.append(super().training_step(model, batch, count))
        return torch.stack(losses).mean()

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if not batch_samples or isinstance(batch_samples[0], Mapping):
            return super()._get_num_items_in_batch(batch_samples, device)
        of_twins = map(list, zip(*batch_samples, strict=True))
        return [super(TwinTrainer, self)._get_num_items_in_batch(batches, device) for batches in of_twins]

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        self.accelerator.unscale_gradients()
        pool_gradients(self.twins, self.protocol.pooled)
        norms = [clip_grad_norm_(twin.parameters(), self.args.max_grad_norm) for twin in self.twins]
        return torch.stack(norms).mean()

    def floating_point_ops(self, inputs: Any) -> int:
        return sum(super(TwinTrainer, self).floating_point_ops(batch) for batch in inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for batch in inputs:
            super()._track_num_input_tokens(batch)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._update_model()
        self._match_precision()
        return super().evaluation_loop(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        self._update_model()
        super()._save(output_dir, state_dict)
        self._save_sigma(output_dir or self.args.output_dir)

    def _save_sigma(self, folder: str) -> None:
        if self._has_sigma() and self.args.should_save:
            os.makedirs(folder, exist_ok=True)
            self._require_trained().save(folder)

    def _has_sigma(self) -> bool:
        return self._trained is not None and self._trained.model is self.model

    def create_model_card(self, *args: Any, **options: Any) -> None:
        """Write the README.md of `args.output_dir` as `Trainer.create_model_card` does, with a section on error bars.
        `push_to_hub` calls it."""
        super().create_model_card(*args, **options)
        if not (self._has_sigma() and self.is_world_process_zero()):
            return
        trained, replicas = self._require_trained(), self.bootstrap.replicas if self.bootstrap else 2
        has_tokenizer = (Path(self.args.output_dir) / "tokenizer_config.json").is_file()
        about = trained.partition, trained.settings, self._last_evaluation(), self.hub_model_id, has_tokenizer
        card.add_section(self.args.output_dir, self.model, replicas, *about)

    def _last_evaluation(self) -> tuple[str, dict[str, Any]] | None:
        """On which samples the model was evaluated last, or when it was best, and what was logged then."""
        logged = [entry for entry in self.state.log_history if "eval_loss" in entry]
        if self.args.load_best_model_at_end:
            logged = [entry for entry in logged if entry["step"] == self.state.best_global_step] or logged
        if not logged:
            return None
        unseen = self.eval_dataset is self._unseen
        return "out-of-bag samples, which no twin saw" if unseen else "the evaluation data", logged[-1]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            write_twins(output_dir, self.twins, self._loader, self)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            read_twins(checkpoint, self.twins, self._loader, self)
            self._note_change_of_twins()
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        self._update_model()
        super()._load_best_model()
        self._trained = TrainedModel.read(self.state.best_model_checkpoint, self.model)


class _TwinCallback(TrainerCallback):  # type: ignore[misc]
    """The parts of Algorithm 1 before and after a step: resets, pooled gradients and sigma."""

    def __init__(self, trainer: TwinTrainer, name: str = "twins") -> None:
        self.trainer, self.name, self.resumed_in_epoch, self.stepped = trainer, name, False, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for callback in self.trainer.callback_handler.callbacks:
            if (bar := getattr(callback, "training_bar", None)) is not None:  # a step of it is one of all twins
                bar.set_description(f"{self.trainer.twins.replicas} {self.name}", refresh=False)
        self.resumed_in_epoch = (state.epoch or 0) % 1 != 0  # the reset before this epoch was done
        self.stepped = state.global_step > 0  # resumed after a step: its reset was not done

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        resumed, self.resumed_in_epoch = self.resumed_in_epoch, False
        done = math.floor(state.epoch) if resumed else math.ceil(state.epoch or 0)
        self.trainer._loader.epoch = done + 1
        _, by_epoch = resets.steps_and_epochs(self.trainer.protocol.reset)
        if done and not resumed and resets.is_due(by_epoch, done):
            self._reset()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        stepped, self.stepped = self.stepped, False
        by_step, _ = resets.steps_and_epochs(self.trainer.protocol.reset)
        if stepped and resets.is_due(by_step, state.global_step):
            self._reset()

    def _reset(self) -> None:
        self.trainer.twins.reset(self.trainer.protocol.mode)
        self.trainer._note_change_of_twins()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.max_grad_norm <= 0:  # otherwise _clip_grad_norm has pooled them
            pool_gradients(self.trainer.twins, self.trainer.protocol.pooled)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stepped = True
        self.trainer.twins.update()

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The Trainer copies the files of a checkpoint there that it knows, and this is none of them.
        self.trainer._save_sigma(args.output_dir)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._update_model()


class _CurrentTwin(nn.Module):
    """The module that the Trainer's loop trains: it runs the twin of the current `number`.

    With several processes, each twin has its own DistributedDataParallel, because each has its own backward pass.
    """

    def __init__(self, model: Any, twins: Twins) -> None:
        super().__init__()
        self.twins, self.number = twins, 0
        # Lists hide modules from PyTorch: these have no further weights to train.
        self._prepared, self._runners = list[nn.Module](), list[Any](twins)
        self._name = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._runners[self.number](*args, **kwargs)

    def prepared(self, accelerator: Any) -> nn.Module:
        """This module with autocast and compilation, as accelerate was configured."""
        if not self._prepared:
            if accelerator.num_processes > 1:
                options = accelerator.ddp_handler.to_kwargs() if accelerator.ddp_handler else {}
                self._runners = [DistributedDataParallel(twin, **options) for twin in self.twins]
            self._prepared.append(accelerator.prepare_model(self, evaluation_mode=True))
        return self._prepared[0]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for runner in self._runners:
                stack.enter_context(runner.no_sync())
            yield

    def _get_name(self) -> str:  # the Trainer uses it to decide whether to shift labels for label smoothing
        return self._name


def _require_arguments(model: Any, args: Any) -> None:
    """Refuse arguments with which the Trainer would fail later, or which accelerate would ignore."""
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if not isinstance(args, TrainingArguments):
        raise TypeError(f"args must be TrainingArguments, not {type(args).__name__}.")
    require_whole("per_device_train_batch_size", args.per_device_train_batch_size, 1)
    for seed in (args.seed, 0 if args.data_seed is None else args.data_seed):
        if not 0 <= seeds.require_seed(seed) < 2**32:  # the range of numpy
            raise ValueError(f"a seed of TrainingArguments must be between 0 and 2**32 - 1, not {seed!r}.")
    if args.fsdp:  # on a CPU, accelerate ignores it
        raise ValueError(SHARDED)
    if args.parallelism_config is not None:
        raise ValueError(DIVIDED)
    require_whole_weights("TwinTrainer", model)


def load(folder: str | os.PathLike[str], model: nn.Module) -> Estimate:
    """Load the estimate that `TwinTrainer.save_model(folder)` saved.

    Args:
        folder: The folder with the saved model and `sigma.safetensors`.
        model: The model that `from_pretrained(folder)` of its class, or of `peft.PeftModel`, returns. It is used
            without a copy.

    Returns:
        An `Estimate` with the settings that `TwinTrainer.estimate()` had, such as temperature, scale and task.
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"folder must be the path that save_model wrote to, not {shown(folder)}.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, as from_pretrained returns, not {type(model).__name__}.")
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"there is no folder {os.fspath(folder)!r}: give the one that save_model wrote to.")
    trained = TrainedModel.read(folder, model)
    return _estimate(model, trained.partition, trained.settings)


class TrainedModel:
    """The user's model with the mean weights of the twins, and their sigma."""

    def __init__(self, model: nn.Module, partition: Partition, saved: Mapping[str, Any] = DEFAULTS) -> None:
        self.model, self.partition = model, partition
        settings = {name: saved.get(name, default) for name, default in DEFAULTS.items()}
        self._settings = {**settings, "task": settings["task"] or _task_of(model)}
        self._estimate: Estimate | None = None

    @classmethod
    @torch.no_grad()
    def from_estimate(cls, estimate: Estimate, model: nn.Module) -> TrainedModel:
        """Copy the mean weights and buffers of an estimate into the model."""
        names = list(estimate.partition.parameter_shapes)
        for to, mean in zip(Places(model, names).read(), Places(estimate.module, names).read(), strict=True):
            to.copy_(mean)
        for to, mean in zip(model.buffers(), estimate.module.buffers(), strict=True):
            overwrite_(to, mean)
        if (config := getattr(model, "config", None)) is not None:  # a model sets it when it first sees labels
            config.problem_type = getattr(estimate.module.config, "problem_type", None)
        return cls(model, estimate.partition, {**DEFAULTS, "df_per_weight": estimate.df_per_weight})

    @classmethod
    def read(cls, folder: str | os.PathLike[str], model: nn.Module) -> TrainedModel:
        path = Path(folder) / SIGMA
        _, description, labels, sigma, settings, _ = files.read(path)
        here = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        for name, shape in description["parameters"].items():
            if here.get(name) != tuple(shape):
                found = here.get(name, "missing")
                raise ValueError(
                    f"{str(path)!r} belongs to another model: {name!r} has shape {tuple(shape)} there, {found} here."
                )
        partition = Partition.restore(description, labels, sigma, fixed_entries(model))
        return cls(model, partition.to(next(model.parameters()).device), settings)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write sigma and the settings of the estimate."""
        known = self.partition
        files.write(Path(folder) / SIGMA, {}, known.describe(), known.labels(), known.sigma, self.settings)

    def estimate(self) -> Estimate:
        """The same object each time. It is made on demand, because it has its own copy of the trained weights."""
        if self._estimate is None:
            [module] = replicate(self.model, own=self.partition.parameter_shapes)
            self._estimate = _estimate(module, copy.deepcopy(self.partition), self._settings)
        return self._estimate

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the estimate, which the user may have changed."""
        return self._settings if self._estimate is None else {name: getattr(self._estimate, name) for name in DEFAULTS}

    def predict(
        self, fetch: Callable[[int], Any], batches: int, samples: int, task: Task | None, scale: float | None, seed: int
    ) -> Prediction:
        """Predict for the batches that `fetch` returns by their numbers. This uses the model itself, not a copy."""
        task = task or self.settings["task"] or self._refuse_task()
        estimate = self._by_numbers(_Logits(self.model, fetch, task))
        numbers = torch.arange(batches)
        return estimate.predict(numbers, samples, task, batch_size=1, scale=scale, seed=seed, vectorize=False)

    def can_predict(self, fetch: Callable[[int], Any]) -> bool:
        """Whether the model gives logits for a batch without labels."""
        try:
            with torch.no_grad(), evaluating(self.model):
                _Logits(self.model, fetch, self.settings["task"])(torch.tensor(0))
        except (TypeError, ValueError):
            return False
        return True

    def take_spread(self, twins: Twins, fetch: Callable[[int], Any], batches: int, seed: int, scale: float) -> None:
        """Take sigma from twins that have settled, and the scale with which draws spread as much as these twins do."""
        self.partition.sigma.copy_(twins.partition.scaled(scale).sigma)
        task, self._estimate = self.settings["task"], None
        estimate = self._by_numbers(_Logits(self.model, fetch, task, one_shape=False))
        models = [_Logits(twin, fetch, task, one_shape=False) for twin in twins]
        numbers = list(torch.arange(batches))
        spread.match_spread_(estimate, models, numbers, seed, scale)
        self._settings = {**self._settings, "scale": estimate.scale, "centered": estimate.centered}

    def _by_numbers(self, logits: _Logits) -> Estimate:
        partition = copy.deepcopy(self.partition)  # the same weights, by their names in _Logits
        partition.parameter_shapes = {f"model.{name}": shape for name, shape in partition.parameter_shapes.items()}
        return _estimate(logits, partition, self.settings)

    def _refuse_task(self) -> Task:
        if getattr(getattr(self.model, "config", None), "problem_type", None) == MULTI_LABEL:
            raise ValueError("predict does not support multi-label classification: use estimate().sample() for logits.")
        raise ValueError(f"the model has no config that says what it predicts: give task={one_of(TASKS)}.")


def _estimate(module: nn.Module, partition: Partition, settings: Mapping[str, Any]) -> Estimate:
    estimate = Estimate(module, partition)
    for name, value in settings.items():
        setattr(estimate, name, value)
    return estimate


def _task_of(model: Any) -> Task | None:
    """The task in a model's config. None if it has none, or for multi-label classification."""
    config = getattr(model, "config", None)
    kind, labels = getattr(config, "problem_type", None), getattr(config, "num_labels", None)
    if kind == MULTI_LABEL or (kind is None and labels is None):
        return None
    return "regression" if kind == "regression" or labels == 1 else "classification"


class _Logits(nn.Module):
    """The logits for a batch, by its number. `Estimate.predict` takes tensors; batches of any kind become numbers."""

    def __init__(
        self, model: nn.Module, fetch: Callable[[int], Any], task: Task | None, one_shape: bool = True
    ) -> None:
        super().__init__()
        self.model, self.fetch, self.task, self.one_shape = model, fetch, task, one_shape
        self.shape: tuple[int, ...] | None = None

    def forward(self, number: Tensor) -> Tensor:
        # A model may write into its inputs, and the next draw needs them again.
        batch = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, self.fetch(int(number)))
        try:
            output = self.model(**batch)
        except ValueError as error:  # T5 raises it without saying why; BART makes decoder inputs from input_ids
            config = getattr(self.model, "config", None)
            if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" not in batch:
                raise ValueError("predict ignores labels, so this model needs decoder_input_ids.") from error
            raise
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise TypeError(f"predict needs a model that returns logits, which {type(output).__name__} lacks.")
        if self.task == "classification" and logits.ndim == 3:  # one label per token: the classes are last
            logits = logits.movedim(-1, 1)
        shape, self.shape = self.shape or tuple(logits.shape[1:]), tuple(logits.shape[1:])
        if shape != self.shape and self.one_shape:
            raise ValueError(f"batches have logits of shape {shape} and {self.shape}: pad all inputs to one length.")
        return logits
