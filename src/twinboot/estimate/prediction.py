"""The prediction for some inputs, with its uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from .._core.checks import require_number, require_tensor
from . import conformal
from .student import combined, half_width

Task = Literal["classification", "regression", "gaussian"]
TASKS = get_args(Task)
MOST_LOG_ODDS = 40.0  # beyond that a probability is 0 or 1 in all digits


@dataclass(frozen=True, repr=False, eq=False)  # tensors have no single ==
class Prediction:
    """Predictions for some inputs, with their uncertainty, as `Estimate.predict` returns them.

    Attributes:
        task: `"classification"`, `"regression"` or `"gaussian"`.
        mean: the mean over draws of the weights: class probabilities along dimension 1, or values. If the draws are
            centered (`Estimate.centered`), these values are those of the mean model.
        std: the standard deviation over the draws, in the same shape. 0 for the mean model alone (`samples=0`).
        own_entropy: for classification, the mean entropy of the draws.
        noise: for `"gaussian"`, the predicted standard deviation of a measurement: the root of the mean variance.
        df: degrees of freedom of `std`, for `interval`: one number, or one for each value. None counts as infinity.
        scores: of calibration samples, for `set` and `conformal_interval`.
        center: the middle of `interval`: values, or the log-odds of classes. With members, those of the trained model.
        log_odds_std: for classification, the standard deviation of the log-odds over the draws.
    """

    task: Task
    mean: Tensor
    std: Tensor
    own_entropy: Tensor | None = None
    noise: Tensor | None = None
    df: float | Tensor | None = None
    scores: conformal.Scores | None = None
    center: Tensor | None = None
    log_odds_std: Tensor | None = None

    def __len__(self) -> int:
        return len(self.mean)

    def __repr__(self) -> str:
        if self.task != "classification":
            noise = "" if self.noise is None else f", noise {_summary(self.noise)}"
            shape = tuple(self.mean.shape)
            return f"Prediction({self.task}, {len(self)} inputs, shape {shape}, std {_summary(self.std)}{noise})"
        uncertainty = f"entropy {_summary(self.entropy)}, mutual information {_summary(self.mutual_information)}"
        return f"Prediction(classification, {len(self)} inputs, {self.mean.shape[1]} classes, {uncertainty})"

    @property
    def probs(self) -> Tensor:
        """Class probabilities, averaged over the draws."""
        self._only("probs", "classification")
        return self.mean

    @property
    def labels(self) -> Tensor:
        """The most probable class."""
        return self.probs.argmax(1)

    @property
    def entropy(self) -> Tensor:
        """Entropy of `probs` in nats: the total uncertainty, `expected_entropy + mutual_information`."""
        return entropy(self.probs)

    @property
    def expected_entropy(self) -> Tensor:
        """The mean entropy of the draws, in nats: the uncertainty that would remain if the weights were known."""
        self._only("expected_entropy", "classification")
        assert self.own_entropy is not None
        return self.own_entropy

    @property
    def mutual_information(self) -> Tensor:
        """How much the draws disagree, in nats: the uncertainty that more data could remove."""
        return (self.entropy - self.expected_entropy).clamp(min=0)

    def interval(self, level: float = 0.95, noise: float | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Lower and upper ends of the central interval that contains the value with probability `level`. For classes
        the value is the expected probability: the one that training on other data of that kind gives on average.

        Assumes a normal distribution, because a few dozen draws are too few for a 97.5 % quantile of their own. Its
        standard deviation is known from `df` degrees of freedom, so the interval is one of Student's t. The noise
        counts as known. The interval of a class is one of its log-odds, because probabilities near 0 and 1 are skewed.

        Args:
            level: the probability, such as 0.95.
            noise: the standard deviation of a measurement: one number, or one per value. Default: the model's own
                `noise`, or 0. With 0, the interval is for the *expected* value; with noise, for a new measurement.
        """
        if self.task == "classification":
            return self._interval_of_classes(level, noise)
        variance = self._variance(noise)
        if variance.numel() and not bool(variance.any()):
            raise ValueError("a prediction without spread has no interval: predict with samples, or give the noise.")
        half = half_width(level, self._df(variance)) * variance**0.5
        center = self.mean if self.center is None else self.center
        return center - half, center + half

    def _interval_of_classes(self, level: float, noise: float | Tensor | None) -> tuple[Tensor, Tensor]:
        if noise is not None:
            raise ValueError("noise is for values: leave it out for classes.")
        if self.center is None or self.log_odds_std is None or not bool(self.log_odds_std.any()):
            raise ValueError("a prediction without spread has no interval: predict with samples.")
        half = half_width(level, self.df) * self.log_odds_std
        return (self.center - half).sigmoid(), (self.center + half).sigmoid()

    def _df(self, variance: Tensor) -> Tensor | None:
        """The degrees of freedom of the variance with noise, by Satterthwaite's formula."""
        if self.df is None:
            return None
        share = torch.where(variance > 0, self.std**2 / variance, 1.0)
        return self.df / share**2

    def conformal_interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Lower and upper ends of the interval that contains a new measurement with a probability of at least `level`,
        whatever the distribution of the errors is (`estimate/conformal.py`).

        The probability is over calibration samples and new ones together, for each value of an input by itself. It
        needs an estimate of `fit(calibration=0.5)` or one with `conformalize`.
        """
        self._only("conformal_interval()", "regression", "gaussian")
        scores = self._scores()
        half = scores.quantile(level).to(self.mean) * self._scale(scores.noise)
        return self.mean - half, self.mean + half

    def _scale(self, noise: float | None) -> Tensor:
        """What errors are divided by: the standard deviation of a measurement, or 1 if that is not known."""
        return torch.ones_like(self.std) if noise is None and self.noise is None else self._variance(noise).sqrt()

    def _scores_of(self, target: Tensor, noise: float | None = None) -> Tensor:
        """The scores of calibration samples, for `Estimate.conformalize`."""
        if self.task == "classification":
            labels = require_labels(target, self.probs).unsqueeze(1)
            return conformal.of_classes(self.probs).gather(1, labels).squeeze(1)
        return (like(target, self.mean) - self.mean).double().abs() / self._scale(noise).double()

    def set(self, level: float = 0.9) -> Tensor:
        """Which classes are in the set that contains the right one with a probability of at least `level`, in the shape
        of `probs`. The most probable class is always in.

        The probability is over calibration samples and new ones together. It needs an estimate of
        `fit(calibration=0.5)` or one with `conformalize`.
        """
        self._only("set()", "classification")
        limit = self._scores().quantile(level).to(self.probs.device)
        return conformal.of_classes(self.probs) <= limit

    def _scores(self) -> conformal.Scores:
        if self.scores is None:
            raise ValueError(
                "this prediction has no scores of calibration samples: use fit(calibration=0.5) or "
                "estimate.conformalize(), and predict with the same samples, seed and settings of the estimate."
            )
        return self.scores

    def _variance(self, noise: float | Tensor | None) -> Tensor:
        if noise is None:
            noise = 0.0 if self.noise is None else self.noise
        elif isinstance(noise, np.ndarray):
            return self._variance(torch.from_numpy(noise))
        elif not isinstance(noise, Tensor):
            require_number("noise", noise)
            noise = float(noise)
        elif not _are_deviations(noise):
            raise ValueError("noise must be finite standard deviations of at least 0.")
        elif (*noise.shape, 1) == self.mean.shape:  # [n] stands for [n, 1], as targets do in `fit`
            noise = noise.unsqueeze(-1)
        if isinstance(noise, Tensor):
            missing = self.mean.ndim - noise.ndim
            if missing < 0 or any(n not in (1, m) for n, m in zip(noise.shape, self.mean.shape[missing:], strict=True)):
                raise ValueError(
                    f"the noise has shape {tuple(noise.shape)}, the prediction {tuple(self.mean.shape)}: give one "
                    "number, or one for each value."
                )
            noise = noise.to(self.std)
        return self.std**2 + noise * noise  # not noise**2, which fails for a large float

    def nll(self, target: Tensor, noise: float | Tensor | None = None) -> Tensor:
        """The negative log-likelihood of each target: labels under `probs`, or values under N(mean, std^2 + noise^2),
        with `noise` as in `interval`. It is a normal distribution whatever `df` is."""
        if self.task == "classification":
            if noise is not None:
                raise ValueError("noise is for values: leave it out for classes.")
            labels = require_labels(target, self.probs).unsqueeze(1)
            chosen = self.probs.gather(1, labels).squeeze(1)
            return -chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log()
        require_tensor("the target", target)
        if target.is_complex() or target.dtype == torch.bool:
            raise TypeError(f"the target must be real numbers, not {target.dtype}.")
        if target.shape != self.mean.shape:
            raise ValueError(f"the target has shape {tuple(target.shape)}, the prediction {tuple(self.mean.shape)}.")
        variance = self._variance(noise)
        if bool((variance == 0).any()):
            raise ValueError("a prediction without spread has no likelihood: give the noise.")
        return 0.5 * ((target - self.mean) ** 2 / variance + variance.log() + math.log(2 * math.pi))

    def _only(self, name: str, *tasks: Task) -> None:
        if self.task not in tasks:
            known = " or ".join(f'task="{task}"' for task in tasks)
            raise AttributeError(f'{name} is for {known}, but this prediction was made with task="{self.task}".')


def _are_deviations(noise: Tensor) -> bool:
    if noise.is_meta or noise.layout != torch.strided or noise.is_complex():
        return False
    return bool(((noise >= 0) & noise.isfinite()).all())


def require_labels(labels: Tensor, output: Tensor) -> Tensor:
    """The labels as int64, if they fit a model's output, with classes along dimension 1."""
    require_tensor("labels", labels)
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(
            f"labels must be integers, not {labels.dtype}: give labels.long(), or if these are values and not classes, "
            '"regression" for the loss or the task.'
        )
    if labels.shape != (needed := output.shape[:1] + output.shape[2:]):
        raise ValueError(f"the labels have shape {tuple(labels.shape)}, but the model's output needs {tuple(needed)}.")
    classes = output.shape[1]
    wrong = labels[(labels < 0) | (labels >= classes)]
    if wrong.numel():
        has = f"has {classes} classes, 0 to {classes - 1}"
        one = "has one output; use two outputs (logits) for two classes"
        raise ValueError(f"label {int(wrong[0])} is out of range: the model {has if classes > 1 else one}.")
    return labels.long()


def like(target: Tensor, values: Tensor) -> Tensor:
    """The target in the shape and type of `values`. Only [n] becomes [n, 1]; broadcasting would make it [n, n]."""
    require_tensor("the target", target)
    if target.is_complex():
        raise TypeError("the target must be real numbers, not complex ones.")
    if (*target.shape, 1) == values.shape:
        target = target.unsqueeze(-1)
    if target.shape != values.shape:
        raise ValueError(f"the targets have shape {tuple(target.shape)}, but the model gives {tuple(values.shape)}.")
    return target.to(values.dtype)


def _summary(values: Tensor) -> str:
    """The mean and the largest of some values."""
    return f"{values.mean():.2g} on average and up to {values.max():.2g}" if values.numel() else "of no inputs"


class Moments:
    """The mean and spread of a model's outputs over draws of its weights, updated by a few draws at a time.

    It stores no draws, so its memory does not depend on their number.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.values, self.log_odds = _Running(), _Running()
        self.own: Tensor | float = 0.0  # the sum over the draws of their own entropies or variances

    def add(self, outputs: Tensor) -> None:
        """Add the outputs [draws, inputs, ...] of some draws."""
        values, log_odds = _values_of(outputs, self.task)
        self.values.add(values)
        if log_odds is not None:
            self.log_odds.add(log_odds)
            self.own = self.own + torch.stack([entropy(v) for v in values]).sum(0)
        elif self.task == "gaussian":
            self.own = self.own + outputs.to(values.dtype).chunk(2, -1)[1].exp().sum(0)


class _Running:
    """A mean and a sum of squares around it, updated by a few values at a time (Chan)."""

    count = 0

    def add(self, values: Tensor) -> None:
        number, center = len(values), values.mean(0)
        squares = (values - center).square_().sum(0)
        if self.count == 0:
            self.mean, self.squares = center, squares
        else:
            shift, total = center - self.mean, self.count + number
            self.mean = self.mean + shift * (number / total)
            self.squares = self.squares + squares + shift.square() * (self.count * number / total)
        self.count += number

    def std(self) -> Tensor:
        return (self.squares / max(self.count - 1, 1)).sqrt()


def _values_of(outputs: Tensor, task: Task) -> tuple[Tensor, Tensor | None]:
    """What a model predicts, [draws, inputs, ...]; for classes their probabilities and log-odds."""
    values = outputs if outputs.dtype == torch.float64 else outputs.float()
    if task != "classification":
        return values.chunk(2, -1)[0] if task == "gaussian" else values, None
    logs, probs = values.log_softmax(2), values.softmax(2)
    # 1 - p of the most probable class is the sum of the others: the difference would lose its digits.
    top = logs.argmax(2, keepdim=True)
    others = logs.scatter(2, top, -math.inf).logsumexp(2, keepdim=True)
    against = torch.log1p(-probs).scatter(2, top, others)
    return probs, (logs - against).clamp(-MOST_LOG_ODDS, MOST_LOG_ODDS)


def combine(parts: list[Moments], df: Tensor | None = None, centers: list[Tensor] | None = None) -> Prediction:
    """One prediction from the moments of consecutive chunks of the inputs.

    Args:
        df: the degrees of freedom of the distribution that was drawn from; n draws have n - 1 of their own.
        centers: for each chunk the outputs of the model that intervals are centered at; by default the mean of draws.
    """
    first, *others = dict.fromkeys(tuple(p.values.mean.shape[1:]) for p in parts)
    if others:
        raise ValueError(f"batches have outputs of shape {first} and {others[0]}: pad all inputs to one length.")
    task, draws = parts[0].task, parts[0].values.count
    own = torch.cat([p.own / draws for p in parts if isinstance(p.own, Tensor)]) if task != "regression" else None
    mean = torch.cat([p.values.mean for p in parts])
    df = df.reshape(mean.shape) if df is not None and df.ndim else df
    classes = task == "classification"
    center = torch.cat([p.log_odds.mean for p in parts]) if classes else None
    if centers is not None:
        values, log_odds = zip(*(_values_of(outputs.unsqueeze(0), task) for outputs in centers), strict=True)
        center = torch.cat(log_odds if classes else values, 1).squeeze(0)
    return Prediction(
        task,
        mean=mean,
        std=torch.cat([p.values.std() for p in parts]),
        own_entropy=own if classes else None,
        noise=own.sqrt() if own is not None and task == "gaussian" else None,
        df=combined(df, draws - 1) if draws > 1 else None,
        center=center,
        log_odds_std=torch.cat([p.log_odds.std() for p in parts]) if classes else None,
    )


def entropy(probs: Tensor) -> Tensor:
    """Entropy in nats along dimension 1."""
    terms: Tensor = torch.special.entr(probs)
    return terms.sum(1)
