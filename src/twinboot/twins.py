"""Twin-Boot: copies of a model whose distance from each other is their uncertainty.

Algorithm 1 of the paper, and where each line of it is. `w_1`, `w_2` are the twins' weights and `l` runs over groups:

     1  w_1 = w_2 = the model's weights                                 Twins(model)
     2  D_1, D_2: two bootstrap samples of the data                     Bootstrap(n), PairedLoader(...)
     3  sigma_l = 0                                                     Twins(model)
        for each epoch, for each pair of batches (b_1, b_2):
     6    w~_i = w_i + eps_i,  eps_i ~ N(0, sigma_l^2)                  with twins.sampled():
     7    L_i = loss of w~_i on b_i                                         your loss
     8    g_i = gradient of L_i                                             loss.backward()
     9    w_i = Optimizer(w_i, g_i)                                     optimizer.step()
    10    sigma_l^2 = ||w_1 - w_2||^2 / (2 D_l)                         twins.update()
        every K epochs:
    13    w_1, w_2 ~ N((w_1 + w_2) / 2, sigma_l^2), independently       twins.reset()

With B copies instead of two, line 10 is the sample variance, sum_b ||w_b - mean||^2 / ((B - 1) D_l).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from ._core import ranks, seeds
from ._core.batches import finite_check_is_due
from ._core.checks import one_line, require_number, require_types, require_whole, shown
from ._core.copies import Copies, Part, replicate
from ._core.noise import normals
from ._core.ranks import local, refuse_copy, reshard, window
from ._core.stack import Stack
from ._core.states import pack, require_same, unpack
from ._core.tensors import fill_copies_by_piece_, mean, wide
from .estimate.estimate import Estimate
from .groups import Grouping, Partition
from .resets import MODES, Mode, require_mode

MakeStore = Callable[[Partition], Copies | Stack]  # makes what holds the twins' weights


class Twins(nn.Module):
    """Copies of a model that train side by side. An ordinary module, so it works with any optimizer.

    Args:
        model: any module. The twins are copies of it. Frozen parameters (`requires_grad=False`) are shared by all
            copies and carry no noise, so freeze before you build the twins. Tied weights stay tied.
        replicas: the number of copies. The variance of sigma^2 is 1 / (replicas - 1) of that with two copies.
        groups: which weights share one sigma: `"layer"`, `"tensor"`, `"unit"`, `"weight"` (none do), `Blocks(shape)` or
            a function of (name, parameter); see `twinboot.groups`.
        seed: seeds the noise of `sampled` and `reset`. No global generator is read or changed.
        stacked: hold each parameter as one tensor for all copies, and call them together, as `twins(x1, x2)`. A chain
            of linear layers and elementwise functions then runs in one pass, which costs less for small models. Other
            models run copy by copy (`_core/stack.py`).

    >>> twins = Twins(nn.Linear(3, 1))
    >>> optimizer = torch.optim.SGD(twins.parameters(), lr=0.1)
    >>> with twins.sampled():
    ...     loss = sum((y - 1).square().mean() for y in twins(torch.ones(4, 3), torch.zeros(4, 3)))
    ...     loss.backward()
    >>> optimizer.step()
    >>> twins.update()
    >>> list(twins.sigma)
    ['(model)']
    """

    def __init__(
        self,
        model: nn.Module,
        replicas: int = 2,
        groups: str | Grouping = "layer",
        seed: SupportsIndex = 0,
        *,
        stacked: bool = False,
    ) -> None:
        require_types(Twins.__init__, {"replicas": replicas, "stacked": stacked})
        require_whole("replicas", replicas, 2)
        store = Stack if stacked else Copies
        self._begin(model, groups, seed, lambda partition: store(model, partition, int(replicas)))

    def _begin(self, model: nn.Module, groups: str | Grouping, seed: SupportsIndex, make_store: MakeStore) -> None:
        require_types(Twins.__init__, {"model": model, "groups": groups, "seed": seed})
        super().__init__()
        self._seed = seeds.require_seed(seed)
        # Line 3 before line 1: the partition knows which weights are trained, and refuses wrong groups before any copy.
        self.partition = Partition.of(model, groups)  # line 3: it holds sigma, which is 0
        self._store = make_store(self.partition)  # line 1: all copies begin with the model's weights
        self.add_module(self._store.name, self._store.module)
        # "together": the number of updates when all copies last stood at one point, here or after a reset to the mean.
        self._counts = {"draws": 0, "updates": 0, "resets": 0, "together": 0}

    @property
    def replicas(self) -> int:
        """How many twins there are, in all processes together."""
        return self._store.replicas

    @property
    def stacked(self) -> bool:
        """Whether each parameter is held once, for all twins together."""
        return self._store.stacked

    def __len__(self) -> int:
        return len(self._store)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._store.twins)

    def __getitem__(self, index: int) -> nn.Module:
        twins = self._store.twins
        try:
            return twins[index if isinstance(index, slice) else operator.index(index)]
        except (TypeError, IndexError):
            raise IndexError(f"the twins have the numbers 0 to {len(self) - 1}, not {shown(index)}.") from None

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Each copy on its own input: a tensor, a tuple or list of arguments, or a mapping of keyword arguments."""
        return self._store.run(*inputs, **options)

    @property
    def sigma(self) -> dict[str, Tensor]:
        """Group name -> a copy of its current sigma: a number, or one per unit, block or label of the group."""
        return self.partition.snapshot()

    @contextmanager
    def sampled(
        self, scale: float = 1.0, generator: torch.Generator | None = None, *, local: bool = False
    ) -> Iterator[None]:
        """Inside the block each copy's weights are one draw from N(weights, (scale * sigma)^2): line 6.

        Call forward and backward inside the block, and `optimizer.step()` after it. The weights are put back bit for
        bit when the block ends, by an exception too. (The parameters of stacked twins stay clean, so there all calls
        but the forward pass may come anywhere.)

        With gradient accumulation, a block around each micro-batch draws new noise for each, and a block around all of
        them uses one draw for the step. With activation checkpointing, call the twins themselves, not their methods:
        only then is a backward pass after the block noticed.

        With `local`, linear layers that end a `Sequential`, or make up all of it with elementwise functions, get their
        noise per output (`_core/local.py`), and their weights stay clean. Each sample then has noise of its own, from
        the same distribution, so use it with losses that are sums over samples. It is less work where a layer has more
        inputs than a batch has samples.
        """
        with self._noise_block(scale, generator, local=local):
            yield

    def _noise_block(
        self, scale: float, generator: torch.Generator | None, **options: Any
    ) -> AbstractContextManager[None]:
        require_types(Twins.sampled, {"scale": scale, "generator": generator, "local": options.get("local", False)})
        require_number("scale", scale)
        self._refuse_inside("sampled()")
        reshard(self)
        seed = self._next_seed("draws", *ranks.own())
        return self._store.with_noise(self, scale, seed, generator, **options)  # line 6: w + sigma * e, in the store

    @torch.no_grad()
    def update(self) -> None:
        """Compute sigma from the distance between the copies (line 10). Call it after each `optimizer.step()`.

        Weights that are not finite raise an error: at once on a CPU; on a GPU within 100 updates, and in `reset` and
        `estimate`.
        """
        self._refuse_inside("update()")
        self._counts["updates"] += 1
        reshard(self)
        parts = self._store.parts(self._counts["updates"], self._seed)
        if parts is None:  # twins in different processes do not exchange weights at every update
            return
        torch.sqrt(variance(self.partition, self.replicas, parts), out=self.partition.sigma)  # line 10
        if finite_check_is_due(self.partition.sigma.device, self._counts["updates"]):
            self._require_finite()

    def _require_finite(self) -> None:
        if not math.isfinite(self.partition.sigma.sum().item()):
            group = next(name for name, sigma in self.sigma.items() if not math.isfinite(sigma.sum().item()))
            raise FloatingPointError(
                f"the weights of group {group!r} are not finite after update {self._counts['updates']}: the loss was "
                "NaN or infinite, or the step too large; go back to the last checkpoint, with a lower learning rate."
            )

    @torch.no_grad()
    def reset(self, mode: Mode = "sample", generator: torch.Generator | None = None) -> None:
        """Draw the copies anew around their mean (line 13). Each copy keeps its data, and sigma stays until the next
        `update()`.

        - `"sample"`: all copies independently from N(mean, sigma^2), as in the paper.
        - `"mean"`: all copies at the mean.
        - `"centered"`: as `"sample"`, but the mean stays where it is. The expected distance is the same, and the mean
          does not walk at random.

        Rows of a weight in which all copies agree after training had no gradient, such as the padding row of an
        embedding. They stay as they are.
        """
        self._refuse_inside("reset()")
        require_mode(mode)
        require_types(Twins.reset, locals())
        self._require_finite()
        reshard(self)
        fill_ = normals(self._next_seed("resets"), generator)
        sigmas = self.partition.expand_pieces(self._store.weights()[0])
        trained = self._counts["updates"] > self._counts["together"]
        for sigma, copies in zip(sigmas, self._store.pieces(), strict=True):
            center, moved = mean(copies), rows_that_differ(copies) if trained else 1
            away = center.new_zeros(len(copies), *copies[0].shape)
            MODES[mode](away, lambda noise: fill_copies_by_piece_(noise, fill_))
            for w, e in zip(copies, away, strict=True):
                local(w).copy_(e[window(w)].mul_(sigma).mul_(moved).add_(center))  # line 13: mean + sigma * e
        if mode == "mean":
            self._counts["together"] = self._counts["updates"]

    def estimate(self, model: nn.Module | None = None, *, scale: float = 1.0) -> Estimate:
        """The mean of the copies with its sigma: what you keep and ship. The copies stay as they are.

        Args:
            model: for sharded twins, any instance of the trained class. Each rank gets the whole estimate in a copy.
            scale: factor on sigma: `bootstrap.scale` if the twins divide the samples.
        """
        require_types(Twins.estimate, locals())
        self._refuse_inside("estimate()")
        self._require_finite()
        reshard(self)
        estimate = Estimate.of(self._store.means(), self.partition.scaled(scale), model)
        self._store.average_(estimate.module)
        estimate.df_per_weight = self.replicas - 1
        return estimate

    def weights(self) -> dict[str, Tensor]:
        """Name -> the trainable weights of the copies in this process, [copies, ...]; with noise inside `sampled()`."""
        reshard(self)
        return dict(zip(self.partition.parameter_shapes, self._store.stacked_weights(), strict=True))

    def unstack(self) -> list[nn.Module]:
        """Independent plain models with the current weights of the copies."""
        self._refuse_inside("unstack()")
        refuse_copy(self)
        return [replicate(m, own=self.partition.parameter_shapes)[0] for m in self._store.models()]

    def get_extra_state(self) -> Tensor:
        # Digits of fixed width: torch.distributed.checkpoint reads a tensor only into one of the same size.
        numbers = {name: f"{n:020d}" for name, n in {"seed": self._seed, **self._counts}.items()}
        return pack({**numbers, "twins": self._describe()})

    def set_extra_state(self, state: Any) -> None:
        saved = unpack(state)
        if "twins" not in saved:
            raise ValueError("the checkpoint is damaged: its state of twins does not say of which.")
        require_same(saved["twins"], self._describe(), "build Twins with the model and options of then")
        self._seed = int(saved["seed"])
        self._counts = {name: int(saved.get(name, 0)) for name in self._counts}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Restore weights, sigma and the state of the noise."""
        if not isinstance(state_dict, Mapping) or "_extra_state" not in state_dict:
            raise ValueError(
                "this is no state of twins: to start from a model's weights, load them into it before Twins(model)."
            )
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            raise ValueError(f"the state does not fit these twins: {one_line(error)}.") from None

    def _describe(self) -> dict[str, Any]:
        return {**self._store.describe(), **self.partition.describe()}

    def _next_seed(self, what: str, *where: int) -> int:
        self._counts[what] += 1
        return seeds.derive(self._seed, what, self._counts[what], *where)

    def _refuse_inside(self, what: str) -> None:
        if self._store.inside:
            raise RuntimeError(
                f"{what} was called inside sampled(), where the weights are noisy: leave the block first."
            )

    def _apply(self, fn: Any, recurse: bool = True) -> Twins:
        self._refuse_inside("to()")
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_inside("copy or pickle")
        return super().__getstate__()  # type: ignore[no-untyped-call, no-any-return]


def variance(partition: Partition, replicas: int, parts: Iterable[Part]) -> Tensor:
    """sigma^2 of each group, sum_b ||w_b - mean||^2 / ((B - 1) D), by Welford's recurrence; for two copies this is the
    paper's formula itself. The weights come in parts, because they may not all be in memory."""
    sums = partition.sigma.new_zeros(replicas - 1, len(partition.sigma))
    for which, (first, *others) in parts:
        center = [wide(w) for w in first]
        for k, (total, copy) in enumerate(zip(sums, others, strict=True), start=1):
            apart = torch._foreach_sub([wide(w) for w in copy], center)
            partition.add_squares_(total, which, apart, first)
            if k < len(others):
                center = list(torch._foreach_add(center, torch._foreach_div(apart, k + 1)))
    found = torch.zeros_like(partition.sigma)
    for k, total in enumerate(sums, start=1):
        found.addcdiv_(total, partition.sizes, value=k / (k + 1) / len(sums))
    return found


def rows_that_differ(copies: Sequence[Tensor]) -> Tensor:
    """A mask of the rows of a weight that differ between its copies. Not of single entries: they may agree by chance
    after steps of one size, such as Adam's first. In half precision whole rows may, so there the answer is one for the
    whole weight. For sharded weights: of the local part."""
    first, *others = (local(w) for w in copies)
    found = torch.stack([w != first for w in others]).any(0)
    if found.ndim < 2 or wide(first) is not first:
        return found.any()
    return found.flatten(1).any(1).view(-1, *[1] * (found.ndim - 1))


@torch.no_grad()
def pool_gradients(twins: Twins, share: float) -> None:
    """Replace a share of each twin's gradients by their mean over the twins.

    Call it once per `optimizer.step()`: after the last `backward()`, and before clipping. With Adam and similar
    optimizers the mean of the twins then learns faster. They divide a gradient by its size, so a twin that learns from
    its own batches alone takes smaller steps in the directions on which the batches agree. With a share c,

        g_b  <-  (1 - c) g_b + c mean(g)

    the mean of the gradients stays the same, and their differences shrink to 1 - c of their size. The twins converge to
    the same points, 1 / (1 - c) times as late: for losses with one curvature H whose slopes differ by s, gradient
    descent moves two twins at a distance d by

        d' = -(1 - c) (H d + s)

    So sigma is right once the twins have converged, and too small if a network is stopped long before, or reset often.
    With Adam and gradients that are mostly batch noise, gradients have q = sqrt((1 + (1 - c)^2) / 2) of their size. The
    twins diverge (1 - c) / q times as fast, 0.41 for c = 0.7, and their mean moves 1 / q times as far, 1.35. A larger
    `noise` in training, and 2.4 for `Estimate.scale`, make up for the smaller sigma.

    Args:
        twins: after a backward pass of each twin. The twins of `Apart` are in different processes and are refused.
        share: from 0, as in the paper, to below 1. At 1 the twins would never diverge.

    >>> twins = Twins(torch.nn.Linear(1, 1, bias=False))
    >>> for twin, slope in zip(twins, (0.0, 4.0), strict=True):
    ...     (slope * twin.weight).sum().backward()
    >>> pool_gradients(twins, 0.5)
    >>> [twin.weight.grad.item() for twin in twins]
    [1.0, 3.0]
    """
    require_share(share)
    if share == 0:
        return
    if not isinstance(twins, Twins):
        raise TypeError(f"pool_gradients takes Twins, not {type(twins).__name__}: if that is around twins, give those.")
    if any(p.grad is not None and p.grad.is_sparse for p in twins.parameters()):
        raise TypeError("sparse gradients cannot be pooled: make the embedding with sparse=False.")
    gradients = twins._store.gradients()
    if not gradients:
        return
    center = torch._foreach_lerp(gradients[0], gradients[1], 1 / 2)
    for number, of_twin in enumerate(gradients[2 : twins.replicas], start=3):
        torch._foreach_lerp_(center, of_twin, 1 / number)
    for of_twin in gradients:
        torch._foreach_lerp_(of_twin, center, share)


def require_share(share: float) -> None:
    require_number("the share of gradients that is pooled", share)
    if share >= 1:
        raise ValueError(f"the share of gradients that is pooled must be below 1, not {share!r}.")
