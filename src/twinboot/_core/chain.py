"""All twins at once through linear layers and elementwise functions, as batched matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

# They treat each entry alone, so twins and rows may lie in one tensor. Only these very classes: a subclass may differ.
_ELEMENTWISE = {
    *(nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish),
}


class Chain:
    """Linear layers and elementwise functions one after another, for all twins at once.

    The rows of the batches are columns here: W x + b. So gradients come in the layout of W, without a copy.
    """

    def __init__(self, modules: Sequence[nn.Module], trained: Sequence[Tensor]) -> None:
        index = {id(p): i for i, p in enumerate(trained)}
        self.flatten = bool(modules) and isinstance(modules[0], nn.Flatten)  # after it there is nothing to flatten
        self.steps = [
            (m, index.get(id(m.weight)), index.get(id(m.bias))) if isinstance(m, nn.Linear) else (m, None, None)
            for m in modules
            if not isinstance(m, nn.Flatten)
        ]

    @classmethod
    def of(cls, model: nn.Module, trained: Sequence[Tensor]) -> Chain | None:
        """The model as a chain, or None where it is more than that."""
        modules = _in_a_row(model)
        return None if modules is None else cls(modules, trained)

    def takes(self, inputs: Sequence[Any]) -> bool:
        """Whether these are batches of rows, which may differ in their number."""
        return all(
            isinstance(x, Tensor)
            and (x.ndim == 2 or (x.ndim > 2 and self.flatten))
            and x.shape[1:] == inputs[0].shape[1:]
            and x.dtype == inputs[0].dtype
            for x in inputs
        )

    def run(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rows = [len(x) for x in inputs]
        equal = min(rows) == max(rows)
        # Rows do not mix, so zeros may fill up a shorter batch; they are cut off again.
        h = torch.stack(inputs) if equal else pad_sequence(inputs, batch_first=True)  # type: ignore[arg-type]
        h = h.flatten(2).mT
        for module, w, b in self.steps:
            if isinstance(module, nn.Linear):
                weight = module.weight.expand(len(rows), -1, -1) if w is None else weights[w]
                if module.bias is None:
                    h = weight.bmm(h)
                else:
                    bias = module.bias.expand(len(rows), -1) if b is None else weights[b]
                    h = torch.baddbmm(bias.unsqueeze(2), weight, h)
            else:
                h = module(h)
        outputs = h.mT.contiguous()
        # What unbind gives can't be changed in place, and PyTorch says so; slices would cost a twin step 2 % more.
        return outputs.unbind() if equal else tuple(outputs[b, :n] for b, n in enumerate(rows))


def _in_a_row(model: nn.Module) -> list[nn.Module] | None:
    """The modules through which an input goes one after another; None where one of them is of another kind."""
    if "forward" in vars(model) or any(hooks for name, hooks in vars(model).items() if name.endswith("_hooks")):
        return None  # someone expects the module itself to be called
    if type(model) is nn.Sequential:
        parts = [_in_a_row(child) for child in model]
        return None if None in parts else [m for part in parts for m in part or ()]
    if type(model) in {nn.Linear, *_ELEMENTWISE} or _flattens(model):
        return [model]
    return None


def _flattens(model: nn.Module) -> bool:
    return type(model) is nn.Flatten and (model.start_dim, model.end_dim) == (1, -1)
