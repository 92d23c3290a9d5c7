"""What twins of an adapter cost in memory, beside a plain adapter and beside twins of the whole model.

    .venv/bin/python benchmarks/lora_memory.py --page docs/lora-memory.md         (needs the extra huggingface)

Each case trains in a process of its own, with the Trainer of Hugging Face or ours, so that its peak is its own. The
model is a transformer made from a config, with random weights: memory does not depend on what they are.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from overhead import resident
from torch import nn

STEPS, BATCH, TOKENS = 3, 4, 64
SIZE = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 2048}
CASES = {
    "LoRA, one model": ("plain", True),
    "LoRA, twins": ("twins", True),
    "LoRA, two copies of the model": ("two", True),
    "all weights, one model": ("plain", False),
    "all weights, twins": ("twins", False),
}


def model(lora: bool) -> Any:
    """A BERT of 8 layers of 512, with an adapter of rank 8 on queries and values, as peft has it by default, or not."""
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    made = BertForSequenceClassification(BertConfig(vocab_size=30_000, num_labels=2, **SIZE))
    return get_peft_model(made, LoraConfig(task_type="SEQ_CLS", r=8)) if lora else made


def measure(case: str) -> dict[str, float]:
    """In this process: numbers of parameters, and MiB at most, of some steps with AdamW."""
    import peft  # noqa: F401 - it and the model's code are to be there before anything is measured
    from transformers import BertForSequenceClassification, Trainer, TrainingArguments  # noqa: F401

    from twinboot.integrations.huggingface import TwinTrainer

    kind, lora = CASES[case]
    tokens = torch.randint(30_000, (STEPS * BATCH * 4, TOKENS), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": i % 2} for i, row in enumerate(tokens)]
    before = resident("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "max_steps": STEPS}
        args = TrainingArguments(folder, per_device_train_batch_size=BATCH, disable_tqdm=True, **settings)
        make = TwinTrainer if kind == "twins" else Trainer
        trainers = [make(model(lora), args, train_dataset=data) for _ in range(2 if kind == "two" else 1)]
        for trainer in trainers:
            trainer.train()
        peak = resident("VmHWM") - before
    modules = [module for t in trainers for module in ([t.model, t.twins] if kind == "twins" else [t.model])]
    trained = sum(p.numel() for t in trainers for group in t.optimizer.param_groups for p in group["params"])
    one = sum(p.numel() for p in trainers[0].model.parameters())
    return {"parameters": one, "trained": trained, "held": sum(distinct(modules).values()) / 2**20, "peak": peak}


def distinct(modules: list[nn.Module]) -> dict[int, int]:
    """Bytes of the parameters by where they lie: what is shared counts once."""
    storages = (p.untyped_storage() for module in modules for p in module.parameters())
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def table(found: dict[str, dict[str, float]]) -> str:
    plain = found["LoRA, one model"]
    lines = [
        "| | parameters that are trained | weights held, MiB | peak, MiB | peak relative to the first row |",
        "|---|---|---|---|---|",
    ]
    for case, row in found.items():
        ratio = row["peak"] / plain["peak"]
        lines.append(f"| {case} | {row['trained']:,.0f} | {row['held']:.1f} | {row['peak']:.0f} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="write the table to this file")
    options = parser.parse_args()
    found = {}
    for case in CASES:
        code = f"import json, lora_memory; print(json.dumps(lora_memory.measure({case!r})))"
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True
        )
        found[case] = json.loads(run.stdout.splitlines()[-1])
        print(f"{case}: {found[case]}", file=sys.stderr, flush=True)
    print(table(found))
    if options.page:
        import peft
        import transformers

        setup = (
            f"PyTorch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}, Python "
            f"{platform.python_version()}, on a CPU."
        )
        whole = found["all weights, one model"]["parameters"] / 1e6
        page = PAGE.strip().format(whole=whole, steps=STEPS, batch=BATCH, tokens=TOKENS, **ratios(found))
        options.page.write_text("\n\n".join([page, setup, table(found)]) + "\n")


def ratios(found: dict[str, dict[str, float]]) -> dict[str, float]:
    lora, twins, two = (found[f"LoRA, {case}"] for case in ("one model", "twins", "two copies of the model"))
    more = {f"more_{what}": twins[what] / lora[what] - 1 for what in ("held", "peak")}
    return {**more, "two_held": two["held"] / lora["held"] - 1, "two_peak": two["peak"] / lora["peak"] - 1}


PAGE = """
# Memory of twins with an adapter

Written by `benchmarks/lora_memory.py --page docs/lora-memory.md`: {steps} steps of AdamW with a BERT of {whole:.1f}
million weights made from a config, {batch} sentences of {tokens} tokens a step, in a process for each row.

- *Weights held*: bytes of all parameters in memory, where what is shared counts once. With twins these are the twins
  and the model that was given, which takes their mean. With LoRA that is one backbone and three adapters,
  {more_held:.1%} more than a plain adapter with its backbone; two copies of both are {two_held:.0%} more. With all
  weights it is three copies.
- *Peak*: what the process held at most, beyond what the imports take: weights, gradients, the state of AdamW, the
  clean weights while noise is on them, and the activations, of one twin at a time. Twins of an adapter need
  {more_peak:.0%} more than a plain adapter, two copies {two_peak:.0%} more. A process of another run differs by some
  MiB.
"""

if __name__ == "__main__":
    main()
