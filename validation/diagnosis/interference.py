"""What happened to gradients that should have stayed as they were: between two actions, or after the last."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from validation.diagnosis.combination import told_within, whole_within
from validation.diagnosis.rounding import rounded_as
from validation.judging.tolerance import error, precision_of
from validation.observers.recording import Addition, Site


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


Gradients = Mapping[str, Tensor | None]
_FEW = 8  # equal elements that could be chance
_MORE = 3.0  # times what is left without a term: as much it must explain
_CHANCE = 25.0  # minus the logarithm of how often chance may name one of some dozens of terms


@dataclass(frozen=True)
class Known:
    """What may have been put in a gradient's place, or added to it.

    ``earlier``: the gradients of the step before; ``others``: those of other parameters, by their copies' sites;
    ``parameters``: what the stage's parameters themselves hold.
    """

    earlier: Gradients = field(default_factory=dict)
    others: Mapping[Site, Tensor | None] = field(default_factory=dict)
    parameters: Gradients = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """What became of one gradient: a kind of cause, its words, and the factor of a multiple."""

    kind: str
    text: str
    factor: float | None = None


NOBODYS = Change("altered", "changed into what is like nothing known")


def broken_between(
    stage: int, additions: Sequence[Addition], *, start: Gradients, end: Gradients, known: Known
) -> list[Broken]:
    """What happened to a stage's sums while none of its actions ran; it began with ``start`` and ended with ``end``."""
    found: list[Broken] = []
    before, done = start, list[int]()
    for addition in additions:
        if addition.before is not None:
            seen = changed(stage, before, addition.before, f"before {addition.action}", known=known)
            # To clear all sums before another addition is to lose what they held; to find some, is to add to them.
            found += [
                replace(one, kind="dropped", microbatches=tuple(sorted(set(done))))
                if one.kind in ("zero", "missing") and not one.parameters
                else replace(one, kind="extra-term" if one.kind == "unexpected" else one.kind)
                for one in seen
            ]
        before = addition.after
        done.append(addition.action.microbatch)
    return found + changed(stage, before, end, "after the last backward", known=known)


def changed(
    stage: int, old: Gradients, new: Gradients, when: str, *, known: Known | None = None, leaving: Collection[str] = ()
) -> list[Broken]:
    """What became of a stage's gradients; those ``leaving`` are not asked for, and still are among what is known."""
    judged = [name for name in new if name not in leaving]
    names = [name for name in judged if not _alike(old.get(name), new[name])]
    if not names:
        return []
    known = known or Known()
    held = [name for name in judged if old.get(name) is not None or new[name] is not None]
    whole = () if len(names) == len(held) else tuple(names)
    others = {**known.others, **{(stage, name): gradient for name, gradient in old.items()}}
    one = _all_alike(names, old, new, known)
    if one is None:
        everything = replace(known, others=others)
        one = together({name: became((stage, name), old.get(name), new[name], everything) for name in names}, new)
    return [Broken(one.kind, stage, parameters=whole, factor=one.factor, detail=f"{one.text} {when}")]


def _all_alike(names: Sequence[str], old: Gradients, new: Gradients, known: Known) -> Change | None:
    """What was added to all of them together: little of it may show in each, in a coarse type above all."""
    for kind, words, terms in _terms(known):
        rows = [[side.get(name) for side in (new, old, terms)] for name in names]
        full = [[one for one in row if one is not None and bool(one.isfinite().all())] for row in rows]
        if len(full) > 1 and all(len(row) == 3 for row in full):
            seen, before, term = (torch.cat([one.flatten() for one in column]) for column in zip(*full, strict=True))
            found = _two(seen, before, term)
            if found is not None and abs(found[0] - 1) <= whole_within(seen.dtype):
                return Change(kind, f"given {_said(found[1], seen.dtype)} of {words} more")
    return None


def _terms(known: Known) -> Sequence[tuple[str, str, Gradients]]:
    """What gradients may be given more of: the kind of cause that this is, words, and by name the tensors."""
    return (
        ("stale-gradient", "an earlier step's gradients", known.earlier),
        ("extra-term", "the parameters themselves", known.parameters),
    )


def together(changes: Mapping[str, Change | None], new: Gradients) -> Change:
    """What became of all of them; where they tell no one thing, only that they changed.

    A gradient too short to tell anything goes with the others.
    """
    told = {name: change for name, change in changes.items() if change is not None}
    kinds = {change.kind for change in told.values()}
    if kinds == {"rounded", "zero"}:  # what is too small for the narrower type is zero there
        told = {name: change for name, change in told.items() if change.kind == "rounded"}
    elif len(kinds) != 1:
        return Change("altered", f"changed{', not all in one way: ' * bool(told)}{', '.join(_words(told)[:3])}")
    first = next(iter(told.values()))
    factors = {name: change.factor for name, change in told.items() if change.factor is not None}
    if factors:
        dtype = next(new_one.dtype for name in factors if (new_one := new[name]) is not None)
        room = max(whole_within(dtype), told_within(dtype))
        low, high = min(factors.values()), max(factors.values())
        if high - low > room * max(abs(low), abs(high)):
            return Change("scale", f"multiplied by {low:g} to {high:g}")
        return first
    words = _words(told)
    return Change(first.kind, f"{'; '.join(words[:2])}{'; ...' * (len(words) > 2)}")


def _words(told: Mapping[str, Change]) -> list[str]:
    """What is said of the gradients, what is said of most of them first."""
    return [text for text, _ in Counter(change.text for change in told.values()).most_common()]


def became(site: Site, old: Tensor | None, new: Tensor | None, known: Known) -> Change | None:
    """What became of the gradient ``old`` where it is ``new``; None where so short a one tells nothing."""
    if new is None:
        return Change("missing", "cleared")
    if not new.any():
        return Change("zero", "cleared")
    if not bool(new.isfinite().all()):
        return Change("not-finite", "made not finite")
    earlier = known.earlier.get(site[1])
    if old is None:
        if earlier is not None and torch.equal(earlier, new):
            return Change("stale-gradient", "an earlier step's were put there")
        return Change("unexpected", "made where there should be none")
    if new.numel() < 3:
        return None
    return (
        _misplaced(site, new, known)
        or _reordered(old, new)
        or _multiple(old, new)
        or _rounded(old, new)
        or _shifted(old, new)
        or _partly(old, new, earlier)
        or _added(site, old, new, known)
        or NOBODYS
    )


def _misplaced(site: Site, new: Tensor, known: Known) -> Change | None:
    """Another parameter's gradient, bit for bit."""
    for (stage, name), other in known.others.items():
        if (stage, name) != site and other is not None and other.numel() == new.numel():
            if torch.equal(other.flatten(), new.flatten()):
                at = f" of stage {stage}" if stage != site[0] else ""
                return Change("misplaced", f"replaced by that of {name}{at}")
    return None


def _reordered(old: Tensor, new: Tensor) -> Change | None:
    same = torch.equal(old.flatten().sort().values, new.flatten().sort().values)
    return Change("altered", "put in another order") if same else None


def _multiple(old: Tensor, new: Tensor) -> Change | None:
    one, two = new.flatten().double(), old.flatten().double()
    square = float(two @ two)
    factor = float(one @ two) / square if square else 0.0
    limit = told_within(new.dtype)
    # What is one times the old up to rounding was not multiplied.
    if not factor or abs(factor - 1) <= max(whole_within(new.dtype), limit):
        return None
    if float((one - factor * two).norm()) > limit * abs(factor) * square**0.5:
        return None
    factor = float(_said(factor, new.dtype))
    return Change("sign" if factor == -1 else "scale", f"multiplied by {factor:g}", factor)


def _rounded(old: Tensor, new: Tensor) -> Change | None:
    narrow = rounded_as(new, old)
    return None if narrow is None else Change("rounded", narrow)


def _partly(old: Tensor, new: Tensor, earlier: Tensor | None) -> Change | None:
    """Many elements are as they were, bit for bit: what became of the others?"""
    one, two = old.flatten(), new.flatten()
    wrong = one != two
    if int((~wrong & (two != 0)).sum()) < _FEW or int((~wrong).sum()) < len(two) // 8:
        return None
    count = f"{int(wrong.sum())} of {len(two)} elements"
    if not two[wrong].any():
        return Change("altered", f"{count} set to zero")
    if earlier is not None:
        more = two[wrong].double() - one[wrong].double()
        if error(more, earlier.flatten()[wrong].double()) <= told_within(new.dtype):
            return Change("stale-gradient", f"an earlier step's gradients were added to {count}")
    return Change("altered", f"{count} changed")


def _shifted(old: Tensor, new: Tensor) -> Change | None:
    """The old one and the same number in every element."""
    found, room = _two(new, old, torch.ones_like(old)), whole_within(new.dtype)
    if found is None or abs(found[0] - 1) > room:
        return None
    mean, more = float(old.double().mean()), found[1]
    if abs(more + mean) <= room * abs(mean):
        return Change("altered", "rid of its mean")
    return Change("extra-term", "given the same number more in every element")


def _added(site: Site, old: Tensor, new: Tensor, known: Known) -> Change | None:
    """The old one, or some of it, and so much of something known."""
    (stage, name), room = site, whole_within(new.dtype)
    for kind, words, terms in _terms(known):
        term = terms.get(name)
        found = None if term is None else _two(new, old, term)
        if found is not None and abs(found[0] - 1) <= room:
            return Change(kind, f"given {_said(found[1], new.dtype)} of {words} more")
    for (owner, other), term in known.others.items():
        if (owner, other) != site and term is not None and term.shape == old.shape:
            found = _two(new, old, term)
            if found is not None:
                own, more = (_said(part, new.dtype) for part in found)
                at = f"that of {other}{f' of stage {owner}' * (owner != stage)}"
                if abs(found[0]) <= room * abs(found[1]):
                    return Change("misplaced", f"replaced by {more} times {at}")
                return Change("extra-term", f"made {own} of its own and {more} of {at}")
    return None


def _said(value: float, dtype: torch.dtype) -> str:
    """A coefficient with as many digits as ``dtype`` lets it have."""
    return f"{value:.{4 if whole_within(dtype) < 1e-2 else 2}g}"


def _two(new: Tensor, old: Tensor, term: Tensor) -> tuple[float, float] | None:
    """The coefficients of ``old`` and ``term`` that make ``new``, where both are needed and nothing is left over."""
    seen, one, two = (tensor.cpu().flatten().double() for tensor in (new, old, term))
    matrix = torch.stack([torch.stack([one @ one, one @ two]), torch.stack([two @ one, two @ two])])
    if float(matrix.det()) <= 1e-6 * float(matrix[0, 0] * matrix[1, 1]):
        return None
    own, more = torch.linalg.solve(matrix, torch.stack([one @ seen, two @ seen])).tolist()
    left = float((seen - own * one - more * two).norm())
    size = max(float(seen.norm()), abs(own) * float(one.norm()))
    alone = float((seen - (one @ seen) / (one @ one) * one).norm())  # what the old one leaves by itself
    if left > precision_of(new.dtype).least * size or alone <= _MORE * left:
        return None
    # That some direction takes so much away would happen by chance once in (alone / left) to the number of elements.
    gain = math.log(alone / left) if left else math.inf
    return (own, more) if (len(seen) - 2) * gain > _CHANCE else None


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and bool(torch.equal(one, other))
