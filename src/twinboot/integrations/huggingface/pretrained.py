"""A pretrained model with sigma: predict with it, save sigma beside the model's own files, and load both."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ... import Estimate, Prediction
from ..._core.checks import one_of, shown
from ..._core.replicate import Places, overwrite_, replicate
from ...estimate import files
from ...estimate.prediction import TASKS, Task
from ...groups import Partition, fixed_entries

SIGMA = "sigma.safetensors"
MULTI_LABEL = "multi_label_classification"
DEFAULTS = {"temperature": 1.0, "scale": 1.0, "dropout": False, "task": None}  # the settings of an Estimate


def load(folder: str | os.PathLike[str], model: nn.Module) -> Estimate:
    """Load the estimate that `TwinTrainer.save_model(folder)` saved.

    Args:
        folder: The folder with the saved model and `sigma.safetensors`.
        model: The model that `from_pretrained(folder)` of its class, or of `peft.PeftModel`, returns. It is used
            without a copy.

    Returns:
        An `Estimate` with the temperature, scale, dropout and task that `TwinTrainer.estimate()` had.
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
        return cls(model, estimate.partition)

    @classmethod
    def read(cls, folder: str | os.PathLike[str], model: nn.Module) -> TrainedModel:
        path = Path(folder) / SIGMA
        _, description, labels, sigma, settings = files.read(path)
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
        partition = copy.deepcopy(self.partition)  # the same weights, by their names in _Logits
        partition.parameter_shapes = {f"model.{name}": shape for name, shape in partition.parameter_shapes.items()}
        estimate = _estimate(_Logits(self.model, fetch, task), partition, self.settings)
        numbers = torch.arange(batches)
        return estimate.predict(numbers, samples, task, batch_size=1, scale=scale, seed=seed, vectorize=False)

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

    def __init__(self, model: nn.Module, fetch: Callable[[int], Any], task: Task) -> None:
        super().__init__()
        self.model, self.fetch, self.task = model, fetch, task
        self.shape: tuple[int, ...] | None = None

    def forward(self, number: Tensor) -> Tensor:
        # A model may write into its inputs, and the next draw needs them again.
        batch = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, self.fetch(int(number)))
        try:
            output = self.model(**batch)
        except ValueError as error:  # T5 raises it; BART makes decoder inputs from input_ids
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
        if shape != self.shape:
            raise ValueError(f"batches have logits of shape {shape} and {self.shape}: pad all inputs to one length.")
        return logits
