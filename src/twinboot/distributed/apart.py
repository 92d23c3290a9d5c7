"""Twins in different processes: one twin per group of devices, so that each device holds one model and no more.

The devices form a `DeviceMesh` with a dimension `twin` and, where several devices share the batches of a twin, a
dimension `data`. Line by line the method is that of `Twins`; what differs is what has to travel:

    line  6   nothing: each rank draws noise of its own
    line  8   gradients among the ranks of a twin, as in plain training: `DistributedDataParallel`
    line 10   the weights, every `exchange` updates; in between nothing, or a sketch of them (`sketch.py`)
    line 13   the weights; all ranks then draw the same, and each keeps what is its own
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor, nn

from .._core import ranks, seeds
from .._core.checks import require_number, require_types, shown
from .._core.noise import in_order
from .._core.pieces import split
from .._core.replicate import mean
from .._core.sharding import is_sharded
from ..estimate.estimate import Estimate
from ..estimate.statistics import averaged
from ..groups import Grouping
from ..twins import Twins, variance
from .exchange import copy_first_, gather, gather_each, same_everywhere
from .lean import Lean
from .sketch import Sketch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Apart(Twins):
    """One twin of several that train in different processes; calling it is calling that twin.

    Args:
        model: as for `Twins`. All ranks begin with the weights of the first.
        mesh: `init_device_mesh(device, (2, ranks), mesh_dim_names=("twin", "data"))`: as many twins as its first
            dimension is long. `"data"` may be left out where each twin has one rank.
        groups: as for `Twins`.
        seed: as for `Twins`, the same on all ranks.
        exchange: all weights travel at each so many-th update, for the exact sigma; None for never. A reset sends them
            in any case.
        sketch: at the other updates, how many numbers per tensor (with `groups="unit"`, per unit) travel, for a sigma
            whose square is right on average; sigma's relative error is about 1 / sqrt(2 * sketch). Best a prime, such
            as 251. None: sigma stays as it is in between.

    A rank holds the weights of one model, and inside `sampled()` once more, to put them back: with Adam, five numbers
    for each weight instead of the four of plain training; with `sampled(lean=True)` it is four, too. What other twins
    send comes in parts. Sigma is the same on all ranks.
    For the same weights and seed, the exact sigma, a reset and the estimate have the bits that `Twins` in one process
    would give them. The noise of `sampled()` is each rank's own. A generator that is given to `reset` must be seeded
    alike on all ranks.

    Where a twin has several ranks, wrap it: `DistributedDataParallel(twins, process_group=mesh.get_group("data"))`.
    Batches: `PairedLoader(..., share=twins.share, twin=twins.twin)`. `update`, `reset` and `estimate` are calls that
    all ranks make. The state of each twin goes into a file of its own: that of its first rank is enough.
    """

    in_one_process = False

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        groups: str | Grouping = "layer",
        seed: SupportsIndex = 0,
        *,
        exchange: int | None = 1,
        sketch: int | None = None,
    ) -> None:
        sizes = _sizes(mesh)
        for name, value in (("exchange", exchange), ("sketch", sketch)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be None or a whole number of at least 1, not {shown(value)}.")
        if exchange is None and sketch is None:
            raise ValueError("exchange and sketch are both None, so that sigma would stay 0: give one of them.")
        super().__init__(model, sizes["twin"], groups, seed)
        if self.partition.sigma.is_meta:
            raise ValueError(
                "the model is on the meta device, and has no weights to send: move it with to_empty() first."
            )
        self.exchange, self.sketch = exchange, sketch
        self.twin = mesh.get_local_rank("twin")
        self.share = (mesh.get_local_rank("data"), sizes["data"]) if "data" in sizes else (0, 1)
        self._sketch = None if sketch is None else Sketch(self.partition, sketch)
        self._siblings = mesh.get_group("twin")
        self._alike = [mesh.get_group("data")] if "data" in sizes else []  # the ranks that hold the same twin
        everyone = [self._siblings, *self._alike]
        shared = [_checksum(p) for p in self.copies.parameters() if not p.requires_grad]  # with the caller's model
        said = json.dumps([self._seed, exchange, sketch, sizes, self.partition.describe(), shared])
        if not same_everywhere(zlib.crc32(said.encode()), everyone, self.partition.sigma.device):
            raise ValueError(
                "the ranks disagree: give all of them the same model, with the same frozen weights, groups, seed, "
                "exchange and sketch."
            )
        for group in everyone:  # line 1: from the first rank to its siblings, and from each of those to its like
            for t in (*self._weights()[0], *self.copies.buffers()):
                copy_first_(t, group)

    def _hold(self, model: nn.Module, replicas: int) -> None:
        self.replicas = replicas
        super()._hold(model, 1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's twin, called as your model is."""
        return self.copies[0](*args, **kwargs)

    @contextmanager
    def sampled(
        self, scale: float = 1.0, generator: torch.Generator | None = None, *, lean: bool = False
    ) -> Iterator[None]:
        """As for `Twins`; and with `lean` the weights stay as they are, and what operations read of them is noisy: no
        second copy of the weights, but noise is drawn twice, for the forward and the backward pass. A compiled model
        runs as if it were not."""
        require_types(Apart.sampled, {"generator": generator, "lean": lean})
        require_number("scale", scale)
        if not lean:
            try:
                with super().sampled(scale, generator):
                    yield
            finally:
                if not self._inside:  # as a block in a block, which is refused, still is
                    self._spare.clear()  # room for the clean weights: where twins are apart, memory is short
            return
        self._refuse_inside("sampled()")
        weights, seed = self._weights()[0], self._next_seed("draws", *ranks.own())
        if generator is not None:
            seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        with Lean(self, self._owners, weights, self.partition.expand(weights, scale), seed) as self._block:
            yield

    @torch.no_grad()
    def update(self) -> None:
        """Sigma from how far the twins stand apart (line 10), or, at an update at which nothing travels, as it is."""
        if self._sketch is None and not self._exact_at(self._counts["updates"] + 1):
            self._refuse_inside("update()")
            self._counts["updates"] += 1
        else:
            super().update()

    def bytes_sent(self) -> dict[str, float]:
        """What each rank hands to its siblings: at an exchange (a reset is one), with a sketch, and at an update on
        average. That the ranks of one twin average their gradients, as in plain training, is not in it."""
        exchange = sum(w.numel() * w.element_size() for w in self._weights()[0])
        sketch = 0 if self._sketch is None else len(self._sketch) * self.partition.sigma.element_size()
        often = 0.0 if self.exchange is None else 1 / self.exchange
        return {"exchange": exchange, "sketch": sketch, "update": often * exchange + (1 - often) * sketch}

    @torch.no_grad()
    def estimate(self, model: nn.Module | None = None, *, scale: float = 1.0) -> Estimate:
        """What you keep and ship: the mean of the twins and sigma, times `scale`, the same on all ranks. The twins go
        on as they are."""
        estimate = super().estimate(model, scale=scale)  # of this rank's twin alone
        found = averaged(estimate.module, self.partition)
        known = set(map(id, found))
        for buffer in estimate.module.buffers():
            # The ranks of a twin may differ in their statistics, as each saw other batches: those of its first count.
            for group in [*self._alike, *([] if id(buffer) in known else [self._siblings])]:
                copy_first_(buffer, group)
        pieces = [piece for t in found for piece in split(t)]
        for center, copies in zip(pieces, gather_each(pieces, self._siblings), strict=True):
            center.copy_(mean(copies))
        return estimate

    def _exact_at(self, update: int) -> bool:
        return self.exchange is not None and update % self.exchange == 0

    def _variance(self) -> Tensor:
        update = self._counts["updates"]
        if self._sketch is None or self._exact_at(update):
            return self._spread(self._each_piece())
        seed = seeds.derive(self._seed, "sketch", update)
        rows = gather(self._sketch.of(self._weights()[0], seed, beside=self.partition.sigma), self._siblings)
        return self._spread(enumerate(zip(*map(self._sketch.split, rows), strict=True)))

    def _spread(self, each: Iterable[tuple[int, Sequence[Tensor]]]) -> Tensor:
        """Piece by piece: of all weights together, other twins' are never in memory."""
        parts = (([i], [[w] for w in copies]) for i, copies in each)
        return variance(self.partition, self.replicas, parts)

    def _weights(self) -> list[list[Tensor]]:
        weights = super()._weights()
        if any(map(is_sharded, weights[0])):
            raise RuntimeError(
                "a twin of its own cannot be sharded: use DistributedDataParallel, or shard plain Twins."
            )
        return weights

    def _each_piece(self) -> Iterator[tuple[int, Sequence[Tensor]]]:
        which, own = self.partition.pieces(self._weights()[0])
        return zip(which, gather_each(own, self._siblings), strict=True)

    def _describe(self) -> dict[str, Any]:
        return {**super()._describe(), "replicas": self.replicas, "twin": self.twin}


def _checksum(t: Tensor) -> int:
    return zlib.crc32(in_order(t.detach()).reshape(-1).view(torch.uint8).cpu().numpy().data)


def _sizes(mesh: Any) -> dict[str, int]:
    """Name -> length of the mesh's dimensions, or a sentence about why it is no mesh for twins."""
    example = 'init_device_mesh("cpu", (2, ranks), mesh_dim_names=("twin", "data"))'
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if "twin" not in names or set(names) - {"twin", "data"}:
        raise ValueError(
            f'mesh must have a dimension "twin", and may have "data", as {example} has: these are {names!r}.'
        )
    sizes = {name: mesh.size(i) for i, name in enumerate(names)}
    if sizes["twin"] < 2:
        raise ValueError(f"the mesh has one place for a twin, but there must be at least two: use {example}.")
    return sizes
