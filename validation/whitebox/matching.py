"""Match a step's parameters with the reference's: by identity, name, mapping or content."""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pipeproof.core.contract import Names
from pipeproof.core.tolerance import same_bits
from pipeproof.core.verdict import describe_error

_SEVERAL = "several parameters of the reference have its weights: say which it is, with names="
Index = tuple[int, int]  # parameter k in part i


@dataclass(frozen=True)
class Local:
    """A parameter under the step's name.

    said: its name under the user's mapping. identical: the reference's name for the same object. content: digest before
    the step. Each is None if unknown.
    """

    name: str
    said: str | None = None
    identical: str | None = None
    content: bytes | None = None


@dataclass(frozen=True)
class Matched:
    """Reference names by place, and reasons for places without one."""

    names: Mapping[Index, str]
    unmatched: Mapping[Index, str]


class NamesError(ValueError):
    """Raised for a ``names=`` that yields no name."""


def rename(names: Names | None, name: str, *, rank: int = 0, chunk: int = 0) -> str | None:
    """Map ``name`` by the user's function, or by the longest fitting prefix.

    A function receives the name, and with three arguments also the rank and the module's number there. Raises
    ``NamesError`` for its errors and for other results.
    """
    if names is None:
        return None
    try:
        if isinstance(names, Mapping):
            fitting = max((prefix for prefix in names if name.startswith(prefix)), key=len, default=None)
            made = name if fitting is None else names[fitting] + name[len(fitting) :]
        else:
            made = names(name, rank, chunk) if _wants(names) == 3 else names(name)
    except Exception as error:  # any type: user code
        raise NamesError(f"names= raised {describe_error(error)} for {name}") from error
    if not isinstance(made, str | None):
        raise NamesError(f"names= gives a {type(made).__name__} for {name}: expected a name, or None")
    return made


def _wants(function: Callable[..., str]) -> int:
    """Count required arguments; those with defaults belong to the user."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # C functions reveal no signature
        return 1
    return sum(one.default is one.empty for one in parameters)


def match(parts: Sequence[Sequence[Local]], known: Mapping[str, bytes | None]) -> Matched:
    """Match each part's parameters with the reference's; ``known``: contents by name, in order.

    A part whose names and contents all agree keeps its names. Otherwise content outranks names: a copied slice of a
    ``Sequential`` counts from 0 again.
    """
    found = [_match_part(part, known) for part in parts]
    guessed = {(number, k) for number, (_, guesses) in enumerate(found) for k in guesses}
    names = {(number, k): name for number, (sure, guesses) in enumerate(found) for k, name in (sure | guesses).items()}
    every = {(number, k): local for number, part in enumerate(parts) for k, local in enumerate(part)}
    why = {place: _why(local, known) for place, local in every.items() if place not in names}
    if guessed and (why or len(set(names.values())) < len(names)):
        # With any misfit, matches by neighbours alone are mere guesses.
        for place in guessed:
            del names[place]
            why[place] = _SEVERAL
    return Matched(names, why)


def with_copies(
    found: Matched, gradients: Sequence[Sequence[Tensor | None]], several: Callable[[], Collection[str]]
) -> Matched:
    """Match unmatched parameters whose gradient equals another part's, bit for bit, as copies.

    Names reveal nothing here, but summing copies makes gradients equal. ``several``: the reference's parameters with
    several uses; others have no copies.
    """
    names = dict(found.names)
    for part, k in found.unmatched:
        observed = gradients[part][k]
        if observed is not None and bool(observed.any()):
            alike = {n for (at, j), n in found.names.items() if at != part and _equal(observed, gradients[at][j])}
            alike &= set(several()) if alike else set()
            if len(alike) == 1:
                names[part, k] = alike.pop()
    return Matched(names, {place: why for place, why in found.unmatched.items() if place not in names})


def _equal(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and same_bits(one, other)


def _match_part(part: Sequence[Local], known: Mapping[str, bytes | None]) -> tuple[dict[int, str], dict[int, str]]:
    """Return a part's names by number: sure ones, and guesses by neighbours."""
    if any(local.said is not None for local in part):
        return {k: one.said for k, one in enumerate(part) if one.said is not None and one.said in known}, {}
    sure = {k: one.identical for k, one in enumerate(part) if one.identical is not None}
    left = {k: one for k, one in enumerate(part) if k not in sure}
    renamed = {part[k].name: name for k, name in sure.items()}

    def is_named(one: Local) -> bool:  # as in the reference, with its weights; without any, as its neighbours are
        agrees = as_mates(one.name, renamed) == one.name if one.content is None else one.content == known.get(one.name)
        return one.name in known and agrees

    if all(map(is_named, left.values())):
        return sure | {k: one.name for k, one in left.items()}, {}
    sure |= dict(_by_content(left, known))
    guesses = dict(_by_neighbours(part, sure, known))
    renamed = {part[k].name: name for k, name in (sure | guesses).items()}
    free = known.keys() - {*sure.values(), *guesses.values()}
    contents = {one for one in known.values() if one is not None}  # whose parameter a name alone may not tell
    rest = {k: as_mates(one.name, renamed) for k, one in left.items() if k not in sure | guesses}
    return sure | {k: name for k, name in rest.items() if name in free and part[k].content not in contents}, guesses


def as_mates(name: str, renamed: Mapping[str, str]) -> str:
    """Rename ``name`` as its nearest neighbours were, by prefix; unchanged if they disagree.

    A layer that counts from 0 again renames all its parameters.
    """

    def alike(one: Sequence[str], other: Sequence[str]) -> int:  # leading parts
        pairs = enumerate(zip(one, other, strict=False))
        return next((k for k, (a, b) in pairs if a != b), min(len(one), len(other)))

    made: dict[int, set[str]] = {}
    own = name.split(".")
    for mate, its in renamed.items():
        old, new = mate.split("."), its.split(".")
        prefix = len(old) - (same := alike(old[::-1], new[::-1]))
        if own[:prefix] == old[:prefix]:
            to = [*new[: len(new) - same], *own[prefix:]]
            made.setdefault(alike(own, old), set()).add(".".join(to))
    nearest = made[max(made)] if made else set[str]()
    return nearest.pop() if len(nearest) == 1 else name


def _by_content(left: Mapping[int, Local], known: Mapping[str, bytes | None]) -> Iterator[tuple[int, str]]:
    """Yield parameters with unique content on both sides."""
    holders: dict[bytes, list[str]] = {}
    for name, content in known.items():
        if content is not None:
            holders.setdefault(content, []).append(name)
    copies = Counter(one.content for one in left.values())
    for k, one in left.items():
        found = holders.get(one.content, []) if one.content is not None else []
        if len(found) == 1 and copies[one.content] == 1:
            yield k, found[0]


def _by_neighbours(
    part: Sequence[Local], sure: Mapping[int, str], known: Mapping[str, bytes | None]
) -> Iterator[tuple[int, str]]:
    """Yield parameters with ambiguous content, by distance to sure ones: both neighbours must agree."""
    order = list(known)
    for k, one in enumerate(part):
        if k in sure or one.content is None:
            continue
        before = max((j for j in sure if j < k), default=None)
        after = min((j for j in sure if j > k), default=None)
        pointed = {order.index(sure[j]) + k - j for j in (before, after) if j is not None}
        places = {place for place in pointed if 0 <= place < len(order) and known[order[place]] == one.content}
        if len(places) == 1 and order[min(places)] not in sure.values():
            yield k, order[min(places)]


def _why(one: Local, known: Mapping[str, bytes | None]) -> str:
    if one.said is not None:
        return f"unknown to the reference, also as {one.said!r}, which names= makes of it"
    if one.content is not None and one.content in known.values():
        return _SEVERAL
    return "unknown to the reference, by its name and by its weights"
