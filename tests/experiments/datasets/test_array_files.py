import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pytest

from twinboot.experiments.datasets.array_files import arrays, checksum


def test_arrays_come_by_their_names(tmp_path: Path) -> None:
    np.savez(several := tmp_path / "several.npz", a=np.arange(3), b=np.ones((2, 2)))
    np.save(one := tmp_path / "one.npy", np.arange(4))
    assert {name: array.shape for name, array in arrays(str(several)).items()} == {"a": (3,), "b": (2, 2)}
    assert np.array_equal(arrays(str(one))[""], np.arange(4))
    assert checksum(str(one)) == hashlib.sha256(one.read_bytes()).hexdigest()


def test_what_holds_no_plain_arrays_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "whole.npz", a=np.arange(1000.0))
    whole = (tmp_path / "whole.npz").read_bytes()
    np.savez(tmp_path / "pickled.npz", a=np.array([None]))
    with zipfile.ZipFile(tmp_path / "text.npz", "w") as packed:
        packed.writestr("a.txt", "no array")
    with zipfile.ZipFile(tmp_path / "empty.npz", "w"):
        pass
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "nothing.npz").write_bytes(b"")
    for name in ("pickled", "text", "empty", "cut", "nothing"):
        with pytest.raises(ValueError, match=rf"{name}\.npz is no \.npy or \.npz file of plain numbers\."):
            arrays(str(tmp_path / f"{name}.npz"))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"can't read .*missing\.npz: No such file"):
        checksum(str(tmp_path / "missing.npz"))
