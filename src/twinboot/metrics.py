"""How good predicted probabilities are: accuracy, likelihood, calibration, and whether uncertainty finds the errors.

    scores(probs, labels)            all of them, as a dictionary
    auroc(uncertainty, positive)     whether uncertainty ranks errors, or out-of-distribution inputs, above the rest
    reliability(probs, labels)       the bins of a reliability diagram

`probs` is [samples, classes]. Where torchmetrics has a metric, it computes it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._core.checks import require_tensor, require_whole
from ._core.extras import how_to_install
from .estimate.prediction import entropy, require_labels

try:
    from torchmetrics.functional import classification
except ImportError as error:
    raise ImportError(f"metrics need torchmetrics: {how_to_install('metrics')}") from error

__all__ = ["Reliability", "adaptive_ece", "auroc", "brier", "ece", "nll", "reliability", "scores"]

BINS = 15  # of confidence, as usual in the literature
MOST_BINS = 10**6  # more only take memory


def scores(probs: Tensor, labels: Tensor, bins: int = BINS) -> dict[str, float]:
    """Accuracy, NLL, Brier score, calibration error with bins of equal width and of equal size, and the AUROC of
    entropy for finding errors (NaN if all predictions are right, or all wrong).

    >>> found = scores(torch.tensor([[0.8, 0.2], [0.4, 0.6], [0.7, 0.3]]), torch.tensor([0, 1, 1]))
    >>> {name: round(value, 3) for name, value in found.items()}
    {'accuracy': 0.667, 'nll': 0.646, 'brier': 0.46, 'ece': 0.433, 'adaptive_ece': 0.433, 'auroc': 0.5}
    """
    probs, labels = _validated(probs, labels, bins)
    return {
        "accuracy": classification.multiclass_accuracy(probs, labels, probs.shape[1], average="micro").item(),
        "nll": nll(probs, labels),
        "brier": brier(probs, labels),
        "ece": ece(probs, labels, bins),
        "adaptive_ece": adaptive_ece(probs, labels, bins),
        "auroc": auroc(entropy(probs), probs.argmax(1) != labels),
    }


def nll(probs: Tensor, labels: Tensor) -> float:
    """The mean negative log-likelihood of the labels."""
    probs, labels = _validated(probs, labels)
    return F.nll_loss(probs.clamp(min=torch.finfo(probs.dtype).tiny).log(), labels).item()


def brier(probs: Tensor, labels: Tensor) -> float:
    """The mean squared error of the probabilities, summed over classes: 0 is perfect, 2 the worst."""
    probs, labels = _validated(probs, labels)
    return (probs - F.one_hot(labels, probs.shape[1])).square().sum(1).mean().item()


def ece(probs: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """The expected calibration error: the mean gap of confidence and accuracy over bins of equal width."""
    probs, labels = _validated(probs, labels, bins)
    return classification.multiclass_calibration_error(probs, labels, probs.shape[1], n_bins=int(bins)).item()


def adaptive_ece(probs: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """The same over bins of equally many samples, so that none is empty or has only a few."""
    probs, labels = _validated(probs, labels, bins)
    confidence, predicted = probs.max(1)
    order = confidence.argsort(stable=True)
    excess = (confidence - (predicted == labels).double())[order]
    return sum(part.sum().abs().item() for part in excess.tensor_split(int(bins))) / len(labels)


def auroc(uncertainty: Tensor, positive: Tensor) -> float:
    """How often a positive has more uncertainty than a negative; ties count half. NaN if all are of one kind."""
    require_tensor("uncertainty", uncertainty)
    require_tensor("positive", positive)
    if uncertainty.shape != positive.shape or not uncertainty.numel():
        shapes = f"{tuple(uncertainty.shape)} and {tuple(positive.shape)}"
        raise ValueError(f"uncertainty and positive must have the same shape and not be empty, not {shapes}.")
    if positive.dtype != torch.bool:
        raise TypeError(f"positive must be booleans, such as predicted != labels, not {positive.dtype}.")
    if uncertainty.is_complex() or bool(uncertainty.isnan().any()):
        raise ValueError("uncertainty must be real numbers: NaN or complex ones have no order.")
    if positive.all() or not positive.any():
        return float("nan")
    # Ranks instead of values: torchmetrics takes values outside [0, 1] for logits, and a sigmoid would round them.
    ranks = uncertainty.double().unique(return_inverse=True)[1]
    return classification.binary_auroc(ranks.double() / max(int(ranks.max()), 1), positive.long()).item()


class Reliability(NamedTuple):
    """For each bin of confidence: its share of the samples, their mean confidence, and their accuracy."""

    share: Tensor
    confidence: Tensor
    accuracy: Tensor


def reliability(probs: Tensor, labels: Tensor, bins: int = BINS) -> Reliability:
    """The bins of equal width of a reliability diagram. Empty ones have NaN for confidence and accuracy."""
    probs, labels = _validated(probs, labels, bins)
    confidence, predicted = probs.max(1)
    place = (confidence * bins).long().clamp(max=bins - 1)
    count = torch.bincount(place, minlength=bins).double()
    sums = [torch.bincount(place, v, minlength=bins) for v in (confidence, (predicted == labels).double())]
    return Reliability(count / len(labels), sums[0] / count, sums[1] / count)


def _validated(probs: Tensor, labels: Tensor, bins: int = BINS) -> tuple[Tensor, Tensor]:
    require_tensor("probs", probs)
    require_tensor("labels", labels)
    require_whole("bins", bins, 1)
    if bins > MOST_BINS:
        raise ValueError(f"bins must be at most {MOST_BINS}.")
    if probs.ndim != 2 or labels.shape != probs.shape[:1] or not len(labels):
        shapes = f"{tuple(probs.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"probs must be [samples, classes] and labels [samples], and not empty, not {shapes}.")
    if probs.shape[1] < 2:
        raise ValueError(f"probs must have at least two classes, not {probs.shape[1]}.")
    if probs.is_complex() or not bool(probs.isfinite().all()):
        raise ValueError("probs must be real and finite: there are NaN, infinite or complex values.")
    probs = probs.detach().double()
    if not bool((probs >= 0).all()) or not torch.allclose(total := probs.sum(1), torch.ones_like(total), atol=1e-3):
        raise ValueError("probs must be at least 0 and add up to 1 for each sample: apply softmax to logits.")
    # torchmetrics would take probabilities slightly above 1 for logits.
    return probs / total[:, None], require_labels(labels, probs)
