"""Sums that ranks form together, those of one replica or all replicas: of what each has alone, nobody has the sum."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from torch import Tensor

from pipeproof.judging.cause import Cause
from pipeproof.observers.sketch import Sketch, sketch
from pipeproof.reference.step import Site

_IN_PARTS = "{} of its gradients are parts of one sum on ranks {}, and nobody added them up"
_IN_REPLICAS = (
    "{} of its gradients are not the same on ranks {}, and together they are what is due: they were reduced before all "
    "was added to them, or not at all"
)
Wrong = Mapping[Site, tuple[Sketch, Sketch]]  # of gradients that are not what they must be: as seen, and as due


def sketched(stage: int, names: Iterable[str], seen: Mapping[str, Any], due: Mapping[str, Tensor | None]) -> Wrong:
    """Of gradients with these ``names``, what is ``seen`` and what is ``due``, where both are there."""
    pairs = ((name, seen.get(name), due[name]) for name in names)
    return {(stage, n): (sketch(one), sketch(it)) for n, one, it in pairs if one is not None and it is not None}


def not_summed(ranks: Sequence[Wrong], replicas: Sequence[int]) -> Iterator[Cause]:
    """Gradients that ranks of one of the ``replicas`` each have a part of: added up, they are what is due.

    Or replicas have, and nobody added them up, or not all of them.
    """
    found: dict[tuple[int, tuple[int, ...], str], list[str]] = {}
    for site in dict.fromkeys(site for wrong in ranks for site in wrong):
        every = tuple(rank for rank, wrong in enumerate(ranks) if site in wrong)
        for replica in sorted({*replicas}):
            own = tuple(rank for rank in every if replicas[rank] == replica)
            if len(own) > 1 and _are_parts([ranks[rank][site] for rank in own]):
                found.setdefault((site[0], own, _IN_PARTS), []).append(site[1])
        each = len(every) > 1 and len({replicas[rank] for rank in every}) == len(every)
        if each and _are_replicas([ranks[rank][site] for rank in every]):
            found.setdefault((site[0], every, _IN_REPLICAS), []).append(site[1])
    for (stage, own, told), names in found.items():
        alone = names[0] if len(names) == 1 else None
        detail = told.format(len(names), ", ".join(map(str, own)))
        yield Cause("not-reduced", rank=own[0], stage=stage, parameter=alone, detail=detail)


def _are_parts(pairs: Sequence[tuple[Sketch, Sketch]]) -> bool:
    """Whether what is seen is, added up, what is due of each."""
    whole = _whole(pairs)
    return whole is not None and all(whole.is_like(due) for _, due in pairs)


def _are_replicas(pairs: Sequence[tuple[Sketch, Sketch]]) -> bool:
    """Whether what is seen is not one, and is, added up or averaged, what is due of each."""
    whole, seen = _whole(pairs), [one for one, _ in pairs]
    if whole is None or all(one.is_like(seen[0]) for one in seen):
        return False
    return any(all(whole.is_like(due.times(times)) for _, due in pairs) for times in (1, len(pairs)))


def _whole(pairs: Sequence[tuple[Sketch, Sketch]]) -> Sketch | None:
    """All that is seen, added up; None where it is not of one form."""
    alike = len({(one.shape, one.dtype) for pair in pairs for one in pair}) == 1
    return reduce(Sketch.plus, (one for one, _ in pairs)) if alike else None
