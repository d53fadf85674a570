"""Sums that ranks form together, those of one replica or all replicas: of what each has alone, nobody has the sum."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from pipeproof.core.cause import Cause
from pipeproof.diagnosis.limits import SHORT
from pipeproof.foreign.crossings import near
from pipeproof.observers.sketch import Sketch, sketch
from pipeproof.pipeline.sizes import first_few
from pipeproof.reference.step import Site

_IN_PARTS = "{} of its gradients are parts of one sum on ranks {}, and nobody added them up"
_IN_REPLICAS = (
    "{} of its gradients are not the same on ranks {}, and together they are what is due: they were reduced before all "
    "was added to them, over other ranks, or not at all"
)
_IN_OTHERS = "gradients are sums over other ranks than those that have the stage: {}"
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


def of_other_ranks(ranks: Sequence[Wrong], alone: Sequence[Mapping[str, Sketch]]) -> Iterator[Cause]:
    """Gradients that were added up over other ranks than those that have the same: each is a multiple of the sum of
    those that these ranks have ``alone`` in its place, and all of a rank are the same multiple.

    Tried are all ranks, those that are so many apart, so many side by side, and those that fit best.
    """
    count = len(ranks)
    sizes = [size for size in range(2, count + 1) if count % size == 0]
    beside = [tuple(range(k, k + size)) for size in sizes for k in range(0, count, size)]
    apart = [tuple(range(k, count, count // size)) for size in sizes for k in range(count // size)]
    found, stages = dict[tuple[int, ...], list[int]](), set[int]()
    for rank, wrong in enumerate(ranks):
        due = {one for one, those in enumerate(alone) if those.keys() == alone[rank].keys()}
        tried = dict.fromkeys((*beside, *apart, _fitting(wrong, alone, alone[rank]) if wrong else ()))
        groups = [one for one in tried if rank in one and len(one) > 1 and {*one} != due]
        over = next((one for one in groups if _are_sums(wrong, [alone[other] for other in one], alone[rank])), None)
        if over is not None:
            found.setdefault(over, []).append(rank)
            stages |= {stage for stage, _ in wrong}
    if found:
        told = [f"over ranks {_few(over)} on rank{'s' * (len(on) > 1)} {_few(on)}" for over, on in found.items()]
        every = tuple(sorted(rank for on in found.values() for rank in on))
        detail = _IN_OTHERS.format("; ".join(told))
        yield Cause("misplaced", ranks=every, stages=tuple(sorted(stages)), detail=detail)


def at_other_stages(ranks: Sequence[Wrong]) -> Iterator[Cause]:
    """Gradients that lie at parameters of other stages, where each that is wrong is what is due of another that is."""
    every = {site: (rank, *pair) for rank, wrong in enumerate(ranks) for site, pair in wrong.items()}
    there = {
        site: next((one for one, (_, _, due) in every.items() if one[0] != site[0] and _is_of(seen, due)), None)
        for site, (_, seen, _) in every.items()
    }
    of = {site: one for site, one in there.items() if one is not None and not every[site][1].is_like(every[site][2])}
    if of and len(of) == len(every):
        own, stages = ({at(site) for site in of} for at in (lambda site: every[site][0], lambda site: site[0]))
        told = first_few([f"the gradient of {name} is that of {other}" for (_, name), (_, other) in of.items()])
        alone = min(own) if len(own) == 1 else None
        more = tuple(sorted(own)) if len(own) > 1 else ()
        yield Cause("misplaced", rank=alone, ranks=more, stages=tuple(sorted(stages)), detail=told)


def _is_of(seen: Sketch, due: Sketch) -> bool:
    """Whether what is ``seen`` is what is ``due`` elsewhere, and no chance: of few numbers many are alike."""
    return bool(seen.norm) and seen.shape == due.shape and math.prod(seen.shape) >= SHORT and seen.is_like(due)


def _fitting(wrong: Wrong, alone: Sequence[Mapping[str, Sketch]], own: Mapping[str, Sketch]) -> tuple[int, ...]:
    """The ranks whose sums, in the places that ``own`` has them at, add up to what is seen, by least squares."""
    places = [list(own).index(name) for _, name in wrong if name in own]
    forms = [(one.shape, one.dtype) for one in own.values()]
    ranks = [rank for rank, those in enumerate(alone) if [(one.shape, one.dtype) for one in those.values()] == forms]
    sizes = [seen.norm or 1.0 for seen, _ in wrong.values()]
    if len(places) < len(wrong) or not all(map(math.isfinite, sizes)):
        return ()

    def numbers(those: Sequence[Sketch]) -> list[float]:
        return [number / size for one, size in zip(those, sizes, strict=True) for number in one.projections]

    every = [numbers([list(alone[rank].values())[at] for at in places]) for rank in ranks]
    matrix, seen = (
        torch.tensor(one, dtype=torch.float64) for one in (every, numbers([one for one, _ in wrong.values()]))
    )
    if not matrix.isfinite().all():
        return ()
    found = torch.linalg.lstsq(matrix.T, seen[:, None], driver="gelsd").solution[:, 0].abs()
    return tuple(rank for rank, one in zip(ranks, found.tolist(), strict=True) if one > found.max() / 2)


def _few(ranks: Sequence[int]) -> str:
    return first_few(ranks)


def _are_sums(wrong: Wrong, group: Sequence[Mapping[str, Sketch]], own: Mapping[str, Sketch]) -> bool:
    """Whether what is seen is what a ``group`` of ranks have in the same places, added up, all by one factor."""
    places, factors = {name: k for k, name in enumerate(own)}, list[float | None]()
    told = len(wrong) > 1 and any(math.prod(seen.shape) >= SHORT for seen, _ in wrong.values())  # and not by chance
    if not told or len({len(those) for those in group}) > 1 or any(name not in places for _, name in wrong):
        return False
    for (_, name), (seen, _) in wrong.items():
        parts = [list(those.values())[places[name]] for those in group]
        alike = len({(one.shape, one.dtype) for one in parts}) == 1
        factors.append(_times(seen, reduce(Sketch.plus, parts)) if alike else None)
    return all(near(one, factors[0]) for one in factors)


def _times(seen: Sketch, whole: Sketch) -> float | None:
    """How many times a sum it is; None if it is no multiple. Of a sum nobody knows the very norm."""
    size = sum(one**2 for one in whole.projections) or math.inf
    found = sum(a * b for a, b in zip(seen.projections, whole.projections, strict=True)) / size
    return found if seen.is_like(whole.times(found)) else None


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
