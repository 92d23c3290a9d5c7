"""What a device holds when each has one twin, beside plain training and beside both twins on one device.

    .venv/bin/python benchmarks/apart_memory.py --page docs/apart-memory.md        half a minute on two cores

Each case trains in processes of its own, so that a peak is its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from overhead import resident
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from twinboot import Apart, Twins
from twinboot.experiments import networks

STEPS = 4
SETTINGS = (("VGG-16", 8), ("VGG-16", 64), ("words", 8))  # network, batch
ALONE, LEAN = "one twin in each of two processes", "the same, `sampled(lean=True)`"
CASES = {"plain training": 1, ALONE: 2, LEAN: 2, "both twins in one process": 1}  # -> processes


class Words(nn.Module):
    """Tells the next word; most of its weights are one tensor, that of the words."""

    def __init__(self, words: int = 50_000, size: int = 192) -> None:
        super().__init__()
        self.words = nn.Embedding(words, size)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(size, 4, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.words(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden[:, -1] @ self.words.weight.T  # type: ignore[no-any-return]


def made(network: str, batch: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    if network == "words":
        return Words(), torch.randint(50_000, (batch, 32)), torch.randint(50_000, (batch,))
    # With BatchNorm, for a copy of PyTorch's weight norm keeps the original in memory.
    model = networks.vgg16(10, normalisation="batch")
    return model, torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))


def measure(case: str, network: str, batch: int, rank: int, store: str) -> dict[str, float]:
    """In this process: MiB of the weights of one model, and at most beyond what was there before there was any."""
    torch.set_num_threads(1)
    if case in (ALONE, LEAN):
        distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("twin",))
    F.cross_entropy(nn.Linear(3, 3)(torch.randn(2, 3)), torch.tensor([0, 1])).backward()  # PyTorch's own threads
    before = resident("VmRSS")
    model, x, y = made(network, batch)
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    trained = model
    if case in (ALONE, LEAN):
        trained = Apart(model, mesh, exchange=2, sketch=251)
    elif case.startswith("both"):
        trained = Twins(model)
    del model
    gc.collect()  # of the model that was given, whose copy is trained
    optimizer = torch.optim.Adam(trained.parameters())
    for _ in range(STEPS):
        if isinstance(trained, Twins):
            with trained.sampled(lean=True) if isinstance(trained, Apart) and case == LEAN else trained.sampled():
                for twin in trained:
                    F.cross_entropy(twin(x), y).backward()
        else:
            F.cross_entropy(trained(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(trained, Twins):
            trained.update()
            trained.reset()
    found = {"weights": weights, "peak": resident("VmHWM") - before}
    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()
    return found


def run(case: str, network: str, batch: int) -> dict[str, float]:
    """The process of a case that needed most."""
    with tempfile.TemporaryDirectory() as folder:
        code = "import json, apart_memory; print(json.dumps(apart_memory.measure({!r}, {!r}, {}, {}, {!r})))"
        started = [
            subprocess.Popen(
                [sys.executable, "-c", code.format(case, network, batch, rank, f"{folder}/store")],
                cwd=Path(__file__).parent,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed is given back at once
            )
            for rank in range(CASES[case])
        ]
        said = [process.communicate()[0] for process in started]
        if any(process.returncode for process in started):
            raise SystemExit(f"{case}: a process failed.")
    return max((json.loads(text.splitlines()[-1]) for text in said), key=lambda found: float(found["peak"]))


PAGE = """
# Memory where each device has one twin

Written by `.venv/bin/python benchmarks/apart_memory.py --page docs/apart-memory.md`: {steps} steps of Adam, each with
an update and a reset, with VGG-16 and BatchNorm ({vgg:.0f} MiB of weights) and with a small language model
({words:.0f} MiB, most of which are one tensor, that of 50,000 words).

- *Peak* is what a process held at most, beyond what the imports take: weights, gradients, the state of Adam and
  activations; with twins also the clean weights while noise is on them, and what comes from the other twin, a piece at
  a time. Of two processes it is the one that needed more.
- Beside plain training a process with one twin needs those clean weights, one number for each weight besides the four
  of Adam's training. With `sampled(lean=True)` it does not: the weights stay clean, and each operation that reads one
  gets a noisy tensor for as long as it runs. Noise is then drawn twice, for the forward and the backward pass.
- What comes from the other twin at an exchange and at a reset is worked on in pieces of at most a million entries.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="write the table to this file")
    options = parser.parse_args()
    lines = ["| network | batch | | peak, MiB | relative to plain training |", "|---|---|---|---|---|"]
    weights = {}
    for network, batch in SETTINGS:
        found = {case: run(case, network, batch) for case in CASES}
        plain, weights[network] = (found["plain training"][what] for what in ("peak", "weights"))
        begin = f"| {network} | {batch}"
        lines += [f"{begin} | {case} | {f['peak']:.0f} | {f['peak'] / plain:.2f} |" for case, f in found.items()]
    print("\n".join(lines))
    if options.page:
        setup = f"PyTorch {torch.__version__}, Python {platform.python_version()}, on a CPU."
        page = PAGE.strip().format(steps=STEPS, vgg=weights["VGG-16"], words=weights["words"])
        options.page.write_text("\n\n".join([page, setup, "\n".join(lines)]) + "\n")


if __name__ == "__main__":
    main()
