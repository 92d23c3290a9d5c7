import math
import sys

import pytest

from twinboot.experiments.text.cost import Cost, measured

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell the memory")


def held(mebibytes: int) -> Cost:
    with measured() as cost:
        pages = bytearray(mebibytes * 2**20)
        pages[:: 2**12] = bytes([1]) * len(range(0, len(pages), 2**12))
    return cost


@linux
def test_the_peak_is_that_of_the_block_alone() -> None:
    large, small = held(200), held(50)
    assert 199 < large.memory < 230
    assert 49 < small.memory < 80  # the larger one before is forgotten
    assert small.seconds > 0


def test_times_add_up_and_memory_does_not() -> None:
    assert Cost(1.0, 30.0) + Cost(2.0, 20.0) == Cost(3.0, 30.0)
    assert math.isnan((Cost(1.0, math.nan) + Cost(2.0, 20.0)).memory)
    assert math.isnan((Cost(1.0, 20.0) + Cost(2.0, math.nan)).memory)
