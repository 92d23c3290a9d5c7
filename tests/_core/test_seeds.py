import pytest

from twinboot import Bootstrap
from twinboot._core import seeds


def test_a_derived_seed_depends_on_every_part_and_their_order() -> None:
    derived = {
        seeds.derive(*parts) for parts in [(0, "a", 1), (0, "a", 2), (1, "a", 0), (0, "b", 1), (0, "a"), ("a", 0)]
    }
    assert len(derived) == 6
    assert seeds.derive(1, 23) != seeds.derive(12, 3)
    assert all(0 <= seed < 2**63 for seed in derived)


def test_a_seed_that_is_no_integer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"seed must be an integer, not 1.5"):
        Bootstrap(10, seed=1.5)  # type: ignore[arg-type]
