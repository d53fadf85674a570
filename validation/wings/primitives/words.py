"""Kinds of parallelism in words, and as data: what each saves and costs, and how it was validated."""

from collections.abc import Iterator
from dataclasses import asdict

from pipeproof.core.mismatch import small
from pipeproof.pipeline.sizes import some
from pipeproof.reports.columns import Column, table
from pipeproof.wings.primitives.primitive import PRIMITIVES, SYMBOLS, Figures, Primitive

_NAMES = max(map(len, PRIMITIVES)) + 2  # the width of their column


def describe(one: Primitive, found: Figures, width: int | None) -> Iterator[str]:
    """Its lines on a terminal so wide."""
    ran = f"{found.passed} of {found.seeds} seeds pass on {some(found.ranks, 'rank')}, torch {found.torch}"
    worst = f"worst error {small(found.worst)}, rounding {small(found.floor)}" if found.worst else "bit for bit"
    rows = [
        ("  saves", " ".join(one.saves)),
        ("  costs", " ".join(one.costs)),
        ("  by", one.implementation),
        ("  here", f"{ran}: {found.parameters} gradients each, {worst}"),
        ("  source", one.source),
    ]
    yield f"{one.name:<{_NAMES}}{one.title}"
    yield table([Column(""), Column("")], rows, width)


LEGEND = (
    "\n".join(f"  {letter} {what}" for letter, what in SYMBOLS.items()) + "\n"
    "Bytes: 2 a weight, 4 a gradient, 12 for Adam.\n"
    "`pipeproof validate --primitive tp` runs one; `--stack pp=2,tp=2,ddp=2` runs several together."
)


def as_data(one: Primitive, found: Figures) -> dict[str, object]:
    """It and its figures, as JSON has them."""
    formulas = {what: {"formula": text, "of": of} for what, (text, of) in (("saves", one.saves), ("costs", one.costs))}
    own = {"name": one.name, "title": one.title, "axes": list(one.axes), **formulas}
    return {**own, "implementation": one.implementation, "source": one.source, "validated": asdict(found)}
