"""Gradients of a model that is not ours: is there one thing that, had it become of what passes, would have given them?

Between stages the reference changes what passes, on its way there or back. Which microbatches that happened to is
solved for: each adds what it changes, once or not at all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pipeproof.core.cause import Cause, listed
from pipeproof.diagnosis.atoms import Update
from pipeproof.diagnosis.attribution import Attribution, attribute
from pipeproof.diagnosis.evidence import Evidence, ModelBeside
from pipeproof.diagnosis.limits import ALIKE, CLOSE, DECIDED
from pipeproof.diagnosis.rules.repeated import or_zeros
from pipeproof.diagnosis.what_if import Given, WhatIf, same_loss
from pipeproof.diagnosis.what_ifs import of_sent, of_sent_back, of_stream_back, sent_back_in, sent_in, unfilled
from pipeproof.observers.likeness import narrower
from pipeproof.observers.recording import Site
from pipeproof.reference.outputs import module_of
from pipeproof.reference.passage import Passage
from pipeproof.reference.step import Contribution, Gradient
from pipeproof.reference.sums import Sums

_MOST = 1 << 27  # numbers that the gradients of all microbatches may have: each change is tried with each of them

Way = Callable[[Any], Any]


@dataclass(frozen=True)
class Changes:
    """What may have happened, in words: at the boundary before ``stage``, or at all of them; or ``inside`` a stage."""

    text: str
    stage: int | None
    what_ifs: tuple[WhatIf, ...] = ()
    inside: tuple[Passage, ...] = ()


def replayed(evidence: Evidence) -> list[Cause]:
    """The one change between stages that gives every loss and every gradient; none where two would."""
    fit = None if evidence.beside is None else Fit(evidence, evidence.beside)
    if fit is None or not fit.possible:
        return []
    found = [(changes, microbatches) for changes in fit.changes() if (microbatches := fit.microbatches(changes))]
    if len({(changes.text, microbatches) for changes, microbatches in found}) != 1:
        return []
    stages, (changes, microbatches) = [changes.stage for changes, _ in found], found[0]
    some = () if len(microbatches) == evidence.microbatches else microbatches
    return [_cause(evidence, changes, [stage for stage in stages if stage is not None], some)]


def besides_change(evidence: Evidence, cause: Cause) -> Attribution | None:
    """What gradients are made of, if what passes between stages was changed as ``cause`` says.

    None where that cannot be played, or does not give the losses that were seen; where several changes do, unless one
    of them gives all gradients too.
    """
    fit = None if evidence.beside is None else Fit(evidence, evidence.beside)
    if fit is None or evidence.due is None or evidence.due.update.tied or not fit.plays:
        return None
    concerned = cause.microbatches or tuple(range(evidence.microbatches))
    told = (one for one in fit.changes() if (one.stage, *(w.kind for w in one.what_ifs)) == (cause.stage, cause.kind))
    alike = (one for one in told if cause.kind != "rounded" or one.text.split()[-1] in cause.detail)
    found = [_rest(evidence.due.update, made) for one in alike if (made := fit.with_losses(one, concerned))]
    return next((one for one in found if one.right), found[0] if len(found) == 1 else None)


def _rest(update: Update, made: Sequence[Contribution]) -> Attribution:
    """What gradients are made of, if this is what microbatches give."""
    given = [{site: one.gradients[site] for site in update.expected} for one in made]
    due = {site: _sum([one[site] for one in given]) for site in update.expected}
    every = ((stage, update.now.parameters(stage)) for stage in range(update.now.stages))
    own = {(stage, name): one for stage, named in every for name, one in named.items()}
    now = Sums(given, own, update.now.batches, unpaired="what passes is not what the reference passes")
    return attribute(replace(update, expected=due, now=now))


def _sum(parts: Sequence[Gradient]) -> Gradient:
    given = [part for part in parts if part is not None]
    return sum(given[1:], given[0]) if given else None


def _cause(evidence: Evidence, changes: Changes, stages: Sequence[int], microbatches: tuple[int, ...]) -> Cause:
    """The cause: of several stages that would show the same the last that it came to, as the others hand it on."""
    first = changes.what_ifs[0]
    stage = None if not stages else max(stages) if first.forward else min(stages)
    others = listed(sorted({*stages} - {stage}))
    detail = f"as if {changes.text}" + (f", here or on its way through stage {others}" if others else "")
    rank = None if stage is None else evidence.placement[stage]
    cause = Cause(first.kind, rank=rank, stage=stage, microbatches=microbatches, detail=detail)
    came = first.kind == "uninitialised" and (not first.forward or bool(stage))
    return or_zeros(cause, forward=first.forward) if came else cause


@dataclass(frozen=True)
class Fit:
    """What was seen, and what changes would give."""

    evidence: Evidence
    beside: ModelBeside

    @property
    def plays(self) -> bool:
        """Whether the reference repeats itself."""
        again = self.beside.played(0, ())
        return again is not None and same_loss(again.loss, self.evidence.expected.losses[0])

    @property
    def possible(self) -> bool:
        """Whether all gradients can be compared so closely that few changes fit, and the reference repeats itself."""
        limits = [m.limit or 0.0 for m in self.evidence.verdict.mismatches if m.law == "gradient"]
        if max(limits, default=1.0) > ALIKE or not self._sites:
            return False
        if sum(off.numel() for off in self._off.values()) * self.evidence.microbatches > _MOST:
            return False
        if not all(bool(off.isfinite().all()) for off in self._off.values()):
            return False
        return self.plays

    def changes(self) -> Iterator[Changes]:
        """What may have happened. Losses say on which way: a wrong one, that it was there, or both ways."""
        ends = [stage for stage in range(self.evidence.stages - 1) if self.beside.ends(stage)]
        if self.evidence.differs("loss") or not self._losses:
            for stage in ends:
                yield from (Changes(one.text, stage + 1, (one,)) for one in self._sent(stage))
                for name in narrower(self._dtype):
                    text = f"what it is given and what it hands back are {name}-rounded"
                    yield Changes(text, stage + 1, (sent_in(name, stage + 1), sent_back_in(name, stage)))
            yield from self._everywhere(ends, there=True, back=False)
            yield from self._everywhere(ends, there=True, back=True)
        if not self.evidence.differs("loss"):
            wrong = {m.stage for m in self.evidence.verdict.mismatches if m.stage is not None}
            for stage in ends:
                yield from (Changes(one.text, stage, (one,)) for one in self._sent_back(stage, max(wrong, default=0)))
            yield from self._everywhere(ends, there=False, back=True)

    def _sent(self, stage: int) -> Iterator[WhatIf]:
        yield from of_sent(stage + 1, self._apart(stage), self._dtype)
        yield from unfilled(stage + 1, self._apart(stage))

    def _sent_back(self, stage: int, wrong: int) -> Iterator[WhatIf]:
        """Where it shows first at stage ``wrong``: of a later stage, what only passes through to that."""
        if stage == wrong:
            yield from of_sent_back(stage, self._apart(stage), self._dtype)
        through = set(self._places(wrong)) if stage > wrong else set[str]()
        for k, place in self._apart(stage).items():
            yield from of_stream_back(stage, k, place, self._dtype) if place in through else ()

    @property
    def _dtype(self) -> torch.dtype:
        """What the reference computes in."""
        return next(gradient.dtype for gradient in self.evidence.expected.gradients.values() if gradient is not None)

    def _everywhere(self, ends: Sequence[int], *, there: bool, back: bool) -> Iterator[Changes]:
        way = "both ways" if there and back else "forward" if there else "backward"
        for name in narrower(self._dtype) if len(ends) > 1 else ():
            sent = [sent_in(name, stage + 1) for stage in ends if there]
            sent_back = [sent_back_in(name, stage) for stage in ends if back]
            yield Changes(f"what passes {way} between stages is {name}-rounded", None, (*sent, *sent_back))

    def microbatches(self, changes: Changes) -> tuple[int, ...]:
        """Those to which ``changes`` happened, where that gives all that was seen; else none."""
        first = self._made(0, changes)
        if first is None or not (self._gives_loss(0, first) or self._gives_loss(0, self._right[0])):
            return ()
        rest = [self._made(m, changes) for m in range(1, self.evidence.microbatches)]
        made = [one for one in (first, *rest) if one is not None]
        return self._solved(made) if len(made) == self.evidence.microbatches else ()

    def moves(self, changes: Changes) -> frozenset[Site]:
        """The gradients to which it makes any difference in the first microbatch; none where its loss is not so."""
        made = self._made(0, changes)
        if made is None or not self._gives_loss(0, made):
            return frozenset()
        pairs = {site: (made.gradients[site], self._right[0].gradients[site]) for site in self._sites}
        return frozenset(site for site, (new, old) in pairs.items() if not _equal(new, old))

    def with_losses(self, changes: Changes, concerned: Sequence[int]) -> list[Contribution]:
        """What microbatches give if ``changes`` happened to those ``concerned``; nothing unless losses say so."""
        every = range(self.evidence.microbatches)
        made = [self._made(m, changes) if m in concerned else self._right[m] for m in every]
        found = [one for m, one in zip(every, made, strict=True) if one is not None and self._gives_loss(m, one)]
        return found if self._losses and len(found) == len(every) else []

    def _solved(self, made: Sequence[Contribution]) -> tuple[int, ...]:
        count = len(made)
        square, beside = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
        for site in self._sites:
            rows, off = self._moved(site, made), self._off[site].flatten()
            weight = 1.0 / max(float(self._due(site).norm()) ** 2, 1e-300)
            square += weight * (rows @ rows.T)
            beside += weight * (rows @ off)
        parts = torch.linalg.lstsq(square, beside, driver="gelsd").solution
        whole = parts.round()
        if bool(((parts - whole).abs() > DECIDED).any()) or not set(whole.tolist()) <= {0.0, 1.0}:
            return ()
        concerned = tuple(m for m, part in enumerate(whole.tolist()) if part)
        losses = all(self._gives_loss(m, made[m] if m in concerned else self._right[m]) for m in range(count))
        return concerned if losses and all(self._follows(site, made, whole) for site in self._sites) else ()

    def _follows(self, site: Site, made: Sequence[Contribution], parts: Tensor) -> bool:
        left = self._off[site].flatten() - parts @ self._moved(site, made)
        sizes = self._due(site).flatten(), (self._due(site) + self._off[site]).flatten()
        limits = [m.limit or 0.0 for m in self.evidence.verdict.mismatches if (m.stage, m.parameter) == site]
        most = max(CLOSE, *limits, 0.0)
        return all(left.norm(p=p) <= most * max(one.norm(p=p) for one in sizes) for p in (2.0, torch.inf))

    def _moved(self, site: Site, made: Sequence[Contribution]) -> Tensor:
        """By microbatch, what the change adds to a gradient."""
        pairs = [(one.gradients[site], old.gradients[site]) for one, old in zip(made, self._right, strict=True)]
        rows = [_wide(new, self._off[site]) - _wide(old, self._off[site]) for new, old in pairs]
        return torch.stack([row.flatten() for row in rows])

    def _made(self, microbatch: int, changes: Changes) -> Contribution | None:
        passages = changes.inside or tuple(self._passages(microbatch, changes.what_ifs))
        return self.beside.played(microbatch, passages)

    def _passages(self, microbatch: int, what_ifs: Sequence[WhatIf]) -> Iterator[Passage]:
        """What happens where each stage ends, both ways."""
        for stage in sorted({one.stage - 1 if one.forward else one.stage for one in what_ifs}):
            there = next((one.given for one in what_ifs if one.forward and one.stage - 1 == stage), None)
            back = next((one.received for one in what_ifs if not one.forward and one.stage == stage), None)
            yield self._passage(stage, _there(there, microbatch), back)

    def _passage(self, stage: int, there: Way | None, back: Way | None) -> Passage:
        """What passes where ``stage`` ends: where several modules put it out, all at once into what comes after."""
        places = self._places(stage)
        several = len({module_of(place) for place in places}) > 1
        into = self.beside.later(stage) if several else ()
        return Passage(places, there or _as_it_is, back or _as_it_is, into)

    @cached_property
    def _sites(self) -> list[Site]:
        """The gradients that can be compared: all that are due and tell anything; none where any is lacking."""
        due, seen = self.evidence.expected.gradients, self.evidence.gradients
        sites = [site for site, gradient in due.items() if gradient is not None]
        lacking = any((one := seen.get(site)) is None or one.shape != self._due(site).shape for site in sites)
        return [] if lacking else [site for site in sites if not self._is_noise(site)]

    def _is_noise(self, site: Site) -> bool:
        """Whether a gradient is so far off, and right all the same, that it is rounding alone."""
        due = self._due(site)
        off = _wide(self.evidence.gradients[site], due) - due
        return site not in self.evidence.wrong("gradient") and bool(off.norm() > ALIKE * due.norm())

    def _due(self, site: Site) -> Tensor:
        gradient = self.evidence.expected.gradients[site]
        assert gradient is not None, "sites have one"
        return gradient.cpu().double()

    @cached_property
    def _off(self) -> Mapping[Site, Tensor]:
        """By how much each gradient is not what is due."""
        return {site: _wide(self.evidence.gradients[site], self._due(site)) - self._due(site) for site in self._sites}

    @cached_property
    def _right(self) -> list[Contribution]:
        made = [self.beside.played(m, ()) for m in range(self.evidence.microbatches)]
        return [one for one in made if one is not None]

    @cached_property
    def _losses(self) -> Sequence[float]:
        losses = self.evidence.observed.losses(self.evidence.number) if self.evidence.seen is not None else ()
        return losses if len(losses) == self.evidence.microbatches else ()

    def _gives_loss(self, microbatch: int, made: Contribution) -> bool:
        """Whether ``made`` has the loss that was seen, if one was."""
        return not self._losses or same_loss(self._losses[microbatch], made.loss)

    def _apart(self, stage: int) -> dict[int, str]:
        """The tensors with which ``stage`` ends, by their numbers among them."""
        return dict(enumerate(self._places(stage)))

    def _places(self, stage: int) -> Sequence[str]:
        """Where ``stage`` ends, in the order of a module's outputs."""
        return sorted(self.beside.ends(stage), key=lambda place: (module_of(place), int(place.split()[1])))


def _there(given: Given | None, microbatch: int) -> Way | None:
    return None if given is None else lambda tensors: given(microbatch, tensors) or tensors


def _as_it_is(values: Any) -> Any:
    return values


def _equal(one: Gradient, other: Gradient) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _wide(gradient: Tensor | None, like: Tensor) -> Tensor:
    """``gradient`` as a place among others ``like`` it; nothing is zero."""
    return torch.zeros_like(like) if gradient is None else gradient.cpu().double()
