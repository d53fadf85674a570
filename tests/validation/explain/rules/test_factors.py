"""What a factor comes from: the loss scale, or a microbatch that counts several times, as what else is seen tells."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch.nn as nn

from pipeproof.core.cause import Cause
from pipeproof.core.verdict import Verdict
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.loss_scale import LossScale
from pipeproof.explain.rules.factors import by_loss_scale, of_gradients
from pipeproof.foreign import WhiteBox, watch
from pipeproof.observers.observed import Passed
from tests.support.golden import golden
from tests.support.steps import blocks, loss_fn, pairs

ONE = LossScale(1024.0, 1024.0, 1024.0)
FACTOR = Cause("scale", rank=1, stage=1, factor=1024.0, detail="1024 times")
EVIDENCE = Evidence(Verdict("", "fail", "none", ()), (0, 1), microbatches=8, ranks=2, gradients={}, norms=[], scale=ONE)


@pytest.mark.parametrize(
    ("factor", "scale", "kind"),
    [
        (1024.0, ONE, "not-unscaled"),
        (1 / 1024, ONE, "unscaled-twice"),
        (512.0, ONE, "scale"),
        (2.0, ONE, "scale"),
        (0.5, LossScale(1024.0, 2048.0, 2048.0), "scales-differ"),
        (2.0, LossScale(2048.0, 1024.0, 1024.0), "scales-differ"),  # though there are two ranks: the scale is seen
        (0.5, LossScale(1024.0, 1024.0, 1024.0), "scale"),
        (1024.0, LossScale(1024.0, 2048.0, 2048.0), "not-unscaled"),
        (1024.0 / 2048.0**2, LossScale(1024.0, 2048.0, 2048.0), "unscaled-twice"),
        (8.0, LossScale(8.0, 8.0, 8.0), "scale"),  # also the number of microbatches
        (1 / 8, LossScale(8.0, 8.0, 8.0), "scale"),
        (1.0, LossScale(1.0, 1.0, 1.0), "scale"),
    ],
)
def test_a_factor_of_gradients_is_named(factor: float, scale: LossScale, kind: str) -> None:
    named = of_gradients(replace(FACTOR, factor=factor), scale, EVIDENCE)
    assert (named.kind, named.rank, named.stage, named.factor) == (kind, 1, 1, factor)


def test_one_parameter_alone_is_no_matter_of_the_loss_scale() -> None:
    alone = replace(FACTOR, parameter="0.weight")
    assert of_gradients(alone, ONE, EVIDENCE) == alone


def test_a_scale_that_moved_in_the_step_is_told() -> None:
    named = of_gradients(replace(FACTOR, factor=0.5), LossScale(1024.0, 2048.0, 1024.0), EVIDENCE)
    told = "divided by 2048, and 1024 when the step began, where losses were multiplied by 1024"
    assert (named.kind, named.detail) == ("scales-differ", told)


EVERYWHERE = Cause("scale", factor=1024.0, detail="1024 times")
UNSEEN = {"not-unscaled": "scaled-twice", "unscaled-twice": "not-scaled"}


@pytest.mark.parametrize("kind", UNSEEN)
def test_of_all_gradients_nobody_knows_whether_losses_were_scaled_so_unless_flows_were_seen(kind: str) -> None:
    cause = EVERYWHERE if kind == "not-unscaled" else replace(EVERYWHERE, factor=1 / 1024)
    named = by_loss_scale(cause, EVIDENCE)
    assert (named.kind, [one.kind for one in named.instead]) == (kind, [UNSEEN[kind]])


@pytest.mark.parametrize(
    ("late", "kind"), [(1024.0, "not-unscaled"), (1024.0**2, "scaled-twice"), (3.0, "not-unscaled")]
)
def test_what_flowed_back_tells_whether_losses_were_scaled_so(late: float, kind: str) -> None:
    seen = replace(EVIDENCE, passed={1: Passed((), (), (), late=late)})
    named = by_loss_scale(EVERYWHERE, seen)
    assert (named.kind, named.instead) == (kind, ())


def test_each_rank_divides_by_its_own_scale() -> None:
    scale = replace(ONE, ranks={0: 1024.0, 1: 2048.0})
    halved = replace(FACTOR, factor=0.5)
    named = by_loss_scale(halved, replace(EVIDENCE, scale=scale))
    assert named.kind == "scales-differ"
    golden(named.detail)
    named = by_loss_scale(replace(halved, rank=0, stage=0), replace(EVIDENCE, scale=scale))
    assert named.kind == "scale", "that rank has the scale of the losses"


def test_that_losses_were_not_scaled_is_told_by_what_flows_though_rounding_hides_it_in_some_stages() -> None:
    cause = replace(FACTOR, factor=1 / 1024)
    named = by_loss_scale(cause, EVIDENCE)
    assert (named.kind, named.rank, named.instead) == ("unscaled-twice", 1, ()), "nobody saw what flows"
    seen = replace(EVIDENCE, passed={1: Passed((), (), (), late=1.0)})
    named = by_loss_scale(cause, seen)
    assert (named.kind, named.rank, named.stage) == ("not-scaled", None, None)


FLOW = Cause("scale", rank=1, stage=1, action="1B0", factor=1024.0, detail="output gradient is 1024 times the expected")


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (FLOW, "scaled-twice"),
        (replace(FLOW, factor=1 / 1024), "not-scaled"),
        (replace(FLOW, factor=2048.0), "scale"),
        (replace(FLOW, stage=0, rank=0, action="0B0"), "scale"),  # that is no matter of the loss
        (FACTOR, "not-unscaled"),
        (replace(FACTOR, kind="doubled"), "doubled"),
    ],
)
def test_causes_are_named(cause: Cause, kind: str) -> None:
    assert by_loss_scale(cause, EVIDENCE).kind == kind
    assert by_loss_scale(cause, replace(EVIDENCE, scale=None)) == cause, "nobody scales"


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


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("times", [2.0, 3.0])
@pytest.mark.parametrize(
    ("step", "kinds"),
    [
        (partial(last_counts, see=False), ["doubled", "scale"]),
        (partial(last_counts, see=False, again=True), ["doubled", "scale"]),  # near: the very same sums
        (partial(last_counts, see=False, loss=True), ["doubled", "scale"]),
        (partial(last_counts, see=True), ["scale"]),  # seen where it came in
        (partial(last_counts, see=True, loss=True), ["scale"]),
        (partial(last_counts, see=True, again=True), ["doubled"]),
    ],
)
def test_it_is_said_to_run_again_only_where_that_was_seen(
    whitebox: WhiteBox, step: Any, kinds: list[str], times: float
) -> None:
    verdict = whitebox.validate(
        partial(step, times=times), reference=built, microbatches=pairs(5), ranks=1, loss_fn=loss_fn
    )
    explanations = [verdict.cause, *verdict.alternatives]
    assert [(cause.kind, cause.microbatches) for (cause,) in explanations] == [(kind, (4,)) for kind in kinds]
    assert [cause.factor for (cause,) in explanations] == [pytest.approx(times)] * len(kinds)


def weighted(model: Any, microbatches: list[Any]) -> Any:
    """All losses are a fourth: there is one count of targets for each microbatch."""
    losses = []
    for x, target in microbatches:
        loss: Any = loss_fn(model(x), target)
        (loss / len(microbatches) / 4).backward()
        losses.append(loss.item())
    return model, losses


@pytest.mark.pipeproof_ranks
def test_tokens_that_nobody_counts_explain_no_factor(whitebox: WhiteBox) -> None:
    verdict = whitebox.validate(weighted, reference=built, microbatches=pairs(4), ranks=1, loss_fn=loss_fn)
    golden(verdict.cause[0].detail)


def built() -> nn.Module:
    return blocks(seed=3)
