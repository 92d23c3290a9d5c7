"""Twin-Boot in the Trainer of Hugging Face.

    from twinboot.integrations.huggingface import TwinTrainer

    trainer = TwinTrainer(model, args, train_dataset=data)
    trainer.train()
    prediction = trainer.predict(new)                    # .probs .std .entropy .mutual_information

Arguments, collators, callbacks, metrics and schedulers are those of a `Trainer`. `trainer.model` is the model that you
gave, and holds the mean of the twins whenever it is judged, saved or handed back; `trainer.twins` are what trains.

- One step is a step of each twin, on a batch of its own bootstrap sample, one twin after the other: the activations of
  one are gone before those of the other come. `max_grad_norm` clips each twin by itself. With accumulation each
  micro-batch has noise of its own.
- With an adapter (peft) the frozen backbone is held once, and only what is trained is twinned (docs/lora-memory.md).
- BatchNorm of the mean has statistics of its own, of at most 1024 samples that some twin sees, taken whenever the mean
  is judged or saved.
- Without an `eval_dataset` the samples that no twin saw are the validation set.
- A reset comes at the start of the epoch that follows, or of the step, so that what is judged and saved is from before.
- A checkpoint holds the mean model as transformers writes it, `sigma.safetensors`, and what a run needs to go on: the
  twins' own weights, without the backbone, in `twins.pt`. A run that is resumed from it equals the one that was not
  interrupted, bit for bit. It must have the same data, `groups`, `reset`, `mode`, `noise` and `pooled`.
- Processes of `torchrun` share each twin's batches (DDP). FSDP, DeepSpeed and several GPUs in one process are refused.
- The loss is the Trainer's own. Heads that take `num_items_in_batch` and leave it unused, such as BERT's for sequences,
  get a larger one with accumulation or several processes, as from any Trainer (huggingface/transformers#47688); set
  `model.accepts_loss_kwargs = False` for them.

`save_model(folder)` writes the mean model as transformers or peft does, for anybody's `from_pretrained`, and
`sigma.safetensors` beside it; `load(folder, model)` makes an `Estimate` of both. What was calibrated or set in
`trainer.estimate()` is kept, too:

    trainer.estimate().calibrate(held_out)               # its temperature and scale
    trainer.predict(new)                                 # with them
    trainer.save_model(folder)                           # with them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Subset

from ..._core.extras import how_to_install

try:
    import accelerate  # noqa: F401 - the Trainer asks for it only when one is made
    from transformers import Trainer, TrainingArguments
except ImportError as error:
    raise ImportError(
        f"this Trainer needs transformers 5.22 or newer, and accelerate: {how_to_install('huggingface')}"
    ) from error

from ... import resets
from ..._core.checks import require_number
from ...data.bootstrap import Bootstrap
from ...data.loader import PairedLoader, require_map_style
from ...estimate.estimate import Estimate
from ...estimate.prediction import Prediction, Task
from ...groups import Grouping, assign
from ...twins import Twins, pool_gradients, require_share
from ..resuming import read_twins, write_twins
from .pairs import Algorithm, Pair
from .pretrained import Known, load, read_sigma, take_mean
from .trainers import SPREAD, called_by_trainer, give_statistics, refuse, require_arguments, workers

__all__ = ["TwinTrainer", "load"]


class TwinTrainer(Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` that trains twins of the model.

    Args:
        model, args, data_collator, train_dataset, eval_dataset, options: as in `Trainer`. The training set must be
            map-style, and its seed, that of the bootstrap and of all noise is `args.seed`. An optimizer of your own
            goes into `optimizer_cls_and_kwargs`, as it is made for the twins.
        groups: which weights share one sigma, as in `Twins`.
        reset: after which epochs the twins are reset, by default after each; or after which steps, for weights that
            were not trained before, as `resets.steps(resets.growing(10, 1.1, most=500))`.
        mode: how: `"centered"`, `"sample"` as in the paper, or `"mean"`. The default is not the paper's, since the
            learning rate of a `Trainer` falls to 0, and small steps cannot undo the noise that `"sample"` puts on the
            mean.
        noise: times sigma is the noise on the weights in training; 1 in the paper.
        pooled: the share of each twin's gradients, before they are clipped, that is the mean of all, as in `fit`.
        bootstrap: who sees which sample, if not the default; it also says how many twins there are.

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
        groups: str | Grouping = "layer",
        reset: Callable[[int], bool] | None = None,
        mode: resets.Mode = "centered",
        noise: float = 1.0,
        pooled: float = 0.0,
        bootstrap: Bootstrap | None = None,
        **options: Any,
    ) -> None:
        resets.require_mode(mode)
        require_number("noise", noise)
        require_share(pooled)
        args = TrainingArguments("tmp_trainer") if args is None else args
        require_arguments(model, args)
        if args.fsdp:  # on a CPU accelerate would leave it out without a word
            raise ValueError(SPREAD)
        if train_dataset is not None:
            require_map_style(train_dataset)
            bootstrap = Bootstrap(len(train_dataset), seed=args.seed) if bootstrap is None else bootstrap
            # Made again for each training; this one is to refuse now what does not go together.
            PairedLoader(train_dataset, bootstrap, args.train_batch_size, drop_last=args.dataloader_drop_last)
            if eval_dataset is None and len(bootstrap.unseen):
                eval_dataset = Subset(train_dataset, bootstrap.unseen.tolist())
        self.groups, self.mode, self.noise, self.pooled, self.bootstrap = groups, mode, noise, pooled, bootstrap
        self.due = resets.checked(reset, resets.every(1))
        self._pair: Pair | None = None
        self._paired: PairedLoader  # made for each training
        self._known: Known | None = None  # sigma of what `model` holds; None before any training
        self._settled = True  # whether `model` and `_known` are those of the twins as they are
        super().__init__(model, args, data_collator, train_dataset, eval_dataset, **options)
        refuse(self)
        if train_dataset is not None:
            assign(self.model, groups)  # which refuses unknown ones: the twins are made later
        self.add_callback(Algorithm(self))

    @property
    def twins(self) -> Twins:
        """The twins of `model`, made when first asked for: the start of the training, usually."""
        return self._twinned().twins

    def estimate(self) -> Estimate:
        """The mean model and sigma, as they are now or, with `load_best_model_at_end`, as they were best.

        The same object each time, until training goes on: its temperature, scale, dropout and task, which `calibrate`
        or you set, are those of `predict`, and `save_model` and checkpoints keep them. An estimate from before stays as
        it was. The task follows the model's config, and is None where there is none.
        """
        return self._trained().estimate()

    def predict(
        self,
        test_dataset: Any,
        samples: int = 32,
        *,
        task: Task | None = None,
        scale: float | None = None,
        seed: int | None = None,
    ) -> Prediction:
        """Predict for a dataset, with draws of the weights; arguments as in `Estimate.predict`.

        Temperature, dropout and, by default, `scale` and `task` are those of `estimate()`. The task follows the model's
        config: one value, or `problem_type="regression"`, is regression. A model without a config needs `task`. Classes
        lie along dimension 1 of the prediction, also where a sample has many labels, as in token classification; pad
        those to one length. Labels in the dataset are not looked at, so that T5 needs decoder_input_ids. Each process
        predicts all.
        """
        known = self._trained()
        self._match_precision()
        collate = self._get_collator_with_removed_columns(self.data_collator, "prediction")
        batches = DataLoader(test_dataset, self.args.eval_batch_size, collate_fn=collate, generator=torch.Generator())
        unlabelled = [{k: v for k, v in batch.items() if k not in self.label_names} for batch in batches]
        seed = self.args.seed if seed is None else seed
        return known.predict(unlabelled, self._prepare_inputs, samples, task, scale, seed)

    def _known_bootstrap(self) -> Bootstrap:
        if self.train_dataset is None or self.bootstrap is None:
            raise ValueError("training needs a train_dataset.")
        return self.bootstrap

    def _twinned(self) -> Pair:
        if self._pair is None or self._pair.of is not self.model:  # `model_init` makes another one for each training
            replicas = self.bootstrap.replicas if self.bootstrap else 2
            self._pair = Pair(self.model, Twins(self.model, replicas, self.groups, self.args.seed))
        return self._pair

    def _trained(self) -> Known:
        self._settle()
        if self._known is None or self._known.model is not self.model:
            raise RuntimeError("this model was not trained yet, so there is no sigma: call train() first.")
        return self._known

    def _unsettle(self) -> None:
        """The twins are other ones now."""
        self._known, self._settled = None, False

    def _settle(self) -> None:
        """Bring the mean of the twins into `model`."""
        if self._settled:
            return
        estimate = self.twins.estimate(scale=self._known_bootstrap().scale)
        give_statistics(self, self._known_bootstrap(), estimate.module)
        take_mean(self.model, estimate)
        self._known, self._settled = Known(self.model, estimate.partition), True

    def _match_precision(self) -> None:
        """Run `model` under autocast if the twins train so, as a Trainer's own model does."""
        if self.accelerator.native_amp and not hasattr(self.model, "_original_forward"):
            self.accelerator.prepare_model(self.model, evaluation_mode=True)

    # Below: where the Trainer's own loop meets the twins.

    @called_by_trainer
    def get_train_dataloader(self) -> DataLoader[Any]:
        """Pairs of batches: one for each twin, each from its own bootstrap sample."""
        self._paired = PairedLoader(
            self.train_dataset,
            self._known_bootstrap(),
            self._train_batch_size,
            shuffle=self.args.train_sampling_strategy != "sequential",
            drop_last=self.args.dataloader_drop_last,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, "training"),
        )
        return self._paired.dataloader(**workers(self.args))

    @called_by_trainer
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        return super().create_optimizer(self.twins)  # type: ignore[no-any-return]

    @called_by_trainer
    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if not training:
            return super()._wrap_model(self.model, training=False)
        return self._twinned().prepared(self.accelerator)

    @called_by_trainer
    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        pair, losses = self._twinned(), []
        self._unsettle()
        with pair.twins.sampled(self.noise):
            counts = [None] * len(inputs) if num_items_in_batch is None else num_items_in_batch
            for pair.turn, (batch, count) in enumerate(zip(inputs, counts, strict=True)):
                losses.append(super().training_step(model, batch, count))
        return torch.stack(losses).mean()

    @called_by_trainer
    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if not batch_samples or isinstance(batch_samples[0], Mapping):
            return super()._get_num_items_in_batch(batch_samples, device)
        of_twins = map(list, zip(*batch_samples, strict=True))
        return [super(TwinTrainer, self)._get_num_items_in_batch(batches, device) for batches in of_twins]

    @called_by_trainer
    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        self.accelerator.unscale_gradients()
        pool_gradients(self.twins, self.pooled)
        norms = [clip_grad_norm_(twin.parameters(), self.args.max_grad_norm) for twin in self.twins]
        return torch.stack(norms).mean()

    @called_by_trainer
    def floating_point_ops(self, inputs: Any) -> int:
        return sum(super(TwinTrainer, self).floating_point_ops(batch) for batch in inputs)

    @called_by_trainer
    def _track_num_input_tokens(self, inputs: Any) -> None:
        for batch in inputs:
            super()._track_num_input_tokens(batch)

    @called_by_trainer
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._settle()
        self._match_precision()
        return super().evaluation_loop(*args, **kwargs)

    @called_by_trainer
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        self._settle()
        super()._save(output_dir, state_dict)
        if (known := self._known) is not None and known.model is self.model and self.args.should_save:
            known.save(output_dir or self.args.output_dir)

    @called_by_trainer
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            write_twins(output_dir, self.twins, self._paired, self)

    @called_by_trainer
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            read_twins(checkpoint, self.twins, self._paired, self)
            self._unsettle()
        super()._load_optimizer_and_scheduler(checkpoint)

    @called_by_trainer
    def _load_best_model(self) -> None:
        self._settle()
        super()._load_best_model()
        self._known = Known(self.model, *read_sigma(self.state.best_model_checkpoint, self.model))
