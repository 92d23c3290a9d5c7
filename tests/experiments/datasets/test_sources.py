import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from twinboot.experiments.datasets import sources
from twinboot.experiments.datasets.sources import Fetched, download

CONTENT = bytes(range(256)) * 9000  # more than two chunks


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A server on this machine, of the files `good` and `half`."""
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "good").write_bytes(CONTENT)
    (tmp_path / "served" / "half").write_bytes(CONTENT[: len(CONTENT) // 2])
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "served"))) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/"
        running.shutdown()
        thread.join()


def serve(monkeypatch: pytest.MonkeyPatch, *urls: str) -> None:
    md5 = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()
    monkeypatch.setitem(sources.DOWNLOADS, "mnist", [Fetched("raw/images.gz", md5, urls)])


def test_a_download_tells_its_progress_and_is_not_repeated(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, server + "good")
    told: list[tuple[str, int, int | None]] = []
    download("mnist", tmp_path / "data", lambda *what: told.append(what))
    assert (tmp_path / "data/raw/images.gz").read_bytes() == CONTENT
    assert told[-1] == ("images.gz", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})
    assert len(told) > 2
    serve(monkeypatch, server + "gone")
    download("mnist", tmp_path / "data")  # nothing is asked for


def test_without_a_function_for_it_progress_is_a_line(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(monkeypatch, server + "good")
    download("mnist", tmp_path)
    size = f"{len(CONTENT) / 2**20:.0f}"
    assert capsys.readouterr().err == f"images.gz: {size} of {size} MiB\n"


def test_a_server_that_does_not_say_how_much_there_is_gets_a_line_too(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_length(self: SimpleHTTPRequestHandler, name: str, value: str) -> None:
        if name != "Content-Length":
            BaseHTTPRequestHandler.send_header(self, name, value)

    monkeypatch.setattr(Quiet, "send_header", without_length)
    serve(monkeypatch, server + "good")
    download("mnist", tmp_path)
    size = f"{len(CONTENT) / 2**20:.0f}"
    assert capsys.readouterr().err == f"images.gz: {size} of {size} MiB\n"


def test_a_file_from_before_that_is_damaged_is_fetched_again(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, server + "good")
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/images.gz").write_bytes(b"half of")
    download("mnist", tmp_path)
    assert (tmp_path / "raw/images.gz").read_bytes() == CONTENT


def test_the_next_address_is_asked_when_one_fails(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, server + "gone", server + "half", (tmp_path / "served/good").as_uri())
    download("mnist", tmp_path)
    assert (tmp_path / "raw/images.gz").read_bytes() == CONTENT


def test_failures_get_one_sentence_and_leave_no_file(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, server + "gone", server + "half", "http://127.0.0.1:1/closed")
    with pytest.raises(ConnectionError) as caught:
        download("mnist", tmp_path)
    sentence = str(caught.value)
    assert sentence.startswith(
        f"can't download images.gz from {server}gone (HTTP 404) or {server}half (what came is not"
    )
    assert "Connection refused" in sentence
    assert sentence.endswith(f"fetch it by other means and put it at {tmp_path / 'raw/images.gz'}.")
    assert list((tmp_path / "raw").iterdir()) == []


def test_a_full_disk_is_not_blamed_on_the_network(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, server + "good")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        download("mnist", tmp_path, full)
    assert list((tmp_path / "raw").iterdir()) == []


def test_a_data_set_without_a_download_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to download for 'digits': use cifar10, mnist, fashion-mnist"):
        download("digits", tmp_path)


@pytest.mark.parametrize("name", sources.DOWNLOADS)
def test_what_is_downloaded_is_where_it_is_looked_for(name: str) -> None:
    [layout] = sources.LAYOUTS[name][:1]
    for file in sources.DOWNLOADS[name]:
        folder, _, last = file.path.rpartition("/")
        assert file.path == layout.archive or (folder in layout.folders and last.removesuffix(".gz") in layout.files)
        assert all(url.endswith(f"/{last}") for url in file.urls)
