import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
import toy
from processes import FORKS

import twinboot
from twinboot.experiments.runner import sealed, store
from twinboot.experiments.runner.experiment import Part, Tick
from twinboot.experiments.runner.store import RunError, UnfinishedError, carry_out, compute, load, revision

TOYS: dict[str, Any] = {"toy": toy}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    toy.computed.clear()
    yield
    toy.before = lambda part: None


def stop_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(part: str) -> None:
        if part == name:
            raise KeyboardInterrupt

    monkeypatch.setattr(toy, "before", stop)


def change(directory: Path, **values: Any) -> None:
    """Other values in run.json, with a checksum that fits, as another version might write them."""
    sealed.write(directory / "run.json", sealed.read(directory / "run.json") | values)


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.csv")}


def test_a_run_says_what_it_was_made_with(tmp_path: Path) -> None:
    run = carry_out("toy", toy, toy.Config(scale=2.0), tmp_path / "toy")
    about = json.loads((tmp_path / "toy" / "run.json").read_text())
    assert about["config"] == {"scale": 2.0, "sizes": [1, 2], "seed": 0}
    assert (about["twinboot"], about["torch"]) == (twinboot.__version__, torch.__version__)
    assert about["seconds"] >= 0
    assert run.config == toy.Config(scale=2.0)
    assert list(run.tables["numbers"]["value"]) == pytest.approx([0, 2 / 3, 4 / 3])
    assert not (tmp_path / "toy" / "parts").exists()


def test_stopped_and_resumed_equals_uninterrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carry_out("toy", toy, toy.Config(), tmp_path / "whole")
    toy.computed.clear()
    stop_at("part-1", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        carry_out("toy", toy, toy.Config(), tmp_path / "toy")
    with pytest.raises(UnfinishedError, match=r"unfinished: `twinboot toy` with the same --out resumes it"):
        load(tmp_path / "toy", TOYS)
    monkeypatch.undo()
    carry_out("toy", toy, toy.Config(), tmp_path / "toy")
    assert toy.computed == ["part-0", "part-1", "part-2"]  # part-0 only once
    assert files(tmp_path / "toy") == files(tmp_path / "whole")


def test_a_part_half_written_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at("part-1", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        carry_out("toy", toy, toy.Config(), tmp_path)
    monkeypatch.undo()
    (tmp_path / "parts" / ".part-1.json.host.1.partial").write_text('{"tables": {"numbers": "part,val')
    assert list(carry_out("toy", toy, toy.Config(), tmp_path).tables["numbers"]["part"]) == [0, 1, 2]


def test_a_complete_run_is_not_run_again(tmp_path: Path) -> None:
    first = carry_out("toy", toy, toy.Config(), tmp_path)
    second = carry_out("toy", toy, toy.Config(), tmp_path)
    assert toy.computed == ["part-0", "part-1", "part-2"]
    assert first.about == second.about
    assert (first.fresh, second.fresh) == (True, False)
    pd.testing.assert_frame_equal(first.tables["numbers"], second.tables["numbers"])


def test_ticks_are_told_for_parts_done_before_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at("part-2", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        carry_out("toy", toy, toy.Config(), tmp_path)
    monkeypatch.undo()
    ticks: list[str] = []
    carry_out("toy", toy, toy.Config(), tmp_path, lambda part: lambda: ticks.append(part.name))
    assert ticks == ["part-0"] * 2 + ["part-1"] * 2 + ["part-2"] * 2


def test_another_config_in_the_same_place_is_refused(tmp_path: Path) -> None:
    carry_out("toy", toy, toy.Config(), tmp_path)
    with pytest.raises(RunError, match=r"scale 1.0, not 3.0: choose another"):
        carry_out("toy", toy, toy.Config(scale=3.0), tmp_path)
    with pytest.raises(RunError, match="holds a run of 'toy': choose another"):
        carry_out("other", toy, toy.Config(), tmp_path)


def test_a_run_from_before_a_setting_was_there_had_its_default(tmp_path: Path) -> None:
    carry_out("toy", toy, toy.Config(), tmp_path)
    change(tmp_path, config={"sizes": [1, 2], "seed": 0})
    assert carry_out("toy", toy, toy.Config(), tmp_path).config == toy.Config()
    with pytest.raises(RunError, match=r"scale 1.0, not 3.0: choose another"):
        carry_out("toy", toy, toy.Config(scale=3.0), tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "numbers.csv").write_text("part,value\n"), "numbers.csv is missing or damaged"),
        (lambda d: (d / "numbers.csv").unlink(), "numbers.csv is missing or damaged"),
        (lambda d: (d / "run.json").write_text("{"), "run.json is damaged"),
        (lambda d: (d / "run.json").write_text("[]"), "run.json is damaged"),
        (lambda d: (d / "run.json").write_text('{"format": 1}'), "run.json is damaged"),
        (lambda d: (d / "run.json").write_bytes(b"\xff\xfe"), "run.json is damaged"),
        (lambda d: unsealed(d), "run.json is damaged"),
        (lambda d: change(d, format=99), "format 99"),
        (lambda d: (d / "run.json").unlink(), "no run in"),
        (lambda d: change(d, experiment="seismic"), "an experiment that this version does not have"),
        (lambda d: change(d, config={"nonsense": 1}), "config in .* does not fit this version"),
        (lambda d: change(d, config={"scale": -1.0}), r"does not fit this version \(scale must be above 0"),
        (lambda d: change(d, config={"scale": "1"}), r"does not fit this version \(scale must be a number"),
        (lambda d: change(d, config={"sizes": [[1], 2]}), r"does not fit this version \(sizes must be a tuple"),
        (lambda d: change(d, config={"seed": 10**400}), "config in .* does not fit this version"),
        (lambda d: change(d, config={"scale": nested(100)}), "config in .* does not fit this version"),
        (lambda d: (d / "run.json").write_text("[" * 100_000), "run.json is damaged"),
        (lambda d: (d / "run.json").write_text('{"format": ' + "1" * 5000 + "}"), "run.json is damaged"),
        (lambda d: (d / "run.json").write_text('{"format": 1e999}'), "run.json is damaged"),
        (lambda d: alter(d / "run.json", b"Linux", b"Lynux"), "run.json is damaged"),
        (lambda d: alter(d / "run.json", b'"checksum"', b'"checksun"'), "run.json is damaged"),
        (lambda d: change(d, tables={"../numbers": "0"}), "names a table outside of"),
        (lambda d: change(d, tables={"/etc/numbers": "0"}), "names a table outside of"),
        (lambda d: change(d, tables={"a\\numbers": "0"}), "names a table outside of"),
        (lambda d: change(d, tables={"numbers": "0"}), "numbers.csv is missing or damaged"),
    ],
)
def test_damage_is_told_in_one_sentence(tmp_path: Path, damage: Any, message: str) -> None:
    carry_out("toy", toy, toy.Config(), tmp_path)
    damage(tmp_path)
    with pytest.raises(RunError, match=message) as caught:
        load(tmp_path, TOYS)
    assert "\n" not in str(caught.value)


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else []


def alter(path: Path, old: bytes, new: bytes) -> None:
    assert path.read_bytes().count(old) == 1
    path.write_bytes(path.read_bytes().replace(old, new))


def unsealed(directory: Path) -> None:
    about = sealed.read(directory / "run.json")
    (directory / "run.json").write_text(json.dumps(about))


def corrupted(content: bytes, random: Random) -> bytes:
    """Up to three bytes or bits changed, put in or taken away, or the end cut off."""
    found = bytearray(content)
    for _ in range(random.randint(1, 3)):
        where = random.randrange(len(found))
        match random.randrange(5):
            case 0:
                found[where] ^= 1 << random.randrange(8)
            case 1:
                found[where] = random.choice(b'0123456789-+.eE"{}[],:/\\<')
            case 2:
                found.insert(where, random.choice(found))
            case 3:
                del found[where : where + random.choice((1, 1, 8, 64))]
            case 4 if len(found) > 1:
                del found[random.randrange(1, len(found)) :]
        if not found:
            break
    return bytes(found)


@pytest.mark.parametrize("file", ["run.json", "numbers.csv"])
def test_a_corrupted_run_is_the_same_or_refused_in_one_sentence(file: str, tmp_path: Path) -> None:
    run, random = replace(carry_out("toy", toy, toy.Config(), tmp_path), fresh=False), Random(0)
    content, refused = (tmp_path / file).read_bytes(), list[str]()
    for _ in range(400):
        (tmp_path / file).write_bytes(corrupted(content, random))
        for read in (partial(load, tmp_path, TOYS), partial(carry_out, "toy", toy, toy.Config(), tmp_path)):
            try:
                again = read()
            except RunError as error:
                refused.append(str(error))
            else:
                assert (again.name, again.config, again.about) == (run.name, run.config, run.about)
                pd.testing.assert_frame_equal(again.tables["numbers"], run.tables["numbers"], check_exact=True)
    assert len(refused) > 600  # white space may change
    assert not any("\n" in sentence for sentence in refused)


def test_a_corrupted_part_is_the_same_or_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at("part-2", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        carry_out("toy", toy, toy.Config(), tmp_path / "stopped")
    monkeypatch.undo()
    random, tables, refused = Random(1), set(), list[str]()
    for number in range(200):
        shutil.copytree(tmp_path / "stopped", tmp_path / str(number))
        file = tmp_path / str(number) / "parts" / "part-0.json"
        file.write_bytes(corrupted(file.read_bytes(), random))
        try:
            carry_out("toy", toy, toy.Config(), tmp_path / str(number))
        except RunError as error:
            refused.append(str(error))
        else:
            tables.add(files(tmp_path / str(number))["numbers.csv"])
    carry_out("toy", toy, toy.Config(), tmp_path / "stopped")
    assert tables <= set(files(tmp_path / "stopped").values())  # none, or the only one
    assert len(refused) > 150
    assert not any("\n" in sentence for sentence in refused)


def test_a_name_that_is_a_path_does_not_leave_the_directory_of_the_run(tmp_path: Path) -> None:
    carry_out("toy", toy, toy.Config(), tmp_path / "run")
    content = b"part,value,word\n0,1,NA\n"
    (tmp_path / "outside.csv").write_bytes(content)
    change(tmp_path / "run", tables={"../outside": sealed.checksum(content)})
    with pytest.raises(RunError, match=r"names a table outside of"):
        load(tmp_path / "run", TOYS)


def test_a_config_that_could_not_be_read_again_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="this config can't be written to"):
        carry_out("toy", toy, toy.Config(scale=math.inf), tmp_path / "run")
    assert toy.computed == []
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "[" * 100_000, '{"seconds": 1, "revision": null, "tables": {"numbers": "part\\n"}}']
)
def test_a_part_that_was_changed_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    stop_at("part-1", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        carry_out("toy", toy, toy.Config(), tmp_path)
    monkeypatch.undo()
    (tmp_path / "parts" / "part-0.json").write_text(content)
    with pytest.raises(RunError, match=r"part-0\.json is damaged: delete it, and the same command"):
        carry_out("toy", toy, toy.Config(), tmp_path)


def test_two_processes_do_not_run_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def second(part: str) -> None:
        with pytest.raises(RunError, match="another process is working on the run"):
            carry_out("toy", toy, toy.Config(), tmp_path)
        told.append(part)

    monkeypatch.setattr(toy, "before", second)
    carry_out("toy", toy, toy.Config(), tmp_path)
    assert told == ["part-0", "part-1", "part-2"]


def test_a_config_that_is_refused_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: toy.Config) -> list[Any]:
        raise ValueError("no")

    monkeypatch.setattr(toy, "parts", refuse)
    with pytest.raises(ValueError, match="no"):
        carry_out("toy", toy, toy.Config(), tmp_path / "toy")
    assert not (tmp_path / "toy").exists()


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="can't write to"):
        carry_out("toy", toy, toy.Config(), tmp_path / "file" / "toy")
    assert os.listdir(tmp_path) == ["file"]


def test_text_in_a_table_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what looks like a number or like nothing, in a part of its own."""
    words = ["1.10", "NA", "", "007"]
    frames = [pd.DataFrame({"part": [i], "word": [word]}) for i, word in enumerate(words)]
    parts = [Part(f"part-{i}", 1, lambda tick, t=t: {"words": t}) for i, t in enumerate(frames)]  # type: ignore[misc]
    monkeypatch.setattr(toy, "parts", lambda config: parts)
    carry_out("toy", toy, toy.Config(), tmp_path)
    assert (tmp_path / "words.csv").read_text() == "part,word\n0,1.10\n1,NA\n2,\n3,007\n"


def test_the_time_of_a_run_is_that_of_its_parts_also_from_before_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, 10.0, 100.0, 102.0, 200.0, 204.0])  # part-1 is begun, at 10, and stopped
    monkeypatch.setattr(store, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    stop_at("part-1", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        carry_out("toy", toy, toy.Config(), tmp_path)
    monkeypatch.setattr(toy, "before", lambda part: None)
    assert carry_out("toy", toy, toy.Config(), tmp_path).about["seconds"] == 1 + 2 + 4


def test_a_run_that_another_revision_went_on_with_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "revision", lambda: "first")
    stop_at("part-1", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        carry_out("toy", toy, toy.Config(), tmp_path)
    monkeypatch.setattr(toy, "before", lambda part: None)
    monkeypatch.setattr(store, "revision", lambda: "second")
    assert carry_out("toy", toy, toy.Config(), tmp_path).about["revision"] == "first, second"


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
    found = sealed.read(directory / f"{part}.json")
    assert found["seconds"] >= 0
    return pd.read_csv(io.StringIO(found["tables"]["t"]))


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts run in forks of a server, not in new processes, which take two seconds to begin. Those are tested by
    `test_processes_end_with_their_run_however_it_is_stopped`, and by the tests of the registry."""
    monkeypatch.setattr(store, "get_context", lambda how: FORKS)


@pytest.mark.usefixtures("forked")
def test_parts_at_once_run_in_processes_of_their_own_with_a_share_of_the_threads(tmp_path: Path) -> None:
    ticks: list[str] = []
    torch.set_num_threads(6)  # its half is neither one thread nor, on most machines, what a process has by itself
    compute(
        [Part(f"p{i}", 2, partial(one, f"p{i}")) for i in range(3)],
        tmp_path,
        lambda part: lambda: ticks.append(part.name),
        jobs=2,
    )
    found = pd.concat([table(tmp_path, f"p{i}") for i in range(3)])
    assert list(found["name"]) == ["p0", "p1", "p2"]
    assert os.getpid() not in set(found["process"])
    assert set(found["threads"]) == {3}
    assert sorted(ticks) == ["p0", "p0", "p1", "p1", "p2", "p2"]


def logged(name: str, log: Path, tick: Tick) -> dict[str, pd.DataFrame]:
    for what in ("begins", "ends"):
        with log.open("a") as file:
            file.write(f"{name} {what}\n")
        time.sleep(0.3)
    return one(name, tick)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_part_that_measures_time_runs_alone_when_the_others_are_done(tmp_path: Path, jobs: int) -> None:
    log = tmp_path / "log"
    parts = [Part(name, 1, partial(logged, name, log), alone=name in "xy") for name in "xyabc"]
    compute(parts, tmp_path / "parts", lambda part: lambda: None, jobs=jobs)
    said = log.read_text().splitlines()
    assert {line[0] for line in said[:6]} == set("abc")
    assert said[6:] == ["x begins", "x ends", "y begins", "y ends"]
    assert set(table(tmp_path / "parts", "x")["threads"]) == set(table(tmp_path / "parts", "a")["threads"])


@pytest.mark.usefixtures("forked")
def test_a_process_knows_its_revision_before_its_first_part_begins(tmp_path: Path) -> None:
    compute([Part("a", 1, asked)], tmp_path, lambda part: lambda: None, jobs=2)
    assert list(table(tmp_path, "a")["asked"]) == [1]


@pytest.mark.usefixtures("forked")
def test_after_a_part_that_fails_the_others_are_kept(tmp_path: Path) -> None:
    parts = [Part("good", 1, partial(one, "good")), Part("bad", 1, failing)]
    with pytest.raises(ValueError, match="this part is wrong"):
        compute(parts, tmp_path, lambda part: lambda: None, jobs=2)
    assert (tmp_path / "good.json").exists()
    assert not (tmp_path / "bad.json").exists()


@pytest.mark.usefixtures("forked")
def test_after_an_error_no_other_part_is_begun(tmp_path: Path) -> None:
    parts = [Part("bad", 1, failing), *(Part(f"p{i}", 1, partial(slow, f"p{i}")) for i in range(8))]
    with pytest.raises(ValueError, match="this part is wrong"):
        compute(parts, tmp_path, lambda part: lambda: None, jobs=2)
    assert {path.name for path in tmp_path.iterdir()} <= {"p0.json", "p1.json"}


@pytest.mark.usefixtures("forked")
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
    run = FORKS.Process(target=run_endless, args=(tmp_path,))
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
    monkeypatch.setattr(store, "__file__", str(source))
    assert revision.__wrapped__() is None  # no checkout
    person = ["-c", "user.name=a", "-c", "user.email=a@b.invalid", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "parts.py"], [*person, "commit", "-q", "-m", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    clean = revision.__wrapped__()
    assert re.fullmatch("[0-9a-f]{12,}", str(clean))
    source.write_text("changed = True")
    assert revision.__wrapped__() == f"{clean}-dirty"
    monkeypatch.setattr(store, "__file__", str(other))
    assert revision.__wrapped__() is None  # a file that this checkout does not track


def test_the_revision_is_unknown_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert revision.__wrapped__() is None
