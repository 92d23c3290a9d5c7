"""The style of all figures, for light and dark pages."""

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

# Colours of twin 1, twin 2 and the truth, for all kinds of colour vision, on white and on black.
TWINS = ("#3b82c4", "#e08a3c")
TRUTH = "#d6336c"
FILES = ("figure.png", "figure-dark.png")
SERIES = ("#3b82c4", "#e08a3c", "#2f9e77", "#9c6ade")


@contextmanager
def theme(dark: bool = False) -> Iterator[None]:
    """The style of figures that are made and saved inside the block."""
    paper, ink, faint = ("#16181d", "#e6e6e6", "#3a3f47") if dark else ("white", "#222222", "#dddddd")
    style: Any = {
        **dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor", "legend.facecolor"), paper),
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink),
        **dict.fromkeys(("grid.color", "legend.edgecolor"), faint),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
        "font.size": 11.0,
        "axes.titlesize": 12.0,
        "legend.fontsize": 9.0,
    }
    with mpl.rc_context(style):
        yield


def ink() -> str:
    """The colour of text in the current theme."""
    return str(mpl.rcParams["text.color"])


def circle(axes: Axes, center: tuple[float, float], radius: float, **style: object) -> None:
    """Draw a circle in the units of the data."""
    axes.add_patch(Circle(center, radius, fill=False, **style))


def log_ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """Ticks between two positive numbers, with their labels: 1, 2 and 5 of each decade, or more if those are too few.

    >>> log_ticks(0.03, 0.6)[1], log_ticks(0.9, 2.9)[1], log_ticks(1.6, 1.9)[1][:2]
    (['0.05', '0.1', '0.2', '0.5'], ['1', '1.2', '1.5', '2', '2.5'], ['1.62', '1.68'])
    """
    few, many = (1, 2, 5), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    decades = [[step * 10.0**e for e in range(-6, 3) for step in steps] for steps in (few, many)]
    for ticks in (*decades, MaxNLocator(5).tick_values(low, high)):
        found = [float(tick) for tick in ticks if low <= tick <= high]
        if len(found) >= 3:
            break
    return found, [f"{value:g}" for value in found]


def save(draw: Callable[[], Figure], directory: Path) -> Path:
    """Write the figure for light and for dark pages, and return the path of the first."""
    for name, dark in zip(FILES, (False, True), strict=True):
        with theme(dark), replacing(directory / name) as partial:
            # Without matplotlib's version in it, the same figure is the same file.
            draw().savefig(partial, format="png", dpi=120, metadata={"Software": None})
    return directory / FILES[0]
