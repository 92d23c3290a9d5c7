"""A pretrained model with sigma: a file beside those that its own library writes, and logits for `Estimate.predict`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import files
from ..estimate import Estimate
from ..partition import Partition
from ..prediction import Prediction, Task
from ..replicate import Places, overwrite_

SIGMA = "sigma.safetensors"


def load(folder: str | os.PathLike[str], model: nn.Module) -> Estimate:
    """The estimate that `TwinTrainer.save_model(folder)` wrote: sigma, around the model that you loaded from there.

    `model` is what `from_pretrained(folder)` of the class that was trained, or of `peft.PeftModel`, gives; it is used
    as it is, without a copy.
    """
    partition, calibration = read_sigma(folder, model)
    estimate = Estimate(model, partition)
    estimate.temperature, estimate.scale = calibration["temperature"], calibration["scale"]
    return with_task(estimate, model)


def write_sigma(folder: str | os.PathLike[str], partition: Partition) -> None:
    calibration = {"temperature": 1.0, "scale": 1.0}
    files.write(Path(folder) / SIGMA, {}, partition.describe(), partition.labels(), partition.sigma, calibration)


def read_sigma(folder: str | os.PathLike[str], model: nn.Module) -> tuple[Partition, dict[str, float]]:
    path = Path(folder) / SIGMA
    _, description, labels, sigma, calibration = files.read(path)
    here = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    for name, shape in description["parameters"].items():
        if here.get(name) != tuple(shape):
            found = here.get(name, "missing")
            raise ValueError(
                f"{str(path)!r} is of another model: {name!r} has shape {tuple(shape)} there, {found} here."
            )
    partition = Partition.restore(description, labels, sigma)
    return partition.to(next(model.parameters()).device), calibration


@torch.no_grad()
def take_mean(model: nn.Module, estimate: Estimate) -> None:
    """Bring the mean of an estimate into the model that it is of."""
    names = list(estimate.partition.parameter_shapes)
    for to, mean in zip(Places(model, names).read(), Places(estimate.module, names).read(), strict=True):
        to.copy_(mean)
    for to, mean in zip(model.buffers(), estimate.module.buffers(), strict=True):
        overwrite_(to, mean)
    if (config := getattr(model, "config", None)) is not None:  # which a model completes when it first sees labels
        config.problem_type = getattr(estimate.module.config, "problem_type", None)


class Logits(nn.Module):
    """The logits for a batch, by its number: inputs of any kind and length are a tensor of numbers for `predict`."""

    def __init__(self, model: nn.Module, batches: Sequence[Any], prepare: Callable[[Any], Any], task: Task) -> None:
        super().__init__()
        self.model, self.batches, self.prepare, self.task = model, batches, prepare, task
        self.shape: tuple[int, ...] | None = None

    def forward(self, number: Tensor) -> Tensor:
        batch = self.prepare(self.batches[int(number)])
        try:
            output = self.model(**batch)
        except ValueError as error:  # T5's; BART makes them of input_ids
            if getattr(self.model.config, "is_encoder_decoder", False) and "decoder_input_ids" not in batch:
                raise ValueError("labels are not looked at, so that rows to predict need decoder_input_ids.") from error
            raise
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise TypeError(f"predict needs a model that gives logits, which {type(output).__name__} has not.")
        if self.task == "classification" and logits.ndim == 3:  # a label for each token; the classes come last
            logits = logits.movedim(-1, 1)
        shape, self.shape = self.shape or tuple(logits.shape[1:]), tuple(logits.shape[1:])
        if shape != self.shape:
            raise ValueError(f"logits of shape {shape} and {self.shape}: pad all inputs to one length to predict them.")
        return logits


def predicted(
    model: nn.Module,
    partition: Partition,
    batches: Sequence[Any],
    prepare: Callable[[Any], Any],
    samples: int,
    task: Task,
    scale: float | None,
    seed: int,
) -> Prediction:
    """What a model predicts for batches, with draws of its weights; arguments as in `Estimate.predict`."""
    estimate = Estimate(Logits(model, batches, prepare, task), _renamed(partition, "model."))
    numbers = torch.arange(len(batches))
    return estimate.predict(numbers, samples, task, batch_size=1, scale=scale, seed=seed, vectorize=False)


def task_of(model: Any) -> Task:
    config = getattr(model, "config", None)
    kind = getattr(config, "problem_type", None)
    if kind == "multi_label_classification":
        raise ValueError("predict knows no several labels at once: use estimate() and the logits of its draws.")
    return "regression" if kind == "regression" or getattr(config, "num_labels", 2) == 1 else "classification"


def with_task(estimate: Estimate, model: Any) -> Estimate:
    """The estimate, which predicts what the model's config says; several labels at once it predicts in no way."""
    if getattr(getattr(model, "config", None), "problem_type", None) != "multi_label_classification":
        estimate.task = task_of(model)
    return estimate


def _renamed(partition: Partition, prefix: str) -> Partition:
    """The partition for a module that holds the model under a name."""
    described = partition.describe()
    parameters = {prefix + name: shape for name, shape in described["parameters"].items()}
    labels = {prefix + name: t for name, t in partition.labels().items()}
    return Partition.restore({**described, "parameters": parameters}, labels, partition.sigma)
