"""Functions in processes of their own, and in several that train together over gloo as `torchrun` would start them."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.utils.data import TensorDataset

# A server that has imported PyTorch and the libraries of the integrations once forks each process: a start takes tenths
# of a second instead of seconds. The first step of an optimizer imports torch._dynamo, half a second in each process
# that does not have it yet. What is not installed is left out.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "pytest",
        "torch._dynamo",
        "torch._inductor.lowering",  # the first compilation imports it
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "twinboot.experiments.runner.store",
        "twinboot.integrations.sklearn",
        "twinboot.integrations.lightning",
        "twinboot.integrations.huggingface",
        "peft",
    ]
)


def together(function: Callable[..., Any], *args: Any, ranks: int = 2, seconds: float = 120) -> list[Any]:
    """What `function(*args)` gives on each rank: tensors and plain data. It must be at the top of a module."""
    with tempfile.TemporaryDirectory() as folder:
        workers = [FORKS.Process(target=_work, args=(r, ranks, folder, function, args)) for r in range(ranks)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(seconds)
        alive = [worker for worker in workers if worker.is_alive()]
        for worker in alive:
            worker.kill()
            worker.join()
        failures = [path.read_text() for path in sorted(Path(folder).glob("*.failure"))]
        assert not failures, "\n".join(failures)
        assert not alive, f"{len(alive)} of {ranks} ranks were not done after {seconds} seconds"
        assert [worker.exitcode for worker in workers] == [0] * ranks
        return [torch.load(Path(folder) / f"{r}.pt") for r in range(ranks)]


def ended(function: Callable[..., Any], *args: Any, seconds: float = 120) -> int | None:
    """How a process ended that ran `function(*args)`: 0, or minus the signal that killed it."""
    worker = FORKS.Process(target=_alone, args=(function, args))
    worker.start()
    worker.join(seconds)
    if worker.is_alive():
        worker.kill()
        worker.join()
        raise AssertionError(f"the process was not done after {seconds} seconds")
    return worker.exitcode


def script(path: Path, *args: str) -> tuple[str, str]:
    """What a script prints, and what it writes to standard error."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "out", Path(folder) / "err"
        code = ended(_run_script, path, args, files)
        out, err = (file.read_text() for file in files)
    assert code == 0, err
    return out, err


def _run_script(path: Path, args: Sequence[str], files: tuple[Path, Path]) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.argv, sys.path[0] = [str(path), *args], str(path.parent)
    runpy.run_path(str(path), run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()


def _alone(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # Workers of its data loaders begin as in any process: those of a server would not notice that it was killed.
    multiprocessing.set_start_method(None, force=True)
    function(*args)


class Deadly(TensorDataset):
    """Kills its process, without a warning, when a sample is read for the `reads`-th time."""

    def __init__(self, data: TensorDataset, reads: int) -> None:
        super().__init__(*data.tensors)
        self.left = reads

    def __getitem__(self, index: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def _work(rank: int, ranks: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        torch.save(function(*args), Path(folder) / f"{rank}.pt")
    except BaseException:
        (Path(folder) / f"{rank}.failure").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)  # the others may wait in a collective, and so would a tidy end here
    distributed.barrier()
    distributed.destroy_process_group()
