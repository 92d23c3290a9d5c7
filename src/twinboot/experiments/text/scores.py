"""How good predictions are, and whether they know when they are wrong or out of scope."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import metrics
from ...estimate import conformal
from ...estimate.prediction import entropy
from .methods import Found

COVERAGE = 0.8  # share of the queries that are answered, the most confident ones
LEVEL = 0.9  # of prediction sets


def scores(found: Found, labels: Tensor) -> dict[str, float]:
    """`found` has the queries with an intent first, and their labels are given; the others are out of scope."""
    probs, strange = found.probs[: len(labels)], torch.arange(len(found.probs)) >= len(labels)
    known = metrics.scores(probs, labels)
    wrong, doubt = probs.argmax(1) != labels, -probs.max(1).values
    answered = doubt.argsort(stable=True)[: round(COVERAGE * len(labels))]
    size, held = set_size(probs, labels)
    rows = {
        "accuracy": known["accuracy"],
        "nll": known["nll"],
        "ece": known["ece"],
        "ood_entropy": metrics.auroc(entropy(found.probs), strange),
        "aurc": area_under_risk(doubt, wrong),
        "answered": 1 - wrong[answered].double().mean().item(),
        "set_size": size,
        "set_held": held,
    }
    if found.information is not None:
        rows["ood_information"] = metrics.auroc(found.information, strange)
    return rows


def area_under_risk(doubt: Tensor, wrong: Tensor) -> float:
    """The mean error rate of the k least doubtful queries, over k = 1 ... n: 0 is perfect.

    >>> area_under_risk(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([False, False, True]))
    0.1111111111111111
    """
    errors = wrong[doubt.argsort(stable=True)].double().cumsum(0)
    return (errors / torch.arange(1, len(errors) + 1)).mean().item()


def set_size(probs: Tensor, labels: Tensor) -> tuple[float, float]:
    """The mean number of classes in adaptive prediction sets, and how often they contain the right one. Every second
    query calibrates the sets of the others, and the other way round."""
    of_all = conformal.of_classes(probs)
    of_right = of_all.gather(1, labels[:, None]).squeeze(1)
    sizes, held = [], []
    for own in (torch.arange(len(labels)) % 2 == k for k in (0, 1)):
        limit = conformal.quantile(of_right[~own].numpy(), LEVEL)
        sizes.append((of_all[own] <= limit).sum(1).double())
        held.append((of_right[own] <= limit).double())
    return torch.cat(sizes).mean().item(), torch.cat(held).mean().item()
