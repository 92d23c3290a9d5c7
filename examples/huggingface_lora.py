"""An adapter with error bars: LoRA on a small transformer, whose twins hold the frozen backbone once.

python examples/huggingface_lora.py (needs the extra huggingface)
"""

import itertools
import random
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from twinboot.integrations.huggingface import TwinTrainer, load

# Reviews such as "the film was very good": praise (1) or blame (0)?
bad, good = ["bad", "poor", "awful", "dull", "weak", "sad"], ["good", "great", "fine", "nice", "fun", "superb"]
nouns, ways = ["film", "book", "play", "song", "meal", "room", "view", "game"], [(), ("very",), ("rather",)]
reviews = [("the", noun, "was", *way, word) for noun, way, word in itertools.product(nouns, ways, bad + good)]
vocabulary = ["[pad]", *sorted({word for review in reviews for word in review})]


def row(words: tuple[str, ...], wrong: bool = False) -> dict[str, object]:
    tokens = [vocabulary.index(word) for word in words] + [0] * (5 - len(words))
    label = int((words[-1] in good) != wrong)
    return {"input_ids": tokens, "attention_mask": [int(t > 0) for t in tokens], "labels": label}


random.Random(0).shuffle(reviews)
known = [row(words) for words in reviews if words[-1] in bad[:3] + good[:3]]
few = [row(words, wrong=i % 10 == 0) for i, words in enumerate(reviews[:120])]  # people err
test = [row(words) for words in reviews[120:]]

# In your own work the backbone comes with its weights; here it learns them from half of the words.
set_seed(0)
size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
backbone = BertForSequenceClassification(BertConfig(vocab_size=len(vocabulary), **size))
folder = tempfile.mkdtemp()
quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "use_cpu": True}
once = TrainingArguments(folder, num_train_epochs=6, learning_rate=3e-3, per_device_train_batch_size=32, **quiet)
Trainer(backbone, once, train_dataset=known).train()
backbone.save_pretrained(f"{folder}/backbone")

model = get_peft_model(backbone, LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value", "dense"]))
args = TrainingArguments(folder, num_train_epochs=8, learning_rate=1e-2, per_device_train_batch_size=16, **quiet)
trainer = TwinTrainer(model, args, train_dataset=few)
trainer.train()
print(f"loss on what no twin saw: {trainer.evaluate()['eval_loss']:.3f}")

labels = torch.tensor([review["labels"] for review in test])
for name, samples in (("mean", 0), ("32 draws", 32)):
    found = trainer.predict(test, samples)
    right = (found.labels == labels).float().mean()
    print(f"{name}: accuracy {right:.3f}, NLL {found.nll(labels).mean():.3f} on {len(test)} reviews")

held, whole = (sum(p.numel() for p in module.parameters()) for module in (trainer.twins, model))
print(f"the twins hold {held} parameters, a plain adapter with its backbone {whole}, two copies {2 * whole}")

trainer.save_model(f"{folder}/adapter")  # as peft does, for anybody, and sigma beside it
again = BertForSequenceClassification.from_pretrained(f"{folder}/backbone")
estimate = load(f"{folder}/adapter", PeftModel.from_pretrained(again, f"{folder}/adapter"))
inputs = {name: torch.tensor([review[name] for review in test]) for name in ("input_ids", "attention_mask")}
difference = (estimate.predict(inputs, seed=args.seed).probs - found.probs).abs().max()
print(f"loaded again: probabilities differ by {difference:.0e} at most")
