from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from twinboot.experiments.uci.data import Table, read, split

VALUES = np.random.default_rng(0).normal(3, 2, (80, 4))
TEST = np.stack([np.arange(8), np.arange(8, 16)])


def saved(directory: Path, **arrays: Any) -> str:
    np.savez(path := directory / "sets.npz", **arrays)
    return str(path)


def test_sets_come_with_their_splits_in_the_order_of_the_file(tmp_path: Path) -> None:
    found = read(
        saved(tmp_path, **{"second-set": VALUES, "second-set__test_idx": TEST, "a": VALUES, "a__test_idx": TEST[:1]})
    )
    assert list(found) == ["second-set", "a"]
    assert np.array_equal(found["a"].values, VALUES)
    assert found["second-set"].test.shape == (2, 8)


def test_training_rows_are_standardised_and_test_rows_by_the_same_numbers() -> None:
    made = split(Table(VALUES, TEST), 1)
    train = np.delete(VALUES, TEST[1], axis=0)
    center, spread = train.mean(0), train.std(0)
    assert made.train_x.shape == (72, 3)
    assert made.train_y.shape == (72, 1)
    assert torch.allclose(made.train_x.mean(0), torch.zeros(3), atol=1e-6)
    assert torch.allclose(made.train_x.std(0, correction=0), torch.ones(3))
    assert made.unit == pytest.approx(spread[-1])
    assert np.allclose(made.test_x, ((VALUES - center) / spread)[TEST[1], :-1], atol=1e-5)
    assert np.allclose(made.test_y * spread[-1] + center[-1], VALUES[TEST[1], -1:], atol=1e-5)


def test_test_rows_change_nothing_that_training_sees() -> None:
    changed = VALUES.copy()
    changed[TEST[0]] = 1e6
    first, second = (split(Table(values, TEST), 0) for values in (VALUES, changed))
    assert torch.equal(first.train_x, second.train_x)
    assert torch.equal(first.train_y, second.train_y)
    assert first.unit == second.unit


def test_a_constant_input_becomes_zero() -> None:
    values = VALUES.copy()
    values[:, 1] = 0.1 + 0.2  # whose mean over the rows need not be the number itself
    made = split(Table(values, TEST), 0)
    assert made.train_x[:, 1].abs().max() < 1e-6
    assert made.test_x[:, 1].abs().max() < 1e-6


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"a__test_idx": TEST}, "holds no data set: it must be an .npz file with"),
        ({"a": VALUES}, "has a but not a__test_idx"),
        ({"../a": VALUES, "../a__test_idx": TEST}, "names a set '../a'"),
        ({"a": VALUES[:, 0], "a__test_idx": TEST}, "must be numbers"),
        ({"a": VALUES[:, :1], "a__test_idx": TEST}, "must be numbers"),
        ({"a": VALUES.astype(str), "a__test_idx": TEST}, "must be numbers"),
        ({"a": np.where(VALUES > 5, np.nan, VALUES), "a__test_idx": TEST}, "not finite"),
        ({"a": VALUES, "a__test_idx": TEST[0]}, "whole numbers"),
        ({"a": VALUES, "a__test_idx": TEST.astype(float)}, "whole numbers"),
        ({"a": VALUES, "a__test_idx": TEST[:0]}, "whole numbers"),
        ({"a": VALUES, "a__test_idx": TEST + 65}, "between 0 and 79, not 65 and 80"),
        ({"a": VALUES, "a__test_idx": TEST - 1}, "between 0 and 79, not -1 and 14"),
        ({"a": VALUES, "a__test_idx": TEST // 2}, "the same row twice"),
        ({"a": VALUES[:57], "a__test_idx": TEST}, "leaves 49 rows to train on"),
        ({"a": VALUES * [1, 1, 1, 0], "a__test_idx": TEST}, "same target in every row"),
    ],
)
def test_bad_files_get_one_sentence(arrays: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said) as error:
        read(saved(tmp_path, **arrays))
    assert "\n" not in str(error.value)
