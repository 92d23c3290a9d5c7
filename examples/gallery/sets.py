"""# Sets of classes with a guarantee

Three clouds of points overlap. A prediction set contains the true class with a probability of at least the level, here
90 %. Where the clouds overlap the set has two or three classes; inside a cloud it has one.
"""

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap
from torch import nn
from torch.utils.data import TensorDataset

from twinboot import fit


def clouds(number: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (number,), generator=random)
    centers = torch.tensor([[0.0, 1.2], [-1.0, -0.6], [1.0, -0.6]])
    return TensorDataset(centers[labels] + 0.75 * torch.randn(number, 2, generator=random), labels)


# %%
# `calibration=0.5` sets half of the out-of-bag samples aside: they train nothing.
train, test = clouds(4000, seed=0), clouds(3000, seed=1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))
optimizer = lambda p: torch.optim.Adam(p, lr=0.01)  # noqa: E731
found = fit(model, train, "classification", epochs=8, optimizer=optimizer, calibration=0.5, progress=False)

x, labels = test.tensors
sets = found.estimate.predict(x).set(0.9)
held = sets.gather(1, labels[:, None]).float().mean()
print(
    f"{len(found.bootstrap.calibration)} samples for calibration; "
    f"90 % sets hold the class of {held:.1%} of 3,000 new points"
)

# %%
axis = torch.linspace(-3, 3, 121)
grid = torch.cartesian_prod(axis, axis)
sizes = found.estimate.predict(grid).set(0.9).sum(1).view(121, 121)
figure, axes = plt.subplots(figsize=(6.5, 5), layout="constrained")
colors = ListedColormap(["#f3d9e2", "#d4e6f5", "#8fbce0", "#3b6fa0"])
image = axes.imshow(sizes.T, origin="lower", extent=(-3, 3, -3, 3), cmap=colors, vmin=-0.5, vmax=3.5)
for label, marker in enumerate("o^s"):
    axes.plot(*x[labels == label][:120].T, marker, ms=3, color=("#e08a3c", "#2f9e77", "#9c6ade")[label])
figure.colorbar(image, ticks=range(4), label="classes in the 90 % set", shrink=0.8)
axes.set(xticks=[], yticks=[], xlim=(-3, 3), ylim=(-3, 3))
plt.savefig("sets.png", dpi=120)
