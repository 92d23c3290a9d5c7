"""Error bars for a LoRA adapter that a Hugging Face Trainer has trained: the members hold the adapter alone.

python examples/error_bars_huggingface.py (needs the extra huggingface)
"""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from twinboot import error_bars

# Sentences of six tokens. The label, 0 or 1, is whether tokens 4 to 7 are more frequent than tokens 8 to 11; some are
# wrong. In your own work the backbone comes with its weights, and the sentences from a tokenizer.
set_seed(0)
tokens = torch.randint(4, 12, (600, 6))
labels = ((tokens < 8).sum(1) > 3).long()
masks = torch.ones_like(tokens)
wrong = torch.rand(400) < 0.1
given = torch.where(wrong, 1 - labels[:400], labels[:400])
rows = [
    {"input_ids": t, "attention_mask": m, "labels": y} for t, m, y in zip(tokens[:400], masks[:400], given, strict=True)
]

size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
backbone = BertForSequenceClassification(BertConfig(vocab_size=12, **size))
model = get_peft_model(backbone, LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value", "dense"]))
quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "use_cpu": True}
args = TrainingArguments(
    tempfile.mkdtemp(), num_train_epochs=15, learning_rate=5e-3, per_device_train_batch_size=32, **quiet
)
Trainer(model, args, train_dataset=rows).train()

# Here all sentences have one length. Others need collate_fn=DataCollatorWithPadding(tokenizer).
estimate = error_bars(
    model, rows, epochs=5, batch_size=32, optimizer=lambda p: torch.optim.AdamW(p, lr=5e-3), progress=False
)

test = {"input_ids": tokens[400:], "attention_mask": masks[400:]}
for name, samples in (("model", 0), ("members", None)):
    found = estimate.predict(test, samples)
    right = (found.labels == labels[400:]).float().mean()
    print(f"{name}: accuracy {right:.3f}, NLL {found.nll(labels[400:]).mean():.3f} on {len(found.labels)} sentences")
print(f"mean error bar of a probability: {found.std.mean():.3f}")
own, whole = sum(stack[0].numel() for stack in estimate.members.values()), sum(p.numel() for p in model.parameters())
print(f"{len(estimate.members)} members of {own} values each, beside one model of {whole}")
