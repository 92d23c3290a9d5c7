"""Runs under torchrun as a user starts them: whole ones, ones of which a process is killed, ones that start again."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from loops import assert_same_bits
from safetensors.torch import load_file

EXAMPLE = Path(__file__).parents[1] / "examples" / "torchrun.py"
EPOCHS = 6
SETTINGS = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # as the example says


def start(folder: Path, *options: str, epochs: int = EPOCHS, processes: int = 2, restarts: int = 0) -> subprocess.Popen:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    script = [str(EXAMPLE), f"--folder={folder}", f"--epochs={epochs}", *options]
    return subprocess.Popen(
        [*torchrun, f"--max-restarts={restarts}", *script],
        env=SETTINGS,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(run: subprocess.Popen) -> str:
    out, errors = run.communicate(timeout=240)
    assert run.returncode == 0, errors
    return str(out)


def accuracy(said: str) -> float:
    found = re.search(r"accuracy (0\.\d+)", said)
    assert found is not None, said
    return float(found[1])


def kill_a_worker_after(run: subprocess.Popen, folder: Path, epoch: int) -> None:
    """No warning, in the middle of what comes after that epoch's checkpoint."""
    until = time.monotonic() + 120
    while not (folder / f"epoch-{epoch}" / ".metadata").exists():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    workers = [int(pid) for pid in children if str(EXAMPLE) in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)


def when_written(folder: Path, epoch: int) -> int:
    return (folder / f"epoch-{epoch}" / ".metadata").stat().st_mtime_ns


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    assert accuracy(finish(start(folder))) > 0.85
    return folder


linux = pytest.mark.skipif(not Path("/proc").exists(), reason="finds the processes of a run in /proc")


@linux
def test_a_killed_process_ends_the_run_with_its_rank_and_signal(tmp_path: Path) -> None:
    run = start(tmp_path, epochs=200)
    kill_a_worker_after(run, tmp_path, epoch=1)
    _, errors = run.communicate(timeout=120)
    assert run.returncode != 0
    assert re.search(r"rank\s*: 1 \(local_rank: 1\)", errors), errors
    assert "Signal 9 (SIGKILL)" in errors


@linux
def test_a_run_that_torchrun_starts_again_ends_as_if_nothing_had_happened(tmp_path: Path, whole: Path) -> None:
    run = start(tmp_path, restarts=1)
    kill_a_worker_after(run, tmp_path, epoch=2)
    written = when_written(tmp_path, epoch=2)
    _, errors = run.communicate(timeout=240)
    assert run.returncode == 0, errors
    assert "(exitcode: -9) local_rank: 1" in errors
    assert when_written(tmp_path, epoch=2) == written  # it went on from there, and did not begin again
    name = "estimate.safetensors"
    assert_same_bits(load_file(tmp_path / name), load_file(whole / name))


def test_shards_learn_and_go_on_with_another_number_of_processes(tmp_path: Path) -> None:
    finish(start(tmp_path, "--shard", epochs=3))
    written = when_written(tmp_path, epoch=3)
    said = finish(start(tmp_path, "--shard", processes=1))
    assert said.startswith("processes: 1, ")
    assert accuracy(said) > 0.85
    assert len(list(tmp_path.glob("epoch-*"))) == EPOCHS
    assert when_written(tmp_path, epoch=3) == written


def test_without_torchrun_the_same_script_is_one_process(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), f"--folder={tmp_path}", "--epochs=3"]
    run = subprocess.run(command, capture_output=True, text=True, env=SETTINGS)
    assert run.stdout.startswith("processes: 1, "), run.stderr
    assert accuracy(run.stdout) > 0.85
