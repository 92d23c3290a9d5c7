"""One batch per twin from one dataset: each twin reads its own bootstrap sample, in its own order."""

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
from .._core.seeds import seeded
from .._core.states import require_same
from .bootstrap import Bootstrap

Resample = Literal["draws", "counts"]
WEIGHT = "weight"  # the key of the weights in batches that are mappings
Job = tuple[int, list[Tensor]]  # the seed of a step, and the indices of each twin's batch


class PairedLoader:
    """Batches for the twins. Each iteration is one epoch and yields tuples with one batch per twin.

    All twins get the same number of batches. With `"counts"` their batches may differ in size. The order of samples and
    random transforms (by the global generators of torch, numpy and random) depend only on the seed, the epoch, the step
    and the rank: not on the number of workers or on interruptions.

    To resume, save `state_dict()` after any batch. After `load_state_dict()`, the next iteration continues that epoch
    with the next batch; start your loop over epochs at `loader.epoch`, which counts from 1. Without a state, the next
    iteration starts a new epoch, even if the last one was left early.

    Args:
        dataset: a map-style dataset with `bootstrap.n` samples. A `TensorDataset`, or a `Subset` of one, is indexed a
            whole batch at a time.
        bootstrap: how often each twin sees each sample.
        batch_size: the batch size of the plain training that the twins replace, per process: an epoch has about
            n / batch_size steps. With `"draws"`, each twin gets batches of this size. With `"counts"`, a batch has the
            distinct samples among that many draws, about 63 %. With `Bootstrap(kind="split")`, the twins share the
            batch as they share the data. A batch has at least two samples, unless `batch_size` is 1.
        resample: `"draws"`: a sample that was drawn twice comes twice per epoch, as in the paper. `"counts"`: each
            distinct sample comes once per epoch, with a weight: the last element of the batch, or the key "weight" of a
            mapping. The weights are the counts, scaled to a mean of 1 over the twin's sample. Use the loss
            `(weight * loss_per_sample).mean()`: the same objective as with `"draws"` for 63 % of the work. (Dividing by
            the sum of a batch's weights instead would favour samples with small counts.)
        shuffle: read the samples in a new random order each epoch, or by ascending index.
        drop_last: drop incomplete batches.
        seed: for the order of samples and for random transforms. Default: the bootstrap's seed.
        share: (rank, number of ranks). Each process gets its part of the twins' batches of ranks * batch_size samples,
            so that together they read each sample of an epoch once. Default: the ranks of `torch.distributed`.
        twin: read the batches of this twin alone, still as tuples. For twins in different processes
            (`twinboot.Apart`); needs `share`.
        control: give one more batch per step, the last of the tuple, for `twinboot.ControlledTwins`: from the first
            twin's sample, in another order. The batches of the twins stay the same.
        options: of `torch.utils.data.DataLoader`, such as `num_workers`, `collate_fn` or `pin_memory`.
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
        control: bool = False,
        **options: Any,
    ) -> None:
        _check(dataset, bootstrap, batch_size, resample, options)
        require_types(PairedLoader.__init__, locals())
        require_types(DataLoader.__init__, options)
        self._given, self.share = share, share or ranks.rank_and_size()
        if not 0 <= self.share[0] < self.share[1]:
            raise ValueError(f"share must be (rank, ranks) with a rank from 0 to ranks - 1, not {share!r}.")
        if twin is not None and not 0 <= twin < bootstrap.replicas:
            raise ValueError(f"twin must be None or a whole number from 0 to {bootstrap.replicas - 1}, not {twin}.")
        if twin is not None and share is None:
            raise ValueError("twin= needs share=, too: which part of that twin's batches this process reads.")
        if control and (twin is not None or not shuffle):
            given = "twin=" if twin is not None else "shuffle=False"
            raise ValueError(f"control=True gives the first twin's sample in another order: leave {given} out.")
        # For each batch of a step: the twin whose sample it is from, and the name of its order.
        self._read: list[tuple[int, int | str]] = [(r, r) for r in range(bootstrap.replicas) if twin in (None, r)]
        self._read += [(0, "control")] if control else []
        self.twin = twin
        self.dataset, self.bootstrap, self.batch_size, self.resample = dataset, bootstrap, int(batch_size), resample
        self.shuffle, self.drop_last = shuffle, drop_last
        self.seed = bootstrap.seed if seed is None else seeds.require_seed(seed)
        self.epoch, self.step = 1, 0
        self._begun = False  # whether this epoch was started, so that the next iteration starts another one
        if resample == "draws":
            self._samples = [bootstrap.indices(r) for r in range(bootstrap.replicas)]
        else:
            self._samples = [bootstrap.counts[r].nonzero().squeeze(1) for r in range(bootstrap.replicas)]
        sizes = [len(s) for s in self._samples]
        # As many batches as the largest sample fills, unless some rank's part of the smallest one would be empty.
        of_all, ranks_ = self._size_of_all(), self.share[1]
        # With at least two samples for each rank, if batches are that large: BatchNorm cannot normalize a single one.
        least = min(2, self.batch_size) * ranks_
        most = max(min(sizes) // least, min(1, min(sizes) // ranks_))
        self._of_all, self._length = of_all, min(-(-max(sizes) // of_all), most)
        if drop_last:
            self._length = 1 if self.batch_size * ranks_ == bootstrap.n else min(sizes) // of_all
        if self._length == 0:
            why = "drop_last leaves no batch" if drop_last else f"{self.share[1]} ranks cannot share a batch"
            raise ValueError(f"{why}: the twins have {min(sizes)} samples, a batch {of_all}.")
        weights = None
        if resample == "counts":
            counts = bootstrap.counts.double()
            factor = (counts > 0).sum(1, keepdim=True) / counts.sum(1, keepdim=True)
            weights = (counts * factor).to(torch.get_default_dtype())[[r for r, _ in self._read]]
        self._fetch = _Fetch(dataset, weights, options.pop("collate_fn", None))
        self._loader = self.dataloader(**options) if options else None  # slower, and not needed without options

    def _size_of_all(self) -> int:
        """The batch size per twin, of all processes together."""
        counts, size = self.bootstrap.counts, self.batch_size * self.share[1]
        if size >= self.bootstrap.n:  # full batches; a Poisson sample may have more than n draws
            return max(size, *map(len, self._samples))
        distinct = min(1.0, ((counts > 0).sum() / counts.sum()).item()) if self.resample == "counts" else 1.0
        return max(min(2 * self.share[1], size), round(size * distinct / self.bootstrap.parts))

    def dataloader(self, **options: Any) -> DataLoader[Any]:
        """A DataLoader of the remaining steps of the current epoch, for training loops that need one. Such a loop must
        count `epoch` and `step` itself. Each item is a whole step, so workers fetch the batches of all twins."""
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
        """The number of batches per twin and epoch."""
        return self._length

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        here = ranks.rank_and_size()
        if self._given is None and self.share != here:
            raise RuntimeError(
                f"the loader was built for rank {self.share[0]} of {self.share[1]}, but this is rank {here[0]} of "
                f"{here[1]}: build it after init_process_group(), or give share=."
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
        """The position after the last batch, and a description of the loader."""
        return {"epoch": self.epoch, "step": self.step, **self._describe()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the next iteration after the batch at which the state was saved."""
        require_types(PairedLoader.load_state_dict, locals())
        require_same(state, self._describe(), "use the same dataset, bootstrap and options")
        for name, least in (("epoch", 1), ("step", 0)):
            require_whole(f"the {name} of the state", state.get(name), least)
        self.epoch, self.step, self._begun = state["epoch"], state["step"], False

    def _describe(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in ("seed", "resample", "shuffle", "drop_last")}
        checksum = zlib.crc32(self.bootstrap.counts.numpy().tobytes())
        # The batch size of all ranks: another number of ranks can continue if it stays the same.
        return {**options, "batch_size": self._of_all, "checksum of the bootstrap": checksum}

    def jobs(self) -> Iterator[Job]:
        """The remaining steps of the current epoch: the seed and the indices of each twin's batch."""
        epoch, first = self.epoch, self.step
        parts = [self._split(self._order(epoch, *read)) for read in self._read]
        rank, of = self.share
        where: list[int | str] = [rank] if rank else []
        if self.twin is not None:  # else all twins would draw the same random transforms
            where += ["twin", self.twin]
        for step in range(first, self._length):
            seed = seeds.derive(self.seed, "transforms", epoch, step, *where)
            yield seed, [part[step] if of == 1 else part[step].tensor_split(of)[rank] for part in parts]

    def _order(self, epoch: int, replica: int, name: int | str) -> Tensor:
        samples = self._samples[replica]
        if not self.shuffle:
            return samples
        generator = torch.Generator().manual_seed(seeds.derive(self.seed, "order", epoch, name))
        return samples[torch.randperm(len(samples), generator=generator, device="cpu")]

    def _split(self, order: Tensor) -> tuple[Tensor, ...]:
        full: tuple[Tensor, ...] = order.split(self._of_all)
        # Batches of even size, if full ones would be too few or too many for this twin, or would leave a rank a single
        # sample, which BatchNorm cannot normalize.
        fits = self.drop_last or (len(full) == self._length and len(full[-1]) >= 2 * self.share[1])
        return full if fits else order.tensor_split(self._length)


class _Jobs:
    """A batch sampler for the DataLoader: one step per batch, from the current step on."""

    def __init__(self, loader: PairedLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[list[Job]]:
        return ([job] for job in self.loader.jobs())

    def __len__(self) -> int:
        return len(self.loader) - self.loader.step


class _Fetch(Dataset[Any]):
    """A dataset for the workers: from a job to the batches of its step."""

    def __init__(
        self, dataset: Dataset[Any], weights: Tensor | None, collate: Callable[[list[Any]], Any] | None
    ) -> None:
        self.dataset, self.weights, self.collate = dataset, weights, collate
        self.tensors = whole_tensors(dataset) if collate is None else None

    def __getitem__(self, job: Job) -> tuple[Any, ...]:
        seed, indices = job
        if self.tensors is not None:
            batches: list[Any] = [rows_of(self.tensors, i) for i in indices]
        else:
            with seeded(seed):
                batches = [(self.collate or collate)(self._samples(i.tolist())) for i in indices]
        if self.weights is None:
            return tuple(batches)
        return tuple(_with_weight(batch, w[i]) for batch, w, i in zip(batches, self.weights, indices, strict=True))

    def _samples(self, indices: list[int]) -> Any:
        together = getattr(self.dataset, "__getitems__", None)
        return together(indices) if together else [self.dataset[i] for i in indices]


Whole = tuple[tuple[Tensor, ...], Tensor | None]  # tensors, and the places of the samples in them


def whole_tensors(dataset: Any) -> Whole | None:
    """The tensors of a TensorDataset, or of a Subset of one, and the places of its samples; None for other datasets."""
    if type(dataset) is TensorDataset:
        return dataset.tensors, None
    if type(dataset) is Subset and (inner := whole_tensors(dataset.dataset)) is not None:
        tensors, places = inner
        here = torch.as_tensor(dataset.indices, device="cpu").long()
        return tensors, here if places is None else places[here]
    return None


def rows_of(whole: Whole, samples: Tensor) -> list[Tensor]:
    """A batch of some samples: the rows of each tensor."""
    tensors, places = whole
    rows = samples if places is None else places[samples]
    return [t[rows] for t in tensors]


def _with_weight(batch: Any, weight: Tensor) -> Any:
    leaves = batch if type(batch) is list and isinstance(batch[0], Tensor) else tree_leaves(batch)
    first = next((t for t in leaves if isinstance(t, Tensor)), weight)
    weight = weight.to(first.device)  # a dataset may have its tensors on a GPU
    if isinstance(batch, Tensor):
        return [batch, weight]
    if isinstance(batch, Mapping):
        if WEIGHT in batch:
            raise ValueError(f'batches already have a key "{WEIGHT}", which resample="counts" needs: rename it.')
        return {**batch, WEIGHT: weight}
    if type(batch) in (tuple, list):
        return type(batch)([*batch, weight])
    raise TypeError(f'resample="counts" needs batches of tensors, tuples or mappings, not {type(batch).__name__}.')


def without_weight(batch: Any) -> tuple[Any, Tensor]:
    """A batch of `resample="counts"` as the dataset gave it, and its weights."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != WEIGHT}, batch[WEIGHT]
    return batch[:-1], batch[-1]


def require_map_style(dataset: Any) -> None:
    scalar = getattr(dataset, "ndim", 1) == 0  # has both methods, which fail
    methods = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or scalar or not methods:
        raise TypeError("the dataset must be map-style, with len() and indexing, so that samples can be drawn.")
    if isinstance(dataset, (tuple, list)) and 0 < len(dataset) < 4 and all(hasattr(part, "shape") for part in dataset):
        raise TypeError(f"the dataset is a {type(dataset).__name__} of arrays: use TensorDataset(X, Y), of tensors.")


def require_resample(resample: str) -> None:
    require_one_of(get_args(Resample), "resample", resample)


def _check(dataset: Any, bootstrap: Bootstrap, batch_size: int, resample: str, options: Mapping[str, Any]) -> None:
    if isinstance(dataset, Bootstrap):
        raise TypeError("the dataset comes first: PairedLoader(dataset, bootstrap, batch_size).")
    require_map_style(dataset)
    require_known(options, PairedLoader, DataLoader)
    if not isinstance(bootstrap, Bootstrap):
        raise TypeError(f"bootstrap must be a Bootstrap, such as Bootstrap(len(dataset)), not {shown(bootstrap)}.")
    if bootstrap.kind == "parametric":
        raise ValueError('kind="parametric" adds noise to measurements, as invert does: use another kind for a loader.')
    if len(dataset) == 0:
        raise ValueError("the dataset is empty: there is nothing to draw from.")
    if len(dataset) != bootstrap.n:
        raise ValueError(f"the dataset has {len(dataset)} samples, but the bootstrap draws from {bootstrap.n}.")
    require_whole("batch_size", batch_size, 1)
    require_resample(resample)
    for option in ("sampler", "batch_sampler", "generator", "in_order"):
        if option in options:
            raise TypeError(f"{option} cannot be given: the bootstrap and the seed decide the order of samples.")
