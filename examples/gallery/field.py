"""# A field from sparse measurements, and where not to trust it

60 noisy measurements, each a weighted mean over a small patch, lie on one side of a map. `invert` finds the field and
one standard deviation per cell. It is large where nothing was measured.
"""

import matplotlib.pyplot as plt
import torch

from twinboot import GaussianProcess, invert

SIZE = 24
random = torch.Generator().manual_seed(0)
rows, columns = torch.meshgrid(torch.linspace(0, 1, SIZE), torch.linspace(0, 1, SIZE), indexing="ij")
truth = torch.sin(5 * rows) * torch.cos(4 * columns) + columns

# Where the patches are: mostly on the left. Each row of the matrix is one measurement.
centers = torch.rand(60, 2, generator=random) * torch.tensor([1.0, 0.6])
distance = (rows.flatten() - centers[:, :1]).square() + (columns.flatten() - centers[:, 1:]).square()
kernels = torch.exp(-distance / (2 * 0.06**2))
kernels /= kernels.sum(1, keepdim=True)
measurements = kernels @ truth.flatten() + 0.05 * torch.randn(60, generator=random)

# %%
# What is known of the field: it is smooth, and near 0 where nothing is measured. How smooth, the measurements decide.
found = invert(
    lambda field: kernels @ field.flatten(),
    measurements,
    torch.zeros(SIZE, SIZE),
    prior=GaussianProcess(),
    rounds=20,
)
low, high = found.interval(0.9)
covered = ((low <= truth) & (truth <= high)).float().mean()
error = (found.field - truth).abs()
print(f"90 % intervals hold {covered:.0%} of the cells")
print(f"rms error {error.square().mean().sqrt():.3f}, rms sigma {found.sigma.square().mean().sqrt():.3f}")

# %%
figure, panels = plt.subplots(1, 4, figsize=(11, 3), layout="constrained")
shown = {"truth": truth, "estimate": found.field, "|error|": error, "sigma": found.sigma}
for axes, (title, panel) in zip(panels, shown.items(), strict=True):
    limits = {"vmin": -1, "vmax": 2} if title in ("truth", "estimate") else {"vmin": 0, "cmap": "magma"}
    figure.colorbar(axes.imshow(panel, origin="lower", extent=(0, 1, 0, 1), **limits), shrink=0.7)
    axes.plot(*centers.flip(1).T, ".", color="white", ms=2)
    axes.set(title=title, xticks=[], yticks=[])
plt.savefig("field.png", dpi=120)
