"""# Why twins are reset

On a landscape with two wells, twins can end in different ones. Their distance is then the distance of the wells, and
says nothing about the uncertainty of the weights. A reset now and then draws both twins around their mean, and keeps
them together.
"""

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from twinboot import Twins


class Point(nn.Module):
    """Two weights: a place on the landscape."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.tensor([0.0, 0.9]))

    def forward(self, datum: Tensor) -> Tensor:
        u, v = self.place - datum
        return (u**2 - 1) ** 2 + 2 * v**2  # wells at u = -1 and u = 1


def run(reset: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """The paths of both twins, and sigma, over 400 steps. Each twin's data are shifted by its bootstrap sample."""
    twins = Twins(Point(), seed=seed)
    optimizer = torch.optim.SGD(twins.parameters(), lr=0.02)
    samples = 0.05 * torch.randn(2, 2, generator=torch.Generator().manual_seed(seed))
    path, sigmas = [], []
    for step in range(1, 401):
        with twins.sampled():
            sum(twin(datum) for twin, datum in zip(twins, samples, strict=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
        twins.update()
        path.append(torch.stack([twin.place.detach().clone() for twin in twins]))
        sigmas.append(next(iter(twins.sigma.values())))
        if reset and step % reset == 0 and step < 200:
            twins.reset()
    return torch.stack(path), torch.stack(sigmas)


# %%
# The first pair of samples whose twins part, without resets and with one every 10 steps:
seed = next(s for s in range(100) if run(None, s)[0][-1, :, 0].prod() < 0)
figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained", sharey=True)
u, v = torch.meshgrid(torch.linspace(-1.8, 1.8, 181), torch.linspace(-1, 1.2, 111), indexing="xy")
for axes, reset, title in zip(panels, (None, 10), ("without resets", "a reset every 10 steps"), strict=True):
    path, sigmas = run(reset, seed)
    axes.contour(u, v, (u**2 - 1) ** 2 + 2 * v**2, levels=14, colors="#8a8f98", linewidths=0.6, alpha=0.7)
    for twin, color in enumerate(("#3b82c4", "#e08a3c")):
        axes.plot(*path[:, twin].T, color=color, lw=1.5, label=f"twin {twin + 1}")
        axes.plot(*path[-1, twin], "s", color=color)
    axes.set(title=f"{title}: sigma {sigmas[-1].item():.2f} at the end", xlabel="first weight")
    print(f"{title}: sigma {sigmas[-1].item():.3f}, twins end at {path[-1, 0, 0]:+.2f} and {path[-1, 1, 0]:+.2f}")
panels[0].set(ylabel="second weight")
panels[0].legend(frameon=False, loc="lower center")
plt.savefig("wells.png", dpi=120)
