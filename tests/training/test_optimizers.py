"""Optimizers that are make_optimizer for the twins, and what would train nothing."""

import time
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from twinboot.training.optimizers import adam, make_optimizer, settings_of_scheduler

FROZEN = nn.Parameter(torch.zeros(1), requires_grad=False)
TWINS = [[nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3, 3)), FROZEN] for _ in range(2)]
OWN = [*TWINS[0], *TWINS[1][:2]]


def test_by_default_it_is_adam_at_the_rate() -> None:
    found = make_optimizer(None, TWINS, 0.25)
    assert isinstance(found, torch.optim.Adam)
    assert [(group["lr"], group["params"]) for group in found.param_groups] == [(0.25, OWN)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_adam_in_one_call_is_adam(dtype: torch.dtype) -> None:
    stepped = []
    for make in (adam, torch.optim.Adam):
        weights = [nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.ones((), dtype=dtype))]
        optimizer = make(weights, 0.1)
        for scale in (1.0, -3.0):
            for w in weights:
                w.grad = torch.full_like(w, scale)
            optimizer.step()
        stepped.append([w.detach() for w in weights])
        assert optimizer.param_groups[0]["fused"] == (True if make is adam else None)
    torch.testing.assert_close(*stepped)


def by_shape(parameters: Any) -> torch.optim.Optimizer:
    vectors, matrices = ([p for p in parameters if p.ndim == n] for n in (1, 2))
    return torch.optim.SGD([{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "lr": 0.2}], 0.1)


def test_groups_with_options_of_their_own_are_fine_and_frozen_parameters_may_be_left_out() -> None:
    assert len(make_optimizer(by_shape, TWINS, 1.0).param_groups) == 2
    each = make_optimizer(lambda p: torch.optim.SGD([{"params": [x], "lr": 0.1} for x in p]), TWINS, 1.0)
    assert len(each.param_groups) == len(OWN)
    trained = [p for p in OWN if p.requires_grad]
    assert make_optimizer(lambda p: torch.optim.SGD(trained, 0.1), TWINS, 1.0).param_groups[0]["params"] == trained


@pytest.mark.parametrize("part", [slice(-2, None), slice(1), slice(0, 2)])
def test_an_optimizer_of_a_part_is_refused_and_the_sentence_says_how_to_train_one(part: slice) -> None:
    with pytest.raises(
        ValueError, match=r"trains only some .*: to train a part of the model, freeze the rest with req"
    ):
        make_optimizer(lambda p: torch.optim.Adam(list(p)[part]), TWINS, 0.1)


def test_twins_that_would_be_trained_at_different_rates_are_refused() -> None:
    def by_place(parameters: Any) -> torch.optim.Optimizer:
        p = list(parameters)
        return torch.optim.SGD([{"params": p[:3]}, {"params": p[3:], "lr": 0.2}], 0.1)

    with pytest.raises(ValueError, match=r"has other options for the same weight of different twins: divide"):
        make_optimizer(by_place, TWINS, 0.1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (torch.optim.Adam(OWN), "optimizer must be a function that makes one"),
        (lambda p: torch.optim.Adam([nn.Parameter(torch.zeros(2))]), "those of the twins"),
        (lambda p: None, "optimizer must be a function that makes an optimizer, but it made None"),
    ],
)
def test_what_would_train_nothing_is_refused(make: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        make_optimizer(make, TWINS, 0.1)


class OwnScheduler(torch.optim.lr_scheduler.LRScheduler):
    """With a number that differs from run to run."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.began = time.time()
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]


def test_settings_of_a_scheduler_are_what_it_was_made_with_but_for_functions() -> None:
    rate = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD(OWN, 0.1)
    assert settings_of_scheduler(None) == {}
    assert settings_of_scheduler(rate.MultiStepLR(optimizer, [3, 5]))["milestones"] == "{3: 1, 5: 1}"
    step = settings_of_scheduler(rate.StepLR(torch.optim.SGD(OWN, cast(float, np.float64(0.1))), 4, np.float64(0.5)))
    assert step == {"step_size": "4", "gamma": "0.5"}
    chain = [rate.SequentialLR(optimizer, [rate.StepLR(optimizer, n), rate.StepLR(optimizer, 3)], [2]) for n in (4, 5)]
    assert settings_of_scheduler(chain[0]) != settings_of_scheduler(chain[1])
    own = rate.LambdaLR(optimizer, lambda epoch: 1.0)
    assert not any(" at 0x" in value for value in settings_of_scheduler(own).values())
    assert settings_of_scheduler(OwnScheduler(optimizer)) == {}
    swa = torch.optim.swa_utils.SWALR(optimizer, 0.05)
    assert not any(" at 0x" in value for value in settings_of_scheduler(swa).values())
