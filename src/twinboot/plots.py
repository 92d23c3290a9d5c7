"""The look that all figures share, on light and on dark pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle
except ImportError as error:
    raise ImportError("figures need matplotlib: pip install 'twinboot[plots]'.") from error

from .atomic import replacing

# Twin 1, twin 2, and what is true: told apart by people with any kind of colour vision, on white and on black.
TWINS = ("#3b82c4", "#e08a3c")
TRUTH = "#d6336c"
FILES = ("figure.png", "figure-dark.png")
SERIES = ("#3b82c4", "#e08a3c", "#2f9e77", "#9c6ade")


@contextmanager
def theme(dark: bool = False) -> Iterator[None]:
    """Figures that are made and saved inside the block share size of type, frame and colours."""
    paper, ink, faint = ("#16181d", "#e6e6e6", "#3a3f47") if dark else ("white", "#222222", "#dddddd")
    style: Any = {
        "figure.facecolor": paper,
        "savefig.facecolor": paper,
        "axes.facecolor": paper,
        "legend.facecolor": paper,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "grid.color": faint,
        "legend.edgecolor": faint,
        "font.size": 11.0,
        "axes.titlesize": 12.0,
        "legend.fontsize": 9.0,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "twinboot",
    }
    with mpl.rc_context(style):
        yield


def ink() -> str:
    """The colour of text in the present theme."""
    return str(mpl.rcParams["text.color"])


def circle(axes: Axes, center: tuple[float, float], radius: float, **style: object) -> None:
    """A ring around a point, in the units of the data."""
    axes.add_patch(Circle(center, radius, fill=False, **style))


def save(draw: Callable[[], Figure], directory: Path) -> Path:
    """Write the picture for light pages and for dark ones; gives the path of the first."""
    for name, dark in zip(FILES, (False, True), strict=True):
        with theme(dark), replacing(directory / name) as partial:
            # Without the version of matplotlib in it, the same picture is the same file.
            draw().savefig(partial, format="png", dpi=120, metadata={"Software": None})
    return directory / FILES[0]
