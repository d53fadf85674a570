"""What a verdict rests on, as values: what each action took and made, in the order in which it was."""

import json
import math

import pytest

from pipeproof.core.cause import Cell
from pipeproof.core.measured import Compared, Measured, Weights, versions
from pipeproof.core.measuring import sight, trace_of
from pipeproof.core.observe.likeness import Label, Likeness
from pipeproof.core.observe.observed import UNKNOWN_MICROBATCH, Crossing, Observed, RankOperation
from pipeproof.core.observe.recording import FLOWED, GIVEN, HANDED_ON, KEPT, LATE, MADE, RECEIVED, USED, Point
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.schedule import Schedule

F, B = Kind.FORWARD, Kind.BACKWARD
NOBODY = Action(0, F, UNKNOWN_MICROBATCH)


def crossing(action: Action, same: bool = True, **more: object) -> Crossing:
    return Crossing(action, "output", same, False, where=MADE, error=1e-8, limit=1e-4, **more)  # type: ignore[arg-type]


def observed(
    *crossings: Crossing, executed: tuple[Action, ...] = (Action(0, F, 0), NOBODY, Action(0, B, 0))
) -> Observed:
    rows = ((RankOperation("train", (), executed, crossings=crossings),), (RankOperation("train", (), ()),))
    return Observed(Schedule("", 2, (0,), ((), ())), rows)


def test_actions_stand_as_they_ran_with_what_was_seen_of_them() -> None:
    found = trace_of(observed(crossing(Action(0, F, 0)), crossing(Action(0, B, 0), False, judged=False)), 0)
    assert [done.action for done in found.ranks[0]] == ["0F0", "0F?", "0B0"]
    assert [[one.agrees for one in done.sights] for done in found.ranks[0]] == [[True], [], [None]]
    assert found.ranks[1] == ()
    assert found.operation == 1


def test_an_action_stands_on_the_rank_that_did_it_where_several_hold_its_stage() -> None:
    found = trace_of(observed(crossing(Action(0, B, 0), rank=1)), 0)
    assert [[done.action for done in row] for row in found.ranks] == [["0F0", "0F?"], ["0B0"]]


def test_what_nobody_saw_is_not_there() -> None:
    assert trace_of(observed(executed=()), 0) is None


@pytest.mark.parametrize(
    ("where", "really", "expected"),
    [
        (GIVEN, "0F1", "0F0"),
        (USED, "0F1", "0F0"),
        (KEPT, "0F1", "0F0"),
        (MADE, "1F1", "1F0"),
        (RECEIVED, "2B1", "2B0"),
        (FLOWED, "2B1", "2B0"),
        (LATE, "2B1", "2B0"),
        (HANDED_ON, "1B1", "1B0"),
    ],
)
def test_who_made_a_tensor_that_another_is(where: str, really: str, expected: str) -> None:
    other = Likeness("other", Label(Point(1, 0, where)), Label(Point(1, 1, where)))
    one = sight(Point(1, 0, where), where, False, other)
    assert (one.really, one.expected, one.made) == (really, expected, where in (MADE, HANDED_ON))


def test_a_backward_through_anothers_activations_lacks_its_own() -> None:
    other = Likeness(
        "other", Label(Point(1, 0, FLOWED)), Label(Point(1, 1, USED)), words="in microbatch 1's activations"
    )
    one = sight(Point(1, 0, FLOWED), FLOWED, False, other)
    assert (one.really, one.expected) == ("0F1", "0F0")


def test_nobody_made_what_is_no_other_or_is_of_an_earlier_step_or_came_into_the_model() -> None:
    at = Point(0, 0, GIVEN)
    earlier = Likeness("other", Label(at), Label(at._replace(microbatch=1), ago=1))
    noise, inputs = Likeness("noisy", Label(at), error=0.1), Likeness("other", Label(at), Label(Point(0, 1, GIVEN)))
    mixed = Likeness("sum", Label(at), Label(Point(1, 1, MADE)), factor=1.0, more=0.1)
    assert [sight(at, "input", False, one).really for one in (earlier, noise, inputs, mixed, None)] == [""] * 5


def test_it_is_plain_data_that_leaves_out_what_does_not_apply() -> None:
    ran = trace_of(observed(crossing(Action(0, F, 0))), 0)
    compared = (Compared("loss", 1, "pass", microbatch=0, observed=2.0, expected=2.0),)
    data = json.loads(json.dumps(Measured(compared, ran, 0, (Weights("w", (Cell(1.0),)),)).as_dict()))
    assert data["compared"] == [
        {"law": "loss", "operation": 1, "outcome": "pass", "microbatch": 0, "error": 0.0}
        | {"observed": 2.0, "expected": 2.0}
    ]
    assert data["ran"]["ranks"] == [["0F0", "0F?", "0B0"], []]
    (ours,) = data["ran"]["tensors"]
    assert ours == {"action": "0F0", "what": "output", "made": True, "agrees": True, "error": 1e-8, "limit": 1e-4}
    assert data["weights"][0]["cells"] == [{"own": 1.0, "others": [], "behind": 0.0}]
    assert Measured().as_dict() == {"compared": [], "ran": None, "stage": None, "weights": []}
    assert versions()["torch"].startswith("2.")


@pytest.mark.parametrize(
    ("one", "apart"),
    [
        (Compared("gradient", 1, "pass"), 0.0),
        (Compared("gradient", 1, "pass", floor=1e-9), math.inf),
        (Compared("gradient", 1, "pass", floor=1e-9, error=1e-7), 1e-7),
    ],
)
def test_rounding_alone_that_is_not_the_same_to_the_bit_is_apart_however_far(one: Compared, apart: float) -> None:
    assert one.apart == apart
