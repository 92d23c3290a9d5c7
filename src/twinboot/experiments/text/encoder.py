"""A pretrained encoder with adapters on its last layers.

What comes before these layers is frozen and has no dropout, so it is computed once for each query.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel
from transformers.modeling_outputs import SequenceClassifierOutput

from ..._core.seeds import derive, seeded
from .data import Queries, vocabulary

TOKENS = 24  # of a query, which is cut there: 0.4 % of CLINC's have as many
BATCH = 128  # queries of a forward pass, of similar length

Tokenize = Callable[[Sequence[str]], tuple[Tensor, Tensor]]  # ids and mask, [queries, TOKENS]


@dataclass(frozen=True, eq=False)
class Features:
    """Queries as the adapted layers get them."""

    hidden: Tensor  # [queries, TOKENS, width]
    mask: Tensor  # [queries, TOKENS]: 1 where a token is

    def __len__(self) -> int:
        return len(self.mask)

    def rows(self, labels: Tensor) -> list[dict[str, Tensor]]:
        """Samples for a `Trainer`."""
        names = ("hidden", "mask", "labels")
        return [dict(zip(names, row, strict=True)) for row in zip(self.hidden, self.mask, labels, strict=True)]

    def dataset(self, labels: Tensor) -> TensorDataset:
        """Samples for `error_bars` and `Estimate.calibrate`."""
        return TensorDataset(self.hidden, self.mask, labels)


def collate(rows: list[Any]) -> Any:
    """A batch that is as long as its longest query, of samples of either kind."""
    batch = default_collate(rows)
    named = isinstance(batch, dict)
    hidden, mask, *others = batch.values() if named else batch
    longest = int(mask.sum(1).max())
    found = [hidden[:, :longest], mask[:, :longest], *others]
    return dict(zip(batch, found, strict=True)) if named else found


class Encoder:
    """A model of the BERT family and its tokenizer."""

    def __init__(self, model: Any, tokenize: Tokenize) -> None:
        self.model, self.tokenize = model.eval().requires_grad_(False), tokenize

    @classmethod
    def load(cls, directory: str) -> Encoder:
        """From a directory. Nothing is downloaded."""
        if not (Path(directory) / "config.json").is_file():
            raise ValueError(f"{directory} holds no Hugging Face model: it has no config.json.")
        try:
            model = AutoModel.from_pretrained(directory, local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{directory} holds no Hugging Face model: {str(error).splitlines()[0]}") from None
        if not isinstance(getattr(getattr(model, "encoder", None), "layer", None), nn.ModuleList):
            raise ValueError(f"{directory} holds a {type(model).__name__}: an encoder of the BERT family is needed.")

        def tokenize(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
            options = {"truncation": True, "max_length": TOKENS, "padding": "max_length", "return_tensors": "pt"}
            found = tokenizer(list(texts), **options)
            return found["input_ids"], found["attention_mask"]

        return cls(model, tokenize)

    @classmethod
    def tiny(cls, queries: Queries, seed: int) -> Encoder:
        """A small one with random weights, for generated sentences."""
        words = {word: i for i, word in enumerate(vocabulary(queries), start=1)}
        size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        with seeded(derive(seed, "encoder")):
            model = BertModel(BertConfig(vocab_size=len(words) + 1, max_position_embeddings=TOKENS, **size))

        def tokenize(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
            ids = torch.zeros(len(texts), TOKENS, dtype=torch.long)
            for row, text in zip(ids, texts, strict=True):
                found = torch.tensor([words[word] for word in text.split()])
                row[: len(found)] = found
            return ids, (ids > 0).long()

        return cls(model, tokenize)

    @torch.no_grad()
    def features(self, texts: Sequence[str], layers: int) -> Features:
        """What the last `layers` layers get for some queries."""
        depth = len(self.model.encoder.layer)
        if layers > depth:
            raise ValueError(f"the encoder has {depth} layers: layers can't be {layers}.")
        ids, mask = self.tokenize(texts)
        hidden = torch.zeros(*mask.shape, self.model.config.hidden_size)
        for batch in mask.sum(1).argsort(stable=True).split(BATCH):
            longest = int(mask[batch].sum(1).max())
            found = self.model(ids[batch, :longest], mask[batch, :longest], output_hidden_states=True)
            hidden[batch, :longest] = found.hidden_states[depth - layers]
        return Features(hidden, mask)

    def classifier(self, layers: int, classes: int) -> Classifier:
        """The last layers with a new linear layer after them, not adapted yet."""
        config = copy.copy(self.model.config)
        config.num_labels, config.problem_type = classes, "single_label_classification"
        return Classifier(copy.deepcopy(self.model.encoder.layer[-layers:]), config)


class Classifier(nn.Module):
    """Layers of an encoder, the mean over the tokens, and a linear layer."""

    def __init__(self, layers: nn.ModuleList, config: Any) -> None:
        super().__init__()
        self.layers, self.config = layers, config
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """The inputs of the linear layer."""
        here = mask.to(hidden.dtype)
        away = (1 - here)[:, None, None] * torch.finfo(hidden.dtype).min
        for layer in self.layers:
            found = layer(hidden, attention_mask=away)
            hidden = found[0] if isinstance(found, tuple) else found
        return (hidden * here[:, :, None]).sum(1) / here.sum(1, keepdim=True)

    def forward(self, hidden: Tensor, mask: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
        logits = self.classifier(self.dropout(self.pooled(hidden, mask)))
        return SequenceClassifierOutput(loss=None if labels is None else F.cross_entropy(logits, labels), logits=logits)
