"""What every page is written into: one file of HTML with its style and its script, which needs no network."""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from string import Template

from pipeproof.reports.page.markup import Html, html


def framed(title: str, body: Html, told: Mapping[str, object]) -> str:
    """A file: ``body`` with the style, the script, and what that has to tell."""
    data = json.dumps(told, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {"style": _asset("page.css"), "script": _asset("page.js"), "data": data, "body": body}
    return Template(_asset("page.html")).substitute(parts, title=html(title))


@cache
def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
