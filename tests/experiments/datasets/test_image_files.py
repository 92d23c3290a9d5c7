import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from official_files import write_idx

from twinboot.experiments.datasets import image_files
from twinboot.experiments.datasets.image_files import download


def test_a_file_that_cannot_be_read_gets_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path)

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"can't read .*train-images-idx3-ubyte: Permission denied\."):
        image_files.read("fashion-mnist", tmp_path, verify=False)


CONTENT = bytes(range(256)) * 9000  # more than two chunks


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A server on this machine. It has a complete file and half of it, under the same name."""
    for folder, content in (("good", CONTENT), ("half", CONTENT[: len(CONTENT) // 2])):
        (tmp_path / "served" / folder).mkdir(parents=True)
        (tmp_path / "served" / folder / "images.gz").write_bytes(content)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "served"))) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/"
        running.shutdown()
        thread.join()


def serve(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    md5 = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()
    layout = replace(image_files.LAYOUTS["cifar10"], address=address, downloads={"raw/images.gz": md5})
    monkeypatch.setitem(image_files.LAYOUTS, "cifar10", layout)


def test_a_download_says_what_it_fetches_and_is_not_repeated(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(monkeypatch, f"{server}good/")
    download("cifar10", tmp_path / "data")
    assert (tmp_path / "data/raw/images.gz").read_bytes() == CONTENT
    assert capsys.readouterr().err == f"downloading {server}good/images.gz\n"
    serve(monkeypatch, f"{server}gone/")
    download("cifar10", tmp_path / "data")  # nothing is asked for


def test_a_damaged_file_is_downloaded_again(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, f"{server}good/")
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/images.gz").write_bytes(b"half of")
    download("cifar10", tmp_path)
    assert (tmp_path / "raw/images.gz").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("folder", "why"), [("gone", "HTTP Error 404: File not found"), ("half", "the checksum is not that of the offi")]
)
def test_a_failed_download_gets_one_sentence_and_leaves_no_file(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch, folder: str, why: str
) -> None:
    serve(monkeypatch, f"{server}{folder}/")
    with pytest.raises(ConnectionError) as caught:
        download("cifar10", tmp_path)
    place = tmp_path / "raw/images.gz"
    assert str(caught.value).startswith(f"can't download {server}{folder}/images.gz to {place}: {why}")
    assert str(caught.value).endswith("; get the file by other means.")
    assert list((tmp_path / "raw").iterdir()) == []


def test_a_server_that_is_not_there_gets_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, "http://127.0.0.1:1/")
    with pytest.raises(ConnectionError, match=r"can't download .*Connection refused"):
        download("cifar10", tmp_path)


def test_a_full_disk_is_named(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, f"{server}good/")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(image_files.shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left"):
        download("cifar10", tmp_path)
    assert list((tmp_path / "raw").iterdir()) == []


def test_a_data_set_without_a_download_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to download for 'digits': use cifar10, fashion-mnist"):
        download("digits", tmp_path)


@pytest.mark.parametrize("name", image_files.LAYOUTS)
def test_downloads_go_where_they_are_looked_for(name: str) -> None:
    layout = image_files.LAYOUTS[name]
    for path in layout.downloads:
        folder, _, last = path.rpartition("/")
        assert path == layout.archive or (folder in layout.folders and last.removesuffix(".gz") in layout.files)
