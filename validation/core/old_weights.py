"""Detect stale data: calls with an earlier step's tensor, and steps computed with old weights.

A narrow type rounds as much as an update moves weights, so sizes prove nothing. Equal bits do.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pipeproof.core.limits import FP32
from pipeproof.core.tolerance import error, same_bits
from pipeproof.core.verdict import Verdict, overall
from pipeproof.reference.step import Expected, Gradient, Site

_NEARER = FP32.factor  # nearness ratio that chance cannot reach


class StaleCall(NamedTuple):
    """A ``stage``'s ``call`` with a tensor from an earlier ``operation`` and ``microbatch``; numbers start at 1."""

    stage: int
    call: int
    operation: int
    microbatch: int


class Given(NamedTuple):
    """A step's results: microbatch losses, total, gradients by parameter."""

    losses: Sequence[float]
    loss: float
    gradients: Mapping[str, Gradient]

    def of(self, what: str | int | None) -> Gradient:
        """Return a parameter's gradient, a microbatch's loss, or the total."""
        if isinstance(what, str):
            return self.gradients.get(what)
        return torch.tensor([self.loss if what is None else self.losses[what]], dtype=torch.float64)


WithWeights = Callable[[Mapping[str, Tensor]], Given | None]  # None: it fails to run


class HasWeights(Protocol):
    """The right operation's starting weights."""

    @property
    def weights(self) -> Mapping[str, Tensor]: ...


class Step(Protocol):
    """A judged step: results, and reference results under other weights."""

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
    def right(self) -> HasWeights | None: ...

    @property
    def earlier_weights(self) -> Sequence[Mapping[str, Tensor]]: ...

    @property
    def with_weights(self) -> WithWeights | None: ...


class OldWeights(NamedTuple):
    """Stages that computed with weights from an earlier ``operation`` (from 1; 0: another check's step).

    exact: the reference with these weights reproduces all observations bit for bit.
    """

    stages: tuple[int, ...]
    operation: int
    exact: bool


def hold_to_old_weights(verdict: Verdict, look: Callable[[], Step]) -> Verdict:
    """Turn "unknown" into "fail" if old weights reproduce the results bit for bit.

    ``look`` fetches the step, for unknown verdicts only.
    """
    if verdict.outcome != "unknown" or not verdict.mismatches:
        return verdict
    try:
        found = find_old_weights(look())
    except Exception:  # any type: the user's model runs again
        return verdict
    if found is None or not found.exact:
        return verdict
    wrong = {one.law for one in verdict.mismatches}
    laws = tuple(replace(law, outcome="fail") if law.name in wrong else law for law in verdict.laws)
    return replace(verdict, outcome=overall(laws), laws=laws)


def find_old_weights(step: Step) -> OldWeights | None:
    """Return the old weights with which the reference reproduces the step, or None.

    Then no microbatch's loss agrees, and all values are far nearer to the reference with these weights.
    """
    play, values = step.with_weights, _values(step)
    loss_agrees = [same_bits(*pair) for what, pair in values.items() if not isinstance(what, str)]
    moved = not any(loss_agrees) and not all(same_bits(*pair) for pair in values.values())
    if play is None or step.right is None or not moved:
        return None
    known, number = step.right.weights, step.verdict.mismatches[0].operation
    for ago, earlier in enumerate(step.earlier_weights, start=1):
        for stages in _candidates(step.placement):
            names = {name for stage, name in step.gradients if stage in stages and name in earlier}
            same = {one for one in names if (now := known.get(one)) is not None and same_bits(earlier[one], now)}
            other = {name: earlier[name] for name in names - same}
            given = play(other) if other else None
            if given is not None and all(_is_nearer(*pair, given.of(what)) for what, pair in values.items()):
                pairs = ((given.of(what), observed) for what, (observed, _) in values.items())
                exact = all(one is not None and same_bits(observed, one) for one, observed in pairs)
                return OldWeights(stages, max(0, number - ago), exact)
    return None


def _candidates(placement: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield stage groups: all, per rank, single."""
    ranks = (tuple(s for s, rank in enumerate(placement) if rank == own) for own in sorted({*placement}))
    yield from dict.fromkeys([tuple(range(len(placement))), *ranks, *((stage,) for stage in range(len(placement)))])


def _values(step: Step) -> dict[str | int | None, tuple[Tensor, Tensor]]:
    """Return observed and expected values: losses by microbatch (None: total), and gradients by parameter."""
    number = min(one.operation for one in step.verdict.mismatches)
    losses = [one for one in step.verdict.measured.of("loss") if one.operation == number]
    values: dict[str | int | None, tuple[Tensor, Tensor]] = {}
    for one in losses:
        if one.observed is not None and one.expected is not None:
            pair = torch.tensor([[one.observed], [one.expected]], dtype=torch.float64)
            values[one.microbatch] = pair[0], pair[1]
    expected = {name: one for (_, name), one in step.expected.gradients.items()}
    there = step.gradients if step.operation == "train" else {}  # otherwise they belong to no expected sum
    for (_, name), gradient in there.items():
        if gradient is not None and (right := expected.get(name)) is not None:
            values[name] = gradient, right
    return values


def _is_nearer(observed: Tensor, expected: Tensor, played: Gradient) -> bool:
    if played is None or observed.shape != played.shape:
        return False
    gap = error(observed.cpu(), played.cpu())
    return gap <= FP32.least or _NEARER * gap <= error(observed.cpu(), expected.cpu())
