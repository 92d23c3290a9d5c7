"""The methods that are compared. To add one, write a function below with `@method` before it, and add its name to
`METHODS` of config.py.

A method is a function of a task (the training queries of one seed). It yields a row of the table for each way to
predict; with other numbers of labels only the first is asked for. All train by a `Trainer` of Hugging Face, with one
learning rate that was chosen for a plain adapter; IVON, whose steps have another size, has its own.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast

import torch
from ivon import IVON
from peft import LoraConfig, MontecloraConfig, PveraConfig, get_peft_model
from peft.helpers import MontecloraTrainerMixin
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Subset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from ... import Bootstrap, Estimate, error_bars
from ..._core.seeds import derive, own_randomness, seeded
from ...estimate import calibration
from ...estimate.prediction import entropy
from ...integrations.huggingface import TwinTrainer
from ...training.protocol import FIT
from .config import Config
from .cost import Cost, measured
from .data import Queries, generated, read
from .encoder import BATCH, Classifier, Encoder, Features, collate

CPU = torch.device("cpu")
RANK = 8  # of LoRA, with twice that as its factor, which are the usual values for small models
PVERA_RANK = 256  # the default of peft, whose adapter has a vector of that length where LoRA has a matrix
TRAIN_BATCH = 32
HELD_OUT = 0.2  # share of the training queries that choose a temperature
LONGER = 1.4  # of a second plain adapter: so many times the epochs
LONGER_SPLIT = 1.3  # the same for twins that divide the queries, which then take about as long
MEMBERS = (2, 5)  # of ensembles
PRECISIONS = torch.logspace(-4, 4, 81, dtype=torch.float64)  # of Laplace's prior


@dataclass(frozen=True, eq=False)
class Task:
    """Training queries of one seed, and the test queries of all seeds: first those with an intent, by length."""

    encoder: Encoder
    layers: int
    classes: int
    x: Features
    y: Tensor
    test: Features
    test_y: Tensor  # of the queries with an intent
    epochs: int
    lr: float
    ivon_lr: float
    samples: int
    seed: int

    def model(self, seed: int, adapter: Any = None) -> nn.Module:
        """A new adapter with a new linear layer; its start depends on the seed alone."""
        with seeded(derive(seed, "adapter")):
            plain = self.encoder.classifier(self.layers, self.classes)
            return cast(nn.Module, get_peft_model(plain, adapter or lora()))

    def subset(self, rows: Tensor) -> Task:
        return replace(self, x=Features(self.x.hidden[rows], self.x.mask[rows]), y=self.y[rows])

    @torch.no_grad()
    def logits(self, model: nn.Module, features: Features | None = None) -> Tensor:
        """For the test queries, or others. Dropout is as the model's modules have it."""
        x = self.test if features is None else features
        found = []
        for hidden, mask in zip(x.hidden.split(BATCH), x.mask.split(BATCH), strict=True):
            longest = int(mask.sum(1).max())
            found.append(model(hidden[:, :longest], mask[:, :longest]).logits)
        return torch.cat(found)


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=["query", "value"], modules_to_save=["classifier"], **options
    )


@dataclass(frozen=True, eq=False)
class Found:
    """Predictions for the test queries."""

    probs: Tensor  # [queries, classes]
    cost: Cost  # of all trainings that it needs
    information: Tensor | None = None  # mutual information [queries], of methods with draws or members


@dataclass(frozen=True, eq=False)
class Plain:
    """An adapter that was trained as usual."""

    model: nn.Module
    cost: Cost


Rows = Iterator[tuple[str, Found]]
Method = Callable[[Task, Callable[[], Plain]], Rows]  # the plain adapter is trained if it is asked for
METHODS: dict[str, Method] = {}


def method(name: str) -> Callable[[Method], Method]:
    """Register a method."""

    def register(found: Method) -> Method:
        METHODS[name] = found
        return found

    return register


def train(
    task: Task,
    seed: int,
    model: nn.Module | None = None,
    kind: type[Trainer] = Trainer,
    callbacks: Iterable[TrainerCallback] = (),
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> tuple[Trainer, Cost]:
    """A trained adapter, in its `Trainer`, and what it cost."""
    with TemporaryDirectory() as folder, seeded(derive(seed, "training")):
        model = task.model(seed) if model is None else model
        settings = {
            "num_train_epochs": task.epochs,
            "learning_rate": task.lr,
            "per_device_train_batch_size": TRAIN_BATCH,
            "per_device_eval_batch_size": BATCH,
            "seed": derive(seed, "trainer") % 2**32,
            **dict.fromkeys(("save_strategy", "logging_strategy", "eval_strategy"), "no"),
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "dataloader_pin_memory": False,
        }
        rows = task.x.rows(task.y)
        trainer = kind(
            model,
            TrainingArguments(folder, **{**settings, **arguments}),
            train_dataset=rows,
            data_collator=collate,
            callbacks=list(callbacks),
            **(options or {}),
        )
        trainer.remove_callback(PrinterCallback)
        with measured() as cost:
            trainer.train()
    trainer.model.eval()
    return trainer, cost


@lru_cache(maxsize=1)  # several methods begin from the same adapter
def trained(config: Config, labels: int, number: int) -> Plain:
    task = task_of(config, labels, number)
    trainer, cost = train(task, task.seed)
    return Plain(trainer.model, cost)


@lru_cache(maxsize=1)
def warm_up(config: Config) -> None:
    """The first steps of a process take longer, and would count as training time."""
    task = task_of(config, config.labels[0], 0)
    train(task.subset(torch.arange(min(len(task.y), 2 * TRAIN_BATCH))), task.seed, num_train_epochs=1)


def _of_draws(draws: Iterable[Tensor], cost: Cost) -> Found:
    """From the logits of draws or members."""
    probs = [logits.softmax(1) for logits in draws]
    mean = torch.stack(probs).mean(0)
    return Found(mean, cost, entropy(mean) - torch.stack([entropy(p) for p in probs]).mean(0))


@method("lora")
def by_lora(task: Task, plain: Callable[[], Plain]) -> Rows:
    """A plain adapter, and one that trains longer."""
    first = plain()
    yield "LoRA", Found(task.logits(first.model).softmax(1), first.cost)
    longer, more = train(task, derive(task.seed, "longer"), num_train_epochs=round(LONGER * task.epochs))
    yield f"LoRA, {LONGER} times the epochs", Found(task.logits(longer.model).softmax(1), more)


@method("temperature")
def by_temperature(task: Task, plain: Callable[[], Plain]) -> Rows:
    """A part of the training queries chooses a temperature instead."""
    training, kept = _with_hold_out(task)
    trainer, cost = train(training, derive(task.seed, "temperature"))
    logits = task.logits(trainer.model, kept.x)
    temperature = calibration.temperature(logits[None], calibration.Labels(kept.y))
    yield "LoRA, temperature", Found((task.logits(trainer.model) / temperature).softmax(1), cost)


def _with_hold_out(task: Task) -> tuple[Task, Task]:
    """The task with most of its training queries, and with the others."""
    held = torch.zeros(len(task.y), dtype=torch.bool)
    order = torch.randperm(len(held), generator=torch.Generator().manual_seed(derive(task.seed, "hold-out")))
    held[order[: round(HELD_OUT * len(held))]] = True
    return task.subset(~held), task.subset(held)


@method("dropout")
def by_dropout(task: Task, plain: Callable[[], Plain]) -> Rows:
    """Masks of the encoder's own dropout at prediction; and with the weights averaged over the epochs of a training
    with a constant learning rate, as a rate that falls to 0 leaves nothing to average."""
    first = plain()
    yield "MC dropout", _of_draws(_masked(task, first.model), first.cost)
    average = list[AveragedModel]()

    class Averaging(TrainerCallback):  # type: ignore[misc]
        def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if not average:
                average.append(AveragedModel(model, avg_fn=_later_ones_more))
            average[0].update_parameters(model)

    _, more = train(task, derive(task.seed, "averaged"), callbacks=[Averaging()], lr_scheduler_type="constant")
    yield "MC dropout, averaged", _of_draws(_masked(task, average[0].module), more)


def _later_ones_more(average: Tensor, weight: Tensor, count: Tensor | int) -> Tensor:
    """Epoch s gets a weight of about s^power, as in `fit`."""
    return average.lerp(weight, (FIT.average + 1) / (FIT.average + int(count) + 1))


def _masked(task: Task, model: nn.Module) -> Iterable[Tensor]:
    model = copy.deepcopy(model).train()  # attention drops by itself, without a layer for it
    for k in range(task.samples):
        with own_randomness(CPU, task.seed, "masks", k):
            yield task.logits(model)


@method("ensemble")
def by_ensemble(task: Task, plain: Callable[[], Plain]) -> Rows:
    """Adapters with other starts and orders of the queries."""
    first = plain()
    members, took = [task.logits(first.model)], [first.cost]
    for k in range(1, max(MEMBERS)):
        trainer, more = train(task, derive(task.seed, "member", k))
        members.append(task.logits(trainer.model))
        took.append(more)
        if (n := len(members)) in MEMBERS:
            yield f"ensemble of {n}", _of_draws(members, sum(took, Cost()))


@method("laplace")
def by_laplace(task: Task, plain: Callable[[], Plain]) -> Rows:
    """A Gaussian over the last layer of the plain adapter: its precision is the generalized Gauss-Newton matrix in
    Kronecker form plus that of a prior, which is chosen by the marginal likelihood (Daxberger et al. 2021), or by
    the likelihood of a part of the training queries."""
    first = plain()
    yield "Laplace, last layer", _laplace(task, first.model, first.cost, None)
    training, kept = _with_hold_out(task)
    trainer, cost = train(training, derive(task.seed, "laplace"))
    yield "Laplace, prior by a hold-out", _laplace(training, trainer.model, cost, kept)


def _laplace(task: Task, adapter: Any, cost: Cost, kept: Task | None) -> Found:
    """Around an adapter that was trained on the queries of the task, for which the training took `cost`."""
    inner = cast(Classifier, adapter.get_base_model())
    last = cast(Any, inner.classifier).modules_to_save["default"]
    with measured() as more:
        x, tests = (_inputs_of_last(inner, features) for features in (task.x, task.test))
        weights = torch.cat([last.weight, last.bias[:, None]], 1).detach().double()  # [classes, width + 1]
        mode = Posterior.of(x, weights)
        if kept is not None:
            mode = mode.chosen_by(_inputs_of_last(inner, kept.x), kept.y)
    generator = torch.Generator().manual_seed(derive(task.seed, "laplace"))
    draws = _of_draws((tests @ mode.draw(generator).T for _ in range(task.samples)), cost + more)
    return replace(draws, probs=mode.logits(tests).softmax(1))  # a mean of few draws in so many directions is noisy


@dataclass(frozen=True, eq=False)
class Posterior:
    """A Gaussian over the weights [classes, width + 1] of a linear layer, in float64."""

    mean: Tensor
    in_vectors: Tensor
    out_vectors: Tensor
    curvature: Tensor  # of the loss, along each pair of these
    precision: Tensor  # of the prior

    @classmethod
    def of(cls, x: Tensor, weights: Tensor) -> Posterior:
        """For the inputs x, with the prior of the highest marginal likelihood. The curvature is the sum of xx' over the
        queries, times the mean of diag(p) - pp'."""
        probs = (x @ weights.T).softmax(1)
        inputs, in_vectors = torch.linalg.eigh(x.T @ x)
        outputs, out_vectors = torch.linalg.eigh(torch.diag(probs.mean(0)) - probs.T @ probs / len(probs))
        curvature = outputs.clamp(min=0)[:, None] * inputs.clamp(min=0)
        volume = torch.stack([(curvature + precision).log().sum() for precision in PRECISIONS])
        evidence = weights.numel() * PRECISIONS.log() - PRECISIONS * weights.square().sum() - volume
        return cls(weights, in_vectors, out_vectors, curvature, PRECISIONS[evidence.argmax()])

    def chosen_by(self, x: Tensor, labels: Tensor) -> Posterior:
        """The same with the prior that predicts these best."""
        tried = [replace(self, precision=precision) for precision in PRECISIONS]
        losses = [nn.functional.cross_entropy(mode.logits(x), labels) for mode in tried]
        return tried[int(torch.stack(losses).argmin())]

    @property
    def deviations(self) -> Tensor:
        return (self.curvature + self.precision).rsqrt()

    def logits(self, x: Tensor) -> Tensor:
        """By the probit approximation, as usual: their softmax is about the mean of that of draws."""
        return x @ self.mean.T / (1 + math.pi / 8 * self.variance(x)).sqrt()

    def draw(self, generator: torch.Generator) -> Tensor:
        normal = torch.randn(self.deviations.shape, generator=generator, dtype=torch.float64)
        return self.mean + self.out_vectors @ (normal * self.deviations) @ self.in_vectors.T

    def variance(self, x: Tensor) -> Tensor:
        """Of each logit, for some inputs."""
        along: Tensor = (x @ self.in_vectors).square() @ self.deviations.square().T
        return along @ self.out_vectors.square().T


@torch.no_grad()
def _inputs_of_last(model: Classifier, x: Features) -> Tensor:
    """What the linear layer gets, with a 1 for its bias."""
    parts = zip(x.hidden.split(BATCH), x.mask.split(BATCH), strict=True)
    found = torch.cat([model.pooled(hidden, mask) for hidden, mask in parts]).double()
    return torch.cat([found, torch.ones(len(found), 1, dtype=found.dtype)], 1)


class _IvonTrainer(Trainer):  # type: ignore[misc]
    """Gradients at weights that IVON draws."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # without the wrapper of accelerate
        with optimizer.sampled_params(train=True):
            return super().training_step(*args, **kwargs)


@method("ivon")
def by_ivon(task: Task, plain: Callable[[], Plain]) -> Rows:
    """IVON on the adapter, with its authors' settings for LoRA on the smaller sets, except the learning rate."""
    trainer, optimizer, cost = _ivon(task, derive(task.seed, "ivon"))
    draws = []
    for k in range(task.samples):
        with own_randomness(CPU, task.seed, "draws", k), optimizer.sampled_params():
            draws.append(task.logits(trainer.model))
    yield "IVON", _of_draws(draws, cost)


def _ivon(task: Task, seed: int) -> tuple[Trainer, Any, Cost]:
    model = task.model(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = IVON(
        trained, lr=task.ivon_lr, ess=1e6, hess_init=1e-3, clip_radius=1e-3, weight_decay=0.0, rescale_lr=False
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, task.epochs * -(-len(task.y) // TRAIN_BATCH))
    # Clipping the gradient is for AdamW: IVON clips its steps.
    options = {"optimizers": (optimizer, scheduler)}
    trainer, cost = train(task, seed, model, _IvonTrainer, options=options, max_grad_norm=0.0)
    return trainer, optimizer, cost


class _MontecloraTrainer(MontecloraTrainerMixin, Trainer):  # type: ignore[misc]
    pass


@method("monteclora")
def by_monteclora(task: Task, plain: Callable[[], Plain]) -> Rows:
    """MonteCLoRA of peft, as it is: it draws in training, and predicts once."""
    seed = derive(task.seed, "monteclora")
    model = task.model(seed, lora(monteclora_config=MontecloraConfig()))
    trainer, cost = train(task, seed, model, _MontecloraTrainer)
    yield "MonteCLoRA", Found(task.logits(trainer.model).softmax(1), cost)


@method("pvera")
def by_pvera(task: Task, plain: Callable[[], Plain]) -> Rows:
    """PVeRA of peft, with draws at prediction."""
    seed = derive(task.seed, "pvera")
    adapter = PveraConfig(
        r=PVERA_RANK, target_modules=["query", "value"], modules_to_save=["classifier"], sample_at_inference=True
    )
    trainer, cost = train(task, seed, task.model(seed, adapter))
    draws = []
    for k in range(task.samples):
        with own_randomness(CPU, task.seed, "draws", k):
            draws.append(task.logits(trainer.model))
    yield "PVeRA", _of_draws(draws, cost)


@method("twins")
def by_twins(task: Task, plain: Callable[[], Plain]) -> Rows:
    """`TwinTrainer` as it is, and calibrated by the out-of-bag queries."""
    trainer, cost = _twins(task)
    yield "twins", _of_twins(task, trainer, cost)
    out_of_bag = Subset(task.x.dataset(task.y), trainer.bootstrap.unseen.tolist())
    with warnings.catch_warnings(), measured() as more:  # that the best scale may be 0: the table shows what it gives
        warnings.filterwarnings("ignore", "these samples are predicted best without weight noise")
        trainer.estimate().calibrate(out_of_bag, samples=task.samples, collate_fn=collate)
    yield "twins, calibrated", _of_twins(task, trainer, cost + more)


@method("cover")
def by_covering_twins(task: Task, plain: Callable[[], Plain]) -> Rows:
    """`TwinTrainer` with each out-of-bag query given to one of the twins."""
    bootstrap = Bootstrap(len(task.y), seed=task.seed, cover=True)
    yield "twins, all queries", _of_twins(task, *_twins(task, options={"bootstrap": bootstrap}))


@method("split")
def by_twins_of_halves(task: Task, plain: Callable[[], Plain]) -> Rows:
    """`TwinTrainer` whose twins divide the queries, so that an epoch takes as long as that of a plain adapter; and
    with more epochs."""
    bootstrap = Bootstrap(len(task.y), seed=task.seed, kind="split", cover=True)
    for more in (1.0, LONGER_SPLIT):
        epochs = round(more * task.epochs)
        row = "twins, split data" + f", {more} times the epochs" * (more > 1)
        yield row, _of_twins(task, *_twins(task, options={"bootstrap": bootstrap}, num_train_epochs=epochs))


@method("spread")
def by_settled_twins(task: Task, plain: Callable[[], Plain]) -> Rows:
    """`TwinTrainer` whose twins settle after the training, for error bars of the right size."""
    yield "twins, spread=0.3", _of_twins(task, *_twins(task, options={"spread": 0.3}))


def _twins(task: Task, **options: Any) -> tuple[Any, Cost]:
    return train(task, derive(task.seed, "twins"), kind=TwinTrainer, **options)


def _of_twins(task: Task, trainer: Any, cost: Cost) -> Found:
    labels = torch.zeros(len(task.test), dtype=torch.long)  # predict leaves them out
    predicted = trainer.predict(task.test.rows(labels), task.samples)
    return Found(predicted.probs, cost, predicted.mutual_information)


KEPT: dict[Literal["members", "sigma"], str] = {"members": "error_bars", "sigma": "error_bars, sigma"}


@method("error_bars")
def by_error_bars(task: Task, plain: Callable[[], Plain]) -> Rows:
    """`error_bars` around the plain adapter: members, and draws of a matched sigma."""
    first = plain()
    cost = first.cost
    with TemporaryDirectory() as checkpoint:  # one training for both
        for keep, row in KEPT.items():
            with measured() as more:
                estimate = error_bars(
                    first.model,
                    task.x.dataset(task.y),
                    epochs=max(1, round(task.epochs / 3)),
                    keep=keep,
                    perturb=0.0,  # as its documentation says for adapters
                    optimizer=lambda parameters: torch.optim.AdamW(parameters, task.lr),
                    batch_size=TRAIN_BATCH,
                    checkpoint=checkpoint,
                    seed=derive(task.seed, "error_bars"),
                    progress=False,
                    collate_fn=collate,
                )
            cost += more
            yield row, _of_estimate(task, estimate, cost)


def _of_estimate(task: Task, estimate: Estimate, cost: Cost) -> Found:
    predicted = estimate.predict((task.test.hidden, task.test.mask), None if estimate.members else task.samples)
    return Found(predicted.probs, cost, predicted.mutual_information)


def queries_of(config: Config) -> Queries:
    if config.preset == "toy":
        return generated(derive(config.seed, "queries"))
    assert config.data is not None  # `parts` checks it
    return read(config.preset, config.data)


@lru_cache(maxsize=1)
def _shared(config: Config) -> tuple[Encoder, Queries, Features, Tensor]:
    """What all seeds have in common: the encoder, the pool of queries, and the test queries with their labels."""
    queries = queries_of(config)
    if config.preset == "toy":
        encoder = Encoder.tiny(queries, derive(config.seed, "encoder"))
    else:
        assert config.model is not None  # `parts` checks it
        encoder = Encoder.load(config.model)
    tests, strange = queries.tests(config.queries, config.strange, config.seed)
    # By length, as batches are as long as their longest query.
    parts = []
    for texts in ([text for text, _ in tests], strange):
        found = encoder.features(texts, config.layers)
        parts.append((found, found.mask.sum(1).argsort(stable=True)))
    hidden = torch.cat([found.hidden[order] for found, order in parts])
    mask = torch.cat([found.mask[order] for found, order in parts])
    labels = _labels(queries, [intent for _, intent in tests])[parts[0][1]]
    return encoder, queries, Features(hidden, mask), labels


def _labels(queries: Queries, intents: list[str]) -> Tensor:
    numbers = {intent: k for k, intent in enumerate(queries.intents)}
    return torch.tensor([numbers[intent] for intent in intents])


@lru_cache(maxsize=2)
def task_of(config: Config, labels: int, number: int) -> Task:
    """The task of one seed."""
    encoder, queries, test, test_y = _shared(config)
    seed = derive(config.seed, labels, number)
    rows = queries.few(labels, derive(seed, "queries"))
    return Task(
        encoder=encoder,
        layers=config.layers,
        classes=len(queries.intents),
        x=encoder.features([text for text, _ in rows], config.layers),
        y=_labels(queries, [intent for _, intent in rows]),
        test=test,
        test_y=test_y,
        epochs=config.epochs,
        lr=config.lr,
        ivon_lr=config.ivon_lr,
        samples=config.samples,
        seed=seed,
    )


def hold_out_scores(config: Config, adapter: str, every: int) -> dict[str, float]:
    """The scores of a plain adapter, or of IVON's mean, on every so many-th of some training queries."""
    task = task_of(config, config.labels[0], -1)  # seeds of the table count from 0
    held = torch.arange(len(task.y)) % every == every - 1
    training, kept = task.subset(~held), task.subset(held)
    trainer = _ivon(training, task.seed)[0] if adapter == "IVON" else train(training, task.seed)[0]
    logits = task.logits(trainer.model, kept.x)
    loss = nn.functional.cross_entropy(logits, kept.y)
    return {"nll": loss.item(), "accuracy": (logits.argmax(1) == kept.y).double().mean().item()}
