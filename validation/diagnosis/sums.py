"""Where sums of gradients broke: each action's addition is held against the microbatch's contribution it should be."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pipeproof.core.limits import precision_of
from pipeproof.core.tolerance import stands_for_none
from pipeproof.diagnosis.combination import counts_of, told_within, whole_within
from pipeproof.diagnosis.interference import Broken, Sources, alike, kind_of
from pipeproof.diagnosis.known import Known
from pipeproof.diagnosis.likeness import factor_of, likeness, plainly
from pipeproof.diagnosis.limits import TELLING
from pipeproof.diagnosis.rounding import held_in, rounded_as
from pipeproof.observers.likeness import NARROWER, Label, Likeness
from pipeproof.observers.recording import Addition, Gradients, Site

Finding = tuple[str, float | None, str]  # a kind of cause, the factor of a multiple, and its words


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
            return counted(stage, total, repeated={*repeated, *_several(additions)}, room=_room(expected))
    return list(_of_parameters(stage, additions, expected, wrong))


def totals(
    seen: Gradients, expected: Sequence[Gradients], names: Sequence[str], *, noise: float = 0.0
) -> tuple[float, ...] | None:
    """How often each microbatch's contribution is in ``seen``, over all parameters of a stage together.

    ``noise``: the norm of what rounding the sums may have done to ``seen``.
    """
    like = {name: next(g for part in expected if (g := part[name]) is not None) for name in names}
    rows = [torch.cat([_flat(part[name], like[name].numel()) for name in names]) for part in expected]
    whole = torch.cat([_flat(seen[name], like[name].numel()) for name in names])
    limit = max(told_within(one.dtype) for one in like.values())
    return counts_of(whole, rows, limit + noise / max(float(whole.norm()), 1e-300))


def counted(
    stage: int, coefficients: Sequence[float], *, repeated: Collection[int] = (), room: float = 1e-3
) -> list[Broken]:
    """Coefficients of every microbatch's contribution in words; empty where each is 1.

    ``repeated`` microbatches were really added more than once. ``room``: how near to a whole number a coefficient must
    be to count as one.
    """
    off = [m for m, value in enumerate(coefficients) if abs(value - 1) > room]
    if not off:
        return []
    first = coefficients[off[0]]
    alike = all(abs(coefficients[m] - first) <= room * max(1.0, abs(first)) for m in off)
    whole = abs(first - round(first)) <= room and first > 1
    if alike and whole and set(off) <= set(repeated):
        return [Broken("doubled", stage, tuple(off), factor=first, detail=f"{_list(off)} added {round(first)} times")]
    if alike and len(off) == len(coefficients) and abs(first) > room:
        kind = "sign" if abs(first + 1) <= room else "scale"
        return [Broken(kind, stage, factor=first, detail=f"{first:.6g} times the expected")]
    if alike and abs(first) <= room:
        return [Broken("dropped", stage, tuple(off), detail=f"{_list(off)} added nothing")]
    if alike and whole and not round(first) == len(coefficients) > 2:  # as often as that, it was not divided by it
        return [Broken("doubled", stage, tuple(off), factor=first, detail=f"{_list(off)} counted {round(first)} times")]
    if alike:
        kind = "sign" if abs(first + 1) <= room else "scale"
        return [Broken(kind, stage, tuple(off), factor=first, detail=f"{_list(off)}: {first:.6g} times the expected")]
    lost = [m for m in off if abs(coefficients[m]) <= room]
    twice = [m for m in off if abs(coefficients[m] - 2) <= room]
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
        noise = math.hypot(*(_noise(*added[m][name], _dtype(expected, name)) for name in names))
        found = totals(deltas, expected, names, noise=noise)
        if found is None:
            return None
        total = [one + other for one, other in zip(total, found, strict=True)]
    return total


def _dtype(expected: Sequence[Gradients], name: str) -> torch.dtype:
    return next(gradient.dtype for part in expected if (gradient := part[name]) is not None)


def _several(additions: Sequence[Addition]) -> set[int]:
    """Microbatches for which more than one action added to every gradient that there is."""
    counts: Counter[int] = Counter()
    last: Gradients = {}
    for addition in additions:
        before = last if addition.before is None else addition.before
        moved = [not alike(before.get(name), after) for name, after in addition.after.items() if after is not None]
        counts[addition.action.microbatch] += bool(moved) and all(moved)
        last = addition.after
    return {m for m, count in counts.items() if count > 1}


def _room(expected: Sequence[Gradients]) -> float:
    """How near to a whole number a coefficient must be to count as one."""
    dtypes = {one.dtype for part in expected for one in part.values() if one is not None}
    return max((whole_within(dtype) for dtype in dtypes), default=0.0)


class _Sums:
    """One stage's additions, each parameter's held against what it should be."""

    def __init__(self, stage: int, additions: Sequence[Addition], expected: Sequence[Gradients]) -> None:
        self._stage = stage
        self._expected = expected
        self._added = _by_microbatch(additions)
        self._states = {name: [one.after[name] for one in additions] for name in expected[0]}
        self._known: dict[int, Known] = {}

    def finding(self, m: int, name: str) -> Finding | None:
        """What is wrong with what microbatch ``m`` added to one parameter; None where it is rounding after all."""
        wanted, pair = self._expected[m][name], self._added.get(m, {}).get(name)
        delta = None if pair is None else _delta(*pair)
        if wanted is None:
            return None if stands_for_none(delta) else ("unexpected", None, "a gradient where there should be none")
        if pair is None or delta is None:
            return "missing", None, "no gradient"
        rounding = told_within(wanted.dtype) + _noise(*pair, wanted.dtype) / max(float(wanted.double().norm()), 1e-300)
        factor = factor_of(delta.cpu(), wanted.cpu(), rounding) if rounding <= TELLING else None
        if factor is not None and abs(factor - 1) <= whole_within(wanted.dtype):
            return None
        found = None if factor is not None else self._rounded(name, delta, wanted) or _rounded(pair, wanted)
        if found is not None:
            return "rounded", None, f"the sums are {found.text}"
        return self._told(m, name, delta.cpu().to(wanted.dtype), wanted.cpu(), rounding)

    def _rounded(self, name: str, delta: Tensor, wanted: Tensor) -> Likeness | None:
        """Whether the sums are kept in a narrower type than what is added to them."""
        states = [state for state in self._states[name] if state is not None]
        narrow = {held_in(state) for state in states if state.any()}
        if len(narrow) != 1 or (kind := narrow.pop()) is None:
            return None
        size = max(float(state.double().norm()) for state in states)
        close = float((delta - wanted.double()).norm()) <= 2 * torch.finfo(NARROWER[kind]).eps * size
        return Likeness("rounded", narrow=kind) if close else None

    def _told(self, m: int, name: str, delta: Tensor, wanted: Tensor, rounding: float) -> Finding:
        if m not in self._known:
            others = {(self._stage, other): gradient for other, gradient in self._expected[m].items()}
            self._known[m] = Sources(others=others).known(self._stage)
        at = Label.of_gradient((self._stage, name))
        if rounding > TELLING:
            found = plainly(delta, wanted, at)
        else:
            found = likeness(delta, wanted, at, known=self._known[m], rounding=rounding)
        kind = "computation" if found is None else kind_of(found)
        if found is None or (kind == "altered" and found.kind != "reordered"):
            return "computation", None, "no multiple of what it should be"
        if found.kind in ("multiple", "zero", "not-finite"):
            return kind, found.factor, found.text
        return kind, None, found.change


def _rounded(pair: tuple[Tensor | None, Tensor | None], wanted: Tensor) -> Likeness | None:
    """Whether a sum is what it should be but for a narrower type, at whatever scale that was."""
    after, before = pair
    whole = wanted.cpu() if before is None else before + wanted.cpu()
    found = None if after is None else rounded_as(after, whole)
    # Each sum has its own steps: what they have in common is that there are any.
    return None if found is None else Likeness("rounded", narrow=found.narrow, step=None if found.step is None else 0.0)


def _of_parameters(
    stage: int, additions: Sequence[Addition], expected: Sequence[Gradients], wrong: Mapping[int, Sequence[str]]
) -> Iterator[Broken]:
    held, by_finding = _Sums(stage, additions, expected), dict[Finding, dict[int, list[str]]]()
    for m, names in wrong.items():
        for name in names:
            found = held.finding(m, name)
            if found is not None:
                by_finding.setdefault(found, {}).setdefault(m, []).append(name)
    for (kind, factor, detail), places in by_finding.items():
        names = sorted({name for listed in places.values() for name in listed})
        microbatches = () if len(places) == len(expected) else tuple(sorted(places))
        if kind == "zero" and microbatches:
            kind, detail = "dropped", f"{_list(microbatches)} added nothing"
        yield Broken(kind, stage, microbatches, parameters=tuple(names), factor=factor, detail=detail)


def _noise(after: Tensor | None, before: Tensor | None, dtype: torch.dtype) -> float:
    """The norm of what rounding may have done to the difference of two sums in ``dtype``."""
    sizes = (float(one.double().norm()) for one in (after, before) if one is not None)
    return 2 * precision_of(dtype).unit * sum(sizes)


def _by_microbatch(additions: Sequence[Addition]) -> dict[int, dict[str, tuple[Tensor | None, Tensor | None]]]:
    """For each microbatch and parameter: the sum after and before; I and W, and repeated actions, are one."""
    found: dict[int, dict[str, tuple[Tensor | None, Tensor | None]]] = {}
    last: Gradients = {}
    for addition in additions:
        before = last if addition.before is None else addition.before
        own = found.setdefault(addition.action.microbatch, {})
        for name, after in addition.after.items():
            earlier = own.get(name)
            if earlier is None or alike(*earlier):  # the first half of a backward adds nothing
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
    allowed = precision.least * float(wanted.double().norm()) + precision.factor * precision.unit * size
    return float((delta - wanted.cpu().double()).norm()) <= allowed


def _nothing(gradients: Gradients) -> list[str]:
    """Parameters to which a right addition is nothing: dropping it cannot be seen."""
    return [name for name, gradient in gradients.items() if gradient is None or not gradient.any()]


def _flat(tensor: Tensor | None, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float64) if tensor is None else tensor.cpu().flatten().double()


def _list(microbatches: Sequence[int]) -> str:
    word = "microbatch" if len(microbatches) == 1 else "microbatches"
    return f"{word} {', '.join(map(str, microbatches))}"
