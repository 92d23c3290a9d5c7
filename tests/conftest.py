import gc
import os
import sys
from collections.abc import Iterator

import hypothesis  # noqa: F401 - before anything is frozen: it asks the collector who refers to a generator
import pytest
import torch

# Read by scipy when it is first imported; without it scikit-learn leaves out one of its checks of an estimator.
os.environ.setdefault("SCIPY_ARRAY_API", "1")

# For processes that tests start. With a thread for each core in each of them, threads wait for each other in turns: an
# example of 6 s of processor time took 71 s on two busy cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """One thread, in each test and before its fixtures: the tests run in as many processes as there are cores. Trainers
    change it to what suits the machine, and with another number BatchNorm's sums have other bits."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def imports_are_no_garbage() -> None:
    """Each full collection looks at all that was ever imported, which takes a quarter of a second with Transformers,
    and trainers ask for many. What is there before a file of tests need not be looked at again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_start() -> None:
    """Models that a test builds with PyTorch's own initialisation are the same in each run of the tests."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """What libraries write into the environment, as trainers do for processes of theirs, ends with the test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """PyTorch compiles the code of a class only so many times and then no more: the times of each test are its own."""
    yield
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
