"""The main job on real ranks: every schedule, every model, every scenario, bit for bit."""

from dataclasses import replace

import pytest

from pipeproof.core.verdict import ValidationFailed
from pipeproof.own.case import MODELS, Case
from pipeproof.own.validator import crash_verdict, refusal, refusal_verdict, validate
from pipeproof.pipeline.laws import Violation
from pipeproof.wings.specimens import SPECIMENS
from pipeproof.worlds.rank_report import Ending, RankFailed, RankReport
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.sweeps import each_once

SHAPES = {
    "naive": ("naive", 4, 1, (2, 1, 1, 1)),
    "gpipe": ("gpipe", 4, 1, (1, 1, 2, 1)),
    "1f1b": ("1f1b", 4, 1, (1, 2, 1, 1)),
    "1f1b on three": ("1f1b", 3, 1, (1, 2, 1)),
    "interleaved": ("interleaved", 2, 2, (1, 2, 1, 1)),
    "interleaved deep": ("interleaved", 2, 3, (1,) * 6),
    "v-half": ("v-half", 2, 2, (1, 2, 1, 1)),
    "zb-h1": ("zb-h1", 2, 1, (2, 1)),
    "one rank": ("interleaved", 1, 2, (1, 2)),
}


def case_of(shape: str, model: str, microbatches: int = 5, **more: object) -> Case:
    schedule, ranks, virtual, split = SHAPES[shape]
    return Case(schedule, ranks, virtual, microbatches, split, model=model, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(*each_once(model=MODELS, shape=["naive", "gpipe", "1f1b", "interleaved"]))
def test_every_schedule_equals_the_reference_bit_for_bit(world: World, shape: str, model: str) -> None:
    verdict = validate(case_of(shape, model, loss="tokens", ragged=True, unequal=True), world)
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), verdict.mismatches[:3]
    exercised = {law.name for law in verdict.laws if law.outcome == "pass"}
    only = {"tied-copies": "gpt-tied", "buffers": "batchnorm"}
    assert {law.name for law in verdict.laws} - exercised == {law for law, owner in only.items() if owner != model}


@pytest.mark.sweep
@pytest.mark.parametrize(
    *each_once(microbatches=[1, 2, 3, 4, 7], shape=["gpipe", "1f1b", "1f1b on three", "interleaved deep", "one rank"])
)
def test_any_number_of_microbatches(world: World, shape: str, microbatches: int) -> None:
    verdict = validate(case_of(shape, "mlp", microbatches, plan=("train",)), world)
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), verdict.mismatches[:3]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(*each_once(model=MODELS, shape=["1f1b on three", "v-half", "zb-h1"]))
def test_bf16_equals_the_reference_bit_for_bit(world: World, shape: str, model: str) -> None:
    case = case_of(shape, model, dtype="bf16", loss="tokens", ragged=True, unequal=True)
    verdict = validate(case, world)
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), verdict.mismatches[:3]
    assert verdict.law("updated-parameters").exact > 0


@pytest.mark.parametrize(
    *each_once(
        dtype=["bf16", "fp64"],
        name=["microbatch-dropped", "layernorm-zero", "loss-undivided", "clip-last-stage", "activation-nan"],
    )
)
def test_faults_are_caught_in_every_dtype(world: World, name: str, dtype: str) -> None:
    planted = SPECIMENS[name]
    verdict = validate(replace(Case.parse(planted.smallest), specimen=name, dtype=dtype), world)
    assert (verdict.outcome, verdict.law(planted.law).outcome) == ("fail", "fail")


@pytest.mark.sweep
def test_a_tie_within_one_rank_is_summed_too(world: World) -> None:
    verdict = validate(case_of("one rank", "gpt-tied"), world)
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise")
    assert verdict.law("tied-copies").checked > 0


@pytest.mark.sweep
def test_a_verdict_can_be_raised(world: World) -> None:
    validate(case_of("1f1b", "mlp", plan=("train",)), world).raise_if_failed()
    wrong = validate(case_of("1f1b", "mlp", plan=("train",), specimen="stage-negated"), world)
    with pytest.raises(ValidationFailed, match=r"(?s)FAIL stage 2 .*again .*specimen=stage-negated") as caught:
        wrong.raise_if_failed()
    assert caught.value.verdict is wrong


def test_what_static_laws_refuse_has_its_cause_before_anything_runs() -> None:
    case = case_of("1f1b", "mlp", plan=("train",))
    order = Violation("local-order", "0B0 comes before 0F0", 0)
    wait = Violation("deadlock", "rank 0 waits at 0B0")
    assert [(c.kind, c.rank) for c in refusal_verdict(case, [order, wait]).causes] == [("order", 0)]
    assert [c.kind for c in refusal_verdict(case, [wait]).causes] == ["deadlock"]
    assert refusal_verdict(case, [order]).outcome == "fail"


RAISED, WAITS = "raised ValueError: bad", "stuck, waiting for 0RECV_B0 with rank 1"


@pytest.mark.parametrize(
    ("report", "causes"),
    [
        (RankReport(0, Ending.RAISED, "ValueError: bad"), [("crash", 0, None, RAISED)]),
        (RankReport(0, Ending.STUCK, "stuck", waiting="0RECV_B0 with rank 1"), [("deadlock", 0, None, WAITS)]),
        (RankReport(0, Ending.STUCK, "did not finish within 3 s", "    in spin"), []),  # it failed nothing
    ],
    ids=["raised", "waits", "busy"],
)
def test_how_ranks_fail_is_the_cause(report: RankReport, causes: list[object]) -> None:
    verdict = crash_verdict(
        case_of("1f1b", "mlp", plan=("train",)), RankFailed([report, RankReport(1, Ending.STOPPED)])
    )
    assert [(c.kind, c.rank, c.stage, c.detail) for c in verdict.causes] == causes
    assert (verdict.exit_status, verdict.details.count(RAISED)) == (3, RAISED in str(causes))
    golden("\n".join(verdict.details.splitlines()[:2]))


@pytest.mark.pipeproof_ranks
def test_a_planted_program_that_breaks_a_law_is_no_pass_though_nothing_runs() -> None:
    with World() as world:
        for name in ("receive-missing", "sends-last"):
            planted = SPECIMENS[name]
            verdict = validate(Case.parse(f"{planted.smallest} specimen={name}"), world)
            assert (verdict.outcome, verdict.exit_status) == ("fail", 1)
            assert [cause.kind for cause in verdict.causes] == [planted.fault.kind]
            golden(verdict.details.splitlines()[0])
            assert f"{planted.law}: " in verdict.failure
    assert refusal(Case.parse(planted.smallest)) is None
