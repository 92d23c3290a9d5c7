"""Sentences of a few tokens, tiny transformers made from a config, and arguments for a Trainer of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def sentences(n: int = 60, seed: int = 0) -> list[dict[str, Any]]:
    """Five tokens from 3 to 11, whose label, 0 to 2, is the remainder of the first one by 3."""
    tokens = torch.randint(3, 12, (n, 5), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row[0] % 3} for row in tokens.tolist()]


def inputs(data: list[dict[str, Any]]) -> Tensor:
    return torch.tensor([row["input_ids"] for row in data])


def bert(kind: Any = BertForSequenceClassification, **options: Any) -> Any:
    torch.manual_seed(1)
    return kind(BertConfig(**{"vocab_size": 12, "num_labels": 3, "max_position_embeddings": 8, **SIZE, **options}))


def tokenizer(words: list[str]) -> Any:
    """One that knows some words, and puts [CLS] before a text. The first four tokens are special."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: number for number, word in enumerate([*special, *words])}
    found = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    found.post_processor = processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 2)])
    named = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=found, model_max_length=8, **named)


def spoken(n: int = 60) -> list[dict[str, Any]]:
    """Sentences for a language model, with labels for some of their tokens: batches differ in how many they have."""
    rows = [(row["input_ids"], 1 + row["labels"]) for row in sentences(n)]
    return [{"input_ids": tokens, "labels": tokens[:-some] + [-100] * some} for tokens, some in rows]


def gpt2(**options: Any) -> Any:
    torch.manual_seed(1)
    size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**{"vocab_size": 12, "bos_token_id": 1, "eos_token_id": 2, **size, **options}))
    model.loss_type = (
        "ForCausalLM"  # GPT-2 does not say so, and a Trainer would then count the first token's label, too
    )
    return model


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    quiet = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
    }
    brief = {"num_train_epochs": 2, "learning_rate": 0.01, "per_device_train_batch_size": 8}
    return TrainingArguments(str(folder), **{**quiet, **brief, **options})
