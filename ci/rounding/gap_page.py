"""The page about tolerances: floors, the smallest faults and the gap between them, as Markdown."""

from collections import Counter
from collections.abc import Iterator, Sequence

from gaps import Gap, Row
from least_faults import FAULTS

from pipeproof.core.verdict import small

_MARKS = {"fail": "", "unknown": "?", "pass": "!"}

_INTRO = """\
# Rounding and the smallest faults

Made by `{command}`.

A *floor* is what rounding alone does to a gradient: *order* adds the microbatches in reverse, *rounding* compares with
fp64 (in fp64 itself, with weights that are one rounding off). The columns give the largest over all gradients.

A reference that cannot run in fp64, or draws other numbers there, has no floor of *rounding*. Then only what *order*
explains may pass, which is never more than would pass with both. What is larger is *unknown* where it is too small for
half a lost microbatch or for the size that no floor makes a pass (fp32: 1e-4), and where weights that are one rounding
off move the reference as far; else it is a fault. The law's line says that fp64 told nothing.

A fault's *effect* is how much it changes a gradient, relative to it, computed in fp64: of all its variants (which
token, microbatch, LayerNorm, boundary or stage) the one that is hardest to see, in the gradient that shows most of it.
The *gap*, in brackets, is effect over floor in that gradient, in decades; below zero the fault lies under the rounding.
"""

_LEGEND = """\
Tier B alone calls a fault without a mark *fail*. `?`: *unknown*, never a pass, for the effect is too large for rounding
and too small to be a lost microbatch, or rounding could hide one. `!`: it *passes*, so the fault is hidden. Tier A
compares bits: `=3/6` says that 3 variants of 6 change no bit of any gradient in that dtype, so that no comparison of
gradients can see them; without it every variant shows. A dash: no fault in that dtype, or the model has no such part.
"""


def page(rows: Sequence[Row], *, command: str, picture: str | None = None) -> str:
    """``rows``, with the faults explained; ``command`` made them and ``picture`` is the name of the file beside it."""
    parts = [_INTRO.format(command=command)]
    if picture is not None:
        parts.append(f"![Floors and the smallest faults over the number of microbatches]({picture})\n")
    parts += [_faults(), _LEGEND, "## The smallest gaps\n", smallest(rows)]
    for dtype in dict.fromkeys(row.dtype for row in rows):
        own = [row for row in rows if row.dtype == dtype]
        parts += [f"## {dtype}\n", "".join(f"- {line}\n" for line in in_words(own)), table(own)]
    return "\n".join(parts)


def in_words(rows: Sequence[Row]) -> Iterator[str]:
    """What ``rows`` of one dtype say: how small the gaps become, and which faults nothing or only bits can tell."""
    for fault in FAULTS:
        gaps = [gap for row in rows if (gap := row.gaps[fault.name])]
        if not gaps:
            continue
        least, most = min(gap.decades for gap in gaps), max(gap.decades for gap in gaps)
        counted = Counter(gap.outcome for gap in gaps)
        judged = ", ".join(f"{outcome} in {counted[outcome]}" for outcome in _MARKS if counted[outcome])
        line = f"*{fault.name}*: {least:+.1f} to {most:+.1f} decades; tier B says {judged} of {len(gaps)} rows"
        under = sum(gap.decades < 0 for gap in gaps)
        if under:
            line += f"; it lies under the rounding in {under}"
        unseen, variants = sum(gap.unseen for gap in gaps), sum(gap.variants for gap in gaps)
        bits = f"{unseen} of {variants} variants change no bit" if unseen else "bits differ in every variant"
        yield f"{line}; {bits}."


def table(rows: Sequence[Row]) -> str:
    """A line per row: floors, and every fault's effect with the gap in decades."""
    head = ["model", "M", "order", "rounding", *(fault.name for fault in FAULTS)]
    return _table(head, [_cells(row) for row in rows])


def smallest(rows: Sequence[Row]) -> str:
    """For every fault and dtype, the row in which it is hardest to see."""
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    return _table(["fault", *dtypes], [[fault.name, *_hardest(rows, fault.name, dtypes)] for fault in FAULTS])


def _hardest(rows: Sequence[Row], fault: str, dtypes: Sequence[str]) -> Iterator[str]:
    for dtype in dtypes:
        found = [(gap.decades, row, gap) for row in rows if row.dtype == dtype and (gap := row.gaps[fault])]
        if found:
            _, row, gap = min(found, key=lambda one: one[0])
            yield f"{cell(gap)} {row.model}, M = {row.microbatches}"
        else:
            yield "-"


def _cells(row: Row) -> list[str]:
    gaps = [cell(row.gaps[fault.name]) for fault in FAULTS]
    return [row.model, str(row.microbatches), small(row.permutation), small(row.rounding), *gaps]


def cell(gap: Gap | None) -> str:
    """``9.3e-06 (+1.7)?``."""
    if gap is None:
        return "-"
    unseen = f" ={gap.unseen}/{gap.variants}" if gap.unseen else ""
    return f"{small(gap.effect)} ({gap.decades:+.1f}){_MARKS[gap.outcome]}{unseen}"


def _faults() -> str:
    return "".join(f"- *{fault.name}*: {fault.summary}.\n" for fault in FAULTS)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "".join(f"| {' | '.join(map(str.ljust, line, widths))} |\n" for line in lines)
