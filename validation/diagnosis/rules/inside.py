"""What went wrong inside a stage, where ranks share the work of its modules.

A what-if changes what a module is given, or what it puts out, in all layers or in one: a factor of a number of ranks,
as of a sum that is taken twice or of a mean in its place, or nothing at all. One that gives every loss and every
gradient is told. Where none does, what is right says how far it is known.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pipeproof.diagnosis.evidence import Evidence, ModelBeside
from pipeproof.diagnosis.rules.replayed import Changes, Fit
from pipeproof.diagnosis.what_if import same_loss
from pipeproof.judging.cause import Cause
from pipeproof.judging.verdict import Mismatch
from pipeproof.reference.outputs import module_of
from pipeproof.reference.passage import Passage

_MOST = 1 << 27  # numbers that the gradients of all what-ifs may have
_ONE_FACTOR = 1e-6  # how far apart, relative to their size, factors are that are one


def inside(evidence: Evidence) -> list[Cause]:
    """The what-if inside the one stage that there is that gives every loss and every gradient."""
    beside = evidence.beside
    if beside is None or evidence.stages > 1 or evidence.differs("replicas") or evidence.differs("presence"):
        return []
    fit, tried = Fit(evidence, beside), list(_changes(evidence, beside))
    size = sum(one.numel() for one in evidence.expected.gradients.values() if one is not None)
    if size * len(tried) > _MOST or not fit.possible:
        return []
    wrong = evidence.wrong("gradient")
    for changes in tried:
        if fit.moves(changes) >= wrong and len(fit.microbatches(changes)) == evidence.microbatches:
            detail = f"as if {changes.text}"
            return [Cause("computation", rank=_only_rank(evidence), stage=0, detail=detail)]
    return []


def other_forward(evidence: Evidence) -> list[Cause]:
    """That the forward of the one stage that there is computed something else, or took other data; by elimination.

    Every loss is wrong that any rank reports, the weights are all right, and losses are no others' and no multiple.
    """
    losses = [one for one in evidence.verdict.mismatches if one.law == "loss"]
    begun = evidence.verdict.law("initial-weights")
    known = begun.outcome == "pass" and begun.checked and not begun.left_out
    besides = any(map(evidence.differs, ("presence", "buffers", "microbatches")))
    if evidence.beside is None or evidence.stages > 1 or not known or besides or _told(losses, evidence):
        return []
    detail = "every loss is wrong, and of no other microbatch; its weights are right, and no factor gives its gradients"
    data = Cause("swapped-data", rank=_only_rank(evidence), stage=0, detail="or its inputs or targets are not its own")
    return [replace(data, kind="computation", detail=detail, instead=(data,))]


def _told(losses: Sequence[Mismatch], evidence: Evidence) -> bool:
    """Whether losses are right, another's or all of one multiple: then these say what it is, or do not tell enough."""
    right, seen = evidence.expected.losses, [one.found for one in losses]
    rows = enumerate(row[evidence.number] for row in evidence.observed.ranks)
    reported = {(rank, m) for rank, row in rows for m, _ in zip(row.share or (), row.losses, strict=False)}
    if not reported or {(one.rank, one.microbatch) for one in losses} != reported:
        return True
    numbers = [one for one in seen if isinstance(one, float) and math.isfinite(one)]
    others = any(same_loss(one, other) for one in numbers for other in right)
    ratios = [one.ratio for one in losses if one.ratio is not None]
    multiple = all(abs(one / ratios[0] - 1) < _ONE_FACTOR for one in ratios) if ratios and ratios[0] else True
    return len(numbers) < len(seen) or others or (multiple and evidence.microbatches > 1)


def first_of_backward(evidence: Evidence) -> Sequence[str]:
    """Where along the backward gradients are wrong first, if losses are right and what is used later is; else empty."""
    used, wrong = evidence.used, evidence.wrong("gradient", "replicas", "presence")
    if not used or not wrong or evidence.differs("loss"):
        return ()
    last = max(used[name] for _, name in wrong)
    stage, name = min(site for site in wrong if used[site[1]] == last)
    later = sum(time > last for time in used.values())
    told = f"first wrong in the backward: stage {stage}, {name}: the {later} parameters used after it are right"
    return (told,) if later else ()


def _only_rank(evidence: Evidence) -> int | None:
    return evidence.placement[0] if evidence.ranks == 1 else None


def _changes(evidence: Evidence, beside: ModelBeside) -> Iterator[Changes]:
    """What may have happened to what passes inside; where losses are right, on its way back alone."""
    forward = evidence.differs("loss")
    named = _alike([name for name in beside.modules if name], lambda name: name)
    placed = _alike(beside.places, module_of)
    for factor in _factors(evidence.ranks):
        for text, into in () if forward else named:
            told = "no gradient flowed back" if not factor else f"the gradient was {factor:g} times"
            by = "through" if not factor else "what flows back through"
            yield Changes(f"{told} {by} the input of {text}", 0, inside=(Passage(into=into, back=_times(factor)),))
        for text, places in placed:
            number = f"output {places[0].split()[1]} of {text}"
            times = f"{factor:g} times what it is"
            if forward and factor:
                yield Changes(f"{number} were {times}", 0, inside=(_both(places, factor, factor),))
                yield Changes(f"{number} were {times}, and its gradient right", 0, inside=(_both(places, factor, 1.0),))
            elif not forward:
                text = f"the gradient of {number} were {times if factor else 'lost'}"
                yield Changes(text, 0, inside=(_both(places, 1.0, factor),))


def _alike(names: Sequence[str], module: Callable[[str], str]) -> list[tuple[str, tuple[str, ...]]]:
    """``names`` of what is alike in all layers, together; then each of several by itself. With words for them."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        number = name.split()[1] if " of " in name else ""
        groups.setdefault((re.sub(r"\b\d+\b", "*", module(name)), number), []).append(name)
    alike = [(text.removeprefix("*."), group) for (text, _), group in groups.items() if len(group) > 1]
    every = [(f"each {text}", tuple(group)) for text, group in alike]
    return [*every, *((module(name), (name,)) for name in names if module(name))]


def _factors(ranks: int) -> list[float]:
    sizes = [n for n in range(2, ranks + 1) if ranks % n == 0]
    return [*map(float, sizes), *(1 / n for n in sizes), 0.0]


def _both(places: Sequence[str], there: float, back: float) -> Passage:
    return Passage(places, there=_times(there), back=_times(back))


def _times(factor: float) -> Callable[[Any], Any]:
    return lambda tensors: tuple(None if one is None else one * factor for one in tensors)
