import io
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("peft", reason="needs the extra huggingface")

from twinboot.experiments import text
from twinboot.experiments.registry import EXPERIMENTS
from twinboot.experiments.runner.experiment import UnavailableError
from twinboot.experiments.runner.store import Run, carry_out
from twinboot.experiments.text.config import Config
from twinboot.experiments.text.verdicts import in_short, judge

SMALL = Config(
    preset="toy",
    labels=(6, 4),
    methods=("lora", "ensemble", "laplace", "error_bars"),
    few=("lora", "error_bars"),
    seeds=2,
    epochs=2,
    lr=0.02,
    samples=2,
    queries=20,
    strange=20,
)
FEW = ["LoRA", "error_bars"]  # the first row of each
ALL = [
    *("LoRA", "LoRA, 1.4 times the epochs", "ensemble of 2", "ensemble of 5"),
    *("Laplace, last layer", "Laplace, prior by a hold-out", "error_bars", "error_bars, sigma"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return carry_out("text", text, SMALL, tmp_path_factory.mktemp("text") / "run")


def test_it_is_registered_and_quick_needs_no_files() -> None:
    assert EXPERIMENTS["text"] is text
    assert text.QUICK.preset == "toy"


def test_all_methods_run_on_the_first_number_of_labels_and_few_rows_on_the_others(run: Run) -> None:
    runs = run.tables["runs"]
    for labels, methods in zip((6, 4), (ALL, FEW), strict=True):
        own = runs[runs["labels"] == labels]
        assert own["method"].value_counts().to_dict() == dict.fromkeys(methods, 2)
    assert "choices" not in run.tables  # the toy's settings were not chosen


def test_numbers_verdicts_and_figure_show_every_method(run: Run) -> None:
    shown = text.numbers(SMALL, run.tables)
    assert [table[""].tolist() for table in shown.values()] == [ALL, FEW]
    for table in shown.values():
        assert not table.astype(str).apply(lambda column: column.str.contains("nan")).any(axis=None)
    assert {verdict.status for verdict in text.verdicts(SMALL, run.tables)} == {"undecided"}
    drawn = text.figure(SMALL, run.tables)
    drawn.savefig(io.BytesIO(), format="png")
    for axes, methods in zip(drawn.axes[::3], (ALL, FEW), strict=True):
        named = [label.get_text().rpartition("  ")[0] for label in axes.get_yticklabels()]
        assert sorted(named) == sorted(methods)
        costs = [float(label.get_text().rpartition("  ")[2]) for label in axes.get_yticklabels()]
        assert costs == sorted(costs)


def test_a_plain_adapter_costs_one(run: Run) -> None:
    runs = text.with_cost(run.tables["runs"])
    assert runs[runs["method"] == "LoRA"].groupby("labels")["cost"].mean().to_list() == pytest.approx([1, 1])
    assert (runs[runs["method"] == "ensemble of 5"]["cost"] > 2).all()


FIVE = replace(SMALL, preset="clinc150", labels=(6,))


def five_seeds(run: Run, **changes: float) -> pd.DataFrame:
    """Five seeds of all methods, if error_bars' scores were better by so much."""
    runs = text.with_cost(run.tables["runs"])
    runs = runs[(runs["labels"] == 6) & (runs["seed"] == 0)]
    rows = [runs.assign(seed=k, nll=1 + 0.001 * (k % 2), ece=0.1, ood_entropy=0.7, cost=1.0) for k in range(5)]
    for table in rows:
        for score, gain in changes.items():
            table.loc[table["method"] == "error_bars", score] += gain
    return pd.concat(rows)


def test_verdicts_follow_the_differences(run: Run) -> None:
    def statuses(**changes: float) -> list[str]:
        return [verdict.status for verdict in judge(five_seeds(run, **changes), FIVE)]

    assert statuses(nll=-0.2, ece=-0.05, ood_entropy=0.1) == ["held", "held", "held"]
    assert statuses(nll=-0.2) == ["partly", "held", "held"]
    assert statuses() == ["not held", "held", "held"]
    assert statuses(cost=1.0) == ["not held", "held", "held"]  # error_bars, sigma is as good here, and cheap


def test_the_first_sentences_name_the_winners(run: Run) -> None:
    def winners(**changes: float) -> list[str]:
        return re.findall(r"\): (?:a )?(rival|no|Twin-Boot) ", in_short(five_seeds(run, **changes), FIVE))

    assert winners() == ["no", "no", "no"]
    assert winners(nll=-0.2, ood_entropy=0.1) == ["Twin-Boot", "no", "Twin-Boot"]
    rivals = five_seeds(run)
    rivals.loc[rivals["method"] == "ensemble of 5", ["nll", "cost"]] = 0.5, 5.0
    said = in_short(rivals, FIVE)
    assert said.startswith(
        "Likelihood (NLL, lower is better): a rival wins. “ensemble of 5” has 0.500 at 5.00 times LoRA"
    )
    assert in_short(rivals[rivals["method"] != "LoRA"], FIVE)  # a plain adapter is not needed
    assert not in_short(rivals[rivals["method"].str.startswith("error_bars")], FIVE)
    assert text.in_words(SMALL, run.tables).count("is better): ") == 3


def test_what_is_missing_is_said_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="the preset clinc150 needs --data DIRECTORY, with clinc150_small"):
        text.parts(Config())
    with pytest.raises(UnavailableError, match="needs --model DIRECTORY, with a Hugging Face encoder"):
        text.parts(Config(data=str(tmp_path)))
    with pytest.raises(ValueError, match="there is no directory"):
        text.parts(Config(data=str(tmp_path / "nowhere"), model=str(tmp_path)))
    with pytest.raises(ValueError, match="has no file clinc150_small"):
        text.parts(Config(data=str(tmp_path), model=str(tmp_path)))
    with pytest.raises(ValueError, match="labels can't be 41"):
        text.parts(replace(SMALL, labels=(41,)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"labels": (1,)}, "labels must be at least 2 for each intent, not 1"),
        ({"labels": (5, 5)}, "labels must have at least one value and none twice"),
        ({"methods": ("lora", "bert")}, "unknown method 'bert': use lora"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"seeds": 0}, "seeds must be at least 1"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(SMALL, **change)  # type: ignore[arg-type]
