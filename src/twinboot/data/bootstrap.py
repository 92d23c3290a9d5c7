"""How often each twin sees each sample: the resampling of the data, drawn once, before training starts.

Each of two twins misses e^-1 of the data, and 13.5 % of the data are missed by both. These `unseen` samples are a
hold-out set for free.

With `kind="split"` the twins divide the data instead, so that an epoch of all twins reads each sample once. What sigma
means then changes. With bootstrap samples, sigma^2 is the variance of an estimate from all n data; the mean of B twins
has 1 + 1 / B times that variance. With a split, twins learn from independent parts of the data, and the variance of
their mean is sigma^2 / B ("random groups" in survey statistics). That mean is an estimate from the seen samples, a
share 1 - e^-B of the data, so its variance is 1 / (1 - e^-B) times that of an estimate from all data: 1.16 for two
twins, and 1 with `cover=True`. `Bootstrap.scale` is the factor on sigma for each kind. The price of a split: each twin
sees at most 1 / B of the data, and has the bias of so small a sample.
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
from .._core.checks import is_whole, require_number, require_one_of, require_whole, shown

Kind = Literal["multinomial", "poisson", "bayesian", "split", "parametric"]
KINDS = get_args(Kind)
UNSEEN = math.exp(-2)  # the share of unseen samples for two twins and large n: the limit of (1 - 1/n)^(2n)


class Bootstrap:
    """One resample of the data per twin: independent bootstrap samples, or the parts of a split.

    Args:
        n: the number of samples in the dataset.
        replicas: the number of twins.
        seed: the same seed gives the same resamples.
        kind: `"multinomial"`: n draws with replacement, as in the paper. `"poisson"`: independent Poisson(1) counts, so
            that later data do not change the counts of earlier ones. `"bayesian"`: real-valued weights, uniform on the
            simplex (Rubin); each twin sees each sample, so none is `unseen`. `"split"`: each sample goes to one twin,
            once; as many are left `unseen` as a bootstrap leaves on average. `"parametric"`: all twins see the same
            samples, and each adds noise of its own to the measurements; for `invert` with a prior.
            None is `unseen`.
        strata: one label per sample. Each stratum is resampled on its own, so class shares stay the same. Not for
            `"poisson"`, whose counts are independent, nor for `"split"`, where uneven strata would make the twins
            differ, nor for `"parametric"`.
        clusters: one label per sample. Whole clusters are drawn, so their samples are seen or unseen together. With
            strata, clusters are drawn within strata.
        block: for time series: draw runs of this many consecutive samples, wrapping around the end (circular block
            bootstrap).
        cover: give each unseen sample, or cluster, to a random twin. No data are wasted, but there is no hold-out set:
            `unseen` is empty. For two bootstrap samples this multiplies sigma^2 by 1 / (1 + e^-2 / 2) = 0.94, as
            that many more draws would.
        calibration: the share of the samples that no twin sees to set aside, such as 0.5, for prediction sets and
            conformal intervals. They are in `calibration` then and not in `unseen`, so that they do not choose the
            epoch. Not for clusters and blocks, whose samples are not exchangeable.

    Attributes:
        counts: [replicas, n], how often each twin sees each sample.
        calibration: the indices of the samples that are set aside.

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
        calibration: float = 0.0,
    ) -> None:
        self.n = _require_size(n)
        hint = "; the kind goes by name: kind='poisson'" if isinstance(replicas, str) else ""
        require_whole("replicas", replicas, 2, hint)
        require_one_of(KINDS, "kind", kind)
        if not isinstance(cover, (bool, np.bool_)):
            raise TypeError(f"cover must be True or False, not {shown(cover)}.")
        self.replicas, self.seed, self.kind, self.cover = int(replicas), seeds.require_seed(seed), kind, bool(cover)
        require_number("calibration", calibration)
        if calibration >= 1:
            raise ValueError(f"calibration must be a share below 1, such as 0.5, not {shown(calibration)}.")
        if calibration and (clusters is not None or block is not None):
            raise ValueError("calibration needs exchangeable samples, and those of clusters or blocks are not.")
        self.calibration = torch.empty(0, dtype=torch.long)
        self._arguments: dict[str, Any] = {"strata": strata, "clusters": clusters, "block": block}
        stratum = _codes("strata", strata, self.n)
        cluster = _codes("clusters", clusters, self.n)
        if strata is not None and kind == "poisson":
            raise ValueError('kind="poisson" draws each count on its own, so it cannot keep the shares of strata.')
        if block is not None:
            if strata is not None or clusters is not None:
                raise ValueError("block cannot be combined with strata or clusters.")
            if not is_whole(block) or not 1 <= block < self.n:
                most = f"less than the {self.n} samples"
                raise ValueError(f"block must be a whole number from 1 to {most}, not {shown(block)}.")
            if kind in ("split", "parametric"):
                raise ValueError(f'kind="{kind}" has no blocks: give clusters, one label per run of samples.')
        if strata is not None and kind in ("split", "parametric"):
            raise ValueError(f'kind="{kind}" has no strata: give clusters, or use another kind.')
        if cover and (block is not None or strata is not None):
            raise ValueError("cover cannot be combined with block or strata: it adds single samples.")
        try:  # memory before draws: those of too many samples or twins would take forever
            counts = np.empty((replicas, self.n), np.float64 if kind == "bayesian" else np.int64)
        except (MemoryError, OverflowError, ValueError):
            many = f"{shown(replicas)} twins for {shown(self.n)} samples"
            raise ValueError(f"the counts of {many} do not fit into memory: give fewer.") from None
        self.counts = torch.from_numpy(counts)
        if kind == "parametric":
            counts[:] = 1
        elif kind == "split":
            counts[:] = _split(self.seed, replicas, cluster, self.n, self.cover)
        else:
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
        if bool((self.counts.sum(1) == 0).any()):
            raise ValueError("a twin got no sample at all: give more data, or another kind of resampling.")
        unseen = self.unseen
        aside = int(float(calibration) * len(unseen))
        if calibration and not aside:
            raise ValueError(f"{len(unseen)} samples that no twin sees are too few to set some aside for calibration.")
        rng = np.random.default_rng(seeds.derive(self.seed, "calibration"))
        self.calibration = unseen[torch.from_numpy(np.sort(rng.permutation(len(unseen))[:aside]))]

    @property
    def scale(self) -> float:
        """The factor that makes sigma, the spread of the twins, the standard deviation of an estimate.

        1 for bootstrap samples: sigma is that of an estimate from all data. 1 / sqrt(replicas) for a split: that of the
        mean of the twins, an estimate from the seen samples. An estimate from all data would have a smaller one: 0.93
        times it for two twins, the same with `cover=True`. Pass it to `Twins.estimate(scale=...)`; training noise and
        resets use the twins' own sigma.
        """
        return 1 / math.sqrt(self.parts)

    @property
    def independent(self) -> bool:
        """Whether samples are drawn one by one, and not in clusters or blocks."""
        return self._arguments["clusters"] is None and self._arguments["block"] is None

    def folds(self, number: int) -> Tensor:
        """Parts of the samples for cross-validation [parts, n], True where a sample is in the part. Clusters and blocks
        are not divided. There are fewer parts if there are fewer units."""
        require_whole("number", number, 2)
        units = self.units
        seed, parts = seeds.derive(self.seed, "folds"), max(2, min(number, int(units.max()) + 1))
        whole = None if self._arguments["clusters"] is None and self._arguments["block"] is None else units
        return Bootstrap(self.n, parts, seed, "split", clusters=whole, cover=True).counts > 0

    @property
    def units(self) -> Tensor:
        """For each sample, the number of the unit that is drawn as a whole: its own, that of its cluster, or that of
        its block if blocks follow each other from the start.

        >>> Bootstrap(6, clusters=["b", "b", "a", "a", "a", "c"]).units
        tensor([1, 1, 0, 0, 0, 2])
        """
        block = self._arguments["block"]
        codes = _codes("clusters", self._arguments["clusters"], self.n)
        places = np.arange(self.n) // (block or 1)
        return torch.from_numpy(places if codes is None else codes)

    def redrawn(self, time: int) -> Bootstrap:
        """Other resamples of the same kind: those of round `time`. They may draw what is `unseen` here."""
        require_whole("time", time, 0)
        return Bootstrap(
            self.n,
            self.replicas,
            seeds.derive(self.seed, "round", time),
            self.kind,
            cover=self.cover,
            **self._arguments,
        )

    @property
    def parts(self) -> int:
        """Into how many parts the twins divide the data: 1 for bootstrap samples, each drawn from all data."""
        return self.replicas if self.kind == "split" else 1

    def indices(self, replica: int) -> Tensor:
        """The sample of a twin: ascending indices, each as often as it was drawn."""
        if self.kind == "bayesian":
            raise ValueError('a bayesian bootstrap has weights, not draws: use PairedLoader(..., resample="counts").')
        return torch.repeat_interleave(self._of(replica))

    def out_of_bag(self, replica: int) -> Tensor:
        """The samples that this twin does not see. After a reset its weights may depend on them: see `unseen`."""
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
        """The samples that some twin sees: the training data."""
        return (self.counts > 0).any(0).nonzero().squeeze(1)

    @property
    def unseen(self) -> Tensor:
        """The samples that no twin sees, without those for `calibration`. Only these are valid hold-out data, because
        resets mix the twins' weights."""
        hidden = (self.counts == 0).all(0)
        hidden[self.calibration] = False
        return hidden.nonzero().squeeze(1)

    def __repr__(self) -> str:
        more = ", cover=True" if self.cover else ""
        more += f", {len(self.calibration)} for calibration" if len(self.calibration) else ""
        return f"Bootstrap(n={self.n}, replicas={self.replicas}, seed={self.seed}, kind={self.kind!r}{more})"


def _draw(rng: np.random.Generator, kind: str, stratum: NDArray[np.int64]) -> NDArray[Any]:
    """How often each unit (a sample or a cluster) is drawn, within its stratum."""
    units = len(stratum)
    if kind == "poisson":
        return rng.poisson(1.0, units)
    size = np.bincount(stratum)
    if kind == "bayesian":
        weight = rng.standard_exponential(units)
        return np.asarray(weight * (size / np.bincount(stratum, weight))[stratum])
    # Each stratum gets as many draws as it has units: one for each place of its units in `order`.
    order = np.argsort(stratum, kind="stable")
    start = np.cumsum(size) - size
    place = start[stratum] + rng.integers(0, size[stratum])
    return np.bincount(order[place], minlength=units)


def _split(seed: int, replicas: int, cluster: NDArray[np.int64] | None, n: int, cover: bool) -> NDArray[np.int64]:
    """Leave out as many units (samples or clusters) as a bootstrap does on average, but keep one for each twin. Deal
    the others to the twins in turn, in random order, starting with a random twin."""
    rng = np.random.default_rng(seeds.derive(seed, "split"))
    units = n if cluster is None else len(_strata_of_clusters(None, cluster))
    first = int(rng.integers(replicas))
    order = rng.permutation(units)
    # The fraction of a unit is rounded up or down at random.
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
        # n draws in all: whole blocks, and a shorter one if n is not a multiple of their length.
        starts = np.bincount(rng.integers(0, n, n // block), minlength=n)
    covered = _cover(starts, block)
    if kind == "multinomial" and n % block:
        covered = covered + _cover(np.bincount(rng.integers(0, n, 1), minlength=n), n % block)
    return covered


def _cover(starts: NDArray[Any], length: int) -> NDArray[Any]:
    """For each sample, how many runs contain it, with `starts[i]` circular runs of that length starting at i."""
    wrapped = np.concatenate([starts[len(starts) - length + 1 :], starts])
    before = np.concatenate([np.zeros(1, wrapped.dtype), np.cumsum(wrapped)])
    return np.asarray(before[length:] - before[:-length])


def _strata_of_clusters(stratum: NDArray[np.int64] | None, cluster: NDArray[np.int64]) -> NDArray[np.int64]:
    found = np.zeros(cluster.max() + 1, np.int64)
    if stratum is not None:
        found[cluster] = stratum
        if (found[cluster] != stratum).any():
            raise ValueError("a cluster has samples in more than one stratum: each cluster must lie in one.")
    if len(found) < 2:
        raise ValueError("all samples are in one cluster: there must be at least two clusters.")
    return found


def _codes(argument: str, values: Any, n: int) -> NDArray[np.int64] | None:
    if values is None:
        return None
    try:
        if isinstance(values, Tensor):
            array = values.detach().cpu().numpy()
        else:  # as objects: from a list with strings, numpy would turn the numbers and NaN into strings, too
            array = np.asarray(values, None if hasattr(values, "dtype") else object)
        shape = array.shape
        if shape == (n,) and not np.ma.is_masked(values) and not (array != array).any():
            return np.asarray(np.unique(array, return_inverse=True)[1], np.int64)
    except (TypeError, ValueError, RuntimeError):  # not an array, or not sortable
        shape = (n,)
    if shape != (n,):
        raise ValueError(f"{argument} must have one label per sample, {n} in all, not an array of shape {shape}.")
    raise ValueError(f"{argument} must be labels that can be sorted, such as numbers or strings, with none missing.")


def _require_size(n: SupportsIndex) -> int:
    try:
        size = n.__index__()
    except (AttributeError, TypeError):
        raise TypeError(f"n must be the number of samples, such as len(dataset), not {shown(n)}.") from None
    if size == 0:
        raise ValueError("the dataset is empty: there is nothing to draw from.")
    if size < 2:
        raise ValueError(f"n is {shown(size)}, but a bootstrap needs at least 2 samples.")
    return size
