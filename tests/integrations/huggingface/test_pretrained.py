"""Adapters share a backbone, and what is saved is for anybody's `from_pretrained` and for ours."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sentences import arguments, bert, inputs, sentences
from torch import nn
from transformers import AutoModelForSequenceClassification

from twinboot.integrations.huggingface import TwinTrainer, load

peft = pytest.importorskip("peft")


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


def test_the_backbone_is_held_once_and_the_adapters_twice(tmp_path: Path) -> None:
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


def test_a_checkpoint_of_adapters_has_no_backbone_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
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
def test_what_is_saved_is_the_mean_for_anybody_and_an_estimate_for_us(tmp_path: Path, lora: bool) -> None:
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
    in_batches = trainer.predict(sentences(), 4, seed=0).probs  # of 8, which some processors round otherwise than all
    torch.testing.assert_close(ours.probs, in_batches)
    drawn = estimate.sample(seed=1)
    assert not torch.equal(drawn(x).logits, plain(x).logits)
    assert torch.equal(plain(x).logits, mean(x).logits)  # the draw has weights of its own

    trainer.estimate().save(tmp_path / "estimate.safetensors")  # ours alone, with all weights
    again = type(estimate).load(tmp_path / "estimate.safetensors", trainer.model)
    assert torch.equal(again(x).logits, mean(x).logits)


@pytest.mark.parametrize("lora", [False, True])
def test_what_was_calibrated_in_the_estimate_is_saved_and_loaded(tmp_path: Path, lora: bool) -> None:
    trainer = trained(adapted() if lora else bert(), tmp_path, num_train_epochs=1)
    chosen = {"temperature": 1.7, "scale": 0.5, "dropout": True, "task": "regression"}
    for name, value in chosen.items():
        setattr(trainer.estimate(), name, value)
    trainer.save_model(str(tmp_path / "final"))
    if lora:
        plain = peft.PeftModel.from_pretrained(bert(), tmp_path / "final")
    else:
        plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "final")
    estimate = load(tmp_path / "final", plain)
    assert {name: getattr(estimate, name) for name in chosen} == chosen
    x = {"input_ids": inputs(sentences())}
    assert torch.equal(estimate.predict(x, 4).std, trainer.estimate().predict(x, 4).std)


def test_the_best_adapter_comes_back_and_is_still_trained_apart(tmp_path: Path) -> None:
    best: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    trainer = trained(adapted(), tmp_path, **best)
    kept = trainer.state.best_model_checkpoint
    plain = peft.PeftModel.from_pretrained(bert(), kept).eval()
    x = inputs(sentences())
    assert torch.equal(trainer.model.eval()(x).logits, plain(x).logits)
    assert trainer.estimate().sigma == load(kept, plain).sigma
    trainer.estimate().sample()
    assert torch.equal(trainer.model(x).logits, plain(x).logits)


def test_sigma_of_another_model_and_a_folder_without_it_get_one_sentence(tmp_path: Path) -> None:
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


def test_several_labels_at_once_can_be_trained_but_not_predicted(tmp_path: Path) -> None:
    data = [{**row, "labels": [float(row["labels"] == c) for c in range(3)]} for row in sentences()]
    trainer = TwinTrainer(bert(), arguments(tmp_path, max_steps=2), train_dataset=data)
    trainer.train()
    assert trainer.model.config.problem_type == "multi_label_classification"
    with pytest.raises(ValueError, match="multi-label classification"):
        trainer.predict(data)
    assert trainer.estimate().task is None
