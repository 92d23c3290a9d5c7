"""Validation: the mean of the twins on plain batches, for BatchNorm statistics and for the out-of-bag loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from .._core import seeds
from .._core.batches import loader_of
from .._core.seeds import own_randomness, seeded
from ..data.bootstrap import Bootstrap
from ..data.loader import rows_of, whole_tensors
from ..estimate.statistics import refill_statistics

ENOUGH = 1024  # out-of-bag samples by which spreads are compared, and for the BatchNorm statistics of a Trainer's model
# Samples for the BatchNorm statistics in validation, the same after each epoch. On 4,000 images of CIFAR-10 they change
# the out-of-bag loss by 0.006, a seventh of its standard error, and more would cost more than that loss itself. The
# estimate that `fit` returns gets statistics of all samples.
STATISTICS = 256
FEW = 256  # samples of each twin by which two losses are compared: enough to see that one is far above the other
# The options of a training loader that say how samples are fetched.
PASSED_ON = ("collate_fn", "num_workers", "pin_memory", "worker_init_fn", "multiprocessing_context", "timeout")
Found = TypeVar("Found")
Run = Callable[[nn.Module, Any, int], Found]  # module, batch, number of the batch -> result


class Batches:
    """Some samples of a dataset in batches: the same each time, including random transforms."""

    def __init__(self, dataset: Dataset[Any], samples: Tensor, size: int, seed: int, options: Mapping[str, Any]):
        while len(samples) % size == 1 and size < len(samples):  # BatchNorm has no statistics of one sample
            size += 1
        self.samples, self.size, self.seed = samples, size, seed
        # One by one, the samples of a small table would take longer than the rest of a validation.
        self.whole = None if options else whole_tensors(dataset)
        if self.whole is None:
            self.loader = loader_of(Subset(dataset, samples.tolist()), batch_size=size, **options)

    def __len__(self) -> int:
        return -(-len(self.samples) // self.size)

    def __iter__(self) -> Iterator[Any]:
        if self.whole is not None:
            yield from (rows_of(self.whole, part) for part in self.samples.split(self.size) if len(part))
            return
        with seeded(self.seed):
            batches = iter(self.loader)  # it draws a seed for workers
        for number in range(len(self)):
            with seeded(seeds.derive(self.seed, number)):
                batch = next(batches)
            yield batch


class Validation:
    """Runs a module on the out-of-bag samples, or on those that some twin sees; `run` runs it on a batch."""

    def __init__(
        self, dataset: Dataset[Any], bootstrap: Bootstrap, batch_size: int, seed: int, options: Mapping[str, Any]
    ) -> None:
        self.dataset, self.bootstrap, self.batch_size, self.seed = dataset, bootstrap, batch_size, seed
        self.options = {k: v for k, v in options.items() if k in PASSED_ON}

    def batches(self, samples: Tensor) -> Batches:
        seed = seeds.derive(self.seed, "judge")  # of the batches
        return Batches(self.dataset, samples, self.batch_size, seed, self.options)

    def spread_batches(self, at_most: int = ENOUGH) -> Batches:
        """Out-of-bag samples to compare spreads by. Where no sample is out-of-bag, any samples."""
        samples = self.bootstrap.unseen if len(self.bootstrap.unseen) else torch.arange(self.bootstrap.n)
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(self.seed))  # data may be sorted
        return self.batches(samples[order[:at_most]])

    def seen_batches(self, at_most: int | None = None) -> Iterator[Any]:
        """The samples that some twin sees, or at most this many of them. Nothing is made before the first batch."""
        # In random order: a batch of one class, as in a sorted dataset, would have too small a variance.
        seen = self.bootstrap.seen
        order = torch.randperm(len(seen), generator=torch.Generator().manual_seed(seeds.derive(self.seed, "seen")))
        yield from self.batches(seen[order[:at_most]])

    def unseen(self, module: nn.Module, run: Run[Found], device: torch.device) -> list[Found]:
        """The result of `run` for each out-of-bag batch."""
        module.eval()
        with own_randomness(device, self.seed, "unseen"):
            return [run(module, batch, n) for n, batch in enumerate(self.batches(self.bootstrap.unseen))]

    def unseen_loss(self, module: nn.Module, run: Run[tuple[float, int]], device: torch.device) -> float:
        """The mean out-of-bag loss. `run` returns the mean loss of a batch and its number of samples; the result is
        NaN if that is 0 for all batches."""
        return _mean(self.unseen(module, run, device))

    def loss_in_training(self, models: Iterable[nn.Module], run: Run[tuple[float, int]], device: torch.device) -> float:
        """The mean loss of models in evaluation mode, each on some samples that the twin in its place trains on. `run`
        is as in `unseen_loss`."""
        found = []
        for replica, model in enumerate(models):
            own = self.bootstrap.counts[replica].nonzero().squeeze(1)
            seed = seeds.derive(self.seed, "few", replica)
            few = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(seed))[:FEW]]
            model.eval()
            with own_randomness(device, self.seed, "few"), torch.no_grad():
                found += [run(model, batch, number) for number, batch in enumerate(self.batches(few))]
        return _mean(found)

    def update_batchnorm(self, module: nn.Module, run: Run[Any], device: torch.device, at_most: int | None) -> None:
        """Compute a module's own BatchNorm statistics, from the samples that some twin sees or at most this many."""
        with own_randomness(device, self.seed, "statistics"):
            refill_statistics(module, self.seen_batches(at_most), run)


def _mean(found: list[tuple[float, int]]) -> float:
    """The mean of batches' losses, weighted by their sizes; NaN without samples."""
    samples = sum(size for _, size in found)
    return sum(loss * size for loss, size in found) / samples if samples else math.nan
