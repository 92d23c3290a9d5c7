import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

from twinboot import invert
from twinboot.experiments import cli, commands, fwi, plots
from twinboot.experiments.fwi import METHODS, Config, Problem, by_adam, truth
from twinboot.experiments.fwi.survey import places
from twinboot.experiments.runner.experiment import UnavailableError, command
from twinboot.experiments.runner.store import RunError, carry_out, load

TINY = Config(shots=8, receivers=10, duration=0.48, steps=2, check=1, first_reset=1, prior_steps=2, rounds=1, seeds=1)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A file of 20 x 30 velocities."""
    np.savez(path := tmp_path / "model.npz", velocity=np.linspace(1500, 3000, 600, dtype=np.float32).reshape(20, 30))
    return str(path)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(TINY, truth(TINY), 0)


def runs(
    errors: dict[str, list[float]], correlation: list[float], depth: float = 0.2, covered: float = 0.5
) -> pd.DataFrame:
    """A table of runs with these errors of each method and these correlations of sigma with the error."""
    rows = [
        {"run": run, "method": method, "start": 200.0, "error": error, "step": 60, "unused": 2, "sigma": 50.0}
        | {"correlation": correlation[run], "depth": depth, "covered": covered, "seconds": 10.0}
        for method, found in errors.items()
        for run, error in enumerate(found)
    ]
    return pd.DataFrame(rows)


def test_files_that_are_none_are_refused(tmp_path: Path, model: str, capsys: Any) -> None:
    (tmp_path / "text.npz").write_text("velocity")
    np.savez(tmp_path / "two.npz", a=np.ones(2), b=np.ones(2))
    for name, said in (("nowhere.npz", "No such file"), ("text.npz", "plain numbers"), ("two.npz", "holds 2 arrays")):
        assert cli.main(["fwi", "--model", str(tmp_path / name), "--out", str(tmp_path / "out")]) == 2
        assert said in (found := capsys.readouterr().err)
        assert found.count("\n") == 1
    for flags, said in (
        (["--window", "0", "0", "30", "30"], "does not lie in the 20 x 30 cells"),
        (["--window", "0", "0", "0", "30"], "too few"),
        (["--bounds", "1000", "2000"], "set bounds that contain them"),
        (["--receivers", "40"], "places"),
        (["--frequency", "9"], "six cells"),
    ):
        assert cli.main(["fwi", "--model", model, *flags, "--out", str(tmp_path / "out")]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shots": 7}, "shots must be at least 8"),
        ({"noise": -1}, "noise must be at least 0"),
        ({"spacing": math.nan}, "spacing must be above 0"),
        ({"bounds": (3000.0, 2000.0)}, "the lower one first"),
        ({"coarsen": 2, "frequency": 1.0}, "name it with --model"),
        ({"seeds": 0}, "seeds must be at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Config(**change)


def test_another_file_under_the_same_name_is_noticed(model: str, tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, model=model)
    assert len(config.checksum) == 64
    assert f"--model {model} --checksum {config.checksum}" in command("fwi", fwi, config)
    run = carry_out("fwi", fwi, config, tmp_path / "run")
    np.savez(model, velocity=np.full((20, 30), 2000.0))
    with pytest.raises(ValueError, match="was it changed"):
        fwi.parts(config)
    with pytest.raises(RunError, match="holds a run with checksum"):
        carry_out("fwi", fwi, dataclasses.replace(config, checksum=""), tmp_path / "run")
    Path(model).unlink()
    assert load(tmp_path / "run", {"fwi": fwi}).config == run.config  # a finished run needs its file no more


def test_without_deepwave_the_run_names_the_extra_and_reproduce_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "deepwave", None)
    with pytest.raises(UnavailableError, match=r'pip install "twinboot\[seismic\]"'):
        fwi.parts(TINY)
    assert cli.main(["fwi", "--quick", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    import toy

    monkeypatch.setattr(commands, "EXPERIMENTS", {"fwi": fwi, "toy": toy})
    assert cli.main(["reproduce", "--quick", "--out", str(tmp_path)]) == 0
    assert "left out: fwi needs deepwave" in capsys.readouterr().err
    assert (tmp_path / "report.html").exists()


def test_the_survey_records_each_shot_and_has_a_derivative(problem: Problem) -> None:
    field = torch.zeros_like(problem.truth, requires_grad=True)
    recorded = problem.forward()(field)
    assert recorded.shape == problem.observed.shape == (8, 10, 120)
    [gradient] = torch.autograd.grad(recorded.square().sum(), field)
    assert gradient.isfinite().all()
    assert (gradient != 0).float().mean() > 0.9
    some = torch.tensor([5, 2])
    assert torch.equal(problem.forward().rows(some)(field.detach()), recorded.detach()[some])


def test_the_derivative_is_that_of_finite_differences(problem: Problem) -> None:
    """To first order in a change of 20 m/s, of some hundred cells in the middle."""
    change = torch.zeros_like(problem.truth)
    change[4:10, 15:35] = 0.01
    field = torch.zeros_like(change, requires_grad=True)
    [gradient] = torch.autograd.grad((problem.forward()(field) - problem.observed).square().sum(), field)
    with torch.no_grad():
        up, down = ((problem.forward()(s * change) - problem.observed).square().sum() for s in (1, -1))
    assert ((up - down) / 2).item() == pytest.approx((gradient * change).sum().item(), rel=0.02)


def test_waves_are_not_faster_than_the_medium(problem: Problem) -> None:
    """The first shot, at the left edge, has not reached the right edge before distance / velocity has passed."""
    recorded = problem.survey.record(torch.full_like(problem.truth, 2000.0))[0]
    distance = places(TINY.receivers, 50) - 1
    loud = recorded.abs() > 1e-3 * recorded.abs().max()
    for way, heard in zip(distance.tolist()[1:], loud[1:], strict=True):
        first = heard.int().argmax().item() * TINY.interval if heard.any() else math.inf
        assert first >= way * TINY.cell / 2000


def test_noise_has_the_stated_share_of_the_records(problem: Problem) -> None:
    clean = problem.survey.record(problem.truth)
    share = (problem.observed - clean).square().mean().sqrt() / clean.square().mean().sqrt()
    assert share.item() == pytest.approx(TINY.noise, rel=4 / math.sqrt(2 * clean.numel()))


def test_shots_are_drawn_whole_and_unseen_ones_carry_no_weight(problem: Problem) -> None:
    """Other records of the unseen shots change nothing in what the twins learn."""
    bootstrap = problem.bootstrap()
    assert bootstrap.n == TINY.shots
    assert len(bootstrap.unseen) >= 2
    other = problem.observed.clone()
    other[bootstrap.unseen] *= -1
    fields = [
        invert(
            problem.forward(), observed, torch.zeros_like(problem.truth), steps=2, stop=None, bootstrap=bootstrap
        ).field
        for observed in (problem.observed, other)
    ]
    assert torch.equal(*fields)
    assert bool(fields[0].any())


def test_held_out_shots_decide_the_step_and_nothing_else(problem: Problem) -> None:
    to_the_end = by_adam(problem, lambda: None, hold_out=False)
    stopped = by_adam(problem, lambda: None, hold_out=True)
    assert (to_the_end.unused, to_the_end.step) == (0, TINY.steps)
    assert stopped.unused == 1
    assert 1 <= stopped.step <= TINY.steps


def test_a_run_from_end_to_end(tmp_path: Path) -> None:
    ticks = []
    run = carry_out("fwi", fwi, TINY, tmp_path, lambda part: lambda: ticks.append(part.name))
    assert len(ticks) == sum(part.ticks for part in fwi.parts(TINY))
    assert list(run.tables["runs"]["method"]) == list(METHODS)
    assert len(run.tables["maps"]) == 20 * 50
    assert (run.tables["maps"]["centered sigma"] > 0).mean() > 0.5  # so short a record says nothing of the bottom
    [shown] = fwi.numbers(TINY, run.tables).values()
    assert list(shown["method"]) == list(METHODS.values())
    assert [verdict.status for verdict in fwi.verdicts(TINY, run.tables)] == ["undecided"] * 3  # of one run
    assert isinstance(fwi.figure(TINY, run.tables), Figure)
    [legend] = fwi.figure(TINY, run.tables).legends
    said = {text.get_text() for text in legend.get_texts()}
    assert said == {"shot", "receiver", "error of a run of Adam", "of Twin-Boot"}  # one run has no mean
    assert plots.save(lambda: fwi.figure(TINY, run.tables), tmp_path).exists()


@pytest.mark.parametrize(
    ("correlation", "depth", "status"),
    [
        ([0.5, 0.52, 0.48], 0.2, "held"),
        ([0.5, 0.52, 0.48], 0.6, "partly"),  # no better than to distrust what is deep
        ([0.5, -0.5, 0.1], -0.6, "not held"),
    ],
)
def test_sigma_must_say_more_than_depth(correlation: list[float], depth: float, status: str) -> None:
    errors = {method: [100.0, 101.0, 99.0] for method in METHODS}
    tables = {"runs": runs(errors, correlation, depth)}
    assert fwi.verdicts(Config(seeds=3), tables)[0].status == status


@pytest.mark.parametrize(
    ("centered", "status"),
    [([90.0, 91.0, 89.5], "held"), ([95.0, 96.0, 94.5], "partly"), ([100.0, 90.0, 110.0], "not held")],
)
def test_a_lower_error_is_asked_against_both_ways_of_stopping(centered: list[float], status: str) -> None:
    errors = {"standard": [100.0, 101.0, 99.0], "held out": [94.0, 95.0, 93.0], "mean": centered, "centered": centered}
    errors["prior"] = centered
    tables = {"runs": runs(errors, [0.5, 0.5, 0.5])}
    assert fwi.verdicts(Config(seeds=3), tables)[1].status == status


@pytest.mark.parametrize(
    ("prior", "covered", "status"),
    [(90.0, 0.9, "held"), (90.0, 0.5, "partly"), (100.0, 0.9, "partly"), (100.0, 0.99, "not held")],
)
def test_a_prior_must_lower_the_error_and_hold_the_truth(prior: float, covered: float, status: str) -> None:
    errors = {method: [100.0, 101.0, 99.0] for method in METHODS} | {"prior": [prior, prior + 1, prior - 0.5]}
    tables = {"runs": runs(errors, [0.5, 0.5, 0.5], covered=covered)}
    assert fwi.verdicts(Config(seeds=3), tables)[2].status == status


def test_with_a_prior_no_shot_is_left_out_and_every_cell_has_a_sigma(problem: Problem) -> None:
    """So short a record says nothing of the bottom, where the prior alone gives sigma."""
    found = fwi.by_prior(problem)
    assert found.unused == 0
    assert found.sigma is not None
    assert bool((found.sigma > 0).all())
