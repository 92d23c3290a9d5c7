"""The image experiment as a whole, on the embedded digits."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from small_images import SMALL, small, with_values
from torch import Tensor

from twinboot import metrics
from twinboot.experiments import datasets, images
from twinboot.experiments.images import Config
from twinboot.experiments.images import run as images_run
from twinboot.experiments.images.config import PRESETS
from twinboot.experiments.images.methods import METHODS
from twinboot.experiments.images.run import TURNS, chosen, parts, ratios
from twinboot.experiments.images.single import Problem, Trained
from twinboot.experiments.images.twins import TRAINED, Recipe
from twinboot.experiments.images.verdicts import BASE, DRAWS, OURS, OURS_BOTH
from twinboot.experiments.report import help_of
from twinboot.experiments.runner.experiment import UnavailableError
from twinboot.experiments.runner.store import carry_out


def test_each_row_has_all_scores_for_each_seed() -> None:
    rows = small().tables["rows"]
    assert set(rows.groupby("row").size()) == {2}
    assert {BASE, OURS} <= set(rows["row"])
    measured = [*metrics.scores(torch.tensor([[0.6, 0.4], [0.7, 0.3]]), torch.tensor([0, 1])), "gap"]
    assert rows[measured].notna().all(axis=None)
    assert (rows["accuracy"] > 0.2).all()  # ten classes


def test_a_reliability_diagram_holds_all_test_images_and_its_calibration_error() -> None:
    bins, rows = small().tables["bins"], small().tables["rows"]
    for (row, seed), own in bins.groupby(["row", "seed"]):
        assert own["share"].sum() == pytest.approx(1)
        gap = (own["share"] * (own["confidence"] - own["accuracy"]).abs()).sum()
        scored = rows[(rows["row"] == row) & (rows["seed"] == seed)]["ece"].item()
        assert gap == pytest.approx(scored, abs=1e-4)


def test_sigma_is_told_for_each_layer_and_epoch_and_the_figure_and_verdicts_come_from_the_tables() -> None:
    run = small()
    sigma = run.tables["sigma"]
    layers = {"conv1_1", "conv2_1", "conv3_1", "linear1", "classifier"}
    assert set(sigma["layer"]) == layers
    assert len(sigma) == 2 * 2 * 2 * len(layers)  # methods, seeds, epochs
    drawn = images.figure(run.config, run.tables)
    assert [len(part.axes) for part in drawn.subfigs] == [4, 2, 3]
    assert [label.get_text() for label in drawn.subfigs[1].axes[1].get_xticklabels()] == list(
        dict.fromkeys(sigma["layer"])
    )
    numbers = images.numbers(run.config, run.tables)
    table = next(iter(numbers.values()))
    assert list(table.iloc[:, 0]) == list(dict.fromkeys(run.tables["rows"]["row"]))
    assert all(
        v.status == "undecided"
        for v in images.verdicts(run.config, run.tables)
        if "Sigma" not in v.claim and "classifier" not in v.claim
    )


def test_a_reliability_diagram_has_no_dot_for_a_bin_of_very_few_images() -> None:
    tables, bins = small().tables, small().tables["bins"].copy()
    own = bins["row"] == OURS
    bins.loc[own, "share"] = 0.0
    for place, share in ((3, 0.004), (9, 0.006), (14, 0.99)):
        bins.loc[own & (bins["bin"] == place), ["share", "confidence", "accuracy"]] = share, (place + 0.5) / 15, 1.0
    diagram = images.figure(SMALL, {**tables, "bins": bins}).subfigs[0].axes[2]
    dots = next(line for line in diagram.lines if line.get_marker() == "o")
    assert dots.get_xdata() == pytest.approx([9.5 / 15, 14.5 / 15])
    assert len(diagram.patches) == 15  # but its share is drawn
    assert diagram.get_ylim() == (0, 1)


def test_each_seed_has_a_dot_of_its_own_and_curves_say_of_which_images() -> None:
    drawn, rows = images.figure(SMALL, small().tables), small().tables["rows"]
    shown = rows[~rows["row"].str.endswith(", last epoch alone")]
    assert len(shown) == len(rows) - 2 * 2  # of each kind of twins, with each seed
    for axes in drawn.subfigs[2].axes:
        dots = [line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())]
        heights = [height for line in dots for height in line.get_ydata()]
        assert len(set(heights)) == len(shown)
        assert max(abs(height - round(height)) for height in heights) < 0.3  # clear of those of its neighbours
    titles = [axes.get_title() for axes in drawn.subfigs[2].axes]
    assert titles == ["Accuracy", "Negative log-likelihood", "Calibration error"]
    legend = drawn.subfigs[0].axes[0].get_legend()
    assert legend
    said = [text.get_text() for text in legend.get_texts()]
    assert "single model, its hold-out" in said
    assert "mean of the twins, out-of-bag images" in said


def test_one_seed_has_no_bar_on_its_dot_and_one_epoch_no_panel_over_the_epochs() -> None:
    def bars(tables: dict[str, pd.DataFrame]) -> int:
        axes = images.figure(SMALL, tables).subfigs[-1].axes[1]
        return sum(line.get_marker() == "None" and len(line.get_xdata()) == 2 for line in axes.lines)

    tables = dict(small().tables)
    assert bars(tables) > 0
    assert bars(tables | {"rows": tables["rows"][tables["rows"]["seed"] == 0]}) == 0
    for name in ("curves", "sigma"):
        tables[name] = tables[name][tables[name]["epoch"] == 1]
    drawn = images.figure(SMALL, tables)
    assert [len(part.axes) for part in drawn.subfigs] == [3, 1, 3]


def test_the_figure_says_what_draws_are_and_needs_no_sigma() -> None:
    def names(tables: dict[str, pd.DataFrame]) -> list[str]:
        return [label.get_text() for label in images.figure(SMALL, tables).subfigs[-1].axes[0].get_yticklabels()]

    tables = small().tables
    found = names(tables)
    assert "Twin-Boot with repeated samples, mean" in found
    assert not any(DRAWS in name for name in found)
    assert names({name: table for name, table in tables.items() if name != "sigma"}) == found


def test_the_figure_has_no_empty_panel_for_methods_that_did_not_run() -> None:
    tables = dict(small().tables)
    for name in ("rows", "bins", "curves", "sigma"):
        tables[name] = tables[name][tables[name]["method"] == "twins-draws"]
    diagrams = images.figure(SMALL, tables).subfigs[0].axes
    assert [diagram.get_title() for diagram in diagrams] == [DRAWS, f"{DRAWS}, mean"]
    assert all(diagram.patches for diagram in diagrams)


def test_reliability_is_shown_of_the_draws_and_of_the_mean_and_of_the_best_twins() -> None:
    def titles(tables: dict[str, pd.DataFrame]) -> list[str]:
        drawn = images.figure(SMALL, tables).subfigs[0].axes
        return [axes.get_title().replace("\n", " ") for axes in drawn]

    tables = dict(small().tables)
    found = titles(tables)
    assert found == ["Accuracy while training", "Single, best loss on a hold-out", "Twin-Boot", "Twin-Boot, mean"]
    for name in ("rows", "bins"):
        tables[name] = tables[name].replace({"row": {DRAWS: OURS_BOTH}})
    assert titles(tables) == [*found, "Twin-Boot with pooled gradients and dropout"]


def test_the_time_of_an_epoch_is_told() -> None:
    tables = {**small().tables}
    tables["turns"] = pd.DataFrame(
        [(kind, turn, seconds) for turn in (1, 2, 3) for kind, seconds in (("single", 2.0), ("twins", 3.0))],
        columns=["kind", "turn", "seconds"],
    )
    config = dataclasses.replace(SMALL, methods=("hold-out", "twins"))
    tables["rows"] = tables["rows"][tables["rows"]["method"].isin(config.methods)]
    [found] = [table for title, table in images.numbers(config, tables).items() if "epoch of 1347 images" in title]
    assert found.to_numpy().tolist() == [
        ["single", "1.00 (1.00 to 1.00)", "2.0"],
        ["twins", "1.50 (1.50 to 1.50)", "3.0"],
    ]


def test_each_turn_is_compared_with_itself() -> None:
    seconds = [1.0, 1.3, 2.0, 2.4, 1.0, 1.5]
    found = ratios(pd.DataFrame({"kind": ["single", "twins"] * 3, "turn": [1, 1, 2, 2, 3, 3], "seconds": seconds}))
    assert tuple(found.loc["twins"]) == pytest.approx((1.3, 1.2, 1.5))
    assert tuple(found.loc["single"]) == (1, 1, 1)


def test_an_epoch_of_each_kind_is_timed_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_run, "timed", lambda config: 128)
    ticks: list[int] = []
    config = Config(methods=("hold-out", "dropout", "twins", "twins:noise=2"))
    found = images_run._cost(config, lambda: ticks.append(1))["turns"]
    assert list(found["kind"]) == TURNS * ["single", "dropout", "twins", "twins:noise=2"]
    assert (found["seconds"] > 0).all()
    assert len(ticks) == parts(config)[-1].ticks


def test_strange_images_are_clothes_of_the_same_size_or_none() -> None:
    x = torch.randint(0, 256, (30, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(30, dtype=torch.int64)
    clothes = datasets.Images(x, y, x, y)
    config = Config(preset="cifar10-5k", data="somewhere", test=120)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images_run, "_images", lambda name, directory: clothes)
        found = images_run._strange(config)
        assert images_run._strange(SMALL) is None  # digits
    assert found is not None
    assert found.shape == (30, 3, 32, 32)
    assert torch.equal(found[:, 0, 2:-2, 2:-2], x[:, 0])
    assert images_run._strange(config) is None  # no files there


@pytest.mark.parametrize(("doubt", "expected"), [("strange", 1.0), ("usual", 0.0), ("all", 0.5)])
def test_doubt_about_strange_images_is_ranked_above_that_about_others(doubt: str, expected: float) -> None:
    usual, strange = torch.zeros(20, 1), torch.ones(30, 1)
    sure, unsure = torch.tensor([0.9, 0.1]), torch.tensor([0.5, 0.5])

    def predict(x: Tensor) -> Tensor:
        doubted = (x == {"strange": 1.0, "usual": 0.0}.get(doubt, x)).float()
        return doubted * unsure + (1 - doubted) * sure

    trained = Trained({"row": predict}, torch.arange(20), pd.DataFrame())
    problem = Problem(usual, torch.arange(20) % 2, torch.nn.Identity, epochs=1, batch=1, lr=0.1, samples=2, seed=0)
    rows, _ = images_run._scored(Config(), trained, problem, usual, problem.y, strange)
    assert rows["ood_auroc"].item() == expected


def test_curves_mark_the_epochs_with_the_lowest_loss_of_images_that_are_not_trained_on() -> None:
    tables, curves = small().tables, small().tables["curves"].copy()
    for method, losses in {"hold-out": [(1, 2), (2, 1)], "twins": [(2, 1), (2, 1)]}.items():
        for seed, values in enumerate(losses):
            curves.loc[(curves["method"] == method) & (curves["seed"] == seed), "loss"] = values
    curves.loc[(curves["method"] == "twins") & (curves["epoch"] == 2), "validation"] = 0.75
    axes = images.figure(SMALL, {**tables, "curves": curves}).subfigs[0].axes[0]
    single, twins = (line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata()))
    assert list(single.get_xdata()) == [1, 2]  # one of each seed
    assert (list(twins.get_xdata()), list(twins.get_ydata())) == ([2], [0.75])


SPARE = dataclasses.replace(SMALL, preset="cifar10-5k", spare=True)


def changed(config: Config, tables: dict[str, pd.DataFrame]) -> list[pd.DataFrame]:
    return [table for title, table in images.numbers(config, tables).items() if title.startswith("Changed settings")]


@pytest.mark.parametrize(
    ("apart", "answer"),
    [((0.1, 0.1), "worse"), ((-0.1, -0.1), "better"), ((0.1, -0.1), "no clear difference")],
)
def test_changed_settings_are_compared_on_the_same_seeds(apart: tuple[float, float], answer: str) -> None:
    rows = small().tables["rows"]
    base = rows[rows["row"] == OURS].sort_values("seed")["nll"].to_numpy()
    [table] = changed(SPARE, with_values(DRAWS, nll=tuple(base + apart)))
    assert table["than Twin-Boot"].tolist() == [answer]
    assert table[""].tolist() == [DRAWS]
    assert table["NLL"].item().startswith(f"{sum(apart) / 2:+.3f} ± ")
    assert table["lower with"].item() == f"{sum(change < 0 for change in apart)} of 2 seeds"


def test_a_matched_spread_is_compared_with_the_sigma_of_the_training_on_the_same_seeds() -> None:
    tables = with_values(OURS, nll=(0.6, 0.8))
    trained = tables["rows"][tables["rows"]["row"] == OURS].assign(row=OURS + TRAINED, nll=0.5)
    tables["rows"] = pd.concat([tables["rows"], trained])
    [found] = [t for title, t in images.numbers(SMALL, tables).items() if title.startswith("Draws with a matched")]
    assert found[""].tolist() == [OURS]
    assert found["NLL"].item() == "+0.200 ± 1.271"  # Student's t with one degree of freedom, times 0.1


def test_changed_settings_are_told_where_no_test_image_judged_them_and_there_is_something_to_compare() -> None:
    tables = small().tables
    without = {**tables, "rows": tables["rows"][~tables["rows"]["row"].str.startswith(DRAWS)]}
    assert changed(SPARE, tables)
    assert not changed(SMALL, tables)
    assert not images.verdicts(SPARE, tables)  # test images alone judge claims
    for test, number in ((None, 5000), (300, 300)):
        title = next(iter(images.numbers(dataclasses.replace(SPARE, test=test), tables)))
        assert f", {number} other images of the training files: " in title
    assert not changed(SPARE, without)
    rows = tables["rows"]
    one = {**tables, "rows": rows[rows["seed"] == 0]}
    [table] = changed(dataclasses.replace(SPARE, seeds=1), one)
    assert table["than Twin-Boot"].tolist() == ["one seed alone: not judged"]


@pytest.mark.parametrize("methods", [("hold-out", "twins"), None])
def test_set_runs_twin_boot_once_more_with_changed_settings(methods: tuple[str, ...] | None) -> None:
    config = Config(methods=methods, set=("noise=2", "kind=split"))
    name = "twins:noise=2,kind=split"
    assert chosen(config)[0] == (*(methods or PRESETS["digits"].methods), name)
    assert chosen(dataclasses.replace(config, methods=(name,)))[0] == (name,)
    assert [part.name for part in parts(config)][-2] == "seed 2 twins noise=2,kind=split"


def test_a_variant_runs_to_the_end_and_has_its_rows(tmp_path: Path) -> None:
    config = Config(methods=("twins",), set=("noise=2", "kind=split"), epochs=1, seeds=1, samples=2)
    run = carry_out("images", images, config, tmp_path / "images")
    [whole, *_] = images.numbers(config, run.tables).values()
    name = "Twin-Boot, noise=2, kind=split"
    assert {OURS, name, f"{name}, mean", f"{name}, calibrated"} <= set(whole[""])
    assert set(run.tables["turns"]["kind"]) == {"single", "twins", "twins:noise=2,kind=split"}
    images.figure(config, run.tables)


def beats(tables: dict[str, pd.DataFrame]) -> "pd.Series[str]":
    [title, *_], [table, *_] = zip(*images.numbers(SMALL, tables).items(), strict=True)
    assert "2 seeds; clearly: the 95 % interval of the difference on the same seeds leaves 0 out" in title
    return table.set_index("")["clearly beats Twin-Boot in"]


def test_a_row_that_clearly_beats_twin_boot_is_marked_as_such() -> None:
    ours = small().tables["rows"].set_index("row").loc[OURS]
    lower = tuple(ours["nll"] - 0.1), tuple(ours["accuracy"] - 0.1)  # by as much with each seed
    found = beats(with_values(BASE, nll=lower[0], accuracy=lower[1]))
    assert "NLL" in found[BASE]
    assert "accuracy" not in found[BASE]
    assert found[OURS] == ""


def test_a_better_mean_alone_is_no_clear_lead() -> None:
    first, second = small().tables["rows"].set_index("row").loc[OURS, "nll"]
    assert "NLL" not in beats(with_values(BASE, nll=(first - 1.0, second + 0.1)))[BASE]


def test_one_seed_tells_of_no_lead() -> None:
    config = dataclasses.replace(SMALL, seeds=1)
    rows = small().tables["rows"]
    tables = {**small().tables, "rows": rows[rows["seed"] == 0]}
    [title, *_], [table, *_] = zip(*images.numbers(config, tables).items(), strict=True)
    assert title.endswith(": one seed")
    assert "clearly beats Twin-Boot in" not in table


def test_standard_errors_are_those_of_the_seeds_for_digits_too() -> None:
    run = small()
    rows = run.tables["rows"].copy()
    rows.loc[rows["row"] == OURS, "nll"] = [0.5, 0.7]  # less what follows: a mean of 0.6, a standard error of 0.1
    rows.loc[rows["row"] == DRAWS, "nll"] = 0.0
    verdicts = images.verdicts(run.config, {**run.tables, "rows": rows})
    assert any("NLL +0.600 ± 0.100" in verdict.evidence for verdict in verdicts)


def test_presets_and_overrides() -> None:
    assert chosen(Config()) == (PRESETS["digits"].methods, PRESETS["digits"].epochs, PRESETS["digits"].seeds)
    assert chosen(SMALL) == (SMALL.methods, 2, 2)
    assert PRESETS["cifar10"].normalisation == "weight"  # Appendix A.4
    assert PRESETS["cifar10"].width == 1
    assert [part.name for part in parts(SMALL)][:2] == ["seed 0 hold-out", "seed 1 hold-out"]
    assert parts(SMALL)[-1].name == "cost"


def test_without_torchmetrics_nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinboot.experiments.images.run.find_spec", lambda name: name != "torchmetrics")
    with pytest.raises(UnavailableError, match="images need torchmetrics: pip install"):
        parts(Config())


def test_ivon_that_is_not_installed_is_left_out_with_a_line_and_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    preset = dataclasses.replace(PRESETS["digits"], methods=("hold-out", "ivon", "twins", "twins-draws"))
    monkeypatch.setitem(PRESETS, "digits", preset)
    monkeypatch.setattr("twinboot.experiments.images.run.find_spec", lambda name: name != "ivon")
    for _ in range(2):  # the command line asks for the parts twice
        assert not any("ivon" in part.name for part in parts(Config()))
    assert capsys.readouterr().err == (
        'twinboot: left out: the method ivon needs ivon-opt: pip install "twinboot[compare]"\n'
    )
    parts(Config(methods=("twins",)))  # who asked for others misses nothing
    assert capsys.readouterr().err == ""
    told = {config.methods: next(iter(images.numbers(config, small().tables))) for config in (Config(), SMALL)}
    assert told[None].endswith("; ivon was not run")
    assert "not run" not in told[SMALL.methods]


def test_a_preset_of_files_says_where_they_should_be(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="the preset cifar10-5k needs files of cifar10: give --data") as told:
        parts(Config(preset="cifar10-5k"))
    assert "cifar-10-binary.tar.gz, as it is or unpacked (data_batch_1.bin" in str(told.value)
    with pytest.raises(UnavailableError, match="holds no files of cifar10"):
        parts(Config(preset="cifar10-5k", data=str(tmp_path)))


def test_the_help_names_the_methods_of_the_presets_and_the_settings_of_twins() -> None:
    told = " ".join(help_of(Config)["methods"].split())
    assert {name for preset in PRESETS.values() for name in preset.methods} <= set(re.findall(r"[a-z-]+[a-z]", told))
    settings = re.findall(r"[a-z]+", help_of(Config)["set"])
    assert {field.name for field in dataclasses.fields(Recipe)} <= set(settings)
    assert told.endswith("digits has {}, {}, {} and {}.".format(*PRESETS["digits"].methods))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"preset": "imagenet"}, "unknown preset 'imagenet': use digits, cifar10-5k"),
        ({"methods": ("twin",)}, "unknown method 'twin': use hold-out"),
        ({"methods": ("twins", "twins")}, "none twice"),
        ({"methods": ()}, "methods must have at least one value"),
        ({"methods": ("twins:nois=2",)}, "twins have no setting 'nois': use one of mode"),
        ({"set": ("noise=-1",)}, "noise must be from 0 to 100, not -1.0"),
        ({"set": ("noise", "2")}, "'noise' has no value: write NAME=VALUE for each setting, such as noise=2"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"samples": 1}, "samples must be at least 2"),
        ({"test": 10}, "test must be at least 100"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"spare": True}, "spare images need a preset that leaves some, such as cifar10-5k, not digits"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(Config(), **change)


def test_fewer_test_images_are_judged_and_named(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, test=110, seeds=1, epochs=1, methods=("hold-out", "twins"))
    run = carry_out("images", images, config, tmp_path / "images")
    right = run.tables["rows"]["accuracy"] * 110
    assert right.to_list() == pytest.approx(right.round().to_list(), abs=1e-4)
    assert "the first 110 test images" in next(iter(images.numbers(config, run.tables)))


def test_spare_images_are_of_the_training_files_and_nothing_trains_on_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    x = torch.zeros(6200, 3, 1, 1, dtype=torch.uint8)
    x[:, :2, 0, 0] = torch.stack([torch.arange(6200) // 256, torch.arange(6200) % 256], 1).to(torch.uint8)
    data = datasets.Images(x, torch.arange(6200) % 10, x[:100], torch.zeros(100, dtype=torch.int64))
    monkeypatch.setattr(images_run, "_images", lambda name, directory: data)
    for number in (0, 1):
        config = Config(preset="cifar10-5k", spare=True, data="somewhere")
        problem, moments = images_run._problem(config, number)
        judges, labels = images_run._test_images(config, number)
        both = [
            {tuple(row) for row in part.flatten(1).tolist()}
            for part in (problem.x, datasets.standardised(judges, moments))
        ]
        assert [len(part) for part in both] == [5000, 1200]
        assert not both[0] & both[1]
        assert labels.tolist() == [(int(a) * 256 + int(b)) % 10 for a, b in judges[:, :2, 0, 0]]
        assert len(images_run._test_images(dataclasses.replace(config, test=300), number)[1]) == 300
    assert len(images_run._test_images(dataclasses.replace(config, spare=False), 0)[1]) == 100
    judged: list[Tensor] = []

    def predict(x: Tensor) -> Tensor:
        judged.append(x)
        return torch.full((len(x), 10), 0.1)

    stub = Trained({"row": predict}, torch.arange(100), pd.DataFrame({"seconds": [1.0]}))
    method = dataclasses.replace(METHODS["twins"], train=lambda problem, scratch, tick: stub)
    monkeypatch.setitem(METHODS, "twins", method)
    monkeypatch.setattr(images_run, "_strange", lambda config: None)
    for number in (0, 1):
        images_run._run(config, "twins", number, lambda: None, tmp_path)
        expected = datasets.standardised(
            images_run._test_images(config, number)[0], images_run._problem(config, number)[1]
        )
        assert any(torch.equal(x, expected) for x in judged)
        judged.clear()
    monkeypatch.setattr(images_run, "SPARE", 700)
    assert len(images_run._test_images(config, 0)[1]) == 700
    with pytest.raises(UnavailableError, match="there are 1200 spare images: test can't be 1300"):
        images_run._require(dataclasses.replace(config, test=1300))


def test_more_test_images_than_there_are_are_refused() -> None:
    with pytest.raises(UnavailableError, match="there are 450 test images: test can't be 500"):
        parts(Config(test=500))


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(UnavailableError, match="the device 'nowhere' can't be used"):
        parts(Config(device="nowhere"))
