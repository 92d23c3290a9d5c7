"""A single model in training: what it reads, what is kept of it, and how it goes on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinboot.experiments.images.single import Problem, Single, accuracy_and_loss, logits_of


def points(batch: int = 16, seed: int = 0) -> Problem:
    """Three classes of points around three corners, which Adam with a falling learning rate learns."""
    y = torch.arange(120) % 3
    x = 2 * torch.eye(3, 4)[y] + torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
    return Problem(x, y, lambda dropout, seed: net(), epochs=4, batch=batch, lr=0.02, samples=2, seed=seed)


def net(seed: int = 0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 2)
    return model


def adam(model: nn.Module) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([value.double().flatten() for value in model.state_dict().values()])


def test_a_held_out_image_changes_nothing_that_is_trained() -> None:
    found = []
    for value in (0.0, 100.0):
        problem = points()
        problem.x[[3, 7, 11]] = value
        run = Single(problem, make=adam, held=torch.tensor([3, 7, 11]))
        run.train(2)
        found.append(weights(run.of("last")))
    assert torch.equal(*found)
    assert 3 not in run.trained_on
    assert len(run.trained_on) == 117


def test_the_kept_states_are_those_with_the_lowest_loss_and_the_highest_accuracy_on_the_hold_out() -> None:
    problem = points()
    run = Single(problem, make=adam, held=torch.arange(30))
    run.train(8)
    assert accuracy_and_loss(run.of("loss"), problem.x[:30], problem.y[:30])[1] == min(run.curve["loss"])
    assert accuracy_and_loss(run.of("accuracy"), problem.x[:30], problem.y[:30])[0] == max(run.curve["validation"])


def test_an_average_is_that_of_the_weights_after_its_epochs() -> None:
    run = Single(points(), make=adam, power=0, averaged=range(3, 5), keep=(3, 4))
    run.train(6)
    after = [list(run.of(f"after {epoch}").parameters()) for epoch in (3, 4)]
    means = [torch.stack(values).mean(0) for values in zip(*after, strict=True)]
    for mean, p in zip(means, run.of("average").parameters(), strict=True):
        torch.testing.assert_close(p, mean)


def test_what_is_kept_on_the_way_is_the_end_of_a_shorter_run() -> None:
    long, short = (Single(points(), make=adam, keep=(2,)) for _ in range(2))
    long.train(4)
    short.train(2)
    assert torch.equal(weights(long.of("after 2")), weights(short.of("last")))
    assert not torch.equal(weights(long.of("last")), weights(short.of("last")))


def test_the_average_that_predicts_the_hold_out_best_is_kept_with_statistics_of_its_own() -> None:
    problem = points(batch=90)  # one batch of all others
    run = Single(problem, make=adam, held=torch.arange(30), power=3, averaged=range(1, 6))
    run.train(5)
    model = run.of("average, loss")
    torch.testing.assert_close(model[1].running_mean, model[0](problem.x[30:]).mean(0))
    loss = accuracy_and_loss(model, problem.x[:30], problem.y[:30])[1]
    assert loss == pytest.approx(run.lowest["average, loss"], rel=1e-3)


def test_what_is_kept_of_an_average_has_statistics_of_all_images_though_few_judged_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("twinboot.experiments.images.single.ENOUGH", 30)  # one batch of three
    problem = points(batch=30)
    run = Single(problem, make=adam, held=torch.arange(30), power=3, averaged=range(1, 6))
    run.train(5)
    model = run.of("average, loss")
    torch.testing.assert_close(model[1].running_mean, model[0](problem.x[30:]).mean(0))


def ivon(model: nn.Module) -> Any:
    optimizer = pytest.importorskip("ivon", reason="the extra compare is not installed").IVON
    found = optimizer(model.parameters(), lr=0.1, ess=120)
    return found, torch.optim.lr_scheduler.CosineAnnealingLR(found, 4)


@pytest.mark.parametrize("make", [adam, ivon])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path, make: Any) -> None:
    def run() -> Single:
        held = torch.tensor([1, 2, 3])
        return Single(points(seed=1), make=make, held=held, power=3.0, averaged=range(2, 5), keep=(1,))

    whole = run()
    whole.train(4)
    run().train(2, tmp_path)
    torch.manual_seed(99)  # as another process would have it
    again = run()
    again.train(4, tmp_path)
    for state in ("last", "loss", "accuracy", "average", "average, loss", "after 1"):
        assert torch.equal(weights(again.of(state)), weights(whole.of(state)))
    assert again.curve["loss"] == whole.curve["loss"]


def test_global_generators_stay_as_they_are() -> None:
    model = net()
    problem = replace(points(), network=lambda dropout, seed: model)
    before = torch.get_rng_state()
    Single(problem, make=adam, power=0, averaged=range(1, 2)).train(1)
    assert torch.equal(before, torch.get_rng_state())


def test_a_loss_that_is_not_finite_names_epoch_and_step() -> None:
    problem = points()
    problem.x[5] = torch.nan
    with pytest.raises(FloatingPointError, match=r"not finite in epoch 1, step \d+"):
        Single(problem, make=adam).train(1)


def test_dropout_draws_only_where_it_is_asked_for() -> None:
    model, x = net(), points().x
    assert torch.equal(logits_of(model, x), logits_of(model, x))
    assert not torch.equal(logits_of(model, x, dropout=True), logits_of(model, x, dropout=True))
