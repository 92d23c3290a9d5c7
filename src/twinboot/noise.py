"""Noise that the weights carry for the time of a block, and the safeguards around it.

Inside the block the parameters themselves hold the noisy values, so that any model, hook or compiled graph sees them.
What could go wrong with that is refused here: an optimizer that steps on noisy weights, a backward pass that comes
after the weights were put back, a checkpoint with noise in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .seeds import derive

_LARGE = 2**19  # from so many weights on, their noise takes milliseconds, and a thread for each copy pays


def fill_normal_(copies: Sequence[Sequence[Tensor]], seed: int, generator: torch.Generator | None = None) -> None:
    """Independent standard normals in place: from `generator`, or from generators that `seed` sets.

    PyTorch draws normals on one CPU core, so large copies have streams of their own and are filled side by side.
    """
    tensors = [t for copy in copies for t in copy]
    if generator is not None or sum(map(torch.numel, tensors)) < _LARGE:
        _fill(tensors, seed, generator)
    else:
        with ThreadPoolExecutor(len(copies)) as pool:
            list(pool.map(_fill, copies, [derive(seed, b) for b in range(len(copies))]))


def _fill(tensors: Sequence[Tensor], seed: int, generator: torch.Generator | None = None) -> None:
    generators = {} if generator is None else {generator.device: generator}
    with torch.no_grad():
        for t in tensors:
            device = t.device
            if device not in generators:
                if generator is not None:
                    raise ValueError(f"the generator is on {generator.device}, but there are weights on {device}.")
                generators[device] = torch.Generator(device).manual_seed(seed + len(generators))
            t.normal_(generator=generators[device])


class Noisy:
    """A block in which the weights are perturbed, and after which they are what they were, bit for bit.

    Args:
        copies: the modules that own the weights.
        weights: what is perturbed.
        clean: room for the clean weights while the block lasts.
        perturb: changes the weights in place; it finds their old values in `clean`.
    """

    def __init__(
        self, copies: Sequence[nn.Module], weights: list[Tensor], clean: list[Tensor], perturb: Callable[[], None]
    ) -> None:
        self.copies, self.weights, self.clean, self.perturb = copies, weights, clean, perturb
        self.inside = False

    def __enter__(self) -> None:
        self.hooks = [copy.register_forward_hook(self._remember) for copy in self.copies]
        for copy in self.copies:  # partial, because PyTorch marks the hook, which a method does not allow
            self.hooks.append(copy.register_state_dict_post_hook(partial(self._store_clean)))
        with torch.no_grad():
            torch._foreach_copy_(self.clean, self.weights)
            self.inside = True
            try:
                self.perturb()
            except BaseException:
                self._restore()
                raise
        self.versions = [w._version for w in self.weights]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        changed = self.versions != [w._version for w in self.weights]
        self._restore()
        if changed and kind is None:
            raise RuntimeError(
                "the weights were changed inside sampled(), which puts back the ones from before: "
                "call optimizer.step() (or load_state_dict) after the block."
            )

    def _restore(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.clean)
        self.inside = False
        for hook in self.hooks:
            hook.remove()

    def _remember(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Tie each output to this block. PyTorch itself notices a late backward pass only by the weights that it saved,
        and checkpointed activations, which are computed again in that pass, would silently use the clean ones."""
        if torch.compiler.is_compiling():  # a compiled graph saves its weights, and PyTorch does notice
            return
        for leaf in (output,) if isinstance(output, Tensor) else tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._refuse_late_backward)

    def _refuse_late_backward(self, gradient: Tensor) -> None:
        if not self.inside:
            raise RuntimeError(
                "backward() was called after sampled() had put the clean weights back, so its gradients would be those "
                "of other weights: call loss.backward() inside the block."
            )

    def _store_clean(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        clean = dict(zip(self.weights, self.clean, strict=True))
        for name, p in module.named_parameters(remove_duplicate=False):
            if p in clean and prefix + name in state:
                state[prefix + name] = clean[p].clone()
