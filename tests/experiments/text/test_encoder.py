from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

pytest.importorskip("peft", reason="needs the extra huggingface")

from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel

from twinboot.experiments.text.data import generated
from twinboot.experiments.text.encoder import TOKENS, Encoder, collate

QUERIES = generated(0)
TEXTS = [text for text, _ in QUERIES.test[:7]] + ["filler0", "filler1 filler2"]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder.tiny(QUERIES, seed=0)


@pytest.mark.parametrize("layers", [1, 2])
def test_the_first_layers_and_the_last_ones_together_are_the_whole_encoder(encoder: Encoder, layers: int) -> None:
    found = encoder.features(TEXTS, layers)
    model = encoder.classifier(layers, classes=3).eval()
    with torch.no_grad():
        whole = encoder.model(*encoder.tokenize(TEXTS)).last_hidden_state
        expected = torch.stack([h[m == 1].mean(0) for h, m in zip(whole, found.mask, strict=True)])
        assert torch.allclose(model.pooled(found.hidden, found.mask), expected, atol=1e-5)
        logits = model(found.hidden, found.mask).logits
        assert torch.allclose(logits, model.classifier(expected), atol=1e-5)


def test_a_batch_is_as_long_as_its_longest_query_and_padding_changes_nothing(encoder: Encoder) -> None:
    found, labels = encoder.features(TEXTS, 1), torch.arange(len(TEXTS))
    model = encoder.classifier(1, classes=3).eval()
    full = model(found.hidden, found.mask).logits
    short = collate(found.rows(labels)[-2:])
    assert short["hidden"].shape[1] == short["mask"].shape[1] == 2 < TOKENS
    assert torch.equal(short["labels"], labels[-2:])
    assert torch.allclose(model(short["hidden"], short["mask"]).logits, full[-2:], atol=1e-6)
    dataset = found.dataset(labels)
    hidden, mask, own = collate([dataset[k] for k in (7, 8)])
    assert torch.equal(hidden, short["hidden"])
    assert torch.equal(own, default_collate([7, 8]))
    assert mask.sum(1).tolist() == [1, 2]


def test_the_loss_is_the_cross_entropy_of_the_logits(encoder: Encoder) -> None:
    found, labels = encoder.features(TEXTS, 1), torch.arange(len(TEXTS)) % 3
    output = encoder.classifier(1, classes=3).eval()(found.hidden, found.mask, labels)
    assert torch.equal(output.loss, torch.nn.functional.cross_entropy(output.logits, labels))


def test_more_layers_than_there_are_get_one_sentence(encoder: Encoder) -> None:
    with pytest.raises(ValueError, match=r"the encoder has 2 layers: layers can't be 3\."):
        encoder.features(TEXTS, 3)


def test_a_folder_must_hold_a_model_of_the_bert_family_with_its_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no Hugging Face model: it has no config"):
        Encoder.load(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="holds no Hugging Face model"):
        Encoder.load(str(tmp_path))


def saved_with_a_tokenizer(model: object, folder: Path) -> str:
    model.save_pretrained(folder)  # type: ignore[attr-defined]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "how", "much", "far"]))
    return str(folder)


def test_a_model_is_read_from_its_folder_and_long_queries_are_cut(tmp_path: Path) -> None:
    size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    folder = saved_with_a_tokenizer(BertModel(BertConfig(vocab_size=8, **size)), tmp_path)
    found = Encoder.load(folder).features(["how much", "how far " * 50], 1)
    assert found.hidden.shape == (2, TOKENS, 8)
    assert found.mask.sum(1).tolist() == [4, TOKENS]  # [CLS] and [SEP] count


def test_other_families_are_refused(tmp_path: Path) -> None:
    model = DistilBertModel(DistilBertConfig(vocab_size=8, dim=8, n_layers=1, n_heads=2, hidden_dim=8))
    with pytest.raises(ValueError, match="holds a DistilBertModel: an encoder of the BERT family is needed"):
        Encoder.load(saved_with_a_tokenizer(model, tmp_path))
