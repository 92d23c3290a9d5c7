"""How docstrings become a reference: doctests are blocks of code, and arguments that share a line are listed apart."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

TOGETHER = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)$", re.MULTILINE)
DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*\n).*)*", re.MULTILINE)


class Docstrings(Extension):
    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = rewritten(obj.docstring.value)


def rewritten(text: str) -> str:
    """The docstring as the parser for Google's style expects it.

    >>> rewritten("Args:\\n    a, b: as in fit.")
    'Args:\\n    a: as in fit.\\n    b: as in fit.'
    >>> rewritten(">>> 1 + 1\\n2")
    '```pycon\\n>>> 1 + 1\\n2\\n```'
    """
    text = TOGETHER.sub(lambda m: "\n".join(f"{m[1]}{name}: {m[3]}" for name in m[2].split(", ")), text)
    return DOCTEST.sub(lambda m: f"```pycon\n{m[0]}\n```", text)
