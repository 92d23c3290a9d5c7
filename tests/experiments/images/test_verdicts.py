"""What the image experiment says of each claim."""

import dataclasses

import pandas as pd
import pytest
from small_images import SMALL, repeated, small

from twinboot.experiments import images
from twinboot.experiments.images import Config
from twinboot.experiments.images.verdicts import AS_LONG, BASE, CONTESTANTS, DRAWS, OURS, OURS_LAST, OURS_MEAN, USUAL
from twinboot.experiments.runner.experiment import Verdict


def test_a_part_of_the_test_images_decides_nothing() -> None:
    assert images.verdicts(SMALL, small().tables)
    assert not images.verdicts(dataclasses.replace(SMALL, test=100), small().tables)


@pytest.mark.parametrize(
    ("change", "seeds", "status"),
    [
        ({"accuracy": 0.9, "nll": -0.9, "ece": -0.9}, 4, "held"),
        ({"accuracy": 0.9, "nll": -0.9, "ece": -0.9}, 2, "undecided"),
        ({"accuracy": -0.9, "nll": 0.9, "ece": -0.9}, 4, "not held"),
        ({"accuracy": 0.9, "nll": 0.9, "ece": -0.9}, 4, "not held"),
        ({"accuracy": 0.9, "nll": -0.9, "ece": 0.9}, 4, "not held"),
    ],
)
def test_at_equal_cost_all_that_takes_no_longer_is_a_rival(change: dict[str, float], seeds: int, status: str) -> None:
    tables = repeated(seeds // 2)
    ours = tables["rows"]["row"] == OURS
    for column, by in change.items():
        tables["rows"].loc[ours, column] = tables["rows"].loc[~ours, column].agg("max" if by > 0 else "min") + by
    verdict = equal_cost(dataclasses.replace(SMALL, seeds=seeds), tables)
    assert verdict.status == status
    assert verdict.ours
    assert (
        "4 other rows take at most 1.1 times as long as that" in verdict.evidence
    )  # those of a single model with a hold-out
    dear = tables["rows"]["row"] == BASE
    tables["rows"].loc[dear, "epochs"] = 1000.0
    assert "3 other rows take at most 1.1 times as long as that. In accuracy" in (
        said := equal_cost(dataclasses.replace(SMALL, seeds=seeds), tables).evidence
    )
    assert f"Left out because they take longer: {BASE} (1000.00)." in said


@pytest.mark.parametrize(("by", "ahead"), [(0.9, 4), (-0.9, 0)])
def test_one_seed_tells_of_how_many_it_is_ahead_and_that_nothing_is_clear(by: float, ahead: int) -> None:
    rows = small().tables["rows"]
    tables = {**small().tables, "rows": rows[rows["seed"] == 0].reset_index(drop=True)}
    tables["rows"].loc[tables["rows"]["row"] == OURS, "accuracy"] += by
    verdict = equal_cost(dataclasses.replace(SMALL, seeds=1), tables)
    assert verdict.status == "undecided"
    assert f"In accuracy it is ahead of {ahead} of them with this seed; against" in verdict.evidence
    assert "clearly" not in verdict.evidence


@pytest.mark.parametrize("contestant", CONTESTANTS[1:])
def test_other_twins_have_a_verdict_of_their_own(contestant: str) -> None:
    tables = repeated(2)
    if contestant not in set(tables["rows"]["row"]):
        tables["rows"]["row"] = tables["rows"]["row"].replace({DRAWS: contestant})
    claims = [verdict.claim for verdict in images.verdicts(dataclasses.replace(SMALL, seeds=4), tables)]
    for ours in (OURS, contestant):
        assert f"At equal cost {ours} predicts better than other methods." in claims


@pytest.mark.parametrize(
    ("nll", "ece", "time", "status"),
    [
        ((0.5, 0.5), (0.01, 0.01), 1.39, "held"),
        ((0.5, 0.5), (0.01, 0.6), 1.39, "not held"),
        ((0.99, 0.5), (0.01, 0.01), 1.39, "partly"),  # lower on the average, but not clearly
    ],
)
def test_the_usual_ways_are_judged_in_likelihood_and_calibration(
    nll: tuple[float, float], ece: tuple[float, float], time: float, status: str
) -> None:
    """Each of them has an NLL of 1 and an ECE of 0.1 with all seeds; Twin-Boot has these with the first and others."""
    tables, missing = repeated(2), list(USUAL)
    turns, rows = tables["turns"], tables["rows"]
    of_base = rows[rows["row"] == BASE].assign(nll=1.0, ece=0.1)
    tables["rows"] = rows = pd.concat([rows, *(of_base.assign(row=row) for row in missing)], ignore_index=True)
    ours, first = rows["row"] == OURS, rows["seed"] == 0
    for column, (one, others) in (("nll", nll), ("ece", ece)):
        rows.loc[ours & first, column], rows.loc[ours & ~first, column] = one, others
    turns["seconds"] = turns["kind"].map({"single": 1.0, "twins": time}).fillna(2.0)
    config = dataclasses.replace(SMALL, seeds=4)
    found, ahead = beside_usual(config, tables), 0 if status == "partly" else 7
    assert found.status == status
    assert found.evidence.startswith(f"It takes {time:.2f} times as long. In NLL it is clearly ahead of {ahead} of")
    assert "and clearly behind 0; against the best" in found.evidence
    rows.loc[rows["row"] == "SWA", "nll"] = 0.995
    assert "against the best, 'SWA'" in beside_usual(config, tables).evidence
    few = {**tables, "rows": rows[rows["seed"] < 2]}
    assert beside_usual(dataclasses.replace(SMALL, seeds=2), few).status == "undecided"
    for rest, takes in ((rows[rows["row"] != "IVON"], time), (rows, 1.41)):
        turns.loc[turns["kind"] == "twins", "seconds"] = takes
        assert not [v for v in images.verdicts(config, {**tables, "rows": rest}) if "usually trained" in v.claim]


def beside_usual(config: Config, tables: dict[str, pd.DataFrame]) -> Verdict:
    claim = f"{OURS} has a lower NLL and ECE than"
    [found] = [verdict for verdict in images.verdicts(config, tables) if verdict.claim.startswith(claim)]
    return found


def equal_cost(config: Config, tables: dict[str, pd.DataFrame]) -> Verdict:
    claim = f"At equal cost {OURS} predicts"
    [found] = [verdict for verdict in images.verdicts(config, tables) if verdict.claim.startswith(claim)]
    return found


def test_enough_seeds_of_the_papers_images_decide() -> None:
    run, tables = small(), repeated(2)
    tables["rows"].loc[tables["rows"]["row"] == OURS, ["nll", "ece"]] = 0.01
    config = dataclasses.replace(run.config, preset="cifar10-5k", seeds=4)
    gap, calibrated, *_ = images.verdicts(config, tables)
    assert calibrated.status == "held"
    assert gap.status != "undecided"


def test_claims_about_sigma_are_of_networks_with_weight_norm_and_of_the_papers_twins() -> None:
    def judged(preset: str, tables: dict[str, pd.DataFrame]) -> list[Verdict]:
        config = dataclasses.replace(SMALL, preset=preset, seeds=4, epochs=3)
        return [verdict for verdict in images.verdicts(config, tables) if "Section 4.2.1" in verdict.place]

    tables = repeated(2)
    assert "undecided" not in {verdict.status for verdict in judged("cifar10", tables)}
    for preset, why in (("cifar10-5k", "here with BatchNorm"), ("digits", "here on digits")):
        assert [(v.status, why in v.evidence) for v in judged(preset, tables)] == [("undecided", True)] * 2
    others = tables["rows"]["row"].str.startswith("Twin-Boot")
    tables["rows"].loc[others, "row"] += " on divided images"
    assert judged("cifar10", tables) == []


@pytest.mark.parametrize(
    ("classifier", "falls", "ranks"),
    [
        (0.03, "At the end, sigma of a layer is 50% of its highest value, reached after epoch 1", "the classifier has"),
        (0.01, "At the end, sigma of a layer is 50% of its highest value, reached after epoch 1", "4 have a higher"),
    ],
)
def test_the_sentences_about_sigma_name_a_range_only_if_there_is_one(classifier: float, falls: str, ranks: str) -> None:
    tables = repeated(2)
    sigma = tables["sigma"]
    sigma["sigma"] = (
        sigma["layer"].map(lambda layer: classifier if layer == "classifier" else 0.02) * 2 / sigma["epoch"]
    )
    config = dataclasses.replace(SMALL, preset="cifar10", seeds=4, epochs=3)
    fell, ranked = (v for v in images.verdicts(config, tables) if "Section 4.2.1" in v.place)
    assert fell.evidence == f"{falls}."
    assert ranked.evidence.startswith(f"Of 5 layers, {ranks}")
    sigma.loc[sigma["layer"] == "conv1_1", "sigma"] = 0.02
    fell, _ = (v for v in images.verdicts(config, tables) if "Section 4.2.1" in v.place)
    assert "is 50% to 100% of its highest value" in fell.evidence


def test_the_time_of_weights_is_that_of_repeated_samples_in_the_same_turn() -> None:
    tables = repeated(2)
    seconds = {"single": (1.0, 1.0, 1.0), "twins": (1.4, 2.1, 1.5), "twins-draws": (2.0, 3.0, 2.5)}
    tables["turns"] = pd.DataFrame(
        [{"kind": k, "turn": t, "seconds": s} for k, values in seconds.items() for t, s in enumerate(values, 1)]
    )
    config = dataclasses.replace(SMALL, preset="cifar10-5k", seeds=4)
    [found] = [verdict for verdict in images.verdicts(config, tables) if "repeated samples" in verdict.claim]
    assert found.evidence.startswith("0.70 (0.60 to 0.70) of the time")


def gap(tables: dict[str, pd.DataFrame], **gaps: float) -> Verdict:
    """The verdict on the gap, with these gaps of rows, in four seeds of the paper's images."""
    rows = tables["rows"]
    for row, value in gaps.items():
        rows.loc[rows["row"] == row, "gap"] = value
    config = dataclasses.replace(SMALL, preset="cifar10-5k", seeds=4)
    [found] = [verdict for verdict in images.verdicts(config, tables) if "gap" in verdict.claim]
    return found


@pytest.mark.parametrize(("ours", "status"), [(0.2, "held"), (0.5, "not held")])
def test_the_gap_is_judged_by_itself_and_against_a_model_that_trained_as_long(ours: float, status: str) -> None:
    """A model that is stopped early has a small gap and is right less often: neither decides."""
    tables = repeated(2)
    longest = tables["rows"][tables["rows"]["row"] == BASE].assign(row=AS_LONG)
    tables["rows"] = pd.concat([tables["rows"], longest], ignore_index=True)
    tables["rows"].loc[tables["rows"]["row"] == OURS_LAST, "accuracy"] = 0.99
    found = gap(tables, **{AS_LONG: 0.4, BASE: 0.1, OURS_MEAN: 0.3, OURS_LAST: ours})
    assert found.status == status
    assert "accuracy than a single model that trains as long." in found.claim
    assert (
        f"trains as long the gap after the last epoch changes by {ours - 0.4:+.3f} ± 0.000 (0.400 to {ours:.3f})"
        in (found.evidence)
    )
    assert "stopped by a hold-out the gap of the mean, stopped by out-of-bag images, changes by +0.200 ± 0.000" in (
        found.evidence
    )


def test_a_model_that_trained_as_long_is_enough_for_the_gap() -> None:
    tables = repeated(2)
    tables["rows"]["row"] = tables["rows"]["row"].replace({BASE: AS_LONG})
    found = gap(tables, **{AS_LONG: 0.4, OURS_LAST: 0.2})
    assert found.status == "held"
    assert "stopped by a hold-out" not in found.evidence


@pytest.mark.parametrize(("ours", "status"), [(0.05, "held"), (0.2, "not held")])
def test_where_no_model_trained_as_long_the_gap_is_that_of_the_stopped_one(ours: float, status: str) -> None:
    found = gap(repeated(2), **{BASE: 0.1, OURS_MEAN: ours})
    assert found.status == status
    assert "accuracy than a single model stopped by a hold-out." in found.claim
    assert "trains as long" not in found.evidence
