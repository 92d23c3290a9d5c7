import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import toy

import twinboot
from twinboot.experiments import cli, commands
from twinboot.experiments.images import config as images_config
from twinboot.experiments.runner.store import load
from twinboot.experiments.wells import basins

TINY = ["--seeds", "5", "--size", "20", "--epochs", "13"]


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line with two experiments that take no time."""
    monkeypatch.setattr(commands, "EXPERIMENTS", {"first": toy, "second": toy})


def fails(arguments: list[str], code: int, capsys: Any) -> str:
    """What is said on standard error, which must be one line."""
    capsys.readouterr()
    assert cli.main(arguments) == code
    said = capsys.readouterr()
    assert said.err.startswith("twinboot: ")
    assert said.err.count("\n") == 1
    return str(said.err)


def test_help_names_every_command(capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert all(name in said for name in (*commands.EXPERIMENTS, "reproduce", "figure", "report", "--version"))


@pytest.mark.parametrize("command", ["reproduce", "gaussian"])
def test_help_tells_where_quick_runs_go(command: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "out/quick by default with --quick" in " ".join(capsys.readouterr().out.replace("│", " ").split())


OWN = ("text", "nist", "regressions")  # whose settings the paper has nothing to say about


@pytest.mark.parametrize("command", list(commands.EXPERIMENTS))
def test_every_flag_of_a_config_has_help_with_its_reason(command: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name in commands.EXPERIMENTS[command].Config.__dataclass_fields__:
        assert f"--{name.replace('_', '-')} " in said
    assert ("Appendix A." in said) == (command not in OWN)


def test_help_shows_the_type_of_a_flag_and_only_defaults_that_say_something(capsys: Any) -> None:
    for command in ("images", "fwi", "report", "reproduce"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        said = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert not re.search(r"\{None\}|default: (None|False|''|)\)", said)
        flags = {"images": "--methods STR ...", "fwi": "--window INT INT INT INT", "report": "--page PATH"}
        assert flags.get(command, "--seed INT") in said
        assert (command == "report") or "(default: 1)" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["basins", "--sed", "3"], "Unrecognized options: --sed, 3 Perhaps you meant: --seed INT"),
        (["gausian"], "Unrecognized options: gausian Available subcommands: gaussian, basins"),
        (["--hlep"], "Unrecognized options: --hlep Available subcommands: gaussian, basins"),
        (["gaussian", "--seed", "x"], "Error parsing --seed: invalid literal for int() with base 10: 'x'"),
        (["fwi", "--window", "1", "2"], "Error parsing --window"),
        (["report"], "Missing from twinboot report: PATH A run or a directory of runs, such as out/demo."),
        (["figure"], "Missing from twinboot figure: PATH A run or a directory of runs, such as out/demo."),
        ([], "Expected one of {gaussian, basins"),
        (["basins", "--size", "x"], "Error parsing --size"),
        (["basins", "--datum", "push"], "invalid choice 'push' for argument '--datum'"),
        (["reproduce", "--out"], "Missing value for argument '--out'"),
    ],
)
def test_wrong_flags_are_named_with_code_2(
    arguments: list[str], said: str, capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert said in " ".join(re.sub("[─│╭╮╰╯]|-{3,}", " ", capsys.readouterr().err).split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["basins", "--size", "0"], "size must be above 0"),
        (["basins", "--width", "1.2"], "no two wells"),
        (["basins", "--jobs", "0"], "jobs must be at least 1, not 0."),
        (["reproduce", "--seed", str(2**80)], "seed must be"),
        (["sweeps", "--noises", "2.0"], "no two wells"),
        (["basins", "--quick", "--full"], "exclude each other"),
    ],
)
def test_wrong_values_get_one_line_and_code_2(
    arguments: list[str], said: str, capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in fails(arguments, 2, capsys)
    assert list(tmp_path.iterdir()) == []  # a refused command leaves nothing behind that would block the right one


def test_a_run_writes_its_files_and_a_figure_can_be_drawn_again(tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["basins", *TINY, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.err == ""  # no bar where there is no terminal
    assert f"figure: {tmp_path / 'basins' / 'figure.png'}" in said.out
    assert "different wells" in said.out
    run = load(tmp_path / "basins", commands.EXPERIMENTS)
    assert run.config == basins.Config(seeds=5, size=20, epochs=13)
    picture = tmp_path / "basins" / "figure.png"
    first = picture.read_bytes()
    for directory in (tmp_path, tmp_path / "basins"):
        picture.unlink()
        assert cli.main(["figure", str(directory)]) == 0
        assert picture.read_bytes() == first


def test_quick_sets_the_defaults_and_flags_come_on_top(toys: None, tmp_path: Path) -> None:
    assert cli.main(["first", "--quick", "--scale", "2", "--seed", "9", "--out", str(tmp_path)]) == 0
    assert load(tmp_path / "first", commands.EXPERIMENTS).config == toy.Config(sizes=(1,), scale=2.0, seed=9)
    assert cli.main(["second", "--full", "--out", str(tmp_path)]) == 0
    assert load(tmp_path / "second", commands.EXPERIMENTS).config == toy.Config()


def test_reproduce_runs_all_with_the_seed_and_names_the_report(toys: None, tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["reproduce", "--quick", "--seed", "4", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {tmp_path / 'report.html'}"
    assert [load(tmp_path / name, commands.EXPERIMENTS).config.seed for name in ("first", "second")] == [4, 4]


def test_presets_of_an_experiment_lie_side_by_side_and_are_all_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(images_config.PRESETS, "cifar10", images_config.PRESETS["digits"])
    for preset in ("digits", "cifar10"):
        words = ["images", "--preset", preset, "--methods", "hold-out", "--epochs", "1", "--seeds", "1"]
        assert cli.main([*words, "--out", str(tmp_path)]) == 0
    assert cli.main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.md").read_text()
    assert "(digits)" in page
    assert "(cifar10)" in page
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["images", "images-cifar10"]


def test_a_preset_that_is_an_experiment_of_its_own_is_found_by_either_name(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its run is reported once, although its name begins with that of the other."""
    monkeypatch.setattr(commands, "EXPERIMENTS", {"toy": toy, "toy-other": toy})
    assert cli.main(["toy", "--quick", "--preset", "other", "--out", str(tmp_path)]) == 0
    assert load(tmp_path / "toy-other", commands.EXPERIMENTS).config == toy.QUICK
    assert cli.main(["toy-other", "--quick", "--out", str(tmp_path)]) == 0
    assert "already finished" in capsys.readouterr().out
    assert [path.name for path in commands._runs_in(tmp_path)] == ["toy-other"]


def test_report_leaves_out_an_unfinished_run_and_says_so(
    toys: None, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    assert cli.main(["first", "--out", str(tmp_path)]) == 0
    monkeypatch.setattr(toy, "before", stop)
    said = fails(["second", "--out", str(tmp_path)], 130, capsys)
    assert f"To resume, repeat the command: twinboot second --out {tmp_path}" in said
    docs = tmp_path / "docs" / "toys.md"
    assert cli.main(["report", str(tmp_path), "--page", str(docs)]) == 0
    assert "left out: the run in" in capsys.readouterr().err
    sentence = "the run in second is unfinished: `twinboot second` with the same --out"
    assert f"<li>{sentence}" in (tmp_path / "report.html").read_text()
    assert f"> - {sentence}" in docs.read_text()
    assert "unfinished" in fails(["figure", str(tmp_path)], 1, capsys)
    monkeypatch.undo()


def stop(part: str) -> None:
    raise KeyboardInterrupt


def test_trouble_with_files_gets_one_line_and_code_1(toys: None, tmp_path: Path, capsys: Any) -> None:
    assert "no run in" in fails(["figure", str(tmp_path / "nowhere")], 1, capsys)
    assert "no run in" in fails(["report", str(tmp_path)], 1, capsys)
    (tmp_path / "file").write_text("")
    assert "can't write" in fails(["first", "--out", str(tmp_path / "file")], 1, capsys)
    assert cli.main(["first", "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    assert cli.main(["first", "--out", str(tmp_path)]) == 0
    assert "already finished" in capsys.readouterr().out
    assert "choose another" in fails(["first", "--scale", "2", "--out", str(tmp_path)], 1, capsys)
    (tmp_path / "first" / "numbers.csv").write_text("part\n")
    for command in ("figure", "report"):
        assert "damaged" in fails([command, str(tmp_path)], 1, capsys)


def test_a_run_whose_tables_do_not_fit_its_config_gets_one_line(
    toys: None, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of another version may be."""
    assert cli.main(["first", "--out", str(tmp_path)]) == 0

    def missing(config: toy.Config, tables: Any) -> Any:
        return tables["numbers"]["of\nlater"]

    made = f"the run in {tmp_path / 'first'}, made by twinboot {twinboot.__version__}, does not fit this version"
    for function in ("figure", "numbers", "verdicts"):
        with monkeypatch.context() as patch:
            patch.setattr(toy, function, missing)
            for command in (["report", str(tmp_path)], ["first", "--out", str(tmp_path)]):
                assert made in fails(command, 1, capsys)
            with pytest.raises(KeyError):  # of a run that was just computed it is a fault of the experiment
                cli.main(["second", "--out", str(tmp_path / function)])


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """A real process, stopped by a real signal in the middle of its run."""
    few = ["--rates", "0.1", "--batches", "10", "--noises", "0.3", "--sizes", "20", "30", "60000", "--seeds", "5"]
    command = [sys.executable, "-m", "twinboot", "sweeps", *few, "--epochs", "13", "--out", str(tmp_path)]
    heeds: Any = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - a shell's background jobs do not
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=heeds)
    parts, deadline = tmp_path / "sweeps" / "parts", time.monotonic() + 120
    while not (parts / "size-30.json").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.startswith(
        "twinboot: stopped; finished parts are stored. To resume, repeat the command: twinboot sweeps"
    )
    assert said.count("\n") == 1
    assert sorted(os.listdir(parts)) == ["size-20.json", "size-30.json"]


def test_a_reader_that_leaves_is_no_error() -> None:
    for unbuffered in ("", "1"):
        command = f"{sys.executable} -m twinboot --version | true; exit ${{PIPESTATUS[0]}}"
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_and_no_utf8_get_one_line_or_less() -> None:
    command = f"{sys.executable} -m twinboot --version > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("twinboot: ")
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", "twinboot", "--help"], capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import twinboot", ("matplotlib", "pandas", "tyro", "rich")),
        ("from twinboot.experiments import cli; cli.main(['--version'])", ("matplotlib", "pandas", "tyro", "rich")),
        ("from twinboot.experiments import commands", ("torchmetrics", "transformers")),
    ],
)
def test_what_is_not_needed_is_not_imported(code: str, heavy: tuple[str, ...]) -> None:
    check = f"import sys; found = {set(heavy)} & set(sys.modules); sys.exit(str(found) if found else 0)"
    assert subprocess.run([sys.executable, "-c", f"{code}; {check}"]).returncode == 0


def test_an_error_of_files_without_a_number_is_told_in_its_own_words(monkeypatch: Any, capsys: Any) -> None:
    def full(arguments: list[str]) -> int:
        raise OSError("can't write epoch-2.pt: the disk is full.")

    monkeypatch.setattr(commands, "main", full)
    assert fails(["images"], 1, capsys) == "twinboot: can't write epoch-2.pt: the disk is full.\n"


def test_a_damaged_checkpoint_of_a_part_is_one_line(tmp_path: Path, capsys: Any) -> None:
    scratch = tmp_path / "images" / "parts" / "seed 0 twins.scratch"
    scratch.mkdir(parents=True)
    (scratch / "epoch-1.pt").write_bytes(b"PK")
    wanted = ["images", "--methods", "twins", "--epochs", "2", "--seeds", "1", "--out", str(tmp_path)]
    assert re.search(r"epoch-1\.pt is damaged.*: delete it, and the run begins anew\.$", fails(wanted, 1, capsys))
