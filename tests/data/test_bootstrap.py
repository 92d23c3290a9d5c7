import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from twinboot import Bootstrap, PairedLoader

KINDS = ["multinomial", "poisson", "bayesian"]
seeds = st.integers(0, 2**40)


@given(n=st.integers(2, 300), replicas=st.integers(2, 5), seed=seeds)
def test_multinomial_counts_sum_to_n(n: int, replicas: int, seed: int) -> None:
    bootstrap = Bootstrap(n, replicas, seed)
    assert bootstrap.counts.shape == (replicas, n)
    assert bootstrap.counts.min() >= 0
    assert bootstrap.counts.sum(1).tolist() == [n] * replicas


@given(n=st.integers(2, 300), seed=seeds)
def test_bayesian_weights_are_positive_and_sum_to_n(n: int, seed: int) -> None:
    counts = Bootstrap(n, seed=seed, kind="bayesian").counts
    assert counts.min() > 0
    assert counts.sum(1).tolist() == pytest.approx([n, n])


@given(n=st.integers(2, 300), replicas=st.integers(2, 4), seed=seeds, kind=st.sampled_from(["multinomial", "poisson"]))
def test_indices_out_of_bag_and_unseen_agree_with_counts(n: int, replicas: int, seed: int, kind: Any) -> None:
    try:
        bootstrap = Bootstrap(n, replicas, seed, kind)
    except ValueError:  # a poisson sample of very few data may be empty
        assert kind == "poisson"
        assert n < 30
        return
    seen: set[int] = set()
    for r in range(replicas):
        drawn = bootstrap.indices(r)
        assert torch.equal(torch.bincount(drawn, minlength=n), bootstrap.counts[r])
        assert set(drawn.tolist()) | set(bootstrap.out_of_bag(r).tolist()) == set(range(n))
        assert not set(drawn.tolist()) & set(bootstrap.out_of_bag(r).tolist())
        seen |= set(drawn.tolist())
    assert set(bootstrap.unseen.tolist()) == set(range(n)) - seen
    assert set(bootstrap.seen.tolist()) == seen


@given(labels=st.lists(st.sampled_from("abcd"), min_size=2, max_size=80), seed=seeds)
def test_strata_keep_their_shares(labels: list[str], seed: int) -> None:
    for kind in ("multinomial", "bayesian"):
        counts = Bootstrap(len(labels), seed=seed, kind=kind, strata=labels).counts.numpy()  # type: ignore[arg-type]
        for label in set(labels):
            here = np.array(labels) == label
            assert counts[:, here].sum(1) == pytest.approx(here.sum())


@given(labels=st.lists(st.integers(0, 6), min_size=2, max_size=80).filter(lambda c: len(set(c)) > 1), seed=seeds)
def test_clusters_are_drawn_whole(labels: list[int], seed: int) -> None:
    counts = Bootstrap(len(labels), seed=seed, clusters=torch.tensor(labels)).counts
    per_cluster = []
    for label in set(labels):
        of_cluster = counts[:, [i for i, c in enumerate(labels) if c == label]]
        assert (of_cluster == of_cluster[:, :1]).all()
        per_cluster.append(of_cluster[:, 0])
    assert torch.stack(per_cluster).sum(0).tolist() == [len(per_cluster)] * 2


def test_clusters_within_strata_keep_both() -> None:
    clusters = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    strata = [0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    for seed in range(50):
        counts = Bootstrap(10, seed=seed, clusters=clusters, strata=strata).counts
        assert (counts[:, ::2] == counts[:, 1::2]).all()
        assert counts[:, :6:2].sum(1).tolist() == [3, 3]
        assert counts[:, 6::2].sum(1).tolist() == [2, 2]


@given(n=st.integers(3, 120), block=st.integers(1, 40), seed=seeds)
def test_blocks_are_runs_round_the_end_and_sum_to_n(n: int, block: int, seed: int) -> None:
    if block >= n:
        return
    counts = Bootstrap(n, seed=seed, block=block).counts
    assert counts.sum(1).tolist() == [n, n]
    # Each run begins once and ends once; the blocks, and the one that is cut short, are all the runs there are.
    rises = (counts - counts.roll(1, 1)).clamp(min=0).sum(1)
    assert (rises <= math.ceil(n / block)).all()


def standard_error_test(values: np.ndarray, expected: float, spread: float) -> None:
    """Within four standard errors of the closed form."""
    assert abs(values.mean() - expected) < 4 * spread / math.sqrt(values.size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [None, 5])
def test_every_sample_has_mean_weight_one_and_the_kinds_variance(kind: Any, block: int | None) -> None:
    n, seeds = 60, 4000
    counts = np.stack([Bootstrap(n, seed=s, kind=kind, block=block).counts[0].numpy() for s in range(seeds)]).astype(
        float
    )
    draws = n / (block or 1)
    # Counts: Binomial(draws, 1 / draws), Poisson(1), and n times a Beta(a, n a - a) with a = 1 / block.
    variance = {"multinomial": 1 - 1 / draws, "poisson": 1.0, "bayesian": (draws - 1) / (draws + 1)}[kind]
    one = counts[:, 7]
    standard_error_test(one, 1.0, math.sqrt(variance))
    fourth = ((one - 1) ** 4).mean()
    standard_error_test((one - 1) ** 2, variance, math.sqrt(fourth))


def test_neighbours_in_a_block_share_their_fate() -> None:
    n, block, seeds = 60, 5, 4000
    counts = np.stack([Bootstrap(n, seed=s, block=block).counts[0].numpy() for s in range(seeds)]).astype(float) - 1
    # Of the `block` starts that cover a sample, block - k cover its k-th neighbour too.
    draws = n / block
    for lag in (1, 2, 4, 5, 9):
        shared = max(block - lag, 0) / block
        products = counts[:, 7] * counts[:, 7 + lag]
        standard_error_test(products, shared - 1 / draws, products.std())


@pytest.mark.parametrize("replicas", [2, 3])
def test_unseen_is_the_share_that_theory_gives(replicas: int) -> None:
    n = 20_000
    shares = np.array([len(Bootstrap(n, replicas, seed).unseen) / n for seed in range(30)])
    p = (1 - 1 / n) ** (n * replicas)
    standard_error_test(shares, p, math.sqrt(p * (1 - p) / n))


@pytest.mark.parametrize("cover", [False, True])
def test_poisson_counts_of_early_data_do_not_change_when_more_arrive(cover: bool) -> None:
    early, late = (Bootstrap(n, seed=3, kind="poisson", cover=cover) for n in (50, 80))
    assert torch.equal(early.counts, late.counts[:, :50])


@given(st.integers(2, 60), st.integers(2, 4), st.integers(0, 10**6), st.sampled_from(KINDS))
def test_what_no_twin_drew_is_given_to_one_of_them_if_asked(n: int, replicas: int, seed: int, kind: Any) -> None:
    try:
        plain, covered = (Bootstrap(n, replicas, seed, kind, cover=cover) for cover in (False, True))
    except ValueError:  # a twin without any sample
        return
    left = plain.unseen
    assert not len(covered.unseen)
    assert (covered.counts[:, left].sum(0) == 1).all()
    drawn = plain.seen
    assert torch.equal(plain.counts[:, drawn], covered.counts[:, drawn])
    assert ", cover=True)" in repr(covered)
    assert "cover" not in repr(plain)


def test_clusters_that_no_twin_drew_are_given_away_whole() -> None:
    labels = np.repeat(np.arange(60), 3)
    plain, covered = (Bootstrap(180, clusters=labels, cover=cover) for cover in (False, True))
    given_away = covered.counts[:, plain.unseen].reshape(2, -1, 3)
    assert given_away.shape[1] > 4
    assert (given_away == given_away[:, :, :1]).all()
    assert (given_away.sum(1) > 0).all()  # each twin gets some


@pytest.mark.parametrize("replicas", [2, 3])
def test_covered_data_have_the_variance_of_as_many_more_draws(replicas: int) -> None:
    """The sample variance of the twins' means of data with variance 1, times their number: 1 for a bootstrap."""
    n, found = 20_000, []
    for seed in range(30):
        counts = Bootstrap(n, replicas, seed, cover=True).counts.double()
        found.append(n * (counts / counts.sum(1, keepdim=True)).var(0).sum().item())
    standard_error_test(np.array(found), 1 / (1 + math.exp(-replicas) / replicas), float(np.std(found)))


@given(n=st.integers(5, 300), replicas=st.integers(2, 5), seed=seeds, cover=st.booleans())
def test_a_split_gives_each_sample_to_one_twin_alone(n: int, replicas: int, seed: int, cover: bool) -> None:
    bootstrap = Bootstrap(n, replicas, seed, "split", cover=cover)
    assert set(bootstrap.counts.sum(0).tolist()) <= {0, 1}
    sizes = bootstrap.counts.sum(1)
    assert sizes.max() - sizes.min() <= 1
    expected = 0.0 if cover else n * math.exp(-replicas)
    assert min(math.floor(expected), n - replicas) <= len(bootstrap.unseen) <= math.ceil(expected)


def test_a_split_leaves_as_many_unseen_as_a_bootstrap_on_average() -> None:
    left = np.array([len(Bootstrap(20, seed=seed, kind="split").unseen) for seed in range(2000)])
    fraction = 20 * math.exp(-2) % 1
    standard_error_test(left, 20 * math.exp(-2), math.sqrt(fraction * (1 - fraction)))


def test_a_split_keeps_clusters_together() -> None:
    counts = Bootstrap(180, kind="split", clusters=np.repeat(np.arange(60), 3)).counts.reshape(2, 60, 3)
    assert (counts == counts[:, :, :1]).all()
    dealt = counts[:, :, 0].sum(1)
    assert abs(int(dealt[0] - dealt[1])) <= 1
    assert int(dealt.sum()) in (51, 52)  # of 60, without 8.1 of them


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_a_split_of_as_many_samples_as_twins_gives_each_of_them_one(replicas: int) -> None:
    for seed in range(100):
        assert Bootstrap(replicas, replicas, seed, "split").counts.sum(1).tolist() == [1] * replicas


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("cover", [False, True])
def test_sigma_of_a_split_times_its_scale_is_the_deviation_of_the_mean(replicas: int, cover: bool) -> None:
    """The sample variance of the twins' means of data with variance 1, times scale^2: one over the data that are seen.
    It has replicas - 1 degrees of freedom."""
    n, found = 200, []
    for seed in range(4000):
        bootstrap = Bootstrap(n, replicas, seed, "split", cover=cover)
        data = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        means = (bootstrap.counts * data).sum(1) / bootstrap.counts.sum(1)
        found.append(len(bootstrap.seen) * bootstrap.scale**2 * means.var().item())
    standard_error_test(np.array(found), 1.0, math.sqrt(2 / (replicas - 1)))


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("cover", [False, True])
def test_the_mean_of_split_twins_varies_as_scale_times_sigma_says(replicas: int, cover: bool) -> None:
    """Data with variance 1, drawn anew with each split: the variance of the mean of the twins is one over the data that
    are seen, and so is the mean of (scale * sigma)^2. Mean and sigma^2 are independent, with 1 and replicas - 1 degrees
    of freedom."""
    n, squares, told, seen = 200, [], [], []
    for seed in range(4000):
        bootstrap = Bootstrap(n, replicas, seed, "split", cover=cover)
        data = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        means = (bootstrap.counts * data).sum(1) / bootstrap.counts.sum(1)
        squares.append(means.mean().item() ** 2)
        told.append(bootstrap.scale**2 * means.var().item())
        seen.append(len(bootstrap.seen))
    standard_error_test(np.multiply(seen, squares), 1.0, math.sqrt(2))
    standard_error_test(np.multiply(seen, np.subtract(squares, told)), 0.0, math.sqrt(2 + 2 / (replicas - 1)))
    of_all = 1.0 if cover else 1 / (1 - math.exp(-replicas))  # times the variance of an estimate from all data
    standard_error_test(n * np.array(squares), of_all, math.sqrt(2) * of_all)


@pytest.mark.parametrize("kind", KINDS)
def test_sigma_of_a_bootstrap_is_that_of_the_mean_as_it_is(kind: Any) -> None:
    assert Bootstrap(50, kind=kind).scale == Bootstrap(50, kind=kind).parts == 1


def test_same_seed_same_sample_and_replicas_and_seeds_differ() -> None:
    assert torch.equal(Bootstrap(100, seed=5).counts, Bootstrap(100, seed=5).counts)
    assert not torch.equal(Bootstrap(100, seed=5).counts, Bootstrap(100, seed=6).counts)
    counts = Bootstrap(100, replicas=3, seed=5).counts
    assert not torch.equal(counts[0], counts[1])
    assert torch.equal(counts[:2], Bootstrap(100, seed=5).counts)  # more replicas leave the first ones as they were


def test_no_global_generator_is_read_or_moved() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index, union-attr]  # noqa: NPY002
    Bootstrap(100)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # type: ignore[index]  # noqa: NPY002


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"n": 0}, ValueError, "the dataset is empty"),
        ({"n": 1}, ValueError, "n is 1, but a bootstrap needs at least 2 samples"),
        ({"n": -4}, ValueError, "n is -4, but a bootstrap needs at least 2 samples"),
        ({"n": [1, 2, 3]}, TypeError, r"n must be the number of samples, such as len\(dataset\)"),
        ({"n": 9, "replicas": 1}, ValueError, "replicas must be a whole number of at least 2, not 1"),
        ({"n": 9, "replicas": "poisson"}, ValueError, "not 'poisson'; the kind goes by name: kind='poisson'"),
        ({"n": 9, "kind": "jackknife"}, ValueError, "unknown kind 'jackknife': use \"multinomial\""),
        ({"n": 9, "strata": [0, 1]}, ValueError, r"strata must have one label per sample, 9 in all, not .* \(2,\)"),
        ({"n": 9, "clusters": torch.zeros(9, 2)}, ValueError, "clusters must have one label per sample"),
        ({"n": 4, "clusters": [1, 1, 1, 1]}, ValueError, "all samples are in one cluster"),
        ({"n": 4, "clusters": [0, 0, 1, 1], "strata": [0, 1, 1, 1]}, ValueError, "each cluster must lie in one"),
        ({"n": 4, "kind": "poisson", "strata": [0, 0, 1, 1]}, ValueError, "cannot keep the shares of strata"),
        ({"n": 4, "block": 4}, ValueError, "block must be a whole number from 1 to less than the 4 samples, not 4"),
        ({"n": 4, "block": 2, "kind": "split"}, ValueError, "has no blocks: give clusters"),
        ({"n": 4, "strata": [0, 0, 1, 1], "kind": "split"}, ValueError, "has no strata"),
        ({"n": 2, "replicas": 3, "kind": "split"}, ValueError, "a twin got no sample at all"),
        ({"n": 4, "block": 2, "cover": True}, ValueError, "cover cannot be combined with block"),
        ({"n": 4, "strata": [0, 0, 1, 1], "cover": True}, ValueError, "cover cannot be combined with block or strata"),
        ({"n": 4, "block": 2, "strata": [0, 0, 1, 1]}, ValueError, "block cannot be combined with strata or clusters"),
        ({"n": 10**15}, ValueError, "counts of 2 twins for 1000000000000000 samples do not fit into memory"),
        ({"n": 10**5000}, ValueError, "twins for a very large int samples do not fit into memory"),
        ({"n": 9, "replicas": 10**15}, ValueError, "counts of 1000000000000000 twins for 9 samples do not fit"),
        ({"n": 10**15, "kind": "split"}, ValueError, "do not fit into memory"),
        ({"n": 9, "seed": 10**5000}, ValueError, "seed must be an integer of at most 1024 bits, not one of 16610"),
        ({"n": 9, "seed": None}, TypeError, "seed must be an integer, not None"),
        ({"n": 9, "kind": np.zeros(0)}, ValueError, "unknown kind array"),
        ({"n": 9, "cover": 2.5}, TypeError, "cover must be True or False, not 2.5"),
        ({"n": 9, "cover": None}, TypeError, "cover must be True or False, not None"),
        ({"n": 9, "strata": "abcabcabc"}, ValueError, r"strata must have one label per sample, .* shape \(\)"),
        ({"n": 4, "clusters": torch.zeros(4, device="meta")}, ValueError, "clusters must be labels that can be sorted"),
    ],
)
def test_bad_input_gets_a_sentence(arguments: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        Bootstrap(**arguments)


@pytest.mark.parametrize(
    "labels",
    [
        [math.nan, 0.0, 1.0, 1.0],
        torch.tensor([math.nan, 0.0, 1.0, 1.0]),
        ["a", "b", None, "b"],
        ["a", "b", math.nan, "b"],  # numpy alone would make this the string "nan"
        np.array(["2020-01-01", "NaT", "2020-01-02", "NaT"], "datetime64[D]"),
        np.ma.masked_array([0, 1, 0, 1], [True, False, False, False]),
        [0, "0", 1, 1],
        [[0, 1], 0, 1, 1],
        [object() for _ in range(4)],
    ],
)
@pytest.mark.parametrize("argument", ["strata", "clusters"])
def test_labels_that_are_missing_or_cannot_be_compared_are_refused(argument: str, labels: Any) -> None:
    with pytest.raises(ValueError, match=f"{argument} must be labels that can be sorted, .*, with none missing"):
        Bootstrap(4, **{argument: labels})


@pytest.mark.parametrize("replica", [2, -3, 1.0, True, None, [0], slice(0, 1), torch.zeros(2, dtype=torch.bool)])
def test_a_twin_that_is_not_there_is_refused(replica: Any) -> None:
    bootstrap = Bootstrap(9)
    for asked in (bootstrap.indices, bootstrap.out_of_bag):
        with pytest.raises(ValueError, match="replica must be the number of a twin, 0 to 1, not "):
            asked(replica)
    assert torch.equal(bootstrap.indices(-1), bootstrap.indices(1))
    assert torch.equal(bootstrap.indices(torch.tensor(1)), bootstrap.indices(1))


def test_bayesian_weights_have_no_indices() -> None:
    with pytest.raises(ValueError, match="a bayesian bootstrap has weights, not draws"):
        Bootstrap(9, kind="bayesian").indices(0)


def test_a_twin_without_any_sample_is_refused() -> None:
    empty = next(s for s in range(1000) if Bootstrap_would_be_empty(s))
    with pytest.raises(ValueError, match="a twin got no sample at all"):
        Bootstrap(2, seed=empty, kind="poisson")


def Bootstrap_would_be_empty(seed: int) -> bool:  # noqa: N802
    try:
        Bootstrap(2, seed=seed, kind="poisson")
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("kind", ["multinomial", "poisson", "split"])
def test_samples_for_calibration_are_a_random_share_of_those_that_no_twin_sees(kind: Any) -> None:
    plain, found = Bootstrap(1000, kind=kind), Bootstrap(1000, kind=kind, calibration=0.25)
    assert torch.equal(found.counts, plain.counts)
    assert len(plain.calibration) == 0
    assert len(found.calibration) == len(plain.unseen) // 4
    together = torch.cat([found.calibration, found.unseen])
    assert torch.equal(together.sort().values, plain.unseen)
    assert torch.equal(found.seen, plain.seen)
    assert torch.equal(found.calibration, Bootstrap(1000, kind=kind, calibration=0.25).calibration)
    # at random: their mean is that of uniform numbers, within four standard errors
    assert abs(found.calibration.double().mean() - 500) < 4 * 1000 / math.sqrt(12 * len(found.calibration))
    assert repr(found).endswith(f", {len(found.calibration)} for calibration)")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"calibration": 1.0}, "calibration must be a share below 1, such as 0.5, not 1.0"),
        ({"calibration": -0.5}, "calibration must be a finite number of at least 0"),
        ({"calibration": 0.5, "block": 3}, "those of clusters or blocks are not"),
        ({"calibration": 0.5, "clusters": [0, 1] * 10}, "those of clusters or blocks are not"),
        ({"calibration": 0.5, "cover": True}, "0 samples that no twin sees are too few to set some aside"),
        ({"calibration": 0.5, "kind": "bayesian"}, "0 samples that no twin sees are too few to set some aside"),
    ],
)
def test_a_calibration_that_cannot_be_gets_a_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Bootstrap(20, **arguments)


def test_a_parametric_bootstrap_shows_all_samples_to_all_twins() -> None:
    bootstrap = Bootstrap(7, 3, kind="parametric")
    assert (bootstrap.counts == 1).all()
    assert bootstrap.scale == 1
    assert not len(bootstrap.unseen)
    with pytest.raises(ValueError, match=r'kind="parametric" adds noise to measurements, as invert does'):
        PairedLoader(TensorDataset(torch.zeros(7)), bootstrap, 2)


@pytest.mark.parametrize(
    "options", [{}, {"kind": "poisson"}, {"block": 3}, {"clusters": [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]}]
)
def test_redrawn_samples_are_others_of_the_same_kind(options: Any) -> None:
    bootstrap = Bootstrap(10, **options)
    first, again, second = (bootstrap.redrawn(time) for time in (1, 1, 2))
    assert torch.equal(first.counts, again.counts)
    assert not torch.equal(first.counts, second.counts)
    assert not torch.equal(first.counts, bootstrap.counts)
    assert first.kind == bootstrap.kind
    if "clusters" in options:
        assert torch.equal(first.counts[:, ::2], first.counts[:, 1::2])


def test_folds_divide_the_samples_and_keep_clusters_and_blocks_together() -> None:
    for options in ({}, {"block": 2}, {"clusters": torch.arange(20) // 2}):
        folds = Bootstrap(20, **options).folds(5)  # type: ignore[arg-type]
        assert folds.shape == (5, 20)
        assert (folds.sum(0) == 1).all()
        assert (folds.sum(1) == 4).all()
        if options:
            assert torch.equal(folds[:, ::2], folds[:, 1::2])
    assert Bootstrap(3).folds(5).shape == (3, 3)


def test_units_are_what_is_drawn_as_a_whole() -> None:
    assert Bootstrap(4).units.tolist() == [0, 1, 2, 3]
    assert Bootstrap(5, block=2).units.tolist() == [0, 0, 1, 1, 2]
    clusters = Bootstrap(5, clusters=["b", "a", "a", "c", "b"])
    assert clusters.units.tolist() == [1, 0, 0, 2, 1]
    assert all(len(set(row[clusters.units == unit].tolist())) == 1 for row in clusters.counts for unit in range(3))
