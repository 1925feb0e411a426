"""Docstrings on the site: what is said of a parameter or field (``name: text``) begins a paragraph of its own."""

import re
from typing import Any

from griffe import Class, Extension, Function, Object

TERM = re.compile(r"^(\w+(?:, \w+)*): ", flags=re.MULTILINE)
LATER = re.compile(r"(?<=[.;]) (\w+(?:, \w+)*): ")


class Terms(Extension):
    """Puts the names of parameters and fields in front, where a docstring explains them."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Mark the parameters that the docstring of a function explains."""
        mark(func, {parameter.name for parameter in func.parameters} | {"options"})

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Mark the fields that the docstring of a class explains."""
        mark(cls, set(cls.members))


def mark(found: Object, names: set[str]) -> None:
    """Begin a paragraph at each ``name: text`` of these names."""
    if found.docstring is None:
        return

    def term(match: re.Match[str]) -> str:
        told = match[1].split(", ")
        if not set(told) <= names:
            return match[0]
        return f"\n\n{', '.join(f'`{name}`' for name in told)}: "

    found.docstring.value = LATER.sub(term, TERM.sub(term, found.docstring.value))
