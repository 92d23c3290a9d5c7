import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy

from twinboot.experiments import images
from twinboot.experiments.runner.experiment import (
    agrees,
    command,
    label,
    one_thread,
    overall,
    refuse_repeated,
    require_at_least,
    require_positive,
    status,
)


def test_agreement_is_a_margin_or_three_errors_and_none_without_precision() -> None:
    assert agrees(1.04, 0.001) is True
    assert agrees(1.06, 0.001) is False
    assert agrees(1.06, 0.021) is True
    assert agrees(5.6, 0.1, expected=5.0, margin=0.1) is False
    assert agrees(1.0, 0.11) is None
    assert agrees(1.5, 0.11) is None
    assert agrees(1.6, 0.11) is False
    assert agrees(1.0, math.nan) is None


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ([True, True], "held"),
        ([True, False], "partly"),
        ([True, False, False], "not held"),
        ([True, None], "undecided"),
    ],
)
def test_several_answers_make_one_status(answers: list[Any], status: str) -> None:
    assert overall(answers) == status


def test_the_share_that_makes_partly_may_be_chosen() -> None:
    assert overall([True, False, False], partly=1 / 3) == "partly"
    assert overall([False, False, False], partly=1 / 3) == "not held"


def test_command_gives_the_config_again() -> None:
    assert command("toy", toy, toy.Config()) == "twinboot toy"
    assert command("toy", toy, toy.QUICK) == "twinboot toy --quick"
    assert command("toy", toy, toy.Config(sizes=(3, 4), scale=2.0)) == "twinboot toy --scale 2.0 --sizes 3 4"


def test_lists_have_values_and_each_once() -> None:
    refuse_repeated(toy.Config(), "sizes")
    for sizes in ((), (1, 1)):
        with pytest.raises(ValueError, match="sizes"):
            refuse_repeated(toy.Config(sizes=sizes), "sizes")


def test_threads_come_back() -> None:
    torch.set_num_threads(2)
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_a_run_is_called_by_its_preset_where_that_is_not_the_usual_one() -> None:
    assert label("toy", toy, toy.Config()) == "toy"
    assert label("images", images, images.Config()) == "images"
    assert label("images", images, images.Config(preset="cifar10-5k")) == "images-cifar10-5k"


def test_a_flag_is_given_without_a_value() -> None:
    config = images.Config(preset="cifar10-5k", spare=True, methods=("twins", "twins-draws"))
    assert command("images", images, config) == (
        "twinboot images --preset cifar10-5k --methods twins twins-draws --spare"
    )


@pytest.mark.parametrize(
    ("answers", "expected"),
    [((True, True), "held"), ((True, False), "held"), ((False, True), "partly"), ((False, False), "not held")],
)
def test_a_status_is_the_strongest_that_holds_and_undecided_with_too_few_runs(
    answers: tuple[bool, bool], expected: str
) -> None:
    assert status(*answers) == expected
    assert status(*answers, too_few=True) == "undecided"


def test_settings_below_their_limit_are_refused_and_nan_is_below_any() -> None:
    config = SimpleNamespace(lr=0.0, seeds=1, noise=math.nan)
    require_positive(config, "seeds")
    require_at_least(config, 0, "lr", "seeds")
    with pytest.raises(ValueError, match=r"lr must be above 0, not 0\.0"):
        require_positive(config, "seeds", "lr")
    with pytest.raises(ValueError, match="seeds must be at least 2, not 1"):
        require_at_least(config, 2, "seeds")
    for check in (lambda: require_positive(config, "noise"), lambda: require_at_least(config, 0, "noise")):
        with pytest.raises(ValueError, match="noise must be"):
            check()
