"""Is there one thing that, had it gone wrong in the reference, would have given all of what was observed?

The reference plays every microbatch with one substitution. Which microbatches it happened to is solved for: each adds
what the substitution changes, once or not at all. That all losses and all gradients come out proves a cause.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice, takewhile
from time import perf_counter

import torch
from torch import Tensor

from pipeproof.core.cause import Cause, listed
from pipeproof.core.observe.recording import Site
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.limits import ALIKE, CLOSE, DECIDED
from pipeproof.explain.model_beside import ModelBeside
from pipeproof.explain.rules.place import or_zeros
from pipeproof.explain.substitutions import Substitution, between, inside, kept_otherwise, of_data
from pipeproof.reference.data import Batch
from pipeproof.reference.step import Contribution, Gradient

_MOST = 1 << 27  # numbers that the gradients of all microbatches may have: each change is tried with each of them
_PATIENCE_S = 60.0

Found = tuple[Substitution, tuple[int, ...]]  # and the microbatches that it happened to


def replayed(evidence: Evidence) -> list[Cause]:
    """The one thing that gives every loss and every gradient; none where several kinds of things would."""
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
    """The cause: of several stages that would show the same the last that it came to, as the others hand it on."""
    first, concerned = found[0]
    same = {stage for one, _ in found if one.text == first.text for stage in one.stages}
    microbatches = () if len(concerned) == evidence.microbatches else concerned
    if len(first.stages) > 1:
        cause = Cause(first.kind, microbatches=microbatches, detail=f"as if {first.text}")
        return replace(cause, stages=first.stages if len(same) < evidence.stages else ())
    stage = None if not same else max(same) if first.forward else min(same)
    others = listed(sorted(same - {stage}))
    detail = f"as if {first.text}" + (f", here or on its way through stage {others}" if others else "")
    holders = [] if stage is None else evidence.holders(stage)
    rank = holders[0] if len(holders) == 1 else None
    cause = Cause(first.kind, rank=rank, stage=stage, microbatches=microbatches, detail=detail)
    return or_zeros(cause, forward=first.forward) if first.kind == "uninitialised" else cause


class Replay:
    """What was observed, and what the reference gives with something substituted."""

    def __init__(self, evidence: Evidence, beside: ModelBeside) -> None:
        self.beside, self.every = beside, tuple(range(evidence.microbatches))
        self._evidence, self._end = evidence, perf_counter() + _PATIENCE_S
        losses = evidence.observed.losses(evidence.number) if evidence.seen is not None else ()
        self._losses: Sequence[float] = losses if len(losses) == len(self.every) else ()

    @property
    def dtype(self) -> torch.dtype:
        """What the reference computes in."""
        return next(one.dtype for one in self._evidence.expected.gradients.values() if one is not None)

    @property
    def possible(self) -> bool:
        """Whether all gradients can be compared so closely that few changes fit, and the reference repeats itself."""
        off, losses = self._off.values(), self._evidence.expected.losses
        if max(self._limits.values(), default=1.0) > ALIKE or not all(bool(one.isfinite().all()) for one in off):
            return False
        if not 0 < sum(one.numel() for one in off) * len(self.every) <= _MOST:
            return False
        return len(self._right) == len(losses) and is_same_loss(self._right[0].loss, losses[0])

    def replay(self, substitutions: Iterable[Substitution]) -> Iterator[Found]:
        """Those that give all losses and all gradients, with the microbatches; none where that takes too long."""
        tried = takewhile(lambda _: perf_counter() < self._end, substitutions)
        return ((one, concerned) for one in tried if (concerned := self._microbatches(one)))

    def reaches(self, one: Substitution) -> bool:
        """Whether it gives the first loss that is wrong, or all are right, and changes all gradients that are wrong."""
        return self._shown(one) is not None

    def overwritten(self) -> list[Substitution]:
        """That something else, nobody knows what, was in the place of what a stage keeps of its input.

        Exactly what its backward reads that for is wrong: some of its own gradients, and all before it.
        """
        wrong = self._evidence.wrong("gradient")
        last = max((stage for stage, _ in wrong), default=0)
        if not last or self._evidence.differs("loss") or not self.beside.ends(last - 1):
            return []
        one = kept_otherwise(self.beside, last)
        made, own = self._made(0, one), {site for site in self._off if site[0] == last}
        return [one] if made is not None and self._moves(0, made) == wrong and not own <= wrong else []

    @property
    def _first(self) -> int:
        """The first microbatch with a wrong loss; where none is wrong, any shows what a substitution changes."""
        wrong = [m.microbatch or 0 for m in self._evidence.verdict.mismatches if m.law == "loss"]
        return min(wrong, default=0)

    def _shown(self, one: Substitution) -> Contribution | None:
        """What that microbatch gives; None where that shows already that ``one`` did not happen."""
        if perf_counter() > self._end or (self._losses and one.forward != self._evidence.differs("loss")):
            return None
        if self._losses and not self._is_loss(self.beside.loss_of(self._batch(self._first, one), one.planted)):
            return None  # a forward alone has shown it
        made = self._made(self._first, one)
        if made is None or not self._gives_loss(self._first, made):
            return None
        return made if self._moves(self._first, made) >= self._evidence.wrong("gradient") else None

    def _is_loss(self, loss: float | None) -> bool:
        """Whether it is that of the first microbatch of interest."""
        return loss is not None and is_same_loss(self._losses[self._first], loss)

    def _microbatches(self, one: Substitution) -> tuple[int, ...]:
        """Those to which ``one`` happened, where that gives all that was observed; else none."""
        shown = self._shown(one)
        if shown is None:
            return ()
        every = [shown if m == self._first else self._made(m, one) for m in self.every]
        made = [each for each in every if each is not None]
        concerned = self._solve(made) if len(made) == len(every) else ()
        losses = all(self._gives_loss(m, made[m] if m in concerned else self._right[m]) for m in self.every)
        return concerned if losses and all(self._gives(site, made, concerned) for site in self._off) else ()

    def _solve(self, made: Sequence[Contribution]) -> tuple[int, ...]:
        """The microbatches whose changes, once each, are what is off, as least squares say; none where they do not."""
        count = len(made)
        square, right = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
        for site, off in self._off.items():
            rows, weight = self._moved(site, made).flatten(1), 1.0 / max(float(self._due[site].norm()) ** 2, 1e-300)
            square += weight * (rows @ rows.T)
            right += weight * (rows @ off.flatten())
        parts = torch.linalg.lstsq(square, right, driver="gelsd").solution
        whole = parts.round()
        if bool(((parts - whole).abs() > DECIDED).any()) or not {*whole.tolist()} <= {0.0, 1.0}:
            return ()
        return tuple(m for m, part in enumerate(whole.tolist()) if part)

    def _gives(self, site: Site, made: Sequence[Contribution], concerned: Sequence[int]) -> bool:
        """Whether a gradient is off by what the change of these microbatches makes of it."""
        due, off = self._due[site], self._off[site]
        left = off - self._moved(site, made)[[*concerned]].sum(dim=0)
        most = max(CLOSE, self._limits.get(site, 0.0))
        return all(left.norm(p=p) <= most * max(one.norm(p=p) for one in (due, due + off)) for p in (2.0, torch.inf))

    def _moved(self, site: Site, made: Sequence[Contribution]) -> Tensor:
        """By microbatch, what the change adds to a gradient."""
        due, pairs = self._due[site], zip(made, self._right, strict=True)
        return torch.stack([_wide(new.gradients[site], due) - _wide(old.gradients[site], due) for new, old in pairs])

    def _moves(self, microbatch: int, made: Contribution) -> frozenset[Site]:
        """The gradients to which it makes any difference in a microbatch."""
        pairs = {site: (made.gradients[site], self._right[microbatch].gradients[site]) for site in self._off}
        return frozenset(site for site, (one, old) in pairs.items() if not _is_equal(one, old))

    def _made(self, microbatch: int, one: Substitution) -> Contribution | None:
        return self.beside.played(self._batch(microbatch, one), one.planted)

    def _batch(self, microbatch: int, one: Substitution) -> Batch:
        return self.beside.batches[microbatch] if one.given is None else one.given(microbatch)

    def _gives_loss(self, microbatch: int, made: Contribution) -> bool:
        """Whether ``made`` has the loss that was observed, if one was."""
        return not self._losses or is_same_loss(self._losses[microbatch], made.loss)

    @cached_property
    def _right(self) -> list[Contribution]:
        made = [self.beside.played(batch) for batch in self.beside.batches]
        return [one for one in made if one is not None]

    @cached_property
    def _limits(self) -> Mapping[tuple[int | None, str | None], float]:
        """By gradient that is wrong, how far rounding may take it."""
        found = [m for m in self._evidence.verdict.mismatches if m.law == "gradient"]
        return {(m.stage, m.parameter): m.limit or 0.0 for m in found}

    @cached_property
    def _due(self) -> Mapping[Site, Tensor]:
        every = self._evidence.expected.gradients.items()
        return {site: one.cpu().double() for site, one in every if one is not None}

    @cached_property
    def _off(self) -> Mapping[Site, Tensor]:
        """By how much each gradient that tells anything is not what is expected; empty where any has another shape.

        A right one that is far off is rounding alone.
        """
        seen, wrong = self._evidence.gradients, self._evidence.wrong("gradient", "presence")
        if any((one := seen.get(site)) is not None and one.shape != due.shape for site, due in self._due.items()):
            return {}
        off = {site: _wide(seen.get(site), due) - due for site, due in self._due.items()}
        return {s: one for s, one in off.items() if s in wrong or not one.norm() > ALIKE * self._due[s].norm()}


def is_same_loss(one: float, other: float) -> bool:
    """Whether two numbers may be one loss."""
    return abs(one - other) <= CLOSE * abs(other)


def _is_equal(one: Gradient, other: Gradient) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _wide(gradient: Gradient, like: Tensor) -> Tensor:
    """``gradient`` as a place among others ``like`` it; nothing is zero."""
    return torch.zeros_like(like) if gradient is None else gradient.cpu().double()
