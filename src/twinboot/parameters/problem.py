"""A model with its data and its loss, as functions of one vector that holds all trainable parameters.

All is done in double precision, on a copy of the model in evaluation mode. Members are vectors of parameters that are
stacked, [members, p]; `weights` [members, n] say how often each member counts each sample.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import TensorDataset

from .._core.batches import collate, moved, usable
from .._core.checks import one_line, one_of, shown
from ..data.loader import require_map_style
from ..estimate.prediction import like
from ..training.losses import Loss, loss_function

Name = Literal["regression", "classification", "gaussian", "logistic", "poisson"]
NAMES = ("regression", "classification", "gaussian", "logistic", "poisson")


class Problem:
    """The functions of a fit.

    Args:
        model, dataset, loss: as in `standard_errors`.
        device: where to compute; by default where the model is.
        whole: read all samples now. Otherwise batches are read when they are asked for.
    """

    def __init__(
        self, model: nn.Module, dataset: Any, loss: Name | Loss, device: Any = None, whole: bool = True
    ) -> None:
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            raise ValueError("the model has no trainable parameters: there is nothing to estimate.")
        for name, p in trainable.items():
            if not p.is_floating_point():
                raise TypeError(f"the parameter {name} must be real floating-point numbers, not {p.dtype}.")
            if not bool(p.isfinite().all()):
                raise ValueError(f"the parameter {name} is not finite before the fit: give a finite start.")
        require_map_style(dataset)
        if not len(dataset):
            raise ValueError("the dataset is empty: there is nothing to fit.")
        self.device = usable(next(iter(trainable.values())).device if device is None else device)
        self.module = copy.deepcopy(model).to(self.device, torch.float64).eval().requires_grad_(False)
        self.shapes = {name: p.shape for name, p in trainable.items()}
        self.start = torch.cat([p.detach().to(self.device, torch.float64).reshape(-1) for p in trainable.values()])
        self.dataset, self.loss = dataset, loss
        self.squares = loss == "regression"
        self._losses = _named(loss)
        self.n = len(dataset)
        # Numbers in single precision are equal up to this, so more digits of a collinearity say nothing.
        self.eps = max((torch.finfo(p.dtype).eps for p in trainable.values()), default=0.0)
        if whole:
            inputs, target = self.read()
            self.inputs, self.target = inputs, target
            self._examine()

    @property
    def size(self) -> int:
        """The number of parameters."""
        return len(self.start)

    @property
    def labels(self) -> list[str]:
        """A name for each entry: that of its parameter, with indices if it has several.

        >>> data = TensorDataset(torch.randn(9, 2), torch.randn(9, 1))
        >>> Problem(nn.Linear(2, 1), data, "regression").labels
        ['weight[0, 0]', 'weight[0, 1]', 'bias[0]']
        """
        found = []
        for name, shape in self.shapes.items():
            places = itertools.product(*map(range, shape)) if len(shape) else [()]
            found += [f"{name}[{', '.join(map(str, place))}]" if place else name for place in places]
        return found

    def read(self, indices: Tensor | None = None) -> tuple[tuple[Any, ...], Any]:
        """The inputs and the target of some samples, or of all, as one batch in double precision."""
        if isinstance(self.dataset, TensorDataset):
            batch: Any = self.dataset.tensors
            batch = batch if indices is None else tuple(t[indices] for t in batch)
        else:
            places = range(self.n) if indices is None else indices.tolist()
            batch = collate([self.dataset[place] for place in places])
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise TypeError("samples must be tuples of an input and a target, such as those of TensorDataset(X, Y).")
        single = [t.dtype for t in tree_leaves(batch) if isinstance(t, Tensor) and t.is_floating_point()]
        self.eps = max([self.eps, *(torch.finfo(dtype).eps for dtype in single)])
        *inputs, target = tree_map(_double, moved(list(batch), self.device))
        return tuple(inputs), target

    def _examine(self) -> None:
        for what, value in (("an input", self.inputs), ("the target", self.target)):
            for t in tree_leaves(value):
                if isinstance(t, Tensor) and t.is_floating_point() and t.ndim and not bool(t.isfinite().all()):
                    finite = t.isfinite().reshape(len(t), -1).all(1)
                    first = int((~finite).nonzero()[0])
                    raise ValueError(
                        f"{what} of sample {first} is NaN or infinite: remove or repair the {int((~finite).sum())} "
                        "such samples."
                    )
        try:
            with torch.no_grad():
                functional_call(self.module, self.tensors(self.start), self.inputs)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"the model cannot read the inputs of the samples: {one_line(error)}.") from error
        try:
            with torch.no_grad():
                values = self.residuals(self.start) if self.squares else self.losses(self.start)
        except RuntimeError as error:
            raise ValueError(f"the loss cannot be computed: {one_line(error)}.") from None
        if not bool(values.isfinite().all()):
            raise ValueError(
                "the loss is NaN or infinite with the parameters that the model has: start from other values."
            )
        rows = values.numel()
        if rows <= self.size:
            raise ValueError(
                f"{rows} data cannot determine {self.size} parameters with an error: give more data, or fix "
                "parameters with requires_grad_(False)."
            )
        if isinstance(self.target, Tensor) and self.target.ndim and bool((self.target == self.target[0]).all()):
            raise ValueError("all targets are the same: the data say nothing about the parameters.")

    def tensors(self, vector: Tensor) -> dict[str, Tensor]:
        """The parameters by name."""
        parts = vector.split([math.prod(shape) for shape in self.shapes.values()], -1)
        return {
            name: part.reshape((*part.shape[:-1], *shape))
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def outputs(self, vector: Tensor, *inputs: Any) -> Tensor:
        """What the model with these parameters gives."""
        found = functional_call(self.module, self.tensors(vector), inputs)
        found = getattr(found, "logits", found)  # of a Hugging Face model
        if not isinstance(found, Tensor):
            raise TypeError(f"the model must give a tensor, not {type(found).__name__}.")
        return found

    def residuals(self, vector: Tensor, inputs: tuple[Any, ...] | None = None, target: Any = None) -> Tensor:
        """Residuals [n, values per sample] whose squares, summed over a sample, are its loss."""
        inputs, target = (self.inputs, self.target) if inputs is None else (inputs, target)
        output = self.outputs(vector, *inputs)
        if not output.is_floating_point() or not output.ndim:
            raise TypeError("the model must give a floating-point value for each sample.")
        found = (output - like(target, output)).reshape(len(output), -1)
        return found / math.sqrt(found.shape[1])

    def losses(self, vector: Tensor, inputs: tuple[Any, ...] | None = None, target: Any = None) -> Tensor:
        """The loss of each sample, [n]."""
        inputs, target = (self.inputs, self.target) if inputs is None else (inputs, target)
        return self._losses(self.outputs(vector, *inputs), target)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _named(loss: Name | Loss) -> Loss:
    own: dict[Any, Loss] = {"logistic": logistic, "poisson": poisson}
    if not callable(loss) and not (isinstance(loss, str) and loss in NAMES):
        raise ValueError(
            f"unknown loss {shown(loss)}: use {one_of(NAMES)}, or a function of (output, target) that returns one "
            "value per sample."
        )
    return loss_function(own.get(loss, loss))  # type: ignore[arg-type]


def logistic(logits: Tensor, target: Tensor) -> Tensor:
    """The negative log-likelihood of 0 or 1, from one logit per sample."""
    target = like(target, logits)
    if bool(((target < 0) | (target > 1)).any()):
        raise ValueError('targets of the loss "logistic" must lie between 0 and 1.')
    values = F.softplus(logits) - target * logits
    return values.reshape(len(values), -1).mean(1)


def poisson(log_rate: Tensor, target: Tensor) -> Tensor:
    """The negative log-likelihood of counts, from the logarithm of their expected value. Without the factorial of the
    counts, which does not depend on the model."""
    target = like(target, log_rate)
    if bool((target < 0).any()):
        raise ValueError('targets of the loss "poisson" must not be negative.')
    values = log_rate.exp() - target * log_rate
    return values.reshape(len(values), -1).mean(1)
