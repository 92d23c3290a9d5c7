"""One batch per twin from one dataset: each twin goes through its own bootstrap sample, in an order of its own."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any, Literal, SupportsIndex, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from .._core import ranks, seeds
from .._core.batches import collate, loader_of
from .._core.checks import require_known, require_one_of, require_types, require_whole, shown
from .._core.randomness import seeded
from .._core.states import require_same
from .bootstrap import Bootstrap

Resample = Literal["draws", "counts"]
WEIGHT = "weight"  # the key of the counts in batches that are mappings
Job = tuple[int, list[Tensor]]  # the seed of a step and the indices of each twin's batch


class PairedLoader:
    """Batches for the twins: iterating gives tuples, one batch per twin, and goes through one epoch.

    Args:
        dataset: map-style, of as many samples as the bootstrap draws from. A `TensorDataset`, or a `Subset` of one, is
            indexed a whole batch at a time.
        bootstrap: who sees which sample how often.
        batch_size: the batch size of the plain training that the twins replace, in each process: an epoch has about
            n / batch_size steps. With `"draws"` each twin gets batches of this size. With `"counts"` a batch has the
            distinct samples among so many draws, about 63 %. Twins that divide the samples (`kind="split"`) divide
            the batch, too.
        resample: `"draws"`: a sample that was drawn twice comes twice an epoch, as in the paper. `"counts"`: each
            distinct sample comes once, with its count as a weight: the last element of the batch, or the key "weight"
            if batches are mappings. Weights are counts scaled to a mean of 1 over the twin's sample, so that the loss
            of a batch is `(weight * loss_per_sample).mean()`: the same objective at 63 % of the work. (To divide by
            the batch's own sum of weights instead would favour samples with small counts.)
        shuffle: a new order in each epoch, or ascending indices.
        drop_last: leave out the batches that are not full.
        seed: of the order and of random transforms in the dataset; by default the bootstrap's.
        share: (rank, ranks): of each twin's batch of `ranks * batch_size` samples the part that this process trains on.
            By default as `torch.distributed` was started, so that under `torchrun` the processes share an epoch, with
            no sample left out or given twice.
        twin: give, and read, the batches of this twin alone, still as tuples; for twins in different processes, which
            are told their `share`, too (`twinboot.Apart`).
        options: of `torch.utils.data.DataLoader`, such as `num_workers`, `collate_fn` or `pin_memory`.

    All twins get the same number of batches. Where they do not have equally many samples ("counts"), batches may differ
    in size. The order, and what transforms of the dataset draw from the global generators of torch, numpy and random,
    depend on the seed, the epoch and the step alone: not on the number of workers, nor on interruptions of the run. Of
    several ranks each has transforms of its own. Their shares of a batch differ by one sample at most, where it does
    not divide.

    `epoch` counts from 1. `state_dict()` after a batch and `load_state_dict()` continue with the next batch of that
    epoch; start the loop over epochs at `loader.epoch`. An epoch that was left early is continued by such a state, too,
    whereas without one the next iteration begins a new epoch, as with any loader.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        bootstrap: Bootstrap,
        batch_size: int,
        resample: Resample = "draws",
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: SupportsIndex | None = None,
        share: tuple[int, int] | None = None,
        twin: int | None = None,
        **options: Any,
    ) -> None:
        _check(dataset, bootstrap, batch_size, resample, options)
        require_types(PairedLoader.__init__, locals())
        require_types(DataLoader.__init__, options)
        self._given, self.share = share, _checked_share(share or ranks.share())
        self.twin, self._twins = twin, _checked_twins(twin, share, bootstrap.replicas)
        self.dataset, self.bootstrap, self.batch_size, self.resample = dataset, bootstrap, batch_size, resample
        self.shuffle, self.drop_last = shuffle, drop_last
        self.seed = bootstrap.seed if seed is None else seeds.checked(seed)
        self.epoch, self.step = 1, 0
        self._begun = False  # whether this epoch has been iterated over, so that the next iteration is another one
        if resample == "draws":
            self._samples = [bootstrap.indices(r) for r in range(bootstrap.replicas)]
        else:
            self._samples = [bootstrap.counts[r].nonzero().squeeze(1) for r in range(bootstrap.replicas)]
        sizes = [len(s) for s in self._samples]
        # As many batches as the largest sample fills, but no more than the smallest has samples for all ranks: none may
        # be empty.
        of_all = self._of_all = self._size() * self.share[1]
        self._length = min(sizes) // of_all if drop_last else min(-(-max(sizes) // of_all), min(sizes) // self.share[1])
        if self._length == 0:
            why = "drop_last leaves no batch" if drop_last else f"{self.share[1]} ranks cannot share a batch"
            raise ValueError(f"{why}: the twins have {min(sizes)} samples, a batch {of_all}.")
        weights = None
        if resample == "counts":
            counts = bootstrap.counts.double()
            scale = (counts > 0).sum(1, keepdim=True) / counts.sum(1, keepdim=True)
            weights = (counts * scale).to(torch.get_default_dtype())[self._twins]
        self._fetch = _Fetch(dataset, weights, options.pop("collate_fn", None))
        self._loader = self.dataloader(**options) if options else None  # without any it would only cost time

    def _size(self) -> int:
        """How many samples a twin's batch has in each process."""
        counts, size = self.bootstrap.counts, self.batch_size
        if size >= self.bootstrap.n:  # full batches
            return size
        if self.bootstrap.kind == "split":
            share = 1 / self.bootstrap.replicas
        elif self.resample == "counts":
            share = min(1.0, ((counts > 0).sum() / counts.sum()).item())
        else:
            return size
        return max(min(2, size), round(size * share))  # BatchNorm has no statistics of one sample

    def dataloader(self, **options: Any) -> DataLoader[Any]:
        """For loops that must have a DataLoader: one of the steps that are left of the current epoch, each time that it
        is iterated over. To count epochs and steps is then up to that loop.

        A whole step is one item of it, so that its workers fetch the batches of all twins.
        """
        return loader_of(
            self._fetch,
            batch_sampler=_Jobs(self),
            collate_fn=itemgetter(0),
            generator=torch.Generator(torch.get_default_device()).manual_seed(seeds.derive(self.seed, "workers")),
            **options,
        )

    def __repr__(self) -> str:
        size, resample = self.batch_size, self.resample
        return f"PairedLoader({self.bootstrap}, batch_size={size}, {resample=}, {len(self)} batches an epoch)"

    def __len__(self) -> int:
        """Batches per twin and epoch."""
        return self._length

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        if self._given is None and self.share != ranks.share():
            raise RuntimeError(
                f"the loader was made for rank {self.share[0]} of {self.share[1]}, but this is rank {ranks.share()[0]} "
                f"of {ranks.share()[1]}: make it after init_process_group(), or give it share=(rank, ranks)."
            )
        if self._begun:
            self.epoch, self.step = self.epoch + 1, 0
        self._begun = True
        epoch = self.epoch
        for batches in map(self._fetch.__getitem__, self.jobs()) if self._loader is None else self._loader:
            self.step += 1
            yield batches
        if self.epoch == epoch:
            self.epoch, self.step, self._begun = epoch + 1, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: after the batch that it gave last; and of what loader this is."""
        return {"epoch": self.epoch, "step": self.step, **self._describe()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batch that was the last one when the state was taken, with the next iteration."""
        require_types(PairedLoader.load_state_dict, locals())
        require_same(state, self._describe(), "use the dataset, bootstrap and options of then")
        for name, least in (("epoch", 1), ("step", 0)):
            require_whole(f"the {name} of the state", state.get(name), least)
        self.epoch, self.step, self._begun = state["epoch"], state["step"], False

    def _describe(self) -> dict[str, Any]:
        options = ("seed", "resample", "shuffle", "drop_last")
        counts = zlib.crc32(self.bootstrap.counts.numpy().tobytes())
        described = {name: getattr(self, name) for name in options}
        # A batch of all ranks together: another number of them goes on from here, if theirs make up the same one.
        return {**described, "batch_size": self._of_all, "checksum of the bootstrap": counts}

    def jobs(self) -> Iterator[Job]:
        """What is left of the current epoch: for each step its seed and the indices of each twin's batch."""
        epoch, first = self.epoch, self.step
        parts = [self._split(self._order(epoch, r)) for r in self._twins]
        rank, of = self.share
        where: list[int | str] = [rank] if rank else []
        if self.twin is not None:  # read alone, it would draw what another one draws
            where += ["twin", self.twin]
        for step in range(first, self._length):
            seed = seeds.derive(self.seed, "transforms", epoch, step, *where)
            yield seed, [part[step].tensor_split(of)[rank] for part in parts]

    def _order(self, epoch: int, replica: int) -> Tensor:
        samples = self._samples[replica]
        if not self.shuffle:
            return samples
        generator = torch.Generator().manual_seed(seeds.derive(self.seed, "order", epoch, replica))
        return samples[torch.randperm(len(samples), generator=generator, device="cpu")]

    def _split(self, order: Tensor) -> tuple[Tensor, ...]:
        full: tuple[Tensor, ...] = order.split(self._of_all)
        # Where full batches would be too few or too many for all twins to have equally many, or would leave a rank a
        # single sample, of which BatchNorm has no statistics, even ones replace them.
        fits = self.drop_last or (len(full) == self._length and len(full[-1]) >= 2 * self.share[1])
        return full if fits else order.tensor_split(self._length)


class _Jobs:
    """The DataLoader's batches, of one step each: a sampler of batches can be told to leave out the first of them."""

    def __init__(self, loader: PairedLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[list[Job]]:
        return ([job] for job in self.loader.jobs())

    def __len__(self) -> int:
        return len(self.loader) - self.loader.step


class _Fetch(Dataset[Any]):
    """The dataset's side, in the workers: from the indices of a step to its batches."""

    def __init__(
        self, dataset: Dataset[Any], weights: Tensor | None, collate: Callable[[list[Any]], Any] | None
    ) -> None:
        self.dataset, self.weights, self.collate = dataset, weights, collate
        self.tensors = _whole_tensors(dataset) if collate is None else None

    def __getitem__(self, job: Job) -> tuple[Any, ...]:
        seed, indices = job
        if self.tensors is not None:
            tensors, places = self.tensors
            batches: list[Any] = [[t[i if places is None else places[i]] for t in tensors] for i in indices]
        else:
            with seeded(seed):
                batches = [self._collate(i.tolist()) for i in indices]
        if self.weights is None:
            return tuple(batches)
        return tuple(_with_weight(batch, w[i]) for batch, w, i in zip(batches, self.weights, indices, strict=True))

    def _collate(self, indices: list[int]) -> Any:
        if hasattr(self.dataset, "__getitems__"):
            samples = self.dataset.__getitems__(indices)
        else:
            samples = [self.dataset[i] for i in indices]
        return (self.collate or collate)(samples)


def _whole_tensors(dataset: Any) -> tuple[tuple[Tensor, ...], Tensor | None] | None:
    """Of a TensorDataset, or a Subset of one, the tensors and where in them the samples are; None of other datasets."""
    if type(dataset) is TensorDataset:
        return dataset.tensors, None
    if type(dataset) is Subset and (inner := _whole_tensors(dataset.dataset)) is not None:
        tensors, places = inner
        here = torch.as_tensor(dataset.indices, device="cpu").long()
        return tensors, here if places is None else places[here]
    return None


def _with_weight(batch: Any, weight: Tensor) -> Any:
    beside = next((t for t in tree_leaves(batch) if isinstance(t, Tensor)), weight)
    weight = weight.to(beside.device)  # a dataset may hold its tensors on a GPU
    if isinstance(batch, Tensor):
        return [batch, weight]
    if isinstance(batch, Mapping):
        if WEIGHT in batch:
            raise ValueError(
                f'batches already have a key "{WEIGHT}", where resample="counts" puts the counts: rename it.'
            )
        return {**batch, WEIGHT: weight}
    if type(batch) in (tuple, list):
        return type(batch)([*batch, weight])
    raise TypeError(
        f'resample="counts" can add counts to tensors, tuples, lists and mappings, not to {type(batch).__name__}.'
    )


def require_map_style(dataset: Any) -> None:
    scalar = getattr(dataset, "ndim", 1) == 0  # which has both methods, and can do neither
    methods = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or scalar or not methods:
        raise TypeError(
            "the dataset must be map-style, with len() and indexing: a bootstrap needs to reach each sample."
        )
    if isinstance(dataset, (tuple, list)) and 0 < len(dataset) < 4 and all(hasattr(part, "shape") for part in dataset):
        raise TypeError(f"the dataset is a {type(dataset).__name__} of arrays: use TensorDataset(X, Y), of tensors.")


def _checked_share(share: tuple[int, int]) -> tuple[int, int]:
    rank, of = share
    if not 0 <= rank < of:
        raise ValueError(f"share must be (rank, ranks) with a rank from 0 to ranks - 1, not {share!r}.")
    return rank, of


def _checked_twins(twin: int | None, share: tuple[int, int] | None, replicas: int) -> list[int]:
    """The twins whose batches are given."""
    if twin is None:
        return list(range(replicas))
    if isinstance(twin, bool) or not isinstance(twin, int) or not 0 <= twin < replicas:
        raise ValueError(f"twin must be None or a whole number from 0 to {replicas - 1}, not {shown(twin)}.")
    if share is None:
        raise ValueError("with twin= the loader needs share=, too: which part of that twin's batches is for this rank.")
    return [twin]


def require_resample(resample: str) -> None:
    require_one_of(get_args(Resample), "resample", resample)


def _check(dataset: Any, bootstrap: Bootstrap, batch_size: int, resample: str, options: Mapping[str, Any]) -> None:
    if isinstance(dataset, Bootstrap):
        raise TypeError("the dataset comes first: PairedLoader(dataset, bootstrap, batch_size).")
    require_map_style(dataset)
    require_known(options, PairedLoader, DataLoader)
    if not isinstance(bootstrap, Bootstrap):
        raise TypeError(f"bootstrap must be a Bootstrap, such as Bootstrap(len(dataset)), not {shown(bootstrap)}.")
    if len(dataset) == 0:
        raise ValueError("the dataset is empty: there is nothing to draw from.")
    if len(dataset) != bootstrap.n:
        raise ValueError(f"the dataset has {len(dataset)} samples, but the bootstrap draws from {bootstrap.n}.")
    require_whole("batch_size", batch_size, 1)
    require_resample(resample)
    for option in ("sampler", "batch_sampler", "generator", "in_order"):
        if option in options:
            raise TypeError(f"{option} cannot be given: the bootstrap and the seed decide which sample comes when.")
