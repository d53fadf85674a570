"""What a step before had: calls that were given it, and whether its weights give what was observed.

Where a narrow type rounds as much as an update moves weights, sizes tell nothing. Bits do: they are a proof.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pipeproof.core.limits import FP32
from pipeproof.core.tolerance import error, same_bits
from pipeproof.core.verdict import Verdict, overall
from pipeproof.reference.step import Expected, Gradient, Site

_NEARER = FP32.factor  # times as near to what old weights give as to what is due: by chance nothing is


class StaleCall(NamedTuple):
    """``call``, from 1 on, of ``stage`` with a tensor that a microbatch of an ``operation`` before, from 1 on, had."""

    stage: int
    call: int
    operation: int
    microbatch: int


class Given(NamedTuple):
    """What a step gives: each microbatch's loss, what they are together, and gradients by parameter."""

    losses: Sequence[float]
    loss: float
    gradients: Mapping[str, Gradient]

    def of(self, microbatch: int | None) -> float:
        """The loss of a microbatch; None: of the whole step."""
        return self.loss if microbatch is None else self.losses[microbatch]


WithWeights = Callable[[Mapping[str, Tensor]], Given | None]  # None: it does not run


class HasWeights(Protocol):
    """What is known of the right operation: the weights that it begins with."""

    @property
    def weights(self) -> Mapping[str, Tensor]: ...


class Step(Protocol):
    """A step that was judged, what it gave, and what the reference gives with other weights."""

    @property
    def verdict(self) -> Verdict: ...

    @property
    def placement(self) -> Sequence[int]: ...

    @property
    def operation(self) -> str: ...

    @property
    def gradients(self) -> Mapping[Site, Gradient]: ...

    @property
    def expected(self) -> Expected: ...

    @property
    def due(self) -> HasWeights | None: ...

    @property
    def earlier_weights(self) -> Sequence[Mapping[str, Tensor]]: ...

    @property
    def with_weights(self) -> WithWeights | None: ...


class OldWeights(NamedTuple):
    """``stages`` that computed with weights of an ``operation`` before, from 1 on; 0: of a step of another check.

    ``exact``: with these the reference gives all that was observed bit for bit.
    """

    stages: tuple[int, ...]
    operation: int
    exact: bool


def hold_to_old_weights(verdict: Verdict, look: Callable[[], Step]) -> Verdict:
    """``verdict``; a fail where what rounding might excuse is, bit for bit, what old weights give.

    ``look`` gives the step that it is about, and is called where that is unknown.
    """
    if verdict.verdict != "unknown" or not verdict.mismatches:
        return verdict
    try:
        found = find_old_weights(look())
    except Exception:  # no one type: the user's model runs once more
        return verdict
    if found is None or not found.exact:
        return verdict
    wrong = {one.law for one in verdict.mismatches}
    laws = tuple(replace(law, outcome="fail") if law.name in wrong else law for law in verdict.laws)
    return replace(verdict, verdict=overall(laws), laws=laws)


def find_old_weights(step: Step) -> OldWeights | None:
    """With which old weights the reference gives all that was observed; None: with none that are known."""
    play, seen = step.with_weights, _ObservedStep.of(step)
    if play is None or step.due is None or not seen.moved:
        return None
    known, number = step.due.weights, step.verdict.mismatches[0].operation
    for ago, earlier in enumerate(step.earlier_weights, start=1):
        for stages in _candidates(step.placement):
            names = {name for stage, name in step.gradients if stage in stages and name in earlier}
            same = {one for one in names if (now := known.get(one)) is not None and same_bits(earlier[one], now)}
            other = {name: earlier[name] for name in names - same}
            given = play(other) if other else None
            if given is not None and seen.is_nearer(given):
                return OldWeights(stages, max(0, number - ago), seen.is_that(given))
    return None


def _candidates(placement: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All stages; those of each rank; each one."""
    ranks = (tuple(s for s, rank in enumerate(placement) if rank == own) for own in sorted({*placement}))
    yield from dict.fromkeys([tuple(range(len(placement))), *ranks, *((stage,) for stage in range(len(placement)))])


@dataclass(frozen=True)
class _ObservedStep:
    """What was observed of a step, beside what is due: losses, None being the whole step's, and gradients."""

    losses: Mapping[int | None, tuple[float, float]]
    gradients: Mapping[str, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, step: Step) -> "_ObservedStep":
        number = min(one.operation for one in step.verdict.mismatches)
        losses = [one for one in step.verdict.measured.of("loss") if one.operation == number]
        expected = {name: one for (_, name), one in step.expected.gradients.items()}
        there = step.gradients if step.operation == "train" else {}  # else they are of no sum that is due
        pairs = ((name, one, expected.get(name)) for (_, name), one in there.items())
        return cls(
            {one.microbatch: (one.found, one.due) for one in losses if one.found is not None and one.due is not None},
            {name: (one, due) for name, one, due in pairs if one is not None and due is not None},
        )

    @property
    def moved(self) -> bool:
        """Whether it may come of other weights in some stage: then no microbatch's loss is what is due."""
        same = [found == due for found, due in self.losses.values()]
        return not any(same) and (bool(same) or any(not same_bits(*pair) for pair in self.gradients.values()))

    def is_nearer(self, given: Given) -> bool:
        """Whether all of it is far nearer to what was ``given`` than to what is due."""
        losses = [(torch.tensor(pair, dtype=torch.float64), given.of(m)) for m, pair in self.losses.items()]
        numbers = all(_is_nearer(one[:1], one[1:], one.new_tensor([played])) for one, played in losses)
        return numbers and all(_is_nearer(*pair, given.gradients.get(name)) for name, pair in self.gradients.items())

    def is_that(self, given: Given) -> bool:
        """Whether all of it is what was ``given``, bit for bit."""
        played = ((one, given.gradients.get(name)) for name, (one, _) in self.gradients.items())
        same = all(other is not None and same_bits(one, other) for one, other in played)
        return same and all(found == given.of(microbatch) for microbatch, (found, _) in self.losses.items())


def _is_nearer(seen: Tensor, due: Tensor, played: Gradient) -> bool:
    if played is None or seen.shape != played.shape:
        return False
    gap = error(seen.cpu(), played.cpu())
    return gap <= FP32.least or _NEARER * gap <= error(seen.cpu(), due.cpu())
