"""What twins need of a Hugging Face Trainer: the names of the methods that they replace, and what it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers import __version__ as installed

from ..._core import seeds
from ..._core.checks import require_whole
from ...data.bootstrap import Bootstrap
from ...training.validation import ENOUGH, Judge

SPREAD = "FSDP and DeepSpeed spread the weights that twins need whole: use plain torchrun (DDP)."
Method = TypeVar("Method", bound=Callable[..., Any])


def called_by_trainer(method: Method) -> Method:
    """For a method in the place of one of Trainer's own: under another name there, it would never be called."""
    if not hasattr(Trainer, name := method.__name__):
        raise ImportError(
            f"the Trainer of transformers {installed} has no {name}, in whose place TwinTrainer has its own: use "
            "transformers 5.22, or a twinboot that knows this one."
        )
    return method


def require_arguments(model: Any, args: Any) -> None:
    """Refuse what the Trainer would fail with in the middle of its own code."""
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if not isinstance(args, TrainingArguments):
        raise TypeError(f"args must be TrainingArguments, not {type(args).__name__}.")
    require_whole("per_device_train_batch_size", args.per_device_train_batch_size, 1)
    for seed in (args.seed, 0 if args.data_seed is None else args.data_seed):
        if not 0 <= seeds.checked(seed) < 2**32:  # beyond which numpy takes none
            raise ValueError(f"a seed of TrainingArguments must lie between 0 and 2**32 - 1, which {seed!r} does not.")


def refuse(trainer: Any) -> None:
    if trainer.optimizer is not None:
        raise ValueError("the optimizer must be one of the twins' weights: use optimizer_cls_and_kwargs instead.")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:  # by a config of accelerate, or by its launcher
        raise ValueError(SPREAD)
    if trainer.args.n_gpu > 1:
        raise ValueError(f"{trainer.args.n_gpu} GPUs in one process: start one for each, with torchrun, or hide some.")
    if (strategy := trainer.args.train_sampling_strategy) not in ("random", "sequential"):
        raise ValueError(f'train_sampling_strategy={strategy!r} is not for twins: use "random" or "sequential".')


def workers(args: Any) -> dict[str, Any]:
    """What the arguments say of the processes that read batches."""
    names = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "multiprocessing_context")
    return {name: getattr(args, f"dataloader_{name}") for name in names}


def give_statistics(trainer: Any, bootstrap: Bootstrap, mean: nn.Module) -> None:
    """BatchNorm statistics of the mean's own: those of the twins belong to other weights."""
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator, "training")
    options = {"collate_fn": collate, "num_workers": trainer.args.dataloader_num_workers}
    judge = Judge(trainer.train_dataset, bootstrap, trainer._train_batch_size, trainer.args.seed, options)

    @torch.no_grad()
    def step(module: nn.Module, batch: Any, number: int) -> tuple[float, int]:
        with trainer.accelerator.autocast():
            return trainer.compute_loss(module, trainer._prepare_inputs(batch)).item(), 1

    judge.give_statistics(mean, step, trainer.args.device, ENOUGH)
