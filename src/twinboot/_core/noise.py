"""Noise on the weights for the duration of a block, and the safeguards around it.

Inside the block the parameters themselves hold the noisy values, so that any model, hook or compiled graph uses them.
Three mistakes are prevented: an optimizer step on noisy weights, a backward pass after the clean weights are back, and
noisy weights in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from .ranks import is_sharded, local, reshard
from .seeds import derive
from .tensors import in_order

# With at least this many weights in all copies, a thread for each copy pays: it takes 0.73 of the time at 30 million
# weights and 0.88 at 7.5 million, but 1.3 to 1.5 times as long up to 2 million, where PyTorch's own threads compete.
_LARGE = 2**22


def normals(seed: int, generator: torch.Generator | None = None) -> Callable[[Tensor], None]:
    """A function that fills tensors with standard normals, from `generator` or from one with the given seed."""
    generators = {} if generator is None else {generator.device: generator}

    def fill(t: Tensor) -> None:
        device = t.device
        if device not in generators:
            if generator is not None:
                raise ValueError(f"the generator is on {generator.device}, but there are weights on {device}.")
            generators[device] = torch.Generator(device).manual_seed(seed + len(generators))
        in_order(t).normal_(generator=generators[device])

    return fill


def filler(copies: Sequence[Sequence[Tensor]]) -> Callable[[int, torch.Generator | None], None]:
    """A function that fills several copies of the same tensors with independent standard normals. What depends on the
    tensors alone is done once.

    PyTorch draws normals on one CPU core, so large copies have their own generators and are filled in parallel.
    """
    tensors = [in_order(t) for copy in copies for t in copy]
    large = sum(t.numel() for t in tensors if t.device.type == "cpu") >= _LARGE
    devices = list(dict.fromkeys(t.device for t in tensors))

    def fill(seed: int, generator: torch.Generator | None = None) -> None:
        if large and generator is None:
            with ThreadPoolExecutor(len(copies)) as pool:
                list(pool.map(_fill_copy, copies, [derive(seed, b) for b in range(len(copies))]))
        elif len(devices) == 1 and generator is None:
            drawn = torch.Generator(devices[0]).manual_seed(seed)
            for t in tensors:
                t.normal_(generator=drawn)
        else:
            fill_ = normals(seed, generator)
            for t in tensors:
                fill_(t)

    return fill


@torch.no_grad()  # each thread has its own grad mode
def _fill_copy(tensors: Sequence[Tensor], seed: int) -> None:
    fill = normals(seed)
    for t in tensors:
        fill(t)


def room_for(weights: list[Tensor], spare: list[Tensor]) -> list[Tensor]:
    """Memory for a copy of the weights: `spare`, if it fits."""
    have, need = ([(t.dtype, t.device, is_sharded(t)) for t in tensors] for tensors in (spare, weights))
    if have == need:
        return spare
    with torch.inference_mode(False):  # it is used after such a mode, too
        return [torch.empty_like(w) for w in weights]


@dataclass(eq=False, repr=False)
class NoisyBlock:
    """A block in which weights may be perturbed. At its end they are restored bit for bit."""

    copies: Any  # the models that are called, as a module that iterates over them
    owners: Iterable[nn.Module]  # the modules in them that hold the weights
    weights: list[Tensor]  # to perturb, after entering and before calling `watch`
    clean: list[Tensor]  # memory for the clean weights inside the block
    inside: bool = field(default=False, init=False)
    versions: list[int] | None = field(default=None, init=False)
    hooks: list[Any] = field(default_factory=list, init=False)

    def __enter__(self) -> NoisyBlock:
        self._keep()
        self.inside = True
        return self

    def watch(self) -> None:
        """From here on, refuse wrong uses of the noisy weights."""
        self.versions = [w._version for w in self.weights]
        self.hooks.append(register_optimizer_step_pre_hook(self._refuse_step))
        self.hooks += [copy.register_forward_hook(self._remember) for copy in self.copies]
        for owner in self.owners:  # partial, because PyTorch sets an attribute of the hook, which a method refuses
            self.hooks.append(owner.register_state_dict_post_hook(partial(self._store_clean)))
        torch.clear_autocast_cache()  # it may hold the clean weights in half precision

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        changed = self.versions is not None and self.versions != [w._version for w in self.weights]
        try:
            self._put_back()
        finally:
            self.inside = False
            reshard(self.copies)
            torch.clear_autocast_cache()
            for hook in self.hooks:
                hook.remove()
        if changed and kind is None:
            raise RuntimeError(
                "the weights were changed inside sampled(), which restores the weights from before: change them after "
                "the block."
            )

    @torch.no_grad()
    def _keep(self) -> None:
        if self.weights:
            torch._foreach_copy_(list(map(local, self.clean)), list(map(local, self.weights)))

    @torch.no_grad()
    def _put_back(self) -> None:
        if self.weights:
            torch._foreach_copy_(list(map(local, self.weights)), list(map(local, self.clean)))

    def _copy_of_clean(self, i: int) -> Tensor:
        return self.clean[i].clone()

    def _refuse_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        noisy = set(map(id, self.weights))
        if any(id(p) in noisy for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                "optimizer.step() was called inside sampled(), which restores the weights from before the step: call "
                "it after the block."
            )

    def _remember(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Tie each output to this block. PyTorch notices a late backward pass only by the weights that it saved.
        Checkpointed activations are computed again in that pass, and would silently use the clean weights."""
        if torch.compiler.is_compiling():  # a compiled graph saves its weights, so PyTorch notices
            return
        if isinstance(output, Mapping):
            output = list(output.values())
        elif not isinstance(output, (Tensor, tuple, list)):  # a dataclass, perhaps
            output = getattr(output, "__dict__", output)
        for leaf in (output,) if isinstance(output, Tensor) else tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._refuse_late_backward)

    def _refuse_late_backward(self, gradient: Tensor) -> None:
        if not self.inside:
            raise RuntimeError(
                "backward() was called after sampled() had restored the clean weights, which would give wrong "
                "gradients: call loss.backward() inside the block."
            )

    def _store_clean(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        places = {id(w): i for i, w in enumerate(self.weights)}
        for name, p in module._parameters.items():
            if id(p) in places and prefix + name in state:
                state[prefix + name] = self._copy_of_clean(places[id(p)])

    def __reduce__(self) -> Any:
        """A copy or pickle of a module includes its hooks, and so this object."""
        raise RuntimeError(
            "a twin was copied or pickled inside sampled(), where its weights are noisy: leave the block first."
        )
