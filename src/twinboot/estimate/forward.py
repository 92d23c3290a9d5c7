"""How a model is run to predict: on inputs of any form, in batches, in evaluation mode, with drawn weights and dropout.

Dropout means PyTorch's own layers: all kinds of `nn.Dropout`, and the dropout inside attention and recurrent layers. A
call of `torch.nn.functional.dropout` in a model's forward cannot be switched on apart from the rest of training mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader

from .._core.batches import copied
from .._core.checks import require_tensor, shown
from .._core.copies import arguments, replicate
from .._core.seeds import own_randomness
from .prediction import Task

Chunks = list[Callable[[], Any]]


def run_model(module: nn.Module, task: Task, temperature: float, weights: dict[str, Tensor], x: Any) -> Tensor:
    """The module's output for x, with some of its weights replaced, at a temperature."""
    return as_task(functional_call(module, weights, *arguments(x)), task, temperature)


def as_task(output: Any, task: Task, temperature: float) -> Tensor:
    """A module's output as the task needs it, at a temperature."""
    output = getattr(output, "logits", output)  # Hugging Face models return an object with logits, or values, in it
    if not isinstance(output, Tensor):
        raise TypeError(f"predict needs a model that returns a tensor, not {type(output).__name__}.")
    if task == "classification" and (output.ndim < 2 or output.shape[1] < 2):
        raise ValueError(
            "classification needs logits of at least two classes along dimension 1, but the model gives shape "
            f'{tuple(output.shape)}; for values use task="regression".'
        )
    if task == "gaussian" and (output.ndim < 2 or output.shape[-1] % 2):
        raise ValueError(
            "gaussian needs a mean and a log-variance for each value along the last dimension, but the model gives "
            f"shape {tuple(output.shape)}."
        )
    if temperature == 1 or task == "regression":
        return output
    if task == "classification":
        return output / temperature
    means, log_variances = (output if output.dtype == torch.float64 else output.float()).chunk(2, -1)
    return torch.cat([means, log_variances + math.log(temperature)], -1)


def first_tensor(batch: Any) -> Tensor:
    while isinstance(batch, (tuple, list)):
        batch = batch[0]
    if not isinstance(batch, Tensor):
        raise TypeError(f"a batch is a {type(batch).__name__}: give inputs=, a function that picks the model's input.")
    return batch


def chunks_of(x: Any, size: int, device: torch.device) -> Chunks:
    """Functions that give the inputs in chunks of `size`. Each call copies its chunk to the device: a model may write
    into its input, which belongs to the caller and is needed for the next draw."""
    args, kwargs = arguments(x)
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    for t in tensors:
        require_tensor("x", t)
    lengths = {len(t) for t in tensors if t.ndim}
    if len(lengths) != 1:
        advice = {np.ndarray: "; use torch.from_numpy(x)", DataLoader: "; call predict for each batch"}.get(type(x), "")
        if any(isinstance(arg, str) for arg in args):
            advice = "; for texts give tokenizer="
        raise ValueError(
            "x must be a tensor, or a tuple or mapping of tensors, with the same number of inputs along dimension 0; "
            f"found {sorted(lengths) or f'no tensor in {type(x).__name__}'}{advice}."
        )

    def chunk(start: int) -> Any:
        def cut(value: Any) -> Any:
            return value[start : start + size] if isinstance(value, Tensor) and value.ndim else value

        parts = {name: cut(v) for name, v in kwargs.items()} if isinstance(x, Mapping) else tuple(map(cut, args))
        return copied(parts, device)

    return [partial(chunk, start) for start in range(0, max(lengths.pop(), 1), size)]


def chunks_of_texts(texts: Any, tokenizer: Callable[..., Mapping[str, Any]], size: int, device: torch.device) -> Chunks:
    """The same for texts. Each chunk is read by the tokenizer once, for all draws, and padded to its own longest text.

    A tokenizer of Hugging Face is told to pad, to truncate and to give tensors. Any other function of a list of texts
    does as it will.
    """
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise TypeError(f"with a tokenizer, x must be a list of texts, not {shown(texts)}.")
    texts = list(texts)
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"with a tokenizer, x must be a list of texts, but x[{place}] is {shown(text)}.")
    if not texts:
        raise ValueError("x has no texts: give at least one.")
    # The attribute by which its tokenizers are known without an import of transformers.
    options = {"padding": True, "truncation": True, "return_tensors": "pt"} if hasattr(tokenizer, "pad_token") else {}
    batches = []
    for part in (texts[start : start + size] for start in range(0, len(texts), size)):
        batch = tokenizer(part, **options)
        rows = batch.values() if isinstance(batch, Mapping) else [None]
        if not all(isinstance(t, Tensor) and t.ndim and len(t) == len(part) for t in rows):
            raise TypeError("tokenizer must give a mapping of tensors with a row for each text: let it pad the texts.")
        batches.append(dict(batch))
    return [partial(copied, batch, device) for batch in batches]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; each submodule gets its own mode back afterwards."""
    training = {m: m.training for m in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for m, was in training.items():
            m.training = was


@contextmanager
def dropping(model: nn.Module, dropout: bool, device: torch.device, seed: int) -> Iterator[nn.Module]:
    """The model itself, or, with dropout, a copy that drops. Inside the block its masks come from the seed."""
    if not isinstance(dropout, bool):
        raise TypeError(f"estimate.dropout must be True or False, not {shown(dropout)}: the model's layers set rates.")
    if not dropout:
        yield model
        return
    with own_randomness(device, seed, "masks"):
        yield with_dropout(model)


def with_dropout(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode except for its dropout, so that other callers of the model see no masks. A part that
    stays in evaluation when the model is set to train, such as a frozen one, had no masks in training and gets none."""
    [copy] = replicate(model)
    copy.train()
    in_training = [m for m in copy.modules() if m.training]
    copy.eval()
    if not any(_dropout_rate(m) > 0 for m in in_training):
        raise ValueError("estimate.dropout is True, but the model has no dropout layer, such as nn.Dropout.")
    for m in in_training:
        # In evaluation mode an encoder layer takes a fast path that skips its dropout.
        m.training = _dropout_rate(m) > 0 or isinstance(m, nn.TransformerEncoderLayer)
    return copy


def _dropout_rate(layer: nn.Module) -> float:
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return layer.p
    return layer.dropout if isinstance(layer, (nn.MultiheadAttention, nn.RNNBase)) else 0.0
