"""Find a fault in the reference that reproduces everything observed.

The reference plays every microbatch with one substitution. The affected microbatches come from a solver: each adds the
change of the substitution, once or not at all. Equal losses and gradients prove a cause.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice, takewhile
from time import perf_counter

import torch
from torch import Tensor

from pipeproof.core.cause import Cause, join_numbers
from pipeproof.core.observe.recording import Site
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.limits import ALIKE, CLOSE, DECIDED
from pipeproof.explain.played import ModelBeside
from pipeproof.explain.rules.places import or_zeros
from pipeproof.explain.substitutions import Substitution, between, change_kept, inside, of_data
from pipeproof.reference.data import Batch
from pipeproof.reference.step import Contribution, Gradient

_MOST = 1 << 27  # numbers that the gradients of all microbatches may have: each change is tried with each of them
_PATIENCE_S = 60.0

Found = tuple[Substitution, tuple[int, ...]]  # and the microbatches that it happened to


def replay(evidence: Evidence) -> list[Cause]:
    """Return the substitution that reproduces every loss and gradient, as a cause, unless several kinds do."""
    beside, members = evidence.beside, () if evidence.members is None else evidence.members.stages
    if beside is None or not (replay := Replay(evidence, beside)).possible:
        return []
    found = [*replay.replay((*between(beside, evidence.stages, replay.dtype), *of_data(beside.batches)))]
    if not found and any(len(one.part.members) > 1 for one in members) and not evidence.differs("replicas"):
        every = inside(beside, evidence.expected.gradients.keys(), evidence.ranks, replay.reaches)
        found = [*islice(replay.replay(every), 1)]  # others may be the same in other words
    if len({(one.kind, of) for one, of in found}) > 1:
        return []
    found = found or [(one, replay.every) for one in replay.overwritten()]
    return [_cause(evidence, found)] if found else []


def _cause(evidence: Evidence, found: Sequence[Found]) -> Cause:
    """The cause: of several stages with equal effect the last in flow order, as the others hand it on."""
    first, concerned = found[0]
    same = {stage for one, _ in found if one.text == first.text for stage in one.stages}
    microbatches = () if len(concerned) == evidence.microbatches else concerned
    if len(first.stages) > 1:
        cause = Cause(first.kind, microbatches=microbatches, detail=f"as if {first.text}")
        return replace(cause, stages=first.stages if len(same) < evidence.stages else ())
    stage = None if not same else max(same) if first.forward else min(same)
    others = join_numbers(sorted(same - {stage}))
    detail = f"as if {first.text}" + (f", here or on its way through stage {others}" if others else "")
    holders = [] if stage is None else evidence.holders(stage)
    rank = holders[0] if len(holders) == 1 else None
    cause = Cause(first.kind, rank=rank, stage=stage, microbatches=microbatches, detail=detail)
    return or_zeros(cause, forward=first.forward) if first.kind == "uninitialised" else cause


class Replay:
    """Observed results, and the reference's results with a substitution."""

    def __init__(self, evidence: Evidence, beside: ModelBeside) -> None:
        self.beside, self.every = beside, tuple(range(evidence.microbatches))
        self._evidence, self._end = evidence, perf_counter() + _PATIENCE_S
        losses = evidence.observed.losses(evidence.number) if evidence.run is not None else ()
        self._losses: Sequence[float] = losses if len(losses) == len(self.every) else ()
        mismatches = evidence.verdict.mismatches
        # The first microbatch with a wrong loss; by default any shows a substitution's effect.
        self._first = min((m.microbatch or 0 for m in mismatches if m.law == "loss"), default=0)
        self._limits = {(m.stage, m.parameter): m.limit or 0.0 for m in mismatches if m.law == "gradient"}
        every = evidence.expected.gradients.items()
        self._expected = {site: one.cpu().double() for site, one in every if one is not None}

    @property
    def dtype(self) -> torch.dtype:
        """The reference's computing type."""
        return next(one.dtype for one in self._evidence.expected.gradients.values() if one is not None)

    @property
    def possible(self) -> bool:
        """True if all gradients compare so closely that few changes fit, and the reference repeats itself."""
        off, losses = self._off.values(), self._evidence.expected.losses
        if max(self._limits.values(), default=1.0) > ALIKE or not all(bool(one.isfinite().all()) for one in off):
            return False
        if not 0 < sum(one.numel() for one in off) * len(self.every) <= _MOST:
            return False
        return len(self._right) == len(losses) and is_same_loss(self._right[0].loss, losses[0])

    def replay(self, substitutions: Iterable[Substitution]) -> Iterator[Found]:
        """Yield substitutions that reproduce everything, with their microbatches, until the time limit."""
        tried = takewhile(lambda _: perf_counter() < self._end, substitutions)
        return ((one, concerned) for one in tried if (concerned := self._microbatches(one)))

    def reaches(self, one: Substitution) -> bool:
        """True if it gives the first wrong loss, or all are right, and changes all wrong gradients."""
        return self._show(one) is not None

    def overwritten(self) -> list[Substitution]:
        """Detect unknown content in the place of a stage's stored input.

        Exactly the gradients that its backward computes from this input are wrong: some of its own, and all before it.
        """
        wrong = self._evidence.wrong("gradient")
        last = max((stage for stage, _ in wrong), default=0)
        if not last or self._evidence.differs("loss") or not self.beside.ends(last - 1):
            return []
        one = change_kept(self.beside, last)
        made, own = self._make(0, one), {site for site in self._off if site[0] == last}
        return [one] if made is not None and self._moves(0, made) == wrong and not own <= wrong else []

    def _show(self, one: Substitution) -> Contribution | None:
        """Play the first microbatch; None if this already excludes the substitution, as a forward alone may."""
        if perf_counter() > self._end or (self._losses and one.forward != self._evidence.differs("loss")):
            return None
        if self._losses:
            loss = self.beside.loss_of(self._batch(self._first, one), one.planted)
            if loss is None or not is_same_loss(self._losses[self._first], loss):
                return None
        made = self._make(self._first, one)
        if made is None or not self._gives_loss(self._first, made):
            return None
        return made if self._moves(self._first, made) >= self._evidence.wrong("gradient") else None

    def _microbatches(self, one: Substitution) -> tuple[int, ...]:
        """Find the affected microbatches, if the substitution reproduces everything observed.

        Their changes sum to the error, by least squares: each once, or not at all.
        """
        shown = self._show(one)
        every = [] if shown is None else [shown if m == self._first else self._make(m, one) for m in self.every]
        made = [each for each in every if each is not None]
        if shown is None or len(made) < len(every):
            return ()
        count = len(made)
        square, right = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
        for site, off in self._off.items():
            rows = self._move(site, made).flatten(1)
            weight = 1.0 / max(float(self._expected[site].norm()) ** 2, 1e-300)
            square += weight * (rows @ rows.T)
            right += weight * (rows @ off.flatten())
        parts = torch.linalg.lstsq(square, right, driver="gelsd").solution
        whole = parts.round()
        if bool(((parts - whole).abs() > DECIDED).any()) or not {*whole.tolist()} <= {0.0, 1.0}:
            return ()
        concerned = [m for m, part in enumerate(whole.tolist()) if part]
        if not all(self._gives_loss(m, made[m] if m in concerned else self._right[m]) for m in self.every):
            return ()
        for site, off in self._off.items():
            left, expected = off - self._move(site, made)[concerned].sum(dim=0), self._expected[site]
            most = max(CLOSE, self._limits.get(site, 0.0))
            for p in (2.0, torch.inf):
                if left.norm(p=p) > most * max(one.norm(p=p) for one in (expected, expected + off)):
                    return ()
        return tuple(concerned)

    def _move(self, site: Site, made: Sequence[Contribution]) -> Tensor:
        """Changes in a gradient by microbatch."""
        expected, pairs = self._expected[site], zip(made, self._right, strict=True)
        moves = (_wide(new.gradients[site], expected) - _wide(old.gradients[site], expected) for new, old in pairs)
        return torch.stack([*moves])

    def _moves(self, microbatch: int, made: Contribution) -> frozenset[Site]:
        """Find gradients that change for a microbatch."""
        found = set()
        for site in self._off:
            one, other = made.gradients[site], self._right[microbatch].gradients[site]
            if one is not other and (one is None or other is None or not torch.equal(one, other)):
                found.add(site)
        return frozenset(found)

    def _make(self, microbatch: int, one: Substitution) -> Contribution | None:
        return self.beside.play(self._batch(microbatch, one), one.planted)

    def _batch(self, microbatch: int, one: Substitution) -> Batch:
        return self.beside.batches[microbatch] if one.given is None else one.given(microbatch)

    def _gives_loss(self, microbatch: int, made: Contribution) -> bool:
        """True if ``made`` matches the observed loss, if any."""
        return not self._losses or is_same_loss(self._losses[microbatch], made.loss)

    @cached_property
    def _right(self) -> list[Contribution]:
        made = [self.beside.play(batch) for batch in self.beside.batches]
        return [one for one in made if one is not None]

    @cached_property
    def _off(self) -> Mapping[Site, Tensor]:
        """Gradient errors by site; empty if shapes differ.

        A right one with a large error is rounding alone.
        """
        wrong, off = self._evidence.wrong("gradient", "presence"), dict[Site, Tensor]()
        for site, expected in self._expected.items():
            observed = self._evidence.gradients.get(site)
            if observed is not None and observed.shape != expected.shape:
                return {}
            off[site] = _wide(observed, expected) - expected
        return {s: one for s, one in off.items() if s in wrong or not one.norm() > ALIKE * self._expected[s].norm()}


def is_same_loss(one: float, other: float) -> bool:
    """True if two numbers may be the same loss."""
    return abs(one - other) <= CLOSE * abs(other)


def _wide(gradient: Gradient, like: Tensor) -> Tensor:
    """Widen ``gradient`` to fp64; zeros like ``like`` for None."""
    return torch.zeros_like(like) if gradient is None else gradient.cpu().double()
