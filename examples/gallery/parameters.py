"""# Parameters with standard errors

A growth curve is fitted to noisy measurements. `standard_errors` lets twins settle on redrawn bootstrap samples, and
prints the table that one knows from statistics packages.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils.data import TensorDataset

from twinboot import standard_errors


class Growth(nn.Module):
    """Logistic growth to a capacity."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity = nn.Parameter(torch.tensor(8.0))
        self.rate = nn.Parameter(torch.tensor(0.5))
        self.middle = nn.Parameter(torch.tensor(5.0))

    def forward(self, time: torch.Tensor) -> torch.Tensor:
        return self.capacity * torch.sigmoid(self.rate * (time - self.middle))


time = torch.linspace(0, 12, 60)
clean = 10 * torch.sigmoid(0.9 * (time - 6))
size = clean * (1 + 0.1 * torch.randn(60, generator=torch.Generator().manual_seed(0)))  # the noise grows with the size

# %%
# The truth is 10, 0.9 and 6. The noise is not the same everywhere, and nothing needs to be said about it:
found = standard_errors(Growth(), TensorDataset(time, size), "regression", rounds=100, progress=False)
print(found)

# %%
grid = torch.linspace(0, 12, 200)
curves = found.outputs(grid)
low, high = curves.quantile(torch.tensor([0.025, 0.975], dtype=curves.dtype), dim=0)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained", width_ratios=[1.6, 1])
left.fill_between(grid, low, high, color="#3b82c4", alpha=0.3, lw=0, label="95 % of the draws")
left.plot(grid, found.module(grid).detach(), color="#3b82c4", lw=1.5, label="fit")
left.plot(time, size, ".", color="#8a8f98", ms=6, label="measurements")
left.set(xlabel="time", ylabel="size")
left.legend(frameon=False, loc="upper left", fontsize=9)
draws = dict(zip(found.labels, found.draws.T, strict=True))
right.plot(draws["capacity"], draws["rate"], ".", color="#3b82c4", ms=4)
right.plot(10, 0.9, "+", color="#d6336c", ms=14, mew=2, label="truth")
right.set(xlabel="capacity", ylabel="rate", title="Draws of two parameters")
right.legend(frameon=False, fontsize=9)
plt.savefig("parameters.png", dpi=120)
