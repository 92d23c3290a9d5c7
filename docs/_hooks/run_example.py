"""Runs a script of the gallery block by block, as a reader would in a notebook, and keeps what each block shows.

python docs/_hooks/run_example.py SCRIPT FOLDER

A block ends at a line `# %%`. Its first comment lines, or the docstring of the script, are Markdown. What a block
prints and the figures that it leaves open go to FOLDER: blocks.json has the text, code, output and pictures of each.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.colors import same_color
from matplotlib.figure import Figure

# Text and background of figures, on light and on dark pages: the colours of twinboot.experiments.plots.
LIGHT, DARK = {"ink": "#222222", "paper": "#ffffff"}, {"ink": "#e6e6e6", "paper": "#1e2129"}
STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), LIGHT["ink"]),
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def split(source: str) -> list[tuple[str, str]]:
    """The Markdown and the code of each block.

    >>> split('\"\"\"# Title\"\"\"\\nx = 1\\n\\n# %%\\n# Then:\\ny = 2\\n')
    [('# Title', 'x = 1'), ('Then:', 'y = 2')]
    """
    first, *others = source.split("\n# %%\n")
    _, text, code = first.split('"""', 2)
    blocks = [(text.strip(), code.strip())]
    for other in others:
        lines = other.strip().splitlines()
        words = 0
        while words < len(lines) and lines[words].startswith("#"):
            words += 1
        blocks.append((" ".join(line[1:].strip() for line in lines[:words]), "\n".join(lines[words:]).strip()))
    return blocks


def darken(figure: Figure) -> None:
    """Text, axes and background for a dark page. All other colours stay."""
    for artist in figure.findobj(Artist):
        for kind in ("color", "edgecolor", "facecolor"):
            get, change = getattr(artist, f"get_{kind}", None), getattr(artist, f"set_{kind}", None)
            if get is None or change is None:
                continue
            for what in ("ink", "paper"):
                with contextlib.suppress(ValueError, TypeError):
                    if same_color(get(), LIGHT[what]):
                        change(DARK[what])
                        break
    for axes in figure.axes:
        axes.tick_params(colors=DARK["ink"])


def run(script: Path, folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    found: list[dict[str, object]] = []
    for text, code in split(script.read_text(encoding="utf-8")):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(code, str(script), "exec"), names)
        pictures = []
        for number in plt.get_fignums():
            figure = plt.figure(number)
            name = f"{script.stem}-{len(found)}-{number}"
            figure.savefig(folder / f"{name}.png", dpi=120, metadata={"Software": None})
            darken(figure)
            figure.savefig(folder / f"{name}-dark.png", dpi=120, metadata={"Software": None})
            pictures.append(name)
        plt.close("all")
        found.append({"text": text, "code": code, "output": said.getvalue(), "pictures": pictures})
    (folder / "blocks.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    mpl.use("Agg")
    mpl.rcParams.update(STYLE)
    run(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
