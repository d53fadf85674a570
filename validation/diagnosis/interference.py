"""What happened to gradients that should have stayed as they were: between two actions, or after the last."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pipeproof.core.limits import precision_of
from pipeproof.diagnosis.combination import told_within, whole_within
from pipeproof.diagnosis.known import Known
from pipeproof.diagnosis.likeness import likeness, sum_of
from pipeproof.observers.likeness import GRADIENT, MEAN, PARAMETER, Label, Likeness
from pipeproof.observers.recording import Addition, Gradients, Site


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


_SHORT = 3  # with fewer elements than that, any gradient is a multiple of another


@dataclass(frozen=True)
class Sources:
    """What may have been put in a gradient's place, or added to it.

    ``earlier``: the gradients of the step before; ``others``: those of other parameters, by their copies' sites;
    ``parameters``: what the stage's parameters themselves hold.
    """

    earlier: Gradients = field(default_factory=dict)
    others: Mapping[Site, Tensor | None] = field(default_factory=dict)
    parameters: Gradients = field(default_factory=dict)

    def known(self, stage: int) -> Known:
        """All of it with its labels, for gradients of ``stage``."""
        every = [(Label.of_gradient(site), tensor) for site, tensor in self.others.items()]
        every += [(Label.of_gradient((stage, name), ago=1), tensor) for name, tensor in self.earlier.items()]
        every += [(_of_parameter(Label.of_gradient((stage, name))), tensor) for name, tensor in self.parameters.items()]
        return Known((label, tensor) for label, tensor in every if tensor is not None)


def _of_parameter(gradient: Label) -> Label:
    return replace(gradient, point=gradient.point._replace(where=PARAMETER))


def broken_between(
    stage: int, additions: Sequence[Addition], *, start: Gradients, end: Gradients, sources: Sources
) -> list[Broken]:
    """What happened to a stage's sums while none of its actions ran; it began with ``start`` and ended with ``end``."""
    found: list[Broken] = []
    before, done = start, list[int]()
    for addition in additions:
        if addition.before is not None:
            seen = changed(stage, before, addition.before, f"before {addition.action}", sources=sources)
            # To clear all sums before another addition is to lose what they held; to find some, is to add to them.
            found += [
                replace(one, kind="dropped", microbatches=tuple(sorted(set(done))))
                if one.kind in ("zero", "missing") and not one.parameters
                else replace(one, kind="extra-term" if one.kind == "unexpected" else one.kind)
                for one in seen
            ]
        before = addition.after
        done.append(addition.action.microbatch)
    return found + changed(stage, before, end, "after the last backward", sources=sources)


def changed(
    stage: int,
    old: Gradients,
    new: Gradients,
    when: str,
    *,
    sources: Sources | None = None,
    leaving: Collection[str] = (),
) -> list[Broken]:
    """What became of a stage's gradients; those ``leaving`` are not asked for, and still are among what is known."""
    judged = [name for name in new if name not in leaving]
    names = [name for name in judged if not alike(old.get(name), new[name])]
    if not names:
        return []
    sources = sources or Sources()
    held = [name for name in judged if old.get(name) is not None or new[name] is not None]
    whole = () if len(names) == len(held) else tuple(names)
    one = _all_alike(stage, names, old, new, sources)
    if one is None:
        others = {**sources.others, **{(stage, name): gradient for name, gradient in old.items()}}
        known = replace(sources, others=others).known(stage)
        one = common_change({name: became((stage, name), old.get(name), new[name], known) for name in names}, new)
    return [Broken(one.kind, stage, parameters=whole, factor=one.factor, detail=f"{one.text} {when}")]


@dataclass(frozen=True)
class Change:
    """What became of gradients: a kind of cause, its words, and the factor of a multiple."""

    kind: str
    text: str
    factor: float | None = None


def became(site: Site, old: Tensor | None, new: Tensor | None, known: Known | None = None) -> Likeness | None:
    """What became of the gradient ``old`` where it is ``new``; None where so short a one tells nothing."""
    found = likeness(new, old, Label.of_gradient(site), known=known)
    short = old is not None and new is not None and new.numel() < _SHORT
    return None if short and found is not None and found.kind not in ("zero", "not-finite") else found


def kind_of(found: Likeness) -> str:
    """The kind of cause that makes such a gradient."""
    ago, where = (0, GRADIENT) if found.label is None else (found.label.ago, found.label.point.where)
    if ago:
        return "stale-gradient"
    if found.kind == "multiple":
        return "sign" if found.factor == -1 else "scale"
    if found.kind == "sum":
        replaced = abs(found.factor or 0.0) <= 1e-3 * abs(found.more or 0.0)
        return "altered" if where == MEAN else "misplaced" if replaced else "extra-term"
    if found.kind == "other":
        return "misplaced" if where == GRADIENT else "extra-term"
    whole = found.kind in ("missing", "zero", "unexpected", "rounded") and found.part is None
    return found.kind if whole or found.kind == "not-finite" else "altered"


def _all_alike(stage: int, names: Sequence[str], old: Gradients, new: Gradients, sources: Sources) -> Change | None:
    """What was added to all of them together: little of it may show in each, in a coarse type above all."""
    at = Label.of_gradient((stage, names[0]))
    for label, terms in (
        (replace(at, ago=1), sources.earlier),
        (_of_parameter(at), sources.parameters),
    ):
        full = list(_finite([side.get(name) for side in (new, old, terms)] for name in names))
        if len(full) == len(names) > 1:
            seen, before, term = (torch.cat([one.flatten() for one in column]) for column in zip(*full, strict=True))
            made = sum_of(seen, before, term, limit=precision_of(seen.dtype).least)
            if made is not None and abs(made[0] - 1) <= whole_within(seen.dtype):
                found = Likeness("sum", at, label, factor=1.0, more=made[1])
                return Change(kind_of(found), found.change)
    return None


def _finite(rows: Iterator[Sequence[Tensor | None]]) -> Iterator[list[Tensor]]:
    """Those rows all of whose tensors are there and finite."""
    for row in rows:
        found = [one for one in row if one is not None and bool(one.isfinite().all())]
        if len(found) == len(row):
            yield found


def common_change(changes: Mapping[str, Likeness | None], new: Gradients) -> Change:
    """What became of all of them; where they tell no one thing, only that they changed.

    A gradient too short to tell anything goes with the others.
    """
    told = {name: change for name, change in changes.items() if change is not None}
    kinds = {kind_of(change) for change in told.values()}
    if kinds == {"rounded", "zero"}:  # what is too small for the narrower type is zero there
        told = {name: change for name, change in told.items() if change.kind == "rounded"}
    elif len(kinds) != 1:
        return Change("altered", f"changed{', not all in one way: ' * bool(told)}{', '.join(_words(told)[:3])}")
    first, kind, words = next(iter(told.values())), kind_of(next(iter(told.values()))), _words(told)
    factors = {name: one.factor for name, one in told.items() if one.kind == "multiple" and one.factor is not None}
    if len(factors) < len(told):
        return Change(kind, f"{'; '.join(words[:2])}{'; ...' * (len(words) > 2)}")
    dtype = next(one.dtype for name in factors if (one := new[name]) is not None)
    low, high = min(factors.values()), max(factors.values())
    if high - low > max(whole_within(dtype), told_within(dtype)) * max(abs(low), abs(high)):
        return Change("scale", f"multiplied by {low:g} to {high:g}")
    return Change(kind, first.change, first.factor)


def _words(told: Mapping[str, Likeness]) -> list[str]:
    """What is said of the gradients, what is said of most of them first."""
    nothing = [change for change in told.values() if not change.is_known and change.part is None]
    if len(nothing) == len(told) > 1:
        return ["changed into what is like nothing known"]
    return [text for text, _ in Counter(change.change for change in told.values()).most_common()]


def alike(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether both are equal, or neither is there."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and bool(torch.equal(one, other))
