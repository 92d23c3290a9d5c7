"""Deblur a picture through an operator of your own, and see where not to trust the result.

.venv/bin/python examples/deblur.py [FILE.png]
"""

import sys

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from twinboot import invert

canvas = FigureCanvasAgg(Figure(figsize=(1, 1), dpi=64))
canvas.figure.text(0.5, 0.5, "twin\nboot", size=18, weight="bold", ha="center", va="center")
canvas.draw()
truth = 1 - torch.tensor(np.asarray(canvas.buffer_rgba())[..., 0] / 255).float()  # white on black, 64 x 64

kernel = torch.exp(-(torch.arange(-6.0, 7.0) ** 2) / (2 * 1.5**2))
kernel = (kernel / kernel.sum()).view(1, 1, 1, 13)


def blur(picture: torch.Tensor) -> torch.Tensor:
    """Along rows, then along columns. Each pixel of the result is a measurement."""
    across = F.conv2d(picture[None, None], kernel, padding=(0, 6))
    return F.conv2d(across, kernel.mT, padding=(6, 0)).flatten()


observed = blur(truth) + 0.02 * torch.randn(64 * 64, generator=torch.Generator().manual_seed(0))
# Brightness lies between 0 and 1, so the field is what a sigmoid makes brightness of.
found = invert(
    lambda field: blur(field.sigmoid()),
    observed,
    initial=torch.zeros(64, 64),
    steps=1500,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05),
)
picture = found.predict(torch.sigmoid)

error = (picture.mean - truth).abs()
agree = torch.corrcoef(torch.stack([picture.std.flatten(), error.flatten()]))[0, 1]
print(f"rms error: blurred {(observed - truth.flatten()).square().mean().sqrt():.3f}, ", end="")
print(f"deblurred {error.square().mean().sqrt():.3f}; correlation of sigma with |error| {agree:.2f}")
panels = {"truth": truth, "observed": observed.view(64, 64), "deblurred": picture.mean}
panels |= {"|error|": error, "sigma": picture.std}
drawn = Figure(figsize=(16, 3.4), layout="constrained")
for axes, (title, panel) in zip(drawn.subplots(1, 5), panels.items(), strict=True):
    axes.set(title=title, xticks=[], yticks=[])
    shades = {"cmap": "magma"} if title in ("|error|", "sigma") else {"cmap": "gray", "vmin": 0, "vmax": 1}
    drawn.colorbar(axes.imshow(panel, **shades), shrink=0.8)
drawn.savefig(path := sys.argv[1] if len(sys.argv) > 1 else "deblur.png", dpi=90)
print(f"picture: {path}")
