import pytest
import torch


@pytest.fixture(autouse=True)
def same_start() -> None:
    """Models that a test builds with PyTorch's own initialisation are the same in each run of the tests."""
    torch.manual_seed(0)
