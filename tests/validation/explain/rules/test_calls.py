"""What ran in the wrong mode or not once: the cause has the places of all that is wrong, and of nothing else."""

from types import SimpleNamespace
from typing import Any, Literal

from pipeproof.core.verdict import Mismatch
from pipeproof.explain.rules.calls import counts, modes
from pipeproof.observers.observed import Observed, RankOperation
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.schedule import Schedule
from tests.support.golden import golden

STAGES, COUNT = 4, 3


def facts(mismatches: list[Mismatch], *ran: Action) -> Any:
    """Two ranks of two stages each, and what they ran."""
    rows = [(RankOperation("train", (), tuple(one for one in ran if one.stage % 2 == rank)),) for rank in range(2)]
    observed = Observed(Schedule("", COUNT, (0, 1, 0, 1), ((), ())), tuple(rows))
    return SimpleNamespace(
        verdict=SimpleNamespace(mismatches=mismatches),
        observed=observed,
        placement=(0, 1, 0, 1),
        number=0,
        operation="train",
        stages=STAGES,
        microbatches=COUNT,
        unseen=(),
        told=(),
        passed={},
        holders=lambda stage: [stage % 2],
    )


def evaluated(*stages: int) -> list[Mismatch]:
    return [Mismatch("microbatches", 1, False, True, "mode", rank=s % 2, stage=s) for s in stages]


def uncounted(what: Literal["forward", "backward"], *stages: int) -> list[Mismatch]:
    return [Mismatch("microbatches", 1, (0,), (0, 1, 2), what, rank=s % 2, stage=s) for s in stages]


def everything() -> list[Action]:
    return [Action(s, kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for s in range(STAGES) for m in range(COUNT)]


def test_a_mode_of_one_rank_is_no_mode_everywhere() -> None:
    (cause,) = modes(facts(evaluated(1, 3)))
    assert (cause.rank, cause.stage, cause.stages) == (1, None, (1, 3))
    assert (cause.rank, cause.stages) == (1, (1, 3))


def test_a_mode_of_one_stage_and_of_all() -> None:
    (one,) = modes(facts(evaluated(2)))
    assert (one.rank, one.stage, one.stages) == (0, 2, ())
    (every,) = modes(facts(evaluated(0, 1, 2, 3)))
    assert (every.rank, every.stage, every.stages) == (None, None, ())
    assert every.place == "everywhere"


def test_a_backward_that_was_left_out_is_named_where_it_was_left_out_first() -> None:
    """Gradients flow from the last stage down."""
    wrong = uncounted("backward", *range(3))
    ran = [a for a in everything() if not (a.kind is Kind.BACKWARD and a.stage < 3 and a.microbatch == 1)]
    (cause,) = counts(facts(wrong, *ran))
    assert (cause.kind, cause.rank, cause.stage, cause.microbatches) == ("dropped", 0, 2, (1,))
    golden(cause.detail)


def test_a_forward_that_was_left_out_is_named_at_the_first_stage() -> None:
    ran = [a for a in everything() if not (a.stage >= 1 and a.microbatch == 2)]
    (cause,) = counts(facts(uncounted("forward", 1, 2, 3), *ran))
    assert (cause.stage, cause.microbatches) == (1, (2,))
    golden(cause.detail)


def test_backwards_that_ran_more_often_than_once_are_told_with_all_their_numbers() -> None:
    again = [Action(2, Kind.BACKWARD, m) for m in (0, 1, 1)]
    (cause,) = counts(facts(uncounted("backward", 2), *everything(), *again))
    assert (cause.kind, cause.stage, cause.microbatches) == ("doubled", 2, (0, 1))
    golden(cause.detail)


def test_what_ran_nowhere_is_at_no_stage() -> None:
    ran = [a for a in everything() if a.kind is Kind.FORWARD]
    (cause,) = counts(facts(uncounted("backward", *range(STAGES)), *ran))
    assert (cause.rank, cause.stage, cause.microbatches) == (None, None, (0, 1, 2))
