"""What Twin-Boot costs: plain steps, twin steps and epochs, interleaved in one process.

    make bench                                          all models, into docs/overhead.md; five minutes on 2 cores
    .venv/bin/python benchmarks/overhead.py mlp         one of: mlp, mlp-wide, vgg16-quarter, vgg16

Every quantity is measured once per round, in an order that is shuffled anew, and the two epochs take turns step by
step, so that a busy machine disturbs all of them alike. The tables show medians and the middle half over the rounds, of
times and of ratios within a round. Data are random images of CIFAR-10's shape: cost does not depend on what they show.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.data import TensorDataset

from twinboot import Bootstrap, PairedLoader, Twins
from twinboot._core.noise import filler

BATCH = 64  # the paper's batch size (Appendix A.4)
RESULTS = Path("out/overhead")


def mlp() -> nn.Module:
    """scikit-learn's default, 100 hidden units, on its 8 x 8 digits: a step is mostly Python and kernel launches."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


def mlp_wide() -> nn.Module:
    """Two hidden layers of 256 units on 28 x 28 images: many weights for the work that a batch of 64 does with them."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
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
    epochs: int


CASES = {
    "mlp": Case(mlp, (1, 8, 8), samples=1797, rounds=400, epochs=20),
    "mlp-wide": Case(mlp_wide, (1, 28, 28), samples=2048, rounds=200, epochs=10),
    "vgg16-quarter": Case(lambda: vgg16(0.25), (3, 32, 32), samples=2048, rounds=40, epochs=5),
    "vgg16": Case(lambda: vgg16(1.0), (3, 32, 32), samples=2048, rounds=24, epochs=2),
}
# case -> (numerator, denominator, at most): what the project set out to reach.
TARGETS = {
    "mlp": [("twin step, stacked", "plain step", 1.45)],
    "mlp-wide": [
        ("twin step, stacked, noise per output", "plain step", 1.9),
        ("twin epoch, counts, stacked, noise per output", "plain epoch", 1.5),
        ("predict, 8 draws, as predict chooses", "plain step", 3),
    ],
    "vgg16-quarter": [
        ("twin step", "two plain steps", 1.1),
        ("twin epoch, counts", "plain epoch", 1.4),
        ("predict, 8 draws, as predict chooses", "plain step", 2.7),
    ],
    "vgg16": [("twin step", "two plain steps", 1.1), ("twin epoch, counts", "plain epoch", 1.4)],
}


class Plain:
    """An ordinary loop over an ordinary model."""

    def __init__(self, case: Case, data: TensorDataset, compiled: bool = False) -> None:
        torch.manual_seed(0)
        self.model: Any = case.model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)
        if compiled:
            self.model = torch.compile(self.model)
        self.tensors = data.tensors

    def step(self, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def epoch(self) -> Iterator[None]:
        """The fairest plain epoch: whole batches at once, as PairedLoader reads a TensorDataset."""
        x, y = self.tensors
        for index in torch.randperm(len(x)).split(BATCH):
            self.step(x[index], y[index])
            yield


DISTINCT = 0.632  # share of a bootstrap sample: batches of twins and of a plain model have equally many samples


class Twin:
    """The README's loops."""

    def __init__(self, case: Case, data: TensorDataset, stacked: bool = False, local: bool = False) -> None:
        torch.manual_seed(0)
        self.twins, self.local = Twins(case.model(), stacked=stacked), local
        self.optimizer = torch.optim.Adam(self.twins.parameters(), 1e-3)
        self.loader = PairedLoader(data, Bootstrap(len(data)), round(BATCH / DISTINCT), "counts")

    def step(self, pair: Any) -> None:
        with self.twins.sampled(local=self.local):
            for twin, (x, y) in zip(self.twins, pair, strict=True):
                F.cross_entropy(twin(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.twins.update()

    def joint_step(self, pair: Any, compiled: bool = False) -> None:
        """Both twins in one call: the only way for stacked twins."""
        (x1, y1), (x2, y2) = pair
        with self.twins.sampled(local=self.local):
            first, second = (self.compiled if compiled else self.twins)(x1, x2)
            (F.cross_entropy(first, y1) + F.cross_entropy(second, y2)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.twins.update()

    @cached_property
    def compiled(self) -> Any:
        return torch.compile(self.twins)  # its import would count as memory of the twins

    def epoch(self) -> Iterator[None]:
        for pair in self.loader:
            with self.twins.sampled(local=self.local):
                if self.twins.stacked:
                    outputs = self.twins(*(x for x, _, _ in pair))
                    sum(map(weighted, outputs, pair)).backward()  # type: ignore[union-attr]
                else:
                    for twin, batch in zip(self.twins, pair, strict=True):
                        weighted(twin(batch[0]), batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.twins.update()
            yield


def weighted(output: Tensor, batch: Any) -> Tensor:
    _, y, weight = batch
    return (weight * F.cross_entropy(output, y, reduction="none")).mean()


class Vmapped:
    """Two models in one pass with torch.func.vmap over stacked weights, without noise or sigma: does it pay?"""

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


def together_or_not() -> dict[str, Callable[[int], None]]:
    """A layer of two twins, forward and backward, one after another and as one: would stacked convolutions pay?"""
    images = [torch.randn(BATCH, 64, 8, 8, requires_grad=True) for _ in range(2)]
    kernels = [torch.randn(64, 64, 3, 3, requires_grad=True) for _ in range(2)]
    rows = [torch.randn(BATCH * 32, 256, requires_grad=True) for _ in range(2)]
    scales = [torch.randn(256, requires_grad=True) for _ in range(2)]
    both_images, both_kernels = (torch.cat([t.detach() for t in ts], d) for ts, d in ((images, 1), (kernels, 0)))
    both_rows, both_scales = (torch.stack([t.detach() for t in ts]) for ts in (rows, scales))
    for t in (both_images, both_kernels, both_rows, both_scales):
        t.requires_grad_()

    def one_by_one(run: Callable[[Tensor, Tensor], Tensor], xs: list[Tensor], ws: list[Tensor]) -> None:
        for x, w in zip(xs, ws, strict=True):
            run(x, w).sum().backward()

    def convolve(x: Tensor, w: Tensor, groups: int = 1) -> Tensor:
        return F.conv2d(x, w, padding=1, groups=groups)

    return {
        "two convolutions": lambda k: one_by_one(convolve, images, kernels),
        "two convolutions, as one with groups": lambda k: convolve(both_images, both_kernels, 2).sum().backward(),
        "two LayerNorms": lambda k: one_by_one(lambda x, w: F.layer_norm(x, (256,), w), rows, scales),
        "two LayerNorms, batched": lambda k: (F.layer_norm(both_rows, (256,)) * both_scales[:, None]).sum().backward(),
    }


def timed(call: Callable[[int], None], k: int) -> float:
    start = time.perf_counter()
    call(k)
    return time.perf_counter() - start


def measure(case: Case) -> dict[str, list[float]]:
    # A program that has freed a large tensor, such as raw data, keeps freed memory. In one that has not, glibc returns
    # the memory of larger gradients to the system in each step, and page faults dominate what is measured.
    torch.empty(31 * 2**20, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(case.samples, *case.shape, generator=generator)
    y = torch.randint(10, (case.samples,), generator=generator)
    data = TensorDataset(x, y)
    plain, other, twin = Plain(case, data), Plain(case, data), Twin(case, data)
    twins = twin.twins
    weights = [p.detach() for p in twins.parameters()]
    clean = [torch.empty_like(w) for w in weights]
    scratch = [[torch.empty_like(p) for p in copy.parameters()] for copy in twins]
    estimate = twins.estimate()
    estimate.partition.sigma.fill_(0.01)  # it is 0 before the first step, and draws would have no noise

    per_output: dict[str, Twin] = {}
    if case.model in (mlp, mlp_wide):
        per_output = {
            "noise per output": Twin(case, data, local=True),
            "stacked, noise per output": Twin(case, data, stacked=True, local=True),
        }

    def batch(k: int) -> tuple[Tensor, Tensor]:
        index = torch.arange(k * BATCH, (k + 1) * BATCH) % case.samples
        return x[index], y[index]

    def two_plain_steps(k: int) -> None:
        plain.step(*batch(k))
        other.step(*batch(k + 1))

    def backup_and_restore() -> None:
        torch._foreach_copy_(clean, weights)
        torch._foreach_copy_(weights, clean)

    def predict(k: int, vectorize: bool | None) -> None:
        estimate.predict(batch(k)[0], samples=8, task="classification", vectorize=vectorize)

    calls: dict[str, Callable[[int], None]] = {
        "plain step": lambda k: plain.step(*batch(k)),
        "two plain steps": two_plain_steps,
        "twin step": lambda k: twin.step((batch(k), batch(k + 1))),
        "of which: noise": lambda k: filler(scratch)(k, None),
        "of which: backup and restore": lambda k: backup_and_restore(),
        "of which: sigma": lambda k: twins.update(),
    }
    if case.model in (mlp, mlp_wide):
        # Three ways to run both twins in one pass. vmap: with stacked weights, and no noise or sigma in it.
        stacked, vmapped, compiled = Twin(case, data, stacked=True), Vmapped(case), Plain(case, data, compiled=True)
        calls["twin step, stacked"] = lambda k: stacked.joint_step((batch(k), batch(k + 1)))
        for name, loop in per_output.items():
            calls[f"twin step, {name}"] = lambda k, loop=loop: loop.joint_step((batch(k), batch(k + 1)))  # type: ignore[misc]
        calls["two steps stacked with vmap"] = lambda k: vmapped.step((batch(k), batch(k + 1)))
        calls["plain step, compiled"] = lambda k: compiled.step(*batch(k))
        calls["twin step, compiled"] = lambda k: twin.joint_step((batch(k), batch(k + 1)), compiled=True)
    if case is CASES["vgg16-quarter"]:
        calls |= together_or_not()
    if case.rounds >= 40:  # the largest model is never vectorized
        calls["predict, 8 draws in a loop"] = lambda k: predict(k, False)
        calls["predict, 8 draws with vmap"] = lambda k: predict(k, True)
        calls["predict, 8 draws, as predict chooses"] = lambda k: predict(k, None)
    for call in calls.values():  # a first time for allocations, thread pools and caches
        call(0)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    shuffle = random.Random(0)
    for round_ in range(case.rounds):
        for name in shuffle.sample(list(calls), len(calls)):
            seconds[name].append(timed(calls[name], round_))
        show_progress(round_ + 1, case.rounds)
    epochs = {"plain epoch": plain.epoch, "twin epoch, counts": twin.epoch}
    epochs |= {f"twin epoch, counts, {name}": loop.epoch for name, loop in per_output.items()}
    lengths = dict.fromkeys(epochs, len(twin.loader)) | {"plain epoch": -(-case.samples // BATCH)}
    for epoch in range(case.epochs):
        for name, total in side_by_side({name: start() for name, start in epochs.items()}, lengths).items():
            seconds.setdefault(name, []).append(total)
        show_progress(epoch + 1, case.epochs, "epoch")
    return seconds


def side_by_side(epochs: dict[str, Iterator[None]], lengths: dict[str, int]) -> dict[str, float]:
    """The total time of each epoch, when their steps take turns: whatever else the machine does slows both alike."""
    turns = sorted((step / length, name) for name, length in lengths.items() for step in range(length))
    total = dict.fromkeys(epochs, 0.0)
    for _, name in turns:
        total[name] += timed(lambda _, name=name: next(epochs[name]), 0)  # type: ignore[misc]
    return total


def show_progress(done: int, total: int, what: str = "round") -> None:
    if sys.stderr.isatty():
        print(f"\r  {what} {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


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
    def spread(values: list[float]) -> str:
        low, middle, high = statistics.quantiles(values, n=4)
        return f"{middle:.4g} ({low:.4g} to {high:.4g})"

    def ratios(numerator: str, denominator: str) -> list[float]:
        return [a / b for a, b in zip(seconds[numerator], seconds[denominator], strict=True)]

    weights = sum(p.numel() for p in CASES[name].model().parameters())
    lines = [
        f"### {name}: {weights / 1e6:.3g} million weights, batch {BATCH}, {CASES[name].rounds} rounds",
        "",
        "| what | ms: median (middle half) | relative to plain: median (middle half) |",
        "|---|---|---|",
    ]
    for what, values in seconds.items():
        relative = ratios(what, "plain epoch" if "epoch" in what else "plain step")
        lines.append(f"| {what} | {spread([1e3 * v for v in values])} | {spread(relative)} |")
    lines += ["", "| target | measured | reached |", "|---|---|---|"]
    for numerator, denominator, limit in TARGETS[name]:
        measured = ratios(numerator, denominator)
        verdict = "yes" if statistics.median(measured) <= limit else "no"
        lines.append(f"| {numerator} / {denominator} at most {limit} | {spread(measured)} | {verdict} |")
    lines += ["", "| peak memory of three steps | MiB |", "|---|---|"]
    lines += [f"| {what} | {size:.0f} |" for what, size in memory.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="MODEL", help=f"one or more of {', '.join(CASES)} (default: all)")
    parser.add_argument("--page", type=Path, help="write the tables of all models measured so far to this file")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"unknown model {unknown.pop()!r}: use {', '.join(CASES)}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in options.cases or CASES:
        seconds = measure(CASES[name])
        memory = {label: peak_memory(name, what) for label, what in MEMORY.items()}
        (RESULTS / f"{name}.json").write_text(json.dumps({"seconds": seconds, "memory": memory}))
        print(table(name, seconds, memory) + "\n", flush=True)
    if options.page:
        found = [name for name in CASES if (RESULTS / f"{name}.json").exists()]
        tables = [table(name, **json.loads((RESULTS / f"{name}.json").read_text())) for name in found]
        setup = f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads, Python {platform.python_version()}."
        options.page.write_text("\n\n".join([PAGE.strip(), setup, *tables]) + "\n")


MEMORY = {"one plain model": "plain", "two plain models": "two", "twins": "twin"}
PAGE = """
# What Twin-Boot costs

Written by `make bench` (`benchmarks/overhead.py`): plain Adam steps, twin steps and epochs, interleaved in one process.

- A *twin step* is both twins' forward and backward passes, the noise, one optimizer step and sigma. "Of which" rows are
  measured alone.
- A *twin epoch, counts* goes through both twins' bootstrap samples, each distinct sample once: 1.264 times the samples
  of a plain epoch, which is its floor.
- *Twin step, stacked*: the same with `Twins(model, stacked=True)`. The optimizer has half as many tensors, each layer
  is one batched matrix product for both twins, and no weights are put back.
- *Noise per output*: `sampled(local=True)`, for linear layers at the end of a model. It draws a normal for each output
  of a batch instead of one for each weight. That is less where a layer has more inputs than a batch has samples. In the
  small network it is not.
- *As predict chooses*: chains of linear layers get noise on their outputs, all draws in one pass. Other models this
  large run once for each draw. Their floor is eight forward passes, of which a plain step takes about three.
- *Two convolutions* and *two LayerNorms*: a layer of each of two twins, forward and backward, one after another or as
  one operation. Together they are hardly faster on a CPU, or slower, so stacked twins run such models one by one.
- Before all measurements one large tensor is freed. The C library then keeps freed memory. In a program that has never
  freed one, glibc returns the memory of larger gradients to the system in each step.
- *Two steps stacked with vmap*: two plain models in one pass through `torch.func.vmap`, for comparison. It has neither
  noise nor sigma in it and still costs about two plain steps: on a CPU the overhead of vmap eats what it saves, which
  is why stacked twins do without it. *Compiled*: `torch.compile` on both sides.
- What matters is how much a step does with each weight. Convolutions use a weight many times, so noise and sigma are a
  few per cent. A fully connected layer uses it once per sample: at batch 64 the noise, drawn on one CPU core, can cost
  as much as a plain step. In a very small network it is the fixed cost of a block and of sigma that shows.
- *Why targets are missed.* In the small network, two plain steps alone take longer than the target for a step of the
  twins. In the wide one, each twin still multiplies by weights of its own. An epoch of the twins reads 1.264 times
  the samples of a plain one, so if their step takes 1.1 times as long as two plain steps, the epoch takes at least
  1.264 x 1.1 = 1.39 plain ones. Eight draws of a convolutional network are eight forward passes. Memory: the gradients
  of both twins are held at once, and a clean copy of the weights; for two models one after the other it is the
  gradients of one.
"""

if __name__ == "__main__":
    main()
