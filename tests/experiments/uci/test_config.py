from typing import Any

import pytest

from twinboot.experiments.uci.config import Config


def test_a_single_network_makes_about_as_many_steps_on_each_set_but_passes_over_large_ones_often_enough() -> None:
    config = Config()
    assert [config.batch_of(rows) for rows in (277, 1999, 2000, 41_157)] == [32, 32, 256, 256]
    for rows in (277, 455, 1439, 8611):
        assert config.epochs_of(rows) * -(-rows // config.batch_of(rows)) == pytest.approx(config.updates, rel=0.02)
    assert config.epochs_of(41_157) == config.epochs == 40


def test_the_hold_out_is_what_two_bootstrap_samples_leave() -> None:
    assert Config().hold_out == pytest.approx(0.1353, abs=0.0005)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(({name: 0}, f"{name} must be at least 1, not 0") for name in ("splits", "hidden", "batch", "large")),
        *(({name: 0}, f"{name} must be at least 1, not 0") for name in ("large_batch", "updates", "epochs")),
        ({"samples": 1}, "samples must be at least 2"),
        ({"rate": float("nan")}, "rate must be greater than 0"),
        ({"hold_out": 0.0}, "hold_out must lie between 0.02 and 0.5"),
        ({"floor": 0.0}, "floor above 0"),
        ({"sets": ("yacht", "yacht")}, "no name twice"),
        ({"data": "missing.npz"}, "can't read missing.npz"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Config(**change)
