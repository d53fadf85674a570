"""Detect stale data: calls with an earlier step's tensor, and steps computed with old weights.

A narrow type rounds as much as an update moves weights, so sizes prove nothing. Equal bits do.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pipeproof.core.limits import FP32
from pipeproof.core.tolerance import error, same_bits
from pipeproof.core.verdict import Verdict, overall
from pipeproof.reference.step import Gradient, Site

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


class OldWeights(NamedTuple):
    """Stages that computed with weights from an earlier ``operation`` (from 1; 0: another check's step).

    exact: the reference with these weights reproduces all observations bit for bit.
    """

    stages: tuple[int, ...]
    operation: int
    exact: bool


def hold_to_old_weights(verdict: Verdict, look: Callable[[], OldWeights | None]) -> Verdict:
    """Turn "unknown" into "fail" if old weights reproduce the results bit for bit.

    ``look`` finds them, for unknown verdicts only.
    """
    if verdict.outcome != "unknown" or not verdict.mismatches:
        return verdict
    try:
        found = look()
    except Exception:  # any type: the user's model runs again
        return verdict
    if found is None or not found.exact:
        return verdict
    wrong = {one.law for one in verdict.mismatches}
    laws = tuple(replace(law, outcome="fail") if law.name in wrong else law for law in verdict.laws)
    return replace(verdict, outcome=overall(laws), laws=laws)


def find_old_weights(
    verdict: Verdict,
    gradients: Mapping[Site, Gradient],
    expected: Mapping[str, Gradient],
    placement: Sequence[int],
    *,
    known: Mapping[str, Tensor],
    earlier: Sequence[Mapping[str, Tensor]],
    play: WithWeights,
) -> OldWeights | None:
    """Return the old weights with which the reference reproduces the first faulty operation, or None.

    Then no microbatch's loss agrees, and all values are far nearer to the reference with these weights.

    gradients: observed ones. expected: those to compare them with. known: right starting weights; earlier: those of
    earlier operations, latest first. play: results under other weights.
    """
    number = min(one.operation for one in verdict.mismatches)
    pairs: dict[str | int | None, tuple[Tensor, Tensor]] = {}  # observed and expected, as in ``Given.of``
    for one in verdict.measured.of("loss"):
        if one.operation == number and one.observed is not None and one.expected is not None:
            both = torch.tensor([[one.observed], [one.expected]], dtype=torch.float64)
            pairs[one.microbatch] = both[0], both[1]
    for (_, name), gradient in gradients.items():
        if gradient is not None and (right := expected.get(name)) is not None:
            pairs[name] = gradient, right
    same = [what for what, pair in pairs.items() if same_bits(*pair)]
    if len(same) == len(pairs) or any(not isinstance(what, str) for what in same):
        return None
    for ago, weights in enumerate(earlier, start=1):
        for stages in _candidates(placement):
            names = {name for stage, name in gradients if stage in stages and name in weights}
            still = {name for name in names if name in known and same_bits(weights[name], known[name])}
            given = play({name: weights[name] for name in names - still}) if names - still else None
            played = {} if given is None else {what: given.of(what) for what in pairs}
            if played and all(_is_nearer(*pair, played[what]) for what, pair in pairs.items()):
                each = ((observed, played[what]) for what, (observed, _) in pairs.items())
                exact = all(one is not None and same_bits(observed, one) for observed, one in each)
                return OldWeights(stages, max(0, number - ago), exact)
    return None


def _candidates(placement: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield stage groups: all, per rank, single."""
    ranks = (tuple(s for s, rank in enumerate(placement) if rank == own) for own in sorted({*placement}))
    yield from dict.fromkeys([tuple(range(len(placement))), *ranks, *((stage,) for stage in range(len(placement)))])


def _is_nearer(observed: Tensor, expected: Tensor, played: Gradient) -> bool:
    if played is None or observed.shape != played.shape:
        return False
    gap = error(observed.cpu(), played.cpu())
    return gap <= FP32.least or _NEARER * gap <= error(observed.cpu(), expected.cpu())
