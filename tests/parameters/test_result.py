"""Intervals and tables, for draws that are made here."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinboot import StandardErrors
from twinboot.parameters.result import quantile_se


def found(draws: Tensor, center: Tensor | None = None, influence: Tensor | None = None, **more: Any) -> StandardErrors:
    center = draws.mean(0) if center is None else center
    model = nn.Linear(1, 1).double()
    options: dict[str, Any] = {"df": 1e6, "notes": ["a note"], "runaway": []}
    return StandardErrors(
        estimate={"weight": center[:1].reshape(1, 1), "bias": center[1:]},
        module=model,
        labels=["weight[0, 0]", "bias[0]"],
        draws=draws,
        settled=torch.ones(len(draws), dtype=torch.bool),
        _center=center,
        _variance=draws.var(0),
        _relative=torch.full((2,), 0.05),
        _influence=influence,
        **{**options, **more},
    )


def normal(n: int = 20_000) -> Tensor:
    scale = torch.tensor([1.0, 3.0]).double()
    return 5 + scale * torch.randn(n, 2, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("kind", ["t", "percentile", "bca"])
def test_all_kinds_of_intervals_agree_for_normal_draws(kind: Any) -> None:
    own = found(normal(), influence=torch.tensor([[1.0, 1.0], [-1.0, -1.0]]).double())
    low, high = own.interval(0.9, kind)
    expected = 1.645 * torch.tensor([1.0, 3.0]).double()
    for end, sign in ((low, -1), (high, 1)):
        flat = torch.cat([end["weight"].reshape(-1), end["bias"]])
        # Four standard errors of a quantile of 20,000 normal draws: 4 * sqrt(0.05 * 0.95 / 20000) / 0.103.
        torch.testing.assert_close(flat, 5 + sign * expected, atol=0.06 * 3, rtol=0)


def test_bca_of_a_skewed_statistic_is_shifted_to_where_its_tail_is() -> None:
    """The mean of exponential data: exact intervals reach further up than down."""
    generator = torch.Generator().manual_seed(0)
    data = -torch.rand(40, generator=generator).double().log()
    draws = torch.stack([data[torch.randint(40, (40,), generator=generator)].mean() for _ in range(4000)])
    influence = (data - data.mean())[:, None].expand(-1, 2) / 40
    own = found(draws[:, None].expand(-1, 2), torch.stack([data.mean()] * 2), influence)
    widths = {}
    for kind in ("t", "percentile", "bca"):
        low, high = own.interval(0.9, kind)  # type: ignore[arg-type]
        widths[kind] = ((high["bias"] - data.mean()) / (data.mean() - low["bias"])).item()
    assert widths["t"] == pytest.approx(1)
    assert 1 < widths["percentile"] < widths["bca"]


def test_degrees_of_freedom_of_few_data_widen_intervals() -> None:
    wide, narrow = (found(normal(), df=df).interval(0.95)[1]["bias"] for df in (4.0, 1e6))
    assert ((wide - 5) / (narrow - 5)).item() == pytest.approx(2.776 / 1.96, rel=0.01)


def test_covariance_and_quantiles() -> None:
    own = found(normal())
    torch.testing.assert_close(own.covariance(), torch.diag(torch.tensor([1.0, 9.0]).double()), atol=0.3, rtol=0)
    assert own.quantile_se["bias"].item() == pytest.approx(3, rel=0.03)
    cauchy = torch.tan(math.pi * (torch.rand(20_000, 2, generator=torch.Generator().manual_seed(0)).double() - 0.5))
    assert quantile_se(cauchy)[0].item() == pytest.approx(1.837, rel=0.06)  # tan(pi (0.8413 - 0.5))


def test_a_parameter_that_runs_away_has_no_number() -> None:
    own = found(normal(), runaway=["bias[0]"])
    assert math.isnan(own.se["bias"].item())
    assert own.se["weight"].item() == pytest.approx(1, rel=0.03)
    assert own.covariance().isnan().tolist() == [[False, True], [True, True]]
    row = str(own).splitlines()[3]
    assert row.split() == ["bias[0]", row.split()[1], "-", "-", "-", "-"]
    assert "1 run away" in repr(own)


def test_the_table_has_a_line_for_each_entry() -> None:
    lines = str(found(normal())).splitlines()
    assert lines[0].split() == ["estimate", "std", "err", "t", "[0.025", "0.975]"]
    assert lines[2].startswith("weight[0, 0] ")
    assert lines[-1] == "a note"
    assert len({len(line) for line in lines[:5]}) == 1
    assert "[0.05" in found(normal()).table(0.9, "percentile")


def test_outputs_have_the_parameters_of_the_draws() -> None:
    own = found(normal(10))
    x = torch.tensor([[2.0], [3.0]])
    expected = own.draws[:, :1] * x.T + own.draws[:, 1:]  # type: ignore[index]
    torch.testing.assert_close(own.outputs(x)[:, :, 0], expected)


def test_what_cannot_be_answered_is_said() -> None:
    with pytest.raises(ValueError, match="needs at least 40 draws, not 20"):
        found(normal(20)).interval(0.95, "percentile")
    with pytest.raises(ValueError, match="needs second derivatives"):
        found(normal()).interval(0.95, "bca")
    with pytest.raises(ValueError, match="needs second derivatives"):
        found(normal()).sandwich()
    with pytest.raises(ValueError, match="unknown kind 'normal'"):
        found(normal()).interval(0.95, "normal")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="level must lie between 0 and 1"):
        found(normal()).interval(95)
    without = StandardErrors(**{**vars(found(normal())), "draws": None})
    with pytest.raises(ValueError, match="keep_draws=True"):
        without.covariance()
    with pytest.raises(ValueError, match="the model cannot read these inputs: "):
        found(normal()).outputs("a word")
