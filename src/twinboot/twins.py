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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, SupportsIndex

import numpy as np
import torch
from torch import Tensor, nn

from ._core import ranks, seeds
from ._core.checks import one_line, require_number, require_types, require_whole, shown
from ._core.devices import check_is_due
from ._core.noise import Noisy, fill_copies_, normals, room_for
from ._core.pieces import fill_copies_by_piece_
from ._core.replicate import Places, mean, replicate, wide
from ._core.sharding import local, reshard, window
from ._core.states import pack, require_same, unpack
from .estimate.estimate import Estimate
from .estimate.forward import call
from .groups import Grouping, Partition
from .resets import Mode, require_mode


class Twins(nn.Module):
    """Copies of a model that train side by side; an ordinary module, so optimizers and the rest need no change.

    Args:
        model: any module. The twins are copies of it. Parameters with `requires_grad=False` are shared by all copies,
            use the memory of the model's own and carry no noise, so freeze before you build the twins. Tied weights
            stay tied.
        replicas: how many copies. More than two lower the variance of sigma^2 by 1 / (replicas - 1).
        groups: which weights share one sigma: `"layer"`, `"tensor"`, `"unit"`, `Blocks(shape)` or a function of
            (name, parameter); see `twinboot.groups`.
        seed: of the noise in `sampled` and `reset`. No global generator is read or moved.
        stacked: hold each parameter once, for all copies together, and run them in one pass as `twins(x1, x2)`; a step
            of a small fully connected model then costs less (`twinboot.stacked`).

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

    stacked = False
    in_one_process = True  # all copies are here; those of `Apart` are not
    _fresh: Mapping[str, Any] = {"_spare": [], "_block": None}  # what a copy or pickle has instead of ours

    def __new__(cls, *args: Any, stacked: bool = False, **kwargs: Any) -> Self:
        if isinstance(stacked, (bool, np.bool_)) and stacked and cls is Twins:
            from .stacked import Stacked  # which builds on this class

            return super().__new__(Stacked)  # type: ignore[return-value]
        return super().__new__(cls)

    def __init__(
        self,
        model: nn.Module,
        replicas: int = 2,
        groups: str | Grouping = "layer",
        seed: SupportsIndex = 0,
        *,
        stacked: bool = False,
    ) -> None:
        super().__init__()
        require_types(Twins.__init__, locals())
        if bool(stacked) != self.stacked:
            raise TypeError(
                f"stacked={stacked} makes twins of a class of its own, so {type(self).__name__} cannot have it: call "
                f"Twins(model, stacked={stacked})."
            )
        require_whole("replicas", replicas, 2)
        # Line 3 before line 1: the partition knows which weights are trained, and refuses wrong groups before any copy.
        self.partition = Partition.of(model, groups)  # line 3: it holds sigma, which is 0
        self._hold(model, replicas)  # line 1: all copies begin with the model's weights
        self._seed = seeds.checked(seed)
        # "together": the number of updates when all copies last stood at one point, here or after a reset to the mean.
        self._counts = {"draws": 0, "updates": 0, "resets": 0, "together": 0}

    def _hold(self, model: nn.Module, replicas: int) -> None:
        """Make the copies, and note where their trained weights are; stacked twins keep them in another way."""
        self.copies = nn.ModuleList(replicate(model, replicas))
        self._places = [Places(twin, list(self.partition.parameter_shapes)) for twin in self.copies]
        self._owners = [m for m in self.copies.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
        self._spare: list[Tensor] = []
        self._block: Noisy | None = None

    def __len__(self) -> int:
        return len(self.copies)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.copies)

    def __getitem__(self, index: int) -> nn.Module:
        try:
            return self.copies[index if isinstance(index, slice) else operator.index(index)]
        except (TypeError, IndexError):
            raise IndexError(f"the twins have the numbers 0 to {len(self) - 1}, not {shown(index)}.") from None

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Each copy on its own input: a tensor, a tuple or list of arguments, or a mapping of keyword arguments."""
        self._require_one_each(inputs)
        return tuple(call(twin, x) for twin, x in zip(self.copies, inputs, strict=True))

    @property
    def sigma(self) -> dict[str, Tensor]:
        """Group name -> sigma as it is now (a snapshot): a number, or one per unit, block or label of the group."""
        return self.partition.snapshot()

    @contextmanager
    def sampled(self, scale: float = 1.0, generator: torch.Generator | None = None) -> Iterator[None]:
        """Inside the block each copy's weights are one draw from N(weights, (scale * sigma)^2): line 6.

        Forward and backward go inside, `optimizer.step()` after it. On leaving, by an exception too, the weights are
        put back bit for bit. With gradient accumulation a block around each micro-batch draws anew for each, a block
        around all of them uses one draw for the step. With activation checkpointing, call the twins themselves, not
        methods of theirs: only then is a backward pass after the block noticed.
        """
        require_types(Twins.sampled, locals())
        require_number("scale", scale)
        self._refuse_inside("sampled()")
        weights, copies = self._weights(), len(self.copies)
        flat = [w for twin in weights for w in twin]
        self._spare = room_for(flat, self._spare)
        with Noisy(self, self._owners, flat, self._spare) as self._block:
            with torch.no_grad():  # line 6: w + sigma * e, in the place of w
                here = [list(map(local, twin)) for twin in weights]
                fill_copies_(here, self._next_seed("draws", *ranks.own()), generator)
                noise = [e for twin in here for e in twin]
                torch._foreach_mul_(noise, self.partition.expand(weights[0], scale) * copies)
                torch._foreach_add_(noise, list(map(local, self._spare)))
            self._block.watch()
            yield

    @torch.no_grad()
    def update(self) -> None:
        """Sigma from how far the copies stand apart (line 10). Call it after each `optimizer.step()`. Weights that are
        not finite are refused: at once on a CPU, on a GPU within 100 updates and by `reset` and `estimate`."""
        self._refuse_inside("update()")
        self._counts["updates"] += 1
        torch.sqrt(self._variance(), out=self.partition.sigma)  # line 10
        if check_is_due(self.partition.sigma.device, self._counts["updates"]):
            self._require_finite()

    def _require_finite(self) -> None:
        if not math.isfinite(self.partition.sigma.sum().item()):
            group = next(name for name, sigma in self.sigma.items() if not math.isfinite(sigma.sum().item()))
            raise FloatingPointError(
                f"the weights of group {group!r} are not finite after update {self._counts['updates']}: the loss was "
                "NaN or infinite, or the step too large; go back to the last checkpoint, with a lower learning rate."
            )

    def _variance(self) -> Tensor:
        """sum_b ||w_b - mean||^2 / ((B - 1) D_l), from the weights as they are."""
        (which, first), *others = map(self.partition.pieces, self._weights())
        return variance(self.partition, 1 + len(others), [(which, [first, *(copy for _, copy in others)])])

    @torch.no_grad()
    def reset(self, mode: Mode = "sample", generator: torch.Generator | None = None) -> None:
        """Bring the copies together again around their mean (line 13). The data of each copy stay the same.

        `"sample"`: all copies independently from N(mean, sigma^2), as in the paper. `"mean"`: all at the mean.
        `"centered"`: as `"sample"`, given that the mean stays where it is: the distance is kept on average and the
        mean does not walk. Sigma stays as it is until the next `update()`. A row of a weight in which all copies
        agree after training has had no gradient, as the padding row of an embedding, and stays as it is.
        """
        self._refuse_inside("reset()")
        require_mode(mode)
        require_types(Twins.reset, locals())
        self._require_finite()
        fill_, sigmas = normals(self._next_seed("resets"), generator), self.partition.expand_pieces(self._weights()[0])
        trained = self._counts["updates"] > self._counts["together"]
        for sigma, (_, copies) in zip(sigmas, self._each_piece(), strict=True):
            center, moved = mean(copies), apart(copies) if trained else 1
            noise = center.new_zeros(len(copies), *copies[0].shape)
            if mode != "mean":
                fill_copies_by_piece_(noise, fill_)
            if mode == "centered":
                noise -= noise.mean(0)
            for w, e in zip(copies, noise, strict=True):
                local(w).copy_(e[window(w)].mul_(sigma).mul_(moved).add_(center))  # line 13: mean + sigma * e
        if mode == "mean":
            self._counts["together"] = self._counts["updates"]

    def estimate(self, model: nn.Module | None = None, *, scale: float = 1.0) -> Estimate:
        """What you keep and ship: the mean of the copies and sigma, times `scale`: `bootstrap.scale` where the copies
        divide the samples. The copies go on as they are. Of sharded twins each rank gets all of it, in a copy of
        `model`, any instance of the class that was trained."""
        require_types(Twins.estimate, locals())
        self._refuse_inside("estimate()")
        self._require_finite()
        reshard(self)
        return Estimate.of(list(self.copies), self.partition.scaled(scale), model)

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
        """Go on from a state of twins: weights, sigma, and the noise to come."""
        if not isinstance(state_dict, Mapping) or "_extra_state" not in state_dict:
            raise ValueError(
                "this is no state of twins: to start from a model's weights, load them into it before Twins(model)."
            )
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            raise ValueError(f"the state does not fit these twins: {one_line(error)}.") from None

    def _describe(self) -> dict[str, Any]:
        return {"replicas": len(self), "stacked": self.stacked, **self.partition.describe()}

    def _weights(self) -> list[list[Tensor]]:
        """For each copy its trainable weights, in the order of the partition."""
        reshard(self)
        return [places.read() for places in self._places]

    def _each_piece(self) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """For each trainable weight, large ones piece by piece, its place in the partition and that of all copies."""
        (which, first), *others = map(self.partition.pieces, self._weights())
        return zip(which, zip(first, *(copy for _, copy in others), strict=True), strict=True)

    def _next_seed(self, what: str, *where: int) -> int:
        self._counts[what] += 1
        return seeds.derive(self._seed, what, self._counts[what], *where)

    def _require_one_each(self, inputs: tuple[Any, ...]) -> None:
        if len(inputs) != len(self):
            raise ValueError(f"{len(self)} twins take {len(self)} inputs, one each, but got {len(inputs)}.")

    @property
    def _inside(self) -> bool:
        return self._block is not None and self._block.inside

    def _refuse_inside(self, what: str) -> None:
        if self._inside:
            raise RuntimeError(
                f"{what} was called inside sampled(), where the weights are noisy: leave the block first."
            )

    def _apply(self, fn: Any, recurse: bool = True) -> Twins:
        self._refuse_inside("to()")
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_inside("copy or pickle")
        return {**super().__getstate__(), **self._fresh}  # type: ignore[no-untyped-call]


# Which parameters, by their places in the partition, and for each copy those of its weights.
Part = tuple[Sequence[int], Sequence[Sequence[Tensor]]]


def variance(partition: Partition, replicas: int, parts: Iterable[Part]) -> Tensor:
    """sum_b ||w_b - mean||^2 / ((B - 1) D) behind each sigma, by Welford's recurrence: for two copies the paper's
    formula itself. The weights come in parts: all at once, or one by one where they are not all in memory."""
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


def apart(copies: Sequence[Tensor]) -> Tensor:
    """Which rows of a weight differ between its copies, as a mask. Single entries may agree by chance after steps of
    one size, as Adam's first ones are; and in half precision whole rows, so that there it is one answer for the weight.
    Of sharded ones, for the part that is here."""
    first, *others = (local(w) for w in copies)
    found = torch.stack([w != first for w in others]).any(0)
    if found.ndim < 2 or wide(first) is not first:
        return found.any()
    return found.flatten(1).any(1).view(-1, *[1] * (found.ndim - 1))


@torch.no_grad()
def pool_gradients(twins: Twins, share: float) -> None:
    """Replace each twin's gradients by their mean over the twins, in part: once for each `optimizer.step()`, before it
    and before clipping, after the last `backward()`. The mean of the twins then learns faster with Adam and its kin.

    A twin on its own learns from its own batch alone, half of the samples of a step where twins divide the data. An
    optimizer that divides a gradient by its size, as Adam does, then takes smaller steps along what the batches agree
    on, and to average the twins afterwards gives none of that back. With a share c of each gradient pooled,

        g_b  <-  (1 - c) g_b + c mean(g)

    the mean of the gradients is what it was, and their differences are 1 - c times as large. For c < 1 the twins settle
    where they would settle, 1 / (1 - c) times as late: for losses of one curvature H whose slopes differ by s, gradient
    descent moves two twins at a distance d by

        d' = -(1 - c) (H d + s)

    So sigma is right where twins have settled, and too small where a network is stopped long before or is reset often.
    With Adam, where gradients are mostly noise of batches, their size is q = sqrt((1 + (1 - c)^2) / 2) of what it was:
    twins part (1 - c) / q times as fast, 0.41 for c = 0.7, and their mean goes 1 / q times as far, 1.35. `noise` of
    `fit` and `Estimate.scale`, then 2.4, make up for the first.

    Args:
        twins: after a backward pass of each of them. Those of `Apart` are in different processes, and refused.
        share: from 0, where each keeps its own as in the paper, to below 1, where all would have the mean and never
            part.

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
    if not twins.in_one_process:
        raise TypeError("the twins of Apart are in different processes: pool the gradients of Twins in one.")
    if any(p.grad is not None and p.grad.is_sparse for p in twins.parameters()):
        raise TypeError("sparse gradients cannot be pooled: make the embedding with sparse=False.")
    if twins.stacked:
        for p in twins.parameters():
            if p.grad is not None:
                p.grad.lerp_(p.grad.mean(0, keepdim=True), share)
        return
    of_each = zip(*(twin.parameters() for twin in twins), strict=True)
    own = [_gradients(copies) for copies in of_each if any(p.grad is not None for p in copies)]
    if not own:
        return
    gradients = [list(of_twin) for of_twin in zip(*own, strict=True)]
    mean = torch._foreach_lerp(gradients[0], gradients[1], 1 / 2)
    for number, of_twin in enumerate(gradients[2:], start=3):
        torch._foreach_lerp_(mean, of_twin, 1 / number)
    for of_twin in gradients:
        torch._foreach_lerp_(of_twin, mean, share)


def require_share(share: float) -> None:
    require_number("the share of gradients that is pooled", share)
    if share >= 1:
        raise ValueError(f"the share of gradients that is pooled must be below 1, not {share!r}.")


def _gradients(copies: tuple[Tensor, ...]) -> list[Tensor]:
    """Of one weight of each twin; a twin whose pass did not use it has a gradient of 0."""
    for p in copies:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return [local(p.grad) for p in copies]  # type: ignore[arg-type]
