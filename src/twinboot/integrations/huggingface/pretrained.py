"""A pretrained model with sigma: a file beside those that its own library writes, and logits for `Estimate.predict`."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..._core.checks import one_of, shown
from ..._core.copies import Places, replicate
from ..._core.tensors import overwrite_
from ...estimate import files
from ...estimate.estimate import Estimate
from ...estimate.prediction import TASKS, Prediction, Task
from ...groups import Partition, fixed_entries

SIGMA = "sigma.safetensors"
SEVERAL = "multi_label_classification"
USUAL = {"temperature": 1.0, "scale": 1.0, "dropout": False, "task": None}  # how an estimate predicts, unless it is set


def load(folder: str | os.PathLike[str], model: nn.Module) -> Estimate:
    """The estimate that `TwinTrainer.save_model(folder)` wrote: sigma, around the model that you loaded from there.

    Its temperature, scale, dropout and task are those that `TwinTrainer.estimate()` had.

    `model` is what `from_pretrained(folder)` of the class that was trained, or of `peft.PeftModel`, gives; it is used
    as it is, without a copy.
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"folder must be the path that save_model wrote to, not {shown(folder)}.")
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, such as from_pretrained(folder) gives, not {type(model).__name__}."
        )
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"there is no folder {os.fspath(folder)!r}: give the one that save_model wrote to.")
    partition, calibration = read_sigma(folder, model)
    return _with_settings(Estimate(model, partition), _settings(model, calibration))


class Known:
    """Sigma of what a model holds, and the estimate of both, which keeps what is set in it."""

    def __init__(self, model: nn.Module, partition: Partition, calibration: Mapping[str, Any] = USUAL) -> None:
        self.model, self.partition = model, partition
        self._begins = _settings(model, calibration)
        self._estimate: Estimate | None = None  # made when first asked for: it has trained weights of its own

    def estimate(self) -> Estimate:
        if self._estimate is None:
            [module] = replicate(self.model, own=self.partition.parameter_shapes)
            self._estimate = _with_settings(Estimate(module, copy.deepcopy(self.partition)), self._begins)
        return self._estimate

    def predict(
        self,
        batches: Sequence[Any],
        prepare: Callable[[Any], Any],
        samples: int,
        task: Task | None,
        scale: float | None,
        seed: int,
    ) -> Prediction:
        """What the model itself predicts for batches, with draws of its weights and as the estimate would; arguments as
        in `Estimate.predict`."""
        task = task or self.settings["task"] or _unknown_task(self.model)
        logits = Logits(self.model, batches, prepare, task)
        estimate = _with_settings(Estimate(logits, _renamed(self.partition, "model.")), self.settings)
        numbers = torch.arange(len(batches))
        return estimate.predict(numbers, samples, task, batch_size=1, scale=scale, seed=seed, vectorize=False)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write sigma, and how the estimate predicts, beside the model's own files."""
        path, known = Path(folder) / SIGMA, self.partition
        files.write(path, {}, known.describe(), known.labels(), known.sigma, self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """How the estimate predicts, whether or not it has been asked for."""
        return self._begins if self._estimate is None else {name: getattr(self._estimate, name) for name in USUAL}


def _settings(model: nn.Module, calibration: Mapping[str, Any]) -> dict[str, Any]:
    """How an estimate of the model begins to predict: as was saved, and what its config says."""
    saved = {name: calibration.get(name, usual) for name, usual in USUAL.items()}
    return {**saved, "task": saved["task"] or task_of(model)}


def _with_settings(estimate: Estimate, settings: Mapping[str, Any]) -> Estimate:
    for name, value in settings.items():
        setattr(estimate, name, value)
    return estimate


def read_sigma(folder: str | os.PathLike[str], model: nn.Module) -> tuple[Partition, dict[str, Any]]:
    path = Path(folder) / SIGMA
    _, description, labels, sigma, calibration = files.read(path)
    here = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    for name, shape in description["parameters"].items():
        if here.get(name) != tuple(shape):
            found = here.get(name, "missing")
            raise ValueError(
                f"{str(path)!r} is of another model: {name!r} has shape {tuple(shape)} there, {found} here."
            )
    partition = Partition.restore(description, labels, sigma, fixed_entries(model))
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
        self.model, self.task = model, task
        self.shape: tuple[int, ...] | None = None

        def fetched(number: int) -> Any:
            """A batch in tensors of its own: a model may write into its inputs, and the next draw needs them again."""
            return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, prepare(batches[number]))

        self.fetched = fetched  # a function, since a copy of this module is to have the same batches, not copies

    def forward(self, number: Tensor) -> Tensor:
        batch = self.fetched(int(number))
        try:
            output = self.model(**batch)
        except ValueError as error:  # T5's; BART makes them of input_ids
            config = getattr(self.model, "config", None)
            if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" not in batch:
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


def task_of(model: Any) -> Task | None:
    """What a model predicts, by its config; None where that does not tell, or tells of several labels at once."""
    config = getattr(model, "config", None)
    kind, labels = getattr(config, "problem_type", None), getattr(config, "num_labels", None)
    if kind == SEVERAL or (kind is None and labels is None):
        return None
    return "regression" if kind == "regression" or labels == 1 else "classification"


def _unknown_task(model: Any) -> Task:
    if getattr(getattr(model, "config", None), "problem_type", None) == SEVERAL:
        raise ValueError("predict knows no several labels at once: use estimate() and the logits of its draws.")
    raise ValueError(f"the model has no config that tells what it predicts: give task={one_of(TASKS)}.")


def _renamed(partition: Partition, prefix: str) -> Partition:
    """The partition for a module that holds the model under a name."""
    described = partition.describe()
    parameters = {prefix + name: shape for name, shape in described["parameters"].items()}
    labels = {prefix + name: t for name, t in partition.labels().items()}
    fixed = {prefix + name: mask for name, mask in partition.fixed().items()}
    described |= {"parameters": parameters, "fixed": {prefix + name: n for name, n in described["fixed"].items()}}
    return Partition.restore(described, labels, partition.sigma, fixed)
