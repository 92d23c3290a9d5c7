"""Twins in different processes: one twin per group of devices, so that each device holds one model.

The devices form a `DeviceMesh` with a dimension `twin` and, if several devices share the batches of a twin, a dimension
`data`. The method is that of `Twins`. Its lines need this communication:

    line  6   none: each rank draws its own noise
    line  8   gradients among the ranks of a twin, as in plain training: `DistributedDataParallel`
    line 10   the weights, every `exchange` updates; in between nothing, or a sketch of them (`sketch.py`)
    line 13   the weights; all ranks then draw the same numbers, and each keeps its own twin
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, SupportsIndex

import torch
from torch import Tensor, distributed, nn

from .._core import seeds
from .._core.checks import require_types, require_whole
from .._core.copies import Copies, Part
from .._core.ranks import is_sharded
from .._core.tensors import checksum, mean, split
from ..estimate.statistics import averaged
from ..groups import Grouping, Partition
from ..twins import Twins
from .exchange import copy_first_, gather, gather_each, same_everywhere
from .lean import Lean
from .sketch import Sketch


class Apart(Twins):
    """One of several twins that train in different processes. A call of it is a call of that twin.

    Args:
        model: as for `Twins`. All ranks start with the weights of the first.
        mesh: `init_device_mesh(device, (2, ranks), mesh_dim_names=("twin", "data"))`. The length of `"twin"` is the
            number of twins. Leave `"data"` out if each twin has one rank.
        groups: as for `Twins`.
        seed: as for `Twins`, the same on all ranks.
        exchange: the number of updates from one exchange of all weights to the next, for the exact sigma; None for
            never. A reset always exchanges them.
        sketch: at the other updates, send this many numbers per tensor (with `groups="unit"`, per unit), for an
            unbiased sigma^2. The relative error of sigma is about 1 / sqrt(2 * sketch). Best a prime, such as 251.
            With None, sigma does not change between exchanges.

    Attributes:
        twin: the number of this process's twin.
        share: the rank of this process among those of its twin, and their number: for `PairedLoader`.

    With Adam, a rank holds five numbers per weight inside `sampled()`, where plain training holds four, because the
    clean weights are restored; with `sampled(lean=True)` it holds four, too. The weights of other twins arrive in
    parts. Sigma is the same on all ranks. For the same weights and seed, the exact sigma, a reset and the estimate are
    those of `Twins` in one process, bit for bit. Each rank draws its own noise in `sampled()`. A generator for `reset`
    must have the same seed on all ranks.

    If a twin has several ranks, wrap it: `DistributedDataParallel(twins, process_group=mesh.get_group("data"))`.
    Batches: `PairedLoader(..., share=twins.share, twin=twins.twin)`. All ranks must call `update`, `reset` and
    `estimate`. Save the state of each twin in its own file, from its first rank.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: distributed.device_mesh.DeviceMesh,
        groups: str | Grouping = "layer",
        seed: SupportsIndex = 0,
        *,
        exchange: int | None = 1,
        sketch: int | None = None,
    ) -> None:
        for name, value in (("exchange", exchange), ("sketch", sketch)):
            if value is not None:
                require_whole(name, value, 1, "; None is for never")
        if exchange is None and sketch is None:
            raise ValueError("exchange and sketch are both None, so sigma would stay 0: give one of them.")
        every, numbers = (None if value is None else int(value) for value in (exchange, sketch))
        sizes, number = _sizes(mesh), seeds.require_seed(seed)
        self._begin(model, groups, seed, lambda p: Remote(model, p, mesh, sizes, every, numbers, number))
        self.twin, self.share, self.exchange = self._remote.twin, self._remote.share, every

    @property
    def _remote(self) -> Remote:
        return self._store  # type: ignore[return-value]

    @contextmanager
    def sampled(
        self, scale: float = 1.0, generator: torch.Generator | None = None, *, local: bool = False, lean: bool = False
    ) -> Iterator[None]:
        """As for `Twins`. With `lean` the weights stay clean, and operations read noisy ones. This needs no second copy
        of the weights, but noise is drawn twice, for the forward and the backward pass. A compiled model then runs
        uncompiled."""
        require_types(Apart.sampled, {"generator": generator, "lean": lean})
        if local and lean:
            raise ValueError("local and lean are two ways to add noise: give one of them.")
        with self._noise_block(scale, generator, local=local, lean=lean):
            yield

    def bytes_sent(self) -> dict[str, float]:
        """The bytes that each rank sends to other twins: at an exchange or a reset, with a sketch, and per update on
        average. Gradients that the ranks of one twin average, as in plain training, are not included."""
        exchange = sum(w.numel() * w.element_size() for w in self._remote.weights()[0])
        sketch = self._remote.sketch
        sent = 0 if sketch is None else len(sketch) * self.partition.sigma.element_size()
        often = 0.0 if self._remote.exchange is None else 1 / self._remote.exchange
        return {"exchange": exchange, "sketch": sent, "update": often * exchange + (1 - often) * sent}


class Remote(Copies):
    """The twin of this process, while the others are in other processes."""

    def __init__(
        self,
        model: nn.Module,
        partition: Partition,
        mesh: distributed.device_mesh.DeviceMesh,
        sizes: dict[str, int],
        exchange: int | None,
        sketch: int | None,
        seed: int,
    ) -> None:
        super().__init__(model, partition, sizes["twin"])
        if partition.sigma.is_meta:
            raise ValueError("the model is on the meta device and has no weights to send: call to_empty() first.")
        self.exchange = exchange
        self.sketch = None if sketch is None else Sketch(partition, sketch)
        self.twin = mesh.get_local_rank("twin")
        self.share = (mesh.get_local_rank("data"), sizes["data"]) if "data" in sizes else (0, 1)
        self._siblings = mesh.get_group("twin")
        self._same_twin = [mesh.get_group("data")] if "data" in sizes else []
        everyone = [self._siblings, *self._same_twin]
        frozen = [checksum(p) for p in self.module.parameters() if not p.requires_grad]
        settings = json.dumps([seed, exchange, sketch, sizes, partition.describe(), frozen])
        if not same_everywhere(zlib.crc32(settings.encode()), everyone, partition.sigma.device):
            raise ValueError(
                "the ranks disagree: give all of them the same model, with the same frozen weights, groups, seed, "
                "exchange and sketch."
            )
        for group in everyone:  # from the first rank to the first of each twin, then to all ranks of the twin
            for t in (*self.weights()[0], *self.module.buffers()):
                copy_first_(t, group)

    def __len__(self) -> int:
        return 1

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the twin of this process as you call your model."""
        return self.twins[0](*args, **kwargs)

    @contextmanager
    def with_noise(
        self,
        twins: nn.Module,
        scale: float,
        seed: int,
        generator: torch.Generator | None,
        local: bool = False,
        lean: bool = False,
    ) -> Iterator[None]:
        if lean:
            [weights] = self.weights()
            if generator is not None:
                seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
            sigma = self.partition.expand(weights, scale)
            with Lean(twins, self._owners, weights, [], sigma, seed) as self._block:
                yield
            return
        try:
            with super().with_noise(twins, scale, seed, generator, local):
                yield
        finally:
            self._spare.clear()  # frees the memory of the clean weights

    def weights(self) -> list[list[Tensor]]:
        weights = super().weights()
        if any(map(is_sharded, weights[0])):
            raise RuntimeError("Apart cannot be sharded: use DistributedDataParallel, or shard plain Twins.")
        return weights

    def gradients(self) -> list[list[Tensor]]:
        raise TypeError("the twins of Apart are in different processes: use Twins to pool gradients.")

    def parts(self, update: int, seed: int) -> Iterator[Part] | None:
        """Piece by piece, so that no other twin is in memory as a whole. Between exchanges, a sketch or nothing."""
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
            # The ranks of a twin saw different batches and may differ in their statistics. The first one's are used.
            for group in [*self._same_twin, *([] if id(buffer) in known else [self._siblings])]:
                copy_first_(buffer, group)
        pieces = [piece for t in found for piece in split(t)]
        for center, copies in zip(pieces, gather_each(pieces, self._siblings), strict=True):
            center.copy_(mean(copies))

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "twin": self.twin}


def _sizes(mesh: Any) -> dict[str, int]:
    """Name -> length of the mesh's dimensions. Refuses other meshes than those for twins."""
    example = 'init_device_mesh("cpu", (2, ranks), mesh_dim_names=("twin", "data"))'
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if "twin" not in names or set(names) - {"twin", "data"}:
        raise ValueError(f'mesh must have a dimension "twin", and may have "data", not {names!r}: use {example}.')
    sizes = {name: mesh.size(i) for i, name in enumerate(names)}
    if sizes["twin"] < 2:
        raise ValueError(f"the mesh has room for one twin, but at least two are needed: use {example}.")
    return sizes
