"""How a run goes, for people and for files."""

import errno
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from twinboot.training.logs import open_log, show

HISTORY: dict[str, list[float]] = {
    "epoch": [1, 2],
    "train": [0.9, 0.5],
    "unseen": [0.8, 0.85],
    "accuracy": [0.5, 0.75],
    "sigma_least": [0.001, 0.002],
    "sigma_most": [0.1, 0.2],
    "seconds": [1000.0, 1800.0],
}


def test_a_line_says_all_that_matters(capsys: Any) -> None:
    show(HISTORY, epochs=5)
    expected = "epoch 2 of 5: loss 0.5, unseen 0.85, accuracy 75.0%, sigma 0.002 to 0.2, 1:10:00 left\n"
    assert capsys.readouterr().err == expected
    shares: dict[str, list[float]] = {
        "data_share/0": [0.5, -0.02],
        "data_share/1": [0.5, 0.31],
        "data_share/2": [0, float("nan")],
    }
    show({**HISTORY, **shares}, epochs=5)
    assert "sigma 0.002 to 0.2 (-2% to 31% of its square by data), 1:10:00 left" in capsys.readouterr().err
    show({name: values[:1] for name, values in HISTORY.items()}, epochs=1)
    assert capsys.readouterr().err.endswith("0:00 left *\n")  # the best so far


def test_the_file_is_there_from_the_beginning_and_grows(tmp_path: Path) -> None:
    path, history = tmp_path / "log.csv", {name: values[:1] for name, values in HISTORY.items()}
    with open_log(path, history) as log:
        assert len(path.read_text().splitlines()) == 2
        for name, values in HISTORY.items():
            history[name].append(values[1])
        log.add({})
    assert path.read_text().splitlines()[2] == "2,0.5,0.85,0.75,0.002,0.2,1800.0"


def test_a_folder_that_is_not_there_is_named_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"), open_log(tmp_path / "none" / "log.csv", HISTORY):
        pass


def _scalars(directory: Path) -> dict[str, dict[int, float]]:
    """Name -> epoch -> value, as TensorBoard shows a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorBoard's own
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(directory))
        events.Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}


@pytest.mark.parametrize("again", ["run", "other"])
def test_tensorboard_shows_each_epoch_once_also_of_a_run_that_goes_on(tmp_path: Path, again: str) -> None:
    with open_log(f"tensorboard:{tmp_path / 'run'}", {name: [] for name in HISTORY}) as log:
        for epoch in range(2):
            log.add({name: values[epoch] for name, values in HISTORY.items()})
        log.add({"epoch": 3, "unseen": 99.0})  # after the last checkpoint: lost
    with open_log(f"tensorboard:{tmp_path / again}", HISTORY) as log:
        log.add({"epoch": 3, "unseen": 0.7})
    found = _scalars(tmp_path / again)
    assert set(found) == set(HISTORY) - {"epoch"}
    assert found["unseen"] == pytest.approx({1: 0.8, 2: 0.85, 3: 0.7})
    assert found["sigma_most"] == pytest.approx({1: 0.1, 2: 0.2})


def test_tensorboard_that_is_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with (
        pytest.raises(ImportError, match="needs TensorBoard: pip install tensorboard"),
        open_log("tensorboard", HISTORY),
    ):
        pass


def test_a_disk_that_takes_no_more_is_named_with_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history: dict[str, list[float]] = {"epoch": [1], "train": [0.5]}
    with open_log(tmp_path / "run.csv", history) as log:
        before = (tmp_path / "run.csv").read_bytes()

        def full(*args: Any, **options: Any) -> Any:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(Path, "open", full)
        with pytest.raises(OSError, match=r"^can't write the log .*run.csv: No space left on device; the log before"):
            log.add({"epoch": 1})
    monkeypatch.undo()
    assert (tmp_path / "run.csv").read_bytes() == before
    assert os.listdir(tmp_path) == ["run.csv"]
