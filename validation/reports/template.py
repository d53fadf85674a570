"""Files from ``templates/``: pages, pictures and reports, with all inserted values escaped."""

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from pipeproof.core.verdict import small
from pipeproof.pipeline.sizes import some, three_digits
from pipeproof.reports.colours import step_of

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values: object) -> str:
    """Render ``template`` with ``values``."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, FunctionLoader, StrictUndefined  # commands that write no such file do without

    made = Environment(
        autoescape=lambda name: name is None or not name.endswith(".md"),
        loader=FunctionLoader(_text),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    made.filters |= {"some": some, "digits": three_digits, "share": "{:.1%}".format}
    made.filters["small"] = lambda value: "-" if value is None else small(value)
    made.filters["number"] = lambda value: "-" if value is None else f"{value:.9g}"
    made.filters["step"] = lambda one: step_of(one.error, one.limit)
    made.filters["gib"] = lambda size: three_digits(size / 2**30)
    made.filters["points"] = lambda length: f"{round(length, 2):g}"
    made.filters["uri"] = lambda file: Path(file).as_uri() if Path(file).is_absolute() else None
    made.globals |= {"style": _text("page.css"), "script": _text("page.js")}
    return made


def _text(name: str) -> str:
    return (files(__package__) / "templates" / name).read_text(encoding="utf-8")
