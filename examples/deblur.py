"""Deblur a picture through an operator of your own, and see where not to trust it.

python examples/deblur.py [FILE.png] (needs the extra plots; writes deblur.png by default)
"""

import sys

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch.nn.functional import conv2d

from twinboot import Near, invert

canvas = FigureCanvasAgg(Figure(figsize=(1, 1), dpi=64))
canvas.figure.text(0.5, 0.5, "twin\nboot", size=18, weight="bold", ha="center", va="center")
canvas.draw()
truth = 1 - torch.tensor(np.asarray(canvas.buffer_rgba())[..., 0] / 255).float()  # white on black, 64 x 64
line = torch.exp(-(torch.arange(-6.0, 7.0) ** 2) / (2 * 1.5**2))
kernel = torch.outer(line, line)[None, None] / line.sum() ** 2


def blur(picture: torch.Tensor) -> torch.Tensor:  # each pixel of the result is a measurement
    return conv2d(picture[None, None], kernel, padding=6).flatten()


observed = blur(truth) + 0.02 * torch.randn(64 * 64, generator=torch.Generator().manual_seed(0))
# Brightness lies between 0 and 1, so the field is what a sigmoid makes brightness of. Near 0 with a standard deviation
# of 4 it may be black, white or anything between.
found = invert(lambda field: blur(field.sigmoid()), observed, torch.zeros(64, 64), prior=Near(std=4.0), rounds=10)
picture = found.predict(torch.sigmoid, samples=20)

error = (picture.mean - truth).abs()
before, after = ((p - truth).square().mean().sqrt() for p in (observed.view(64, 64), picture.mean))
agree = torch.corrcoef(torch.stack([picture.std.flatten(), error.flatten()]))[0, 1]
sigma = picture.std.square().mean().sqrt()
print(
    f"rms error: blurred {before:.3f}, deblurred {after:.3f}; correlation of sigma with |error| {agree:.2f}; "
    f"rms sigma {sigma:.3f}"
)
titles, panels = ("truth", "observed", "deblurred", "|error|", "sigma"), (truth, observed.view(64, 64), picture.mean)
drawn = Figure(figsize=(16, 3.4), layout="constrained")
for axes, title, panel in zip(drawn.subplots(1, 5), titles, (*panels, error, picture.std), strict=True):
    axes.set(title=title, xticks=[], yticks=[])
    shades = {"cmap": "magma"} if title in ("|error|", "sigma") else {"cmap": "gray", "vmin": 0, "vmax": 1}
    drawn.colorbar(axes.imshow(panel, **shades), shrink=0.8)
drawn.savefig(sys.argv[1] if len(sys.argv) > 1 else "deblur.png", dpi=90)
