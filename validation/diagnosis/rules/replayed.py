"""Gradients of a model that is not ours: is there one thing that, had it become of what passes, would have given them?

Between stages the reference changes what passes, on its way there or back. Which microbatches that happened to is
solved for: each adds what it changes, once or not at all.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pipeproof.diagnosis.evidence import Evidence, ModelBeside
from pipeproof.diagnosis.what_if import WhatIf, same_loss
from pipeproof.diagnosis.what_ifs import of_sent, of_sent_back, sent_back_in, sent_in
from pipeproof.judging.cause import Cause
from pipeproof.judging.tolerance import error
from pipeproof.observers.likeness import narrower
from pipeproof.observers.recording import Site
from pipeproof.reference.passage import Passage
from pipeproof.reference.step import Contribution

_COARSE = 1e-3  # where rounding explains so much, many a change would fit
_LEAST = 1e-5  # relative: the same numbers added in other orders differ by less
_WHOLE = 0.05  # how far the part of a microbatch may be from 0 or 1
_MOST = 1 << 27  # numbers that the gradients of all microbatches may have: each change is tried with each of them


@dataclass(frozen=True)
class _Changes:
    """What may have happened, in words: at the boundary before ``stage``, or at all of them."""

    text: str
    stage: int | None
    what_ifs: tuple[WhatIf, ...]


def replayed(evidence: Evidence) -> list[Cause]:
    """The one change between stages that gives every loss and every gradient; none where two would."""
    fit = None if evidence.beside is None else _Fit(evidence, evidence.beside)
    if fit is None or not fit.possible:
        return []
    found = [(changes, microbatches) for changes in fit.changes() if (microbatches := fit.microbatches(changes))]
    if len(found) != 1:
        return []
    changes, microbatches = found[0]
    stage, some = changes.stage, () if len(microbatches) == evidence.microbatches else microbatches
    rank = None if stage is None else evidence.placement[stage]
    return [Cause(changes.what_ifs[0].kind, rank=rank, stage=stage, microbatches=some, detail=f"as if {changes.text}")]


@dataclass(frozen=True)
class _Fit:
    """What was seen, and what changes would give."""

    evidence: Evidence
    beside: ModelBeside

    @property
    def possible(self) -> bool:
        """Whether all gradients can be compared so closely that few changes fit, and the reference repeats itself."""
        limits = [m.limit or 0.0 for m in self.evidence.verdict.mismatches if m.law == "gradient"]
        if max(limits, default=1.0) > _COARSE or not self._sites:
            return False
        if sum(off.numel() for off in self._off.values()) * self.evidence.microbatches > _MOST:
            return False
        if not all(bool(off.isfinite().all()) for off in self._off.values()):
            return False
        again = self.beside.played(0, ())
        return again is not None and same_loss(again.loss, self.evidence.expected.losses[0])

    def changes(self) -> Iterator[_Changes]:
        """What may have happened. Losses say on which way: a wrong one, that it was there, or both ways."""
        ends = [stage for stage in range(self.evidence.stages - 1) if self.beside.ends(stage)]
        if self.evidence.differs("loss") or not self._losses:
            for stage in ends:
                yield from (_Changes(one.text, stage + 1, (one,)) for one in self._sent(stage))
                for name in narrower(self._dtype):
                    text = f"what it is given and what it hands back are {name}-rounded"
                    yield _Changes(text, stage + 1, (sent_in(name, stage + 1), sent_back_in(name, stage)))
            yield from self._everywhere(ends, there=True, back=False)
            yield from self._everywhere(ends, there=True, back=True)
        if not self.evidence.differs("loss"):
            wrong = {m.stage for m in self.evidence.verdict.mismatches if m.stage is not None}
            for stage in ends:
                if stage == max(wrong, default=0):
                    yield from (_Changes(one.text, stage, (one,)) for one in self._sent_back(stage))
            yield from self._everywhere(ends, there=False, back=True)

    def _sent(self, stage: int) -> Iterator[WhatIf]:
        return of_sent(stage + 1, self._apart(stage), self._dtype)

    def _sent_back(self, stage: int) -> Iterator[WhatIf]:
        return of_sent_back(stage, self._apart(stage), self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        """What the reference computes in."""
        return next(gradient.dtype for gradient in self.evidence.expected.gradients.values() if gradient is not None)

    def _everywhere(self, ends: Sequence[int], *, there: bool, back: bool) -> Iterator[_Changes]:
        way = "both ways" if there and back else "forward" if there else "backward"
        for name in narrower(self._dtype) if len(ends) > 1 else ():
            sent = [sent_in(name, stage + 1) for stage in ends if there]
            sent_back = [sent_back_in(name, stage) for stage in ends if back]
            yield _Changes(f"what passes {way} between stages is {name}-rounded", None, (*sent, *sent_back))

    def microbatches(self, changes: _Changes) -> tuple[int, ...]:
        """Those to which ``changes`` happened, where that gives all that was seen; else none."""
        first = self._made(0, changes)
        if first is None or not (self._gives_loss(0, first) or self._gives_loss(0, self._right[0])):
            return ()
        rest = [self._made(m, changes) for m in range(1, self.evidence.microbatches)]
        made = [one for one in (first, *rest) if one is not None]
        return self._solved(made) if len(made) == self.evidence.microbatches else ()

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
        if bool(((parts - whole).abs() > _WHOLE).any()) or not set(whole.tolist()) <= {0.0, 1.0}:
            return ()
        concerned = tuple(m for m, part in enumerate(whole.tolist()) if part)
        losses = all(self._gives_loss(m, made[m] if m in concerned else self._right[m]) for m in range(count))
        return concerned if losses and all(self._follows(site, made, whole) for site in self._sites) else ()

    def _follows(self, site: Site, made: Sequence[Contribution], parts: Tensor) -> bool:
        given = self._due(site) + (parts @ self._moved(site, made)).view_as(self._off[site])
        limits = [m.limit or 0.0 for m in self.evidence.verdict.mismatches if (m.stage, m.parameter) == site]
        return error(self._due(site) + self._off[site], given) <= max(_LEAST, *limits, 0.0)

    def _moved(self, site: Site, made: Sequence[Contribution]) -> Tensor:
        """By microbatch, what the change adds to a gradient."""
        pairs = [(one.gradients[site], old.gradients[site]) for one, old in zip(made, self._right, strict=True)]
        rows = [_wide(new, self._off[site]) - _wide(old, self._off[site]) for new, old in pairs]
        return torch.stack([row.flatten() for row in rows])

    def _made(self, microbatch: int, changes: _Changes) -> Contribution | None:
        return self.beside.played(
            microbatch, [one for change in changes.what_ifs for one in self._passages(microbatch, change)]
        )

    def _passages(self, microbatch: int, change: WhatIf) -> Iterator[Passage]:
        if change.given is not None:
            given = change.given
            yield Passage(
                self.beside.ends(change.stage - 1), there=lambda tensors: given(microbatch, tensors) or tensors
            )
        if change.received is not None:
            yield Passage(self.beside.ends(change.stage), back=change.received)

    @cached_property
    def _sites(self) -> list[Site]:
        """The gradients that can be compared: all that are due; none where any is lacking."""
        due, seen = self.evidence.expected.gradients, self.evidence.gradients
        sites = [site for site, gradient in due.items() if gradient is not None]
        lacking = any((one := seen.get(site)) is None or one.shape != self._due(site).shape for site in sites)
        return [] if lacking else sites

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
        """The tensors with which ``stage`` ends, where one module puts them out, so that each can be told."""
        by_number = {int(place.split()[1]): place for place in self.beside.ends(stage)}
        one_module = len({place.partition(" of ")[2] for place in by_number.values()}) == 1
        together = one_module and len(by_number) == len(self.beside.ends(stage))
        return dict(enumerate(by_number[number] for number in sorted(by_number))) if together else {}


def _wide(gradient: Tensor | None, like: Tensor) -> Tensor:
    """``gradient`` as a place among others ``like`` it; nothing is zero."""
    return torch.zeros_like(like) if gradient is None else gradient.cpu().double()
