import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pandas as pd
import pytest
import torch

from twinboot.experiments.runner import parts as module
from twinboot.experiments.runner.experiment import Part, Tick
from twinboot.experiments.runner.parts import RunError, compute, revision


def one(name: str, tick: Tick) -> dict[str, pd.DataFrame]:
    tick()
    return {"t": pd.DataFrame({"name": [name], "process": [os.getpid()], "threads": [torch.get_num_threads()]})}


def asked(tick: Tick) -> dict[str, pd.DataFrame]:
    return {"t": pd.DataFrame({"asked": [revision.cache_info().currsize]})}


def slow(name: str, tick: Tick) -> dict[str, pd.DataFrame]:
    time.sleep(0.5)
    return one(name, tick)


def failing(tick: Tick) -> dict[str, pd.DataFrame]:
    raise ValueError("this part is wrong")


def killed(tick: Tick) -> dict[str, pd.DataFrame]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def counting(tick: Tick, scratch: Path) -> dict[str, pd.DataFrame]:
    """Three steps, of which it keeps how many are done; the first attempt ends after two."""
    file = scratch / "steps"
    before = int(file.read_text()) if file.exists() else 0
    for step in range(before + 1, 4):
        file.write_text(str(step))
        if step == 2 and before == 0:
            raise KeyboardInterrupt
    return {"t": pd.DataFrame({"resumed_after": [before]})}


def table(directory: Path, part: str) -> pd.DataFrame:
    assert json.loads((directory / part / "part.json").read_text())["seconds"] >= 0
    return pd.read_csv(directory / part / "t.csv")


def test_parts_at_once_run_in_processes_of_their_own_with_a_share_of_the_threads(tmp_path: Path) -> None:
    ticks: list[str] = []
    compute(
        [Part(f"p{i}", 2, partial(one, f"p{i}")) for i in range(3)],
        tmp_path,
        lambda part: lambda: ticks.append(part.name),
        jobs=2,
    )
    found = pd.concat([table(tmp_path, f"p{i}") for i in range(3)])
    assert list(found["name"]) == ["p0", "p1", "p2"]
    assert os.getpid() not in set(found["process"])
    assert set(found["threads"]) == {max(1, torch.get_num_threads() // 2)}
    assert sorted(ticks) == ["p0", "p0", "p1", "p1", "p2", "p2"]


def logged(name: str, log: Path, tick: Tick) -> dict[str, pd.DataFrame]:
    for what in ("begins", "ends"):
        with log.open("a") as file:
            file.write(f"{name} {what}\n")
        time.sleep(0.3)
    return one(name, tick)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_part_that_measures_time_runs_alone_when_the_others_are_done(tmp_path: Path, jobs: int) -> None:
    log = tmp_path / "log"
    parts = [Part(name, 1, partial(logged, name, log), alone=name in "xy") for name in "xyabc"]
    compute(parts, tmp_path / "parts", lambda part: lambda: None, jobs=jobs)
    said = log.read_text().splitlines()
    assert {line[0] for line in said[:6]} == set("abc")
    assert said[6:] == ["x begins", "x ends", "y begins", "y ends"]
    assert set(table(tmp_path / "parts", "x")["threads"]) == set(table(tmp_path / "parts", "a")["threads"])


def test_a_process_knows_its_revision_before_its_first_part_begins(tmp_path: Path) -> None:
    compute([Part("a", 1, asked)], tmp_path, lambda part: lambda: None, jobs=2)
    assert list(table(tmp_path, "a")["asked"]) == [1]


def test_after_a_part_that_fails_the_others_are_kept(tmp_path: Path) -> None:
    parts = [Part("good", 1, partial(one, "good")), Part("bad", 1, failing)]
    with pytest.raises(ValueError, match="this part is wrong"):
        compute(parts, tmp_path, lambda part: lambda: None, jobs=2)
    assert (tmp_path / "good").exists()
    assert not (tmp_path / "bad").exists()


def test_after_an_error_no_other_part_is_begun(tmp_path: Path) -> None:
    parts = [Part("bad", 1, failing), *(Part(f"p{i}", 1, partial(slow, f"p{i}")) for i in range(8))]
    with pytest.raises(ValueError, match="this part is wrong"):
        compute(parts, tmp_path, lambda part: lambda: None, jobs=2)
    assert {path.name for path in tmp_path.iterdir()} <= {"p0", "p1"}


def test_a_killed_process_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="was killed; the same command resumes the run"):
        compute([Part("a", 1, killed), Part("b", 1, killed)], tmp_path, lambda part: lambda: None, jobs=2)


def test_a_long_part_goes_on_from_what_it_kept(tmp_path: Path) -> None:
    parts = [Part("long", 3, counting, resumes=True)]
    with pytest.raises(KeyboardInterrupt):
        compute(parts, tmp_path, lambda part: lambda: None, jobs=1)
    compute(parts, tmp_path, lambda part: lambda: None, jobs=1)
    assert list(table(tmp_path, "long")["resumed_after"]) == [2]
    assert not list(tmp_path.glob("*.scratch"))


def endless(name: str, tick: Tick, scratch: Path) -> dict[str, pd.DataFrame]:
    (scratch.parent / f"{name}.pid").write_text(str(os.getpid()))
    time.sleep(600)
    return {}


def run_endless(directory: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored where the tests run in the background
    parts = [Part(name, 1, partial(endless, name), resumes=True) for name in "ab"]
    compute(parts, directory, lambda part: lambda: None, jobs=2)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_end_with_their_run_however_it_is_stopped(tmp_path: Path, how: signal.Signals) -> None:
    run = get_context("spawn").Process(target=run_endless, args=(tmp_path,))
    run.start()
    pids = [tmp_path / f"{name}.pid" for name in "ab"]
    until(lambda: all(file.exists() and file.read_text() for file in pids))
    assert run.pid is not None
    os.kill(run.pid, how)
    run.join(30)
    until(lambda: not any(is_running(int(file.read_text())) for file in pids))


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# A source archive may be tested where there is no git; what a run records there is the next test. CI has it, or fails.
@pytest.mark.skipif(not (shutil.which("git") or os.environ.get("CI")), reason="it makes a checkout with git")
def test_the_revision_is_that_of_the_checkout_the_source_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)  # a hook of git, for one, would send it to another checkout
    source, other = tmp_path / "parts.py", tmp_path / "other.py"
    source.write_text("")
    other.write_text("")
    monkeypatch.setattr(module, "__file__", str(source))
    assert revision.__wrapped__() is None  # no checkout
    person = ["-c", "user.name=a", "-c", "user.email=a@b.invalid", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "parts.py"], [*person, "commit", "-q", "-m", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    clean = revision.__wrapped__()
    assert re.fullmatch("[0-9a-f]{12,}", str(clean))
    source.write_text("changed = True")
    assert revision.__wrapped__() == f"{clean}-dirty"
    monkeypatch.setattr(module, "__file__", str(other))
    assert revision.__wrapped__() is None  # a file that this checkout does not track


def test_the_revision_is_unknown_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert revision.__wrapped__() is None
