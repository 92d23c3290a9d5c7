"""Who sees which sample how often: the resampling of the data, known before training starts.

Each twin has its own bootstrap sample of the n data, drawn once. Two twins leave out about 13.5 % of the data
altogether, e^-1 of them each: those `unseen` samples are an honest validation set that costs nothing.

Twins can also divide the data between them (`kind="split"`): then an epoch of all of them reads each sample once, as
one of a single model does. Of bootstrap samples sigma^2 is the variance that the n data leave to an estimate from all
of them, and the mean of B twins has 1 + 1 / B times that. Twins that divide the data learn from independent parts of
them, so that their mean has the variance sigma^2 / B: what survey statistics calls random groups. Their mean is an
estimate from the seen samples, a share 1 - e^-B of the data, and its variance is 1 / (1 - e^-B) of that of an estimate
from all data: 1.16 for two twins, and 1 with `cover=True`. `Bootstrap.scale` is the factor on sigma that each kind
needs. In return each twin sees at most 1 / B of the data, and shares the bias of so few.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, Literal, SupportsIndex, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._core import seeds
from .._core.checks import require_one_of, require_whole, shown

Kind = Literal["multinomial", "poisson", "bayesian", "split"]
KINDS = get_args(Kind)
UNSEEN = math.exp(-2)  # the share of many samples that neither of two twins sees, (1 - 1/n)^(2n)


class Bootstrap:
    """Samples of n data, one per replica: bootstrap samples, independent of each other, or parts of a split.

    Args:
        n: how many data there are.
        replicas: how many twins.
        seed: the same seed gives the same samples.
        kind: `"multinomial"`: n draws with replacement, as in the paper. `"poisson"`: each count is Poisson(1) on its
            own, so data that arrive later do not change the counts of the earlier ones. `"bayesian"`: real-valued
            weights, uniform on the simplex (Rubin); every twin sees every sample, so none is `unseen`. `"split"`: each
            sample goes to one twin alone, once; as many are left `unseen` as a bootstrap leaves on average.
        strata: a label per sample; each stratum is resampled within itself, so class shares are kept exactly
            (not for `"poisson"`, whose counts are independent of each other, nor for `"split"`, where what does not
            divide evenly would set the twins apart).
        clusters: a label per sample; whole clusters are drawn, so what belongs together is seen or unseen together.
            Within strata, if both are given.
        block: for series: runs of so many consecutive samples are drawn, round the end (circular block bootstrap).
        cover: give each sample, or cluster, that no twin drew to one of them, at random, so that none of the data is
            wasted once nothing is left to be chosen by `unseen`, which is then empty. Of two twins' sigma^2 this makes
            1 / (1 + e^-2 / 2), 0.94 of it: that of as many more draws. A split leaves none, then.

    >>> bootstrap = Bootstrap(1000)
    >>> bootstrap.counts.sum(1)
    tensor([1000, 1000])
    >>> len(bootstrap.unseen) / 1000
    0.129
    """

    def __init__(
        self,
        n: SupportsIndex,
        replicas: int = 2,
        seed: SupportsIndex = 0,
        kind: Kind = "multinomial",
        strata: Sequence[Any] | NDArray[Any] | Tensor | None = None,
        clusters: Sequence[Any] | NDArray[Any] | Tensor | None = None,
        block: int | None = None,
        cover: bool = False,
    ) -> None:
        self.n = _checked_size(n)
        hint = "; the kind goes by name: kind='poisson'" if isinstance(replicas, str) else ""
        require_whole("replicas", replicas, 2, hint)
        require_one_of(KINDS, "kind", kind)
        if not isinstance(cover, (bool, np.bool_)):
            raise TypeError(f"cover must be True or False, not {shown(cover)}.")
        self.replicas, self.seed, self.kind, self.cover = replicas, seeds.checked(seed), kind, bool(cover)
        stratum = _codes("strata", strata, self.n)
        cluster = _codes("clusters", clusters, self.n)
        if strata is not None and kind == "poisson":
            raise ValueError('kind="poisson" draws each count on its own, which cannot keep the shares of strata.')
        if block is not None:
            _check_block(block, self.n, strata, clusters)
        counts = _room(replicas, self.n, kind)
        self.counts = torch.from_numpy(counts)
        if kind == "split":
            if block is not None:
                raise ValueError('kind="split" has no blocks: give clusters, a label for each run of samples.')
            if strata is not None:
                raise ValueError('kind="split" has no strata: what of them does not divide would set the twins apart.')
            counts[:] = _split(self.seed, replicas, cluster, self.n, self.cover)
            self._require_samples()
            return
        if cover and (block is not None or strata is not None):
            raise ValueError("cover cannot be combined with block or strata: what is given away would not keep them.")
        for r in range(replicas):
            rng = np.random.default_rng(seeds.derive(self.seed, "bootstrap", r))
            if block is not None:
                counts[r] = _draw_blocks(rng, kind, self.n, block)
            elif cluster is not None:
                counts[r] = _draw(rng, kind, _strata_of_clusters(stratum, cluster))[cluster]
            else:
                counts[r] = _draw(rng, kind, stratum if stratum is not None else np.zeros(self.n, np.int64))
        if cover:
            rng = np.random.default_rng(seeds.derive(self.seed, "cover"))
            unit = np.arange(self.n) if cluster is None else cluster
            taker = torch.from_numpy((rng.random(unit.max() + 1) * replicas).astype(np.int64)[unit])
            self.counts[taker[self.unseen], self.unseen] = 1
        self._require_samples()

    def _require_samples(self) -> None:
        if bool((self.counts.sum(1) == 0).any()):
            raise ValueError("a twin got no sample at all: there is too little data for this kind of resampling.")

    @property
    def scale(self) -> float:
        """The factor on sigma, the spread of the twins, that makes it a standard deviation of an estimate.

        1 for bootstrap samples: sigma is what the data leave to an estimate from all of them. 1 / sqrt(replicas) for a
        split: that is the standard deviation of the mean of the twins, an estimate from the seen samples alone. An
        estimate from all data would have a smaller one, 0.93 of it with two twins; with `cover=True` both are the same.
        For `Twins.estimate(scale=...)`; noise in training and resets are of the twins' own sigma.
        """
        return 1 / math.sqrt(self.replicas) if self.kind == "split" else 1.0

    def indices(self, replica: int) -> Tensor:
        """The bootstrap sample of a twin: indices in ascending order, as often as they were drawn."""
        if self.kind == "bayesian":
            raise ValueError(
                'a bayesian bootstrap has weights, not draws: use counts (resample="counts" in PairedLoader).'
            )
        return torch.repeat_interleave(self._of(replica))

    def out_of_bag(self, replica: int) -> Tensor:
        """The samples that this twin does not see. After a reset they are no longer unknown to it: see `unseen`."""
        return (self._of(replica) == 0).nonzero().squeeze(1)

    def _of(self, replica: int) -> Tensor:
        try:
            place = operator.index(replica)
        except TypeError:
            place = self.replicas
        if isinstance(replica, bool) or not -self.replicas <= place < self.replicas:
            raise ValueError(f"replica must be the number of a twin, 0 to {self.replicas - 1}, not {shown(replica)}.")
        return self.counts[place]

    @property
    def seen(self) -> Tensor:
        """The samples that some twin sees: all that anything may be fitted to."""
        return (self.counts > 0).any(0).nonzero().squeeze(1)

    @property
    def unseen(self) -> Tensor:
        """The samples that no twin ever sees: the only honest ones to validate on, since resets mix what twins know."""
        return (self.counts == 0).all(0).nonzero().squeeze(1)

    def __repr__(self) -> str:
        covered = ", cover=True" if self.cover else ""
        return f"Bootstrap(n={self.n}, replicas={self.replicas}, seed={self.seed}, kind={self.kind!r}{covered})"


def _room(replicas: int, n: int, kind: str) -> NDArray[Any]:
    """For the counts, before anything is drawn: of too many samples or twins drawing would not come to an end."""
    try:
        return np.empty((replicas, n), np.float64 if kind == "bayesian" else np.int64)
    except (MemoryError, OverflowError, ValueError):
        raise ValueError(
            f"the counts of {shown(replicas)} twins for {shown(n)} samples do not fit into memory: give fewer of them."
        ) from None


def _draw(rng: np.random.Generator, kind: str, stratum: NDArray[np.int64]) -> NDArray[Any]:
    """How often each unit (a sample or a cluster) is drawn, within its stratum."""
    units = len(stratum)
    if kind == "poisson":
        return rng.poisson(1.0, units)
    size = np.bincount(stratum)
    if kind == "bayesian":
        weight = rng.standard_exponential(units)
        return np.asarray(weight * (size / np.bincount(stratum, weight))[stratum])
    # As many draws as the stratum has units, each of them one of the stratum's units: a draw for each unit's place.
    order = np.argsort(stratum, kind="stable")
    start = np.cumsum(size) - size
    place = start[stratum] + rng.integers(0, size[stratum])
    return np.bincount(order[place], minlength=units)


def _split(seed: int, replicas: int, cluster: NDArray[np.int64] | None, n: int, cover: bool) -> NDArray[np.int64]:
    """Deal the units, samples or clusters, to the twins in turn, in random order and from a random twin on, after those
    that none of them gets: as many as a bootstrap leaves on average, unless a twin would go without."""
    rng = np.random.default_rng(seeds.derive(seed, "split"))
    units = n if cluster is None else len(_strata_of_clusters(None, cluster))
    first = int(rng.integers(replicas))
    order = rng.permutation(units)
    # Chance decides about the fraction of a unit.
    left = 0 if cover else max(0, min(int(units * math.exp(-replicas) + rng.random()), units - replicas))
    dealt = order[left:]
    counts = np.zeros((replicas, units), np.int64)
    counts[(first + np.arange(len(dealt))) % replicas, dealt] = 1
    return counts if cluster is None else counts[:, cluster]


def _draw_blocks(rng: np.random.Generator, kind: str, n: int, block: int) -> NDArray[Any]:
    """Circular blocks: how often a block starts at each place, then how many blocks cover each sample."""
    starts: NDArray[Any]
    if kind == "poisson":
        starts = rng.poisson(1 / block, n)
    elif kind == "bayesian":
        # Gamma(1 / block) makes the sum over a block's length Exp(1), the weight that single samples have.
        starts = rng.standard_gamma(1 / block, n)
        starts = starts * (n / block / starts.sum())
    else:
        # n draws in all: whole blocks, and one that is cut short where n is no multiple of their length.
        starts = np.bincount(rng.integers(0, n, n // block), minlength=n)
    covered = _cover(starts, block)
    if kind == "multinomial" and n % block:
        covered = covered + _cover(np.bincount(rng.integers(0, n, 1), minlength=n), n % block)
    return covered


def _cover(starts: NDArray[Any], length: int) -> NDArray[Any]:
    """For each sample, how many of the runs of that length that begin at `starts`, round the end, contain it."""
    wrapped = np.concatenate([starts[len(starts) - length + 1 :], starts])
    before = np.concatenate([np.zeros(1, wrapped.dtype), np.cumsum(wrapped)])
    return np.asarray(before[length:] - before[:-length])


def _strata_of_clusters(stratum: NDArray[np.int64] | None, cluster: NDArray[np.int64]) -> NDArray[np.int64]:
    found = np.zeros(cluster.max() + 1, np.int64)
    if stratum is not None:
        found[cluster] = stratum
        if (found[cluster] != stratum).any():
            raise ValueError("a cluster has samples in more than one stratum: a cluster must lie in one.")
    if len(found) < 2:
        raise ValueError("clusters are all the same: there must be at least two to draw from.")
    return found


def _codes(argument: str, values: Any, n: int) -> NDArray[np.int64] | None:
    if values is None:
        return None
    try:
        if isinstance(values, Tensor):
            array = values.detach().cpu().numpy()
        else:  # a list as it is: numpy would make strings of the numbers, and the NaN, in a list that has strings, too
            array = np.asarray(values, None if hasattr(values, "dtype") else object)
        shape = array.shape
        if shape == (n,) and not np.ma.is_masked(values) and not (array != array).any():
            return np.asarray(np.unique(array, return_inverse=True)[1], np.int64)
    except (TypeError, ValueError, RuntimeError):  # what cannot be an array, or be sorted
        shape = (n,)
    if shape != (n,):
        raise ValueError(f"{argument} must hold one label per sample, {n} in all, not an array of shape {shape}.")
    raise ValueError(f"{argument} must be labels that can be sorted, such as numbers or strings, with none missing.")


def _check_block(block: int, n: int, strata: object, clusters: object) -> None:
    if strata is not None or clusters is not None:
        raise ValueError("block cannot be combined with strata or clusters: a series has one order.")
    if isinstance(block, bool) or not isinstance(block, int) or not 1 <= block < n:
        raise ValueError(f"block must be a whole number from 1 to less than the {n} samples, not {shown(block)}.")


def _checked_size(n: SupportsIndex) -> int:
    try:
        size = n.__index__()
    except (AttributeError, TypeError):
        raise TypeError(f"n must be the number of samples, such as len(dataset), not {shown(n)}.") from None
    if size == 0:
        raise ValueError("the dataset is empty: there is nothing to draw from.")
    if size < 2:
        raise ValueError(
            f"n is {shown(size)}, but a bootstrap needs at least 2 samples: from fewer every draw is the same."
        )
    return size
