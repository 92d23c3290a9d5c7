"""A picture of a page links to itself, so that it can be seen at its full size, above all on a phone."""

from __future__ import annotations

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

PICTURE = re.compile(r'<img [^>]*?src="([^"#]+)[^"]*"[^>]*>')
LINK = re.compile(r"<a .*?</a>", re.DOTALL)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    linked = {found.span() for link in LINK.finditer(content) for found in PICTURE.finditer(content, *link.span())}
    return PICTURE.sub(
        lambda found: found[0] if found.span() in linked else f'<a class="figure" href="{found[1]}">{found[0]}</a>',
        content,
    )
