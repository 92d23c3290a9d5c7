import random

import numpy as np
import pytest
import torch

from twinboot.randomness import own_randomness, seeded


def drawn() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())  # noqa: NPY002 (what is tested)


def states() -> tuple[bytes, object, bytes]:
    numpy = np.random.get_state()[1]  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy.tobytes()  # type: ignore[union-attr]


def test_draws_in_the_block_depend_on_the_seed_alone_and_the_generators_stay() -> None:
    before = states()
    found = []
    for seed in (1, 1, 2):
        with seeded(seed):
            found.append(drawn())
    assert found[0] == found[1] != found[2]
    assert states() == before


def test_generators_stay_where_they_were_after_an_error_too() -> None:
    def fail() -> None:
        drawn()
        raise KeyError

    before = states()
    with pytest.raises(KeyError), own_randomness(torch.device("cpu"), 0, "epoch", 1):
        fail()
    assert states() == before


def test_each_purpose_has_draws_of_its_own() -> None:
    found = set()
    for purpose in ((0, 1), (1, 0), (0, "statistics"), (0, 2)):
        with own_randomness(torch.device("cpu"), *purpose):
            found.add(drawn())
    assert len(found) == 4
