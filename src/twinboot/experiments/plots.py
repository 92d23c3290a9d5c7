"""The look that all figures share, on light and on dark pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .._core.extras import how_to_install

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError(f"figures need matplotlib: {how_to_install('plots')}") from error

from .._core.atomic import replacing

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


def log_ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """1, 2 and 5 of each decade between two positive numbers, or more of it where those are too few, or else numbers
    that are evenly apart; and their text, in plain figures.

    >>> log_ticks(0.03, 0.6)[1], log_ticks(0.9, 2.9)[1], log_ticks(1.6, 1.9)[1][:2]
    (['0.05', '0.1', '0.2', '0.5'], ['1', '1.2', '1.5', '2', '2.5'], ['1.62', '1.68'])
    """
    for steps in ((1, 2, 5), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)):
        found = [m * 10.0**e for e in range(-6, 3) for m in steps if low <= m * 10.0**e <= high]
        if len(found) >= 3:
            break
    else:
        found = [value for value in map(float, MaxNLocator(5).tick_values(low, high)) if low <= value <= high]
    return found, [f"{value:g}" for value in found]


def save(draw: Callable[[], Figure], directory: Path) -> Path:
    """Write the picture for light pages and for dark ones; gives the path of the first."""
    for name, dark in zip(FILES, (False, True), strict=True):
        with theme(dark), replacing(directory / name) as partial:
            # Without the version of matplotlib in it, the same picture is the same file.
            draw().savefig(partial, format="png", dpi=120, metadata={"Software": None})
    return directory / FILES[0]
