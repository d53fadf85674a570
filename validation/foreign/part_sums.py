"""Sums that the ranks of one replica form together, as sequence parallelism does: of a part alone, nobody has a sum."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from pipeproof.judging.cause import Cause
from pipeproof.observers.sketch import Sketch, sketch
from pipeproof.reference.step import Site

Wrong = Mapping[Site, tuple[Sketch, Sketch]]  # of gradients that are not what they must be: as seen, and as due


def sketched(stage: int, names: Iterable[str], seen: Mapping[str, Any], due: Mapping[str, Tensor | None]) -> Wrong:
    """Of gradients with these ``names``, what is ``seen`` and what is ``due``, where both are there."""
    pairs = ((name, seen.get(name), due[name]) for name in names)
    return {(stage, n): (sketch(one), sketch(it)) for n, one, it in pairs if one is not None and it is not None}


def not_summed(ranks: Sequence[Wrong], replicas: Sequence[int]) -> Iterator[Cause]:
    """Gradients that ranks of one of the ``replicas`` each have a part of: added up, they are what is due."""
    found: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for site in dict.fromkeys(site for wrong in ranks for site in wrong):
        for replica in sorted({*replicas}):
            own = tuple(rank for rank, of in enumerate(replicas) if of == replica and site in ranks[rank])
            if len(own) > 1 and _are_parts([ranks[rank][site] for rank in own]):
                found.setdefault((site[0], own), []).append(site[1])
    for (stage, own), names in found.items():
        ranks_told = ", ".join(map(str, own))
        detail = f"{len(names)} of its gradients are parts of one sum on ranks {ranks_told}, and nobody added them up"
        alone = names[0] if len(names) == 1 else None
        yield Cause("not-reduced", rank=own[0], stage=stage, parameter=alone, detail=detail)


def _are_parts(pairs: Sequence[tuple[Sketch, Sketch]]) -> bool:
    """Whether what is seen is, added up, what is due of each."""
    seen, due = zip(*pairs, strict=True)
    whole, *others = seen
    if any((one.shape, one.dtype) != (whole.shape, whole.dtype) for one in (*seen, *due)):
        return False
    for one in others:
        whole = whole.plus(one)
    return all(whole.is_like(one) for one in due)
