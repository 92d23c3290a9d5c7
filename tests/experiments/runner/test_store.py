import json
import math
import os
import shutil
from collections.abc import Iterator
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

import twinboot
from twinboot.experiments.runner import parts, sealed
from twinboot.experiments.runner.experiment import Part
from twinboot.experiments.runner.store import RunError, UnfinishedError, carry_out, load

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
    (tmp_path / "parts" / ".part-1").mkdir()
    (tmp_path / "parts" / ".part-1" / "numbers.csv").write_text("part,val")
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
        (lambda d: (d / "numbers.csv").write_text("part,value\n"), "numbers.csv is damaged"),
        (lambda d: (d / "numbers.csv").unlink(), "can't read .*numbers.csv"),
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
        (lambda d: change(d, tables={"numbers": "0"}), "numbers.csv is damaged"),
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
        file = tmp_path / str(number) / "parts" / "part-0" / random.choice(("part.json", "numbers.csv"))
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
    ("file", "content", "message"),
    [
        ("numbers.csv", "part,value,word\n0,999,NA\n", "numbers.csv is damaged"),
        ("numbers.csv", "", "numbers.csv is damaged"),
        ("part.json", "{", "part-0 is damaged: delete it"),
        ("part.json", '{"seconds": "long", "revision": null, "tables": {}}', "part-0 is damaged: delete it"),
        ("part.json", '{"seconds": 1e999, "revision": null, "tables": {}}', "part-0 is damaged: delete it"),
        ("part.json", '{"seconds": 1e308, "revision": null, "tables": {}}', "part-0 is damaged: delete it"),
        ("part.json", '{"seconds": 1, "revision": 7, "tables": {}}', "part-0 is damaged: delete it"),
        ("part.json", '{"seconds": 1, "revision": null, "tables": {"../../run": ""}}', "part-0 is damaged: delete it"),
        ("part.json", "[" * 100_000, "part-0 is damaged: delete it"),
    ],
)
def test_a_part_that_was_changed_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: str, message: str
) -> None:
    stop_at("part-1", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        carry_out("toy", toy, toy.Config(), tmp_path)
    monkeypatch.undo()
    (tmp_path / "parts" / "part-0" / file).write_text(content)
    with pytest.raises(RunError, match=message):
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
    monkeypatch.setattr(parts, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    stop_at("part-1", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        carry_out("toy", toy, toy.Config(), tmp_path)
    monkeypatch.setattr(toy, "before", lambda part: None)
    assert carry_out("toy", toy, toy.Config(), tmp_path).about["seconds"] == 1 + 2 + 4


def test_a_run_that_another_revision_went_on_with_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "revision", lambda: "first")
    stop_at("part-1", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        carry_out("toy", toy, toy.Config(), tmp_path)
    monkeypatch.setattr(toy, "before", lambda part: None)
    monkeypatch.setattr(parts, "revision", lambda: "second")
    assert carry_out("toy", toy, toy.Config(), tmp_path).about["revision"] == "first, second"
