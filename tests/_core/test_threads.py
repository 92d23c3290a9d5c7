from collections.abc import Iterator

import pytest
import torch

from twinboot._core.threads import one_thread


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_threads_come_back_after_an_error_too() -> None:
    found = []
    with pytest.raises(KeyboardInterrupt), one_thread():  # noqa: PT012 - the block is what is tested
        found.append(torch.get_num_threads())
        raise KeyboardInterrupt
    assert [*found, torch.get_num_threads()] == [1, 2]
