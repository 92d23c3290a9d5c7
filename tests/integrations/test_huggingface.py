"""TwinTrainer equals a plain loop, evaluates the mean, resumes bit for bit, and saves models that others can load."""

import importlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from huggingface_hub import ModelCard
from processes import together
from safetensors.torch import load_file
from sentences import arguments, bert, gpt2, inputs, sentences, spoken, tokenizer
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Subset, TensorDataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForQuestionAnswering,
    BertForTokenClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    __version__,
    default_data_collator,
    set_seed,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from twinboot import Bootstrap, PairedLoader, Protocol, Twins, pool_gradients, resets
from twinboot.estimate.conformal import Scores
from twinboot.estimate.spread import DRAWS
from twinboot.integrations.huggingface import REPLACED, TwinTrainer, load
from twinboot.training import checkpoints


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """Accelerate keeps the environment it found, to which arguments such as fsdp=True are written."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in module.state_dict().items()}


def same(first: Any, second: Any) -> bool:
    return first.keys() == second.keys() and all(torch.equal(t, second[name]) for name, t in first.items())


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("mode", ["sample", "centered"])
@pytest.mark.parametrize(
    ("reset", "pooled", "noise", "clip"),
    [(resets.at(2), 0.0, 1.0, 0.5), (resets.steps(resets.every(3)), 0.7, 4.0, 0.5), (resets.at(2), 0.7, 1.0, 0.0)],
)
def test_training_equals_the_plain_loop(
    tmp_path: Path, accumulation: int, mode: Any, reset: resets.Schedule, pooled: float, noise: float, clip: float
) -> None:
    """Dropout, clipping, a loss over all tokens of accumulated batches, pooled gradients and resets; bit for bit."""
    model, data = gpt2(), spoken()
    twins = Twins(model, groups="tensor", seed=5)
    optimizer = torch.optim.SGD(twins.parameters(), 0.1, momentum=0.9)
    loader = PairedLoader(data, Bootstrap(60, seed=5), 8, collate_fn=default_data_collator)
    set_seed(5)
    twins.train()
    done, (by_step, by_epoch) = 0, resets.steps_and_epochs(reset)
    for epoch in (1, 2, 3):
        if epoch > 1 and by_epoch(epoch - 1):
            twins.reset(mode)
        pairs = list(loader)
        for start in range(0, len(pairs), accumulation):
            if done and by_step(done):
                twins.reset(mode)
            part = pairs[start : start + accumulation]
            counts = [sum((pair[r]["labels"][:, 1:] != -100).sum() for pair in part) for r in (0, 1)]
            for pair in part:
                with twins.sampled(noise):
                    for twin, batch, count in zip(twins, pair, counts, strict=True):
                        twin(**batch, num_items_in_batch=count).loss.backward()
            pool_gradients(twins, pooled)
            for twin in twins:
                if clip:
                    clip_grad_norm_(twin.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            twins.update()
            done += 1

    settings: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "max_grad_norm": clip}
    args = arguments(tmp_path, seed=5, num_train_epochs=3, lr_scheduler_type="constant", **settings)
    protocol = Protocol(groups="tensor", reset=reset, mode=mode, pooled=pooled, noise=noise)
    sgd = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    trainer = TwinTrainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=sgd, protocol=protocol)
    trainer.train()
    assert same(weights(trainer.twins), weights(twins))
    assert same(weights(trainer.model), weights(twins.estimate().module))  # the user's model has the mean


def test_the_defaults_learn_and_predict_with_uncertainty(tmp_path: Path) -> None:
    trainer = TwinTrainer(bert(), arguments(tmp_path, num_train_epochs=6), train_dataset=sentences(150))
    trainer.train()
    new = sentences(100, seed=1)
    found = trainer.predict([{"input_ids": row["input_ids"]} for row in new])
    labels = torch.tensor([row["labels"] for row in new])
    assert (found.labels == labels).float().mean() > 0.9
    assert (found.std > 0).any()
    assert (found.mutual_information >= 0).all()


@pytest.mark.parametrize("bf16", [False, True])
def test_evaluation_uses_the_mean_and_changes_nothing(tmp_path: Path, bf16: bool) -> None:
    data = sentences()
    args = arguments(tmp_path, eval_strategy="epoch", bf16=bf16)
    trainer = TwinTrainer(bert(), args, train_dataset=data)
    assert math.isfinite(trainer.evaluate()["eval_loss"])  # before any training
    trainer.train()
    before = weights(trainer.twins)
    judged = trainer.evaluate()["eval_loss"]
    assert judged == trainer.state.log_history[-3]["eval_loss"]  # as at the end of the last epoch
    assert same(weights(trainer.twins), before)
    assert all(p.dtype == torch.float32 for p in trainer.twins.parameters())

    unseen = Subset(data, Bootstrap(60, seed=42).unseen.tolist())
    mean, losses = trainer.twins.estimate(), []
    for batch in DataLoader(unseen, 8, collate_fn=default_data_collator):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            losses += [mean(**batch).loss.float()] * len(batch["labels"])
    assert judged == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)


def test_bfloat16_trains_the_noisy_twins_and_stays_near_float32(tmp_path: Path) -> None:
    runs = {}
    for bf16 in (False, True):
        model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        trainer = TwinTrainer(model, arguments(tmp_path, max_steps=5, bf16=bf16), train_dataset=sentences())
        runs[bf16] = trainer.train().training_loss
        assert all(sigma > 0 for sigma in trainer.twins.sigma.values())
    assert runs[True] != runs[False]
    assert runs[True] == pytest.approx(runs[False], rel=0.02)  # bfloat16 has 8 bits


@pytest.mark.parametrize(("step", "workers"), [(4, 0), (8, 0), (11, 1)])  # in and at the end of an epoch of 8 steps
@pytest.mark.parametrize("reset", [None, resets.steps(resets.every(4))])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, step: int, workers: int, reset: Any) -> None:
    """With dropout, AdamW, a falling learning rate and evaluations in between; bit for bit."""

    def trainer(folder: str) -> TwinTrainer:
        saved: dict[str, Any] = {
            "save_strategy": "steps",
            "save_steps": step,
            "eval_strategy": "steps",
            "eval_steps": 3,
        }
        args = arguments(tmp_path / folder, **saved, dataloader_num_workers=workers)
        return TwinTrainer(bert(), args, train_dataset=sentences(), protocol=Protocol(mode="sample", reset=reset))

    whole = trainer("a")
    whole.train()
    assert whole.state.global_step == 16
    other = trainer("b")
    torch.manual_seed(99)
    other.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{step}"))
    assert same(weights(other.twins), weights(whole.twins))
    assert same(weights(other.model), weights(whole.model))
    assert other.state.log_history[-2]["eval_loss"] == whole.state.log_history[-2]["eval_loss"]
    moments = [t.optimizer.state_dict()["state"] for t in (other, whole)]
    assert all(same(moments[0][i], moments[1][i]) for i in moments[1])


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    trainer = TwinTrainer(bert(), arguments(tmp_path, save_strategy="epoch"), train_dataset=sentences())
    trainer.train()
    folder = tmp_path / "checkpoint-8"
    with pytest.raises(ValueError, match="batch_size was 8 and is 4 here"):
        TwinTrainer(bert(), arguments(tmp_path, per_device_train_batch_size=4), train_dataset=sentences()).train(
            str(folder)
        )
    with pytest.raises(ValueError, match="the checkpoint does not fit"):
        TwinTrainer(bert(), arguments(tmp_path), train_dataset=sentences(), protocol=Protocol(groups="unit")).train(
            str(folder)
        )
    (folder / "twins.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no twins\.pt"):
        TwinTrainer(bert(), arguments(tmp_path), train_dataset=sentences()).train(str(folder))


def test_resuming_needs_the_same_options(tmp_path: Path) -> None:
    args = arguments(tmp_path, save_strategy="epoch", num_train_epochs=1)
    TwinTrainer(bert(), args, train_dataset=sentences()).train()
    folder = tmp_path / "checkpoint-8"
    others = [
        (Protocol(noise=2), "noise was 1.0 and is 2.0 here"),
        (Protocol(pooled=0.5), "pooled was 0.0 and is 0.5 here"),
        (Protocol(mode="sample"), "mode was centered and is sample here"),
        (Protocol(reset=resets.every(2)), r"reset was every\(interval=1\) and is every\(interval=2\) here"),
    ]
    for protocol, said in others:
        with pytest.raises(
            ValueError, match=rf"^the checkpoint does not fit: {said}; use the options of the original run\.$"
        ):
            TwinTrainer(bert(), args, train_dataset=sentences(), protocol=protocol).train(str(folder))
    state = torch.load(folder / "twins.pt", weights_only=True)
    del state["twin_options"]
    checkpoints.write(state, folder / "twins.pt")
    with pytest.raises(ValueError, match=r"^the checkpoint does not fit: it says nothing of 'reset'; use the options"):
        TwinTrainer(bert(), args, train_dataset=sentences()).train(str(folder))


def test_damaged_and_foreign_twins_are_refused_in_one_sentence(tmp_path: Path) -> None:
    args = arguments(tmp_path, save_strategy="epoch", num_train_epochs=1)
    TwinTrainer(bert(), args, train_dataset=sentences()).train()
    path = tmp_path / "checkpoint-8" / "twins.pt"
    whole = path.read_bytes()
    flipped = whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]
    for content in (b"", b"text", whole[:-1], whole[: len(whole) // 2], flipped):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"^{path} is damaged, or no file of this version of twinboot"):
            TwinTrainer(bert(), args, train_dataset=sentences()).train(str(path.parent))
    checkpoints.write({"format": 1}, path)
    with pytest.raises(ValueError, match=rf"^{path} was not written by a TwinTrainer: use another checkpoint\.$"):
        TwinTrainer(bert(), args, train_dataset=sentences()).train(str(path.parent))


def labelled() -> TensorDataset:
    return TensorDataset(inputs(sentences()), torch.tensor([row["labels"] for row in sentences()]))


def test_predict_uses_the_calibrated_estimate_until_training_continues(tmp_path: Path) -> None:
    data = sentences()
    trainer = TwinTrainer(bert(), arguments(tmp_path), train_dataset=data)
    trainer.train()
    before, estimate = trainer.predict(data, 4, seed=0), trainer.estimate()
    assert trainer.estimate() is estimate
    estimate.calibrate(labelled(), samples=4)
    estimate.scale = 2.0
    assert estimate.temperature != 1
    x = {"input_ids": inputs(data)}
    for dropout in (False, True):
        estimate.dropout = dropout
        found = trainer.predict(data, 4, seed=0)
        expected = estimate.predict(x, 4, batch_size=8, vectorize=False)
        assert torch.equal(found.probs, expected.probs)
        assert torch.equal(found.std, expected.std)
        assert not torch.allclose(found.probs, before.probs)
    trainer.evaluate()
    assert trainer.estimate() is estimate  # evaluation changes nothing
    assert torch.equal(
        trainer.predict(data, 4, seed=0, scale=0.5).std, estimate.predict(x, 4, batch_size=8, scale=0.5).std
    )

    kept = weights(estimate)
    trainer.train()
    assert trainer.estimate() is not estimate
    assert (trainer.estimate().temperature, trainer.estimate().scale, trainer.estimate().dropout) == (1, 1, False)
    assert same(weights(estimate), kept)
    assert not same(weights(trainer.estimate()), kept)


@pytest.mark.parametrize("lora", [False, True])
def test_predictions_of_the_trainer_and_of_a_saved_model_have_the_sets_that_were_calibrated(
    tmp_path: Path, lora: bool
) -> None:
    """The rows of the training serve to calibrate, with its collator."""
    words = [f"w{i}" for i in range(8)]
    known = tokenizer(words)
    rows = [{**known(" ".join(words[token - 4] for token in row["input_ids"][:2])), **row} for row in sentences(90)]
    rows = [{"input_ids": row["input_ids"][: 2 + i % 3], "labels": row["labels"]} for i, row in enumerate(rows)]
    pad = DataCollatorWithPadding(known)
    trainer = TwinTrainer(adapted() if lora else bert(), arguments(tmp_path), pad, rows, processing_class=known)
    trainer.train()
    held_out = sentences(90, seed=1)
    trainer.estimate().calibrate(held_out[::2], samples=4, keep_scale=True, collate_fn=pad)
    trainer.estimate().conformalize(held_out[1::2], samples=4, collate_fn=pad)
    texts = ["w0 w1", "w2", "w3 w4 w5 w6"]
    estimate = trainer.estimate()
    found = estimate.predict(texts, 4, tokenizer=known, batch_size=2)
    by_trainer = trainer.predict([known(text) for text in texts], 4)
    torch.testing.assert_close(by_trainer.probs, found.probs)  # of batches that are padded otherwise
    assert torch.equal(by_trainer.set(0.8), found.set(0.8))
    with pytest.raises(ValueError, match="this prediction has no scores"):
        trainer.predict([known(text) for text in texts], 4, seed=7).set(0.8)

    trainer.save_model(str(tmp_path / "final"))
    kind = AutoModelForSequenceClassification
    plain = (
        peft.PeftModel.from_pretrained(bert(), tmp_path / "final") if lora else kind.from_pretrained(tmp_path / "final")
    )
    again = load(tmp_path / "final", plain).predict(
        texts, 4, tokenizer=AutoTokenizer.from_pretrained(tmp_path / "final")
    )
    torch.testing.assert_close(again.probs, found.probs)
    assert torch.equal(again.set(0.8), found.set(0.8))


def test_the_best_model_is_loaded_with_its_calibration(tmp_path: Path) -> None:
    class Calibrating(TrainerCallback):
        """Sets another temperature in each epoch, before its checkpoint is written."""

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.estimate().temperature = 1 + state.epoch

    best: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    scores = iter([0.5, 0.9, 0.7])
    args = arguments(tmp_path, num_train_epochs=3, metric_for_best_model="score", greater_is_better=True, **best)
    judge = {"compute_metrics": lambda _: {"score": next(scores)}}
    trainer = TwinTrainer(bert(), args, train_dataset=sentences(), callbacks=[Calibrating()], **judge)
    trainer.train()
    assert trainer.estimate().temperature == 3
    assert trainer.estimate() is trainer.estimate()


def test_an_estimate_is_of_the_model_that_was_trained(tmp_path: Path) -> None:
    trainer = TwinTrainer(bert(), arguments(tmp_path, max_steps=2), train_dataset=sentences())
    trainer.train()
    trainer.model = bert()
    with pytest.raises(
        RuntimeError, match=r"^this model was not trained yet, so there is no sigma: call train\(\) first"
    ):
        trainer.estimate()
    trainer.save_model(str(tmp_path / "other"))
    assert not (tmp_path / "other" / "sigma.safetensors").exists()


class Plain(nn.Module):
    """A model without a config. It may write into its input."""

    def __init__(self, writes: bool = False, outputs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.writes, self.layer = writes, nn.Linear(5, outputs)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> SequenceClassifierOutput:
        x = x.sub_(0.5) if self.writes else x - 0.5
        logits = self.layer(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def measured() -> list[dict[str, Any]]:
    return [{"x": torch.tensor(row["input_ids"]) / 6, "labels": row["labels"]} for row in sentences()]


def test_each_draw_gets_unchanged_inputs_even_if_the_model_writes_into_them(tmp_path: Path) -> None:
    data, found = measured(), []
    for writes in (False, True):
        trainer = TwinTrainer(Plain(writes), arguments(tmp_path), train_dataset=data)
        trainer.train()
        trainer.data_collator = lambda rows: {"x": rows[0]["x"][None]}  # a view of the dataset's own tensor
        trainer.args.per_device_eval_batch_size = 1
        found.append(trainer.predict(data, 8, task="classification"))
    assert torch.equal(found[0].probs, found[1].probs)
    assert torch.equal(found[0].std, found[1].std)
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(data, measured(), strict=True))


def test_a_model_without_a_config_needs_a_task(tmp_path: Path) -> None:
    data = measured()
    trainer = TwinTrainer(Plain(), arguments(tmp_path, max_steps=2), train_dataset=data)
    trainer.train()
    assert trainer.estimate().task is None
    with pytest.raises(ValueError, match=r'^the model has no config that says what it predicts: give task="classifica'):
        trainer.predict(data)
    assert trainer.predict(data, 2, task="regression").task == "regression"
    trainer.estimate().task = "classification"
    assert trainer.predict(data, 2).task == "classification"
    trainer.save_model(str(tmp_path / "final"))
    assert load(tmp_path / "final", Plain()).task == "classification"


def test_the_best_model_is_loaded_with_its_sigma(tmp_path: Path) -> None:
    best: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    scores, seen = iter([0.5, 0.9, 0.7, 0.6, 0.8]), []

    def judge(_: Any) -> dict[str, float]:
        seen.append((weights(trainer.model), trainer.twins.sigma))
        return {"score": next(scores)}

    args = arguments(tmp_path, num_train_epochs=20, metric_for_best_model="score", greater_is_better=True, **best)
    stop = EarlyStoppingCallback(2)
    trainer = TwinTrainer(bert(), args, train_dataset=sentences(), compute_metrics=judge, callbacks=[stop])
    trainer.train()
    assert len(seen) == 4
    model, sigma = seen[1]
    assert same(weights(trainer.model), model)
    assert not same(weights(trainer.model), seen[3][0])
    trainer.evaluate()  # must not restore the last model
    assert same(weights(trainer.model), model)
    assert same(trainer.estimate().sigma, sigma)


def settled(folder: Path, model: Any = None, spread: float = 0.5, resume: Any = None, **options: Any) -> TwinTrainer:
    args = arguments(folder, **{"num_train_epochs": 4, "learning_rate": 0.003, **options})
    trainer = TwinTrainer(bert() if model is None else model, args, train_dataset=sentences(), spread=spread)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> list[TwinTrainer]:
    """The trainers of the twins that settle."""
    found, make = list[TwinTrainer](), TwinTrainer._around
    monkeypatch.setattr(TwinTrainer, "_around", lambda *args: found.append(make(*args)) or found[-1])
    return found


def test_draws_spread_as_the_twins_that_settled_and_the_model_stays_the_same(tmp_path: Path, around: Any) -> None:
    plain, trainer = settled(tmp_path, spread=0.0), settled(tmp_path)
    assert same(weights(plain.model), weights(trainer.model))
    assert same(weights(plain.twins), weights(trainer.twins))
    assert trainer.state.global_step == 32
    assert around[-1].state.global_step == 16
    assert around[-1].lr_scheduler.get_last_lr() == [0, 0]
    data = [row for i, row in enumerate(sentences()) if i in set(trainer.bootstrap.unseen.tolist())]
    with torch.no_grad():
        first, second = (twin.eval()(inputs(data)).logits.softmax(1) for twin in around[-1].twins)
    drawn = trainer.predict(data, samples=400).std.square().mean()
    apart = ((first - second).square() / 2).mean()
    assert abs(drawn / apart - 1) < 4 * math.sqrt(2 / (DRAWS - 1))  # the search has so many draws
    saved, settings = trainer.predict(data, 8), (trainer.estimate().scale, trainer.estimate().task, True)
    trainer.save_model(str(tmp_path / "model"))
    loaded = load(tmp_path / "model", type(trainer.model).from_pretrained(tmp_path / "model"))
    assert (loaded.scale, loaded.task, loaded.centered) == settings
    assert loaded.scale != 1
    found = loaded.predict({"input_ids": inputs(data)}, 8, seed=trainer.args.seed, vectorize=False)
    torch.testing.assert_close(found.std, saved.std)


@pytest.mark.parametrize("step", [12, 32])  # within the training, and at its end
def test_a_resumed_run_settles_bit_for_bit(tmp_path: Path, step: int) -> None:
    dropout: dict[str, Any] = {"hidden_dropout_prob": 0.1}
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    whole = settled(tmp_path / "whole", bert(**dropout), **saving)
    again = settled(
        tmp_path / "again", bert(**dropout), resume=str(tmp_path / "whole" / f"checkpoint-{step}"), **saving
    )
    assert same(whole.estimate().sigma, again.estimate().sigma)
    assert whole.estimate().scale == again.estimate().scale
    assert torch.equal(whole.predict(sentences(), 4).std, again.predict(sentences(), 4).std)
    state = torch.get_rng_state()
    again._settle()
    assert torch.equal(torch.get_rng_state(), state)  # the user's own random numbers do not change


def test_adapters_that_unlearn_their_task_settle_with_a_lower_rate(tmp_path: Path, around: Any) -> None:
    trainer = settled(tmp_path, learning_rate=0.06, num_train_epochs=8)
    rates = [twins.lr_scheduler.base_lrs[0] / 0.06 for twins in around]
    assert rates == pytest.approx([5 / 3 / 3**k for k in range(len(rates))])
    assert len(rates) > 1
    with torch.no_grad():
        rights = [
            (twin.eval()(inputs(sentences())).logits.argmax(1) == trainer.predict(sentences(), 0).labels)
            for twin in around[-1].twins
        ]
    assert torch.stack(rights).float().mean() > 0.7


def test_a_model_that_predict_refuses_does_not_settle(tmp_path: Path, around: Any) -> None:
    data = [{"input_ids": row["input_ids"], "start_positions": 1, "end_positions": 2} for row in sentences()]
    model, args = bert(BertForQuestionAnswering, num_labels=2), arguments(tmp_path, max_steps=2)
    trainer = TwinTrainer(model, args, train_dataset=data, spread=0.3)
    trainer.train()
    assert not around
    assert trainer.estimate().scale == 1


def test_tokens_of_padded_batches_settle(tmp_path: Path, around: Any) -> None:
    def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        length = max(len(row["input_ids"]) for row in rows)
        return {k: torch.tensor([row[k] + [0] * (length - len(row[k])) for row in rows]) for k in rows[0]}

    rows = [row["input_ids"][: 2 + i % 4] for i, row in enumerate(sentences())]
    data = [{"input_ids": tokens, "labels": [token % 3 for token in tokens]} for tokens in rows]
    model, args = bert(BertForTokenClassification), arguments(tmp_path, max_steps=10, gradient_accumulation_steps=2)
    trainer = TwinTrainer(model, args, padded, data, spread=0.5)
    trainer.train()
    assert around[-1].state.global_step == 5
    assert 0 < trainer.estimate().scale != 1


def test_twins_of_a_split_bootstrap_have_the_sigma_of_their_mean(tmp_path: Path) -> None:
    halves = Bootstrap(len(sentences()), kind="split")
    trainer = TwinTrainer(bert(), arguments(tmp_path), train_dataset=sentences(), bootstrap=halves)
    trainer.train()
    for group, sigma in trainer.estimate().sigma.items():
        torch.testing.assert_close(sigma, trainer.twins.sigma[group] / 2**0.5)


def pictures(n: int = 60, seed: int = 0) -> list[dict[str, Any]]:
    """8 x 8 pixels of noise around 5 in three colours. The label is the brightest colour."""
    labels = torch.arange(n) % 3
    pixels = 5 + torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    pixels += 3 * nn.functional.one_hot(labels, 3)[:, :, None, None]
    return [{"pixel_values": x, "labels": label} for x, label in zip(pixels, labels.tolist(), strict=True)]


def resnet() -> Any:
    torch.manual_seed(1)
    size: dict[str, Any] = {"embedding_size": 4, "hidden_sizes": [4], "depths": [1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(num_labels=3, **size))


def test_the_mean_has_its_own_batchnorm_statistics_in_evaluation_and_saved_models(tmp_path: Path) -> None:
    """All samples are one batch here, so the statistics are exactly those of all seen samples."""
    data = pictures()

    def trainer_in(folder: Path, **options: Any) -> TwinTrainer:
        args = arguments(folder, per_device_train_batch_size=60, num_train_epochs=6, **options)
        return TwinTrainer(resnet(), args, train_dataset=data)

    trainer = trainer_in(tmp_path, eval_strategy="epoch", save_strategy="epoch")
    trainer.train()
    first = trainer.model.resnet.embedder.embedder
    seen = torch.stack([data[i]["pixel_values"] for i in trainer.bootstrap.seen.tolist()])
    into = first.convolution(seen).transpose(0, 1).flatten(1)
    torch.testing.assert_close(first.normalization.running_mean, into.mean(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first.normalization.running_var, into.var(1), rtol=1e-4, atol=1e-5)
    for (
        twin
    ) in trainer.twins:  # after 6 steps with a momentum of 0.1, their statistics still depend on the initial ones
        assert not torch.allclose(twin.resnet.embedder.embedder.normalization.running_mean, into.mean(1), rtol=0.2)

    saved = ResNetForImageClassification.from_pretrained(tmp_path / "checkpoint-6").eval()
    assert same(weights(saved), weights(trainer.model))
    assert same(weights(trainer.estimate().module), weights(trainer.model))
    unseen = default_data_collator([data[i] for i in trainer.bootstrap.unseen.tolist()])
    assert saved(**unseen).loss.item() == pytest.approx(trainer.state.log_history[-2]["eval_loss"], rel=1e-5)

    plain = trainer_in(tmp_path / "plain")  # evaluating and saving does not change a run
    plain.train()
    assert same(weights(plain.twins), weights(trainer.twins))
    again = trainer_in(tmp_path / "again")
    again.train(str(tmp_path / "checkpoint-3"))
    assert same(weights(again.model), weights(trainer.model))


def test_compiled_twins_give_the_same_run(tmp_path: Path) -> None:
    runs = {}
    for compiled in (False, True):
        torch.compiler.reset()
        model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        backend = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if compiled else {}
        args = arguments(tmp_path, max_steps=3, eval_strategy="steps", eval_steps=2, **backend)
        trainer = TwinTrainer(model, args, train_dataset=sentences())
        trainer.train()
        judged = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        runs[compiled] = trainer.twins.state_dict(), judged, trainer.predict(sentences(), 2).probs
        assert isinstance(trainer.model_wrapped, torch._dynamo.OptimizedModule) == compiled
        trainer.save_model(str(tmp_path / "final"))
    (plain, plain_loss, plain_probs), (found, loss, probs) = runs[False], runs[True]
    for name, t in plain.items():
        torch.testing.assert_close(found[name], t, atol=1e-5, rtol=1e-4)
    assert loss == pytest.approx(plain_loss, rel=1e-4)
    assert torch.allclose(probs, plain_probs, atol=1e-4)
    assert same(weights(type(model).from_pretrained(tmp_path / "final")), weights(trainer.model))


def test_predict_averages_over_the_draws_of_the_estimate(tmp_path: Path) -> None:
    data = sentences()
    trainer = TwinTrainer(bert(), arguments(tmp_path), train_dataset=data)
    with pytest.raises(RuntimeError, match="call train"):
        trainer.predict(data)
    trainer.train()
    found = trainer.predict(data, samples=4, seed=3)
    estimate = trainer.estimate()
    expected = estimate.predict({"input_ids": inputs(data)}, 4, batch_size=8, seed=3, vectorize=False)
    assert torch.equal(found.probs, expected.probs)
    assert torch.equal(found.std, expected.std)
    assert torch.equal(found.mutual_information, expected.mutual_information)
    mean = trainer.predict(data, samples=0)
    assert torch.allclose(mean.probs, estimate(inputs(data)).logits.softmax(1))
    assert trainer.predict(data, scale=0.0).std.max() < 1e-6
    with pytest.raises(ValueError, match="samples must be 0, for the mean alone, or at least 2"):
        trainer.predict(data, samples=1)


def test_a_model_with_one_output_is_regression(tmp_path: Path) -> None:
    data = [{**row, "labels": float(row["labels"])} for row in sentences()]
    trainer = TwinTrainer(bert(num_labels=1), arguments(tmp_path, num_train_epochs=6), train_dataset=data)
    trainer.train()
    found = trainer.predict(data, 8)
    truth = torch.tensor([row["labels"] for row in data])
    assert found.task == "regression"
    assert found.mean.shape == (60, 1)
    assert (found.mean[:, 0] - truth).square().mean() < 0.5 * truth.var()
    assert trainer.model.config.problem_type == "regression"
    assert trainer.estimate().task == "regression"
    low, high = found.interval(0.9)
    assert (low < high).all()


def test_token_classification_and_model_init(tmp_path: Path) -> None:
    data = [{**row, "labels": [token % 3 for token in row["input_ids"]]} for row in sentences()]
    made = []

    def model() -> Any:
        made.append(bert(BertForTokenClassification))
        return made[-1]

    trainer = TwinTrainer(None, arguments(tmp_path), train_dataset=data, model_init=model)
    trainer.train()
    first = trainer.predict(data[:5])
    assert first.probs.shape == (5, 3, 5)
    assert torch.allclose(first.probs.sum(1), torch.ones(5, 5))
    trainer.train()
    assert trainer.model is made[-1]
    assert torch.equal(trainer.predict(data[:5]).probs, first.probs)  # the same start gives the same result
    data[0] = {"input_ids": [1, 2], "labels": [1, 2]}

    class Padded:
        def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            length = max(len(row["input_ids"]) for row in rows)
            return {k: torch.tensor([row[k] + [0] * (length - len(row[k])) for row in rows]) for k in rows[0]}

    trainer.data_collator = Padded()
    assert trainer.predict(data[:5]).probs.shape == (5, 3, 5)
    with pytest.raises(ValueError, match="pad all inputs to one length"):
        trainer.predict([data[0]] * 8 + data[1:9])


def test_label_smoothing_shifts_labels_as_a_plain_trainer_does(tmp_path: Path) -> None:
    model, data = gpt2().eval(), spoken()
    args = arguments(tmp_path, label_smoothing_factor=0.1, max_steps=2)
    trainer = TwinTrainer(model, args, train_dataset=data)
    batch = default_data_collator(data[:4])
    expected = Trainer(model, args).compute_loss(model, dict(batch))
    pair = trainer._wrap_model(model).eval()
    assert torch.equal(trainer.compute_loss(pair, dict(batch)), expected)
    trainer.train()
    assert trainer.twins[0].get_input_embeddings().weight is trainer.twins[0].lm_head.weight  # tied as before


def test_tokens_are_counted_and_sampling_may_be_sequential(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"include_num_input_tokens_seen": "all", "train_sampling_strategy": "sequential"}
    trainer = TwinTrainer(bert(), arguments(tmp_path, max_steps=2, **settings), train_dataset=sentences())
    trainer.train()
    assert trainer.state.num_input_tokens_seen == 2 * 2 * 8 * 5  # steps, twins, rows, tokens
    assert trainer.state.total_flos > 0
    first, second = next(iter(trainer.get_train_dataloader()))
    drawn = Subset(sentences(), trainer.bootstrap.indices(0)[:8].tolist())
    assert torch.equal(first["input_ids"], inputs(list(drawn)))
    assert not torch.equal(first["input_ids"], second["input_ids"])


@pytest.mark.parametrize("kind", ["multinomial", "split"])
@pytest.mark.parametrize("length", [{"num_train_epochs": 3}, {"max_steps": 24}])
def test_samples_steps_and_tokens_of_a_run_are_those_of_all_twins(
    tmp_path: Path, kind: Any, length: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, read = sentences(64), list[int]()
    monkeypatch.setattr(TwinTrainer, "training_step", _counting(TwinTrainer.training_step, read))
    args = arguments(tmp_path, **length, include_num_input_tokens_seen="all")
    trainer = TwinTrainer(bert(), args, train_dataset=data, bootstrap=Bootstrap(64, kind=kind, seed=5))
    metrics = trainer.train().metrics
    seconds, exact = metrics["train_runtime"], "max_steps" not in length  # else the Trainer takes all batches for full
    assert metrics["train_samples_per_second"] * seconds == pytest.approx(sum(read), rel=0.001 if exact else 0.02)
    assert metrics["train_steps_per_second"] * seconds == pytest.approx(trainer.state.global_step, rel=0.001)
    assert trainer.state.num_input_tokens_seen == 5 * sum(read)
    assert trainer.num_examples(trainer.get_eval_dataloader()) == len(trainer.bootstrap.unseen)


def _counting(step: Any, read: list[int]) -> Any:
    def counted(self: Any, model: Any, inputs: Any, *args: Any) -> Any:
        read.append(sum(len(batch["labels"]) for batch in inputs))
        return step(self, model, inputs, *args)

    return counted


def test_the_progress_bar_says_how_many_twins_a_step_is_of_and_when_they_settle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(tmp_path, max_steps=6, disable_tqdm=False)
    model, three = bert(), Bootstrap(60, 3)
    TwinTrainer(model, args, train_dataset=sentences(), bootstrap=three, spread=0.5).train()
    bars = re.findall(r"(\d twins[\w ]*): +100%\S*[^\r\n]* (\d+/\d+) ", capsys.readouterr().err)
    assert ("3 twins", "6/6") in bars
    assert ("3 twins settle", "3/3") in bars


def shared_run(folder: str, size: int) -> Any:
    os.environ |= {"LOCAL_WORLD_SIZE": os.environ.get("WORLD_SIZE", "1"), "OMP_NUM_THREADS": "1"}  # as torchrun does
    data, found = spoken(), {}
    sgd = (torch.optim.SGD, {"lr": 0.1})
    for steps in (1, 4):
        model = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        args = arguments(Path(folder), per_device_train_batch_size=size, max_steps=steps, gradient_accumulation_steps=2)
        trainer = TwinTrainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=sgd)
        trainer.train()
        judged = trainer.evaluate()["eval_loss"]
        found[steps] = {"twins": weights(trainer.twins), "judged": judged, "probs": trainer.predict(data, 2).probs}
    return found


def test_two_processes_take_the_same_step_as_one(tmp_path: Path) -> None:
    first, second = together(shared_run, str(tmp_path), 4)
    alone = shared_run(str(tmp_path), 8)
    for name, t in alone[1]["twins"].items():  # the first step has no noise; later, each rank draws its own
        assert torch.allclose(first[1]["twins"][name].float(), t.float(), atol=1e-5), name
    for ours, theirs in zip(first.values(), second.values(), strict=True):
        assert same(ours["twins"], theirs["twins"])
        assert ours["judged"] == theirs["judged"]
        assert torch.equal(ours["probs"], theirs["probs"])


def settled_together(folder: str, replicas: int, accumulation: int) -> Any:
    os.environ |= {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"], "OMP_NUM_THREADS": "1"}  # as torchrun does
    data = sentences()
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": accumulation}
    args = arguments(Path(folder), num_train_epochs=4, learning_rate=0.003, **settings)
    around, make = list[TwinTrainer](), TwinTrainer._around
    TwinTrainer._around = lambda *given: around.append(make(*given)) or around[-1]  # in a process of its own
    bootstrap = Bootstrap(len(data), replicas, seed=args.seed)
    model = bert(hidden_dropout_prob=0.1)
    trainer = TwinTrainer(model, args, train_dataset=data, bootstrap=bootstrap, spread=0.5)
    trainer.train()
    estimate = trainer.estimate()
    return {
        "settled": weights(around[-1].twins),
        "steps": around[-1].state.global_step,
        "model": weights(trainer.model),
        "sigma": estimate.sigma,
        "scale": estimate.scale,
        "of training": trainer.twins.sigma,
        "std": trainer.predict(data, 4).std,
    }


@pytest.mark.parametrize(("replicas", "accumulation"), [(2, 1), (3, 2)])
def test_processes_that_share_twins_end_with_one_sigma_and_scale_of_settled_twins(
    tmp_path: Path, replicas: int, accumulation: int
) -> None:
    first, second = together(settled_together, str(tmp_path), replicas, accumulation)
    for name in ("settled", "model", "sigma"):
        assert same(first[name], second[name]), name
    assert first["scale"] == second["scale"]
    assert 0 < first["scale"] < math.inf
    assert first["scale"] != 1
    for group, sigma in first["sigma"].items():
        assert sigma.isfinite().all()
        assert (sigma > 0).all()
        assert not torch.equal(sigma, first["of training"][group])
    assert torch.equal(first["std"], second["std"])
    assert first["steps"] == 16 // accumulation  # half of four epochs, in which both read eight batches


REFUSED: list[tuple[str, Any, str]] = [
    *(("bootstrap", v, rf"^bootstrap must be a Bootstrap, .*, not {v!r}\.$") for v in (5, 0, "split", False)),
    ("bootstrap", Bootstrap(10), r"^the dataset has 60 samples, but the bootstrap draws from 10\.$"),
    ("groups", "unit", r"^TwinTrainer has no option 'groups': give protocol=Protocol\(groups='unit'\)"),
    ("protocol", Protocol(resample="counts"), r"^TwinTrainer has no setting 'resample': leave it out of the protocol"),
    ("model", "bert", r"^model must be a torch.nn.Module, not str\.$"),
    ("args", "folder", r"^args must be TrainingArguments, not str\.$"),
]
SIZE = r"^per_device_train_batch_size must be a whole number of at least 1, not "
SEED = r"^a seed of TrainingArguments must be between 0 and 2\*\*32 - 1, not "
REFUSED_ARGUMENTS: list[tuple[str, Any, str]] = [
    *(("per_device_train_batch_size", v, rf"{SIZE}{v!r}\.$") for v in (0, -1, 2.5, "4")),
    *((name, v, rf"{SEED}{v!r}\.$") for name in ("seed", "data_seed") for v in (-1, 2**32)),
    *(("seed", v, rf"^seed must be an integer, not {v!r}\.$") for v in (None, "a", 1.5)),
]


def test_mistakes_get_one_sentence(tmp_path: Path) -> None:
    data, args = sentences(), arguments(tmp_path)
    optimizer = torch.optim.SGD(bert().parameters(), 0.1)
    with pytest.raises(ValueError, match="use optimizer_cls_and_kwargs"):
        TwinTrainer(bert(), args, train_dataset=data, optimizers=(optimizer, None))
    with pytest.raises(TypeError, match="reset must be a schedule"):
        TwinTrainer(bert(), args, train_dataset=data, protocol=Protocol(reset=1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown reset mode"):
        TwinTrainer(bert(), args, train_dataset=data, protocol=Protocol(mode="none"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="noise must be a finite number of at least 0, not -1"):
        TwinTrainer(bert(), args, train_dataset=data, protocol=Protocol(noise=-1))
    with pytest.raises(ValueError, match="is pooled must be below 1, not 1"):
        TwinTrainer(bert(), args, train_dataset=data, protocol=Protocol(pooled=1))
    with pytest.raises(ValueError, match="group_by_length"):
        TwinTrainer(bert(), arguments(tmp_path, train_sampling_strategy="group_by_length"), train_dataset=data)
    with pytest.raises(TypeError, match="map-style"):
        TwinTrainer(bert(), args, train_dataset=iter(data))
    with pytest.raises(ValueError, match="needs a train_dataset"):
        TwinTrainer(bert(), args).train()
    with pytest.raises(ValueError, match="FSDP and DeepSpeed shard the weights"):
        TwinTrainer(bert(), arguments(tmp_path, fsdp=True), train_dataset=data)
    with pytest.raises(
        ValueError, match=r"^args\.parallelism_config divides the model among processes, but twins need"
    ):
        TwinTrainer(bert(), arguments(tmp_path, parallelism_config=ParallelismConfig()), train_dataset=data)
    for name, value, said in REFUSED:
        with pytest.raises((TypeError, ValueError), match=said):
            TwinTrainer(**{"model": bert(), "args": args, "train_dataset": data, name: value})
    for name, value, said in REFUSED_ARGUMENTS:
        with pytest.raises((TypeError, ValueError), match=said):
            TwinTrainer(bert(), arguments(tmp_path, **{name: value}), train_dataset=data, bootstrap=Bootstrap(60))
    args._n_gpu = 2
    with pytest.raises(ValueError, match="one process has 2 GPUs"):
        TwinTrainer(bert(), args, train_dataset=data)


@pytest.mark.parametrize("kind", ["fsdp", "deepspeed"])
def test_sharding_by_accelerate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Accelerate would need a GPU or DeepSpeed for this, so the Trainer is only told that it is enabled."""
    made = Trainer.create_accelerator_and_postprocess

    def believing(self: Any) -> None:
        made(self)
        setattr(self, f"is_{kind}_enabled", True)

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", believing)
    with pytest.raises(ValueError, match="FSDP and DeepSpeed shard the weights"):
        TwinTrainer(bert(), arguments(tmp_path), train_dataset=sentences())


def trainer_of_shards(folder: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]  # as torchrun does
    fully_shard(model := bert())
    with pytest.raises(ValueError, match=r"^the model is sharded, but TwinTrainer wraps twins in DDP: write the loop"):
        TwinTrainer(model, arguments(Path(folder)), train_dataset=sentences())


def test_a_model_that_is_sharded_already_is_refused(tmp_path: Path) -> None:
    together(trainer_of_shards, str(tmp_path))


def test_encoder_decoder_models_predict_with_decoder_input_ids(
    tmp_path: Path,
) -> None:
    torch.manual_seed(1)
    size = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=12, decoder_start_token_id=0, **size))
    data = [{**row, "labels": row["input_ids"][:2]} for row in sentences()]
    trainer = TwinTrainer(model, arguments(tmp_path), train_dataset=data)
    trainer.train()
    with pytest.raises(ValueError, match="this model needs decoder_input_ids"):
        trainer.predict(data[:4], 2)
    rows = [{"input_ids": row["input_ids"], "decoder_input_ids": [0, row["labels"][0]]} for row in data[:4]]
    assert trainer.predict(rows, 2).probs.shape == (4, 12, 2)


def test_a_model_without_logits_trains_but_predict_refuses_it(tmp_path: Path) -> None:
    data = [{"input_ids": row["input_ids"], "start_positions": 1, "end_positions": 2} for row in sentences()]
    trainer = TwinTrainer(
        bert(BertForQuestionAnswering, num_labels=2), arguments(tmp_path, max_steps=2), train_dataset=data
    )
    trainer.train()
    with pytest.raises(TypeError, match="predict needs a model that returns logits, which QuestionAnswering"):
        trainer.predict(data[:4], 2)


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path: Path) -> None:
    data = [{**row, "labels": math.nan} for row in sentences()]
    with pytest.raises(FloatingPointError, match="not finite after update 1"):
        TwinTrainer(bert(num_labels=1), arguments(tmp_path), train_dataset=data).train()


# Adapters, and saved models


def adapted(**options: Any) -> Any:
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], **options)
    torch.manual_seed(2)
    return peft.get_peft_model(bert(), lora)


def trained(model: Any, folder: Path, **options: Any) -> TwinTrainer:
    trainer = TwinTrainer(model, arguments(folder, **options), train_dataset=sentences())
    trainer.train()
    return trainer


def storages(module: nn.Module, requires_grad: bool) -> set[int]:
    return {p.data_ptr() for p in module.parameters() if p.requires_grad == requires_grad}


def test_twins_share_the_backbone_and_have_their_own_adapters(tmp_path: Path) -> None:
    model = adapted()
    backbone, adapters = storages(model, False), storages(model, True)
    before = {name: p.clone() for name, p in model.named_parameters()}
    trainer = trained(model, tmp_path, num_train_epochs=1)
    first, second = trainer.twins
    assert storages(first, False) == storages(second, False) == storages(trainer.model, False) == backbone
    assert storages(first, True).isdisjoint(storages(second, True) | adapters)
    stepped = {p.data_ptr() for group in trainer.optimizer.param_groups for p in group["params"]}
    assert stepped == storages(first, True) | storages(second, True)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != p.requires_grad, name  # and only the adapters have moved
    assert set(trainer.twins.sigma) == {
        name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad
    }


def test_a_checkpoint_of_adapters_has_no_backbone_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = trained(adapted(lora_dropout=0.1), tmp_path, save_strategy="steps", save_steps=5)
    folder = tmp_path / "checkpoint-5"
    saved = torch.load(folder / "twins.pt", weights_only=True)["twins"]
    weights = [name for name in saved if name.startswith("copies")]
    assert weights
    assert all(".lora_" in name or ".modules_to_save." in name for name in weights)
    assert not (folder / "model.safetensors").exists()
    other = TwinTrainer(adapted(lora_dropout=0.1), arguments(tmp_path / "b"), train_dataset=sentences())
    other.train(resume_from_checkpoint=str(folder))
    for (name, ours), theirs in zip(whole.twins.state_dict().items(), other.twins.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("lora", [False, True])
def test_a_saved_model_loads_with_from_pretrained_and_as_an_estimate(tmp_path: Path, lora: bool) -> None:
    trainer = trained(adapted() if lora else bert(), tmp_path)
    trainer.save_model(str(tmp_path / "final"))
    names = {path.name for path in (tmp_path / "final").iterdir()}
    assert ("adapter_model.safetensors" if lora else "model.safetensors") in names
    assert "sigma.safetensors" in names
    if lora:
        plain = peft.PeftModel.from_pretrained(bert(), tmp_path / "final")
        assert (tmp_path / "final" / "adapter_model.safetensors").stat().st_size < 10_000
    else:
        plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "final")
    x, mean = inputs(sentences()), trainer.twins.estimate()
    assert torch.equal(plain.eval()(x).logits, mean(x).logits)

    estimate = load(tmp_path / "final", plain)
    assert estimate.sigma == mean.sigma
    assert estimate.task == "classification"
    ours, theirs = (e.predict({"input_ids": x}, 4, task="classification", vectorize=False) for e in (estimate, mean))
    assert torch.equal(ours.probs, theirs.probs)
    in_batches = trainer.predict(sentences(), 4, seed=0).probs  # batches of 8 may round differently
    torch.testing.assert_close(ours.probs, in_batches)
    drawn = estimate.sample(seed=1)
    assert not torch.equal(drawn(x).logits, plain(x).logits)
    assert torch.equal(plain(x).logits, mean(x).logits)  # the draw has its own weights

    trainer.estimate().save(tmp_path / "estimate.safetensors")  # one file with all weights
    again = type(estimate).load(tmp_path / "estimate.safetensors", trainer.model)
    assert torch.equal(again(x).logits, mean(x).logits)


@pytest.mark.parametrize("lora", [False, True])
def test_the_settings_of_the_estimate_are_saved_and_loaded(tmp_path: Path, lora: bool) -> None:
    trainer = trained(adapted() if lora else bert(), tmp_path, num_train_epochs=1)
    assert trainer.estimate().df_per_weight == 1
    scores = Scores(torch.ones(3), None, {"samples": 32})
    chosen = {"temperature": 1.7, "scale": 0.5, "dropout": True, "task": "regression", "df_per_weight": 3}
    trainer.estimate().scores = scores
    for name, value in chosen.items():
        setattr(trainer.estimate(), name, value)
    trainer.save_model(str(tmp_path / "final"))
    if lora:
        plain = peft.PeftModel.from_pretrained(bert(), tmp_path / "final")
    else:
        plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "final")
    estimate = load(tmp_path / "final", plain)
    assert {name: getattr(estimate, name) for name in chosen} == chosen
    assert estimate.scores is not None
    assert torch.equal(estimate.scores.values, scores.values)
    assert estimate.scores.settings == scores.settings
    x = {"input_ids": inputs(sentences())}
    assert torch.equal(estimate.predict(x, 4).std, trainer.estimate().predict(x, 4).std)


class Hub:
    """What huggingface_hub would send, instead of sending it."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, bytes]]] = []

    def create_repo(self, name: str, **options: Any) -> Any:
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, *, folder_path: str, commit_message: str, **options: Any) -> Any:
        files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir() if path.is_file()}
        self.sent.append((commit_message, files))
        return SimpleNamespace(done=lambda: True, result=lambda: None)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub()
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: found)
    return found


def published(folder: Path, lora: bool, **options: Any) -> TwinTrainer:
    """A trained model with a tokenizer, whose backbone was loaded from a folder."""
    bert().save_pretrained(folder / "base")
    model = type(bert()).from_pretrained(folder / "base")
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))
    args = arguments(folder / "out", eval_strategy="epoch", **options)
    trainer = TwinTrainer(
        model, args, train_dataset=sentences(), processing_class=tokenizer([f"w{i}" for i in range(8)])
    )
    trainer.train()
    return trainer


def code_in(card: str) -> str:
    [found] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    return str(found)


@pytest.mark.parametrize("lora", [False, True])
def test_the_model_card_has_the_numbers_and_code_that_loads_the_model_with_its_error_bars(
    tmp_path: Path, lora: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = published(tmp_path, lora)
    held_out = sentences(40, seed=1)
    trainer.estimate().calibrate(held_out, samples=4, keep_scale=True, collate_fn=default_data_collator)
    trainer.estimate().conformalize(held_out, samples=4, collate_fn=default_data_collator)
    trainer.save_model()
    trainer.create_model_card(tags="mine")
    trainer.create_model_card(tags="mine")  # writes it anew
    path = tmp_path / "out" / "README.md"
    text, data = path.read_text(), ModelCard.load(path).data
    assert text.count("## Error bars") == 1
    assert data.tags.count("twinboot") == 1
    assert data.library_name == ("peft" if lora else "transformers")
    assert "### Training hyperparameters" in text  # of transformers
    assert ("- PEFT" in text) == lora
    rows = dict(re.findall(r"^\| ([\w ]+) \| (.*) \|$", text, re.M))
    estimate, judged = trainer.estimate(), trainer.state.log_history[-2]
    assert rows["evaluated on"] == "out-of-bag samples, which no twin saw, after step 16"
    assert float(rows["loss"]) == pytest.approx(judged["eval_loss"], rel=1e-3)
    assert float(rows["temperature"]) == pytest.approx(estimate.temperature, rel=1e-3)
    assert float(rows["factor on sigma"]) == pytest.approx(estimate.scale, rel=1e-3)
    assert rows["sets and intervals"] == "calibrated by 40 samples"
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    weights = sum(p.numel() for p in trained) - (0 if lora else 16)  # the embedding of the padding token stays 0
    assert rows["weights with error bars"] == f"{weights} in {len(estimate.sigma)} groups"
    expanded = zip(estimate.partition.expand(trained), trained, strict=True)
    mean_square = sum(sigma.square().expand(p.shape).sum() for sigma, p in expanded) / weights
    assert float(rows["sigma"]) == pytest.approx(mean_square.sqrt().item(), rel=2e-3)
    for name, extreme in (("smallest", min), ("largest", max)):
        group = extreme(estimate.sigma, key=lambda group: estimate.sigma[group].item())
        assert rows[name] == f"{estimate.sigma[group].item():.4g} in `{group}`"

    monkeypatch.chdir(tmp_path / "out")
    names: dict[str, Any] = {}
    exec(code_in(text), names)
    expected = estimate.predict(["a text"], 4, tokenizer=trainer.processing_class)
    torch.testing.assert_close(names["prediction"].probs, expected.probs)
    assert torch.equal(names["prediction"].set(0.8), expected.set(0.8))
    assert "tensor" in capsys.readouterr().out


def test_a_card_of_a_model_that_was_not_trained_is_that_of_transformers(tmp_path: Path) -> None:
    trainer = TwinTrainer(bert(), arguments(tmp_path), train_dataset=sentences())
    trainer.create_model_card()
    assert "Error bars" not in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("lora", [False, True])
def test_what_is_pushed_has_the_model_with_its_sigma_and_a_card(tmp_path: Path, lora: bool, hub: Hub) -> None:
    settings: dict[str, Any] = {"save_strategy": "epoch", "push_to_hub": True, "hub_model_id": "name"}
    trainer = published(tmp_path, lora, **settings)
    kind = "adapter_model.safetensors" if lora else "model.safetensors"
    assert [message for message, _ in hub.sent] == ["Training in progress, epoch 1", "Training in progress, epoch 2"]
    for step, (_, files) in zip((8, 16), hub.sent, strict=True):
        saved = tmp_path / "out" / f"checkpoint-{step}"  # both files are of that epoch
        assert files[kind] == (saved / kind).read_bytes()
        (tmp_path / "pushed.safetensors").write_bytes(files["sigma.safetensors"])
        assert same(load_file(tmp_path / "pushed.safetensors"), load_file(saved / "sigma.safetensors"))
    trainer.push_to_hub()
    message, files = hub.sent[-1]
    assert message == "End of training"
    assert {kind, "sigma.safetensors", "tokenizer.json", "README.md"} <= files.keys()
    assert 'folder = snapshot_download("me/name")' in code_in(files["README.md"].decode())


def test_the_best_adapter_is_loaded_with_its_sigma(tmp_path: Path) -> None:
    best: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    trainer = trained(adapted(), tmp_path, **best)
    kept = trainer.state.best_model_checkpoint
    plain = peft.PeftModel.from_pretrained(bert(), kept).eval()
    x = inputs(sentences())
    assert torch.equal(trainer.model.eval()(x).logits, plain(x).logits)
    assert trainer.estimate().sigma == load(kept, plain).sigma
    trainer.estimate().sample()
    assert torch.equal(trainer.model(x).logits, plain(x).logits)


def test_load_refuses_other_models_and_folders_in_one_sentence(tmp_path: Path) -> None:
    trained(bert(), tmp_path, num_train_epochs=1).save_model(str(tmp_path / "final"))
    with pytest.raises(
        ValueError, match=r"belongs to another model: .*word_embeddings.* has shape \(12, 16\) there, \(13, 16\)"
    ):
        load(tmp_path / "final", bert(vocab_size=13))
    with pytest.raises(ValueError, match="missing here"):
        load(tmp_path / "final", adapted())
    with pytest.raises(FileNotFoundError, match="there is no estimate at"):
        load(tmp_path, bert())
    with pytest.raises(
        FileNotFoundError, match=r"^there is no folder .*nowhere': give the one that save_model wrote to"
    ):
        load(tmp_path / "nowhere", bert())
    with pytest.raises(TypeError, match=r"^folder must be the path that save_model wrote to, not 5\.$"):
        load(5, bert())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^model must be a torch.nn.Module, as from_pretrained returns, not str\.$"):
        load(tmp_path / "final", "bert")  # type: ignore[arg-type]
    path = tmp_path / "final" / "sigma.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"sigma\.safetensors' is damaged"):
        load(tmp_path / "final", bert())


def test_multi_label_models_train_but_predict_refuses_them(tmp_path: Path) -> None:
    data = [{**row, "labels": [float(row["labels"] == c) for c in range(3)]} for row in sentences()]
    trainer = TwinTrainer(bert(), arguments(tmp_path, max_steps=2), train_dataset=data)
    trainer.train()
    assert trainer.model.config.problem_type == "multi_label_classification"
    with pytest.raises(ValueError, match="multi-label classification"):
        trainer.predict(data)
    assert trainer.estimate().task is None


def imported_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "twinboot.integrations.huggingface")
    importlib.import_module("twinboot.integrations.huggingface")


@pytest.mark.parametrize("package", ["transformers", "accelerate"])
def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r'pip install "twinboot\[huggingface\]"$'):
        imported_anew(monkeypatch)


def test_an_import_error_of_twinboot_itself_does_not_blame_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "twinboot.integrations.resuming", None)
    with pytest.raises(ImportError, match=r"import of twinboot\.integrations\.resuming halted"):
        imported_anew(monkeypatch)


@pytest.mark.parametrize("name", ["_clip_grad_norm", "_load_best_model", "_save"])
def test_a_trainer_without_a_method_that_we_replace_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(Trainer, name)
    with pytest.raises(ImportError, match=rf"^the Trainer of transformers {__version__} has no method {name}, which"):
        imported_anew(monkeypatch)


def test_every_method_that_replaces_one_of_the_trainer_is_checked_at_import() -> None:
    own = {name for name in vars(TwinTrainer) if hasattr(Trainer, name) and not name.startswith("__")}
    assert own == {*REPLACED, "predict"}  # only people call predict


def test_the_package_itself_does_not_load_transformers() -> None:
    code = "import sys, twinboot; print([m for m in ('transformers', 'accelerate', 'peft') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
