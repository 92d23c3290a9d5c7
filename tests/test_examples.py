"""The examples run as they are, and those that say nothing of an extra need none."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import script

EXAMPLES = Path(__file__).parents[1] / "examples"
# Python runs this at its start, in processes that an example begins, too. What is None there cannot be imported.
CORE_ALONE = """
import sys

extras = "pandas matplotlib tyro rich jinja2 markupsafe torchmetrics sklearn scipy lightning transformers peft deepwave"
sys.modules.update(dict.fromkeys(extras.split()))
"""


@pytest.fixture
def core(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine that has the core of the package alone, without its extras."""
    (tmp_path / "sitecustomize.py").write_text(CORE_ALONE)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


def test_data_sets_and_networks_need_the_core_alone(core: dict[str, str]) -> None:
    code = "import twinboot.experiments.datasets, twinboot.experiments.networks"
    assert subprocess.run([sys.executable, "-c", code], env=core).returncode == 0
    done = subprocess.run([sys.executable, "-m", "twinboot"], env=core, capture_output=True, text=True)
    assert done.stderr.startswith("twinboot: the command line needs more packages (")


def alone(example: str, core: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / example)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=core)


def test_deblurring_halves_the_error_and_knows_where_it_is(tmp_path: Path) -> None:
    said, _ = script(EXAMPLES / "deblur.py", str(tmp_path / "deblur.png"))
    blurred, deblurred, correlation = (float(number) for number in re.findall(r"\d\.\d+", said)[:3])
    assert deblurred < blurred / 2
    assert correlation > 0.3
    assert (tmp_path / "deblur.png").stat().st_size > 10_000


def test_digits_are_learned_in_one_call_and_the_entropy_finds_the_errors(core: dict[str, str]) -> None:
    said = alone("digits.py", core)
    accuracy, pairs = re.search(r"accuracy (0\.\d+)", said.stdout), re.search(r"in (\d+)% of all pairs", said.stdout)
    assert accuracy is not None
    assert pairs is not None
    assert float(accuracy[1]) > 0.88
    assert int(pairs[1]) > 85
    assert said.stderr.startswith("epoch 1 of 15: ")
    assert "Warning" not in said.stderr


def test_the_plain_loop_learns_and_tells_of_mean_and_draws(core: dict[str, str]) -> None:
    said = alone("loop.py", core)
    found = re.findall(r"accuracy (0\.\d+), NLL (0\.\d+)", said.stdout)
    epochs = [float(loss) for loss in re.findall(r"^epoch \d: loss (\d\.\d+), sigma up to 0\.\d+$", said.stdout, re.M)]
    assert len(epochs) == 5
    assert epochs[-1] < epochs[0] / 2
    assert len(found) == 2
    assert all(float(accuracy) > 0.88 and float(nll) < 0.4 for accuracy, nll in found)
    assert said.stderr == ""


def test_a_frozen_backbone_is_shared_by_the_twins_and_the_head_learns_from_few_labels(core: dict[str, str]) -> None:
    said = alone("head.py", core)
    accuracy = re.search(r"accuracy (0\.\d+)", said.stdout)
    counts = re.search(r"hold (\d+) parameters, two copies would hold (\d+); backbone shared: True", said.stdout)
    assert accuracy is not None
    assert counts is not None
    assert float(accuracy[1]) > 0.5  # of five classes, learned from 20 images each
    head = 256 * 5 + 5
    held, twice = int(counts[1]), int(counts[2])
    assert held - head == twice / 2  # the backbone once, the head twice
    assert said.stderr == ""


def test_twins_in_two_processes_learn_and_send_little(core: dict[str, str]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    core["OMP_NUM_THREADS"] = "1"  # which torchrun would set, and say so
    command = [*torchrun, str(EXAMPLES / "mesh.py")]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=core, timeout=120)
    accuracy = re.search(r"2 processes, accuracy (0\.\d+)", said.stdout)
    sent = re.search(r"sent for sigma: (\d+) bytes a step, of (\d+) bytes of weights", said.stdout)
    assert accuracy is not None
    assert sent is not None
    assert float(accuracy[1]) > 0.88
    assert int(sent[1]) < int(sent[2]) / 20
    assert "Warning" not in said.stderr


def test_a_scikit_learn_pipeline_has_intervals_that_hold_what_they_say() -> None:
    pytest.importorskip("sklearn", reason="the example needs the extra sklearn")
    said, errors = script(EXAMPLES / "sklearn_pipeline.py")
    score = re.search(r"R\^2 (0\.\d+)", said)
    found = re.findall(r"(\d+)% intervals hold (\d+)% of the test values; mean width (\d+)", said)
    assert score is not None
    assert float(score[1]) > 0.3
    assert [int(level) for level, _, _ in found] == [50, 80, 90]
    # About 20 rows calibrate, so a split's share has a standard deviation of 11 % at 50 %; the five share their rows.
    assert all(abs(int(held) - int(level)) < 25 for level, held, _ in found)
    assert [int(width) for *_, width in found] == sorted(int(width) for *_, width in found)
    assert errors == ""


def test_an_adapter_for_hugging_face_learns_on_a_backbone_that_is_held_once_and_is_found_again() -> None:
    pytest.importorskip("peft", reason="the example needs the extra huggingface")
    said, _ = script(EXAMPLES / "huggingface_lora.py")
    found = re.findall(r"accuracy ([01]\.\d+), NLL (\d\.\d+)", said)
    counts = re.search(r"hold (\d+) parameters, a plain adapter with its backbone (\d+), two copies (\d+)", said)
    again = re.search(r"probabilities differ by (\d\S*) at most", said)
    assert len(found) == 2
    assert all(float(accuracy) > 0.8 for accuracy, _ in found)
    assert counts is not None
    held, one, two = map(int, counts.groups())
    assert one < held < 0.7 * two
    assert again is not None
    assert float(again[1]) < 1e-5


def test_lightning_trains_twins_of_a_module_and_stops_by_what_no_twin_saw() -> None:
    pytest.importorskip("lightning", reason="the example needs the extra lightning")
    said, _ = script(EXAMPLES / "lightning_digits.py")
    found = re.search(r"unseen loss (0\.\d+), sigma (0\.\d+)\naccuracy (0\.\d+), NLL (0\.\d+)", said)
    assert found is not None
    unseen, sigma, accuracy, nll = map(float, found.groups())
    assert unseen < 0.4
    assert sigma > 0
    assert accuracy > 0.88
    assert nll < 0.4


def test_a_trained_model_gets_error_bars_that_find_its_errors_and_stays_as_it_is(core: dict[str, str]) -> None:
    said = alone("error_bars.py", core)
    found = re.findall(r"(model|6 members): accuracy (0\.\d+), NLL (0\.\d+)", said.stdout)
    pairs = re.search(r"in (\d+)% of all pairs", said.stdout)
    assert said.stdout.startswith("the model itself is unchanged: True")
    assert len(found) == 2
    assert all(float(accuracy) > 0.9 and float(nll) < 0.3 for _, accuracy, nll in found)
    assert pairs is not None
    assert int(pairs[1]) > 80
    assert said.stderr.startswith("round 1 of 3, epoch 1 of 5: loss ")
    assert said.stderr.splitlines()[-1].startswith("round 3 of 3, epoch 5 of 5: loss ")


def test_a_model_that_lightning_has_trained_gets_error_bars() -> None:
    pytest.importorskip("lightning", reason="the example needs the extra lightning")
    said, _ = script(EXAMPLES / "error_bars_lightning.py")
    found = re.search(r"6 members: accuracy (0\.\d+), NLL (0\.\d+)\nlargest error bars: images \[", said)
    assert found is not None
    accuracy, nll = map(float, found.groups())
    assert accuracy > 0.88
    assert nll < 0.4


def test_an_adapter_that_is_trained_gets_error_bars_from_small_members() -> None:
    pytest.importorskip("peft", reason="the example needs the extra huggingface")
    said, _ = script(EXAMPLES / "error_bars_huggingface.py")
    found = re.findall(r"(model|members): accuracy ([01]\.\d+), NLL (\d\.\d+)", said)
    spread, sizes = re.search(r"probability: (0\.\d+)", said), re.search(r"6 members of (\d+) .* of (\d+)\n", said)
    assert len(found) == 2
    assert all(float(accuracy) > 0.9 for _, accuracy, _ in found)
    assert spread is not None
    assert 0 < float(spread[1]) < 0.2
    assert sizes is not None
    assert int(sizes[1]) < 0.15 * int(sizes[2])


WORDS = {"card": ["plastic", "chip", "pin"], "cash": ["coins", "notes"], "loan": ["debt", "interest", "house"]}
EITHER = {"bank": ["card", "loan"], "money": ["cash", "loan"]}  # texts with these words may have either label


def tiny_encoder(folder: Path) -> None:
    """A small BERT with random weights, and its tokenizer."""
    from sentences import tokenizer
    from transformers import BertConfig, BertModel, set_seed

    known = tokenizer(["my", "and", *(word for words in WORDS.values() for word in words), *EITHER])
    known.save_pretrained(folder)
    set_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(known), max_position_embeddings=8, initializer_range=0.3, **size)
    BertModel(config).save_pretrained(folder)  # larger than usual: these weights stay random, and must tell words apart


def test_a_csv_becomes_a_classifier_that_abstains_where_two_labels_are_as_likely(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the example needs the extra huggingface")
    tiny_encoder(tmp_path / "encoder")
    lines, choose = ["text,label"], random.Random(0)
    for i in range(500):
        if i % 2:
            label = choose.choice(list(WORDS))
            word = choose.choice(WORDS[label])
        else:
            word = choose.choice(list(EITHER))
            label = choose.choice(EITHER[word])
        lines.append(f'"my {word}, and my {word}",{label}')
    (tmp_path / "texts.csv").write_text("\n".join(lines) + "\n")
    options = ["--model", str(tmp_path / "encoder"), "--out", str(tmp_path / "found")]
    said, _ = script(EXAMPLES / "abstain.py", str(tmp_path / "texts.csv"), *options)
    sets = re.search(r"(\d+\.\d)% of 100 sets hold the right label; accuracy (0\.\d+)", said)
    answers = re.search(r"answered (\d+\.\d)%, accuracy (\d\.\d+) there", said)
    assert sets is not None
    assert answers is not None
    held, accuracy, answered, accuracy_there = map(float, (*sets.groups(), *answers.groups()))
    # About 27 samples calibrate, and 100 are tested: a standard deviation of sqrt(0.09 / 29 + 0.09 / 100) = 6.3 %.
    assert held > 90 - 4 * 6.3
    assert 5 < answered < 95
    assert accuracy_there > accuracy + 0.1
    assert len(re.findall(r"^'my \w+, and my \w+': (\w+|not sure, \w+ or [\w ]+)$", said, re.M)) == 5
    assert {"adapter_model.safetensors", "sigma.safetensors", "tokenizer.json"} <= set(os.listdir(tmp_path / "found"))
    assert len((EXAMPLES / "abstain.py").read_text().splitlines()) < 60


def test_an_ode_has_parameters_with_intervals(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the example needs the extra plots")
    said, _ = script(EXAMPLES / "lotka_volterra.py", str(tmp_path / "curves.png"))
    found = re.findall(r"^([abcd]) = (0\.\d+), (0\.\d+) to (\d\.\d+) per year", said, re.M)
    assert [name for name, *_ in found] == list("abcd")
    assert all(float(low) < float(value) < float(high) for _, value, low, high in found)
    assert "21 samples in 7 clusters or blocks, 200 draws" in said
    assert (tmp_path / "curves.png").stat().st_size > 10_000
