"""What Twin-Boot costs: plain steps, twin steps and epochs, interleaved in one process.

    make bench                                          all models; about 25 minutes on 2 cores
    .venv/bin/python benchmarks/overhead.py mlp         one of: mlp, vgg16-quarter, vgg16

Every quantity is measured once per round, in an order that is shuffled anew, so that a busy machine disturbs all of
them alike. The tables show the median and the middle half over the rounds, and ratios of medians. Data are random
images of CIFAR-10's shape: cost does not depend on what they show. Targets: see `TARGETS`.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.data import TensorDataset

from twinboot import Bootstrap, PairedLoader, Twins
from twinboot.noise import fill_normal_

BATCH = 64  # the paper's batch size (Appendix A.4)
RESULTS = Path("out/overhead")


def mlp() -> nn.Module:
    """Two hidden layers on 8 x 8 digits: small enough that Python and kernel launches are most of a step."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def vgg16(width: float) -> nn.Module:
    """VGG-16 for 32 x 32 images, with BatchNorm; `width` scales all channels."""
    layers: list[nn.Module] = []
    channels = 3
    for size in [64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0]:
        if size == 0:
            layers.append(nn.MaxPool2d(2))
        else:
            out = int(size * width)
            layers += [nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
            channels = out
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, 10))


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and how much to measure."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    samples: int  # of the dataset in the epoch measurement
    rounds: int


CASES = {
    "mlp": Case(mlp, (1, 8, 8), samples=1797, rounds=300),
    "vgg16-quarter": Case(lambda: vgg16(0.25), (3, 32, 32), samples=1024, rounds=15),
    "vgg16": Case(lambda: vgg16(1.0), (3, 32, 32), samples=512, rounds=7),
}
# case -> (numerator, denominator, at most): what the project set out to reach.
TARGETS = {
    "mlp": [("twin step", "plain step", 1.8), ("twin epoch, counts", "plain epoch", 1.4)],
    "vgg16-quarter": [("twin step", "two plain steps", 1.1), ("twin epoch, counts", "plain epoch", 1.4)],
    "vgg16": [("twin step", "two plain steps", 1.1), ("twin epoch, counts", "plain epoch", 1.4)],
}


class Plain:
    """An ordinary loop over an ordinary model."""

    def __init__(self, case: Case, data: TensorDataset) -> None:
        torch.manual_seed(0)
        self.model = case.model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)
        self.tensors = data.tensors

    def step(self, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def epoch(self) -> None:
        """The fairest plain epoch: whole batches at once, as PairedLoader reads a TensorDataset."""
        x, y = self.tensors
        for index in torch.randperm(len(x)).split(BATCH):
            self.step(x[index], y[index])


class Twin:
    """The README's loop."""

    def __init__(self, case: Case, data: TensorDataset) -> None:
        torch.manual_seed(0)
        self.twins = Twins(case.model())
        self.optimizer = torch.optim.Adam(self.twins.parameters(), 1e-3)
        self.loader = PairedLoader(data, Bootstrap(len(data)), BATCH, "counts")

    def step(self, pair: Any) -> None:
        with self.twins.sampled():
            sum(F.cross_entropy(twin(x), y) for twin, (x, y) in zip(self.twins, pair, strict=True)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.twins.update()

    def epoch(self) -> None:
        for pair in self.loader:
            with self.twins.sampled():
                loss: Any = 0
                for twin, (x, y, weight) in zip(self.twins, pair, strict=True):
                    loss = loss + (weight * F.cross_entropy(twin(x), y, reduction="none")).sum() / weight.sum()
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.twins.update()


class Stacked:
    """Both twins in one pass with torch.func.vmap over stacked weights, without noise or sigma: does it pay?"""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.model = case.model()
        self.weights = {n: nn.Parameter(torch.stack([p.detach()] * 2)) for n, p in self.model.named_parameters()}
        self.optimizer = torch.optim.Adam(self.weights.values(), 1e-3)

    def step(self, pair: Any) -> None:
        (x1, y1), (x2, y2) = pair
        run = vmap(lambda weights, x: functional_call(self.model, weights, (x,)))
        first, second = run(self.weights, torch.stack([x1, x2]))
        (F.cross_entropy(first, y1) + F.cross_entropy(second, y2)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def timed(call: Callable[[int], None], k: int) -> float:
    start = time.perf_counter()
    call(k)
    return time.perf_counter() - start


def measure(case: Case) -> dict[str, list[float]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(case.samples, *case.shape, generator=generator)
    y = torch.randint(10, (case.samples,), generator=generator)
    data = TensorDataset(x, y)
    plain, other, twin = Plain(case, data), Plain(case, data), Twin(case, data)
    stacked = Stacked(case) if case.model is mlp else None  # vmap has no in-place BatchNorm statistics
    twins = twin.twins
    weights = [p.detach() for p in twins.parameters()]
    clean = [torch.empty_like(w) for w in weights]
    scratch = [torch.empty_like(w) for w in weights]

    def batch(k: int) -> tuple[Tensor, Tensor]:
        index = torch.arange(k * BATCH, (k + 1) * BATCH) % case.samples
        return x[index], y[index]

    def two_plain_steps(k: int) -> None:
        plain.step(*batch(k))
        other.step(*batch(k + 1))

    def backup_and_restore() -> None:
        torch._foreach_copy_(clean, weights)
        torch._foreach_copy_(weights, clean)

    calls: dict[str, Callable[[int], None]] = {
        "plain step": lambda k: plain.step(*batch(k)),
        "two plain steps": two_plain_steps,
        "twin step": lambda k: twin.step((batch(k), batch(k + 1))),
        "of which: noise": lambda k: fill_normal_(scratch, k),
        "of which: backup and restore": lambda k: backup_and_restore(),
        "of which: sigma": lambda k: twins.update(),
        "plain epoch": lambda k: plain.epoch(),
        "twin epoch, counts": lambda k: twin.epoch(),
    }
    if stacked is not None:
        calls["two steps stacked with vmap, no noise"] = lambda k: stacked.step((batch(k), batch(k + 1)))
    for name, call in calls.items():  # a first time for allocations, thread pools and caches
        if "epoch" not in name:
            call(0)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    shuffle = random.Random(0)
    for round_ in range(case.rounds):
        for name in shuffle.sample(list(calls), len(calls)):
            # An epoch is many steps, so that a few rounds of it tell as much.
            if "epoch" not in name or round_ % 5 == 0:
                seconds[name].append(timed(calls[name], round_))
        show_progress(round_ + 1, case.rounds)
    return seconds


def show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r  round {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def peak_memory(case_name: str, what: str) -> float:
    """MiB that three steps need at most, in a process of their own, beyond what the imports take."""
    code = f"from overhead import peak_of; print(peak_of({case_name!r}, {what!r}))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    return float(run.stdout)


def peak_of(case_name: str, what: str) -> float:
    case = CASES[case_name]
    x, y = torch.randn(BATCH, *case.shape), torch.randint(10, (BATCH,))
    data = TensorDataset(x, y)
    before = resident("VmRSS")
    if what == "twin":
        twin = Twin(case, data)
        for _ in range(3):
            twin.step(((x, y), (x, y)))
    else:
        models = [Plain(case, data) for _ in range(2 if what == "two" else 1)]
        for _ in range(3):
            for model in models:
                model.step(x, y)
    return resident("VmHWM") - before


def resident(field: str) -> float:
    """MiB of this process: VmRSS is what it holds now, VmHWM the most that it ever held (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def table(name: str, seconds: dict[str, list[float]], memory: dict[str, float]) -> str:
    def milliseconds(values: list[float]) -> str:
        low, middle, high = statistics.quantiles([1e3 * v for v in values], n=4)
        return f"{middle:.4g} ({low:.4g} to {high:.4g})"

    median = {what: statistics.median(values) for what, values in seconds.items()}
    weights = sum(p.numel() for p in CASES[name].model().parameters())
    lines = [
        f"### {name}: {weights / 1e6:.3g} million weights, batch {BATCH}, {CASES[name].rounds} rounds",
        "",
        "| what | ms: median (middle half) | relative to plain |",
        "|---|---|---|",
    ]
    for what, values in seconds.items():
        base = median["plain epoch" if "epoch" in what else "plain step"]
        lines.append(f"| {what} | {milliseconds(values)} | {median[what] / base:.3f} |")
    lines += ["", "| target | measured | reached |", "|---|---|---|"]
    for numerator, denominator, limit in TARGETS[name]:
        ratio = median[numerator] / median[denominator]
        verdict = "yes" if ratio <= limit else "no"
        lines.append(f"| {numerator} / {denominator} at most {limit} | {ratio:.3f} | {verdict} |")
    lines += ["", "| peak memory of three steps | MiB |", "|---|---|"]
    lines += [f"| {what} | {size:.0f} |" for what, size in memory.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help="which models (default: all)")
    names = parser.parse_args().cases or list(CASES)
    RESULTS.mkdir(parents=True, exist_ok=True)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, Python {platform.python_version()}\n")
    for name in names:
        seconds = measure(CASES[name])
        memory = {label: peak_memory(name, what) for label, what in MEMORY.items()}
        (RESULTS / f"{name}.json").write_text(json.dumps({"seconds": seconds, "memory": memory}))
        print(table(name, seconds, memory) + "\n", flush=True)


MEMORY = {"one plain model": "plain", "two plain models": "two", "twins": "twin"}

if __name__ == "__main__":
    main()
