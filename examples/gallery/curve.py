"""# Error bars for a trained model

A network is trained on 300 noisy points, with nothing of twinboot in it. Then one call gives it error bars.
Are they of the right size? Here we can know: train the same network on 20 other data sets and see how much
its predictions really vary. Needs the extra plots, and writes curve.png.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from twinboot import error_bars


def measure(seed: int) -> TensorDataset:
    """300 noisy measurements of a curve, few of them in the middle and none beyond -4 and 4."""
    random = torch.Generator().manual_seed(seed)
    side = torch.where(torch.rand(300, 1, generator=random) < 0.5, -1.0, 1.0)
    x = (side * (2.3 + 0.8 * torch.randn(300, 1, generator=random))).clamp(-4, 4)
    return TensorDataset(x, torch.sin(1.5 * x) + 0.3 * torch.randn(300, 1, generator=random))


def train(data: TensorDataset, seed: int) -> nn.Module:
    """An ordinary training."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(120):
        for x, y in DataLoader(data, batch_size=50, shuffle=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return model


data = measure(seed=0)
model = train(data, seed=0)

# %%
# The model is trained. `error_bars` needs it, its training data, and the optimizer and a third of the epochs of the
# training.
estimate = error_bars(
    model,
    data,
    "regression",
    epochs=40,
    batch_size=50,
    optimizer=lambda p: torch.optim.Adam(p, lr=0.003),
    progress=False,
)
x = torch.linspace(-5, 5, 201)[:, None]
prediction = estimate.predict(x)
low, high = prediction.interval(0.9)

# %%
# The truth: the same training on 20 other data sets.
others = torch.stack([train(measure(seed), seed)(x).detach() for seed in range(1, 21)])
true_std = others.std(0)
inside = (x.abs() < 4).squeeze()
ratio = (prediction.std[inside].square().mean() / true_std[inside].square().mean()).sqrt()
print(f"rms error bar / rms true spread, where there are data: {ratio:.2f}")
each = (prediction.std / true_std)[inside]
print(f"error bar / true spread at single points: {each.min():.1f} to {each.max():.1f}")


# %%
# Left, the model with its 90 % interval. Right, the size of the error bar: right on average, a rough estimate at each
# point. Nothing was measured in the grey parts.
def draw(rows: int, columns: int, size: tuple[float, float]) -> None:
    _, (left, right) = plt.subplots(rows, columns, figsize=size, layout="constrained")
    left.plot(*data.tensors, ".", color="#8a8f98", ms=4, label="data")
    left.plot(x, estimate(x).detach(), color="#3b82c4", lw=2, label="the trained model")
    left.fill_between(x.squeeze(), low.squeeze(), high.squeeze(), color="#3b82c4", alpha=0.25, label="90 % interval")
    left.plot(x, others.mean(0), "--", color="#d6336c", lw=1.2, label="mean of 20 models trained on other data")
    left.set(title="A trained model with error bars", xlabel="x", ylabel="y", ylim=(-2, 3.6))
    right.plot(x, true_std, "--", color="#d6336c", lw=1.5, label="truth: spread of 20 models trained on other data")
    right.plot(x, prediction.std, color="#3b82c4", lw=2, label="error bar from one data set")
    right.set(title="Is the error bar of the right size?", xlabel="x", ylabel="standard deviation", ylim=(0, 0.35))
    for axes in (left, right):
        axes.legend(loc="upper center", fontsize=9, frameon=False)
        axes.axvspan(-5, -4, color="#8a8f98", alpha=0.12, lw=0)
        axes.axvspan(4, 5, color="#8a8f98", alpha=0.12, lw=0)


draw(2, 1, size=(5, 7))  # for a phone
plt.savefig("curve-narrow.png", dpi=120)
plt.close()
draw(1, 2, size=(10, 3.8))
plt.savefig("curve.png", dpi=120)
