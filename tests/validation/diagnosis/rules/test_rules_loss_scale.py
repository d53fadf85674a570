"""Of factors, those that are the loss scale are named after what was forgotten; all others stay what they are."""

from dataclasses import replace

import pytest

from pipeproof.core.cause import Cause
from pipeproof.core.verdict import Verdict
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.loss_scale import LossScale
from pipeproof.diagnosis.rules.loss_scale import by_scale, of_gradients
from pipeproof.observers.observed import Passed
from tests.support.golden import golden

ONE = LossScale(1024.0, 1024.0, 1024.0)
COUNTS = (8, 2, 2)  # microbatches, ranks, stages
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
    named = of_gradients(replace(FACTOR, factor=factor), scale, COUNTS)
    assert (named.kind, named.rank, named.stage, named.factor) == (kind, 1, 1, factor)


def test_a_scale_that_is_also_a_count_is_said_to_be_both() -> None:
    named = of_gradients(replace(FACTOR, factor=8.0, detail="8 times"), LossScale(8.0, 8.0, 8.0), COUNTS)
    golden(str(named))


def test_one_parameter_alone_is_no_matter_of_the_loss_scale() -> None:
    alone = replace(FACTOR, parameter="0.weight")
    assert of_gradients(alone, ONE, COUNTS) == alone


def test_a_scale_that_moved_in_the_step_is_told() -> None:
    named = of_gradients(replace(FACTOR, factor=0.5), LossScale(1024.0, 2048.0, 1024.0), COUNTS)
    told = "divided by 2048, and 1024 when the step began, where losses were multiplied by 1024"
    assert (named.kind, named.detail) == ("scales-differ", told)


EVERYWHERE = Cause("scale", factor=1024.0, detail="1024 times")
UNSEEN = {"not-unscaled": "scaled-twice", "unscaled-twice": "not-scaled"}


@pytest.mark.parametrize("kind", UNSEEN)
def test_of_all_gradients_nobody_knows_whether_losses_were_scaled_so_unless_flows_were_seen(kind: str) -> None:
    cause = EVERYWHERE if kind == "not-unscaled" else replace(EVERYWHERE, factor=1 / 1024)
    (named,) = by_scale(lambda evidence: [cause])(EVIDENCE)
    assert (named.kind, [one.kind for one in named.instead]) == (kind, [UNSEEN[kind]])


@pytest.mark.parametrize(
    ("late", "kind"), [(1024.0, "not-unscaled"), (1024.0**2, "scaled-twice"), (3.0, "not-unscaled")]
)
def test_what_flowed_back_tells_whether_losses_were_scaled_so(late: float, kind: str) -> None:
    seen = replace(EVIDENCE, passed={1: Passed((), (), (), late=late)})
    (named,) = by_scale(lambda evidence: [EVERYWHERE])(seen)
    assert (named.kind, named.instead) == (kind, ())


def test_each_rank_divides_by_its_own_scale() -> None:
    scale = replace(ONE, ranks={0: 1024.0, 1: 2048.0})
    halved = replace(FACTOR, factor=0.5)
    (named,) = by_scale(lambda evidence: [halved])(replace(EVIDENCE, scale=scale))
    assert named.kind == "scales-differ"
    golden(named.detail)
    (named,) = by_scale(lambda evidence: [replace(halved, rank=0, stage=0)])(replace(EVIDENCE, scale=scale))
    assert named.kind == "scale", "that rank has the scale of the losses"
    last = replace(
        scale, losses=2048.0, divided=2048.0, before=2048.0
    )  # the last stage's rank says another than it multiplied by
    (named,) = by_scale(lambda evidence: [halved])(replace(EVIDENCE, scale=last))
    assert named.kind == "scales-differ"
    golden(named.detail)


def test_that_losses_were_not_scaled_is_told_by_what_flows_though_rounding_hides_it_in_some_stages() -> None:
    cause = replace(FACTOR, factor=1 / 1024)
    (named,) = by_scale(lambda evidence: [cause])(EVIDENCE)
    assert (named.kind, named.rank, named.instead) == ("unscaled-twice", 1, ()), "nobody saw what flows"
    seen = replace(EVIDENCE, passed={1: Passed((), (), (), late=1.0)})
    (named,) = by_scale(lambda evidence: [cause])(seen)
    assert (named.kind, named.rank, named.stage) == ("not-scaled", None, None)


FLOW = Cause("scale", rank=1, stage=1, action="1B0", factor=1024.0, detail="output gradient is 1024 times the expected")
NORM = Cause("norm", factor=1024.0, detail="183.8 in place of 0.1795: like nothing known")


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (FLOW, "scaled-twice"),
        (replace(FLOW, factor=1 / 1024), "not-scaled"),
        (replace(FLOW, factor=2048.0), "scale"),
        (replace(FLOW, stage=0, rank=0, action="0B0"), "scale"),  # that is no matter of the loss
        (NORM, "unscaled-after-norm"),
        (replace(NORM, factor=512.0), "norm"),
        (replace(NORM, kind="report"), "report"),
        (FACTOR, "not-unscaled"),
        (replace(FACTOR, kind="doubled"), "doubled"),
    ],
)
def test_causes_of_a_rule_are_named(cause: Cause, kind: str) -> None:
    explains = by_scale(lambda evidence: [cause])
    assert [one.kind for one in explains(EVIDENCE)] == [kind]
    assert list(explains(replace(EVIDENCE, scale=None))) == [cause], "nobody scales"
