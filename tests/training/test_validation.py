"""The mean is shown the same batches each time, and its statistics are those of the samples that some twin sees."""

import math
from typing import Any

import torch
from loops import assert_same_bits, classes, snapshot
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from twinboot import Bootstrap
from twinboot.training.validation import Validation


class Noisy(Dataset[Tensor]):
    """Each look at a sample draws from the global generator."""

    def __len__(self) -> int:
        return 41

    def __getitem__(self, i: int) -> Tensor:
        return i + torch.rand(3)


def validation(dataset: Any, **options: Any) -> Validation:
    return Validation(dataset, Bootstrap(len(dataset)), 10, 0, options)


def test_batches_are_the_same_each_time_and_move_no_global_generator() -> None:
    batches = validation(Noisy()).batches(torch.arange(41))
    before = torch.get_rng_state()
    first, second = list(batches), list(batches)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same_bits(first, second)
    assert [len(batch) for batch in first] == [11, 11, 11, 8]  # not 10 and at last a single one
    assert len(batches) == 4
    drawn = [batch - batch.floor() for batch in first]
    assert not torch.equal(drawn[0], drawn[1])  # each batch has draws of its own


def test_tensors_are_read_in_whole_batches_of_the_same_samples() -> None:
    data, part = classes(60), torch.arange(59, 8, -1)
    for dataset, samples in ((data, part), (Subset(data, part.tolist()), torch.arange(50))):
        at_once = validation(dataset).batches(samples)
        one_by_one = validation(dataset, num_workers=0).batches(samples)
        assert at_once.whole is not None
        assert one_by_one.whole is None
        assert len(at_once) == len(one_by_one)
        assert_same_bits(list(at_once), list(one_by_one))
    assert list(validation(data).batches(torch.arange(0))) == []


def test_the_unseen_loss_is_a_mean_over_samples_in_evaluation() -> None:
    data, seen = classes(100), []

    def step(module: nn.Module, batch: Any, number: int) -> tuple[float, int]:
        assert not module.training
        seen.append(batch[0])
        return batch[0].sum(1).mean().item(), len(batch[0])

    found = validation(data).unseen_loss(nn.Linear(1, 1), step, torch.device("cpu"))
    unseen = data[Bootstrap(100).unseen][0]
    assert_same_bits(torch.cat(seen), unseen)
    torch.testing.assert_close(found, unseen.sum(1).mean().item())


def test_a_step_that_draws_gives_the_same_unseen_loss_each_time_and_moves_no_global_generator() -> None:
    def step(module: nn.Module, batch: Any, number: int) -> tuple[float, int]:
        return torch.rand(()).item(), len(batch[0])

    found, module = [], nn.Linear(1, 1)
    for seed in range(2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(validation(classes(100)).unseen_loss(module, step, torch.device("cpu")))
        assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1]


def test_no_loss_of_any_unseen_sample_is_not_a_number() -> None:
    found = validation(classes(100)).unseen_loss(nn.Linear(1, 1), lambda *_: (0.0, 0), torch.device("cpu"))
    assert math.isnan(found)


def test_statistics_are_those_of_what_some_twin_sees_and_frozen_ones_stay() -> None:
    class Frozen(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Any:
            return super().train(False)

    data, shown = classes(100), []
    module = nn.ModuleDict({"free": nn.BatchNorm1d(4, momentum=0.3), "frozen": Frozen(4)})

    def step(module: Any, batch: Any, number: int) -> tuple[float, int]:
        module["free"](batch[0])
        module["frozen"](batch[0])
        shown.append(batch[0])
        return 0.0, len(batch[0])

    before = snapshot(module["frozen"])
    validation(data).update_batchnorm(module, step, torch.device("cpu"), None)
    seen = data[Bootstrap(100).seen][0]
    assert_same_bits(torch.cat(shown).sort(0).values, seen.sort(0).values)
    torch.testing.assert_close(module["free"].running_mean, torch.stack([x.mean(0) for x in shown]).mean(0))
    validation(data).update_batchnorm(module, step, torch.device("cpu"), at_most=20)
    torch.testing.assert_close(module["free"].running_mean, torch.stack([x.mean(0) for x in shown[-2:]]).mean(0))
    assert module["free"].momentum == 0.3
    assert not module.training
    assert_same_bits(snapshot(module["frozen"]), before)
