"""The self-test: planted faults must fail the law that they are about and name where, and what is none must pass.

In its smallest case a specimen is tried here, or by the composed check where that sees it: one of each law and kind
always is here. In sweeps all are, and those of ``EXPECTED`` on every schedule. All specimens on all schedules, on four
ranks, are tried by ``pipeproof mutate --schedule all``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache

import pytest
from composed_reach import OUT_OF_REACH

from pipeproof.core.cause import RACES
from pipeproof.core.judge import LAWS
from pipeproof.own.case import SCHEDULES, Case
from pipeproof.own.faults import pass_on
from pipeproof.own.observe import observe
from pipeproof.own.stages import owners
from pipeproof.own.validator import validate
from pipeproof.pipeline import laws, program_laws
from pipeproof.pipeline.program import lower
from pipeproof.pipeline.schedules import SPLIT
from pipeproof.reference.model import build_model
from pipeproof.wings.composed.check import LAWS as OF_A_CHAIN
from pipeproof.wings.specimens import (
    CONTROLS,
    DEVICE_CONTROLS,
    IN_SIMULATION,
    ON_DEVICES,
    SIMULATED_CONTROLS,
    SPECIMENS,
)
from pipeproof.wings.specimens.families.order import broken_laws
from pipeproof.wings.specimens.mixed import MIXED, MixedFault
from pipeproof.wings.specimens.specimen import CLASSES, Needs, Specimen
from pipeproof.wings.specimens.trial import case_for, smallest_of, try_out
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.sweeps import each_once, some


def case_of(schedule: str, name: str) -> Case:
    """On two ranks, but for what two ranks do not show: between two there are no two messages on the way."""
    size = {} if name == "receive-buffer-reused" else {"ranks": 2, "microbatches": 4}
    return case_for(SPECIMENS[name], schedule, **size)


Place = tuple[int | None, int | None, int | None, str | None]  # rank, stage, microbatch, parameter


def parameters(case: Case, stages: Iterable[int]) -> set[Place]:
    """Every parameter of ``stages`` that is trained."""
    model = build_model(case.model, layers=case.layers, seed=0)
    trained = {name for name, tensor in model.named_parameters(remove_duplicate=False) if tensor.requires_grad}
    return {
        parameter(case, s, name) for name, s in owners(model, case.split).items() if s in stages and name in trained
    }


def parameter(case: Case, stage: int, name: str) -> Place:
    return case.built.placement[stage], stage, None, name


def norm_of(case: Case, stage: int) -> Place:
    """The first parameter of a stage that holds one layer, its first LayerNorm's weight."""
    return parameter(case, stage, f"blocks.{stage}.norm_1.weight")


def overwritten(case: Case, stage: int) -> set[Place]:
    """What differs if this is the last stage whose input was overwritten before its backward.

    Its first LayerNorm alone reads the input again, for its weight's gradient and for what it hands on.
    """
    return {norm_of(case, stage), *parameters(case, range(stage))}


# For each specimen, the places that its law must name: exactly one of these sets.
EXPECTED: dict[str, Callable[[Case], list[set[Place]]]] = {
    "loss-undivided": lambda case: [parameters(case, range(case.stages))],
    "clip-last-stage": lambda case: [parameters(case, range(case.stages - 1))],
    "microbatch-dropped": lambda case: [parameters(case, range(case.stages))],
    "microbatches-swapped": lambda case: [{(rank, None, m, None) for rank in range(case.ranks) for m in (0, 1)}],
    "receive-buffer-reused": lambda case: [overwritten(case, stage) for stage in range(1, case.stages)],
    "activation-nan": lambda case: [{(1, 1, 1, None)}],
    "stage-negated": lambda case: [parameters(case, [case.stages // 2])],
    "gradient-none": lambda case: [{norm_of(case, case.stages - 1)}],
    "layernorm-zero": lambda case: [{norm_of(case, case.stages // 2)}],
    "tied-not-reduced": lambda case: [
        {parameter(case, 0, "embed.token.weight"), parameter(case, case.stages - 1, "head.logits.weight")}
    ],
    "norm-counts-tied-twice": lambda case: [{(rank, None, None, None) for rank in range(case.ranks)}],
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(*each_once(name=EXPECTED, schedule=SCHEDULES))
def test_a_planted_fault_fails_its_law_and_is_located(world: World, schedule: str, name: str) -> None:
    case = case_of(schedule, name)
    verdict = validate(case, world, explain=False)
    law = SPECIMENS[name].law
    assert verdict.outcome == "fail"
    assert verdict.law(law).outcome == "fail", [str(law) for law in verdict.laws]
    named: set[Place] = {(m.rank, m.stage, m.microbatch, m.parameter) for m in verdict.mismatches if m.law == law}
    if name == "receive-buffer-reused" and schedule in SPLIT:
        # Between I and W a stage also keeps received gradients, so any stage may be hit; which, the order decides.
        assert named <= parameters(case, range(case.stages))
        assert named
    else:
        assert named in EXPECTED[name](case)
    assert str(case) in verdict.replay


# What cannot be run or ends by a bound comes last: it costs the ranks, which must be started anew.
BY_COST = sorted(SPECIMENS, key=lambda name: SPECIMENS[name].law == "deadlock")


FIRST = {value: name for name, one in reversed(SPECIMENS.items()) for value in (one.law, one.fault.kind)}
COMPOSED = [name for name in [*SPECIMENS][::2] if name not in OUT_OF_REACH and name not in FIRST.values()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", some(BY_COST, left=COMPOSED))
def test_the_smallest_case_shows_the_fault_by_name_and_nothing_is_wrong_without_it(world: World, name: str) -> None:
    case = smallest_of(SPECIMENS[name])
    assert sound(world, replace(case, specimen="")) == "pass"
    found = try_out(case, world)
    assert found.caught, found
    assert found.recorded is not None, "what is caught is diagnosed"
    assert found.recorded.located, found
    assert found.final is None or not found.final.wrong, found


@cache
def sound(world: World, case: Case) -> str:
    """The verdict on a case that several specimens share."""
    assert broken_laws(lower(case.built)) == ()
    return validate(case, world).outcome


CHANGES = {"shares-added-backwards": "fp32", "norm-by-rank": "fp32"}  # bits, so that a pass is the oracle's doing


@pytest.mark.parametrize("name", CONTROLS)
def test_what_only_looks_like_a_fault_passes(world: World, name: str) -> None:
    verdict = validate(Case.parse(f"{CONTROLS[name].smallest} specimen={name}"), world)
    assert (verdict.outcome, verdict.tier) == ("pass", CHANGES.get(name, "bitwise")), str(verdict)


@pytest.mark.sweep
def test_a_changed_program_that_no_law_stopped_ends_by_its_bound(world: World) -> None:
    with pytest.raises(RankFailed, match="did not come"):
        observe(smallest_of(SPECIMENS["microbatches-counted-otherwise"]), world)


STATIC = {"compute-only", "placement", "completeness", "local-order", "acyclic", "messages"} | {
    "message-order",
    "channel-order",
    "deadlock",
}


@pytest.mark.parametrize(
    ("faults", "known"),
    [
        (SPECIMENS, {*LAWS, *STATIC}),
        (MIXED, {*LAWS, *OF_A_CHAIN}),
        (ON_DEVICES, {*LAWS, "crash"}),
        (IN_SIMULATION, {*LAWS, *RACES, "deadlock", "crash"}),
    ],
    ids=["everywhere", "mixed", "devices", "simulated"],
)
def test_every_fault_says_what_it_is(faults: Mapping[str, Specimen | MixedFault], known: set[str]) -> None:
    for name, one in faults.items():
        assert (one.name, bool(one.summary), bool(one.origin)) == (name, True, True)
        assert one.fault.law in known, name
        assert one.classes, name
        assert {*one.classes} <= {*CLASSES}, name
    for name, control in {**CONTROLS, **DEVICE_CONTROLS, **SIMULATED_CONTROLS}.items():
        assert (bool(control.summary), bool(control.origin)) == (True, True), name


def test_there_are_many_of_each_class() -> None:
    assert (len(SPECIMENS) >= 60, len(IN_SIMULATION) >= 40) == (True, True)
    assert {name for one in SPECIMENS.values() for name in one.classes} == set(CLASSES)
    assert {one.law for one in IN_SIMULATION.values()} >= {*RACES, "deadlock"}, "every race is shown"


_OF_SHARDS = {"reduced-once", "unsharded"}  # tests/pipeline shows them broken


def test_static_laws_are_all_shown_broken() -> None:
    """But for the one that no program can break, a schedule with messages in it, and those of shards: we have none."""
    assert len(laws.LAWS) + len(program_laws.LAWS) - 1 == len(STATIC | _OF_SHARDS), "placement is a law of both"
    shown = {one.law for one in SPECIMENS.values() if one.reorder is not pass_on}
    assert shown == STATIC - {"compute-only"}
    assert {one.law for one in SPECIMENS.values() if one.reorder is pass_on} <= {*LAWS, "deadlock"}


@pytest.mark.parametrize("name", SPECIMENS)
def test_the_smallest_case_is_all_that_the_fault_needs_and_no_more(name: str) -> None:
    one, case = SPECIMENS[name], Case.parse(SPECIMENS[name].smallest)
    assert str(case) == one.smallest
    assert one.missing(case) == ""
    assert (case.microbatches, min(case.split), case.plan) == (one.needs.microbatches, one.needs.layers, one.needs.plan)
    assert case.stages == max(one.needs.stages, case.ranks), "no stage too many"
    cause = one.cause(case)
    assert cause.kind == one.fault.kind
    assert cause.stage is None or cause.rank == case.built.placement[cause.stage]
    assert cause.microbatches == () or max(cause.microbatches) < case.microbatches


@pytest.mark.parametrize(
    ("needs", "why"),
    [
        (Needs(microbatches=3), "needs 3 microbatches"),
        (Needs(ranks=3), "needs 3 ranks"),
        (Needs(stages=3), "needs 3 stages"),
        (Needs(layers=2), "needs 2 layers a stage"),
        (Needs(models=("mlp", "gpt")), "needs a model out of mlp, gpt"),
        (Needs(plan=("eval", "train")), "needs a plan with eval+train"),
        (Needs(loss="tokens"), "needs loss=tokens"),
        (Needs(ragged=True), "needs ragged"),
        (Needs(unequal=True), "needs unequal"),
        (Needs(split=True), "needs a backward in two halves on the middle stage"),
        (Needs(also=lambda case: "needs luck"), "needs luck"),
        (Needs(microbatches=2, ranks=2, stages=2, models=("pair",), plan=("train", "train")), ""),
    ],
)
def test_what_a_case_lacks_is_said(needs: Needs, why: str) -> None:
    case = Case("1f1b", 2, 1, 2, (1, 1), model="pair", plan=("train", "accumulate", "train"))
    assert needs.missing(case) == why


def test_messages_of_one_size_need_microbatches_of_one_length() -> None:
    needs = Needs(one_size=True)
    case = Case("1f1b", 2, 1, 2, (1, 1), model="gpt", unequal=True)
    assert needs.missing(case) == ""  # what counts differs, not how long it is
    golden(needs.missing(replace(case, ragged=True)))
    golden(needs.missing(replace(case, model="mlp")))


@pytest.mark.parametrize(
    ("needs", "schedule", "line"),
    [
        (Needs(), "", "naive r1 s1 m1 split=1 model=mlp plan=train seed=0"),
        (Needs(split=True, microbatches=2), "", "zb-h1 r1 s1 m2 split=1 model=mlp plan=train seed=0"),
        (Needs(stages=2, layers=2), "", "naive r2 s2 m1 split=2,2 model=mlp plan=train seed=0"),
        (Needs(ranks=2, stages=4), "looped-bfs", "looped-bfs r2 s4 m1 split=1,1,1,1 model=mlp plan=train seed=0"),
        (Needs(models=("gpt", "gpt-tied")), "gpipe", "gpipe r1 s1 m1 split=1 model=gpt plan=train seed=0"),
    ],
)
def test_the_smallest_case_follows_from_the_needs(needs: Needs, schedule: str, line: str) -> None:
    assert str(needs.smallest(schedule)) == line


@pytest.mark.sweep
def test_a_late_share_of_an_accumulation_is_late_and_not_lost(world: World) -> None:
    case = replace(smallest_of(SPECIMENS["tied-reduced-early"]), plan=("accumulate", "train"))
    verdict = validate(case, world, explain=False)
    wrong = {mismatch.parameter for mismatch in verdict.mismatches if mismatch.law == "gradient"}
    assert wrong == {"embed.token.weight", "head.logits.weight"}


@pytest.mark.sweep
def test_nan_says_where_it_first_appeared(world: World) -> None:
    verdict = validate(case_of("interleaved", "activation-nan"), world)
    first = verdict.mismatches[0]
    assert (first.rank, first.stage, first.microbatch, first.action) == (1, 1, 1, "1F1")
    golden(first.observed_text)
