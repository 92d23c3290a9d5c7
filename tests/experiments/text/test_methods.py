import math
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

pytest.importorskip("peft", reason="needs the extra huggingface")
pytest.importorskip("ivon", reason="needs the extra compare")

from twinboot.experiments.text import config, methods
from twinboot.experiments.text.config import Config
from twinboot.experiments.text.methods import METHODS, Found, Plain, Posterior, Task, task_of, trained

CONFIG = Config(preset="toy", labels=(6,), epochs=2, lr=0.02, samples=3, queries=20, strange=20)

ROWS = {
    "lora": ["LoRA", "LoRA, 1.4 times the epochs"],
    "temperature": ["LoRA, temperature"],
    "dropout": ["MC dropout", "MC dropout, averaged"],
    "ensemble": ["ensemble of 2", "ensemble of 5"],
    "laplace": ["Laplace, last layer", "Laplace, prior by a hold-out"],
    "ivon": ["IVON"],
    "monteclora": ["MonteCLoRA"],
    "pvera": ["PVeRA"],
    "twins": ["twins", "twins, calibrated"],
    "cover": ["twins, all queries"],
    "split": ["twins, split data", "twins, split data, 1.3 times the epochs"],
    "spread": ["twins, spread=0.3"],
    "error_bars": ["error_bars", "error_bars, sigma"],
}
ALONE = ("LoRA", "MonteCLoRA")  # starts of rows that predict with one model


def first() -> tuple[Task, Plain]:
    return task_of(CONFIG, 6, 0), trained(CONFIG, 6, 0)


def rows_of(name: str) -> dict[str, Found]:
    task, _ = first()
    return dict(METHODS[name](task, partial(trained, CONFIG, 6, 0)))


@cache
def found_by(name: str) -> dict[str, Found]:
    return rows_of(name)


def test_every_method_of_the_config_is_there() -> None:
    assert set(METHODS) == set(config.METHODS) == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.filterwarnings("ignore:the twins ended with a training loss")
def test_each_method_predicts_for_all_queries_and_leaves_the_plain_adapter_alone(name: str) -> None:
    task, plain = first()
    before, found = task.logits(plain.model), found_by(name)
    assert list(found) == ROWS[name]
    for row, own in found.items():
        assert own.probs.shape == (40, task.classes)
        assert ((own.probs.sum(1) - 1).abs() < 1e-5).all()
        assert own.cost.seconds > 0
        assert own.cost.memory >= 0 or math.isnan(own.cost.memory)
        assert (own.information is None) == row.startswith(ALONE)
        assert own.information is None or row == "twins, calibrated" or bool((own.information > -1e-6).all())
    again = rows_of(name)
    assert torch.equal(task.logits(plain.model), before)
    assert all(torch.equal(own.probs, again[row].probs) for row, own in found.items())


@pytest.mark.parametrize("name", ["dropout", "ensemble", "laplace", "ivon", "pvera", "error_bars"])
def test_draws_and_members_differ(name: str) -> None:
    for own in found_by(name).values():
        assert own.information is not None
        assert own.information.max() > 0


def test_training_does_not_move_the_global_random_numbers() -> None:
    task, _ = first()
    before = torch.get_rng_state()
    methods.train(task, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_have_other_training_queries_and_the_same_test_queries() -> None:
    one, other = task_of(CONFIG, 6, 0), task_of(CONFIG, 6, 1)
    assert torch.equal(one.test.hidden, other.test.hidden)
    assert not torch.equal(one.x.hidden, other.x.hidden)
    assert torch.equal(one.y, other.y)
    assert one.y.bincount().tolist() == [6] * one.classes


def test_the_hold_out_is_not_trained_on_and_chooses_a_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    task, plain = first()
    sizes = []

    def train(task: Task, *args: object, **options: object) -> object:
        sizes.append(len(task.y))
        return type("T", (), {"model": plain.model}), 1.0

    monkeypatch.setattr(methods, "train", train)
    [(_, found)] = METHODS["temperature"](task, lambda: plain)
    assert sizes == [round(0.8 * len(task.y))]
    ratio = found.probs.log() - found.probs.log().mean(1, keepdim=True)
    logits = task.logits(plain.model)
    logits = logits - logits.mean(1, keepdim=True)
    assert torch.allclose(ratio * (logits[0, 0] / ratio[0, 0]), logits, atol=1e-4)  # one factor for all


def test_laplaces_draws_have_the_mean_and_covariance_of_the_exact_posterior_of_one_query() -> None:
    """With one query, the Kronecker form is the generalized Gauss-Newton matrix itself."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, generator=generator, dtype=torch.float64)
    weights = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    p = (x @ weights.T).softmax(1)[0]
    curvature = torch.kron(torch.diag(p) - torch.outer(p, p), x.T @ x)
    values = torch.linalg.eigvalsh(curvature).clamp(min=0)
    evidence = [6 * s.log() - s * weights.square().sum() - (values + s).log().sum() for s in methods.PRECISIONS]
    precision = methods.PRECISIONS[int(torch.stack(evidence).argmax())]
    exact = torch.linalg.inv(curvature + precision * torch.eye(6, dtype=torch.float64))
    found, n = Posterior.of(x, weights), 4000
    draws = torch.stack([found.draw(generator).flatten() for _ in range(n)])
    assert (((draws.mean(0) - weights.flatten()) / (exact.diag() / n).sqrt()).abs() < 4).all()
    scale = (torch.outer(exact.diag(), exact.diag()) + exact.square()).sqrt() / math.sqrt(n)
    assert ((draws.T.cov() - exact).abs() < 4.5 * scale).all()
    jacobian = torch.kron(torch.eye(2, dtype=torch.float64), x)
    assert torch.allclose(found.variance(x)[0], (jacobian @ exact @ jacobian.T).diag())


def test_laplaces_prior_of_a_hold_out_predicts_it_best() -> None:
    generator = torch.Generator().manual_seed(0)
    x, kept = (torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (40, 30))
    weights = 3 * torch.randn(4, 5, generator=generator, dtype=torch.float64)  # far too sure of random labels
    mode, labels = Posterior.of(x, weights), torch.randint(4, (30,), generator=generator)
    losses = [
        torch.nn.functional.cross_entropy(replace(mode, precision=precision).logits(kept), labels)
        for precision in methods.PRECISIONS
    ]
    found = mode.chosen_by(kept, labels)
    assert torch.nn.functional.cross_entropy(found.logits(kept), labels) == min(losses) < max(losses)


def test_choices_are_judged_by_queries_that_were_not_trained_on() -> None:
    found = methods.hold_out_scores(replace(CONFIG, epochs=1), "LoRA", every=3)
    assert 0 <= found["accuracy"] <= 1
    assert found["nll"] > 0
    ivon = methods.hold_out_scores(replace(CONFIG, epochs=1), "IVON", every=3)
    assert ivon["nll"] != found["nll"]
