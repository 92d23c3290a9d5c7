"""The result of training: the mean of the twins and one sigma per group, enough to predict with error bars."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils.data import DataLoader, Dataset

from .._core import seeds
from .._core.batches import copied
from .._core.checks import (
    one_of,
    require_known,
    require_number,
    require_one_of,
    require_samples,
    require_types,
    require_whole,
)
from .._core.copies import Places, call, held, replicate, require_like
from .._core.noise import normals
from .._core.ranks import refuse_copy, whole
from .._core.tensors import mean, overwrite_, wide
from ..groups import Partition, fixed_entries
from . import calibration, centered, conformal, degrees, files
from .forward import Chunks, as_task, chunks_of, chunks_of_texts, dropping, evaluating, first_tensor, run_model
from .members import Members
from .outputs import ChainOfDraws
from .prediction import TASKS, Moments, Prediction, Task, combine, like
from .statistics import averaged, norm_layers, refill_statistics

# Several draws at once are faster where a forward pass is mostly overhead, but need memory for the activations of all
# of them (docs/overhead.md, "predict").
_SMALL_MODEL = 2**17  # weights
_DRAWS_AT_ONCE = 8

Run = Callable[[Any], Tensor]  # the outputs [draws, inputs, ...] of some draws for a batch


class Estimate(nn.Module):
    """A trained model with the uncertainty of its weights: the mean of the twins, and one sigma per group of weights.

    Calling an estimate calls the mean model. Get one from `fit`, `error_bars`, `Twins.estimate()` or `Estimate.load()`.

    Attributes:
        module: the mean model, a plain instance of your own class, for export. From `error_bars`: the trained model.
        members: trained models to predict with, instead of draws of the weights, or None (`error_bars`).
        sigma: the standard deviation of the weights, by group.
        task: what the model predicts: `"classification"`, `"regression"` or `"gaussian"`, as in `predict`. `fit` sets
            it if its loss is one of these names.
        scale: multiplies sigma when weights are drawn.
        temperature: divides logits, or multiplies predicted variances. 1, unless `calibrate` finds a better one.
        centered: whether the outputs of draws are shifted, so that their mean is the output of `module`. True where the
            scale gives draws the spread of twins (`fit(spread=...)`). The spread stays. Values are those of `module`,
            and class probabilities are less sharp than its own.
        dropout: set it to True to keep the model's dropout layers active in each draw of the weights.
        df_per_weight: degrees of freedom of sigma^2 for each weight of a group: the number of twins minus 1. Intervals
            use it. None counts as infinity.
        scores: of calibration samples, which `conformalize` sets.
    """

    def __init__(self, module: nn.Module, partition: Partition) -> None:
        super().__init__()
        require_types(Estimate.__init__, locals())
        self.module, self.partition = module, partition
        self.temperature = self.scale = 1.0
        self.centered = self.dropout = False
        self.task: Task | None = None
        self.members: Members | None = None
        self.df_per_weight: float | None = None
        self.scores: conformal.Scores | None = None
        self.eval()

    @classmethod
    @torch.no_grad()
    def of(cls, copies: Sequence[nn.Module], partition: Partition, model: nn.Module | None = None) -> Estimate:
        """The estimate from trained copies, with their mean weights. It shares their frozen parameters. If `model` is
        given, the estimate is built in a copy of it and shares nothing; sharded copies need that."""
        require_types(Estimate.of, {"copies": copies, "partition": partition, "model": model})
        if not len(copies):
            raise ValueError("there are no copies to take the mean of.")
        if model is None:
            refuse_copy(copies[0])
            [module] = replicate(copies[0], own=partition.parameter_shapes)
        else:
            [module] = replicate(model, copy_frozen=True)
            require_like(module, copies[0])
            for here, t in zip(held(module).values(), held(copies[0]).values(), strict=True):
                overwrite_(here, whole(t))
        for center, *values in zip(*(averaged(m, partition) for m in (module, *copies)), strict=True):
            center.copy_(mean([whole(v) for v in values]))
        return cls(module, partition.to(averaged(module, partition)[0].device))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def extra_repr(self) -> str:
        factors = {"temperature": self.temperature, "scale": self.scale}
        parts = [f"{name}={value:.3g}" for name, value in factors.items() if value != 1]
        return ", ".join(parts + [f"{name}=True" for name in ("centered", "dropout") if getattr(self, name)])

    @property
    def sigma(self) -> dict[str, Tensor]:
        """Group name -> sigma: one number, or one per unit, block or label of the group."""
        return self.partition.snapshot()

    @property
    def df(self) -> dict[str, Tensor]:
        """Group name -> the degrees of freedom of its sigma^2, if its weights vary independently of each other. That is
        an upper bound, because weights of a group may be correlated."""
        return self.partition.by_group(self._df())

    def _df(self) -> Tensor:
        sizes = self.partition.sizes.to(self.partition.sigma.dtype)
        return torch.full_like(sizes, math.inf) if self.df_per_weight is None else self.df_per_weight * sizes

    def sample(self, seed: SupportsIndex = 0, scale: float | None = None) -> nn.Module:
        """A model of your own class with weights drawn from N(mean, (scale * sigma)^2), or one of the members. `scale`
        defaults to the estimate's own, as in `predict`. Its outputs are as they are, even if `centered`."""
        scale, seed = self._scale(scale), seeds.require_seed(seed)
        [module] = replicate(self.module, own=self.partition.parameter_shapes)
        if self.members is None:
            draw = self._draw(seeds.derive(seed, "sample"), scale)
        else:
            draw = self.members[seeds.derive(seed, "sample") % len(self.members)]
        with torch.no_grad():
            own = held(module)
            for name, value in draw.items():
                own[name].copy_(value)
        return module

    def predict(
        self,
        x: Any,
        samples: int | None = None,
        task: Task | None = None,
        *,
        tokenizer: Callable[..., Mapping[str, Any]] | None = None,
        batch_size: int = 256,
        scale: float | None = None,
        seed: SupportsIndex = 0,
        vectorize: bool | None = None,
    ) -> Prediction:
        """Predict with error bars, over draws of the weights or over the members.

        Dropout is off unless `estimate.dropout` is True. Then each draw of the weights also drops units, with new masks
        for each input, as MC dropout does. Only PyTorch's own dropout layers do so.

        Args:
            x: a tensor, or a tuple or mapping of tensors (the model's arguments), with the inputs along dimension 0.
                With a tokenizer, a list of texts.
            samples: number of draws of the weights, by default 32; 0 predicts with `module` alone. Of an estimate with
                members, at most so many of them, the last ones; by default all.
            task: `"classification"`: the model returns logits along dimension 1, and probabilities are averaged over
                the draws. `"regression"`: it returns values. `"gaussian"`: it returns means, then as many
                log-variances, along the last dimension. An object with an attribute `logits` may hold any of these.
                Default: `estimate.task`.
            tokenizer: that of a Hugging Face model, which is then told to pad and to truncate; or any function from a
                list of texts to a mapping of tensors (the model's arguments).
            batch_size: inputs per forward pass, or fewer where centered draws of so many take much memory. It bounds
                the memory used beyond that of the result.
            scale: multiplies sigma. Default: `estimate.scale`. Members have none.
            seed: the same seed gives the same draws. Dropout masks also depend on `batch_size`.
            vectorize: run several draws of the weights at once with `torch.func.vmap`, or one after another; results
                agree up to rounding. Default: chains of linear layers and elementwise functions get noise on their
                outputs, with the same distribution for each input (`estimate/outputs.py`), and other small models that
                vmap can run are vectorized.
        """
        if callable(samples):
            raise TypeError("give the tokenizer by its name: predict(texts, tokenizer=tokenizer).")
        require_types(Estimate.predict, locals())
        samples = self._samples(samples)
        require_samples(samples)
        require_whole("batch_size", batch_size, 1)
        task, scale, seed = self._task(task), self._scale(scale), seeds.require_seed(seed)
        require_number("temperature", self.temperature, positive=True)
        if samples and self.dropout is True and vectorize:
            raise ValueError("draws with dropout cannot be vectorized: leave vectorize out.")
        if samples and scale and self.members is None and not self.partition.sigma.any():
            warnings.warn(
                "sigma is 0 everywhere, so the draws have no weight noise: train with an optimizer of "
                "twins.parameters(), and call twins.update() after each of its steps.",
                stacklevel=2,
            )
        device = self.partition.sigma.device
        reader = chunks_of if tokenizer is None else partial(chunks_of_texts, tokenizer=tokenizer)
        read = cache(lambda size: reader(x, size=size, device=device))
        draws = self._draws(samples, seed)
        dropout = self.dropout if samples else False
        chain = self._chain([x], scale) if draws and not dropout else None
        settings = self._settings(samples, task, scale, seed)
        same = self.scores is not None and {"centered": False, **self.scores.settings} == settings  # early files
        scores = self.scores if same and (vectorize is None or chain is None) else None  # else these are other draws
        with torch.no_grad(), evaluating(self.module), dropping(self.module, dropout, device, seed) as module:
            predict = partial(self._predict, read=read, size=batch_size, task=task, draws=draws, scale=scale)
            runs = partial(self._runs, module, task, self.temperature, draws, scale)
            if vectorize is None and chain is not None:
                return replace(predict(partial(runs, chain)), scores=scores)
            if vectorize is None and draws and not dropout and self.partition.sizes.sum() <= _SMALL_MODEL:
                try:
                    with warnings.catch_warnings():
                        warnings.filterwarnings("error", ".*performance drop.*")  # vmap would loop, too
                        return replace(predict(partial(runs, vectorize=True)), scores=scores)
                except Exception:  # vmap fails on some models, each in its own way; the loop reports any other error
                    pass
            return replace(predict(partial(runs, vectorize=bool(vectorize and draws))), scores=scores)

    def _settings(self, samples: int, task: Task, scale: float, seed: int) -> dict[str, Any]:
        """What predictions depend on, besides the weights: those with the same settings have comparable scores."""
        numbers = {"scale": float(scale), "temperature": float(self.temperature)}
        modes = {"dropout": self.dropout, "centered": self.centered}
        return {"task": task, "samples": int(samples), "seed": seed, **modes, **numbers}

    def _task(self, asked: Task | None) -> Task:
        task = self.task if asked is None else asked
        if task is None:
            raise ValueError(
                f"the estimate does not know what its model predicts: give task={one_of(TASKS)}, or set estimate.task."
            )
        require_one_of(TASKS, "task", task)
        return task

    def _scale(self, asked: float | None) -> float:
        scale = self.scale if asked is None else asked
        require_number("scale", scale)
        if self.members is not None and scale != 1:
            raise ValueError(f"this estimate predicts with members, which have no scale: leave out {scale!r}.")
        return scale

    def _samples(self, asked: int | None) -> int:
        """How many draws or members to predict with."""
        most = 32 if self.members is None else len(self.members)
        return most if asked is None else asked if self.members is None else min(asked, most)

    def _draws(self, samples: int, seed: int) -> list[int]:
        """The seeds of draws, or the numbers of members."""
        if self.members is not None:
            return list(range(len(self.members) - samples, len(self.members)))
        return [seeds.derive(seed, "predict", s) for s in range(samples)]

    def _chain(self, inputs: Iterable[Any], scale: float) -> ChainOfDraws | None:
        """The model as a chain, if it is one, takes these inputs, and predicts with draws of its weights."""
        chain = None if self.members is not None else ChainOfDraws.of(self.module, self.partition, scale)
        return chain if chain is not None and all(map(chain.takes, inputs)) else None

    def _predict(
        self,
        runs: Callable[[], Iterator[Run]],
        read: Callable[[int], Chunks],
        size: int,
        task: Task,
        draws: list[int],
        scale: float,
    ) -> Prediction:
        chunks = read(size)
        moments = [Moments(task) for _ in chunks]
        of_module = partial(run_model, self.module, task, self.temperature, {})
        if self._centers(draws, scale):  # needs all draws of a chunk at once
            centers = [of_module(chunk()) for chunk in chunks]
            most = len(draws) * max(own.numel() for own in centers)
            if size > 1 and most > centered.MOST_OUTPUTS:
                return self._predict(runs, read, max(1, size * centered.MOST_OUTPUTS // most), task, draws, scale)
            for some in centered.in_parts([len(draws) * own.numel() for own in centers]):
                drawn = [[run(chunk()) for chunk in chunks[some]] for run in runs()]
                for part, own, *outputs in zip(moments[some], centers[some], *drawn, strict=True):
                    part.add(centered.around(torch.cat(outputs), own, task, self.temperature))
        else:
            for run in runs():
                for part, chunk in zip(moments, chunks, strict=True):
                    part.add(run(chunk()))
        if draws and self.members is not None:  # intervals are around the prediction of the trained model
            return combine(moments, centers=[of_module(chunk()) for chunk in chunks])
        if not draws or not scale or task == "classification":
            return combine(moments)  # the degrees of freedom are those of the number of draws
        return combine(moments, degrees.of_predictions(self.module, task, chunks, self.partition, self._df()))

    def _centers(self, draws: list[int], scale: float) -> bool:
        return self.centered and bool(draws) and (scale > 0 or self.dropout) and self.members is None

    def _runs(
        self,
        module: nn.Module,
        task: Task,
        temperature: float,
        draws: list[int],
        scale: float,
        chain: ChainOfDraws | None = None,
        vectorize: bool = False,
    ) -> Iterator[Run]:
        """The model with the weights of one draw after another, or of several at a time."""
        if chain is not None:
            for normals_ in chain.draws(draws, _DRAWS_AT_ONCE):
                yield lambda x, e=normals_: torch.stack([as_task(y, task, temperature) for y in chain.run(e, x)])  # type: ignore[misc]
            return
        # In vmap a module may store tensors that are invalid outside of it (weight_norm's hook does): use a copy.
        module = replicate(module)[0] if vectorize else module
        run: Callable[..., Tensor] = partial(run_model, module, task, temperature)
        for weights in self._weights(draws, scale, _DRAWS_AT_ONCE if vectorize else None):
            if vectorize:
                yield partial(vmap(run, in_dims=(0, None)), weights)
            else:
                yield lambda x, weights=weights: run(weights, x).unsqueeze(0)  # type: ignore[misc]

    def _weights(self, draws: list[int], scale: float, stacked: int | None = None) -> Iterator[dict[str, Tensor]]:
        """The weights of each draw or member, or of several at a time, stacked. Without draws, the mean weights."""
        if not draws:
            yield {}
        elif self.members is not None:
            for start in range(draws[0], len(self.members), stacked or 1):
                yield self.members[start if stacked is None else slice(start, start + stacked)]
        elif stacked is None:
            yield from (self._draw(seed, scale) for seed in draws)
        else:
            for start in range(0, len(draws), stacked):
                stack = [self._draw(seed, scale) for seed in draws[start : start + stacked]]
                yield {name: torch.stack([weights[name] for weights in stack]) for name in stack[0]}

    def _models(self, samples: int, scale: float, seed: int) -> Iterator[Callable[[Any], Tensor]]:
        """The model with the weights of each draw, as a function of its inputs."""
        with evaluating(self.module):
            for weights in self._weights(self._draws(samples, seed), scale):
                yield partial(run_model, self.module, self.task or "regression", 1.0, weights)

    def _draw(self, seed: int, scale: float) -> dict[str, Tensor]:
        names = list(self.partition.parameter_shapes)
        centers = [p.detach() for p in Places(self.module, names).read()]
        # Contiguous noise: a seed then gives the same draw to a model saved in channels_last and loaded without.
        noise = [torch.empty_like(wide(c), memory_format=torch.contiguous_format) for c in centers]
        fill = normals(seed)
        for e in noise:
            fill(e)
        sigmas = self.partition.expand(centers, scale)
        return {n: (c + s * e).to(c.dtype) for n, c, s, e in zip(names, centers, sigmas, noise, strict=True)}

    def calibrate(
        self,
        dataset: Dataset[Any],
        *,
        samples: int | None = None,
        task: Task | None = None,
        keep_scale: bool = False,
        batch_size: int = 256,
        seed: SupportsIndex = 0,
        **options: Any,
    ) -> float:
        """Choose `temperature` and `scale` by the likelihood of hold-out data, and return the mean NLL with them.

        Works for `"classification"` and `"gaussian"`. `predict` uses both values from then on, and `save` stores them.
        The scale is one of ten values from 0 to 4, each tried with a temperature of its own; members have none. Warns
        if 0, no weight noise, is best. One pseudo-sample counts with the data, so that a few samples that are all
        predicted correctly do not make the model far too confident.

        Args:
            dataset: samples that no twin saw, `Subset(dataset, bootstrap.unseen)`. Training samples would make the
                model overconfident.
            keep_scale: choose the temperature alone, and keep the scale that twins gave (`fit(spread=...)`). The scale
                that predicts best need not be the one with which error bars have the right size.
            samples, task, batch_size, seed: as in `predict`.
            options: of `torch.utils.data.DataLoader`, such as the `collate_fn` of training.
        """
        require_known(options, self.calibrate, DataLoader)
        require_types(Estimate.calibrate, locals())
        samples = self._samples(samples)
        require_whole("samples", samples, 2)
        task, seed, device = self._task(task), seeds.require_seed(seed), self.partition.sigma.device
        if task == "regression":
            raise ValueError(
                "calibrate needs a likelihood, and this estimate predicts values without their noise: train with the "
                'loss "gaussian", or give the noise to interval().'
            )
        inputs, targets = calibration.read(dataset, task, batch_size, options)

        def outputs(scale: float) -> Tensor:
            draws = self._draws(samples, seed) if scale or self.dropout else []
            with dropping(self.module, self.dropout, device, seed) as module:  # the same masks for each scale
                chain = self._chain(inputs, scale) if draws and not self.dropout else None
                runs = self._runs(module, task, 1.0, draws, scale, chain)
                found = torch.cat([of_inputs(run, 1) for run in runs])
            return centered.around(found, center(), task) if self._centers(draws, scale) else found

        @cache
        def center() -> Tensor:
            return of_inputs(partial(run_model, self.module, task, 1.0, {}), 0)

        def of_inputs(run: Run, dim: int) -> Tensor:
            return torch.cat([run(copied(x, device)) for x in inputs], dim)  # copies: a model may write into its input

        with torch.no_grad(), evaluating(self.module):
            of_mean = outputs(0.0)
            if not of_mean.isfinite().all():
                raise ValueError("the model gives outputs that are not finite for these samples: look for bad ones.")
            before = of_mean if task == "classification" else outputs(1.0)
            target = calibration.target_of(task, targets.to(device), before)
            keeps = keep_scale or self.members is not None
            scales = (self._scale(None),) if keeps else calibration.SCALES
            self.temperature, self.scale, loss = calibration.minimize(outputs, target, scales)
        if self.scale == 0 and not keep_scale:
            left = "have the spread of dropout alone" if self.dropout else "are now all the same and their spread is 0"
            warnings.warn(
                f"these samples are predicted best without weight noise, so the draws of `predict` {left}: to keep the "
                "noise, set `estimate.scale = 1.0`.",
                stacklevel=2,
            )
        return loss

    def noise(
        self,
        dataset: Dataset[Any],
        *,
        samples: int | None = None,
        batch_size: int = 256,
        seed: SupportsIndex = 0,
        **options: Any,
    ) -> float:
        """The standard deviation of a measurement for `"regression"`, for `Prediction.interval` and `conformalize`.

        Its square is the mean squared error of some samples minus the mean variance of their predictions, but at least
        5 % of the former.

        Args:
            dataset: samples that no twin saw, `Subset(dataset, bootstrap.unseen)`.
            samples, batch_size, seed: as in `predict`.
            options: of `torch.utils.data.DataLoader`, such as the `collate_fn` of training.
        """
        require_known(options, self.noise, DataLoader)
        require_types(Estimate.noise, locals())
        found, targets, _ = self._predict_dataset(dataset, samples, "regression", batch_size, seed, options)
        errors = torch.cat([(like(t, p.mean) - p.mean).double() for p, t in zip(found, targets, strict=True)])
        spread = torch.cat([p.std.double() for p in found])
        return math.sqrt(conformal.noise_variance(errors.cpu().numpy(), spread.cpu().numpy()))

    def conformalize(
        self,
        dataset: Dataset[Any],
        *,
        noise: float | None = None,
        samples: int | None = None,
        task: Task | None = None,
        batch_size: int = 256,
        seed: SupportsIndex = 0,
        **options: Any,
    ) -> None:
        """Calibrate `Prediction.set` and `Prediction.conformal_interval`. `save` stores the result.

        Predictions must have the same `samples` and `seed` to have sets and intervals, and the estimate the same
        settings, such as the scale: call `calibrate` before this, with other samples. `fit(calibration=0.5)` does all
        this.

        Args:
            dataset: samples that no twin saw, and that chose nothing: no epoch, temperature or setting. A level of 90 %
                needs 9 of them, and 99 % needs 99. With more, the widths vary less.
            noise: for `"regression"`, about the standard deviation of a measurement. Intervals are then wider where the
                draws differ more. Without it, all have the same width.
            samples, task, batch_size, seed: as in `predict`.
            options: of `torch.utils.data.DataLoader`, such as the `collate_fn` of training.
        """
        require_known(options, self.conformalize, DataLoader)
        require_types(Estimate.conformalize, locals())
        if noise is not None:
            require_number("noise", noise, positive=True)
        found, targets, task = self._predict_dataset(dataset, samples, task, batch_size, seed, options)
        scores = torch.cat([p._scores_of(t, noise) for p, t in zip(found, targets, strict=True)]).cpu()
        if not scores.isfinite().all():
            raise ValueError("the model gives outputs that are not finite for these samples: look for bad ones.")
        settings = self._settings(self._samples(samples), task, self._scale(None), seeds.require_seed(seed))
        self.scores = conformal.Scores(scores.sort(0).values, None if noise is None else float(noise), settings)

    def _predict_dataset(
        self,
        dataset: Dataset[Any],
        samples: int | None,
        task: Task | None,
        batch_size: int,
        seed: SupportsIndex,
        options: Mapping[str, Any],
    ) -> tuple[list[Prediction], list[Tensor], Task]:
        """The predictions and the targets of a dataset, batch by batch, and the task."""
        task = self._task(task)
        inputs, targets = calibration.read(dataset, task, batch_size, options)
        found = [self.predict(x, samples, task, batch_size=batch_size, seed=seed) for x in inputs]
        return found, list(targets.to(self.partition.sigma.device).split([len(p) for p in found])), task

    def update_batchnorm(self, loader: Iterable[Any], inputs: Callable[[Any], Any] | None = None) -> None:
        """Compute the running statistics of BatchNorm layers for the mean model, in one pass over training inputs.

        The twins' statistics belong to other weights: without this call, accuracy can collapse. `fit` makes it for you.
        Layers that stay in evaluation when the model is set to train, such as frozen ones, keep their statistics. A
        model without BatchNorm is not run. If an error occurs, nothing is changed.

        Args:
            loader: batches of training data, from a plain `DataLoader`.
            inputs: picks the model's input, or a tuple or mapping of inputs, from a batch. Default: the batch itself,
                or its first tensor.
        """
        if hasattr(loader, "bootstrap"):
            raise TypeError("give a plain DataLoader of the training data: a PairedLoader would advance its epoch.")
        require_types(Estimate.update_batchnorm, locals())
        if not norm_layers(self.module):
            return
        [copy] = replicate(self.module)
        device = self.partition.sigma.device
        batches = map(inputs or first_tensor, loader)
        refill_statistics(copy, batches, lambda module, x, _: call(module, copied(x, device)))
        for own, new in zip(norm_layers(self.module), norm_layers(copy), strict=True):
            own.load_state_dict(new.state_dict())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the mean weights, sigma, the groups, the members and how to predict to a safetensors file."""
        require_types(Estimate.save, locals())
        partition, settings = self.partition, {name: getattr(self, name) for name in files.SETTINGS}
        members = {} if self.members is None else self.members.stacks()
        about = partition.describe(), partition.labels(), partition.sigma
        files.write(path, self.module.state_dict(), *about, settings, members=members)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module) -> Estimate:
        """Read an estimate that `save` wrote. `model` is any instance of the trained class; it is copied."""
        require_types(Estimate.load, {"path": path, "model": model})
        state, description, labels, sigma, settings, members = files.read(path)
        [module] = replicate(model, copy_frozen=True)
        files.load_state(module, state, path)
        partition = Partition.restore(description, labels, sigma, fixed_entries(module))
        estimate = cls(module, partition.to(next(module.parameters()).device))
        for name in files.SETTINGS:
            setattr(estimate, name, settings.get(name, getattr(estimate, name)))
        if members:
            estimate.members = Members(members).like(module)
        return estimate
