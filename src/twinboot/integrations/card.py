"""The model card of a TwinTrainer: a section in the README.md that transformers and peft write.

It says what the folder has besides the weights, and how to load it, with code that runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from torch import Tensor

from .. import __version__
from ..estimate.conformal import Scores
from ..groups import Partition

NOT_METRICS = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "epoch", "step")

SECTION = """## Error bars

The weights are the mean of {twins} twins, each trained on a bootstrap sample of its own
([Twin-Boot](https://arxiv.org/abs/2508.15019), `twinboot` {version}). They load like any others.
`sigma.safetensors` has the standard deviation of each group of weights and the calibration, for predictions with error
bars:

```python
{code}
```

| | |
|---|---|
{table}
"""


def add_section(
    folder: str,
    model: Any,
    twins: int,
    partition: Partition,
    settings: Mapping[str, Any],
    evaluated: tuple[str, Mapping[str, Any]] | None,
    repository: str | None,
    has_tokenizer: bool,
) -> None:
    """Add the section to the README.md of a folder.

    Args:
        settings: those of the estimate.
        evaluated: on what samples, and what the Trainer logged then.
        repository: the folder's name on the hub.
        has_tokenizer: whether the folder has a tokenizer.
    """
    card = ModelCard.load(Path(folder) / "README.md")
    card.data.tags = [*(card.data.tags or []), "twinboot"]
    rows = [*(_evaluation(*evaluated) if evaluated else []), *_settings(settings), *_sigma(partition)]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    code = _code(model, settings, repository, has_tokenizer)
    card.text = f"{card.text.rstrip()}\n\n" + SECTION.format(twins=twins, version=__version__, code=code, table=table)
    card.save(Path(folder) / "README.md")


def _code(model: Any, settings: Mapping[str, Any], repository: str | None, has_tokenizer: bool) -> str:
    """How to load the folder, and to predict for a text if the model classifies texts."""
    adapter = hasattr(model, "get_base_model")  # of peft
    kind = type(model.get_base_model() if adapter else model)
    known = kind.__module__.partition(".")[0] == "transformers"
    texts = has_tokenizer and settings["task"] is not None and kind.__name__.endswith("ForSequenceClassification")
    labels = model.config.num_labels
    options = f", num_labels={labels}" if labels != 2 else ""  # 2 is the default of every config
    imports = {
        "from huggingface_hub import snapshot_download": repository is not None,
        "from peft import PeftModel": adapter,
        f"from {'transformers' if known else kind.__module__} import {kind.__name__}": True,
        "from transformers import AutoTokenizer": texts,
        "from twinboot.integrations.huggingface import load": True,
    }
    lines = [line for line, needed in imports.items() if needed] + [""]
    lines += [f'folder = snapshot_download("{repository}")' if repository else 'folder = "."  # that of this file']
    if adapter:
        base = model.peft_config[model.active_adapter].base_model_name_or_path
        lines += [f'base = {kind.__name__}.from_pretrained("{base}"{options})']
        lines += ["estimate = load(folder, PeftModel.from_pretrained(base, folder))"]
    else:
        lines += [f"estimate = load(folder, {kind.__name__}.from_pretrained(folder))"]
    if texts:
        asked = "".join(f", {name}={value}" for name, value in _draws(settings["scores"]).items())
        lines += ["tokenizer = AutoTokenizer.from_pretrained(folder)"]
        lines += [f'prediction = estimate.predict(["a text"], tokenizer=tokenizer{asked})']
        lines += ["print(prediction.mean, prediction.std)"]
    return "\n".join(lines)


def _draws(scores: Scores | None) -> dict[str, int]:
    """The arguments of `predict` with which sets and intervals are calibrated."""
    return {} if scores is None else {name: scores.settings[name] for name in ("samples", "seed")}


def _evaluation(samples: str, logged: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = [(name, value) for name, value in logged.items() if name.startswith("eval_") and name not in NOT_METRICS]
    metrics = [(name.removeprefix("eval_").replace("_", " "), _number(value)) for name, value in found]
    return [("evaluated on", f"{samples}, after step {logged['step']}"), *metrics]


def _settings(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [] if settings["task"] is None else [("task", settings["task"])]
    rows += [("temperature", _number(settings["temperature"])), ("factor on sigma", _number(settings["scale"]))]
    rows += [("draws centered at the model", "yes")] if settings["centered"] else []
    rows += [("dropout in draws", "yes")] if settings["dropout"] else []
    if (scores := settings["scores"]) is not None:
        rows += [("sets and intervals", f"calibrated by {len(scores)} samples")]
    return rows


def _sigma(partition: Partition) -> list[tuple[str, str]]:
    """The root mean square of sigma over the weights, and the groups with the smallest and the largest one."""
    sizes = partition.sizes.to(partition.sigma)
    of_groups = partition.by_group(sizes)
    groups = {name: _mean_square(sigma, of_groups[name]) for name, sigma in partition.snapshot().items()}
    whole = _mean_square(partition.sigma, sizes)
    rows = [("weights with error bars", f"{int(sizes.sum())} in {len(groups)} groups"), ("sigma", _number(whole**0.5))]
    if len(groups) > 1:
        least, most = min(groups, key=groups.__getitem__), max(groups, key=groups.__getitem__)
        rows += [("smallest", f"{_number(groups[least] ** 0.5)} in `{least}`")]
        rows += [("largest", f"{_number(groups[most] ** 0.5)} in `{most}`")]
    return rows


def _mean_square(sigma: Tensor, size: Tensor) -> float:
    return ((sigma.square() * size).sum() / size.sum()).item()


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
