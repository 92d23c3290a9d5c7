from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from official_files import Arrays, packed, small_batches, write_binary, write_idx

from twinboot.experiments.datasets import Images, digits, image_files, load, moments_of, standardised


@pytest.fixture
def batches() -> Arrays:
    return small_batches()


def require_equal(images: Images, batches: Arrays) -> None:
    *train, test = batches.values()
    assert torch.equal(images.train_x, torch.from_numpy(np.concatenate([x for x, _ in train])))
    assert images.train_y.tolist() == [int(label) for _, y in train for label in y]
    assert torch.equal(images.test_x, torch.from_numpy(test[0]))
    assert images.test_y.tolist() == test[1].tolist()
    assert images.train_x.dtype == torch.uint8
    assert images.train_y.dtype == torch.int64
    assert images.classes == 10


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-bin"])
def test_the_binary_version_is_read_from_its_folder_or_the_one_above(
    tmp_path: Path, batches: Arrays, folder: str
) -> None:
    write_binary(tmp_path / folder, batches)
    require_equal(load("cifar10", tmp_path, verify=False), batches)


def test_an_archive_is_read_without_unpacking(tmp_path: Path, batches: Arrays) -> None:
    archive = tmp_path / "cifar-10-binary.tar.gz"
    packed(write_binary(tmp_path / "elsewhere" / "cifar-10-batches-bin", batches), archive)
    require_equal(load("cifar10", tmp_path, verify=False), batches)
    archive.write_bytes(archive.read_bytes()[:9000])
    with pytest.raises(ValueError, match=f"{archive.name} is cut short or damaged: copy or download it again"):
        load("cifar10", tmp_path, verify=False)
    archive.write_bytes(b"no archive at all")
    with pytest.raises(ValueError, match=archive.name):
        load("cifar10", tmp_path, verify=False)


def test_an_archive_that_lacks_a_file_gets_a_sentence(tmp_path: Path, batches: Arrays) -> None:
    del batches["data_batch_3"]
    packed(write_binary(tmp_path / "elsewhere", batches), tmp_path / "cifar-10-binary.tar.gz")
    with pytest.raises(ValueError, match=r"cifar-10-binary.tar.gz lacks data_batch_3.bin: copy"):
        load("cifar10", tmp_path, verify=False)


@pytest.mark.parametrize("folder", [".", "FashionMNIST/raw"])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files_are_read_packed_or_plain(tmp_path: Path, folder: str, ending: str) -> None:
    _, contents = write_idx(tmp_path / folder, ending)
    images = load("fashion-mnist", tmp_path, verify=False)
    assert images.train_x.shape == (5, 1, 28, 28)
    assert images.test_x.shape == (4, 1, 28, 28)
    assert images.train_x.numpy().tobytes() == contents["train-images-idx3-ubyte"][16:]
    assert images.test_y.tolist() == list(contents["t10k-labels-idx1-ubyte"][8:])
    assert images.train_y.dtype == torch.int64
    assert images.classes == 10


@pytest.mark.parametrize(
    ("file", "change", "sentence"),
    [
        ("train-images-idx3-ubyte", lambda b: b[:-1], "has 3919 bytes of values, but says that it holds 5 x 28 x 28"),
        ("train-images-idx3-ubyte", lambda b: b[:7], "does not begin as an idx file of bytes in 3 dimensions"),
        ("train-images-idx3-ubyte", lambda b: b"\x89PNG" + b[4:], "does not begin as an idx file"),
        (
            "t10k-labels-idx1-ubyte",
            lambda b: b[:-1] + b"\x0b",
            "has a test label 11, but fashion-mnist has",
        ),
        (
            "t10k-labels-idx1-ubyte",
            lambda b: b[:7] + b"\x03" + b[8:-1],
            "4 test images of fashion-mnist, but 3",
        ),
        ("t10k-images-idx3-ubyte", lambda b: b[:11] + b"\x0e" + b[12:15] + b"\x38" + b[16:], "different sizes, 28x28"),
    ],
)
def test_a_damaged_idx_file_gets_a_sentence(
    tmp_path: Path, file: str, change: Callable[[bytes], bytes], sentence: str
) -> None:
    _, contents = write_idx(tmp_path)
    (tmp_path / file).write_bytes(change(contents[file]))
    with pytest.raises(ValueError, match=sentence):
        load("fashion-mnist", tmp_path, verify=False)


def test_a_packed_file_cut_short_gets_a_sentence(tmp_path: Path) -> None:
    write_idx(tmp_path, ".gz")
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte.gz is cut short or damaged: copy or download"):
        load("fashion-mnist", tmp_path, verify=False)


def test_a_binary_batch_of_no_whole_images_and_a_label_out_of_range_get_a_sentence(
    tmp_path: Path, batches: Arrays
) -> None:
    batches["test_batch"][1][0] = 10
    write_binary(tmp_path, batches)
    with pytest.raises(ValueError, match="has a test label 10, but cifar10 has classes 0 to 9"):
        load("cifar10", tmp_path, verify=False)
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"data_batch_2.bin has 12287 bytes, which is no whole number of images of"):
        load("cifar10", tmp_path, verify=False)


def test_only_official_files_are_taken_unless_asked_otherwise(tmp_path: Path, batches: Arrays) -> None:
    write_binary(tmp_path / "binary", batches)
    with pytest.raises(ValueError, match=r"data_batch_1.bin is not the official file, by its checksum"):
        load("cifar10", tmp_path / "binary")
    write_idx(tmp_path)
    with pytest.raises(ValueError, match=r"cut short, damaged or of another data set; copy or download it again\.$"):
        load("fashion-mnist", tmp_path)


@pytest.mark.parametrize("name", image_files.LAYOUTS)
def test_missing_files_are_named_with_where_they_come_from(tmp_path: Path, name: str) -> None:
    layout = image_files.LAYOUTS[name]
    for folder in (tmp_path, tmp_path / "nowhere"):
        said = rf"holds no files of {name}: put .*gz.* there, from {layout.page}, or let "
        said += rf"`twinboot\.experiments\.datasets\.download\('{name}', '{folder}'\)` fetch it"
        with pytest.raises(ValueError, match=said):
            load(name, folder)
    first, *others = layout.files
    (tmp_path / first).touch()
    with pytest.raises(ValueError, match=f"lacks {', '.join(others)} of {name}: put"):
        load(name, tmp_path)


def test_a_wrong_name_or_no_directory_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match="unknown data set 'imagenet': use digits, cifar10, fashion-mnist"):
        load("imagenet", ".")
    with pytest.raises(ValueError, match="fashion-mnist is read from files: say in which directory they are"):
        load("fashion-mnist")


def test_the_digits_are_those_of_the_repository_they_come_from() -> None:
    images = digits()
    x, y = torch.cat([images.train_x, images.test_x]), torch.cat([images.train_y, images.test_y])
    assert x.shape == (1797, 1, 8, 8)
    assert int(x.max()) == 16
    assert y.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as its description counts
    assert x[0, 0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]  # the first image of scikit-learn's manual
    assert torch.equal(load("digits").train_x, images.train_x)


def test_moments_of_bytes_are_those_of_the_floats() -> None:
    x = torch.randint(0, 256, (50, 3, 4, 4), dtype=torch.uint8)
    x[:, 1] = 7
    mean, std = moments_of(x)
    torch.testing.assert_close(mean.flatten(), x.float().mean((0, 2, 3)))
    torch.testing.assert_close(std.flatten()[[0, 2]], x[:, [0, 2]].float().std((0, 2, 3), correction=0))
    assert standardised(x, moments_of(x))[:, 1].eq(0).all()  # a constant channel


def test_standardised_images_use_the_moments_that_they_are_given() -> None:
    images = digits()
    moments = moments_of(images.train_x)
    expected = (images.test_x.double() - images.train_x.double().mean()) / images.train_x.double().std(correction=0)
    torch.testing.assert_close(standardised(images.test_x, moments), expected.float(), rtol=1e-4, atol=1e-5)


def test_official_files_pass(tmp_path: Path, batches: Arrays, monkeypatch: pytest.MonkeyPatch) -> None:
    write_binary(tmp_path, batches)
    layout = image_files.LAYOUTS["cifar10"]
    md5 = {file: image_files._md5(tmp_path / file) for file in layout.files}
    monkeypatch.setitem(image_files.LAYOUTS, "cifar10", replace(layout, files=md5))
    require_equal(load("cifar10", tmp_path), batches)
