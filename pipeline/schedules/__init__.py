"""The schedule families, one pure function each, and the registry from name to function."""

import difflib
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from pipeline.schedule import Schedule, ScheduleError
from pipeline.schedules.gpipe import gpipe
from pipeline.schedules.interleaved import interleaved
from pipeline.schedules.naive import naive
from pipeline.schedules.one_f_one_b import one_f_one_b

Family = Callable[..., Schedule]

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "naive": naive,
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": interleaved,
    }
)
# Other spellings that people type, as they read after case and punctuation are dropped.
_ALIASES = MappingProxyType({"interleaved1f1b": "interleaved", "i1f1b": "interleaved", "onefoneb": "1f1b"})
# Families whose ranks may hold more than one stage.
LOOPED = frozenset({"interleaved"})


def canonical_name(text: str) -> str:
    """The registry's spelling of ``text``; case and punctuation are forgiven, an unknown name suggests the nearest."""
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    known = {re.sub(r"[^a-z0-9]", "", name): name for name in FAMILIES} | dict(_ALIASES)
    if plain in known:
        return known[plain]
    near = difflib.get_close_matches(plain, known, n=1, cutoff=0.4)
    hint = f"did you mean {known[near[0]]!r}? " if near else ""
    raise ScheduleError(f"unknown schedule {text!r}: {hint}Known: {', '.join(FAMILIES)}")


def build(name: str, *, ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """The schedule ``name`` for P = ``ranks``, V = ``virtual`` stages per rank and M = ``microbatches``.

    Raises ``ScheduleError`` for an unknown name, counts below one, or a V that the family cannot have.
    """
    family = canonical_name(name)
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("virtual", virtual)):
        if value < 1:
            raise ScheduleError(f"{what} is {value}: expected at least 1")
    if family in LOOPED:
        return FAMILIES[family](ranks=ranks, microbatches=microbatches, virtual=virtual)
    if virtual != 1:
        raise ScheduleError(
            f"virtual is {virtual}, but {family} has one stage per rank: use virtual=1, or a schedule out of "
            f"{', '.join(sorted(LOOPED))}"
        )
    return FAMILIES[family](ranks=ranks, microbatches=microbatches)
