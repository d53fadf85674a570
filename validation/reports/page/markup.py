"""HTML made so that nothing in it is anybody's text: whatever is not markup already is escaped."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

_VOID = ("path", "line", "circle")  # elements that hold nothing


class Html(str):
    """Text that is markup."""


Part = str | None  # plain text, or ``Html``; None is nothing


def html(part: Part) -> Html:
    """``part`` as markup."""
    return part if isinstance(part, Html) else Html(escape(part or ""))


def joined(parts: Iterable[Part], between: str = "") -> Html:
    """All of ``parts``, one after the other."""
    return Html(escape(between).join(html(part) for part in parts))


def tag(name: str, *inside: Part, **attributes: Any) -> Html:
    """An element. An attribute that is None is left out, and True has no value; ``class_`` is "class"."""
    given = "".join(_attribute(key.strip("_").replace("_", "-"), value) for key, value in attributes.items())
    return Html(f"<{name}{given}/>" if name in _VOID else f"<{name}{given}>{joined(inside)}</{name}>")


def _attribute(name: str, value: object) -> str:
    if value is None or value is False or value == "":
        return ""
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


def table(head: Sequence[Part], rows: Iterable[Sequence[Part]], *, caption: str, numbers: Sequence[int] = ()) -> Html:
    """A table whose first column names its rows; the columns of ``numbers`` are set as such."""

    def row(cells: Sequence[Part]) -> Html:
        first = tag("th", cells[0], scope="row", class_=_number(0, numbers))
        return tag("tr", first, *(tag("td", cell, class_=_number(k, numbers)) for k, cell in enumerate(cells) if k))

    top = tag("tr", *(tag("th", cell, scope="col", class_=_number(k, numbers)) for k, cell in enumerate(head)))
    body = tag("tbody", *map(row, rows))
    inside = tag("table", tag("caption", caption), tag("thead", top), body)
    return tag("div", inside, class_="wide", tabindex="0", role="region", aria_label=caption)


def _number(column: int, numbers: Sequence[int]) -> str | None:
    return "n" if column in numbers else None


def more(summary: Part, *inside: Part) -> Html:
    """What is shown when asked for."""
    return tag("details", tag("summary", summary), *inside)


def section(title: str, *inside: Part, wide: bool = False, missing: str = "") -> Html:
    """A part of the page; ``missing`` says why there is nothing in it."""
    inside = inside if any(inside) else (tag("p", f"{missing}.", class_="quiet"),)
    return tag("section", tag("h2", title), *inside, class_="full" if wide else None)


def facts(rows: Iterable[tuple[str, Part]], *, class_: str = "facts") -> Html:
    """Names, and what there is to say of each; nothing of what is empty."""
    return tag("dl", *(joined([tag("dt", name), tag("dd", text)]) for name, text in rows if text), class_=class_)


def typed(line: str, *, named: str) -> Html:
    """A line to type, with a button that copies it."""
    button = tag("button", "Copy", type="button", data_copy=True, aria_label=f"Copy {named}")
    return tag("p", tag("code", line, tabindex="0"), button, class_="replay")


def framed(title: str, body: Html, told: Mapping[str, object]) -> str:
    """A file: ``body`` with the style, the script, and what that has to tell."""
    data = json.dumps(told, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {"style": _asset("page.css"), "script": _asset("page.js"), "data": data, "body": body}
    return Template(_asset("page.html")).substitute(parts, title=html(title))


@cache
def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
