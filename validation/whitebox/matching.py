"""Which parameter of the reference is which of a foreign step's: by identity, by name, by a mapping, by content."""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pipeproof.core.contract import Names
from pipeproof.core.tolerance import same_bits
from pipeproof.core.verdict import raised

_SEVERAL = "several parameters of the reference have its weights: say which it is, with names="
Index = tuple[int, int]  # the k-th parameter of the i-th part


@dataclass(frozen=True)
class Local:
    """One parameter as the step calls it.

    ``said`` is what the user's mapping makes of its name, ``identical`` the reference's name of the very same object,
    ``content`` the digest of its weights before the step, each None where it is not known.
    """

    name: str
    said: str | None = None
    identical: str | None = None
    content: bytes | None = None


@dataclass(frozen=True)
class Matched:
    """The reference's names by place, and for every place that has none, why."""

    names: Mapping[Index, str]
    unmatched: Mapping[Index, str]


class NamesError(ValueError):
    """A ``names=`` that does not tell a name."""


def renamed(names: Names | None, name: str, *, rank: int = 0, chunk: int = 0) -> str | None:
    """What the user's mapping makes of ``name``: a function, or prefixes of which the longest that fits is replaced.

    A function is given the name, and if it has three arguments also the rank and the number of the module on it.
    Raises ``NamesError`` where it raises, or gives no name.
    """
    if names is None:
        return None
    try:
        made = _renamed(names, name, rank, chunk)
    except Exception as error:  # no one type: it is the user's code
        raise NamesError(f"names= raised {raised(error)} for {name}") from error
    if not isinstance(made, str | None):
        raise NamesError(f"names= gives a {type(made).__name__} for {name}: expected a name, or None")
    return made


def _renamed(names: Names, name: str, rank: int, chunk: int) -> str:
    if not isinstance(names, Mapping):
        return names(name, rank, chunk) if _wants(names) == 3 else names(name)
    fitting = max((prefix for prefix in names if name.startswith(prefix)), key=len, default=None)
    return name if fitting is None else names[fitting] + name[len(fitting) :]


def _wants(function: Callable[..., str]) -> int:
    """How many arguments ``function`` must have; what has a default is the user's own."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # one that is written in C, of which nothing is known
        return 1
    return sum(one.default is one.empty for one in parameters)


def match(parts: Sequence[Sequence[Local]], known: Mapping[str, bytes | None]) -> Matched:
    """Match every part's parameters with those of the reference: ``known`` has their contents by name, in order.

    A part whose parameters are all named as the reference names them, with the same contents, is taken at its names. In
    others, content decides before the name: a copied slice of a ``Sequential`` counts from 0 again.
    """
    found = [_match_part(part, known) for part in parts]
    guessed = {(number, k) for number, (_, guesses) in enumerate(found) for k in guesses}
    names = {(number, k): name for number, (sure, guesses) in enumerate(found) for k, name in (sure | guesses).items()}
    every = {(number, k): local for number, part in enumerate(parts) for k, local in enumerate(part)}
    why = {place: _why(local, known) for place, local in every.items() if place not in names}
    if guessed and (why or len(set(names.values())) < len(names)):
        # Something does not fit, so what was told by its neighbours alone is no more than a guess.
        for place in guessed:
            del names[place]
            why[place] = _SEVERAL
    return Matched(names, why)


def with_copies(
    found: Matched, gradients: Sequence[Sequence[Tensor | None]], several: Callable[[], Collection[str]]
) -> Matched:
    """``found``, with strangers whose gradient is that of a parameter of another part, bit for bit, as its copies.

    A name tells nothing of them, but who sums the gradients of copies makes them equal. ``several`` tells which of the
    reference's parameters it uses in several places: others have no copies.
    """
    names = dict(found.names)
    for part, k in found.unmatched:
        seen = gradients[part][k]
        if seen is not None and bool(seen.any()):
            alike = {n for (at, j), n in found.names.items() if at != part and _equal(seen, gradients[at][j])}
            alike &= set(several()) if alike else set()
            if len(alike) == 1:
                names[part, k] = alike.pop()
    return Matched(names, {place: why for place, why in found.unmatched.items() if place not in names})


def _equal(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and same_bits(one, other)


def _match_part(part: Sequence[Local], known: Mapping[str, bytes | None]) -> tuple[dict[int, str], dict[int, str]]:
    """The names of a part's parameters, by number: those that are sure, and those that their neighbours alone tell."""
    if any(local.said is not None for local in part):
        return {k: one.said for k, one in enumerate(part) if one.said is not None and one.said in known}, {}
    sure = {k: one.identical for k, one in enumerate(part) if one.identical is not None}
    left = {k: one for k, one in enumerate(part) if k not in sure}
    told = {part[k].name: name for k, name in sure.items()}
    if all(_is_named(one, known, told) for one in left.values()):
        return sure | {k: one.name for k, one in left.items()}, {}
    sure |= dict(_by_content(left, known))
    guesses = dict(_by_neighbours(part, sure, known))
    told = {part[k].name: name for k, name in (sure | guesses).items()}
    rest = {k: as_mates(one.name, told) for k, one in left.items() if k not in sure | guesses}
    taken = {*sure.values(), *guesses.values()}
    named = {k: name for k, name in rest.items() if name in known and name not in taken and _nowhere(part[k], known)}
    return sure | named, guesses


def _is_named(one: Local, known: Mapping[str, bytes | None], told: Mapping[str, str]) -> bool:
    """Whether its name is the reference's, and its weights say so, too; or what lies beside it, where none are seen."""
    if one.content is None:
        return one.name in known and as_mates(one.name, told) == one.name
    return one.name in known and one.content == known[one.name]


def as_mates(name: str, told: Mapping[str, str]) -> str:
    """``name`` with what those nearest to it in the module have in place of a prefix; as it is where they differ.

    A layer that counts from 0 again does so with all that it holds.
    """
    made: dict[int, set[str]] = {}
    own = name.split(".")
    for mate, its in told.items():
        old, new = _prefixes(mate.split("."), its.split("."))
        if own[: len(old)] == old:
            made.setdefault(_shared(own, mate.split(".")), set()).add(".".join([*new, *own[len(old) :]]))
    nearest = made[max(made)] if made else set[str]()
    return nearest.pop() if len(nearest) == 1 else name


def _prefixes(one: list[str], other: list[str]) -> tuple[list[str], list[str]]:
    """What is left of both without the end that they share."""
    same = _shared(one[::-1], other[::-1])
    return one[: len(one) - same], other[: len(other) - same]


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """How many parts of two names are one, from the beginning on."""
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _by_content(left: Mapping[int, Local], known: Mapping[str, bytes | None]) -> Iterator[tuple[int, str]]:
    """Those whose content one parameter of the reference has, and no other of the part."""
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
    """Those of ambiguous content, by their distance from the nearest sure ones: both sides must point to one name."""
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


def _nowhere(one: Local, known: Mapping[str, bytes | None]) -> bool:
    """Whether no parameter of the reference has its content, so that only its name can tell."""
    return one.content is None or one.content not in known.values()


def _why(one: Local, known: Mapping[str, bytes | None]) -> str:
    if one.said is not None:
        return f"unknown to the reference, also as {one.said!r}, which names= makes of it"
    if one.content is not None and one.content in known.values():
        return _SEVERAL
    return "unknown to the reference, by its name and by its weights"
