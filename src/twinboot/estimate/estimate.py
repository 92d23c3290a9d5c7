"""What training leaves: the mean of the twins and one sigma per group, enough to predict with error bars."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils.data import DataLoader, Dataset

from .._core.checks import one_of, require_known, require_number, require_one_of, require_types, require_whole, shown
from .._core.copies import Places, call, held, replicate, require_like
from .._core.devices import copied
from .._core.noise import normals
from .._core.seeds import checked, derive
from .._core.sharding import refuse_copy, whole
from .._core.tensors import mean, overwrite_, wide
from ..groups import Partition, fixed_entries
from . import calibration, files
from .dropout import drawing
from .forward import called, chunks_of, evaluating, first_tensor
from .prediction import TASKS, Moments, Prediction, Task, combine
from .statistics import averaged, fresh_statistics, layers

# Several draws at once pay where a forward pass is mostly overhead, and cost memory for as many activations
# (docs/overhead.md, "predict").
_SMALL_MODEL = 2**17  # weights
_DRAWS_AT_ONCE = 8


class Estimate(nn.Module):
    """The mean model, with the uncertainty of its weights. Calling it is calling the mean model.

    `module` is a plain instance of your own class, for export. Get one from `Twins.estimate()` or `Estimate.load()`.
    `temperature`, `scale`, `dropout` and `task` say how `predict` predicts, and may be set.
    """

    dropout = False  # whether draws of the weights come with masks of the model's dropout layers

    def __init__(self, module: nn.Module, partition: Partition) -> None:
        super().__init__()
        require_types(Estimate.__init__, locals())
        self.module = module
        self.partition = partition
        self.temperature = self.scale = 1.0  # of likelihoods, and of sigma; `calibrate` finds better ones
        # What `predict` predicts, unless it is told. `fit` knows it by its loss, if that has a name.
        self.task: Task | None = None
        self.eval()

    @classmethod
    def of(cls, copies: Sequence[nn.Module], partition: Partition, model: nn.Module | None = None) -> Estimate:
        """The estimate in the middle of trained copies; frozen parameters are shared with them. Or, with all that they
        hold, in a copy of `model`, which is needed where they are sharded."""
        require_types(Estimate.of, {"copies": copies, "partition": partition, "model": model})
        if not len(copies):
            raise ValueError("there are no copies to take the mean of.")
        if model is None:
            refuse_copy(copies[0])
            [module] = replicate(copies[0], own=partition.parameter_shapes)
        else:
            [module] = replicate(model, share_frozen=False)
        with torch.no_grad():
            if model is not None:
                require_like(module, copies[0])
                for here, t in zip(held(module).values(), held(copies[0]).values(), strict=True):
                    overwrite_(here, whole(t))
            for center, *values in zip(*(averaged(m, partition) for m in (module, *copies)), strict=True):
                center.copy_(mean([whole(v) for v in values]))
        return cls(module, partition.to(averaged(module, partition)[0].device))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def extra_repr(self) -> str:
        found = {"temperature": self.temperature, "scale": self.scale}
        said = [f"{name}={value:.3g}" for name, value in found.items() if value != 1]
        return ", ".join(said + ["dropout=True"] * bool(self.dropout))

    @property
    def sigma(self) -> dict[str, Tensor]:
        """Group name -> sigma: a number, or one per unit, block or label of the group."""
        return self.partition.snapshot()

    def sample(self, seed: SupportsIndex = 0, scale: float | None = None) -> nn.Module:
        """A model of your own class whose weights are a draw from N(mean, (scale * sigma)^2), with the estimate's own
        `scale` by default, as in `predict`."""
        scale, seed = self._scale(scale), checked(seed)
        [module] = replicate(self.module, own=self.partition.parameter_shapes)
        with torch.no_grad():
            for name, draw in self._draw(derive(seed, "sample"), scale).items():
                module.get_parameter(name).copy_(draw)
        return module

    def predict(
        self,
        x: Any,
        samples: int = 32,
        task: Task | None = None,
        *,
        batch_size: int = 256,
        scale: float | None = None,
        seed: SupportsIndex = 0,
        vectorize: bool | None = None,
    ) -> Prediction:
        """Predict for `x`: a tensor, or a tuple or mapping of tensors, whose first dimension runs over the inputs.

        Dropout is off, as ever in evaluation. After `estimate.dropout = True` each draw of the weights has masks, too,
        other ones for each input, as MC dropout has them: those of PyTorch's own layers (`twinboot.estimate.dropout`).

        Args:
            samples: draws of the weights, each used for all inputs; 0 for the mean model alone.
            task: `"classification"`: the model gives logits along dimension 1, and probabilities are averaged over
                the draws. `"regression"`: the model gives values. `"gaussian"`: along the last dimension it gives
                values, then the logarithms of their variances. All may be the `logits` of what it gives. By default
                the estimate's own `task`. `fit` sets that, unless the loss was a function of your own.
            batch_size: inputs at a time. Memory beyond the result does not grow with the number of inputs.
            scale: factor on sigma; by default the estimate's own `scale`, which is 1 or what `calibrate` found.
            seed: the same seed gives the same draws; masks of dropout depend on `batch_size`, too.
            vectorize: several draws at once with `torch.func.vmap`, or one after another; the numbers are the same to
                rounding. None takes the first where it pays and the model allows it, else the second.
        """
        if isinstance(samples, bool) or not isinstance(samples, (int, np.integer)) or samples < 0 or samples == 1:
            raise ValueError(
                f"samples must be 0, for the mean model, or at least 2, for a spread, not {shown(samples)}."
            )
        task = self._task(task)
        require_whole("batch_size", batch_size, 1)
        require_types(Estimate.predict, locals())
        seed = checked(seed)
        scale = self._scale(scale)
        require_number("temperature", self.temperature, positive=True)
        if samples and self.dropout is True and vectorize:
            raise ValueError("with dropout draws come one after another: leave vectorize out.")
        if samples and scale and not self.partition.sigma.any():
            warnings.warn(
                "sigma is 0 everywhere, so that draws have no noise on the weights: train with an optimizer of "
                "twins.parameters(), and call twins.update() after each of its steps.",
                stacklevel=2,
            )
        chunks = chunks_of(x, batch_size, self.partition.sigma.device)
        draws = [derive(seed, "predict", s) for s in range(samples)]
        module, masks = drawing(self.module, self.dropout if samples else False, self.partition.sigma.device, seed)
        with torch.no_grad(), evaluating(self.module), masks:
            if vectorize is None and draws and not self.dropout and self.partition.sizes.sum() <= _SMALL_MODEL:
                try:
                    with warnings.catch_warnings():
                        warnings.filterwarnings("error", ".*performance drop.*")  # where vmap would be a loop itself
                        return self._predict(module, chunks, task, draws, scale, vectorize=True)
                except Exception:  # vmap refuses some models, each in its own way; the loop below judges the rest
                    pass
            return self._predict(module, chunks, task, draws, scale, vectorize=bool(vectorize and draws))

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
        return scale

    def _predict(
        self,
        module: nn.Module,
        chunks: list[Callable[[], Any]],
        task: Task,
        draws: list[int],
        scale: float,
        vectorize: bool,
    ) -> Prediction:
        moments = [Moments(task) for _ in chunks]
        # Inside vmap a module may keep what is only valid there (weight_norm's hook does), so that uses up a copy.
        module = replicate(module)[0] if vectorize else module
        run: Callable[..., Tensor] = partial(called, module, task, self.temperature)
        run = vmap(run, in_dims=(0, None)) if vectorize else run
        for weights in self._stacks(draws, scale, vectorize):
            for part, chunk in zip(moments, chunks, strict=True):
                outputs = run(weights, chunk())
                part.add(outputs if vectorize else outputs.unsqueeze(0))
        return combine(moments)

    def _stacks(self, draws: list[int], scale: float, vectorize: bool) -> Iterator[dict[str, Tensor]]:
        """The weights of the draws: one after another, or several at a time, stacked."""
        if not draws:
            yield {}
        elif not vectorize:
            yield from (self._draw(seed, scale) for seed in draws)
        else:
            for start in range(0, len(draws), _DRAWS_AT_ONCE):
                stack = [self._draw(seed, scale) for seed in draws[start : start + _DRAWS_AT_ONCE]]
                yield {name: torch.stack([weights[name] for weights in stack]) for name in stack[0]}

    def _draw(self, seed: int, scale: float) -> dict[str, Tensor]:
        names = list(self.partition.parameter_shapes)
        centers = [p.detach() for p in Places(self.module, names).read()]
        # In the plain order of entries, however the weights lie in memory: a seed gives the same draw to a model that
        # was saved with channels_last and loaded without.
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
        samples: int = 32,
        task: Task | None = None,
        batch_size: int = 256,
        seed: SupportsIndex = 0,
        **options: Any,
    ) -> float:
        """Find the temperature and the scale of the weight noise that predict a dataset's targets best.

        For classes, or for a model that predicts a variance, too (`"gaussian"`), which the temperature multiplies. Give
        samples that no twin saw, `Subset(dataset, bootstrap.unseen)`: those of training would make the model too sure
        of itself. One imaginary sample is counted with them, so that a few that are all predicted right do not make it
        far too sure (`calibration.py`). `predict` uses both from then on, and `save` keeps them. Returns the mean
        negative log-likelihood of the samples with them. The scale is one of ten from 0 to 4, each with a temperature
        of its own. Warns if the best scale is 0, which takes all weight noise away.

        `task` is that of `predict`, by default the estimate's own; `options` are those of a `DataLoader`, such as the
        `collate_fn` of training.
        """
        require_known(options, self.calibrate, DataLoader)
        require_whole("samples", samples, 2)
        task = self._task(task)
        require_types(Estimate.calibrate, locals())
        seed = checked(seed)
        inputs, targets = calibration.read(dataset, task, batch_size, options)
        device = self.partition.sigma.device
        targets = targets.to(device)

        def outputs(scale: float) -> Tensor:
            draws = [derive(seed, "predict", s) for s in range(samples)] if scale or self.dropout else []
            drawn, (module, masks) = [], drawing(self.module, self.dropout, device, seed)
            with masks:  # the same for each scale
                for weights in self._stacks(draws, scale, vectorize=False):
                    given = (copied(x, device) for x in inputs)  # a model may write into its input
                    drawn.append(torch.cat([called(module, task, 1.0, weights, x) for x in given]))
            return torch.stack(drawn)

        with torch.no_grad(), evaluating(self.module):
            without = outputs(0.0)
            if not without.isfinite().all():
                raise ValueError("the model gives outputs that are not finite for these samples: look for bad ones.")
            before = without if task == "classification" else outputs(1.0)
            self.temperature, self.scale, loss = calibration.best(outputs, calibration.truth(task, targets, before))
        if self.scale == 0:
            left = "have the spread of dropout alone" if self.dropout else "are now all the same and their spread is 0"
            warnings.warn(
                f"these samples are predicted best without weight noise, so that the draws of `predict` {left}: to "
                "keep the noise, set `estimate.scale = 1.0`.",
                stacklevel=2,
            )
        return loss

    def update_batchnorm(self, loader: Iterable[Any], inputs: Callable[[Any], Any] | None = None) -> None:
        """Give the mean model BatchNorm statistics of its own, in one pass over training inputs.

        `loader` gives batches, of which `inputs` picks the model's input, or a tuple or mapping of its inputs: by
        default the batch itself, or its first tensor. The twins' own statistics belong to other weights; without this
        call accuracy can collapse. Layers that stay in evaluation when the model is set to train, as its class may
        decide for a frozen part, keep the statistics that they have. A model without BatchNorm is not run.
        """
        if hasattr(loader, "bootstrap"):
            raise TypeError("give a plain DataLoader of the training data: a PairedLoader would count its epochs on.")
        require_types(Estimate.update_batchnorm, locals())
        if not layers(self.module):
            return
        picked = map(inputs or first_tensor, loader)
        first = next(picked, None)
        if first is None:
            raise ValueError("the loader gave no batch, so there are no statistics to take.")
        [fresh] = replicate(self.module)  # whatever goes wrong on the way, this estimate keeps what it has
        with torch.no_grad(), fresh_statistics(fresh):
            for x in chain([first], picked):
                call(fresh, copied(x, self.partition.sigma.device))  # a model may write into its input
        for own, taken in zip(layers(self.module), layers(fresh), strict=True):
            own.load_state_dict(taken.state_dict())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the mean weights, sigma and the groups to a safetensors file."""
        require_types(Estimate.save, locals())
        partition = self.partition
        found = {"temperature": self.temperature, "scale": self.scale, "dropout": self.dropout, "task": self.task}
        files.write(path, self.module.state_dict(), partition.describe(), partition.labels(), partition.sigma, found)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module) -> Estimate:
        """Read what `save` wrote, into a copy of `model`: any instance of the class that was trained."""
        require_types(Estimate.load, {"path": path, "model": model})
        state, description, labels, sigma, calibrated = files.read(path)
        [module] = replicate(model, share_frozen=False)
        files.fit(state, module, path)
        partition = Partition.restore(description, labels, sigma, fixed_entries(module))
        estimate = cls(module, partition.to(next(module.parameters()).device))
        estimate.temperature, estimate.scale = calibrated["temperature"], calibrated["scale"]
        estimate.dropout, estimate.task = calibrated.get("dropout", False), calibrated.get("task")
        return estimate
