"""Bad arguments to every public function, class and method.

A trial takes a valid call and replaces one of its arguments, or two, by bad values. The call must then give a sane
result or be refused in one sentence by the library itself. Each argument of each function has its turn.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import DataLoader, TensorDataset

from twinboot import (
    Apart,
    Blocks,
    Bootstrap,
    ControlledTwins,
    Dense,
    Edges,
    Estimate,
    Fit,
    GaussianProcess,
    Inversion,
    Near,
    PairedLoader,
    Prediction,
    Protocol,
    Residuals,
    Smooth,
    StandardErrors,
    Twins,
    error_bars,
    fit,
    invert,
    metrics,
    pool_gradients,
    resets,
    standard_errors,
)

from . import pool
from .pool import CLASSES, ROWS, labelled, labels, net, rows
from .trials import OWN, RAW, REFUSED, DiedError, LateError, Record, Trial, forked, verdict

KIND, TITLE, ROWS_ARE = "input", "Bad inputs", "called"
ABOUT = """Valid calls of every public function, class and method, with one argument, or two, replaced by a bad value:
numbers out of range, NaN, other types, tensors of another shape, type or device, datasets, models and functions that
are wrong in some way. Each argument has its turn. What is accepted must give a finite result, unless the input itself
is not finite. What Lightning, scikit-learn and transformers refuse by themselves passes through, too."""
ACCEPTED, NOT_FINITE = "accepted", "accepted, result not finite"
OUTCOMES = (REFUSED, ACCEPTED, OWN, NOT_FINITE, RAW)
UNEXPECTED = (NOT_FINITE, RAW)
DATA = (Tensor, np.ndarray, nn.Module, TensorDataset)
SECONDS = 15.0  # a call that is still at work then was accepted, such as one of 10**400 epochs


@dataclass(frozen=True)
class Target:
    """A function with valid arguments for it."""

    name: str
    call: Callable[..., Any]
    valid: Callable[[], dict[str, Any]]
    of: Callable[..., Any] | None = None  # whose other arguments may be given, too
    more: tuple[str, ...] = ()  # names of further ones
    finite: bool = True  # whether a result must be

    @property
    def arguments(self) -> list[str]:
        taken = inspect.signature(self.of).parameters.values() if self.of else ()
        named = [p.name for p in taken if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name != "self"]
        return list(dict.fromkeys([*self.valid(), *named, *self.more]))

    def default(self, argument: str) -> Any:
        valid = self.valid()
        if argument in valid:
            return valid[argument]
        parameter = inspect.signature(self.of).parameters.get(argument) if self.of else None
        return None if parameter is None or parameter.default is parameter.empty else parameter.default


# What methods are called on


def twins(**options: Any) -> Twins:
    made = Twins(net(), **options)
    with torch.no_grad():
        for twin, shift in zip(made, (-0.1, 0.1), strict=True):
            for p in twin.parameters():
                p.add_(shift)
    made.update()
    return made


def estimate(outputs: int = CLASSES, task: str = "classification") -> Estimate:
    copies = Twins(net(outputs))
    with torch.no_grad():
        copies[0].first.weight.add_(0.1)  # type: ignore[operator, union-attr]
    copies.update()
    found = copies.estimate()
    found.task = task  # type: ignore[assignment]
    return found


def prediction(task: str = "regression") -> Prediction:
    outputs = 4 if task == "gaussian" else CLASSES
    return estimate(outputs).predict(rows(), 4, task)  # type: ignore[arg-type]


def loader(resample: str = "counts") -> PairedLoader:
    return PairedLoader(labelled(), Bootstrap(ROWS), 8, resample)  # type: ignore[arg-type]


def matrix() -> Tensor:
    return torch.randn(30, 6, generator=torch.Generator().manual_seed(0))


@cache
def inversion() -> Inversion:
    return invert(Dense(matrix()), matrix() @ torch.ones(6), torch.zeros(6), steps=20)


def line() -> TensorDataset:
    noise = torch.randn(30, 1, generator=torch.Generator().manual_seed(1))
    return TensorDataset(matrix(), matrix().sum(1, keepdim=True) + 0.1 * noise)


@cache
def standard() -> StandardErrors:
    return standard_errors(nn.Linear(6, 1), line(), rounds=20, progress=False)


def mesh() -> Any:
    from torch.distributed import init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    return init_device_mesh("cpu", (2,), mesh_dim_names=("twin",))


# What is called


def made_and_asked(kind: Callable[..., Any]) -> Callable[..., Any]:
    """A schedule, and what it says of a count."""

    def call(count: Any, **arguments: Any) -> Any:
        due = kind(*arguments.values())
        return [due, due(count)]

    return call


def conformal(own: Estimate, dataset: Any = None) -> Prediction:
    own.conformalize(labelled() if dataset is None else dataset, samples=4)
    return own.predict(rows(), 4)


def _values() -> dict[str, Any]:
    return {"dataset": TensorDataset(rows(), rows()[:, :1]), "samples": 4}


def whole_epoch(**arguments: Any) -> Any:
    return list(PairedLoader(**arguments))


def sampled(**arguments: Any) -> None:
    with twins().sampled(**arguments):
        pass


def predicted(x: Any, **attributes: Any) -> Prediction:
    own = estimate()
    for name, value in attributes.items():
        setattr(own, name, value)
    return own.predict(x, 4)


def stacked(**arguments: Any) -> Any:
    return Twins(**arguments)(rows(), rows())


def continued(state: Any) -> Any:
    own = loader()
    own.load_state_dict(state)
    return list(own)


def loaded(path: Any, model: Any) -> Estimate:
    estimate().save("estimate.safetensors")
    return Estimate.load(path, model)


def trained(**arguments: Any) -> Estimate:
    return fit(**arguments).estimate


def inverted(**arguments: Any) -> tuple[Tensor, Tensor]:
    found = invert(**arguments)
    return found.field, found.sigma


def pooled(twins: Any, share: Any) -> None:
    if isinstance(twins, Twins):
        for twin in twins:
            twin(rows()).sum().backward()
    pool_gradients(twins, share)


MESH = object()  # to be made where it is needed: a mesh needs a process group


def apart(**arguments: Any) -> Apart:
    return Apart(**arguments | ({"mesh": mesh()} if arguments["mesh"] is MESH else {}))


def probs() -> Tensor:
    return torch.softmax(torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(0)), 1)


def scored() -> dict[str, Any]:
    return {"probs": probs(), "labels": labels()}


FIT = {"epochs": 1, "progress": False, "batch_size": 8}
OF_LOADERS = ("num_workers", "collate_fn", "shuffle", "drop_last", "nonsense")


def core() -> list[Target]:
    """What `import twinboot` has, with twinboot.metrics."""
    found = [
        Target("Twins", Twins, lambda: {"model": net()}, Twins.__init__),
        Target(
            "Twins, stacked",
            stacked,
            lambda: {"model": nn.Sequential(nn.Linear(2, 3)), "stacked": True},
            Twins.__init__,
        ),
        Target("Twins.forward", lambda a, b: twins()(a, b), lambda: {"a": rows(), "b": rows()}),
        Target("Twins.__getitem__", lambda index: twins()[index], lambda: {"index": 0}),
        Target("Twins.sampled", sampled, dict, Twins.sampled),
        Target("Twins.reset", lambda **a: twins().reset(**a), dict, Twins.reset),
        Target("Twins.estimate", lambda **a: twins().estimate(**a), dict, Twins.estimate),
        Target("Twins.load_state_dict", lambda state_dict: twins().load_state_dict(state_dict), _state_of_twins),
        Target("Twins.set_extra_state", lambda state: twins().set_extra_state(state), _extra_state),
        Target("Estimate", Estimate, lambda: {"module": net(), "partition": twins().partition}, finite=False),
        Target(
            "Estimate.of", Estimate.of, lambda: {"copies": list(twins()), "partition": twins().partition}, Estimate.of
        ),
        Target("Estimate.forward", lambda x: estimate()(x), lambda: {"x": rows()}),
        Target("Estimate.sample", lambda **a: estimate().sample(**a), dict, Estimate.sample),
        Target(
            "Estimate.predict",
            lambda **a: estimate().predict(**a),
            lambda: {"x": rows(), "samples": 4},
            Estimate.predict,
        ),
        Target("Estimate, its attributes", predicted, _attributes),
        Target(
            "Estimate.calibrate", lambda **a: estimate().calibrate(**a), _calibrated, Estimate.calibrate, OF_LOADERS
        ),
        Target("Estimate.noise", lambda **a: estimate(1, "regression").noise(**a), _values, Estimate.noise, OF_LOADERS),
        Target(
            "Estimate.conformalize",
            lambda **a: estimate().conformalize(**a),
            lambda: {"dataset": labelled(), "samples": 4},
            Estimate.conformalize,
            OF_LOADERS,
        ),
        Target("Prediction.set", lambda **a: conformal(estimate()).set(**a), dict, Prediction.set, finite=False),
        Target(
            "Prediction.conformal_interval",
            lambda **a: conformal(estimate(1, "regression"), _values()["dataset"]).conformal_interval(**a),
            lambda: {"level": 0.5},
            Prediction.conformal_interval,
        ),
        Target(
            "Estimate.update_batchnorm",
            lambda **a: estimate().update_batchnorm(**a),
            lambda: {"loader": DataLoader(labelled(), 8)},
            Estimate.update_batchnorm,
        ),
        Target("Estimate.save", lambda path: estimate().save(path), lambda: {"path": "new.safetensors"}),
        Target("Estimate.load", loaded, lambda: {"path": "estimate.safetensors", "model": net()}),
        Target("Prediction", Prediction, _prediction, Prediction, finite=False),
        Target("Prediction ==", lambda other: prediction() == other, lambda: {"other": prediction()}),
        Target("Prediction.interval", lambda **a: prediction().interval(**a), dict, Prediction.interval),
        Target(
            "Prediction.nll",
            lambda **a: prediction("classification").nll(**a),
            lambda: {"target": labels()},
            Prediction.nll,
        ),
        Target(
            "Prediction.nll, of values",
            lambda **a: prediction().nll(**a),
            lambda: {"target": torch.zeros(ROWS, CLASSES), "noise": 0.1},
            Prediction.nll,
        ),
        Target(
            "Prediction.nll, gaussian",
            lambda **a: prediction("gaussian").nll(**a),
            lambda: {"target": torch.zeros(ROWS, 2)},
            Prediction.nll,
        ),
        Target("Bootstrap", Bootstrap, lambda: {"n": ROWS}, Bootstrap.__init__),
        Target("Bootstrap.indices", lambda replica: Bootstrap(ROWS).indices(replica), lambda: {"replica": 0}),
        Target("Bootstrap.out_of_bag", lambda replica: Bootstrap(ROWS).out_of_bag(replica), lambda: {"replica": 0}),
        Target(
            "PairedLoader",
            whole_epoch,
            lambda: {"dataset": labelled(), "bootstrap": Bootstrap(ROWS), "batch_size": 8},
            PairedLoader.__init__,
            OF_LOADERS,
            finite=False,
        ),
        Target(
            "PairedLoader.dataloader",
            lambda **a: list(loader().dataloader(**a)),
            dict,
            None,
            ("num_workers", "pin_memory", "timeout"),
        ),
        Target("PairedLoader.load_state_dict", continued, lambda: {"state": loader().state_dict()}),
        Target("fit", trained, lambda: {"model": net(), "dataset": labelled(), **FIT}, fit, (*OF_LOADERS, "lr")),
        Target(
            "error_bars",
            error_bars,
            lambda: {"model": net(), "dataset": labelled(), "rounds": 1, "loss": "classification", **FIT},
            error_bars,
            (*OF_LOADERS, "lr", "scheduler"),
        ),
        Target("ControlledTwins", ControlledTwins, lambda: {"model": net()}, ControlledTwins.__init__),
        Target("ControlledTwins.reset", lambda **a: ControlledTwins(net()).reset(**a), dict, ControlledTwins.reset),
        Target(
            "Protocol",
            lambda **a: fit(net(), labelled(), protocol=Protocol(**a), **FIT).estimate,  # type: ignore[arg-type]
            dict,
            Protocol.__init__,
        ),
        Target("fit, of values", trained, _of_values, fit, OF_LOADERS),
        Target("Fit", Fit, _fit, finite=False),
        Target(
            "invert",
            inverted,
            lambda: {
                "forward": Dense(matrix()),
                "observed": matrix() @ torch.ones(6),
                "initial": torch.zeros(6),
                "steps": 20,
            },
            invert,
        ),
        Target("Inversion", Inversion, _inversion, finite=False),
        Target("Inversion.interval", lambda **a: inversion().interval(**a), dict, Inversion.interval),
        Target("Inversion.sample", lambda **a: inversion().sample(**a), lambda: {"samples": 2}, Inversion.sample),
        Target(
            "Inversion.predict",
            lambda **a: inversion().predict(**a),
            lambda: {"operator": Dense(matrix()), "samples": 4},
            Inversion.predict,
        ),
        Target(
            "Inversion.probability",
            lambda **a: inversion().probability(**a),
            lambda: {"condition": lambda field: field > 0},
            Inversion.probability,
        ),
        Target(
            "standard_errors",
            lambda **a: standard_errors(**a)._se(),
            lambda: {"model": nn.Linear(6, 1), "dataset": line(), "rounds": 4, "progress": False},
            standard_errors,
        ),
        Target("StandardErrors", StandardErrors, _standard, finite=False),
        Target("StandardErrors.interval", lambda **a: standard().interval(**a), dict, StandardErrors.interval),
        Target("StandardErrors.table", lambda **a: standard().table(**a), dict, StandardErrors.table),
        Target("StandardErrors.outputs", lambda inputs: standard().outputs(inputs), lambda: {"inputs": matrix()}),
        Target("GaussianProcess", GaussianProcess, dict, GaussianProcess.__init__, finite=False),
        Target("Smooth", Smooth, dict, Smooth.__init__, finite=False),
        Target("Near", Near, dict, Near.__init__, finite=False),
        Target("Edges", Edges, lambda: {"scale": 0.1}, Edges.__init__, finite=False),
        Target("Residuals", Residuals, lambda: {"function": torch.diff}, Residuals.__init__, finite=False),
        Target("Bootstrap.folds", lambda **a: Bootstrap(8).folds(**a), lambda: {"number": 2}, Bootstrap.folds),
        Target(
            "Bootstrap.redrawn",
            lambda **a: Bootstrap(8).redrawn(**a),
            lambda: {"time": 1},
            Bootstrap.redrawn,
            finite=False,
        ),
        Target("Dense", Dense, lambda: {"matrix": matrix()}, Dense.__init__, finite=False),
        Target(
            "Dense.__call__", lambda field: Dense(matrix())(field), lambda: {"field": torch.zeros(2, 3)}, finite=False
        ),
        Target(
            "Dense.rows", lambda index: Dense(matrix()).rows(index)(torch.zeros(6)), lambda: {"index": torch.arange(3)}
        ),
        Target("Dense.ends", lambda length: Dense(matrix()).ends(length)(torch.zeros(2, 6)), lambda: {"length": 20}),
        Target("Blocks", Blocks, lambda: {"block": (3, 3)}),
        Target(
            "Blocks.__call__",
            lambda name, parameter: Blocks((3, 3))(name, parameter),
            lambda: {"name": "field", "parameter": torch.zeros(9, 9)},
        ),
        Target("pool_gradients", pooled, lambda: {"twins": twins(), "share": 0.5}),
        Target("Apart", apart, lambda: {"model": net(), "mesh": MESH}, Apart.__init__),
        Target("resets.every", made_and_asked(resets.every), lambda: {"interval": 2, "count": 2}),
        Target("resets.at", made_and_asked(resets.at), lambda: {"first": 1, "second": 5, "count": 2}),
        Target(
            "resets.growing", made_and_asked(resets.growing), lambda: {"first": 5, "factor": 1.5, "most": 9, "count": 2}
        ),
        Target("resets.steps", made_and_asked(resets.steps), lambda: {"schedule": resets.every(2), "count": 2}),
        Target("resets.never", made_and_asked(resets.never), lambda: {"count": 2}),
        Target(
            "metrics.auroc",
            metrics.auroc,
            lambda: {"uncertainty": rows()[:, 0], "positive": labels() == 0},
            finite=False,
        ),
    ]
    for name in ("scores", "nll", "brier", "ece", "adaptive_ece", "reliability"):
        function = getattr(metrics, name)
        found.append(
            Target(f"metrics.{name}", function, scored, function, finite=name not in ("scores", "reliability"))
        )
    return found


def _state_of_twins() -> dict[str, Any]:
    return {"state_dict": dict(twins().state_dict())}


def _extra_state() -> dict[str, Any]:
    return {"state": twins().get_extra_state()}


def _attributes() -> dict[str, Any]:
    return {"x": rows(), "temperature": 1.0, "scale": 1.0, "dropout": False, "task": "classification"}


def _calibrated() -> dict[str, Any]:
    return {"dataset": labelled(), "samples": 2}


def _prediction() -> dict[str, Any]:
    return {"task": "regression", "mean": rows(), "std": rows().abs()}


def _of_values() -> dict[str, Any]:
    data = torch.utils.data.TensorDataset(rows(), rows())
    return {"model": net(4), "dataset": data, "loss": "gaussian", "protocol": Protocol(mode="centered"), **FIT}


def _fit() -> dict[str, Any]:
    found = fit(net(), labelled(), **FIT)  # type: ignore[arg-type]
    return {f.name: getattr(found, f.name) for f in fields(found)}


def _inversion() -> dict[str, Any]:
    return {f.name: getattr(inversion(), f.name) for f in fields(inversion())}


def _standard() -> dict[str, Any]:
    return {f.name: getattr(standard(), f.name) for f in fields(standard())}


# Integrations


def of_sklearn() -> list[Target]:
    module = import_module("twinboot.integrations.sklearn")
    x, y = rows().double().numpy(), labels().numpy()
    brief = {"epochs": 2, "samples": 4, "random_state": 0}
    found = []
    for name, values in (("TwinBootClassifier", y), ("TwinBootRegressor", x[:, 0] + 0.1 * y)):
        kind = getattr(module, name)

        def scores(
            kind: Any = kind,
            own: Any = values,
            X: Any = x,  # noqa: N803
            y: Any = None,
            sample_weight: Any = None,
            **settings: Any,
        ) -> Any:
            model = kind(**brief | settings).fit(X, own if y is None else y, sample_weight)
            return model.predict(x)

        fitted = cache(lambda kind=kind, y=values: kind(**brief).fit(x, y))
        found += [
            Target(name, scores, lambda y=values: {"X": x, "y": y}, kind.__init__, ("sample_weight",)),
            Target(f"{name}.predict", lambda fitted=fitted, **a: fitted().predict(**a), lambda: {"X": x}, kind.predict),
        ]
        for method in ("predict_proba", "predict_interval"):
            if hasattr(kind, method):
                call = lambda fitted=fitted, method=method, **a: getattr(fitted(), method)(**a)  # noqa: E731
                found.append(Target(f"{name}.{method}", call, lambda: {"X": x}, getattr(kind, method), finite=False))
    return found


def of_lightning() -> list[Target]:
    import lightning.pytorch as pl

    module = import_module("twinboot.integrations.lightning")

    class CallersModule(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    def valid() -> dict[str, Any]:
        return {"module": CallersModule(), "dataset": labelled(), "batch_size": 8}

    return [Target("TwinModule", module.TwinModule, valid, module.TwinModule.__init__, finite=False)]


def of_huggingface() -> list[Target]:
    module = import_module("twinboot.integrations.huggingface")

    def data() -> list[dict[str, Any]]:
        return [{"x": row, "labels": label} for row, label in zip(rows().tolist(), labels().tolist(), strict=True)]

    def made(**arguments: Any) -> Any:
        from transformers import TrainingArguments

        args = TrainingArguments("trainer", use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no")
        return module.TwinTrainer(**{"args": args} | arguments)

    def valid() -> dict[str, Any]:
        return {"model": net(), "train_dataset": data()}

    return [
        Target("TwinTrainer", made, valid, module.TwinTrainer.__init__, finite=False),
        Target("huggingface.load", module.load, lambda: {"folder": "missing", "model": net()}, module.load),
    ]


GROUPS: dict[str, Callable[[], list[Target]]] = {
    "core": core,
    "sklearn": of_sklearn,
    "lightning": of_lightning,
    "huggingface": of_huggingface,
}
# The group of each trial of a hundred. Integrations are slow to import and to call.
SHARES = ("core",) * 88 + ("sklearn",) * 8 + ("lightning",) * 2 + ("huggingface",) * 2


def row(record: Record) -> str:
    return record.what.split(",")[0].split(" ")[0].split(".")[0]


def prepare(numbers: Iterable[int]) -> None:
    fit(net(), labelled(), epochs=1, progress=False)  # PyTorch imports much at the first step of an optimizer


def order(numbers: Iterable[int]) -> list[int]:
    """Integrations last: a fork takes longer once they are imported."""
    return sorted(numbers, key=lambda number: (SHARES.index(SHARES[number % len(SHARES)]), number))


@cache
def places(group: str) -> list[tuple[Target, str | None]]:
    """Each argument of each function of a group."""
    return [(target, name) for target in GROUPS[group]() for name in (target.arguments or [None])]


def drawn(trial: Trial) -> tuple[Target, dict[str, tuple[str, Callable[[], Any]]]]:
    """The function of a trial, and the bad values for some of its arguments. The first of them has its turn, the rest
    is drawn."""
    hundreds, place = divmod(trial.number, len(SHARES))
    group, draw = SHARES[place], trial.random
    turn = hundreds * SHARES.count(group) + place - SHARES.index(group)
    target, first = places(group)[turn * 7919 % len(places(group))]  # a prime: not one function after another
    names = [first] if first else []
    others = [name for name in target.arguments if name != first]
    if others and draw.random() < 0.25:
        names.append(draw.choice(others))
    return target, {name: pool.bad(draw, target.default(name)) for name in names}


def run(trial: Trial) -> Record:
    target, replaced = drawn(trial)
    shown = ", ".join(f"{name} = {value}" for name, (value, _) in replaced.items())
    what = target.name
    try:
        made = {name: make for name, (_, make) in replaced.items()}
        outcome, told = forked(lambda: attempt(target, made), SECONDS, limited=True)
    except LateError as error:
        outcome, told = ACCEPTED, str(error)
    except DiedError as error:
        outcome, told = RAW, str(error)
    return trial.record(what, outcome, f"{shown} -> {told}", bad=outcome in UNEXPECTED)


def attempt(target: Target, replaced: Mapping[str, Callable[[], Any]]) -> tuple[str, str]:
    """The outcome of a call, and what is to be said of it."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # what is written to a name without a folder goes there
        arguments = {**target.valid(), **{name: make() for name, make in replaced.items()}}
        try:
            found = target.call(**arguments)
        except MemoryError as error:  # what was asked for was understood
            return ACCEPTED, f"MemoryError: {error}"
        except BaseException as error:
            return verdict(error)
        given = [arguments[name] for name in replaced]
        wrong = next(not_finite(found), None) if target.finite and not any(map(spreads, given)) else None
        return (ACCEPTED, type(found).__name__) if wrong is None else (NOT_FINITE, wrong)


def spreads(value: Any) -> bool:
    """Whether what is not finite may follow from a value: from data, weights or a function that are not, or nearly."""
    if isinstance(value, Tensor) and not value.is_meta and value.is_floating_point():
        value = value.to_dense().detach() * 1e6
    return value is pool.callers_nan or (isinstance(value, DATA) and any(not_finite(value)))


def not_finite(found: Any, where: str = "result") -> Iterator[str]:
    """The places of a result that are no finite numbers."""
    if isinstance(found, UninitializedParameter):
        yield where
    elif isinstance(found, Tensor):
        if found.is_meta or not bool(found.detach().to_dense().isfinite().all()):
            yield where
    elif isinstance(found, np.ndarray):
        if found.dtype.kind in "fc" and not np.isfinite(found).all():
            yield where
    elif isinstance(found, float):
        if not np.isfinite(found):
            yield where
    elif isinstance(found, TensorDataset):
        yield from not_finite(found.tensors, where)
    elif isinstance(found, nn.Module):
        yield from not_finite([*found.parameters(), *found.buffers()], where)
    elif isinstance(found, Mapping):
        for key, value in found.items():
            yield from not_finite(value, f"{where}[{key!r}]")
    elif isinstance(found, (tuple, list)):
        for i, value in enumerate(found):
            yield from not_finite(value, f"{where}[{i}]")
    elif is_dataclass(found):
        for field in fields(found):
            yield from not_finite(getattr(found, field.name), f"{where}.{field.name}")
