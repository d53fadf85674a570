"""Schedule families, one pure function each, and the registry from name to function."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from pipeproof.pipeline.schedule import Schedule, ScheduleError
from pipeproof.pipeline.schedules.dual_pipe_v import dual_pipe_v
from pipeproof.pipeline.schedules.gpipe import gpipe
from pipeproof.pipeline.schedules.interleaved import interleaved
from pipeproof.pipeline.schedules.looped_bfs import looped_bfs
from pipeproof.pipeline.schedules.naive import naive
from pipeproof.pipeline.schedules.one_f_one_b import one_f_one_b
from pipeproof.pipeline.schedules.v_half import v_half
from pipeproof.pipeline.schedules.v_min import v_min
from pipeproof.pipeline.schedules.zb_h1 import zb_h1
from pipeproof.pipeline.schedules.zb_h2 import zb_h2
from pipeproof.pipeline.schedules.zb_v import zb_v
from pipeproof.pipeline.sizes import MOST_ACTIONS, MOST_LAYERS, MOST_MICROBATCHES, MOST_RANKS, SHOWN, check_count

Family = Callable[..., Schedule]

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "naive": naive,
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": interleaved,
        "looped-bfs": looped_bfs,
        "zb-h1": zb_h1,
        "zb-h2": zb_h2,
        "zb-v": zb_v,
        "v-half": v_half,
        "v-min": v_min,
        "dualpipev": dual_pipe_v,
    }
)
# Families with any number of stages per rank, and families with exactly two; all others have one.
LOOPED = frozenset({"interleaved", "looped-bfs", "zb-h1"})
VEE = frozenset({"zb-v", "v-half", "v-min", "dualpipev"})
# Families whose backwards come in two parts, I and W.
SPLIT = frozenset({"zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipev"})
# Other spellings that people type, as they read after case and punctuation are dropped.
_ALIASES = MappingProxyType(
    {
        "interleaved1f1b": "interleaved",
        "i1f1b": "interleaved",
        "onefoneb": "1f1b",
        "pipedreamflush": "1f1b",
        "bfs": "looped-bfs",
        "zb1p": "zb-h1",
        "interleavedzerobubble": "zb-h1",
        "izb": "zb-h1",
        "zb2p": "zb-h2",
        "zbvzerobubble": "zb-v",
    }
)


def nearest(text: str, known: Iterable[str]) -> str:
    """``did you mean 'x'? `` with the few names that begin with ``text``, or the most similar one; or nothing.

    A mapping's values replace its keys.
    """
    names = {name.lower(): name for name in known}
    text = text.lower()
    near = [name for name in names if name.startswith(f"{text}-")]
    if not 0 < len(near) <= SHOWN:
        near = difflib.get_close_matches(text, names, n=1, cutoff=0.6)
    near = near or sorted((name for name in names if len(text) > 2 and text in name), key=len)[:1]
    said = [repr(known[name] if isinstance(known, Mapping) else names[name]) for name in near]
    return f"did you mean {' or '.join(filter(None, [', '.join(said[:-1]), said[-1]]))}? " if said else ""


def list_known(text: str, known: Sequence[str]) -> str:
    """End a sentence about a name outside ``known``: the nearest, and all."""
    return f"{nearest(text, known)}known are {', '.join(known)}"


def canonical_name(text: str) -> str:
    """The registry's spelling for ``text``; case and punctuation are forgiven, an unknown name suggests the nearest."""
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    known = {re.sub(r"[^a-z0-9]", "", name): name for name in FAMILIES} | dict(_ALIASES)
    if plain in known:
        return known[plain]
    if plain == "dualpipe":  # dual_pipe_v.py says why
        raise ScheduleError(
            f"{text!r} holds every stage on two ranks, which a schedule cannot say: use 'dualpipev', which is "
            "DualPipe folded at the middle"
        )
    file = "; a file of your own must end in .csv" if {".", "/"} & set(text) else ""
    raise ScheduleError(f"unknown schedule {text!r}: {nearest(plain, known)}known are {', '.join(FAMILIES)}{file}")


def virtuals(family: str, *, looped: int = 1) -> int:
    """Default stages per rank for ``family``: its only number, or ``looped`` if any will do."""
    return 2 if family in VEE else looped if family in LOOPED else 1


def build(name: str, *, ranks: int, microbatches: int, virtual: int | None = None) -> Schedule:
    """Build the schedule ``name`` for P = ``ranks``, V = ``virtual`` stages per rank and M = ``microbatches``.

    Raises ``ScheduleError`` for an unknown name, counts below one, or a V or M that the family cannot have.
    """
    family = canonical_name(name)
    virtual = virtuals(family) if virtual is None else virtual
    _check_sizes(family, ranks, microbatches, virtual)
    if family in LOOPED:
        return FAMILIES[family](ranks=ranks, microbatches=microbatches, virtual=virtual)
    can_have(family, virtual)
    return FAMILIES[family](ranks=ranks, microbatches=microbatches)


def can_have(family: str, virtual: int) -> None:
    """Raise ``ScheduleError`` if ``family`` has another number of stages per rank."""
    only = virtuals(family, looped=virtual)
    if virtual != only:
        has = "one stage" if only == 1 else "two stages"
        raise ScheduleError(
            f"virtual is {virtual}, but {family} has {has} per rank: use virtual={only}, or a schedule out of "
            f"{', '.join(sorted(LOOPED))}"
        )


def _check_sizes(family: str, ranks: int, microbatches: int, virtual: int) -> None:
    check_count("ranks", ranks, most=MOST_RANKS)
    check_count("microbatches", microbatches, most=MOST_MICROBATCHES)
    check_count("virtual", virtual, most=MOST_LAYERS)
    actions = ranks * virtual * microbatches * (3 if family in SPLIT else 2)
    if actions > MOST_ACTIONS:
        raise ScheduleError(
            f"{family} has {actions} actions with ranks {ranks}, virtual {virtual} and microbatches {microbatches}: "
            f"expected at most {MOST_ACTIONS}"
        )
