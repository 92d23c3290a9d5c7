"""From a CSV of texts and labels to a classifier that abstains when it is not sure.

python examples/abstain.py FILE.csv --model FOLDER (any encoder of Hugging Face; needs the extra huggingface)
"""

import argparse
import csv
import random

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, TrainingArguments

from twinboot.integrations.huggingface import TwinTrainer, load

parser = argparse.ArgumentParser()
parser.add_argument("csv", help="a header, then a text and its label in each row")
parser.add_argument("--model", required=True, help="a folder, or a name on the hub")
parser.add_argument("--rows", type=int, help="use so many rows of the file, drawn at random")
parser.add_argument("--out", default="abstaining", help="the folder of the result")
given = parser.parse_args()

with open(given.csv, newline="", encoding="utf-8") as file:
    samples = [(text, label) for text, label in list(csv.reader(file))[1:]]
samples = random.Random(0).sample(samples, given.rows or len(samples))
classes = sorted({label for _, label in samples})
test, train = samples[: len(samples) // 5], samples[len(samples) // 5 :]

torch.manual_seed(0)  # of the adapter and of the new head
tokenizer = AutoTokenizer.from_pretrained(given.model)
collate = DataCollatorWithPadding(tokenizer)
rows = [{**tokenizer(text, truncation=True), "labels": classes.index(label)} for text, label in train]
backbone = AutoModelForSequenceClassification.from_pretrained(given.model, num_labels=len(classes))
model = get_peft_model(backbone, LoraConfig(task_type="SEQ_CLS", r=8, target_modules="all-linear"))
usual = {"num_train_epochs": 10, "learning_rate": 2e-3, "per_device_train_batch_size": 16}
args = TrainingArguments(given.out, save_strategy="no", report_to="none", **usual)
trainer = TwinTrainer(model, args, collate, rows, processing_class=tokenizer)
trainer.train()

# Some 13 % of the rows were drawn for neither twin: half of them for the temperature, half for the sets.
unseen, estimate = [rows[i] for i in trainer.bootstrap.unseen.tolist()], trainer.estimate()
estimate.calibrate(unseen[::2], samples=8, collate_fn=collate)
estimate.conformalize(unseen[1::2], samples=8, collate_fn=collate)
trainer.save_model()  # the adapter, sigma with the calibration, and the tokenizer

# From here on, another program: with the folder, the backbone and the names of the classes.
again = AutoModelForSequenceClassification.from_pretrained(given.model, num_labels=len(classes))
estimate = load(given.out, PeftModel.from_pretrained(again, given.out))
prediction = estimate.predict([text for text, _ in test], samples=8, tokenizer=tokenizer)
sets = prediction.set(0.9)
for (text, _), which in list(zip(test, sets, strict=True))[:5]:
    names = [classes[i] for i in which.nonzero().flatten().tolist()]
    print(f"{text!r}: {names[0] if len(names) == 1 else 'not sure, ' + ' or '.join(names)}")

right = [classes[i] == label for i, (_, label) in zip(prediction.labels.tolist(), test, strict=True)]
held = [bool(which[classes.index(label)]) for which, (_, label) in zip(sets, test, strict=True)]
kept = [ok for ok, size in zip(right, sets.sum(1).tolist(), strict=True) if size == 1]
print(f"{sum(held) / len(test):.1%} of {len(test)} sets hold the right label; accuracy {sum(right) / len(test):.3f}")
print(f"answered {len(kept) / len(test):.1%}" + (f", accuracy {sum(kept) / len(kept):.3f} there" if kept else ""))
