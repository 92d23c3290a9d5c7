r"""Formulas: `$...$` and `$$...$$` become MathML when the site is built, which browsers draw without any script."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

# What pymdownx.arithmatex makes of a formula with `generic: true`.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return FORMULA.sub(_as_mathml, content)


def _as_mathml(found: re.Match[str]) -> str:
    block = found[1] == "div"
    formula = convert(html.unescape(found[2]).strip(), display="block" if block else "inline")
    return f'<div class="formula">{formula}</div>' if block else formula
