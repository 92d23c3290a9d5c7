"""A small slice of the robustness campaign, and that the campaign notices what it looks for."""

import json
import math
import random
import re
import subprocess
import sys
import types
from collections.abc import Callable
from inspect import isclass, isfunction
from pathlib import Path
from typing import Any

import pytest
import torch

import twinboot
from twinboot import metrics, resets
from twinboot.inverse.priors import Prior

if not sys.platform.startswith("linux"):
    pytest.skip("the campaign forks, and limits what forks may do as Linux does", allow_module_level=True)

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from chaos import contents, corrupt, disk, inputs, pool  # noqa: E402
from chaos.trials import OWN, PACKAGE, RAW, REFUSED, Trial, verdict  # noqa: E402

NUMBERS = {"kill": 6, "corrupt": 100, "disk": 8, "input": 60}
SLICE = ["--kills=6", "--corruptions=100", "--full-disks=8", "--inputs=60"]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCHMARKS / "chaos"), *options], capture_output=True, text=True)


def records(folder: Path) -> list[dict[str, Any]]:
    [file] = folder.glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines() if line]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """In a process of its own: one that has no threads yet can fork."""
    folder = tmp_path_factory.mktemp("chaos")
    return folder, run(*SLICE, f"--out={folder}", f"--page={folder / 'chaos.md'}")


@pytest.mark.parametrize("kind", list(NUMBERS))
def test_a_slice_of_the_campaign_ends_as_expected(kind: str, campaign: Any) -> None:
    folder, ended = campaign
    found = [record for record in records(folder) if record["kind"] == kind]
    assert len(found) == NUMBERS[kind], ended.stderr
    unexpected = "\n".join(str(record) for record in found if record["bad"])
    assert not unexpected, unexpected


def test_the_command_prints_and_writes_its_counts_and_fails_if_anything_is_unexpected(campaign: Any) -> None:
    folder, ended = campaign
    page = (folder / "chaos.md").read_text()
    assert "Seed 0." in page
    assert "`make chaos`" in page
    for count, title in (
        (6, "Kills at random instants"),
        (100, "Damaged files"),
        (8, "Full disks"),
        (60, "Bad inputs"),
    ):
        right = sum(not r["bad"] for r in records(folder) if NUMBERS[r["kind"]] == count)
        assert f"## {title}: {right} of {count} as expected" in page
        assert f"## {title}: {right} of {count} as expected" in ended.stdout
    assert ended.returncode == any(record["bad"] for record in records(folder))


def test_a_trial_depends_on_the_seed_of_the_campaign_its_kind_and_its_number() -> None:
    sample = corrupt.of_estimate("units")

    def damage(*trial: Any) -> tuple[str, bytes]:
        return corrupt.damaged(sample, Trial(*trial).random)

    assert damage("corrupt", 7, 0) == damage("corrupt", 7, 0)
    assert len({damage("corrupt", number, seed)[1] for number in range(20) for seed in range(2)}) == 40
    names = [[(name, value) for name, (value, _) in inputs.drawn(Trial("input", 7))[1].items()] for _ in range(2)]
    assert names[0] == names[1]


# The campaign can fail


def in_package(source: str) -> types.ModuleType:
    """A module that looks as if the library had it."""
    module = types.ModuleType("made_up")
    exec(compile(source, f"{PACKAGE}/made_up.py", "exec"), module.__dict__)
    return module


def judged(call: Callable[[], object]) -> str:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        call()
    return verdict(caught.value)[0]


def test_only_a_sentence_that_the_library_raises_itself_counts_as_a_refusal() -> None:
    made = in_package(
        "import json, torch\n"
        "def refuse(said): raise ValueError(said)\n"
        "def compare(x): return x < 1\n"
        "def insist(x): assert x\n"
        "def parse(x): return json.loads(x)\n"
        "def size(x): return torch.zeros(x)\n"
        "def call(function): return function(1, 2)\n"
    )
    assert judged(lambda: made.refuse("x must be a number, not 'a'.")) == REFUSED
    assert judged(lambda: made.refuse("no option 'a': did you mean 'b'?")) == REFUSED
    assert judged(lambda: made.refuse("x is wrong")) == RAW
    assert judged(lambda: made.refuse("x must be a number, not\na list.")) == RAW
    assert judged(lambda: made.compare("x")) == RAW
    assert judged(lambda: made.insist(False)) == RAW
    assert judged(lambda: made.parse("{")) == RAW
    assert judged(lambda: made.size(-1)) == RAW
    assert judged(lambda: made.call(pool.callers_error)) == OWN
    assert judged(lambda: made.call(pool.callers_nothing)) == OWN
    assert judged(lambda: made.call(1)) == RAW


def test_a_result_that_is_not_finite_is_noticed_wherever_it_is() -> None:
    assert list(inputs.not_finite([1.0, {"a": torch.ones(2)}, torch.nn.Linear(1, 1)])) == []
    assert list(inputs.not_finite({"a": [1.0, math.nan]})) == ["result['a'][1]"]
    assert list(inputs.not_finite((torch.tensor([0.0, math.inf]),))) == ["result[0]"]


def test_a_file_that_loads_as_something_else_is_noticed(tmp_path: Path) -> None:
    def outcome(load: Callable[[Path], Any]) -> str:
        sample = corrupt.Sample("estimate", {"a": b"1"}, "a", (0, 0), load, corrupt.digest("1"))
        return corrupt.read_back(sample, b"2")[0]

    def refuse(folder: Path) -> None:
        in_package("def refuse(): raise ValueError('a is damaged: write it again.')").refuse()

    assert outcome(lambda folder: (folder / "a").read_text()) == corrupt.OTHER
    assert outcome(lambda folder: "1") == corrupt.SAME
    assert outcome(lambda folder: {}[(folder / "a").read_text()]) == RAW
    assert outcome(refuse) == REFUSED


def test_every_bit_and_type_of_what_is_loaded_counts() -> None:
    one = {"w": torch.zeros(2), "n": [1, 2.0]}
    assert corrupt.digest(one) == corrupt.digest({"w": torch.zeros(2), "n": [1, 2.0]})
    for other in (torch.tensor([0.0, -0.0]), torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64)):
        assert corrupt.digest(one) != corrupt.digest({**one, "w": other})
    for other in ([1, 2], [1.0, 2.0], (1, 2.0), [1, 2.0, None]):
        assert corrupt.digest(one) != corrupt.digest({**one, "n": other})


def test_each_damage_changes_a_file_and_reaches_its_header_as_often_as_its_body() -> None:
    sample = corrupt.of_estimate("layers")
    content, header = sample.files[sample.target], sample.edges[0]
    first = []
    for seed in range(400):
        name, damaged = corrupt.damaged(sample, random.Random(seed))
        assert damaged != content
        if name in ("a bit flipped", "a byte overwritten", "bytes randomized", "bytes inserted"):
            first.append(corrupt.first_difference(damaged, content) < header)
    share = sum(first) / len(first)
    assert abs(share - 0.5) < 4 * math.sqrt(0.25 / len(first))


@pytest.mark.parametrize(
    ("message", "kept"),
    [("an <object at 0x7fa3>", "an <object at 0x...>"), ("tmpk0xaq0f0/a is damaged", "tmpk0xaq0f0/a is damaged")],
)
def test_messages_have_no_addresses_but_whole_names_of_folders(message: str, kept: str) -> None:
    """A campaign takes the name of its folder out of a message. Where the name had "0x" in it, it stayed there."""
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        raise ValueError(message)
    assert verdict(raised.value)[1].startswith(f"ValueError: {kept}")


def test_files_that_were_lost_or_half_written_are_noticed(tmp_path: Path) -> None:
    assert disk._lost({"a.st": b"old"}, {"a.st": b"old"}) == ""
    assert disk._lost({"a.st": b"old"}, {"a.st": b"ol"}) == "a.st"
    assert disk._lost({"a.st": b"old"}, {}) == "a.st"
    assert disk._lost({"1.pt": b"old"}, {"2.pt": b"new"}) == ""
    assert disk._lost({"log.csv": b"1\n"}, {"log.csv": b"1\n2\n"}) == ""
    assert disk._lost({"log.csv": b"1\n"}, {"log.csv": b"1\n2"}) == "log.csv"
    assert contents.half_written(tmp_path) == []
    (tmp_path / ".a.partial").touch()
    assert contents.half_written(tmp_path) == [".a.partial"]


SCRIPT = """
import contextlib, io, json, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from chaos import campaign, disk, kills
from chaos.trials import Trial

def records():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as told:
        campaign.main(["--kills=0", "--corruptions=40", "--full-disks=0", "--inputs=0", f"--out={sys.argv[2]}"])
    [file] = Path(sys.argv[2]).glob("*.jsonl")
    return file, list(map(vars, campaign.read(file))), told.getvalue()

campaign.TOGETHER = 5
file, first, _ = records()
lines = file.read_text().splitlines()
file.write_text("\\n".join(lines[:31]) + "\\n" + lines[31][:50])  # the first line is empty
_, again, told = records()
[repeated] = campaign.attempt([Trial("corrupt", 11)])

def forgetful(folder, seed):  # does not know that it was begun before
    with (folder / "begun").open("a") as file:
        file.write("x")
    time.sleep(0.1)
    return (folder / "begun").read_text()

def in_place(folder, seed, turn, full):
    full()
    (folder / "file").write_bytes(bytes(50_000))

kills.WORKS = dict.fromkeys(kills.WORKS, forgetful)
disk.WORKS = dict.fromkeys(disk.WORKS, (in_place, 40_000))
careless = [kills.run(Trial("kill", n)) for n in range(3)] + [disk.run(Trial("disk", n)) for n in range(3)]
found = {"first": first, "again": again, "told": told, "repeated": vars(repeated)}
json.dump({**found, "careless": list(map(vars, careless))}, sys.stdout)
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What that script finds, in a process of its own."""
    arguments = [str(BENCHMARKS), str(tmp_path_factory.mktemp("chaos"))]
    ended = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_a_campaign_that_was_stopped_does_what_is_left_and_finds_the_same(alone: dict[str, Any]) -> None:
    assert alone["told"].strip().startswith("corrupt: 10 trials")
    assert len(alone["first"]) == 40
    assert alone["again"] == alone["first"]


def test_a_trial_that_is_repeated_alone_ends_as_it_did(alone: dict[str, Any]) -> None:
    assert alone["repeated"] == alone["first"][11]


def test_a_run_that_does_not_go_on_or_writes_in_place_is_noticed(alone: dict[str, Any]) -> None:
    """With work in the place of the library's that forgets and spoils its files."""
    assert [record for record in alone["careless"] if not record["bad"]] == []


# The campaign is complete


WITHOUT_ARGUMENTS = {"Twins.update", "Twins.get_extra_state", "PairedLoader.state_dict", "PairedLoader.jobs"}
WITHOUT_ARGUMENTS |= {"ControlledTwins.data_share", "Estimate.extra_repr", "Twins.weights", "Twins.unstack"}
WITHOUT_ARGUMENTS |= {"StandardErrors.covariance", "StandardErrors.sandwich"}


def functions_of(module: types.ModuleType) -> list[str]:
    return [
        name for name, f in vars(module).items() if isfunction(f) and f.__module__ == module.__name__ and name[0] != "_"
    ]


def schedules() -> list[str]:
    return [
        f"resets.{name}"
        for name, kind in vars(resets).items()
        if isclass(kind) and "__call__" in vars(kind) and name.islower()
    ]


def methods_of(kind: type) -> list[str]:
    """Its own, without those of torch and of Python."""
    own = {name for base in kind.__mro__ if base.__module__.startswith("twinboot") for name in vars(base)}
    public = [name for name in own if name[0] != "_" and callable(getattr(kind, name))]
    if kind is not twinboot.Twins and issubclass(kind, twinboot.Twins):  # without what it inherits
        return [name for name in public if getattr(kind, name) is not getattr(twinboot.Twins, name, None)]
    return public


def test_every_public_function_class_and_method_has_its_bad_inputs() -> None:
    tried = {target.name.split(",")[0] for target in inputs.core()}
    public = {name: getattr(twinboot, name) for name in twinboot.__all__ if callable(getattr(twinboot, name))}
    wanted = {*public, *schedules(), *(f"metrics.{name}" for name in functions_of(metrics))}
    for name, kind in public.items():
        # One process alone can make Apart, but not use it. The methods of a prior are for `invert` alone.
        if isclass(kind) and kind is not twinboot.Apart and not issubclass(kind, Prior):
            wanted |= {f"{name}.{method}" for method in methods_of(kind)}
    assert wanted - tried - WITHOUT_ARGUMENTS == set()
