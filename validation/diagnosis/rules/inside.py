"""What went wrong inside a stage, where ranks share the work of its modules.

A what-if changes what a module is given, or what it puts out, in all layers or in one: a factor of a number of ranks,
as of a sum that is taken twice or of a mean in its place, or nothing at all. One that gives every loss and every
gradient is told. Where none does, what is right says how far it is known.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, takewhile
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from pipeproof.core.cause import Cause
from pipeproof.core.tolerance import error
from pipeproof.core.verdict import Mismatch
from pipeproof.diagnosis.evidence import Evidence, ModelBeside
from pipeproof.diagnosis.limits import ALIKE, CLOSE, SHORT
from pipeproof.diagnosis.members import Part, Stage
from pipeproof.diagnosis.rules.replayed import Changes, Fit
from pipeproof.diagnosis.what_if import same_loss
from pipeproof.pipeline.sizes import some
from pipeproof.reference.outputs import module_of
from pipeproof.reference.passage import Passage

_MOST = 1 << 27  # numbers that the gradients of all what-ifs may have
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class _Point:
    """What modules are given, or put out at ``places``: alike in all layers, or in one."""

    text: str
    into: tuple[str, ...] = ()
    places: tuple[str, ...] = ()

    def back(self, factor: float) -> Changes:
        """Its gradient is so many times what it is."""
        told = f"{factor:g} times what it is" if factor else "lost"
        passage = Passage(self.places, back=_times(factor), into=self.into)
        return Changes(f"the gradient of {self.text} were {told}", 0, inside=(passage,))

    def there(self, factor: float, back: float) -> Changes:
        """It is so many times what it is itself."""
        beside = "" if back == factor else ", and its gradient right"
        passage = Passage(self.places, there=_times(factor), back=_times(back))
        return Changes(f"{self.text} were {factor:g} times what it is{beside}", 0, inside=(passage,))


def inside(evidence: Evidence) -> list[Cause]:
    """The what-if inside stages that gives every loss and every gradient; none where that takes too long to find."""
    beside, members = evidence.beside, evidence.members
    shared = members is not None and any(len(stage.part.members) > 1 for stage in members.stages)
    if beside is None or not shared or evidence.differs("replicas") or evidence.differs("presence"):
        return []
    fit, points = Fit(evidence, beside), list(_points(beside))
    size = sum(one.numel() for one in evidence.expected.gradients.values() if one is not None)
    if size * len(points) > _MOST or not fit.possible:
        return []
    end = perf_counter() + _PATIENCE_S
    in_time = takewhile(lambda _: perf_counter() < end, points)
    tried = _forward(evidence, fit, in_time) if evidence.differs("loss") else _backward(evidence, fit, in_time)
    found = (one for one in tried if len(fit.microbatches(one)) == evidence.microbatches)
    return [_cause(evidence, one) for one in islice(found, 1)]


def _cause(evidence: Evidence, changes: Changes) -> Cause:
    """At the stages that hold the modules that it is about."""
    (passage,) = changes.inside
    modules = [*passage.into, *map(module_of, passage.places)]
    sites = [(stage, name) for stage, name in evidence.expected.gradients for one in modules if _within(name, one)]
    stages = tuple(sorted({stage for stage, _ in sites}))
    cause = Cause("computation", detail=f"as if {changes.text}")
    if len(stages) == 1:
        rank = evidence.placement[stages[0]] if evidence.ranks == evidence.stages else None
        return replace(cause, rank=rank, stage=stages[0])
    return replace(cause, stages=stages if len(stages) < evidence.stages else ())


def _within(parameter: str, module: str) -> bool:
    return parameter.startswith(f"{module}.")


def _forward(evidence: Evidence, fit: Fit, points: Iterable[_Point]) -> Iterator[Changes]:
    """What gives the first microbatch's loss. What is in several layers is tried in all of them together."""
    together: set[str] = set()
    for point in points:
        tried = len(point.places) == 1 and point.places[0] in together
        together.update(point.places)
        for factor in () if tried or not point.places else _factors(evidence.ranks)[:-1]:
            if fit.moves(point.there(factor, factor)):
                yield point.there(factor, factor)
                yield point.there(factor, 1.0)


def _backward(evidence: Evidence, fit: Fit, points: Iterable[_Point]) -> Iterator[Changes]:
    """What reaches all that is wrong, and nothing that is used after all of it."""
    wrong, used = evidence.wrong("gradient"), evidence.used
    last = max(used[name] for _, name in wrong)
    for point in points:
        moved = fit.moves(point.back(0.0))
        if moved >= wrong and max(used[name] for _, name in moved) == last:
            yield from map(point.back, _factors(evidence.ranks))


def _points(beside: ModelBeside) -> Iterator[_Point]:
    for text, into in _alike([name for name in beside.modules if name], lambda name: name):
        yield _Point(f"what {text} is given", into=into)
    for text, places in _alike(beside.places, module_of):
        yield _Point(f"output {places[0].split()[1]} of {text}", places=places)


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
    """Those of a sum over ranks that is taken twice, of a mean in its place; and nothing at all."""
    sizes = [n for n in range(2, ranks + 1) if ranks % n == 0]
    return [*map(float, sizes), *(1 / n for n in sizes), 0.0]


def _times(factor: float) -> Callable[[Any], Any]:
    return lambda tensors: tuple(None if one is None else one * factor for one in tensors)


def own_parts(evidence: Evidence) -> list[Cause]:
    """That what some modules in shards are given has, on each rank, the gradient of that rank's shard alone.

    What was used last of all that is wrong shows it: the gradients that flow on from there are mixed among ranks.
    """
    beside, members, used = evidence.beside, evidence.members, evidence.used
    wrong = evidence.wrong("gradient", "replicas")
    if beside is None or members is None or not used or not wrong or evidence.differs("presence"):
        return []
    last = max(used.get(name, 0) for _, name in wrong)
    number, _ = min(site for site in wrong if used.get(site[1], 0) == last)
    stage = members.stages[number]
    first = [k for k, name in sorted(stage.names.items()) if (number, name) in wrong and used.get(name) == last]
    after = sorted((time, name) for name, time in beside.modules.items() if time > last)
    cut = [name for _, name in after if _columns(stage, stage.part, name) is not None][:SHORT]
    for count in range(1, len(cut) + 1):
        for modules in combinations(cut, count):
            if first and all(_gives(beside, stage, part, modules, first, evidence) for _, part in stage.part.members):
                given = f"{' and '.join(modules)} {'are' if count > 1 else 'is'} given"
                told = f"the gradient of what {given} is, on every rank, that of its own shard alone"
                return [Cause("not-reduced", stage=number, parameter=stage.names[first[0]], detail=told)]
    return []


def _columns(stage: Stage, part: Part, module: str) -> slice | None:
    """Which of its outputs' columns a rank computes of a module whose weight is cut along its first dimension."""
    numbers = [k for k, name in stage.names.items() if name == f"{module}.weight" and k in part.shards]
    where = part.shards[numbers[0]] if numbers else None
    if where is None or where.flat or where.beside or where.shape is None or len(where.bounds) != 2:
        return None
    rows, columns = where.bounds
    return slice(*rows) if columns == (0, where.shape[1]) and rows != (0, where.shape[0]) else None


def _gives(
    beside: ModelBeside, stage: Stage, part: Part, modules: Sequence[str], first: Sequence[int], evidence: Evidence
) -> bool:
    """Whether parameters ``first`` have on one rank what that gives."""
    passages = []
    for module in modules:
        columns = _columns(stage, part, module)
        if columns is None:
            return False
        passages.append(Passage((f"output 0 of {module}",), back=_alone(columns)))
    made = [beside.played(m, passages) for m in range(evidence.microbatches)]
    for k in first:
        site, seen = (stage.index, stage.names[k]), part.gradients[k]
        parts = [one.gradients[site] for one in made if one is not None]
        given = [one.double().cpu() for one in parts if one is not None]
        if seen is None or len(given) < evidence.microbatches or seen.shape != given[0].shape:
            return False
        if error(seen.double(), torch.stack(given).sum(dim=0)) > ALIKE:
            return False
    return True


def _alone(columns: slice) -> Callable[[Any], Any]:
    def alone(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        kept = [None if one is None else torch.zeros_like(one) for one in gradients]
        for one, whole in zip(kept, gradients, strict=True):
            if one is not None and whole is not None:
                one[..., columns] = whole[..., columns]
        return tuple(kept)

    return alone


def other_forward(evidence: Evidence) -> list[Cause]:
    """That the forward of the one stage that there is computed something else, or took other data; by elimination.

    Every loss is wrong that any rank reports, the weights are all right, and losses are no others' and no multiple.
    """
    losses = [one for one in evidence.verdict.mismatches if one.law == "loss"]
    begun = [one for one in evidence.verdict.laws if one.name == "initial-weights" and one.outcome == "pass"]
    known = evidence.seen is not None and any(one.checked and not one.left_out for one in begun)
    besides = any(map(evidence.differs, ("presence", "buffers", "microbatches")))
    if evidence.beside is None or evidence.stages > 1 or not known or besides or _told(losses, evidence):
        return []
    if not evidence.beside.plain:
        return []  # numbers drawn otherwise, or another mode, give other losses too
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
    multiple = all(abs(one / ratios[0] - 1) < CLOSE for one in ratios) if ratios and ratios[0] else True
    return len(numbers) < len(seen) or others or (multiple and evidence.microbatches > 1)


def first_of_backward(evidence: Evidence) -> Sequence[str]:
    """Where along the backward gradients are wrong first, if losses are right and what is used later is; else empty."""
    used, wrong = evidence.used, evidence.wrong("gradient", "replicas", "presence")
    if not used or not wrong or evidence.differs("loss"):
        return ()
    last = max(used.get(name, 0) for _, name in wrong)
    if not last:
        return ()  # used outside its module, or nowhere
    stage, name = min(site for site in wrong if used.get(site[1], 0) == last)
    later = sum(used.get(name, 0) > last for _, name in evidence.gradients)  # not other names of one
    who = f"{some(later, 'parameter')} used after it {'is' if later == 1 else 'are'}"
    return (f"first wrong in the backward: stage {stage}, {name}: the {who} right",) if later else ()


def _only_rank(evidence: Evidence) -> int | None:
    return evidence.placement[0] if evidence.ranks == 1 else None
