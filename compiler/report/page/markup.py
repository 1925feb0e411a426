"""HTML and SVG from Python: text is escaped, unless it was made here."""

from __future__ import annotations

import html
import json
from typing import Any

_VOID = frozenset({"base", "input"})


class Markup(str):
    """Text that is HTML already, and is not escaped again."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: object) -> Markup:
    """An element. Children that are plain text are escaped.

    Attributes: a trailing underscore is dropped (``class_``), others become hyphens (``data_at``). True gives the bare
    name; None and False leave the attribute out.
    """
    given = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in _VOID:
        return Markup(f"<{tag}{given}>")
    return Markup(f"<{tag}{given}>{joined(*children)}</{tag}>")


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'


def joined(*children: str) -> Markup:
    """Children one after another, those that are plain text escaped."""
    return Markup("".join(child if isinstance(child, Markup) else html.escape(child) for child in children))


def script_data(name: str, data: Any) -> Markup:
    """Data for a script of the page, as JSON that no text in it can end early."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{html.escape(name)}">{text}</script>')
