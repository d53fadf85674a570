"""Where sums of gradients broke: each action's addition is held against the microbatch's contribution it should be."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from validation.diagnosis.combination import counts_of
from validation.recording import Addition, Site
from validation.tolerance import precision_of

Gradients = Mapping[str, Tensor | None]
_COUNT = 1e-3  # how near to a whole number a coefficient must be to count as one


@dataclass(frozen=True)
class Broken:
    """A sum that is not what it should be: the kind of cause, at which stage, by which action, whose."""

    kind: str
    stage: int
    microbatches: tuple[int, ...] = ()
    action: str | None = None
    parameters: tuple[str, ...] = ()  # empty: all of the stage's
    factor: float | None = None
    detail: str = ""


def broken_additions(
    stage: int,
    additions: Sequence[Addition],
    parts: Sequence[Mapping[Site, Tensor | None]],
    *,
    repeated: Collection[int] = (),
) -> list[Broken]:
    """What is wrong with one stage's additions; ``parts[m]`` is what microbatch m should add to every site.

    ``repeated``: microbatches whose backward is known to have run more than once.
    """
    names = [name for site, name in parts[0] if site == stage]
    expected = [{name: part[stage, name] for name in names} for part in parts]
    added = _by_microbatch(additions)
    wrong = {
        m: [name for name in names if not _near(*added[m][name], expected[m][name])] if m in added else names
        for m in range(len(parts))
    }
    wrong = {m: bad for m, bad in wrong.items() if bad}
    if not wrong:
        return []
    whole = [name for name in names if any(part[name] is not None for part in expected)]
    if all(set(whole) <= {*bad, *_nothing(expected[m])} for m, bad in wrong.items()):
        total = _total(added, expected, sorted(wrong), whole)
        if total is not None and not any(total) and all(additions[-1].after[name] is None for name in whole):
            return [Broken("missing", stage, detail="no action added anything")]
        if total is not None:
            return counted(stage, total, repeated={*repeated, *_several(additions)})
    return list(_of_parameters(stage, added, expected, wrong))


def totals(seen: Gradients, expected: Sequence[Gradients], names: Sequence[str]) -> tuple[float, ...] | None:
    """How often each microbatch's contribution is in ``seen``, over all parameters of a stage together."""
    like = {name: next(g for part in expected if (g := part[name]) is not None) for name in names}
    rows = [torch.cat([_flat(part[name], like[name].numel()) for name in names]) for part in expected]
    whole = torch.cat([_flat(seen[name], like[name].numel()) for name in names])
    return counts_of(whole, rows, max(precision_of(one.dtype).most for one in like.values()))


def counted(stage: int, coefficients: Sequence[float], *, repeated: Collection[int] = ()) -> list[Broken]:
    """Coefficients of every microbatch's contribution in words; empty where each is 1.

    ``repeated`` microbatches were really added more than once.
    """
    off = [m for m, value in enumerate(coefficients) if abs(value - 1) > _COUNT]
    if not off:
        return []
    first = coefficients[off[0]]
    alike = all(abs(coefficients[m] - first) <= _COUNT * max(1.0, abs(first)) for m in off)
    whole = abs(first - round(first)) <= _COUNT and first > 1
    if alike and whole and set(off) <= set(repeated):
        return [Broken("doubled", stage, tuple(off), factor=first, detail=f"{_list(off)} added {round(first)} times")]
    if alike and len(off) == len(coefficients) and abs(first) > _COUNT:
        kind = "sign" if abs(first + 1) <= _COUNT else "scale"
        return [Broken(kind, stage, factor=first, detail=f"{first:.6g} times the expected")]
    if alike and abs(first) <= _COUNT:
        return [Broken("dropped", stage, tuple(off), detail=f"{_list(off)} added nothing")]
    if alike and whole and not round(first) == len(coefficients) > 2:  # as often as that, it was not divided by it
        return [Broken("doubled", stage, tuple(off), factor=first, detail=f"{_list(off)} counted {round(first)} times")]
    if alike:
        kind = "sign" if abs(first + 1) <= _COUNT else "scale"
        return [Broken(kind, stage, tuple(off), factor=first, detail=f"{_list(off)}: {first:.6g} times the expected")]
    lost = [m for m in off if abs(coefficients[m]) <= _COUNT]
    twice = [m for m in off if abs(coefficients[m] - 2) <= _COUNT]
    if len(lost) + len(twice) == len(off):
        detail = f"{_list(lost)} added nothing, {_list(twice)} counted twice"
        return [
            Broken(kind, stage, tuple(of), detail=detail) for kind, of in (("dropped", lost), ("doubled", twice)) if of
        ]
    text = ", ".join(f"{coefficients[m]:.4g} of microbatch {m}'s" for m in off)
    return [Broken("unequal-weights", stage, tuple(off), detail=text)]


def _total(
    added: Mapping[int, Mapping[str, tuple[Tensor | None, Tensor | None]]],
    expected: Sequence[Gradients],
    wrong: Sequence[int],
    names: Sequence[str],
) -> list[float] | None:
    """How much of each microbatch's contribution all actions added, all parameters of the stage taken as one vector."""
    total = [float(m not in wrong) for m in range(len(expected))]
    for m in wrong:
        if m not in added:
            continue
        deltas = {name: _delta(*added[m][name]) for name in names}
        if all(delta is None or not delta.any() for delta in deltas.values()):
            continue
        found = totals(deltas, expected, names)
        if found is None:
            return None
        total = [one + other for one, other in zip(total, found, strict=True)]
    return total


def _several(additions: Sequence[Addition]) -> set[int]:
    """Microbatches for which more than one action added to every gradient that there is."""
    counts: Counter[int] = Counter()
    last: Gradients = {}
    for addition in additions:
        before = last if addition.before is None else addition.before
        moved = [not _alike(before.get(name), after) for name, after in addition.after.items() if after is not None]
        counts[addition.action.microbatch] += bool(moved) and all(moved)
        last = addition.after
    return {m for m, count in counts.items() if count > 1}


def _of_parameters(
    stage: int,
    added: Mapping[int, Mapping[str, tuple[Tensor | None, Tensor | None]]],
    expected: Sequence[Gradients],
    wrong: Mapping[int, Sequence[str]],
) -> Iterator[Broken]:
    by_finding: dict[tuple[str, float | None, str], dict[int, list[str]]] = {}
    for m, names in wrong.items():
        for name in names:
            delta = _delta(*added[m][name]) if m in added else None
            by_finding.setdefault(_finding(delta, expected[m][name]), {}).setdefault(m, []).append(name)
    for (kind, factor, detail), places in by_finding.items():
        found = tuple(sorted({name for listed in places.values() for name in listed}))
        every = len(places) == len(expected)
        yield Broken(
            kind, stage, () if every else tuple(sorted(places)), parameters=found, factor=factor, detail=detail
        )


def _finding(delta: Tensor | None, wanted: Tensor | None) -> tuple[str, float | None, str]:
    if wanted is None:
        return "unexpected", None, "a gradient where there should be none"
    if delta is None:
        return "missing", None, "no gradient"
    if not bool(delta.isfinite().all()):
        return "not-finite", None, "not finite"
    if not delta.any():
        return "zero", None, "zero"
    found = counts_of(delta, [wanted], precision_of(wanted.dtype).most)
    if found is not None and delta.numel() > 1:
        factor = float(f"{found[0]:.4g}")
        return ("sign" if abs(factor + 1) <= _COUNT else "scale"), factor, f"{factor:g} times the expected"
    return "computation", None, "no multiple of what it should be"


def _by_microbatch(additions: Sequence[Addition]) -> dict[int, dict[str, tuple[Tensor | None, Tensor | None]]]:
    """For each microbatch and parameter: the sum after and before; I and W, and repeated actions, are one."""
    found: dict[int, dict[str, tuple[Tensor | None, Tensor | None]]] = {}
    last: Gradients = {}
    for addition in additions:
        before = last if addition.before is None else addition.before
        own = found.setdefault(addition.action.microbatch, {})
        for name, after in addition.after.items():
            earlier = own.get(name)
            if earlier is None:
                own[name] = (after, before.get(name))
            else:
                own[name] = (_plus(earlier[0], _delta(after, before.get(name))), earlier[1])
        last = addition.after
    return found


def _delta(after: Tensor | None, before: Tensor | None) -> Tensor | None:
    if after is None:
        return None
    return after.double() if before is None else after.double() - before.double()


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one.double() + other.double()


def _near(after: Tensor | None, before: Tensor | None, wanted: Tensor | None) -> bool:
    """Whether what was added is ``wanted``, up to the rounding of the sums that it is the difference of."""
    delta = _delta(after, before)
    if delta is None or wanted is None:
        return wanted is None and (delta is None or not delta.any())
    size = sum(float(one.double().norm()) for one in (after, before) if one is not None)
    precision = precision_of(wanted.dtype)  # not that of the sums: differences of several were taken in fp64
    allowed = precision.least * float(wanted.double().norm()) + 16 * precision.unit * size
    return float((delta - wanted.cpu().double()).norm()) <= allowed


def _nothing(gradients: Gradients) -> list[str]:
    """Parameters to which a right addition is nothing: dropping it cannot be seen."""
    return [name for name, gradient in gradients.items() if gradient is None or not gradient.any()]


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and bool(torch.equal(one, other))


def _flat(tensor: Tensor | None, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float64) if tensor is None else tensor.cpu().flatten().double()


def _list(microbatches: Sequence[int]) -> str:
    word = "microbatch" if len(microbatches) == 1 else "microbatches"
    return f"{word} {', '.join(map(str, microbatches))}"
