import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from official_files import pickled, small_batches

from twinboot.experiments.datasets import image_files


@pytest.mark.parametrize("columns_first", [False, True])
def test_a_batch_reads_as_the_real_unpickler_reads_it(columns_first: bool) -> None:
    x, y = small_batches()["data_batch_1"]
    data = pickled(x, y.tolist(), columns_first=columns_first)
    with warnings.catch_warnings(action="ignore"):  # numpy moved its core in version 2
        real = pickle.loads(data, encoding="bytes")
    found, labels = image_files.cifar_pickle(data, "a batch")
    assert np.array_equal(found, x)
    assert np.array_equal(found.reshape(len(x), -1), real[b"data"])
    assert labels.tolist() == y.tolist() == real[b"labels"]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_a_batch_that_was_written_anew_reads_as_well(protocol: int, order: Any) -> None:
    x, y = small_batches()["data_batch_1"]
    data = pickle.dumps({b"data": np.asarray(x.reshape(len(x), -1), order=order), b"labels": y.tolist()}, protocol)
    found, labels = image_files.cifar_pickle(data, "a batch")
    assert np.array_equal(found, x)
    assert labels.tolist() == y.tolist()


@pytest.mark.parametrize(
    "name",
    [
        "os\nsystem",
        "builtins\neval",
        "__builtin__\neval",
        "builtins\ngetattr",
        "copyreg\n_reconstructor",
        "numpy\nload",
    ],
)
def test_no_name_is_known_but_those_of_an_array_of_bytes(name: str) -> None:
    with pytest.raises(ValueError, match="was not opened: it asks for"):
        image_files.cifar_pickle(f"c{name}\n.".encode(), "a batch")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "is cut short or damaged"),
        (b"no pickle", "is cut short or damaged"),
        (pickle.dumps([1, 2], 2), "holds no array `data` with a list `labels`"),
        (pickle.dumps({"data": 3, "labels": [1]}, 2), "holds no array `data`"),
        (pickled(np.zeros((2, 3, 32, 32), np.uint8), [1, 2, 3]), r"holds data of shape \(2, 3072\) for 3 labels"),
        (pickled(np.zeros((2, 3, 16, 16), np.uint8), [1, 2]), r"holds data of shape \(2, 768\) for 2 labels"),
        (pickled(np.zeros((2, 3, 32, 32), np.uint8), [1, -2]), "holds labels from -2 to 1, which are no classes"),
        (
            pickled(np.zeros((2, 3, 32, 32), np.uint8), [1, 2], dtype="O8"),
            "is no batch of CIFAR-10 and was not opened: it asks for an array of b'O8'",
        ),
        (b"cnumpy\nndarray\n)R(K\x01(K\x02tK\x00K\x00K\x00tb.", ".*asks for an array of something else than bytes"),
    ],
    ids=["empty", "text", "list", "number", "labels", "pixels", "negative", "objects", "numbers"],
)
def test_a_pickle_of_something_else_gets_a_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^a batch {sentence}"):
        image_files.cifar_pickle(data, "a batch")


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_pickle_cut_short_gets_a_sentence(share: float) -> None:
    x, y = small_batches()["test_batch"]
    data = pickled(x, y.tolist())
    with pytest.raises(ValueError, match="a batch is cut short or damaged"):
        image_files.cifar_pickle(data[: int(share * len(data))], "a batch")


def test_a_file_that_cannot_be_read_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"can't read .*: Is a directory\."):
        image_files.content(tmp_path)
