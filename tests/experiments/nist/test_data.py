from pathlib import Path

import pytest
import torch

from twinboot.experiments.nist.data import EMBEDDED, Curve, parse, read

TEXT = """
Dataset Name:  Toy               (Toy.dat)
               4 Observations
               Lower Level of Difficulty
               Observed Data

Model:         Exponential Class
               2 Parameters (b1 and b2)

               log[y] = b1*exp[-b2*x1]
                        + x2**2  +  e

          Starting values                  Certified Values

        Start 1     Start 2           Parameter     Standard Deviation
  b1 =   500         250           2.0E+00  2.7E+00
  b2 =     0.0001      0.0005      5.5E-01  7.2E-06

Residual Sum of Squares:                    1.25E-01
Number of Observations:                             3

Data:   y               x1      x2
      1.0E0      77.6E0    1
      2.0E0     114.9E0    2
      4.0E0     141.1E0    3
"""


def test_a_file_is_read_with_its_formula() -> None:
    found = parse(TEXT, "here")
    assert (found.name, found.level, found.predictors) == ("Toy", "lower", ["x1", "x2"])
    assert found.starts.tolist() == [[500, 0.0001], [250, 0.0005]]
    assert found.certified.tolist() == [2.0, 0.55]
    x, y = found.dataset().tensors
    torch.testing.assert_close(y, torch.tensor([1.0, 2.0, 4.0]).double().log())
    curve = found.model(torch.tensor([2.0, 0.5]).double())
    torch.testing.assert_close(curve(x), 2 * torch.exp(-0.5 * x[:, 0]) + x[:, 1] ** 2)


@pytest.mark.parametrize("name", EMBEDDED)
def test_certified_estimates_have_the_certified_sum_of_squares(name: str) -> None:
    own = read(None)[name]
    x, y = own.dataset().tensors
    with torch.no_grad():
        squares = (own.model(own.certified)(x) - y).square().sum().item()
    assert squares == pytest.approx(own.squares, rel=1e-9)


@pytest.mark.parametrize("formula", ["__import__('os')", "x.real", "b1 if x else 2", "open(x)", "b9 * x", "exp(x, x)"])
def test_a_formula_is_arithmetic_and_nothing_else(formula: str) -> None:
    with pytest.raises(ValueError, match="no arithmetic, name or function that is known"):
        Curve(formula, ["x"], torch.ones(2))


def test_what_is_no_such_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no \*.dat files"):
        read(str(tmp_path))
    (tmp_path / "a.dat").write_text("nothing")
    with pytest.raises(ValueError, match="is not a file of NIST's nonlinear regressions"):
        read(str(tmp_path))
    with pytest.raises(ValueError, match="it has 3 rows of data and says 4"):
        parse(TEXT.replace("Observations:                             3", "Observations:      4"), "here")
    with pytest.raises(ValueError, match="cannot be read"):
        Curve("b1 *", ["x"], torch.ones(1))
