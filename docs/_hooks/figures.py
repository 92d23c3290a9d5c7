"""A picture of a page links to itself, so that it can be seen at its full size, above all on a phone."""

from __future__ import annotations

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

PICTURE = re.compile(r'<img [^>]*?src="([^"#]+)[^"]*"[^>]*>')
DONE = re.compile(
    r"<(a|picture)\b.*?</\1>", re.DOTALL
)  # which link elsewhere, or choose a picture by the width of the page


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    done = {found.span() for part in DONE.finditer(content) for found in PICTURE.finditer(content, *part.span())}
    link = '<a class="figure" title="Click for the full size" href="{}">{}</a>'
    return PICTURE.sub(lambda found: found[0] if found.span() in done else link.format(found[1], found[0]), content)
