"""What a factor comes from: the loss scale, or a microbatch that counts several times."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch.nn as nn

from pipeproof import watch
from pipeproof.core.cause import Cause
from pipeproof.core.verdict import Verdict
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.loss_scale import LossScale
from pipeproof.explain.rules.factors import (
    Candidate,
    by_loss_scale,
    find_candidate,
    is_near,
    multiples,
    round_candidates,
)
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.steps import backward, blocks, loss_fn, pairs

ONE = LossScale(1024.0, 1024.0)
FACTOR = Cause("scale", rank=1, stage=1, factor=1024.0, detail="times")
EVIDENCE = Evidence(Verdict("", "fail", "none", ()), (0, 1), microbatches=8, ranks=2, gradients={}, norms=[])
OF_1024, OF_2048 = "; 1024 is the loss scale", "; 2048 is the loss scale"


@pytest.mark.parametrize(
    ("factor", "scale", "said"),
    [
        (1024.0, ONE, OF_1024),
        (1 / 1024, ONE, OF_1024),
        (512.0, ONE, ""),
        (0.5, LossScale(1024.0, 2048.0), "; divided by 2048, where losses were multiplied by 1024"),
        (2.0, LossScale(2048.0, 1024.0), "; divided by 1024, where losses were multiplied by 2048"),
        (0.5, LossScale(1024.0, 1024.0, ranks={0: 2048.0}), ""),  # that is of another rank
        (0.5, LossScale(1024.0, 1024.0, ranks={1: 2048.0}), "; divided by 2048, where losses were multiplied by 1024"),
        (1024.0, LossScale(1024.0, 2048.0), OF_1024),
        (1 / 2048, LossScale(1024.0, 2048.0), OF_2048),
        (1.0, LossScale(1.0, 1.0), ""),
        (1024.0, None, ""),
    ],
)
def test_of_a_factor_it_is_said_that_it_is_the_loss_scale(factor: float, scale: LossScale | None, said: str) -> None:
    cause, evidence = replace(FACTOR, factor=factor), replace(EVIDENCE, scale=scale)
    assert by_loss_scale(cause, evidence) == replace(cause, detail=f"times{said}")
    again = replace(cause, kind="doubled")
    assert by_loss_scale(again, evidence) == again


def last_counts(
    model: Any, microbatches: list[Any], *, times: float = 2.0, loss: bool = False, again: bool = False, see: bool
) -> Any:
    """The last microbatch counts so often: its gradient is multiplied, or its reported loss, or it runs again."""
    stages = (model[:2], model[2:])
    first, second = map(watch, stages) if see else stages
    losses = []
    for number, (x, target) in enumerate(microbatches):
        last = number == len(microbatches) - 1
        factor = times if last and not again else 1.0
        for _ in range(round(times) if last and again else 1):
            made: Any = loss_fn(second(first(x)), target)
            (factor * made / len(microbatches)).backward()
        losses.append(made.item() * (factor if loss else 1.0))
    return [first, second], losses


@pytest.mark.parametrize("times", [2.0, 3.0])
@pytest.mark.parametrize(
    ("step", "kinds"),
    [
        (partial(last_counts, see=False), ["doubled", "scale"]),
        (partial(last_counts, see=False, again=True), ["doubled", "scale"]),  # near: the very same sums
        (partial(last_counts, see=False, loss=True), ["doubled", "scale"]),
        (partial(last_counts, see=True), ["scale"]),  # observed where it came in
        (partial(last_counts, see=True, loss=True), ["scale"]),
        (partial(last_counts, see=True, again=True), ["doubled"]),
    ],
)
def test_it_is_said_to_run_again_only_where_that_was_seen(
    whitebox_here: WhiteBox, step: Any, kinds: list[str], times: float
) -> None:
    verdict = whitebox_here.validate(
        partial(step, times=times), reference=built, microbatches=pairs(5), ranks=1, loss_fn=loss_fn
    )
    explanations = [verdict.causes, *verdict.alternatives]
    assert [(cause.kind, cause.microbatches) for (cause,) in explanations] == [(kind, (4,)) for kind in kinds]
    assert [cause.factor for (cause,) in explanations] == [pytest.approx(times)] * len(kinds)


def quartered(model: Any, microbatches: list[Any]) -> Any:
    """There is one count of targets for each microbatch."""
    return model, backward(model, microbatches, divisor=4.0 * len(microbatches))


def test_tokens_that_nobody_counts_explain_no_factor(whitebox_here: WhiteBox) -> None:
    verdict = whitebox_here.validate(quartered, reference=built, microbatches=pairs(4), ranks=1, loss_fn=loss_fn)
    golden(verdict.causes[0].detail)


def built() -> nn.Module:
    return blocks(seed=3)


@pytest.mark.parametrize(
    ("one", "other", "noise", "same"),
    [
        (1024.0, 1024.0, 0.0, True),
        (1024.5, 1024.0, 1e-3, True),  # coarse types round
        (1024.5, 1024.0, 0.0, False),
        (512.0, 1024.0, 1e-3, False),
        (-1024.0, 1024.0, 1e-3, False),
        (None, 1024.0, 1e-3, False),
        (float("nan"), 1024.0, 1e-3, False),
    ],
)
def test_numbers_are_near_up_to_rounding(one: float | None, other: float, noise: float, same: bool) -> None:
    assert is_near(one, other, noise) is same


def test_a_number_is_the_first_candidate_that_it_may_be() -> None:
    right = 1.2345
    candidates = [*multiples(right, (1, 2, 2, 8)), *round_candidates(right), Candidate("twice", 2 * right)]
    named = {value: find_candidate(value, candidates) for value in (2 * right, right / 8, 1.234375, right, 3.0)}
    golden("\n".join(f"{value:.6g}: {one.words if one else 'nothing known'}" for value, one in named.items()))
