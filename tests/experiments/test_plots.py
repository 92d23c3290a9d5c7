from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from twinboot.experiments import plots


def test_both_pictures_are_written_and_the_theme_ends_with_them(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    inks = []

    def draw() -> Figure:
        inks.append(plots.ink())
        figure = Figure(figsize=(2, 1))
        plots.circle(figure.subplots(), (0, 0), 1, color=plots.ink())
        return figure

    first = plots.save(draw, tmp_path)
    assert first == tmp_path / "figure.png"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figure-dark.png", "figure.png"]
    assert len(set(inks)) == 2
    assert dict(mpl.rcParams) == before


def test_the_same_picture_is_the_same_file(tmp_path: Path) -> None:
    written = [plots.save(lambda: Figure(figsize=(2, 1)), tmp_path).read_bytes() for _ in range(2)]
    assert written[0] == written[1]
