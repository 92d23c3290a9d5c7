"""`Inversion`: what `invert` found, and the questions that it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .._core import seeds
from .._core.checks import require_samples, require_types, require_whole, shown
from ..data.bootstrap import Bootstrap
from ..estimate.prediction import Moments, Prediction, combine
from ..estimate.student import half_width
from .operators import Forward
from .priors import Prior

DRAWS = 1000  # from N(field, sigma^2), for a probability without draws of the posterior: known to 0.016


@dataclass(frozen=True, eq=False)
class Inversion:
    """The result of `invert`: the field, and a standard deviation for each of its entries.

    Without a prior, `history` has one value per check for each of these: "step", "train" (the mean loss of the noisy
    twins before the step), "unseen" (the loss of the twins' mean on the out-of-bag measurements, after the step) and
    "sigma" (of the twins, as root mean square over the field). With a prior it has one value for each weight that was
    tried: "weight", "length" (of `GaussianProcess`) and "unseen".

    Attributes:
        field: without a prior, the mean of the twins at `best_step`. With one, the mode of the posterior from all
            measurements.
        sigma: the standard deviation of each entry.
        best_step: the step of that state, or with a prior the number of steps in all.
        df: the degrees of freedom of each sigma, for `interval`: the number of cells in its group times the number of
            twins or draws minus 1. None counts as infinity.
        draws: fields [draws, ...] from the posterior, if they were kept.
        prior: the priors as they were chosen, with numbers as weights.
        noise_std: the standard deviation of the noise of a measurement, given or estimated; None without a prior.
    """

    field: Tensor
    sigma: Tensor
    best_step: int
    history: dict[str, list[float]]
    bootstrap: Bootstrap
    seed: int = 0
    df: Tensor | None = None
    draws: Tensor | None = None
    prior: tuple[Prior, ...] = ()
    noise_std: float | None = None

    def __repr__(self) -> str:
        sigma = f"sigma {self.sigma.square().mean().sqrt():.3g} in the rms"
        source = f"from step {self.best_step}" if not self.prior else f"prior {', '.join(map(repr, self.prior))}"
        return f"Inversion(field of shape {tuple(self.field.shape)}, {sigma}, {source})"

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval of each entry, by Student's t with `df` degrees of freedom.

        For blocks of cells, `df` is an upper bound: neighbouring cells are correlated, and a block then says less about
        its sigma. Such intervals are too narrow by a little. Those of single cells, with `rounds`, are not.
        """
        half = half_width(level, self.df) * self.sigma
        return self.field - half, self.field + half

    def probability(self, condition: Callable[[Tensor], Tensor]) -> Tensor:
        """How probable it is that a condition holds, such as `lambda field: field > 2000` for each entry, or `lambda
        field: field.max() > 2000` for the whole field.

        With `rounds`, it is the share of the draws for which it holds. Without, it is that of fields from N(field,
        sigma^2), with entries that are independent of each other.
        """
        require_types(Inversion.probability, locals())
        drawn = self.draws if self._many else self.sample(DRAWS)
        assert drawn is not None
        found = [condition(field.clone()) for field in drawn]
        if not isinstance(found[0], Tensor) or found[0].dtype != torch.bool:
            raise TypeError(f"condition must give a tensor of True and False, not {shown(found[0])}.")
        return torch.stack(found).float().mean(0)

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Fields [samples, ...]: some of `draws`, if `invert` ran with `rounds`, else from N(field, sigma^2)."""
        require_whole("samples", samples, 0)
        require_types(Inversion.sample, locals())
        generator = generator or torch.Generator(self.field.device).manual_seed(seeds.derive(self.seed, "fields"))
        if self._many:
            assert self.draws is not None
            number = len(self.draws)
            order = [torch.randperm(number, generator=generator, device=self.field.device)]  # all, before one again
            while sum(map(len, order)) < samples:
                order.append(torch.randperm(number, generator=generator, device=self.field.device))
            return self.draws[torch.cat(order)[:samples]]
        drawn = torch.empty(samples, *self.field.shape, dtype=self.field.dtype, device=self.field.device)
        return self.field + self.sigma * drawn.normal_(generator=generator)

    @property
    def _many(self) -> bool:
        """Whether there are draws of rounds, and not of one pair of twins alone."""
        return self.draws is not None and len(self.draws) > self.bootstrap.replicas

    @torch.no_grad()
    def predict(self, operator: Forward, samples: int = 32) -> Prediction:
        """What an operator would measure: mean and spread over the fields of `sample`, or with `samples=0` of the field
        alone."""
        require_types(Inversion.predict, locals())
        require_samples(samples)
        moments = Moments("regression")
        for field in self.sample(samples) if samples else [self.field.clone()]:
            with torch.enable_grad():  # an operator may differentiate by itself
                measured = operator(field)
            moments.add(measured.detach()[None])
        return combine([moments])
