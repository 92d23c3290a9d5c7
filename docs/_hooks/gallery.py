"""The gallery: each script of examples/gallery is run when the site is built, and becomes a page with its pictures.

An example that fails ends the build, with its error. What a script showed is kept in .gallery until the script or the
package changes, so `mkdocs serve` does not run it again at each change of a page.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
SCRIPTS, KEPT, RUNNER = ROOT / "examples" / "gallery", ROOT / ".gallery", Path(__file__).with_name("run_example.py")
AT_ONCE = 2
INDEX = "gallery/index.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    scripts = sorted(SCRIPTS.glob("*.py"), key=_place_in(config))
    with ThreadPoolExecutor(AT_ONCE) as workers:
        found = dict(zip(scripts, workers.map(_shown, scripts), strict=True))
    for folder in found.values():
        for picture in folder.glob("*.png"):
            files.append(File.generated(config, f"gallery/{picture.name}", abs_src_path=str(picture)))
    pages = {
        script: json.loads((folder / "blocks.json").read_text(encoding="utf-8")) for script, folder in found.items()
    }
    for script, blocks in pages.items():
        files.append(File.generated(config, f"gallery/{script.stem}.md", content=_page(script, blocks)))
    files.append(File.generated(config, INDEX, content=_index(pages)))
    return files


def _place_in(config: MkDocsConfig) -> Callable[[Path], int]:
    """A function that sorts scripts as the navigation does."""
    listed = json.dumps(config.nav)
    return lambda script: listed.find(f"gallery/{script.stem}.md")


def _shown(script: Path) -> Path:
    """The folder with what the script shows."""
    package = [path for path in (ROOT / "src").rglob("*.py") if "experiments" not in path.parts]
    digest = hashlib.sha256()
    for path in (script, RUNNER, *sorted(package)):
        digest.update(path.read_bytes())
    folder = KEPT / script.stem / digest.hexdigest()[:16]
    if (folder / "blocks.json").exists():
        return folder
    shutil.rmtree(KEPT / script.stem, ignore_errors=True)
    folder.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(RUNNER), str(script), str(folder)],
        cwd=folder,  # a script may save a picture where it runs
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise PluginError(f"the example {script.relative_to(ROOT)} failed:\n{done.stderr}")
    for saved in folder.glob("*.png"):  # by the script itself
        if not saved.name.startswith(f"{script.stem}-") or "-narrow" in saved.name:
            saved.unlink()
    return folder


def _page(script: Path, blocks: list[dict[str, Any]]) -> str:
    """The title and what the example is about, then its pictures, then its code."""
    title, _, about = str(blocks[0]["text"]).partition("\n")
    parts = [title, about.strip(), *_pictures(blocks, title)]
    for number, block in enumerate(blocks):
        if number and block["text"]:
            parts.append(str(block["text"]))
        parts.append(f"```python\n{block['code']}\n```")
        if block["output"]:
            parts.append(f'```text title="prints"\n{str(block["output"]).rstrip()}\n```')
    parts.append(
        "*Run when this site was built. To run it yourself, with the extra `docs`: "
        f"`python {script.relative_to(ROOT)}`.*"
    )
    return "\n\n".join(parts) + "\n"


def _pictures(blocks: list[dict[str, Any]], title: str) -> list[str]:
    names = [name for block in blocks for name in block["pictures"]]
    return [
        f"![{title.lstrip('# ')}]({name}.png#only-light)\n![{title.lstrip('# ')}]({name}-dark.png#only-dark)"
        for name in names
    ]


def _index(pages: dict[Path, list[dict[str, Any]]]) -> str:
    cards = []
    for script, blocks in pages.items():
        title, _, about = str(blocks[0]["text"]).partition("\n")
        first = about.strip().replace("\n", " ").partition(". ")[0].rstrip(".")
        [pictures, *_] = _pictures(blocks, title)
        pictures = "\n".join(f"[{picture}]({script.stem}.md)" for picture in pictures.splitlines())
        lines = [f"-   **[{title.lstrip('# ')}]({script.stem}.md)**", pictures, f"{first}."]
        cards.append("\n\n    ".join(line.replace("\n", "\n    ") for line in lines))
    words = (
        "# Gallery\n\nEach picture links to the short script that draws it. The scripts run when this site is built."
    )
    return f'{words}\n\n<div class="grid cards gallery" markdown>\n\n' + "\n\n".join(cards) + "\n\n</div>\n"
