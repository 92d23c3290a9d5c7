"""Twins on images: each row is what its name says, and a recipe is what they are trained by."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contest import PROBLEM, network, patterns, trained
from torch.utils.data import TensorDataset

from twinboot import Bootstrap, Estimate, fit, resets
from twinboot.experiments.images.single import adam
from twinboot.experiments.images.twins import TWINS, Recipe, recipe_of, train
from twinboot.training.checkpoints import DamagedError


def test_twins_are_calibrated_by_what_no_twin_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[list[int]] = []
    calibrate = Estimate.calibrate

    def spy(self: Estimate, dataset: Any, **options: Any) -> float:
        used.append(list(dataset.indices))
        return calibrate(self, dataset, **options)

    monkeypatch.setattr(Estimate, "calibrate", spy)
    trained("twins", tmp_path / "a", replace(PROBLEM, epochs=1))
    assert used == [Bootstrap(150, seed=0).unseen.tolist()]


def test_the_last_epoch_alone_is_neither_averaged_nor_chosen(tmp_path: Path) -> None:
    trained("twins", tmp_path / "a")
    data = TensorDataset(PROBLEM.x, PROBLEM.y)
    plain: list[Estimate] = []
    fit(
        network(),
        data,
        epochs=PROBLEM.epochs,
        batch_size=PROBLEM.batch,
        optimizer=lambda p: adam(p, PROBLEM.lr),
        progress=False,
        callback=lambda epoch, estimate, twins: plain.append(twins.estimate()),
    )
    kept = Estimate.load(tmp_path / "a" / "last.safetensors", network())
    for here, there in zip(kept.module.parameters(), plain[-1].module.parameters(), strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("longer", [1.125, 0.875])
def test_twins_are_shown_after_as_many_epochs_as_the_others_and_after_more_or_fewer(
    longer: float, tmp_path: Path
) -> None:
    name, x = "divided", patterns(20, 2)[0]
    recipe = Recipe(kind="split", cover=True, longer=longer)
    found = train(replace(PROBLEM, epochs=8), tmp_path, lambda: None, row=name, recipe=recipe)
    row = f"divided, {longer} times as long"
    assert found.epochs == {row: longer}
    after: list[Estimate] = []
    fit(
        network(),
        TensorDataset(PROBLEM.x, PROBLEM.y),
        epochs=9,
        batch_size=PROBLEM.batch,
        optimizer=lambda p: adam(p, PROBLEM.lr),
        bootstrap=Bootstrap(150, kind="split", cover=True),
        spread=0,
        progress=False,
        callback=lambda epoch, estimate, twins: after.append(estimate),
    )
    for epochs, shown in ((8, name), (round(8 * longer), row)):
        estimate = after[epochs - 1]
        estimate.update_batchnorm(PROBLEM.x.split(PROBLEM.batch))
        expected = estimate.predict(x, PROBLEM.samples, seed=PROBLEM.seed).probs
        torch.testing.assert_close(found.rows[shown](x), expected, atol=0.02, rtol=0.1)  # statistics of other batches
    assert not torch.allclose(found.rows[row](x), found.rows[name](x), atol=1e-3)


def test_early_resets_grow_from_ten_steps_to_a_plain_epoch() -> None:
    early, usual = Recipe(early=True), Recipe(reset=3)
    assert early.protocol(replace(PROBLEM, batch=8)).reset == resets.steps(resets.growing(10, 1.1, most=19))
    assert early.protocol(replace(PROBLEM, batch=75)).reset == resets.steps(resets.growing(10, 1.1, most=10))
    assert usual.protocol(PROBLEM).reset == resets.every(3)
    assert Recipe().protocol(PROBLEM).reset is None


def test_a_recipe_reaches_the_twins(tmp_path: Path) -> None:
    problem = replace(PROBLEM, batch=8)  # more than ten steps an epoch, which early resets are apart at first
    changes = ["mode=mean", "decay=true", "noise=2", "reset=4", "early=true", "groups=unit", "kind=poisson"]
    methods = [*TWINS, *(f"twins:{change}" for change in changes)]
    last = [trained(name, tmp_path / str(i), problem).sigma["sigma"].iloc[-1] for i, name in enumerate(methods)]
    assert len(set(last)) == len(methods)  # no two of them trained the same way


def test_draws_have_as_much_of_sigma_as_the_recipe_says(tmp_path: Path) -> None:
    problem = replace(PROBLEM, epochs=2)
    found = trained("twins-pooled", tmp_path / "a", problem)
    x, _ = patterns(20, 2)
    last = Estimate.load(tmp_path / "a" / "last.safetensors", network())
    assert last.scale == TWINS["twins-pooled"][1].scale == 2.4
    expected = last.predict(x, PROBLEM.samples, "classification", seed=PROBLEM.seed).probs
    assert torch.equal(found.rows["Twin-Boot with pooled gradients, last epoch alone"](x), expected)
    ends = [Estimate.load(tmp_path / "a" / "earlier.safetensors", network()).scale, last.scale]
    assert ends == [2.4, 2.4]
    last.scale = 1.0
    assert not torch.equal(last.predict(x, PROBLEM.samples, "classification", seed=PROBLEM.seed).probs, expected)


def test_twins_with_dropout_draw_its_masks_too_and_their_mean_does_not(tmp_path: Path) -> None:
    found = trained("twins:dropout=0.1", tmp_path / "a", replace(PROBLEM, epochs=2))
    x, _ = patterns(20, 2)
    last = Estimate.load(tmp_path / "a" / "last.safetensors", network(dropout=0.1))
    assert last.dropout
    drawn = found.rows["Twin-Boot, dropout=0.1, last epoch alone"](x)
    assert torch.equal(drawn, last.predict(x, PROBLEM.samples, "classification", seed=PROBLEM.seed).probs)
    last.dropout = False
    assert not torch.equal(drawn, last.predict(x, PROBLEM.samples, "classification", seed=PROBLEM.seed).probs)
    of_mean = found.rows["Twin-Boot, dropout=0.1, mean"]
    assert torch.equal(of_mean(x), of_mean(x))


def test_what_is_kept_of_a_training_has_the_scale_of_the_recipe_too(tmp_path: Path) -> None:
    """With none of sigma all draws are the mean."""
    found = train(replace(PROBLEM, epochs=2), tmp_path, lambda: None, row="still", recipe=Recipe(scale=0.0))
    x, _ = patterns(20, 2)
    torch.testing.assert_close(found.rows["still"](x), found.rows["still, mean"](x))


def test_a_matched_spread_has_a_row_beside_the_one_with_the_sigma_of_the_training(tmp_path: Path) -> None:
    """All else is that of the same training without it."""
    plain = trained("twins", tmp_path / "plain", PROBLEM)
    for _ in range(2):  # a finished training, the second time
        found = trained("twins:spread=0.5", tmp_path / "settled", PROBLEM)
        x, row = patterns(20, 2)[0], "Twin-Boot, spread=0.5"
        assert torch.equal(found.rows[f"{row}, sigma of the training"](x), plain.rows["Twin-Boot"](x))
        assert torch.equal(found.rows[f"{row}, mean"](x), plain.rows["Twin-Boot, mean"](x))
        assert not torch.equal(found.rows[row](x), plain.rows["Twin-Boot"](x))
        assert found.epochs[row] > 1.05  # the twins settle for half of the epochs at least


@pytest.mark.parametrize("file", ["epochs.json", "last.safetensors"])
def test_what_was_kept_before_a_stop_and_is_damaged_is_told_in_one_sentence(file: str, tmp_path: Path) -> None:
    problem = replace(PROBLEM, epochs=2)
    trained("twins", tmp_path / "a", problem)
    content = (tmp_path / "a" / file).read_bytes()
    for damaged in (content[:-20], content.replace(b"1", b"2"), b""):
        (tmp_path / "a" / file).write_bytes(damaged)
        with pytest.raises(DamagedError, match=rf"{file} is damaged: delete .*a, and this part begins anew\.$"):
            trained("twins", tmp_path / "a", problem)


def test_settings_change_a_recipe_and_its_row() -> None:
    row, recipe = recipe_of("twins:noise=2,kind=split,early=true,reset=3,mode=mean")
    assert row == "Twin-Boot, noise=2, kind=split, early=true, reset=3, mode=mean"
    assert recipe == Recipe(noise=2.0, kind="split", early=True, reset=3, mode="mean")
    row, recipe = recipe_of("twins-pooled:cover=false")
    assert row == "Twin-Boot with pooled gradients, cover=false"
    assert recipe == replace(TWINS["twins-pooled"][1], cover=False)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("nois=2", "twins have no setting 'nois': use one of mode, resample, .*, longer, such as noise=2"),
        ("", "'' has no value: write NAME=VALUE for each setting, such as noise=2"),
        ("noise,2", "'noise' has no value: write NAME=VALUE for each setting, such as noise=2"),
        ("noise=", "noise must be a number, not ''"),
        ("noise=two", "noise must be a number, not 'two'"),
        ("noise=nan", "noise must be from 0 to 100, not nan"),
        ("reset=1.5", "reset must be a whole number, not '1.5'"),
        ("pooled=1", "pooled must be from 0 to 0.99, not 1.0"),
        ("kind=bayesian", "kind must be multinomial or poisson or split, not 'bayesian'"),
        ("cover=yes", "cover must be true or false, not 'yes'"),
        ("noise=1,noise=2", "noise=1,noise=2 has a setting twice"),
    ],
)
def test_settings_that_make_no_sense_get_one_sentence(settings: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        recipe_of(f"twins:{settings}")
    assert "\n" not in str(error.value)
