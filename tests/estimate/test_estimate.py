import copy
import math
import warnings
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loops import assert_same_bits, classes, mlp, pairs, seeded, train
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from twinboot import Blocks, Estimate, Prediction, Twins, fit
from twinboot._core.seeds import derive
from twinboot._core.seeds import seeded as from_seed
from twinboot.estimate.centered import around
from twinboot.estimate.prediction import TASKS
from twinboot.estimate.student import half_width


def trained(model: nn.Module | None = None, **options: Any) -> Twins:
    twins = Twins(model or mlp(), **options)
    train(twins, pairs(), torch.optim.Adam(twins.parameters(), 5e-2))
    return twins


def of_classes(twins: Twins) -> Estimate:
    """The twins' estimate, with its task set."""
    estimate = twins.estimate()
    estimate.task = "classification"
    return estimate


X = classes(n=23, seed=8).tensors[0]


def doubtful(model: nn.Module, sigma: float = 0.1) -> Estimate:
    """An estimate without training."""
    estimate = of_classes(Twins(model))
    estimate.partition.sigma.fill_(sigma)
    return estimate


def assert_close(first: Prediction, second: Prediction) -> None:
    torch.testing.assert_close(first.mean, second.mean)
    torch.testing.assert_close(first.std, second.std, rtol=1e-4, atol=1e-6)


def test_the_mean_model_has_the_mean_weights_in_the_users_own_class() -> None:
    twins = Twins(mlp(), replicas=3)
    train(twins, pairs(replicas=3), torch.optim.Adam(twins.parameters(), 5e-2))
    estimate = twins.estimate()
    assert type(estimate.module) is nn.Sequential
    for p, *copies in zip(estimate.module.parameters(), *(t.parameters() for t in twins), strict=True):
        torch.testing.assert_close(p, torch.stack([c.detach() for c in copies]).mean(0))
    assert_same_bits(estimate(X), estimate.module(X))
    assert not estimate.training
    assert_same_bits(estimate.sigma, twins.sigma)


def test_the_estimate_does_not_change_when_the_twins_go_on() -> None:
    twins = trained()
    estimate = of_classes(twins)
    before = estimate.predict(X, samples=4)
    train(twins, pairs(), torch.optim.Adam(twins.parameters(), 5e-2))
    assert_same_bits(estimate.predict(X, samples=4).mean, before.mean)


def test_zero_samples_is_the_mean_model() -> None:
    estimate = of_classes(trained())
    prediction = estimate.predict(X, samples=0)
    torch.testing.assert_close(prediction.probs, estimate(X).softmax(1).detach())
    assert (prediction.std == 0).all()
    assert_same_bits(estimate.predict(X, samples=0, vectorize=True).probs, prediction.probs)
    torch.testing.assert_close(prediction.mutual_information, torch.zeros(23), atol=1e-6, rtol=0)
    values = estimate.predict(X, samples=0, task="regression")
    torch.testing.assert_close(values.mean, estimate(X).detach())


def test_draws_have_the_mean_and_the_variance_of_their_group() -> None:
    twins = Twins(nn.Linear(30, 20), groups="tensor")
    twins.partition.sigma.copy_(torch.tensor([0.3, 2.0]))
    estimate = twins.estimate()
    models = [estimate.sample(seed) for seed in range(200)]
    for name, sigma in [("weight", 0.3), ("bias", 2.0)]:
        draws = torch.stack([m.get_parameter(name).detach() for m in models]) - twins[0].get_parameter(name).detach()
        n = draws.numel()
        assert abs(draws.mean()) < 4 * sigma / n**0.5
        assert abs(draws.var() / sigma**2 - 1) < 4 * (2 / n) ** 0.5
    assert_same_bits(estimate.sample(3).state_dict(), estimate.sample(3).state_dict())
    assert type(models[0]) is nn.Linear


def test_a_linear_models_prediction_has_the_variance_of_the_closed_form() -> None:
    twins = Twins(nn.Linear(5, 1))
    twins.partition.sigma.fill_(0.2)
    x = torch.randn(6, 5, generator=seeded(0))
    samples = 4000
    prediction = twins.estimate().predict(x, samples, task="regression")
    exact = 0.2**2 * (x.square().sum(1) + 1)  # the bias too
    assert ((prediction.std[:, 0].square() / exact - 1).abs() < 4 * (2 / samples) ** 0.5).all()
    doubled = twins.estimate().predict(x, samples, task="regression", scale=2.0)
    torch.testing.assert_close(doubled.std, 2 * prediction.std, rtol=1e-3, atol=0)


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("groups", ["layer", "unit"])
def test_vmap_and_loop_give_the_same_numbers(task: Any, groups: str) -> None:
    estimate = trained(groups=groups).estimate()
    together = estimate.predict(X, 9, task, vectorize=True)
    assert_close(together, estimate.predict(X, 9, task, vectorize=False))
    assert (together.std > 0).all()


def test_chunks_and_stacks_do_not_change_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = of_classes(trained())
    whole = estimate.predict(X, 7)
    for batch_size in (1, 5, 23):
        assert_close(estimate.predict(X, 7, batch_size=batch_size), whole)
    monkeypatch.setattr("twinboot.estimate.estimate._DRAWS_AT_ONCE", 2)
    assert_close(estimate.predict(X, 7), whole)


class Largest(TorchDispatchMode):
    """The largest number of entries in a new tensor."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            if isinstance(t, Tensor) and t._base is None:
                self.entries = max(self.entries, t.numel())
        return made


@pytest.mark.parametrize("vectorize", [True, False])
def test_memory_does_not_grow_with_the_number_of_draws_or_with_the_inputs_beyond_the_result(vectorize: bool) -> None:
    estimate = doubtful(mlp(hidden=50))
    largest = {}
    for n, samples in [(2000, 16), (2000, 64), (8000, 16)]:
        x = torch.zeros(n, 4)
        with Largest() as watch:
            estimate.predict(x, samples=samples, batch_size=32, vectorize=vectorize)
        largest[n, samples] = watch.entries
    assert largest[2000, 16] == largest[2000, 64]
    assert largest[8000, 16] == max(8000 * 3, largest[2000, 16])  # the probabilities themselves


def test_predictions_carry_no_graph() -> None:
    assert not of_classes(trained()).predict(X, 4).mean.requires_grad


def test_seed_and_scale_decide_the_draws() -> None:
    estimate = of_classes(trained())
    assert_same_bits(estimate.predict(X, 4, seed=1).mean, estimate.predict(X, 4, seed=1).mean)
    assert not torch.equal(estimate.predict(X, 4, seed=1).mean, estimate.predict(X, 4, seed=2).mean)
    center = estimate.module[0].weight.detach()
    once, thrice = (estimate.sample(seed=5, scale=s)[0].weight.detach() - center for s in (1.0, 3.0))
    torch.testing.assert_close(thrice, 3 * once, rtol=1e-4, atol=1e-6)


def test_predicting_leaves_hook_based_norms_usable() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 3))
        estimate = of_classes(trained(model))
    first = estimate.predict(X, 4)
    estimate.sample()
    assert_close(estimate.predict(X, 4, vectorize=False), first)


def test_models_that_vmap_refuses_are_looped_over() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return y if y.sum() > 0 else -y  # control flow on values

    estimate = of_classes(trained(Branching()))
    assert_close(estimate.predict(X, 5), estimate.predict(X, 5, vectorize=False))
    with pytest.raises(RuntimeError):
        estimate.predict(X, 5, vectorize=True)


class Words(nn.Module):
    """Classifies texts by the mean of the embeddings of their words, of which 0 is padding."""

    def __init__(self, each: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.each, self.embed, self.head = each, nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        found = self.embed(ids) * mask.unsqueeze(-1)
        if self.each:
            return self.head(found).movedim(-1, 1)  # type: ignore[no-any-return]
        return self.head(found.sum(1) / mask.sum(1, keepdim=True))  # type: ignore[no-any-return]


class Tokenizer:
    """Splits texts at spaces and numbers the words, as a tokenizer of Hugging Face does."""

    pad_token = "[PAD]"
    words = ("[PAD]", "a", "b", "c", "d")

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], dict[str, Any]]] = []

    def __call__(self, texts: list[str], **options: Any) -> UserDict[str, Tensor]:
        self.asked.append((texts, options))
        rows = [[self.words.index(word) for word in text.split()] for text in texts]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        return UserDict({"ids": ids, "mask": (ids > 0).long()})


TEXTS = ["a", "b c d", "d a", "c", "a b"]


def test_texts_are_read_in_batches_each_once_and_padding_changes_nothing() -> None:
    estimate, tokenizer = doubtful(Words()), Tokenizer()
    found = estimate.predict(TEXTS, 6, tokenizer=tokenizer, batch_size=2)
    told = {"padding": True, "truncation": True, "return_tensors": "pt"}
    assert tokenizer.asked == [(TEXTS[:2], told), (TEXTS[2:4], told), (TEXTS[4:], told)]
    assert_close(found, estimate.predict(dict(Tokenizer()(TEXTS)), 6))
    assert (found.std > 0).all()
    for texts in (tuple(TEXTS), np.array(TEXTS)):
        assert_close(estimate.predict(texts, 6, tokenizer=tokenizer), found)


def test_a_tokenizer_may_be_any_function_which_is_told_nothing() -> None:
    def tokenize(texts: list[str]) -> dict[str, Tensor]:
        return dict(Tokenizer()(texts))

    estimate = doubtful(Words())
    assert_close(estimate.predict(TEXTS, 6, tokenizer=tokenize), estimate.predict(TEXTS, 6, tokenizer=Tokenizer()))


def test_mistakes_with_texts_get_one_sentence() -> None:
    estimate, tokenizer = doubtful(Words()), Tokenizer()
    must = "^with a tokenizer, x must be a list of texts, "
    wrong: list[tuple[Any, Any, str]] = [
        ("a b", tokenizer, must + r"not 'a b'\.$"),
        (5, tokenizer, must + r"not 5\.$"),
        (["a", 5], tokenizer, must + r"but x\[1\] is 5\.$"),
        (X, tokenizer, must + r"but x\[0\] is tensor"),
        ([], tokenizer, r"^x has no texts: give at least one\.$"),
        (TEXTS, "bert", r"^tokenizer must be a function or None, not 'bert'\.$"),
        (TEXTS, lambda texts: torch.zeros(5), "^tokenizer must give a mapping of tensors with a row for each text"),
        (TEXTS, lambda texts: {"ids": [[1], [2]]}, "^tokenizer must give a mapping of tensors with a row for each"),
        (TEXTS, lambda texts: {"ids": torch.ones(1, 2)}, "^tokenizer must give a mapping of tensors with a row for"),
        (TEXTS, None, r"; for texts give tokenizer=\.$"),
    ]
    for texts, given, said in wrong:
        with pytest.raises((TypeError, ValueError), match=said):
            estimate.predict(texts, tokenizer=given)
    with pytest.raises(TypeError, match=r"^give the tokenizer by its name: predict\(texts, tokenizer=tokenizer\)\.$"):
        estimate.predict(TEXTS, tokenizer)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"^batches have outputs of shape \(3, 3\) and \(3, 2\): pad all inputs to one"
    ):
        doubtful(Words(each=True)).predict(TEXTS, tokenizer=tokenizer, batch_size=2)


def test_inputs_may_be_tuples_or_mappings() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, a: Tensor, b: Tensor, factor: float = 1.0) -> Tensor:
            return factor * self.layer(a) + b

    estimate = of_classes(Twins(Two()))
    b = torch.ones(23, 3)
    expected = estimate(X, b).softmax(1).detach()
    for x in [(X, b), [X, b], {"a": X, "b": b, "factor": 1.0}]:
        torch.testing.assert_close(estimate.predict(x, samples=0, batch_size=10).probs, expected)


@pytest.mark.parametrize("vectorize", [False, True])
def test_a_model_may_give_its_logits_with_something_else(vectorize: bool) -> None:
    class Named(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return SimpleNamespace(logits=super().forward(x), loss=None)

    plain, named = doubtful(nn.Linear(4, 3)), doubtful(Named(4, 3))
    named.module.load_state_dict(plain.module.state_dict())
    ours, theirs = (e.predict(X, 2, vectorize=vectorize).probs for e in (named, plain))
    assert torch.equal(ours, theirs)


def test_predict_leaves_modes_as_they_were_and_ignores_dropout() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    estimate = of_classes(Twins(model))
    estimate.module[1].train()
    first = estimate.predict(X, samples=0)
    assert_same_bits(estimate.predict(X, samples=0).mean, first.mean)
    assert estimate.module[1].training
    assert not estimate.module[0].training


# --- models that write into their inputs


class Shifted(nn.Module):
    """A network on the sum of its inputs, each less a half: subtracted in place if `writes`."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.layers, self.writes = mlp(), writes

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        shifted = [t.sub_(0.5) if self.writes else t - 0.5 for t in tree_leaves((args, kwargs))]
        return self.layers(sum(shifted))  # type: ignore[no-any-return]


@pytest.mark.parametrize("samples", [0, 9])  # more than are drawn at once
@pytest.mark.parametrize("vectorize", [True, False, None])
@pytest.mark.parametrize(
    "x",
    [
        pytest.param(X, id="tensor"),
        pytest.param(X[:1].expand(23, 4), id="expanded"),
        pytest.param((X, torch.ones(23, 1)), id="tuple"),
        pytest.param({"a": X, "b": torch.ones(23, 1)}, id="mapping"),
        pytest.param((X, torch.tensor(2.0)), id="0-dimensional"),
        pytest.param({"a": X, "b": torch.tensor(2.0)}, id="0-dimensional in a mapping"),
        pytest.param((X, {"a": [torch.ones(4), (torch.tensor(2.0),)]}), id="nested"),
        pytest.param({"a": X, "b": ({"c": torch.ones(4)}, [torch.tensor(2.0)])}, id="nested in a mapping"),
    ],
)
def test_a_model_that_writes_into_its_input_predicts_as_one_that_does_not(
    x: Any, vectorize: bool | None, samples: int
) -> None:
    given = copy.deepcopy(x)
    writing, pure = (doubtful(Shifted(writes)) for writes in (True, False))
    found = writing.predict(given, samples, batch_size=10, vectorize=vectorize)
    assert_same_bits(given, x)
    expected = pure.predict(x, samples, batch_size=10, vectorize=vectorize)
    assert_same_bits((found.mean, found.std, found.entropy), (expected.mean, expected.std, expected.entropy))
    alike = writing.predict(given, samples, batch_size=10, vectorize=vectorize, scale=0.0)
    assert alike.std.max() < 1e-6  # all draws are the same, to rounding


def test_an_input_that_was_written_before_vmap_refused_the_model_is_as_it_was_for_the_loop() -> None:
    class Scaled(nn.Module):
        def __init__(self, writes: bool) -> None:
            super().__init__()
            self.layers, self.gain, self.writes = mlp(), nn.Parameter(torch.ones(4)), writes

        def forward(self, x: Tensor) -> Tensor:
            # The weights of several draws can't be written into the one input that all of them have.
            x = x.sub_(0.5).mul_(self.gain) if self.writes else (x - 0.5) * self.gain
            return self.layers(x)  # type: ignore[no-any-return]

    writing, pure = (doubtful(Scaled(writes)) for writes in (True, False))
    x = X.clone()
    assert_close(writing.predict(x, 5), pure.predict(X, 5))
    with pytest.raises(RuntimeError, match="vmap"):
        writing.predict(x, 5, vectorize=True)
    assert_same_bits(x, X)


# --- what the model predicts


def test_an_estimate_that_does_not_know_its_task_asks_for_it() -> None:
    estimate = trained().estimate()
    assert estimate.task is None
    asks = (
        r'^the estimate does not know what its model predicts: give task="classification", "regression" or "gaussian", '
        r"or set estimate\.task\.$"
    )
    for use in (estimate.predict, lambda x: estimate.predict(x, samples=0), lambda _: estimate.calibrate(classes(9))):
        with pytest.raises(ValueError, match=asks):
            use(X)
    assert estimate.predict(X, 2, "classification").task == "classification"
    estimate.task = "regression"
    assert estimate.predict(X, 2).task == "regression"
    assert estimate.predict(X, 2, "classification").task == "classification"


def test_values_of_two_outputs_are_never_taken_for_logits() -> None:
    target = torch.stack([X.sum(1), 9 * X[:, 0]], 1)
    fitted = fit(nn.Linear(4, 2), TensorDataset(X, target), "regression", epochs=2, progress=False).estimate
    plain = Twins(nn.Linear(4, 2)).estimate()
    with pytest.raises(ValueError, match="does not know what its model predicts"):
        plain.predict(X)
    for found, estimate in ((fitted.predict(X, 0), fitted), (plain.predict(X, 0, "regression"), plain)):
        torch.testing.assert_close(found.mean, estimate(X).detach())
        assert found.task == "regression"


@pytest.mark.parametrize("task", [None, *TASKS])
def test_a_file_keeps_what_the_model_predicts(task: Any, tmp_path: Path) -> None:
    estimate = trained(mlp(outputs=4)).estimate()
    if task is not None:
        estimate.task = task
    estimate.save(tmp_path / "estimate.safetensors")
    loaded = Estimate.load(tmp_path / "estimate.safetensors", mlp(outputs=4))
    assert loaded.task == task
    if task is None:
        with pytest.raises(ValueError, match="does not know what its model predicts"):
            loaded.predict(X)
    else:
        assert loaded.predict(X).task == task


# --- the estimate's own scale


def test_a_draw_is_as_far_from_the_mean_as_the_scale_says() -> None:
    """Exactly, around means of 0 and for powers of two, which need no rounding."""
    estimate = doubtful(mlp())
    center = {name: p.detach().clone() for name, p in estimate.module.named_parameters()}
    estimate.scale = 0.0
    assert_same_bits(dict(estimate.sample(seed=3).named_parameters()), center)
    with torch.no_grad():
        for p in estimate.module.parameters():
            p.zero_()
    once = [p.detach() for p in estimate.sample(seed=3, scale=1.0).parameters()]
    assert all(bool(p.any()) for p in once)
    for scale in (0.25, 1, 2.0, 4.0):
        estimate.scale = scale
        assert_same_bits([p.detach() for p in estimate.sample(seed=3).parameters()], [scale * p for p in once])
        assert_same_bits([p.detach() for p in estimate.sample(seed=3, scale=0.5).parameters()], [p / 2 for p in once])


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.5])
def test_sample_draws_from_the_law_of_predict(scale: float) -> None:
    """For a linear model: a variance of (scale * sigma)^2 (|x|^2 + 1), within four standard errors."""
    x, draws = torch.randn(6, 5, generator=seeded(0)), 1000
    estimate = doubtful(nn.Linear(5, 1), sigma=0.2)
    estimate.scale = scale
    exact = (scale * 0.2) ** 2 * (x.square().sum(1, keepdim=True) + 1)
    sampled = torch.stack([estimate.sample(seed)(x).detach() for seed in range(draws)])
    for mean, variance in (
        (sampled.mean(0), sampled.var(0)),
        ((found := estimate.predict(x, draws, "regression")).mean, found.std.square()),
    ):
        assert ((mean - estimate(x)).abs() < 4 * (exact / draws).sqrt()).all()
        assert ((variance / exact - 1).abs() < 4 * (2 / draws) ** 0.5).all()


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf])
def test_a_scale_of_the_estimate_that_cannot_be_is_refused(scale: float) -> None:
    estimate = doubtful(mlp())
    estimate.scale = scale
    for use in (estimate.sample, lambda: estimate.predict(X)):
        with pytest.raises(ValueError, match=f"scale must be a finite number of at least 0, not {scale!r}"):
            use()
    assert estimate.sample(scale=1.0) is not None


# --- BatchNorm


def test_update_batchnorm_gives_the_mean_model_statistics_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    twins = trained(model)
    estimate = twins.estimate()
    for name in ("running_mean", "running_var"):
        ofs = [getattr(t[1], name) for t in twins]
        torch.testing.assert_close(getattr(estimate.module[1], name), (ofs[0] + ofs[1]) / 2)
    data = classes(n=64)
    hidden = estimate.module[0](data.tensors[0]).detach()
    estimate.update_batchnorm(DataLoader(data, batch_size=16))
    torch.testing.assert_close(estimate.module[1].running_mean, hidden.mean(0))
    within = torch.stack([h.var(0) for h in hidden.split(16)]).mean(0)
    torch.testing.assert_close(estimate.module[1].running_var, within)
    assert not estimate.module.training
    estimate.update_batchnorm([data.tensors[0]])
    estimate.update_batchnorm([{"x": data.tensors[0]}], inputs=lambda batch: batch["x"])
    torch.testing.assert_close(estimate.module[1].running_var, hidden.var(0))


def test_update_batchnorm_takes_what_predict_takes() -> None:
    class Named(nn.Sequential):
        def forward(self, *, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)  # type: ignore[no-any-return]

    estimate = doubtful(Named(nn.BatchNorm1d(4), nn.Linear(4, 3)))
    estimate.update_batchnorm([{"x": X}], inputs=lambda batch: batch)
    torch.testing.assert_close(estimate.module[0].running_mean, X.mean(0))
    assert estimate.predict({"x": X}).probs.shape == (len(X), 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (nn.Linear(3, 5), r"'weight' is of shape \(5, 3\), where \(1, 3\) was trained"),
        (nn.Linear(3, 1, bias=False), "it has 1 parameters and buffers, where 2 were trained"),
        (nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1)), "it has 4 parameters and buffers, where 2 were trained"),
    ],
)
def test_an_estimate_in_a_model_of_another_kind_is_refused(given: nn.Module, said: str) -> None:
    with pytest.raises(ValueError, match=f"the model given is another one: {said}"):
        Twins(nn.Linear(3, 1)).estimate(given)


def test_a_buffer_that_was_expanded_is_no_obstacle() -> None:
    class Masked(nn.Linear):
        def __init__(self, value: float) -> None:
            super().__init__(3, 1)
            self.register_buffer("mask", torch.full((2, 1, 3), value).expand(2, 4, 3))

    estimate = Twins(Masked(2.0)).estimate(Masked(1.0))
    assert torch.equal(estimate.module.get_buffer("mask"), torch.full((2, 4, 3), 2.0))
    estimate = Twins(nn.Sequential(nn.BatchNorm1d(3), Masked(2.0))).estimate()
    estimate.update_batchnorm([X[:, :3]])
    torch.testing.assert_close(estimate.module[0].running_mean, X[:, :3].mean(0))


def test_an_update_of_batchnorm_that_fails_changes_nothing() -> None:
    estimate = trained(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))).estimate()
    before = {k: v.clone() for k, v in estimate.state_dict().items()}
    for batches, error, sentence in [
        ([{"x": X}], TypeError, "a batch is a dict: give inputs="),
        ([X, {"x": X}], TypeError, "a batch is a dict"),
        ([], ValueError, "the loader gave no batch"),
        (pairs(), TypeError, "give a plain DataLoader of the training data"),
    ]:
        with pytest.raises(error, match=sentence):
            estimate.update_batchnorm(batches)  # type: ignore[arg-type]
        assert_same_bits(dict(estimate.state_dict()), before)
        assert not estimate.module.training
        assert estimate.module[1].momentum == 0.1


def test_a_model_without_batchnorm_is_not_run_for_statistics() -> None:
    read: list[int] = []
    Twins(mlp()).estimate().update_batchnorm(read.append(1) or X for _ in range(3))  # type: ignore[func-returns-value]
    assert not read


# --- files


class Wild(nn.Module):
    """Tied, frozen and parametrized weights, buffers, half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.norm = parametrizations.weight_norm(nn.Linear(4, 4))
        self.frozen = nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(False)
        self.batchnorm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(6).view(2, 3).T)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.batchnorm(self.norm(self.embed(tokens)))
        return self.head(hidden + self.frozen(hidden.bfloat16()))  # type: ignore[no-any-return]


@pytest.mark.parametrize("groups", ["layer", "tensor", "unit", lambda n, p: Blocks((2,))(n, p)])
def test_what_is_saved_is_loaded_to_the_bit(groups: Any, tmp_path: Any) -> None:
    tokens = torch.arange(9)
    twins = Twins(Wild(), groups=groups)
    data = ((tokens, tokens), (tokens.flip(0), tokens.flip(0)))
    train(twins, [data] * 3, torch.optim.Adam([p for p in twins.parameters() if p.requires_grad]))
    estimate = of_classes(twins)
    estimate.save(tmp_path / "estimate.safetensors")
    model = Wild()
    untouched = {k: v.clone() for k, v in model.state_dict().items()}
    again = Estimate.load(tmp_path / "estimate.safetensors", model)
    assert_same_bits(dict(again.module.state_dict()), dict(estimate.module.state_dict()))
    assert_same_bits(again.sigma, estimate.sigma)
    assert_same_bits(again.predict(tokens, 4).probs, estimate.predict(tokens, 4).probs)
    assert again.module.head.weight is again.module.embed.weight
    assert_same_bits(dict(model.state_dict()), untouched)
    assert [f.name for f in tmp_path.iterdir()] == ["estimate.safetensors"]


def test_half_does_not_make_sigma_coarse() -> None:
    estimate = trained().estimate()
    before = estimate.sigma
    assert_same_bits(estimate.half().sigma, before)


def test_it_says_what_calibration_found() -> None:
    estimate = trained().estimate()
    assert "temperature" not in repr(estimate)
    estimate.temperature, estimate.scale = 1.25, 0.0
    assert "temperature=1.25, scale=0\n" in repr(estimate)


# --- bad input


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"samples": 1}, "samples must be 0, for the mean alone, or at least 2, for a spread, not 1"),
        ({"samples": -2}, "samples must be 0, for the mean alone, or at least 2, for a spread, not -2"),
        ({"task": "ranking"}, 'unknown task \'ranking\': use "classification", "regression" or "gaussian"'),
        ({"task": ""}, "unknown task ''"),
        ({"task": "gaussian"}, r"gaussian needs a mean and a log-variance .* shape \(23, 3\)"),
        ({"scale": -1.0}, "scale must be a finite number of at least 0, not -1.0"),
        ({"scale": math.nan}, "scale must be a finite number of at least 0, not nan"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, not 0"),
        ({"x": (X, X[:3])}, r"x must be a tensor, .* found \[3, 23\]"),
        ({"x": X.numpy()}, r"found no tensor in ndarray; use torch.from_numpy\(x\)\."),
        ({"x": DataLoader(TensorDataset(X))}, "found no tensor in DataLoader; call predict for each batch"),
        ({"x": "text"}, "x must be a tensor, .* found no tensor"),
    ],
)
def test_bad_requests_get_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        of_classes(trained()).predict(**{"x": X, **options})


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf])
def test_a_temperature_that_cannot_be_is_refused(temperature: float) -> None:
    estimate = of_classes(trained())
    estimate.temperature = temperature
    with pytest.raises(ValueError, match=f"temperature must be a finite number above 0, not {temperature!r}"):
        estimate.predict(X)
    with pytest.raises(TypeError, match="scale must be a number, not '1'"):
        estimate.sample(scale="1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="scale must be a number, not True"):
        estimate.sample(scale=True)


def test_draws_without_sigma_are_no_error_bars_and_a_warning_says_what_was_forgotten() -> None:
    estimate = doubtful(mlp(), sigma=0.0)
    with pytest.warns(UserWarning, match=r"sigma is 0 everywhere, .* call twins.update\(\) after each"):
        estimate.predict(X)
    estimate.predict(X, samples=0)
    estimate.scale = 0.0  # as `calibrate` may find, which has said so
    estimate.predict(X)


@pytest.mark.parametrize("vectorize", [False, True])
def test_a_variance_that_the_model_predicts_is_the_noise_of_measurements(vectorize: bool) -> None:
    estimate = doubtful(nn.Linear(4, 6))
    found = estimate.predict(X, 5, "gaussian", batch_size=7, vectorize=vectorize)
    heads = estimate.predict(X, 5, "regression", vectorize=vectorize)
    torch.testing.assert_close(found.mean, heads.mean[:, :3])
    torch.testing.assert_close(found.std, heads.std[:, :3])
    draws = torch.stack([estimate._draw(derive(0, "predict", s), 1.0)["weight"] for s in range(5)])
    biases = torch.stack([estimate._draw(derive(0, "predict", s), 1.0)["bias"] for s in range(5)])
    logarithms = (X @ draws.mT + biases[:, None])[:, :, 3:]
    assert found.noise is not None
    torch.testing.assert_close(found.noise, logarithms.exp().mean(0).sqrt())
    low, high = found.interval(0.95)
    variance = found.std.square() + found.noise.square()
    assert found.df is not None
    df = found.df * (variance / found.std.square()) ** 2  # the noise counts as known
    torch.testing.assert_close((high - low) / 2, half_width(0.95, df) * variance.sqrt())
    values = Prediction("regression", found.mean, found.std, df=found.df)
    expected = [own.interval(0.95, noise=0.0)[0] for own in (found, values)]
    torch.testing.assert_close(*expected)  # of the expected value
    normal = torch.distributions.Normal(found.mean, (found.std.square() + found.noise.square()).sqrt())
    target = torch.zeros(len(X), 3)
    torch.testing.assert_close(found.nll(target), -normal.log_prob(target))
    assert repr(found).startswith("Prediction(gaussian, 23 inputs, shape (23, 3), std ")
    assert ", noise " in repr(found)


def test_models_that_do_not_fit_the_task_get_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"logits of at least two classes along dimension 1, .* shape \(23, 1\)"):
        doubtful(nn.Linear(4, 1)).predict(X)

    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return x, x

    with pytest.raises(TypeError, match="predict needs a model that returns a tensor, not tuple"):
        doubtful(Pair(4, 4)).predict(X)


def test_a_draw_depends_on_seed_and_shape_and_not_on_how_the_weights_lie_in_memory(tmp_path: Path) -> None:
    def convolutions() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, 3))

    model = convolutions().to(memory_format=torch.channels_last)
    twins = Twins(model)
    twins.partition.sigma.fill_(0.1)
    estimate = of_classes(twins)
    estimate.save(tmp_path / "estimate.safetensors")
    loaded = Estimate.load(tmp_path / "estimate.safetensors", convolutions())
    assert not estimate.module[0].weight.is_contiguous()
    assert loaded.module[0].weight.is_contiguous()
    drawn, again = estimate.sample(seed=3), loaded.sample(seed=3)
    assert_same_bits(dict(drawn.named_parameters()), dict(again.named_parameters()))
    weight = drawn[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    x = torch.randn(5, 3, 6, 6, generator=seeded(0))
    for vectorize in (False, True):
        assert_close(estimate.predict(x, 4, vectorize=vectorize), loaded.predict(x, 4, vectorize=vectorize))


def test_a_frozen_model_has_draws_and_means_of_its_own() -> None:
    twins = Twins(mlp())
    twins.partition.sigma.fill_(0.1)
    twins.requires_grad_(False)  # as one does with a model that is ready for use
    clean = [p.clone() for p in twins[0].parameters()]
    with torch.no_grad():
        for p in twins[1].parameters():
            p.add_(1.0)
    estimate = twins.estimate()
    assert_same_bits([p.clone() for p in twins[0].parameters()], clean)
    before = copy.deepcopy(estimate.state_dict())
    drawn = estimate.sample(seed=1)
    assert_same_bits(dict(estimate.state_dict()), dict(before))
    assert any((a != b).any() for a, b in zip(drawn.parameters(), estimate.module.parameters(), strict=True))


def test_update_batchnorm_leaves_the_callers_tensors_alone() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.sub_(0.5))

    x = torch.randn(16, 4, generator=seeded(0))
    before = x.clone()
    estimate = Twins(Writing()).estimate()
    estimate.update_batchnorm([x, x])
    assert_same_bits(x, before)
    torch.testing.assert_close(estimate.module.norm.running_mean, before.mean(0) - 0.5)


def test_an_estimate_is_of_some_copies() -> None:
    with pytest.raises(ValueError, match="there are no copies to take the mean of"):
        Estimate.of([], Twins(mlp()).partition)


def calibrated(task: str, **options: Any) -> tuple[Estimate, Tensor]:
    estimate = doubtful(mlp(outputs=2 if task == "gaussian" else 3))
    estimate.task = task  # type: ignore[assignment]
    x, labels = classes(50).tensors
    target = (
        labels if task == "classification" else torch.randn(50, 1 if task == "gaussian" else 3, generator=seeded(2))
    )
    estimate.conformalize(TensorDataset(x, target), batch_size=16, **options)
    return estimate, target


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("samples", [0, 6])
def test_scores_are_those_of_the_predictions_and_predictions_with_the_same_settings_have_them(
    task: Any, samples: int
) -> None:
    estimate, target = calibrated(task, samples=samples)
    x = classes(50).tensors[0]
    assert estimate.scores is not None
    found = estimate.predict(x, samples, batch_size=16)
    torch.testing.assert_close(estimate.scores.values, found._scores_of(target).sort(0).values)
    assert found.scores is estimate.scores
    if task == "classification":
        inside = found.set(0.8)[torch.arange(50), target]
    else:
        low, high = found.conformal_interval(0.8)
        inside = (low - 1e-5 <= target) & (target <= high + 1e-5)  # one of them is at the end itself, up to rounding
    # of the calibration samples themselves, as many as the rank says; more only where scores are equal
    assert (inside.sum(0) >= math.ceil(51 * 0.8)).all()
    assert task == "classification" or (inside.sum(0) == math.ceil(51 * 0.8)).all()


@pytest.mark.parametrize(
    "change", [{"samples": 7}, {"seed": 1}, {"scale": 2.0}, {"temperature": 2.0}, {"task": "regression"}]
)
def test_predictions_with_other_settings_have_no_scores(change: dict[str, Any]) -> None:
    estimate, _ = calibrated("classification", samples=6)
    options = {"samples": 6, **change}
    estimate.temperature = options.pop("temperature", 1.0)
    assert estimate.predict(X, **options).scores is None


def test_noise_and_samples_that_are_of_no_use_get_a_sentence() -> None:
    estimate, _ = calibrated("regression", noise=0.5)
    assert estimate.scores is not None
    assert estimate.scores.noise == 0.5
    x, labels = classes(20).tensors
    with pytest.raises(ValueError, match="noise must be a finite number above 0"):
        estimate.conformalize(TensorDataset(x, labels), noise=0)
    with pytest.raises(ValueError, match=r"the targets have shape \(20,\), but the model gives \(20, 3\)"):
        estimate.conformalize(TensorDataset(x, labels))
    with pytest.raises(TypeError, match="conformalize has no option 'batchsize': did you mean 'batch_size'"):
        estimate.conformalize(TensorDataset(x, labels), batchsize=3)
    with pytest.raises(ValueError, match="outputs that are not finite for these samples"):
        estimate.conformalize(TensorDataset(x * math.inf, torch.zeros(20, 3)))


def test_the_noise_of_measurements_is_what_the_draws_leave_of_the_errors() -> None:
    """The variance of 20,000 normal errors is known to a hundredth."""
    estimate = doubtful(nn.Linear(4, 1), sigma=0.1)
    x = torch.randn(20_000, 4, generator=seeded(0))
    mean = estimate.predict(x, task="regression").mean
    with torch.no_grad():
        data = TensorDataset(x, mean + 2 * torch.randn(mean.shape, generator=seeded(1)))
    spread = estimate.predict(x, task="regression").std.square().mean().item()
    assert estimate.noise(data) ** 2 == pytest.approx(4 - spread, abs=4 * 4 * math.sqrt(2 / 20_000))
    assert estimate.noise(data, samples=0) ** 2 > estimate.noise(data) ** 2


# --- centered draws


def centered(model: nn.Module, sigma: float, task: Any = "classification") -> Estimate:
    estimate = doubtful(model, sigma)
    estimate.task, estimate.centered = task, True
    return estimate


def through_a_function() -> nn.Module:
    """A model that is no chain, so that each draw runs by itself."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(torch.sin(3 * self.inner(x)))

    with from_seed(5):
        return Net()


@pytest.mark.parametrize("make", [mlp, through_a_function])
@pytest.mark.parametrize("vectorize", [None, False, True])
def test_the_mean_output_of_centered_draws_is_that_of_the_mean_model(make: Any, vectorize: bool | None) -> None:
    estimate = centered(make(), sigma=1.0, task="regression")
    found = estimate.predict(X, 8, vectorize=vectorize)
    torch.testing.assert_close(found.mean, estimate.module(X).detach())
    estimate.centered = False
    torch.testing.assert_close(estimate.predict(X, 8, vectorize=vectorize).std, found.std)


@pytest.mark.parametrize("make", [mlp, through_a_function])
def test_classes_have_the_mean_probabilities_of_the_shifted_logits(make: Any) -> None:
    estimate = centered(make(), sigma=0.7)
    draws = list(estimate._models(8, 1.0, seed=3))
    with torch.no_grad():
        logits = torch.stack([draw(X) for draw in draws])
    own = estimate.module(X).detach()
    probs = (logits - logits.mean(0) + own).softmax(2)
    found = estimate.predict(X, 8, seed=3, vectorize=False)
    torch.testing.assert_close(found.probs, probs.mean(0))
    torch.testing.assert_close(found.std, probs.std(0))
    assert (found.mutual_information > 0).all()


def test_intervals_of_two_classes_are_around_the_mean_model() -> None:
    """Their log-odds are the difference of the logits, which has the shift of the logits."""
    estimate = centered(mlp(outputs=2), sigma=0.5)
    low, high = estimate.predict(X, 8).interval(0.9)
    own = estimate.module(X).detach()
    torch.testing.assert_close((low.logit() + high.logit())[:, 1] / 2, own[:, 1] - own[:, 0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kept", [1, 100, 2**26])
@pytest.mark.parametrize("vectorize", [None, False])
def test_centered_predictions_do_not_depend_on_what_is_in_memory_at_once(
    vectorize: bool | None, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimate = centered(through_a_function(), sigma=0.7)
    whole = estimate.predict(X, 6, vectorize=vectorize)
    monkeypatch.setattr("twinboot.estimate.centered.MOST_OUTPUTS", kept)
    assert_close(estimate.predict(X, 6, batch_size=2, vectorize=vectorize), whole)


def test_few_outputs_of_centered_draws_are_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate, shifted, seen = centered(through_a_function(), sigma=0.7), around, list[torch.Size]()
    monkeypatch.setattr("twinboot.estimate.centered.around", lambda d, *args: seen.append(d.shape) or shifted(d, *args))
    for most in (100, 1):
        monkeypatch.setattr("twinboot.estimate.centered.MOST_OUTPUTS", most)
        found = estimate.predict(X, 6)
        assert found.probs.shape[0] == sum(inputs for _, inputs, _ in seen) == len(X)
        assert all(own.numel() <= most or own[1] == 1 for own in seen)
        seen.clear()


def test_chunks_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate, parts = centered(through_a_function(), sigma=0.7), list[int]()
    runs = estimate._runs
    monkeypatch.setattr(estimate, "_runs", lambda *args, **options: parts.append(1) or runs(*args, **options))
    monkeypatch.setattr("twinboot.estimate.centered.MOST_OUTPUTS", 1)
    estimate.predict(X, 6, batch_size=1, vectorize=False)
    assert len(parts) == len(X)


class Masked(nn.Module):
    """One class is ruled out."""

    def __init__(self, logit: float) -> None:
        super().__init__()
        self.inner, self.logit = mlp(), logit

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).index_fill(1, torch.tensor([1]), self.logit)


class WithoutTheLeast(nn.Module):
    """The class with the smallest logit is ruled out: not the same one in all draws."""

    def __init__(self, logit: float) -> None:
        super().__init__()
        self.inner, self.logit = mlp(), logit

    def forward(self, x: Tensor) -> Tensor:
        logits = self.inner(x)
        return logits.masked_fill(logits == logits.min(1, keepdim=True).values, self.logit)


@pytest.mark.parametrize("make", [Masked, WithoutTheLeast])
@pytest.mark.parametrize("logit", [-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4])
@pytest.mark.parametrize("temperature", [1.0, 20.0])
def test_classes_that_the_model_rules_out_stay_impossible(make: Any, logit: float, temperature: float) -> None:
    estimate = centered(make(logit), sigma=0.5)
    estimate.temperature = temperature
    with torch.no_grad():
        drawn = torch.stack([draw(X).softmax(1) for draw in estimate._models(5, 1.0, seed=2)])
    found = estimate.predict(X, 5, seed=2)
    assert found.probs.isfinite().all()
    torch.testing.assert_close(found.probs.sum(1), torch.ones(len(X)))
    assert ((found.probs == 0) == (drawn == 0).all(0)).all()
    estimate.module.logit = -math.inf
    torch.testing.assert_close(estimate.predict(X, 5, seed=2).probs, found.probs)


def test_calibration_is_of_the_centered_draws() -> None:
    estimate = centered(through_a_function(), sigma=0.6)
    x, labels = classes(60).tensors
    loss = estimate.calibrate(TensorDataset(x, labels), samples=6, keep_scale=True)
    assert estimate.centered
    assert estimate.scale == 1
    assert estimate.predict(x, 6, vectorize=False).nll(labels).mean().item() == pytest.approx(loss, rel=1e-4)


def test_dropout_is_around_the_model_without_it() -> None:
    estimate = centered(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), 0.3, "regression")
    estimate.dropout = True
    for scale in (1.0, 0.0):
        torch.testing.assert_close(estimate.predict(X, 6, scale=scale).mean, estimate.module(X).detach())


def test_whether_draws_are_centered_is_saved_and_scores_of_other_draws_are_not_used(tmp_path: Path) -> None:
    estimate = centered(mlp(), sigma=0.5)
    x, labels = classes(50).tensors
    estimate.conformalize(TensorDataset(x, labels), samples=4)
    estimate.save(tmp_path / "estimate.safetensors")
    again = Estimate.load(tmp_path / "estimate.safetensors", mlp())
    assert again.centered
    assert again.predict(X, 4).scores is not None
    assert_close(again.predict(X, 4), estimate.predict(X, 4))
    again.centered = False
    assert again.predict(X, 4).scores is None
    again.conformalize(TensorDataset(x, labels), samples=4)
    del again.scores.settings["centered"]  # as in files of earlier revisions, which had no such draws
    assert again.predict(X, 4).scores is not None
