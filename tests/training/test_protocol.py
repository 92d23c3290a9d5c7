import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from twinboot import Protocol, resets
from twinboot.training.protocol import FIT, HUGGING_FACE, INVERT, LIGHTNING, SCIKIT_LEARN, complete


def test_what_is_left_out_is_the_front_ends_default() -> None:
    for defaults in (FIT, LIGHTNING, HUGGING_FACE, SCIKIT_LEARN, INVERT):
        found = complete(Protocol(noise=2.0), defaults, "it")
        assert found.noise == 2.0
        others = [field.name for field in fields(Protocol) if field.name != "noise"]
        assert [getattr(found, name) for name in others] == [getattr(defaults, name) for name in others]
        assert complete(None, defaults, "it") == defaults
    assert complete(Protocol(noise=2.0), HUGGING_FACE, "it").mode == "centered"


def test_zero_is_a_setting_and_not_left_out() -> None:
    assert complete(Protocol(noise=0.0, average=0.0), FIT, "it")._given() | {"mode": "sample"} == {
        **FIT._given(),
        "noise": 0.0,
        "average": 0.0,
    }


def test_a_setting_that_a_front_end_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="invert has no setting 'average': leave it out of the protocol"):
        complete(Protocol(average=math.inf), INVERT, "invert", without=("average",))


@pytest.mark.parametrize("wrong", [{"noise": 1.0}, "sample", 1])
def test_what_is_no_protocol_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="protocol must be a Protocol, such as Protocol"):
        complete(wrong, FIT, "fit")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"noise": -1.0}, "noise must be a finite number of at least 0, not -1.0"),
        ({"noise": math.nan}, "noise must be a finite number of at least 0, not nan"),
        ({"pooled": 1.5}, "is pooled must be below 1, not 1.5"),
        ({"pooled": 1.0}, "is pooled must be below 1, not 1.0"),
        ({"resample": "all"}, "unknown resample 'all'"),
        ({"mode": "sampled", "reset": resets.never()}, "unknown reset mode 'sampled'"),
        ({"reset": 1}, r"reset must be a schedule such as twinboot.resets.every\(1\), not 1"),
        ({"average": -1.0}, "average must be a finite number of at least 0, not -1.0"),
        ({"average": math.nan}, "average must be a finite number of at least 0, not nan"),
    ],
)
def test_a_wrong_setting_gets_one_sentence(settings: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        Protocol(**settings)


def test_the_table_in_the_docs_has_the_defaults() -> None:
    table = (Path(__file__).parents[2] / "docs" / "fit.md").read_text()
    for name in ("mode", "noise", "pooled", "resample", "average"):
        [row] = re.findall(rf"^\| `{name}` \|(.*)\|$", table, re.MULTILINE)
        shown = [cell.strip(' `"') for cell in row.split("|")]
        for cell, defaults in zip(shown, (FIT, LIGHTNING, HUGGING_FACE, SCIKIT_LEARN, INVERT), strict=True):
            value = getattr(defaults, name)
            assert cell == ("none" if value in (None, math.inf) else value if isinstance(value, str) else f"{value:g}")


def test_groups_by_name_are_checked_at_once() -> None:
    with pytest.raises(ValueError, match="unknown groups 'neuron': use \"layer\""):
        Protocol(groups="neuron")
