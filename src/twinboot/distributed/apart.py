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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor, nn

from .._core import seeds
from .._core.checks import require_types, shown
from .._core.copies import Copies, Part
from .._core.sharding import is_sharded
from .._core.tensors import in_order, mean, split
from ..estimate.statistics import averaged
from ..groups import Grouping
from ..twins import Twins
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
        for name, value in (("exchange", exchange), ("sketch", sketch)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be None or a whole number of at least 1, not {shown(value)}.")
        if exchange is None and sketch is None:
            raise ValueError("exchange and sketch are both None, so that sigma would stay 0: give one of them.")
        sizes = _sizes(mesh)
        self._begin(model, groups, seed, lambda partition: Remote(model, partition, sizes["twin"]))
        self._remote.connect(mesh, sizes, exchange, sketch, self._seed)

    @property
    def _remote(self) -> Remote:
        return self._store  # type: ignore[return-value]

    @property
    def twin(self) -> int:
        """The number of this process's twin."""
        return self._remote.twin

    @property
    def share(self) -> tuple[int, int]:
        """The rank of this process among those of its twin, and how many there are: for `PairedLoader`."""
        return self._remote.share

    @contextmanager
    def sampled(
        self, scale: float = 1.0, generator: torch.Generator | None = None, *, lean: bool = False
    ) -> Iterator[None]:
        """As for `Twins`. With `lean` the weights stay as they are, and what operations read of them is noisy: this
        needs no second copy of the weights, but noise is drawn twice, for the forward and the backward pass. A compiled
        model then runs uncompiled."""
        require_types(Apart.sampled, {"generator": generator, "lean": lean})
        with self._noisy(scale, generator, lean=lean):
            yield

    def bytes_sent(self) -> dict[str, float]:
        """The bytes that each rank sends to the other twins: at an exchange (a reset is one), with a sketch, and at an
        update on average. The gradients that the ranks of one twin average, as in plain training, do not count."""
        exchange = sum(w.numel() * w.element_size() for w in self._remote.weights()[0])
        sketch = self._remote.sketch
        sent = 0 if sketch is None else len(sketch) * self.partition.sigma.element_size()
        often = 0.0 if self._remote.exchange is None else 1 / self._remote.exchange
        return {"exchange": exchange, "sketch": sent, "update": often * exchange + (1 - often) * sent}


class Remote(Copies):
    """The twin of this process, while the others are in other processes."""

    def __len__(self) -> int:
        return 1

    def hold(self, model: nn.Module) -> None:
        super().hold(model)
        if self.partition.sigma.is_meta:
            raise ValueError("the model is on the meta device and has no weights to send: call to_empty() first.")

    def connect(
        self, mesh: DeviceMesh, sizes: dict[str, int], exchange: int | None, sketch: int | None, seed: int
    ) -> None:
        """Find the other processes, and begin with the weights of the first."""
        self.exchange = exchange
        self.sketch = None if sketch is None else Sketch(self.partition, sketch)
        self.twin = mesh.get_local_rank("twin")
        self.share = (mesh.get_local_rank("data"), sizes["data"]) if "data" in sizes else (0, 1)
        self._siblings = mesh.get_group("twin")
        self._alike = [mesh.get_group("data")] if "data" in sizes else []  # the ranks that hold the same twin
        everyone = [self._siblings, *self._alike]
        shared = [_checksum(p) for p in self.module.parameters() if not p.requires_grad]  # with the caller's model
        said = json.dumps([seed, exchange, sketch, sizes, self.partition.describe(), shared])
        if not same_everywhere(zlib.crc32(said.encode()), everyone, self.partition.sigma.device):
            raise ValueError(
                "the ranks disagree: give all of them the same model, with the same frozen weights, groups, seed, "
                "exchange and sketch."
            )
        for group in everyone:  # from the first rank to its siblings, and from each of those to its like
            for t in (*self.weights()[0], *self.module.buffers()):
                copy_first_(t, group)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """This process's twin, called as your model is."""
        return self.twins[0](*args, **kwargs)

    @contextmanager
    def noisy(
        self, twins: nn.Module, scale: float, seed: int, generator: torch.Generator | None, lean: bool = False
    ) -> Iterator[None]:
        if lean:
            [weights] = self.weights()
            if generator is not None:
                seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
            sigma = self.partition.expand(weights, scale)
            with Lean(twins, self._owners, weights, sigma, seed) as self._block:
                yield
            return
        try:
            with super().noisy(twins, scale, seed, generator):
                yield
        finally:
            self._spare.clear()  # room for the clean weights: where twins are apart, memory is short

    def weights(self) -> list[list[Tensor]]:
        weights = super().weights()
        if any(map(is_sharded, weights[0])):
            raise RuntimeError(
                "a twin of its own cannot be sharded: use DistributedDataParallel, or shard plain Twins."
            )
        return weights

    def gradients(self) -> list[list[Tensor]]:
        raise TypeError("the twins of Apart are in different processes: pool the gradients of Twins in one.")

    def parts(self, update: int, seed: int) -> Iterator[Part] | None:
        """Piece by piece, so that all weights of another twin are never in memory. At most updates a sketch of them
        travels, or nothing."""
        [own] = self.weights()
        if self.exchange is not None and update % self.exchange == 0:
            which, _ = self.partition.pieces(own)
            return (([i], [[w] for w in copies]) for i, copies in zip(which, self.pieces(), strict=True))
        if self.sketch is None:
            return None
        rows = gather(
            self.sketch.of(own, seeds.derive(seed, "sketch", update), beside=self.partition.sigma), self._siblings
        )
        sketches = zip(*map(self.sketch.split, rows), strict=True)
        return (([i], [[w] for w in copies]) for i, copies in enumerate(sketches))

    def pieces(self) -> Iterator[Sequence[Tensor]]:
        _, own = self.partition.pieces(self.weights()[0])
        return gather_each(own, self._siblings)

    @torch.no_grad()
    def average_(self, module: nn.Module) -> None:
        found = averaged(module, self.partition)
        known = set(map(id, found))
        for buffer in module.buffers():
            # The ranks of a twin may differ in their statistics, as each saw other batches: those of its first count.
            for group in [*self._alike, *([] if id(buffer) in known else [self._siblings])]:
                copy_first_(buffer, group)
        pieces = [piece for t in found for piece in split(t)]
        for center, copies in zip(pieces, gather_each(pieces, self._siblings), strict=True):
            center.copy_(mean(copies))

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "twin": self.twin}


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
