"""What an inversion leaves: a field, and how far to trust each of its entries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._core import seeds
from .._core.checks import require_types, require_whole
from ..data.bootstrap import Bootstrap
from ..estimate.prediction import Moments, Prediction, combine, half_width
from .operators import Forward


@dataclass(frozen=True, eq=False)
class Inversion:
    """What was found: the field, and one standard deviation for each of its entries.

    `history` maps "step", "train" (the mean loss of the noisy twins before the step), "unseen" (the loss of their mean,
    after it, on measurements that neither saw) and "sigma" (of the twins, root mean square over the field) to one value
    per check.
    """

    field: Tensor
    sigma: Tensor
    best_step: int
    history: dict[str, list[float]]
    bootstrap: Bootstrap
    seed: int = 0

    def __repr__(self) -> str:
        sigma, step = self.sigma.square().mean().sqrt(), self.best_step
        return f"Inversion(field of shape {tuple(self.field.shape)}, sigma {sigma:.3g} in the rms, from step {step})"

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval of each entry, under a normal distribution."""
        half = half_width(level) * self.sigma
        return self.field - half, self.field + half

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Fields [samples, ...] from N(field, sigma^2)."""
        require_whole("samples", samples, 0)
        require_types(Inversion.sample, locals())
        generator = generator or torch.Generator(self.field.device).manual_seed(seeds.derive(self.seed, "fields"))
        drawn = torch.empty(samples, *self.field.shape, dtype=self.field.dtype, device=self.field.device)
        return self.field + self.sigma * drawn.normal_(generator=generator)

    @torch.no_grad()
    def predict(self, operator: Forward, samples: int = 32) -> Prediction:
        """What an operator would measure of the field: mean and spread over fields from N(field, sigma^2); with
        `samples=0` of the field alone."""
        require_types(Inversion.predict, locals())
        if samples < 0 or samples == 1:
            raise ValueError(f"samples must be 0, for the field alone, or at least 2, for a spread, not {samples!r}.")
        moments = Moments("regression")
        for field in self.sample(samples) if samples else [self.field.clone()]:
            with torch.enable_grad():  # an operator may differentiate by itself
                measured = operator(field)
            moments.add(measured.detach()[None])
        return combine([moments])
