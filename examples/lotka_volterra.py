"""Standard errors for the parameters of an ODE: lynx and hare in Canada, 1900 to 1920.

    hare' = a hare - b hare lynx
    lynx' = c hare lynx - d lynx

python examples/lotka_volterra.py [FILE.png] (needs the extra plots; writes lotka_volterra.png by default)

The data are pelts, in thousands, that the Hudson's Bay Company collected. Years are not independent of each other: the
model misses some of them for the same reason. So blocks of neighbouring years are drawn together.
"""

import sys

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import TensorDataset

from twinboot import Bootstrap, standard_errors

HARE = "30.0 47.2 70.2 77.4 36.3 20.6 18.1 21.4 22.0 25.4 27.1 40.3 57.0 76.6 52.3 19.5 11.2 7.6 14.6 16.2 24.7"
LYNX = "4.0 6.1 9.8 35.2 59.4 41.7 19.0 13.0 8.3 9.1 7.4 8.0 12.3 19.5 45.7 51.1 29.7 15.8 9.7 10.1 8.6"
pelts = torch.tensor([[float(word) for word in series.split()] for series in (HARE, LYNX)]).double().T
years = torch.arange(1900, 1921)


class LotkaVolterra(nn.Module):
    """The logarithms of both populations, by the classical Runge-Kutta method. All parameters are positive, so their
    logarithms are fitted."""

    def __init__(self, steps: int = 4) -> None:
        super().__init__()
        self.steps = steps  # in a year
        for name, value in {"a": 0.5, "b": 0.03, "c": 0.03, "d": 0.8, "hare": 30.0, "lynx": 4.0}.items():
            self.register_parameter(f"log_{name}", nn.Parameter(torch.tensor(value).log()))

    def slope(self, log: torch.Tensor) -> torch.Tensor:
        hare, lynx = log.exp().unbind()
        return torch.stack(
            [
                self.log_a.exp() - self.log_b.exp() * lynx,
                self.log_c.exp() * hare - self.log_d.exp(),
            ]
        )

    def forward(self, time: torch.Tensor) -> torch.Tensor:
        """Of whole numbers of steps since the beginning."""
        state, states, h = torch.stack([self.log_hare, self.log_lynx]), [], 1 / self.steps
        states.append(state)
        for _ in range(20 * self.steps):
            one = self.slope(state)
            two = self.slope(state + h / 2 * one)
            three = self.slope(state + h / 2 * two)
            four = self.slope(state + h * three)
            state = state + h / 6 * (one + 2 * two + 2 * three + four)
            states.append(state)
        return torch.stack(states)[time]


model, data = LotkaVolterra(), TensorDataset((years - 1900) * 4, pelts.log())
# All 200 twins at once: an ODE solver is many small operations, which cost as much for one as for many.
found = standard_errors(model, data, "regression", rounds=100, replicas=200, bootstrap=Bootstrap(21, block=3))
print(found)
low, high = found.interval(0.95, "percentile")
print("\n95 % intervals of the rates, by percentiles of the draws:")
for name, about in {"a": "hares grow", "b": "lynx eat hares", "c": "lynx grow by hares", "d": "lynx die"}.items():
    value = found.estimate[f"log_{name}"].exp().item()
    ends = [end[f"log_{name}"].exp().item() for end in (low, high)]
    print(f"{name} = {value:.3f}, {ends[0]:.3f} to {ends[1]:.3f} per year ({about})")

curves = found.outputs(torch.arange(81)).exp()
middle = found.module(torch.arange(81)).exp().detach()
tails = torch.quantile(curves, torch.tensor([0.025, 0.975]).double(), 0)
drawn = Figure(figsize=(11, 4), layout="constrained")
panels = drawn.subplots(1, 2, gridspec_kw={"width_ratios": [2, 1]})
time = 1900 + torch.arange(81) / 4
for k, (animal, colour) in enumerate({"hare": "#3b82c4", "lynx": "#e08a3c"}.items()):
    panels[0].fill_between(time, tails[0, :, k], tails[1, :, k], color=colour, alpha=0.25, lw=0)
    panels[0].plot(time, middle[:, k], color=colour, label=animal)
    panels[0].plot(years, pelts[:, k], "o", color=colour, ms=4)
panels[0].set(xlabel="year", ylabel="pelts, thousands", title="Data, fit and 95 % of the draws", ylim=(0, 100))
panels[0].set_xticks(range(1900, 1921, 5))
panels[0].legend()
panels[1].plot(found.draws[:, 0].exp(), found.draws[:, 3].exp(), ".", color="#2f9e77", ms=4)
panels[1].plot(found.estimate["log_a"].exp(), found.estimate["log_d"].exp(), "+", color="#d6336c", ms=12, mew=2)
panels[1].set(xlabel="a: hares grow, per year", ylabel="d: lynx die, per year", title="Draws of two rates")
for axes in panels:
    axes.grid(alpha=0.3)
drawn.savefig(sys.argv[1] if len(sys.argv) > 1 else "lotka_volterra.png", dpi=90, metadata={"Software": None})
