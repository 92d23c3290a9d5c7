"""What `fit` costs beside the steps of its twins, and what trainings on small tables and in two processes cost.

    .venv/bin/python benchmarks/fit_cost.py --page docs/fit-cost.md      all parts
    .venv/bin/python benchmarks/fit_cost.py epochs                       one of: epochs, tables, processes

`fit` runs as it is; its parts are timed by wrapping their functions. After each of its steps a plain training takes
one, so that a busy machine disturbs both alike. Data are random images of CIFAR-10's shape: cost does not depend on
what they show.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from overhead import BATCH, Plain, vgg16
from overhead import Case as Model
from torch import distributed
from torch.utils.data import TensorDataset

import twinboot.training.fit as fit_module
from twinboot import fit
from twinboot._core.threads import one_thread
from twinboot.experiments.uci.data import Table, split
from twinboot.experiments.uci.methods import Config, single, twins
from twinboot.integrations.sklearn import TwinBootClassifier, TwinBootRegressor
from twinboot.training.checkpoints import Checkpoints
from twinboot.training.epoch import Training
from twinboot.training.optimizers import adam
from twinboot.training.selection import Average
from twinboot.training.validation import Validation

RESULTS = Path("out/fit-cost")
IMAGES, EPOCHS = 5000, 4  # the images of the preset cifar10-5k, and epochs enough for a median
LONG = 24  # epochs of that preset, over which the last pass for BatchNorm is spread
SETTLING = 0.3  # the default of `fit`
ROWS, SEEDS = 500, 5  # of the tables
UPDATES, SPLITS = 500, 9  # a quarter of the steps of `twinboot uci`, and trainings
SHARED, TURNS = 2048, 3  # images that two processes train on, and measurements
# label -> the function that does this part of `fit`; those that come later may be inside of earlier ones
PARTS: dict[str, tuple[Any, str]] = {
    "steps of the twins": (Training, "epoch"),
    "the mean of the twins": (Training, "estimate"),
    "its average over the epochs": (Average, "take"),
    "judging: BatchNorm statistics": (Training, "update_batchnorm"),
    "judging: out-of-bag loss": (Validation, "unseen"),
    "writing a checkpoint": (Checkpoints, "save"),
}
JUDGING = ("judging: BatchNorm statistics", "judging: out-of-bag loss", "writing a checkpoint")


class Clock:
    """Seconds of each part and epoch, without those of the plain training inside of them."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in (*PARTS, "settling")}
        self.plain: list[float] = []
        self.aside = 0.0  # of the plain training, so far

    def __call__(self) -> float:
        return time.perf_counter() - self.aside

    def watched(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            began = self()
            try:
                return function(*args, **options)
            finally:
                self.seconds[label].append(self() - began)

        return run

    @contextmanager
    def watching(self) -> Iterator[None]:
        functions = {**PARTS, "settling": (fit_module, "settle")}
        before = {label: getattr(owner, name) for label, (owner, name) in functions.items()}
        for label, (owner, name) in functions.items():
            setattr(owner, name, self.watched(label, before[label]))
        try:
            yield
        finally:
            for label, (owner, name) in functions.items():
                setattr(owner, name, before[label])


def epochs() -> dict[str, list[float]]:
    """Seconds of the parts of `fit` in each epoch but the first, in which memory is allocated, and of plain epochs."""
    case = Model(lambda: vgg16(0.25), (3, 32, 32), samples=IMAGES, rounds=0, epochs=EPOCHS)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(IMAGES, *case.shape, generator=generator)
    data = TensorDataset(x, torch.randint(10, (IMAGES,), generator=generator))
    plain, clock = Plain(case, data), Clock()
    plain.optimizer = adam(plain.model.parameters(), 1e-3)  # as `fit` does by default
    made = [0]

    def take_turn(*_: Any) -> None:
        began = time.perf_counter()
        next(turns, None)
        clock.aside += time.perf_counter() - began

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = adam(parameters, 1e-3)
        made[0] += 1
        if made[0] == 1:  # not of the twins that settle
            optimizer.register_step_post_hook(take_turn)
        return optimizer

    def after(*_: Any) -> None:
        """End a plain epoch, and begin the next one."""
        nonlocal turns
        began = time.perf_counter()
        for _ in turns:
            pass
        turns = plain.epoch()
        clock.aside += time.perf_counter() - began
        clock.plain.append(clock.aside)
        show(f"epoch {len(clock.plain)} of {EPOCHS}")

    torch.manual_seed(0)
    turns = plain.epoch()
    with TemporaryDirectory() as folder, clock.watching():
        fit(
            case.model(),
            data,
            optimizer=make,
            epochs=EPOCHS,
            batch_size=BATCH,
            spread=SETTLING,
            checkpoint=folder,
            progress=False,
            callback=after,
        )
    found = {label: clock.seconds[label][:EPOCHS] for label in PARTS}
    # Its first call is before the training, and the one after the last epoch is of all samples.
    found["the mean of the twins"] = clock.seconds["the mean of the twins"][1 : EPOCHS + 1]
    ends = {"at the end: BatchNorm statistics": [clock.seconds["judging: BatchNorm statistics"][EPOCHS]]}
    ends["settling"] = clock.seconds["settling"]
    per_epoch = {label: seconds[1:] for label, seconds in found.items()}
    return {"plain epoch": list(np.diff(clock.plain)), **per_epoch, **ends}


def tables() -> dict[str, list[float]]:
    """Seconds and core seconds of the estimators at their defaults, and core seconds of trainings as in UCI."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 8))
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.3 * rng.normal(size=ROWS)
    found: dict[str, list[float]] = {}
    for name, kind, target in (("regressor", TwinBootRegressor, y), ("classifier", TwinBootClassifier, y > 0)):
        kind(epochs=2, random_state=0).fit(x, target)
        for seed in range(SEEDS):
            began, core = time.perf_counter(), time.process_time()
            model = kind(random_state=seed).fit(x, target)
            took = time.perf_counter() - began, time.process_time() - core, float(len(model.history_["epoch"]))
            for what, value in zip(("seconds", "core seconds", "epochs"), took, strict=True):
                found.setdefault(f"{name}: {what}", []).append(value)
            show(f"{name} {seed + 1} of {SEEDS}")
    config = Config(updates=UPDATES, epochs=3)
    data = split(Table(np.column_stack([x, y]), np.arange(ROWS // 10)[None]), 0)
    with one_thread():
        for seed in range(SPLITS):
            found.setdefault("single", []).append(single(config, data, seed).seconds)
            for name, stacked in (("twins", True), ("separate", False)):
                found.setdefault(name, []).append(twins(config, data, seed, stacked)["mean"].seconds)
            show(f"training {seed + 1} of {SPLITS}")
    return found


def processes() -> dict[str, list[float]]:
    """Images per second of `fit` in two processes by torchrun, in two processes that know nothing of each other, and in
    one process with two threads."""
    found: dict[str, list[float]] = {}
    for turn in range(TURNS):
        for name, rate in (("torchrun", _by_torchrun()), ("apart", _apart()), ("threads", _worker_alone(2))):
            found.setdefault(name, []).append(rate)
        show(f"turn {turn + 1} of {TURNS}")
    return found


def worker() -> None:
    """Print the images per second of the last epoch but the first, of this process or of all ranks together."""
    several = "RANK" in os.environ
    if several:
        distributed.init_process_group("gloo")
    torch.manual_seed(0)
    x, y = torch.randn(SHARED, 3, 32, 32), torch.randint(10, (SHARED,))
    clock = Clock()
    with clock.watching():
        fit(vgg16(0.25), TensorDataset(x, y), epochs=3, batch_size=BATCH, spread=0.0, progress=False)
    if not several or distributed.get_rank() == 0:
        print(SHARED / min(clock.seconds["steps of the twins"][1:]))
    if several:
        distributed.destroy_process_group()


def _start(*command: str, threads: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return subprocess.Popen(
        [sys.executable, *command, __file__, "worker"], env=environment, stdout=subprocess.PIPE, text=True
    )


def _rate(process: subprocess.Popen[str]) -> float:
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError("a process that was measured failed: see its message above.")
    return float(output.split()[-1])


def _by_torchrun() -> float:
    return _rate(_start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", threads=1))


def _apart() -> float:
    return sum(map(_rate, [_start(threads=1) for _ in range(2)]))


def _worker_alone(threads: int) -> float:
    return _rate(_start(threads=threads))


def show(what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{what:<30}", end="", file=sys.stderr, flush=True)


def spread(values: Sequence[float]) -> str:
    """The median and the middle half."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def page_of_epochs(found: dict[str, list[float]]) -> str:
    plain = found["plain epoch"]
    steps = found["steps of the twins"]
    lines = [
        f"### `fit` on {IMAGES:,} images, VGG-16 at a quarter of its width",
        "",
        "| in each epoch | seconds: median (middle half) | / plain epoch | / steps of the twins |",
        "|---|---|---|---|",
        f"| plain epoch | {spread(plain)} | 1 | |",
    ]
    for label in PARTS:
        values = found[label]
        lines.append(
            f"| {label} | {spread(values)} | {spread(ratios(values, plain))} | {spread(ratios(values, steps))} |"
        )
    whole = [sum(parts) for parts in zip(*(found[label] for label in PARTS), strict=True)]
    beside = [sum(parts) for parts in zip(*(found[label] for label in JUDGING), strict=True)]
    lines.append(
        f"| judging and checkpoint together | {spread(beside)} | {spread(ratios(beside, plain))} | "
        f"{spread(ratios(beside, steps))} |"
    )
    lines.append(f"| all of `fit` | {spread(whole)} | {spread(ratios(whole, plain))} | |")
    epoch = statistics.median(plain)
    [last], [settling] = found["at the end: BatchNorm statistics"], found["settling"]
    all_included = [ratio + last / epoch / LONG for ratio in ratios(whole, plain)]
    share = statistics.median(ratios(beside, steps))
    total = statistics.median(all_included)
    lines += [
        "",
        f"At the end of a run, BatchNorm statistics from all training samples take {last / epoch:.2f} plain epochs. "
        f"The settling phase took {settling / epoch:.2f} plain epochs here, where `spread={SETTLING}` of the epochs is "
        f"{max(1, round(SETTLING * EPOCHS))}, for each rate that is tried, and the match of the scale a fixed cost.",
        "",
        "| target | measured | reached |",
        "|---|---|---|",
        f"| judging and checkpoint at most 0.05 of the steps | {share:.3f} | {'yes' if share <= 0.05 else 'no'} |",
        f"| {LONG} epochs of `fit` without settling / plain training at most 1.36 | {spread(all_included)} | "
        f"{'yes' if total <= 1.36 else 'no'} |",
    ]
    return "\n".join(lines)


def page_of_tables(found: dict[str, list[float]]) -> str:
    lines = [
        f"### Tables of {ROWS} rows",
        "",
        f"scikit-learn estimators at their defaults, on 8 columns, with {SEEDS} seeds. Training stops by itself.",
        "",
        "| estimator | seconds | core seconds | epochs | under 2 core seconds |",
        "|---|---|---|---|---|",
    ]
    for name in ("regressor", "classifier"):
        seconds, core, number = (found[f"{name}: {what}"] for what in ("seconds", "core seconds", "epochs"))
        under = "yes" if statistics.median(core) < 2 else "no"
        lines.append(f"| {name} | {spread(seconds)} | {spread(core)} | {spread(number)} | {under} |")
    ratio = ratios(found["twins"], found["single"])
    reached = "yes" if statistics.median(ratio) <= 2 else "no"
    lines += [
        "",
        "The same rows with the settings of `twinboot uci`, against the single network with a hold-out, which reads "
        f"86 % of the rows. {SPLITS} trainings of each, in turns, on one thread:",
        "",
        "| core seconds | median (middle half) |",
        "|---|---|",
        f"| single network | {spread(found['single'])} |",
        f"| twins, stacked | {spread(found['twins'])} |",
        f"| twins | {spread(found['separate'])} |",
        f"| stacked / single, at most 2 wanted: {reached} | {spread(ratio)} |",
        f"| stacked / separate | {spread(ratios(found['twins'], found['separate']))} |",
    ]
    return "\n".join(lines)


def page_of_processes(found: dict[str, list[float]]) -> str:
    together = spread(ratios(found["torchrun"], found["apart"]))
    return "\n".join(
        [
            "### Two processes",
            "",
            f"Images per second of the steps of `fit`, VGG-16 at a quarter of its width, {SHARED:,} images, batches of "
            f"{BATCH} per process. {TURNS} turns, in the best of two epochs each.",
            "",
            "| | images per second |",
            "|---|---|",
            f"| `torchrun --nproc-per-node 2`, gloo, one thread each | {spread(found['torchrun'])} |",
            f"| two separate runs at once, one thread each, together | {spread(found['apart'])} |",
            f"| one process with two threads | {spread(found['threads'])} |",
            f"| torchrun / two runs | {together} |",
        ]
    )


MEASURED = {"epochs": (epochs, page_of_epochs), "tables": (tables, page_of_tables)}
MEASURED |= {"processes": (processes, page_of_processes)}
PAGE = """
# What `fit` costs

Written by `benchmarks/fit_cost.py --page docs/fit-cost.md`.

`fit` does more than the steps of its twins ([cost of a step](overhead.md)): after each epoch it takes the mean of the
twins, computes BatchNorm statistics for it from some training samples, and its loss on the out-of-bag samples, which
are 13.5 % of the data; then it writes a checkpoint. A plain training took turns with it, step by step. Ratios are
within an epoch, and the table has medians and the middle half.

Why targets are missed: the steps of the twins, which read 1.264 times the samples and draw noise, take longer than the
target for all of `fit`. Of judging, most is one forward pass of the out-of-bag samples. On small tables the time goes
into the fixed cost of each step, not into arithmetic: noise, a check of the losses, sigma. The single network is a bare
loop without these, and reads 86 % of the rows.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one or more of {', '.join(MEASURED)} (default: all)")
    parser.add_argument("--page", type=Path, help="write the tables of all parts measured so far to this file")
    options = parser.parse_args()
    if options.parts == ["worker"]:
        worker()
        return
    if unknown := set(options.parts) - set(MEASURED):
        parser.error(f"unknown part {min(unknown)!r}: use {', '.join(MEASURED)}.")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in options.parts or MEASURED:
        measure, page_of = MEASURED[name]
        found = measure()
        (RESULTS / f"{name}.json").write_text(json.dumps(found))
        print(page_of(found) + "\n", flush=True)
    if options.page:
        files = {name: RESULTS / f"{name}.json" for name in MEASURED}
        parts = [MEASURED[name][1](json.loads(file.read_text())) for name, file in files.items() if file.exists()]
        setup = f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads, Python {platform.python_version()}."
        options.page.write_text("\n\n".join([PAGE.strip(), setup, *parts]) + "\n")


if __name__ == "__main__":
    main()
