"""Noise that the weights carry for the time of a block, and the safeguards around it.

Inside the block the parameters themselves hold the noisy values, so that any model, hook or compiled graph sees them.
What could go wrong with that is refused here: an optimizer that steps on noisy weights, a backward pass that comes
after the weights were put back, a checkpoint with noise in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .seeds import derive


def fill_normal_(tensors: Sequence[Tensor], seed: int, generator: torch.Generator | None = None) -> None:
    """Independent standard normals in place: from `generator`, or from one generator per device that `seed` sets."""
    generators = {generator.device: generator} if generator is not None else {}
    for t in tensors:
        if t.device not in generators:
            if generator is not None:
                raise ValueError(f"the generator is on {generator.device}, but there are weights on {t.device}.")
            generators[t.device] = torch.Generator(t.device).manual_seed(derive(seed, len(generators)))
        t.normal_(generator=generators[t.device])


@contextmanager
def borrowed(weights: list[Tensor], clean: list[Tensor], perturb: Callable[[], None]) -> Iterator[None]:
    """Keep the weights in `clean`, perturb them, and put them back bit for bit, whatever happens in the block."""
    with torch.no_grad():
        torch._foreach_copy_(clean, weights)
    try:
        with torch.no_grad():
            perturb()
        versions = [w._version for w in weights]
        yield
        if versions != [w._version for w in weights]:
            raise RuntimeError(
                "the weights were changed inside sampled(), which puts back the ones from before: "
                "call optimizer.step() (or load_state_dict) after the block."
            )
    finally:
        with torch.no_grad():
            torch._foreach_copy_(weights, clean)


@contextmanager
def guarded(copies: Iterable[nn.Module], clean: dict[Tensor, Tensor]) -> Iterator[None]:
    """Refuse a backward pass that comes after the block, and keep noise out of state dicts taken inside it.

    PyTorch itself notices only weights that it saved for the backward pass; checkpointed activations, which are
    computed again in it, would silently use the clean ones. So each output remembers the block that it comes from.
    """
    inside = True

    def refuse_late_backward(gradient: Tensor) -> None:
        if not inside:
            raise RuntimeError(
                "backward() was called after sampled() had put the clean weights back, so its gradients would be those "
                "of other weights: call loss.backward() inside the block."
            )

    def remember(module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():  # a compiled graph saves its weights, and PyTorch notices by itself
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(refuse_late_backward)

    def store_clean(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, p in module.named_parameters(remove_duplicate=False):
            if p in clean and prefix + name in state:
                state[prefix + name] = clean[p].clone()

    with ExitStack() as hooks:
        for copy in copies:
            hooks.callback(copy.register_forward_hook(remember).remove)
            hooks.callback(copy.register_state_dict_post_hook(store_clean).remove)
        try:
            yield
        finally:
            inside = False
