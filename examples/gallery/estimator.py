"""# How precise sigma is

Two twins estimate one sigma for a group of weights from one difference per weight. With two weights that is rough. With
hundreds, as in a layer, it is sharp. For D independent weights and N samples, the relative variance of sigma^2 is about
2 / D + 2 / N. The second term is there because all weights of a twin see the same bootstrap counts.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from twinboot import Bootstrap, Twins

N, RUNS, STEPS = 100, 100, 12


class Mean(nn.Module):
    """The model: D weights that learn the mean of D numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


def sigma2(size: int, seed: int) -> tuple[float, float]:
    """What twins find for sigma^2 after full-batch steps, and the bootstrap's exact variance for the same data."""
    data = torch.randn(N, size, generator=torch.Generator().manual_seed(seed))
    counts = Bootstrap(N, seed=seed).counts.float()
    twins = Twins(Mean(size), seed=seed)
    optimizer = torch.optim.SGD(twins.parameters(), lr=0.4)
    for _ in range(STEPS):
        for twin, count in zip(twins, counts, strict=True):
            (count @ (twin.weight - data).square()).sum().div(2 * N).backward()
        optimizer.step()
        optimizer.zero_grad()
    twins.update()
    return next(iter(twins.sigma.values())).item() ** 2, (data.var(0, correction=0) / N).mean().item()


# %%
# For three sizes of the group, 100 data sets each:
found = {}
for size in (2, 20, 200):
    pairs = torch.tensor([sigma2(size, seed) for seed in range(RUNS)])
    found[size] = pairs[:, 0] / pairs[:, 1]
    theory = 2 / size + 2 / N
    mean, error = found[size].mean(), found[size].std() / RUNS**0.5
    print(
        f"D = {size:3}: sigma^2 / exact {mean:.3f} ± {error:.3f}, "
        f"variance {found[size].var():.3f}, in theory {theory:.3f}"
    )

# %%
figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
for (size, ratio), color in zip(found.items(), ("#e08a3c", "#2f9e77", "#3b82c4"), strict=True):
    axes.hist(ratio, bins=torch.linspace(0, 4, 41).tolist(), alpha=0.6, color=color, label=f"{size} weights")
axes.axvline(1, color="#d6336c", ls="--", lw=1.2, label="exact")
axes.set(xlabel="sigma^2 of two twins / variance of the bootstrap", ylabel="data sets", xlim=(0, 4))
axes.legend(frameon=False)
plt.savefig("estimator.png", dpi=120)
