"""What the README prints runs as it is printed: both sides of the diff, and the snippets after it."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import classes, mlp
from torch.utils.data import DataLoader

import twinboot
from twinboot import fit, invert

README_FILE = Path(__file__).parents[1] / "README.md"
README = README_FILE.read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def block_with(word: str) -> str:
    [found] = [block for block in blocks("python") if word in block]
    return found


def one_side(diff: str, drop: str) -> str:
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(drop))


def scope() -> dict[str, Any]:
    data = classes(150)
    return {"torch": torch, "F": F, "DataLoader": DataLoader, "dataset": data, "model": mlp(), "epochs": 2}


def test_both_sides_of_the_diff_run() -> None:
    [diff] = blocks("diff")
    exec(one_side(diff, drop="+"), scope())
    names = scope()
    exec(one_side(diff, drop="-"), names)
    assert all(sigma > 0 for sigma in names["twins"].sigma.values())


@pytest.mark.filterwarnings("ignore:these samples are predicted best without weight noise")  # which so few are
def test_the_snippets_run_after_the_loop(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    predict, weighted, divided, pooled, stacked, resume, whole, everything, *_, inverse = blocks("python")
    names = scope()
    exec(one_side(blocks("diff")[0], drop="-"), names)
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
    monkeypatch.setattr(twinboot, "fit", partial(fit, progress=False))
    exec(pooled, learning := dict(names))
    assert learning["found"].estimate.scale == 2.4
    assert len(learning["found"].bootstrap.unseen) == 0
    torch.testing.assert_close(halves["estimate"].partition.sigma, names["twins"].partition.sigma / 2**0.5)

    together = names["Twins"](names["model"], stacked=True)
    exec(stacked, names | {"twins": together, "pair": next(iter(names["loader"]))})
    assert all(p.grad is not None for p in together.parameters())

    exec(
        resume + "    done.append(epoch)",
        names | {"path": tmp_path / "checkpoint.pt", "epochs": 4, "done": (done := [])},
    )
    assert done == [3, 4]

    exec(whole, names)
    assert (tmp_path / "run").is_dir()
    assert 0 < names["nll"] < 10
    exec(everything, names)
    assert names["final"].best_epoch == names["found"].best_epoch
    assert names["final"].estimate.scale == names["found"].estimate.scale

    kernel = torch.randn(50, 900, generator=torch.Generator().manual_seed(0))
    names |= {"operator": lambda field: kernel @ field.flatten(), "measurements": kernel.mean(1)}
    monkeypatch.setattr(twinboot, "invert", partial(invert, steps=5))
    exec(inverse, names)


def test_the_snippet_for_scikit_learn_runs() -> None:
    pytest.importorskip("sklearn", reason="the extra sklearn is not installed")
    x = torch.randn(300, 2, generator=torch.Generator().manual_seed(0)).numpy()
    names = {"X": x[:200], "y": x[:200].sum(1), "X_new": x[200:]}
    exec(block_with("TwinBootRegressor"), names)
    assert (names["std"] > 0).all()
    assert (names["low"] < names["mean"]).all()
    assert (names["mean"] < names["high"]).all()


def test_the_results_of_the_readme_are_those_of_the_docs() -> None:
    results = (README_FILE.parent / "docs" / "results.md").read_text()
    [told] = re.findall(r"\*\*What came out\*\*.*?(?=\n### )", README, re.DOTALL)
    numbers = re.findall(r"[-+]?[\d.]+(?: %)? ± [\d.]*\d(?: %)?", told)
    assert len(numbers) > 10
    pages = [(README_FILE.parent / "docs" / f"{name}.md").read_text() for name in ("divided", "pooled", "tried")]
    known = "".join([results, *pages])
    assert [number for number in numbers if number.replace(" %", "%") not in known] == []
    said = re.sub(r"\s+", " ", told)
    for whose, form in (
        ("the paper", "Of the paper's claims {} held, {} held partly, {} did not, and {} are undecided"),
        ("our own", "of our own {} held, {} held partly and {} did not"),
    ):
        [count] = re.findall(rf"- Claims of {whose}: (.*)", results)
        assert form.format(*re.findall(r"\d+", count)) in said


def test_the_images_of_the_readme_are_those_of_the_docs() -> None:
    [told] = re.findall(r"Of 5,000 images of CIFAR-10, five seeds each.*?\n\n(.*?)\n\n", README, re.DOTALL)
    header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in told.splitlines())
    assert header == ["", "accuracy", "NLL", "ECE", "time"]
    results = (README_FILE.parent / "docs" / "results.md").read_text()
    [table] = re.findall(r"\ncifar10-5k, .*?\n\n(.*?)\n\n", results, re.DOTALL)
    found = {line.split(" | ")[0]: line.split(" | ") for line in table.splitlines()}
    single = ("single, best loss on a hold-out", "single, best loss, temperature by the hold-out")
    pooled = "Twin-Boot with pooled gradients"
    twins = ("Twin-Boot", "Twin-Boot with draws", pooled, f"{pooled} and dropout")
    twins = (*twins, f"{pooled} and dropout, 0.958 times as long")
    others = ("single, averaged, best loss on a hold-out", "ensemble of 2", "SWA", "MC dropout", "IVON")
    dropout = ("MC dropout, averaged", "MC dropout, averaged, 1.4 times as long")
    names = (*twins, *single, *others, *dropout)
    for name, (_, accuracy, nll, ece, time) in zip(names, rows, strict=True):
        row = found[f"| {name}"]
        assert (row[1], row[2], row[4], row[-2]) == (accuracy, nll, ece, time)


def test_the_limits_of_the_readme_are_those_of_the_docs() -> None:
    [told] = re.findall(r"### What to know\n(.*?)(?=\n## )", README, re.DOTALL)
    numbers = re.findall(r"[\d.]+ ± [\d.]*\d", told)
    assert len(numbers) == 3  # what is strange to twins, to MC dropout, and to the best twins
    results = (README_FILE.parent / "docs" / "results.md").read_text().splitlines()
    rows = ("Twin-Boot", "MC dropout", "Twin-Boot with pooled gradients and dropout")
    for row, number in zip(rows, numbers, strict=True):
        assert any(f"| {number} |" in line for line in results if line.startswith(f"| {row} |"))


def test_the_snippet_for_hugging_face_runs(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("peft", reason="the extra huggingface is not installed")
    from sentences import arguments, bert, sentences

    monkeypatch.chdir(tmp_path)
    names = {
        "base": bert(),
        "args": arguments(tmp_path, num_train_epochs=1),
        "dataset": sentences(),
        "new": sentences(5, seed=1),
    }
    exec(block_with("TwinTrainer"), names)
    assert names["prediction"].probs.shape == (5, 3)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert all(sigma > 0 for sigma in names["estimate"].sigma.values())


def test_the_snippet_for_lightning_runs() -> None:
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
    exec(block_with("TwinModule"), names)
    assert all(sigma > 0 for sigma in names["twins"].twins.sigma.values())
