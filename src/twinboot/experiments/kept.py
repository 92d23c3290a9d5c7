"""The sections of a page that an earlier report wrote, so that they can stay while others change.

A run of a day need not be at hand to publish one of an hour: its section, with its figure, is taken over as it is.
"""

from __future__ import annotations

import re
from typing import Any

from markupsafe import Markup

START = re.compile(r'^<a id="([^"]+)"></a>$', re.MULTILINE)
ROW = r"^\| \[(.*)\]\(#{name}\) \|(.*)\|(.*)\|$"  # of the table at the top
COMMAND = re.compile(r"^By `(.*)`: ", re.MULTILINE)


def sections_of(page: str) -> list[dict[str, Any]]:
    """What a report needs to know of each section, and its text, as the Markdown that it is."""
    _, *found = START.split(page)
    if page.strip() and not found:
        raise ValueError("the page has no section that a report wrote: nothing of it was changed.")
    return [_section(name, text.strip("\n"), page) for name, text in zip(found[::2], found[1::2], strict=True)]


def _section(name: str, text: str, page: str) -> dict[str, Any]:
    row, command = re.search(ROW.format(name=re.escape(name)), page, re.MULTILINE), COMMAND.search(text)
    if row is None or command is None:
        raise ValueError(f"the page has a section {name!r} that no report wrote: nothing of it was changed.")
    title, *counts = row.groups()
    return {
        "name": Markup(name),
        "title": Markup(title),
        "counts": [_count(own) for own in counts],
        "text": Markup(text),
        "command": command[1],
    }


def _count(cell: str) -> list[tuple[str, int]]:
    """Such as `2 held, 1 not held`."""
    return [(status, int(number)) for number, status in re.findall(r"(\d+) ([a-z ]+)", cell.strip())]
