"""The presets and the settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ..runner.experiment import refuse_repeated, require_at_least

PresetName = Literal["clinc150", "banking77", "toy"]
MethodName = Literal[
    "lora",
    "temperature",
    "dropout",
    "ensemble",
    "laplace",
    "ivon",
    "monteclora",
    "pvera",
    "twins",
    "cover",
    "split",
    "spread",
    "error_bars",
]
METHODS: tuple[MethodName, ...] = get_args(MethodName)
LEAST = 2  # queries per class, so that a hold-out has one


@dataclass(frozen=True, kw_only=True)
class Config:
    """Beyond the paper: a language model is fine-tuned with few labels, and has to say when it does not know."""

    preset: PresetName = "clinc150"
    """Queries with their intents: clinc150 or banking77, which need --data and --model, or toy, generated sentences."""
    data: str | None = None
    """Directory with clinc150_small.json, and for banking77 also banking77_train.csv and banking77_test.csv."""
    model: str | None = None
    """Directory of a Hugging Face encoder with its tokenizer, of the BERT family, such as MiniLM-L6."""
    labels: tuple[int, ...] = (10, 5, 20)
    """Training queries per intent. All methods run on the first number, and those of --few on the others."""
    methods: tuple[MethodName, ...] = METHODS
    """Which methods to compare."""
    few: tuple[MethodName, ...] = ("lora", "ensemble", "ivon", "split")
    """Those that also run on the other numbers of labels, each in its first way to predict."""
    seeds: int = 5
    """How often training queries are drawn, and all is trained."""
    layers: int = 1
    """Layers with an adapter, the last ones. What comes before them is computed once for each query."""
    epochs: int = 10
    """Passes over the training queries."""
    lr: float = 5e-3
    """Learning rate of AdamW, which falls to 0. The page has a table of others, by a hold-out."""
    ivon_lr: float = 1.0
    """That of IVON."""
    samples: int = 16
    """Draws of weights, or of dropout masks."""
    queries: int = 1500
    """Test queries with an intent."""
    strange: int = 500
    """Test queries out of scope."""
    seed: int = 0
    """Seed of everything random."""

    def __post_init__(self) -> None:
        refuse_repeated(self, "labels", "methods")
        for method in (*self.methods, *self.few):
            if method not in METHODS:
                raise ValueError(f"unknown method {method!r}: use {', '.join(METHODS)}.")
        if (least := min(self.labels)) < LEAST:
            raise ValueError(f"labels must be at least {LEAST} for each intent, not {least}.")
        require_at_least(self, 1, "seeds", "layers", "epochs")
        require_at_least(self, 2, "samples")
        require_at_least(self, 20, "queries", "strange")
        for name in ("lr", "ivon_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}.")

    def methods_for(self, labels: int) -> tuple[MethodName, ...]:
        if labels == self.labels[0]:
            return self.methods
        return tuple(method for method in self.methods if method in self.few)
