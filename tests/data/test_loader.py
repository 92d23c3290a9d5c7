import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import assert_same_bits, classes, pairs
from processes import together
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from twinboot import Bootstrap, PairedLoader


class Numbers(Dataset[Any]):
    """Sample i is i, as a tuple, mapping or tensor."""

    def __init__(self, n: int, form: str = "tuple") -> None:
        self.n, self.form = n, form

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return {"tuple": (i, float(i)), "dict": {"index": i, "value": float(i)}, "tensor": torch.tensor(i)}[self.form]


class Augmented(Numbers):
    """Random transforms by torch, numpy and random."""

    def __getitem__(self, i: int) -> Any:
        return i, torch.rand(()), random.random(), np.random.rand()  # noqa: NPY002


def scaled(counts: Tensor) -> Tensor:
    """Counts as weights with a mean of 1 over the drawn samples."""
    return counts * (counts > 0).sum() / counts.sum()


def seen(loader: PairedLoader, twin: int) -> Counter[int]:
    return Counter(i for pair in loader for i in pair[twin][0].tolist())


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(2, 120),
    batch_size=st.integers(1, 50),
    kind=st.sampled_from(["multinomial", "poisson"]),
    resample=st.sampled_from(["draws", "counts"]),
    seed=st.integers(0, 10**6),
)
def test_an_epoch_gives_each_twin_its_bootstrap_sample(
    n: int, batch_size: int, kind: Any, resample: Any, seed: int
) -> None:
    try:
        bootstrap = Bootstrap(n, seed=seed, kind=kind)
    except ValueError:  # a poisson sample of very few data may be empty
        return
    loader = PairedLoader(TensorDataset(torch.arange(n)), bootstrap, batch_size, resample)
    epoch = list(loader)
    assert len(epoch) == len(loader)
    for r in range(2):
        batches = [pair[r] for pair in epoch]
        assert all(len(batch[0]) >= 1 for batch in batches)
        if len(batches) * batch_size >= sum(len(batch[0]) for batch in batches):
            assert all(len(batch[0]) <= batch_size for batch in batches)
        index = torch.cat([batch[0] for batch in batches])
        if resample == "draws":
            assert torch.equal(torch.bincount(index, minlength=n), bootstrap.counts[r])
        else:
            weights = torch.zeros(n).index_add_(0, index, torch.cat([batch[1] for batch in batches]))
            torch.testing.assert_close(weights, scaled(bootstrap.counts[r]).float())


def test_unseen_samples_are_never_given() -> None:
    bootstrap = Bootstrap(200)
    loader = PairedLoader(TensorDataset(torch.arange(200)), bootstrap, 16)
    for twin in range(2):
        assert not set(seen(loader, twin)) & set(bootstrap.unseen.tolist())


def test_counts_give_each_distinct_sample_once() -> None:
    bootstrap = Bootstrap(500)
    loader = PairedLoader(TensorDataset(torch.arange(500)), bootstrap, 32, "counts")
    for twin in range(2):
        assert set(seen(loader, twin).values()) == {1}
    work = sum(len(pair[0][0]) + len(pair[1][0]) for pair in loader)
    assert work == (bootstrap.counts > 0).sum()


@pytest.mark.parametrize("resample", ["draws", "counts"])
@pytest.mark.parametrize(
    ("kind", "seen", "of_draws", "of_counts"), [("multinomial", 1, 1, 0.632), ("split", 0.865, 0.5, 0.5)]
)
def test_an_epoch_has_the_steps_of_plain_training_with_the_same_batch_size(
    kind: Any, seen: float, of_draws: float, of_counts: float, resample: Any
) -> None:
    n, data = 1000, TensorDataset(torch.arange(1000))
    for batch_size in (25, 64):
        loader = PairedLoader(data, Bootstrap(n, kind=kind), batch_size, resample)
        assert len(loader) == pytest.approx(seen * n / batch_size, rel=0.07)
        size = max(len(batch[0]) for pair in loader for batch in pair)
        assert size == pytest.approx(batch_size * (of_draws if resample == "draws" else of_counts), abs=1)
    assert len(PairedLoader(data, Bootstrap(n, kind=kind), n, resample)) == 1


def test_bayesian_weights_come_with_counts_and_are_refused_with_draws() -> None:
    bootstrap = Bootstrap(30, kind="bayesian")
    [pair] = PairedLoader(TensorDataset(torch.arange(30)), bootstrap, 30, "counts")
    for (index, weight), counts in zip(pair, bootstrap.counts, strict=True):
        torch.testing.assert_close(weight, counts[index].float())  # their mean is 1 already
    with pytest.raises(ValueError, match=r'use PairedLoader.*resample="counts"'):
        PairedLoader(TensorDataset(torch.arange(30)), bootstrap, 30)


@pytest.mark.parametrize("resample", ["draws", "counts"])
def test_the_orders_of_twins_and_epochs_differ_and_depend_on_the_seed_alone(resample: Any) -> None:
    def epochs(**options: Any) -> list[list[Any]]:
        loader = pairs(resample=resample, **options)
        return [list(loader), list(loader)]

    first = epochs()
    torch.manual_seed(123)
    assert_same_bits(epochs(), first)
    assert not torch.equal(first[0][0][0][0], first[1][0][0][0])
    assert not torch.equal(first[0][0][0][0], epochs(seed=5)[0][0][0][0])


def test_without_shuffling_indices_ascend() -> None:
    loader = PairedLoader(TensorDataset(torch.arange(50)), Bootstrap(50), 7, shuffle=False)
    order = torch.cat([pair[1][0] for pair in loader])
    assert torch.equal(order, Bootstrap(50).indices(1))


@pytest.mark.parametrize("resample", ["draws", "counts"])
def test_drop_last_leaves_only_full_batches(resample: Any) -> None:
    loader = PairedLoader(TensorDataset(torch.arange(100)), Bootstrap(100), 16, resample, drop_last=True)
    epoch = list(loader)
    assert len(epoch) == len(loader) > 0
    assert {len(batch[0]) for pair in epoch for batch in pair} == {{"draws": 16, "counts": 10}[resample]}
    with pytest.raises(ValueError, match="drop_last leaves no batch: the twins have 100 samples, a batch 101"):
        PairedLoader(TensorDataset(torch.arange(100)), Bootstrap(100), 101, drop_last=True)


@pytest.mark.parametrize("form", ["tuple", "dict", "tensor"])
def test_samples_of_each_form_are_collated_and_weighted(form: str) -> None:
    bootstrap = Bootstrap(20)
    for resample in ("draws", "counts"):
        loader = PairedLoader(Numbers(20, form), bootstrap, 6, resample)  # type: ignore[arg-type]
        for pair in loader:
            for r, batch in enumerate(pair):
                index = batch["index"] if form == "dict" else batch if isinstance(batch, Tensor) else batch[0]
                assert index.ndim == 1
                if resample == "counts":
                    weight = batch["weight"] if form == "dict" else batch[-1]
                    assert weight.dtype == torch.float32
                    torch.testing.assert_close(weight, scaled(bootstrap.counts[r])[index].float())


def test_the_fast_path_gives_what_the_slow_path_gives() -> None:
    fast = pairs()
    slow = pairs(collate_fn=torch.utils.data.default_collate)
    assert_same_bits([[list(b) for b in pair] for pair in fast], [[list(b) for b in pair] for pair in slow])
    data = classes(40)
    subset = Subset(data, list(range(39, 9, -1)))
    fast, slow = (
        PairedLoader(subset, Bootstrap(30), 8, **o) for o in ({}, {"collate_fn": torch.utils.data.default_collate})
    )
    assert_same_bits([list(pair[0]) for pair in fast], [list(pair[0]) for pair in slow])
    for dtype in (np.uint8, np.int16, np.int64):
        other = PairedLoader(Subset(data, np.arange(39, 9, -1).astype(dtype)), Bootstrap(30), 8)  # type: ignore[arg-type]
        slow.epoch, slow._begun = 1, False
        assert_same_bits([list(pair[0]) for pair in other], [list(pair[0]) for pair in slow])


def test_weights_are_on_the_device_of_the_samples() -> None:
    data = TensorDataset(torch.zeros(20, 1, device="meta"))
    for pair in PairedLoader(data, Bootstrap(20), 8, "counts"):
        assert all(weight.device.type == "meta" for _, weight in pair)


def test_the_fast_path_reads_no_single_sample() -> None:
    class Refusing(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise AssertionError("one sample at a time")

    data = classes(40)
    original = TensorDataset.__getitem__
    try:
        TensorDataset.__getitem__ = Refusing.__getitem__  # type: ignore[method-assign, assignment]
        list(PairedLoader(data, Bootstrap(40), 8, "counts"))
    finally:
        TensorDataset.__getitem__ = original  # type: ignore[method-assign]


def test_a_datasets_own_batched_reading_is_used() -> None:
    class Batched(Numbers):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [(i, float(i)) for i in indices]

        def __getitem__(self, i: int) -> Any:
            raise AssertionError("one sample at a time")

    assert len(list(PairedLoader(Batched(20), Bootstrap(20), 6))) == 4


def test_random_transforms_do_not_depend_on_workers_or_interruption_and_leave_global_generators_alone() -> None:
    def loader(workers: int) -> PairedLoader:
        return PairedLoader(Augmented(24), Bootstrap(24), 5, num_workers=workers)

    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index, union-attr]  # noqa: NPY002
    alone = loader(0)
    whole = list(alone)
    again = list(alone)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert (np.random.get_state()[1] == state[2]).all()  # type: ignore[index]  # noqa: NPY002
    assert not torch.equal(whole[0][0][1], again[0][0][1])  # another epoch, other transforms
    assert_same_bits(list(loader(2)), whole)
    resumed = loader(1)
    resumed.load_state_dict({**resumed.state_dict(), "step": 3})
    assert_same_bits(list(resumed), whole[3:])


# --- going on from the middle of an epoch


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("resample", ["draws", "counts"])
@pytest.mark.parametrize("stop", [0, 1, 3, 4, 5, 8, 11])
def test_state_continues_after_the_batch_that_came_last(workers: int, resample: Any, stop: int) -> None:
    def loader() -> PairedLoader:
        return pairs(n=63, batch_size=16, resample=resample, num_workers=workers if stop == 3 else 0)

    steps = len(loader())
    uninterrupted = loader()
    expected = [pair for _ in range(4) for pair in uninterrupted]
    first, given, state = loader(), 0, loader().state_dict()
    while given < stop:
        for _ in first:
            given += 1
            state = first.state_dict()
            if given == stop:
                break
    again = loader()
    again.load_state_dict(state)
    rest = [pair for _ in range(again.epoch, 5) for pair in again]
    assert_same_bits([[list(b) for b in p] for p in rest], [[list(b) for b in p] for p in expected[stop:]])
    assert again.epoch == 5
    assert again.step == 0
    assert steps == {"draws": 4, "counts": 5}[resample]  # 63 draws by 16, and 42 distinct ones by 10


def test_an_iteration_that_is_finished_late_does_not_disturb_a_newer_one() -> None:
    loader = pairs()
    old = iter(loader)
    next(old)
    list(loader)
    assert (loader.epoch, loader.step) == (3, 0)
    for _ in old:
        pass
    assert loader.epoch == 3


def test_leaving_an_epoch_early_starts_a_new_one_like_any_loader() -> None:
    loader = pairs()
    first = next(iter(loader))
    second = next(iter(loader))
    assert not torch.equal(first[0][0], second[0][0])
    assert loader.epoch == 2


def test_persistent_workers_go_on_from_epoch_to_epoch() -> None:
    plain, persistent = pairs(), pairs(num_workers=1, persistent_workers=True)
    for _ in range(2):
        assert_same_bits([list(p[0]) for p in persistent], [list(p[0]) for p in plain])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_of_the_steps_gives_the_same_batches_and_counts_nothing(workers: int) -> None:
    loader, other = (PairedLoader(Augmented(40), Bootstrap(40), 8) for _ in range(2))
    steps = other.dataloader(num_workers=workers)
    assert len(steps) == len(loader) == 5
    assert_same_bits(list(steps), first := list(loader))
    assert_same_bits(list(steps), first)  # again: the epoch is still the first
    assert (other.epoch, other.step) == (1, 0)
    other.epoch = 2
    assert_same_bits(list(steps), list(loader))
    other.load_state_dict({**other.state_dict(), "epoch": 1, "step": 3})
    assert len(steps) == 2
    assert_same_bits(list(steps), first[3:])


def test_a_state_of_another_loader_is_refused_in_a_sentence() -> None:
    state = pairs().state_dict()
    for other, difference in [
        (pairs(batch_size=11), "batch_size was 10 and is 11 here"),
        (pairs(seed=7), "seed was 0 and is 7 here"),
        (pairs(resample="counts", batch_size=10), "resample was draws and is counts here"),
        (pairs(shuffle=False), "shuffle was True and is False here"),
        (PairedLoader(classes(40), Bootstrap(40, kind="poisson"), 10), "checksum of the bootstrap was"),
    ]:
        with pytest.raises(ValueError, match=f"the checkpoint does not fit: {difference}"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="the checkpoint does not fit: it says nothing of 'seed'"):
        pairs().load_state_dict({})


def test_it_says_what_it_is() -> None:
    found = repr(PairedLoader(Numbers(8), Bootstrap(8), 2))
    bootstrap = "Bootstrap(n=8, replicas=2, seed=0, kind='multinomial')"
    assert found == f"PairedLoader({bootstrap}, batch_size=2, resample='draws', 4 batches an epoch)"


# --- bad input


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "n", "options", "error", "sentence"),
    [
        (TensorDataset(torch.empty(0, 2)), 5, {}, ValueError, "the dataset is empty"),
        (Numbers(4), 5, {}, ValueError, "the dataset has 4 samples, but the bootstrap draws from 5"),
        (Stream(), 5, {}, TypeError, "the dataset must be map-style"),
        (Numbers(5), 5, {"batch_size": 0}, ValueError, "batch_size must be a whole number of at least 1, not 0"),
        (Numbers(5), 5, {"resample": "all"}, ValueError, 'unknown resample \'all\': use "draws" or "counts"'),
        (Numbers(5), 5, {"sampler": [1]}, TypeError, "sampler cannot be given: the bootstrap and the seed decide"),
        (Numbers(5), 5, {"in_order": False}, TypeError, "in_order cannot be given"),
        (Numbers(5), 5, {"num_worker": 2}, TypeError, "no option 'num_worker': did you mean 'num_workers'?"),
        (
            Bootstrap(5),
            5,
            {"bootstrap": Numbers(5)},
            TypeError,
            r"the dataset comes first: PairedLoader\(dataset",
        ),
        (
            Numbers(5),
            5,
            {"bootstrap": 5},
            TypeError,
            "bootstrap must be a Bootstrap, such as",
        ),
        ({1, 2}, 5, {}, TypeError, "the dataset must be map-style"),
        ((torch.zeros(5, 2), torch.zeros(5)), 5, {}, TypeError, r"a tuple of arrays: use TensorDataset\(X, Y\)"),
    ],
)
def test_bad_input_gets_a_sentence(
    dataset: Any, n: int, options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        PairedLoader(dataset, **{"bootstrap": Bootstrap(n), "batch_size": 2, **options})


def test_batches_that_cannot_take_a_weight_get_a_sentence() -> None:
    class Weighted(Numbers):
        def __getitem__(self, i: int) -> Any:
            return {"weight": i}

    with pytest.raises(ValueError, match='batches already have a key "weight"'):
        list(PairedLoader(Weighted(6), Bootstrap(6), 2, "counts"))
    with pytest.raises(TypeError, match=r'resample="counts" needs batches of tensors, .* not str'):
        list(PairedLoader(Numbers(6), Bootstrap(6), 2, "counts", collate_fn=str))


@settings(max_examples=40, deadline=None)
@given(
    n=st.sampled_from([12, 24, 48, 13, 37, 59]),
    batch_size=st.sampled_from([1, 2, 3, 4, 5, 7]),
    ranks=st.integers(2, 4),
    resample=st.sampled_from(["draws", "counts"]),
    seed=st.integers(0, 5),
)
def test_ranks_share_the_batches_of_one_process(n: int, batch_size: int, ranks: int, resample: Any, seed: int) -> None:
    data, bootstrap = TensorDataset(torch.arange(n)), Bootstrap(n, seed=seed)
    shares = [PairedLoader(data, bootstrap, batch_size, resample, share=(r, ranks)) for r in range(ranks)]
    alone = PairedLoader(data, bootstrap, batch_size * ranks, resample)
    for _ in range(2):
        of_ranks = list(zip(*shares, strict=True))  # strict: all ranks have equally many steps, or a collective hangs
        wholes = list(alone)
        # Of either twin, for both have equally many batches: no odd rest to be spread otherwise.
        even = {len(batch[0]) for pair in wholes for batch in pair} == {batch_size * ranks}
        for parts, whole in zip(of_ranks, wholes, strict=False):
            for twin in range(2):
                joined = torch.cat([part[twin][0] for part in parts])
                if even:
                    assert torch.equal(joined, whole[twin][0])
                sizes = [len(part[twin][0]) for part in parts]
                assert min(sizes) >= 1
                assert max(sizes) - min(sizes) <= 1
        for twin in range(2):
            seen = torch.cat([part[twin][0] for parts in of_ranks for part in parts])
            wanted = bootstrap.indices(twin) if resample == "draws" else bootstrap.indices(twin).unique()
            assert torch.equal(seen.sort().values, wanted.sort().values)


def test_ranks_have_random_transforms_of_their_own_and_the_first_has_those_of_one_process() -> None:
    class Random(Numbers):
        def __getitem__(self, i: int) -> Any:
            return torch.rand(())

    def drawn(share: tuple[int, int]) -> Tensor:
        return next(iter(PairedLoader(Random(40), Bootstrap(40), 4, share=share)))[0]

    first, second = drawn((0, 2)), drawn((1, 2))
    assert not torch.equal(first, second)
    assert torch.equal(first, drawn((0, 1)))


def test_another_number_of_ranks_goes_on_in_the_middle_of_an_epoch() -> None:
    data, bootstrap = TensorDataset(torch.arange(48)), Bootstrap(48)
    two = [PairedLoader(data, bootstrap, 6, share=(r, 2)) for r in range(2)]
    begun = [iter(loader) for loader in two]
    for _ in range(2):
        [next(batches) for batches in begun]
    three = [PairedLoader(data, bootstrap, 4, share=(r, 3)) for r in range(3)]
    for loader in three:
        loader.load_state_dict(two[1].state_dict())
    for old, new in zip(zip(*begun, strict=True), zip(*three, strict=True), strict=True):
        assert torch.equal(torch.cat([pair[1][0] for pair in old]), torch.cat([pair[1][0] for pair in new]))
    wrong = PairedLoader(data, bootstrap, 6, share=(0, 3))
    with pytest.raises(ValueError, match="batch_size was 12 and is 18 here"):
        wrong.load_state_dict(two[0].state_dict())


def test_under_torch_distributed_a_loader_takes_its_rank_and_an_older_one_is_refused() -> None:
    data, bootstrap = TensorDataset(torch.arange(40)), Bootstrap(40)
    assert together(shares_of, PairedLoader(data, bootstrap, 5)) == [
        [(0, 2), "the loader was built for rank 0 of 1, but this is rank 0 of 2"],
        [(1, 2), "the loader was built for rank 0 of 1, but this is rank 1 of 2"],
    ]


def shares_of(made_before: PairedLoader) -> list[Any]:
    with pytest.raises(RuntimeError) as refused:
        next(iter(made_before))
    return [PairedLoader(made_before.dataset, made_before.bootstrap, 5).share, str(refused.value).split(":")[0]]


@pytest.mark.parametrize(
    ("share", "says"),
    [
        ((2, 2), r"share must be \(rank, ranks\) with a rank from 0 to ranks - 1, not \(2, 2\)"),
        ((0, 50), "50 ranks cannot share a batch: the twins have 40 samples, a batch 250"),
    ],
)
def test_a_share_that_cannot_be_gets_a_sentence(share: tuple[int, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PairedLoader(TensorDataset(torch.arange(40)), Bootstrap(40), 5, share=share)


@pytest.mark.parametrize("resample", ["draws", "counts"])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_a_loader_for_one_twin_gives_what_the_pair_has_for_it(resample: Any, options: dict[str, Any]) -> None:
    def build(**chosen: Any) -> PairedLoader:
        return PairedLoader(TensorDataset(torch.arange(30)), Bootstrap(30), 4, resample, share=(1, 2), **chosen)

    pairs = list(build())
    for twin in range(2):
        alone = list(build(twin=twin, **options))
        assert_same_bits(alone, [(pair[twin],) for pair in pairs])


def test_twins_that_are_read_alone_have_random_transforms_of_their_own() -> None:
    def drawn(share: tuple[int, int], twin: int) -> list[float]:
        [[batch]] = PairedLoader(Augmented(6), Bootstrap(6), 6, share=share, twin=twin)
        return batch[1].tolist()

    numbers = [*drawn((0, 1), 0), *drawn((0, 1), 1)]
    assert len(set(numbers)) == 12
    numbers = [value for rank in range(2) for twin in range(2) for value in drawn((rank, 2), twin)]
    assert len(set(numbers)) == 12


# --- one more batch, for a control


@pytest.mark.parametrize("resample", ["draws", "counts"])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"share": (1, 2)}])
def test_a_control_gets_the_first_twins_sample_in_another_order_and_the_twins_what_they_had(
    resample: Any, options: dict[str, Any]
) -> None:
    def build(control: bool) -> PairedLoader:
        return PairedLoader(Augmented(40), Bootstrap(40), 4, resample, control=control, **options)

    def read(steps: list[Any], place: int) -> list[tuple[float, ...]]:
        """Index and weight of each sample."""
        rows = (zip(step[place][0].tolist(), step[place][-1].tolist(), strict=True) for step in steps)
        return [(i, w) if resample == "counts" else (i,) for row in rows for i, w in row]

    loader, plain = build(control=True), build(control=False)
    steps, more = list(loader), list(loader)
    assert_same_bits([step[:2] for step in steps + more], [*plain, *plain])  # random transforms, too
    if "share" not in options:  # a rank reads a part of each batch
        assert sorted(read(steps, 2)) == sorted(read(steps, 0))
    assert read(steps, 2) != read(steps, 0)
    assert read(steps, 2) != read(more, 2)
    resumed = build(control=True)
    resumed.load_state_dict({**resumed.state_dict(), "step": 3})
    assert_same_bits(list(resumed), steps[3:])


def test_a_control_in_the_same_order_or_of_a_twin_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="in another order: leave shuffle=False out"):
        PairedLoader(classes(6), Bootstrap(6), 2, control=True, shuffle=False)
    with pytest.raises(ValueError, match="in another order: leave twin= out"):
        PairedLoader(classes(6), Bootstrap(6), 2, control=True, share=(0, 1), twin=0)


def test_a_wrong_twin_or_one_without_a_share_is_refused() -> None:
    for twin in (2, -1, True, "first"):
        with pytest.raises((ValueError, TypeError), match=rf"twin must be .*a whole number.*, not {twin!r}"):
            PairedLoader(classes(6), Bootstrap(6), 2, share=(0, 1), twin=twin)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="twin= needs share=, too"):
        PairedLoader(classes(6), Bootstrap(6), 2, twin=0)


@pytest.mark.parametrize("resample", ["draws", "counts"])
@pytest.mark.parametrize("kind", ["multinomial", "split", "poisson"])
def test_the_batch_of_all_ranks_does_not_depend_on_their_number(kind: Any, resample: Any) -> None:
    data, bootstrap = TensorDataset(torch.arange(200)), Bootstrap(200, kind=kind)
    alone = PairedLoader(data, bootstrap, 32, resample)
    for ranks in (2, 4):
        shared = PairedLoader(data, bootstrap, 32 // ranks, resample, share=(1, ranks))
        assert len(shared) == len(alone)
        shared.load_state_dict(alone.state_dict())


@pytest.mark.parametrize("resample", ["draws", "counts"])
@pytest.mark.parametrize("kind", ["multinomial", "split", "poisson"])
def test_no_batch_has_a_single_sample_unless_that_is_its_size(kind: Any, resample: Any) -> None:
    data = TensorDataset(torch.arange(100))
    for batch_size in (2, 3, 4, 5, 7, 33, 99, 100):
        loader = PairedLoader(data, Bootstrap(100, kind=kind), batch_size, resample)
        assert min(len(batch[0]) for pair in loader for batch in pair) >= 2
    assert len(PairedLoader(data, Bootstrap(100), 1)) == 100


@pytest.mark.parametrize("kind", ["multinomial", "split", "poisson"])
@pytest.mark.parametrize("resample", ["draws", "counts"])
def test_full_batches_stay_with_drop_last(kind: Any, resample: Any) -> None:
    data, bootstrap = TensorDataset(torch.arange(100)), Bootstrap(100, kind=kind, seed=1)
    for size in (100, np.int64(100)):
        [pair] = PairedLoader(data, bootstrap, size, resample, drop_last=True)  # type: ignore[arg-type]
        for r, (index, *_) in enumerate(pair):
            expected = bootstrap.indices(r) if resample == "draws" else bootstrap.counts[r].nonzero().squeeze(1)
            assert sorted(index.tolist()) == sorted(expected.tolist())
