"""The code in the README and in the docs runs as printed, and their numbers are those of the generated pages."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import classes, mlp
from torch.utils.data import DataLoader, TensorDataset

import twinboot
from twinboot import error_bars, fit, invert

ROOT = Path(__file__).parents[1]
README = "README.md"
RUN = {  # the number of Python blocks in each page; each is run by a test below
    README: 8,
    "docs/index.md": 1,
    "docs/quickstart.md": 4,
    "docs/loop.md": 7,
    "docs/fit.md": 2,
    "docs/error-bars.md": 1,
    "docs/standard-errors.md": 1,
    "docs/sigma.md": 2,
    "docs/intervals.md": 1,
    "docs/scikit-learn.md": 1,
    "docs/lightning.md": 1,
    "docs/huggingface.md": 2,
    "docs/text.md": 4,
    "docs/serving.md": 1,
    "docs/inverse.md": 1,
}


def text(page: str) -> str:
    return (ROOT / page).read_text()


def results() -> str:
    """All pages of docs/results."""
    return "".join(page.read_text() for page in sorted((ROOT / "docs/results").glob("*.md")))


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text(page), re.DOTALL)


def cells(line: str) -> list[str]:
    """Those of a row of a table."""
    return [cell.strip() for cell in line.split("|")[1:-1]]


def block_with(page: str, word: str) -> str:
    [found] = [block for block in blocks(page) if word in block]
    return found


def one_side(diff: str, drop: str) -> str:
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(drop))


def scope() -> dict[str, Any]:
    data = classes(150)
    return {"torch": torch, "F": F, "DataLoader": DataLoader, "dataset": data, "model": mlp(), "epochs": 2}


def after_the_loop() -> dict[str, Any]:
    names = scope()
    exec(one_side(blocks(README, "diff")[0], drop="-"), names)
    return names | {"x": names["dataset"].tensors[0]}


def test_the_readme_is_at_most_8000_bytes() -> None:
    assert (ROOT / README).stat().st_size <= 8000


def test_no_block_of_code_is_left_out() -> None:
    pages = [README, *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
    assert {page: len(blocks(page)) for page in pages if blocks(page)} == RUN
    assert [page for page in pages if blocks(page, "diff")] == [README]


def test_both_sides_of_the_diff_run() -> None:
    [diff] = blocks(README, "diff")
    exec(one_side(diff, drop="+"), scope())
    names = scope()
    exec(one_side(diff, drop="-"), names)
    assert all(sigma > 0 for sigma in names["twins"].sigma.values())


def test_the_three_lines_after_the_diff_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    names = after_the_loop()
    exec(block_with(README, "twins.estimate()"), names)
    assert names["prediction"].probs.shape[0] == len(names["dataset"])
    assert (tmp_path / "estimate.safetensors").exists()


def test_the_snippet_for_fit_in_the_readme_runs(monkeypatch: Any) -> None:
    monkeypatch.setattr(twinboot, "fit", partial(fit, progress=False))
    names = scope()
    names["x"] = names["dataset"].tensors[0]
    exec(block_with(README, "import fit"), names)
    assert len(names["found"].bootstrap.unseen) > 0


@pytest.mark.parametrize("page", [README, "docs/index.md"])
def test_the_first_snippet_for_error_bars_runs(page: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(twinboot, "error_bars", partial(error_bars, progress=False))
    names = scope()
    x = names["x"] = names["dataset"].tensors[0]
    exec(block_with(page, "import error_bars"), names)
    assert torch.equal(names["estimate"](x), names["model"](x))
    assert (names["prediction"].std > 0).all()


def test_the_quickstart_runs_and_small_error_bars_mean_right_answers(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(twinboot, "error_bars", partial(error_bars, progress=False))
    names: dict[str, Any] = {}
    for block in blocks("docs/quickstart.md"):
        exec(block, names)
    small, large = (float(number) for number in re.findall(r"accuracy ([\d.]+)", capsys.readouterr().out))
    assert small > 0.95  # nearly all
    assert large < 0.8  # many are wrong
    assert torch.equal(names["estimate"].module(names["x"]), names["model"](names["x"]))


def test_the_snippet_for_serving_runs(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    names = after_the_loop()
    names["estimate"] = names["twins"].estimate()
    names["estimate"].task = "classification"
    exec(block_with("docs/serving.md", "Estimate.load"), names)
    assert type(names["plain"]) is type(names["model"])
    assert names["labels"].shape == names["prediction"].labels.shape
    assert (tmp_path / "weights.pt").exists()


def test_the_snippet_for_error_bars_runs(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(twinboot, "error_bars", partial(error_bars, progress=False))
    names = scope()
    x = names["x"] = names["dataset"].tensors[0]
    exec(blocks("docs/error-bars.md")[0], names)
    assert (tmp_path / "bars").is_dir()
    assert len(names["estimate"].members) == 6
    assert torch.equal(names["estimate"](x), names["model"](x))
    assert (names["prediction"].std > 0).all()


def test_the_line_on_standard_errors_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    names = {"model": torch.nn.Linear(2, 1), "dataset": torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())}
    exec(block_with(README, "import standard_errors"), names)
    assert "weight[0, 1]" in capsys.readouterr().out


def test_the_snippet_for_standard_errors_runs_and_gives_the_table_of_the_page(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names: dict[str, Any] = {}
    exec(blocks("docs/standard-errors.md")[0], names)
    [table] = re.findall(r"```\n( +estimate.*?)```", text("docs/standard-errors.md"), re.DOTALL)
    assert capsys.readouterr().out == table
    assert names["low"]["rate"] < names["found"].estimate["rate"] < names["high"]["rate"]
    assert names["curves"].shape == (len(names["found"].draws), 60)


def test_the_snippets_for_a_loop_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    whole, predict, weighted, divided, pooled, stacked, resume = blocks("docs/loop.md")
    names = scope()
    exec(whole, names)
    names["x"] = names["dataset"].tensors[0]
    exec(predict, names)
    assert (tmp_path / "estimate.safetensors").exists()
    assert (names["low"] < names["high"]).all()

    loader = names["PairedLoader"](names["dataset"], names["bootstrap"], batch_size=64, resample="counts")
    exec(weighted, names | {"pair": next(iter(loader))})

    halves = dict(names)
    exec(divided, halves)
    assert set(halves["bootstrap"].counts.sum(0).tolist()) == {0, 1}
    assert len(next(iter(halves["loader"]))) == 2
    torch.testing.assert_close(halves["estimate"].partition.sigma, names["twins"].partition.sigma / 2**0.5)

    monkeypatch.setattr(twinboot, "fit", partial(fit, progress=False))
    exec(pooled, learning := dict(names))
    assert learning["found"].estimate.scale == 2.4
    assert len(learning["found"].bootstrap.unseen) == 0

    together = names["Twins"](names["model"], stacked=True)
    exec(stacked, names | {"twins": together, "pair": next(iter(names["loader"]))})
    assert all(p.grad is not None for p in together.parameters())

    exec(
        resume + "    done.append(epoch)",
        names | {"path": tmp_path / "checkpoint.pt", "epochs": 4, "done": (done := [])},
    )
    assert done == [3, 4]


def test_the_snippets_for_a_control_run(monkeypatch: Any) -> None:
    monkeypatch.setattr(twinboot, "fit", partial(fit, progress=False))
    whole, loop = blocks("docs/sigma.md")
    names = scope()
    exec(whole, names)
    assert {name: len(values) for name, values in names["shares"].items()} == {"data_share/0": 30, "data_share/2": 30}
    exec(loop, names)
    assert names["twins"].data_share().keys() == {"0", "2"}


@pytest.mark.filterwarnings("ignore:these samples are predicted best without weight noise")  # they are few
def test_the_snippets_for_fit_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(twinboot, "fit", partial(fit, progress=False))
    whole, everything = blocks("docs/fit.md")
    names = scope()
    names["x"] = names["dataset"].tensors[0]
    exec(whole, names)
    assert (tmp_path / "run").is_dir()
    assert 0 < names["nll"] < 10
    exec(everything, names)
    assert names["final"].best_epoch == names["found"].best_epoch
    assert names["final"].estimate.scale == names["found"].estimate.scale


def test_the_snippet_for_intervals_runs(monkeypatch: Any) -> None:
    monkeypatch.setattr(twinboot, "fit", partial(fit, progress=False, epochs=2))
    names = scope()
    x = names["x"] = names["dataset"].tensors[0]
    names |= {"line": torch.nn.Linear(4, 1), "measurements": TensorDataset(x, x[:, :1])}
    exec(blocks("docs/intervals.md")[0], names)
    assert (names["low"] < names["high"]).all()
    assert names["prediction"].df is not None


@pytest.mark.parametrize("page", [README, "docs/inverse.md"])
def test_the_snippet_for_inverse_problems_runs(page: str, monkeypatch: Any) -> None:
    kernel = torch.randn(50, 900, generator=torch.Generator().manual_seed(0))
    names = {"torch": torch, "operator": lambda field: kernel @ field.flatten(), "measurements": kernel.mean(1)}
    monkeypatch.setattr(twinboot, "invert", partial(invert, steps=5))
    exec(block_with(page, "import GaussianProcess, invert"), names)
    assert names["found"].field.shape == (30, 30)


@pytest.mark.parametrize("page", [README, "docs/scikit-learn.md"])
def test_the_snippet_for_scikit_learn_runs(page: str) -> None:
    pytest.importorskip("sklearn", reason="the extra sklearn is not installed")
    x = torch.randn(300, 2, generator=torch.Generator().manual_seed(0)).numpy()
    names = {"X": x[:200], "y": x[:200].sum(1), "X_new": x[200:]}
    exec(block_with(page, "TwinBootRegressor"), names)
    assert (names["low"] < names["high"]).all()
    if page != README:
        assert (names["std"] > 0).all()
        assert (names["low"] < names["mean"]).all()
        assert (names["mean"] < names["high"]).all()


def test_the_results_are_those_of_the_generated_pages() -> None:
    told = text("docs/experiments.md")
    numbers = re.findall(r"[-+]?[\d.]+(?: %)? ± [\d.]*\d(?: %)?", told)
    assert len(numbers) > 60
    known = results() + text("docs/ablations.md") + text("docs/adapter-truth.md")
    assert [number for number in numbers if number.replace(" %", "%") not in known] == []
    for whose, row in (("the paper", "the paper's"), ("our own", "our own")):
        counts = "".join(re.findall(rf"- Claims of {whose}: (.*)", results()))
        statuses = ("held", "partly", "not held", "undecided")
        sums = [str(sum(map(int, re.findall(rf"(\d+) {status}", counts)))) for status in statuses]
        assert "| " + " | ".join([row, *sums]) + " |" in told


POOLED = "Twin-Boot with pooled gradients"
LABELS = {  # in the table for readers: in docs/results
    "Twin-Boot, with counts (default of `fit`)": "Twin-Boot",
    "Twin-Boot, with repeated samples": "Twin-Boot with draws",
    POOLED: POOLED,
    f"{POOLED} and dropout": f"{POOLED} and dropout",
    "the same, 23 epochs instead of 24": f"{POOLED} and dropout, 0.958 times as long",
    "single model with a hold-out": "single, best loss on a hold-out",
    "the same with a temperature": "single, best loss, temperature by the hold-out",
    "single model with a hold-out and weight averaging": "single, averaged, best loss on a hold-out",
    "ensemble of two": "ensemble of 2",
    "SWA": "SWA",
    "MC dropout": "MC dropout",
    "IVON": "IVON",
    "MC dropout with weight averaging": "MC dropout, averaged",
    "the same, 1.4 times as long": "MC dropout, averaged, 1.4 times as long",
}


def test_the_results_on_images_are_those_of_the_generated_page() -> None:
    page = text("docs/experiments.md")
    [told] = re.findall(r"\n(\| \| accuracy \| NLL \| ECE \| time \|\n.*?)\n\n", page, re.DOTALL)
    rows = [cells(line) for line in told.splitlines()[2:]]
    [table] = re.findall(r"\ncifar10-5k, .*?\n\n(.*?)\n\n", text("docs/results/images-cifar10-5k.md"), re.DOTALL)
    found = {line.split(" | ")[0]: line.split(" | ") for line in table.splitlines()}
    assert [label for label, *_ in rows] == list(LABELS)
    for label, *numbers in rows:
        row = found[f"| {LABELS[label]}"]
        assert [row[1], row[2], row[4], row[-2]] == numbers


def test_the_limits_are_those_of_the_generated_page() -> None:
    rows = re.findall(r"^\| (.*) \| ([\d.]+ ± [\d.]+) \|$", text("docs/limits.md"), re.MULTILINE)
    assert len(rows) == 3  # the AUROC of out-of-distribution images
    for name, number in rows:
        assert any(f"| {number} |" in line for line in results().splitlines() if f"| {name} |" in line)
    assert f"AUROC {dict(rows)['Twin-Boot']}" in text(README)


@pytest.mark.parametrize("page", [README, "docs/huggingface.md"])
def test_the_snippet_for_hugging_face_runs(page: str, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("peft", reason="the extra huggingface is not installed")
    from sentences import arguments, bert, sentences, tokenizer
    from transformers import default_data_collator

    reader = tokenizer([f"w{i}" for i in range(8)])
    monkeypatch.chdir(tmp_path)
    names = {
        "base": bert(),
        "model": bert(),
        "args": arguments(tmp_path, num_train_epochs=1),
        "dataset": sentences(),
        "new": sentences(5, seed=1),
    }
    exec(block_with(page, "TwinTrainer"), names)
    if page == README:
        assert all(sigma > 0 for sigma in names["trainer"].estimate().sigma.values())
    else:
        assert names["prediction"].probs.shape == (5, 3)
        assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
        assert all(sigma > 0 for sigma in names["estimate"].sigma.values())
        names |= {"held_out": sentences(20, seed=2), "collate": default_data_collator, "tokenizer": reader}
        names["texts"] = ["w0 w1", "w2"]
        exec(block_with(page, "tokenizer="), names)
        assert names["prediction"].set(0.8).shape == (2, 3)
        assert "## Error bars" in (tmp_path / "README.md").read_text()


def test_the_page_on_text_has_the_example_that_a_test_runs_with_nothing_left_out() -> None:
    code = (ROOT / "examples/abstain.py").read_text()
    shown = blocks("docs/text.md")
    start, end = code.index(shown[0]), code.index(shown[-1]) + len(shown[-1])
    assert "\n".join(shown) == code[start:end]


@pytest.mark.parametrize("page", [README, "docs/lightning.md"])
def test_the_snippet_for_lightning_runs(page: str) -> None:
    pl = pytest.importorskip("lightning.pytorch", reason="the extra lightning is not installed")

    class Module(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    names = {"module": Module(), "dataset": classes(150), "x": classes(20).tensors[0]}
    names |= {"EarlyStopping": pl.callbacks.EarlyStopping}
    names["Trainer"] = partial(pl.Trainer, accelerator="cpu", **dict.fromkeys(quiet, False))
    exec(block_with(page, "TwinModule"), names)
    assert all(sigma > 0 for sigma in names["twins"].twins.sigma.values())


TRUTH = ("truth-fashion", "truth", "truth-protein")
METHODS = {  # in the tables for readers: in docs/results
    "`error_bars`": "error_bars",
    "`fit`": "fit",
    "MC dropout": "MC dropout",
    "MC dropout with weight averaging": "MC dropout, averaged",
    "ensemble of two": "ensemble of 2",
    "two bootstrap samples": "bootstrap of 2",
    "Laplace, last layer": "Laplace, last layer",
}


def scores(method: str, score: str, *pages: str) -> list[float]:
    """The score of a method for each size of the data and learning rate, on pages of `twinboot truth`."""
    found, heading = [], list[str]()
    for line in "\n".join(text(f"docs/results/{page}.md") for page in pages).splitlines():
        if line.startswith("|  | sets"):
            heading = cells(line)
        elif line.startswith(f"| {method} |") and cells(line)[heading.index(score)]:
            found.append(float(cells(line)[heading.index(score)].split(" ±")[0]))
    return found


def as_range(values: list[float], digits: int) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


@pytest.mark.parametrize("page", [README, "docs/index.md"])
def test_the_sizes_of_error_bars_are_those_of_the_generated_pages(page: str) -> None:
    [told] = re.findall(r"\n\| \| Fashion-MNIST \| .*?\n\n", text(page), re.DOTALL)
    rows = [cells(line) for line in told.strip().splitlines()[2:]]
    assert len(rows) == 5
    for label, *sizes, seconds in rows:
        assert sizes == [as_range(scores(METHODS[label], "spread ratio", page), 2) for page in TRUTH]
        assert seconds == as_range(scores(METHODS[label], "time (plain = 1)", *TRUTH), 1)


def test_the_comparison_of_methods_is_that_of_the_generated_pages() -> None:
    tree, table = text("docs/which-method.md").split("\n| method | needs |")
    for label, _, size, covered, seconds in map(cells, table.partition("\n\n")[0].splitlines()[2:]):
        assert size == as_range(scores(METHODS[label], "spread ratio", *TRUTH), 2)
        shares = [100 * share for share in scores(METHODS[label], "in 90% interval", *TRUTH)]
        assert covered == as_range(shares, 0) + " %"
        assert seconds == as_range(scores(METHODS[label], "time (plain = 1)", *TRUTH), 1)
    laplace = ("Laplace, last layer", "spread ratio")
    told = [
        as_range(scores(*laplace, TRUTH[0]), 2),
        as_range(scores(*laplace, *TRUTH[1:]), 2),
        *(
            as_range(scores(METHODS[label], "spread ratio", *TRUTH), 2)
            for label in ("ensemble of two", "two bootstrap samples")
        ),
        as_range(scores("MC dropout", "spread ratio", *TRUTH), 2),
    ]
    assert re.findall(r"\d\.\d\d to \d\.\d\d", " ".join(tree.split())) == told


def test_the_benchmarks_are_those_of_the_generated_pages() -> None:
    tables = re.findall(r"\n(\| method \| spread / truth, smallest .*?)\n\n", text("docs/benchmarks.md"), re.DOTALL)
    for page, table in zip(TRUTH, tables, strict=True):
        heading, _, *rows = map(cells, table.splitlines())
        for method, *numbers in rows:
            spread = scores(method, "spread ratio", page)
            expected = [f"{min(spread):.2f}", f"{max(spread):.2f}"] if spread else ["", ""]
            for score in ("rank correlation", "in 90% interval", heading[5], "time (plain = 1)"):
                found = scores(method, score, page)
                digits = 3 if score == heading[5] else 2
                expected.append(f"{sum(found) / len(found):.{digits}f}" if found else "")
            assert numbers == expected


def test_the_summary_of_error_bars_is_that_of_the_generated_page() -> None:
    told = " ".join(text("docs/experiments.md").split())
    assert f"The spread of `error_bars` is {as_range(scores('error_bars', 'spread ratio', TRUTH[0]), 2)} times" in told
