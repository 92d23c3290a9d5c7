"""The methods that are compared: each learns, none reads what it may not, and each goes on after a stop."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from contest import TASK, patterns, trained

from twinboot import Bootstrap
from twinboot.experiments.images.contenders import METHODS
from twinboot.experiments.images.recipes import TWINS
from twinboot.experiments.images.rivals import AS_DEAR, HELD_OUT, longer
from twinboot.experiments.images.rows import USUAL


@pytest.mark.parametrize("method", METHODS)
def test_each_method_learns_and_all_its_rows_are_probabilities(method: str, tmp_path: Path) -> None:
    ticks: list[int] = []
    found = trained(method, tmp_path / "a", ticks=ticks)
    x, y = patterns(300, 1)
    for row, predict in found.rows.items():
        probs = predict(x)
        torch.testing.assert_close(probs.sum(1), torch.ones(300))
        assert (probs.argmax(1) == y).double().mean() > (0.4 if "IVON" in row else 0.6), row
        assert torch.equal(probs, predict(x)), row  # draws are seeded
    more = {"single": longer(6, AS_DEAR), "dropout": longer(6)}
    epochs = TWINS[method][1].epochs(6) if method in TWINS else more.get(method, 6)
    assert len(ticks) == (epochs + 6 if method == "single" else epochs)  # the second of an ensemble
    assert list(found.curve["epoch"]) == list(range(1, epochs + 1))
    assert set(found.epochs) <= set(found.rows)


@pytest.mark.parametrize("method", METHODS)
def test_what_may_not_be_trained_on_changes_nothing(method: str, tmp_path: Path) -> None:
    whole = trained(method, tmp_path / "a")
    apart = torch.ones(150, dtype=torch.bool)
    apart[whole.trained_on] = False
    if method == "hold-out":
        assert apart.sum() == round(HELD_OUT * 150)
    elif method == "dropout-seen" or (method in TWINS and not TWINS[method][1].cover):
        bootstrap = TWINS[method][1].bootstrap(150, 0) if method in TWINS else Bootstrap(150, seed=0)
        assert apart.nonzero().squeeze(1).equal(bootstrap.unseen)
    else:
        assert not apart.any()
        assert whole.unseen is None
        return
    assert whole.unseen is not None
    assert apart.nonzero().squeeze(1).equal(whole.unseen.sort().values)
    changed = TASK.x.clone()
    changed[apart] += 3.0
    other = trained(method, tmp_path / "b", replace(TASK, x=changed))
    # The training accuracy of each epoch is a function of the weights then: none depends on what is apart.
    assert list(whole.curve["train"]) == list(other.curve["train"])
    assert list(whole.curve["loss"]) != list(other.curve["loss"])
    assert whole.sigma.equals(other.sigma)


@pytest.mark.parametrize("method", ["hold-out", "single", "dropout", "twins", "twins-pooled", "twins-dropout"])
def test_a_method_goes_on_after_a_stop_as_if_there_had_been_none(method: str, tmp_path: Path) -> None:
    left = [4]

    def tick() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    whole = trained(method, tmp_path / "whole")
    place = tmp_path / "stopped"
    place.mkdir()
    with pytest.raises(KeyboardInterrupt):
        METHODS[method](TASK, place, tick)
    torch.manual_seed(99)  # as another process would have it
    ticks: list[int] = []
    again = METHODS[method](TASK, place, lambda: ticks.append(1))
    # Those of before the stop too.
    assert len(ticks) == {"single": longer(6, AS_DEAR) + 6, "dropout": longer(6), "twins-pooled": 7}.get(method, 6)
    x, _ = patterns(20, 2)
    for row in whole.rows:
        assert torch.equal(whole.rows[row](x), again.rows[row](x)), row
    columns = [c for c in whole.curve if c != "seconds"]
    assert whole.curve[columns].equals(again.curve[columns])
    assert whole.sigma.equals(again.sigma)


def test_the_usual_ways_are_rows_of_the_methods(tmp_path: Path) -> None:
    found = {row for method in ("single", "dropout") for row in trained(method, tmp_path / method).rows}
    assert set(USUAL) - found == {"IVON"}  # whose package is an extra
