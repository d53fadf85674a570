"""Which stage a module is that was handed back: its names tell, or the runtime, or its rank; else nobody knows."""

from collections.abc import Sequence

import pytest

from pipeproof.diagnosis.members import Replicas
from pipeproof.foreign.handed_back import HandBackError
from pipeproof.observers.calls import Call
from pipeproof.pipeline.action import Action
from pipeproof.records.stage_numbers import Modules, stage_numbers, told_by

WHOLE = ["words", "a", "b", "c", "head"]
V_SHAPED = [Modules([frozenset({"words"}), frozenset({"c", "head"})]), Modules([frozenset({"a"}), frozenset({"b"})])]
ONE_EACH = [Modules([frozenset({name})]) for name in ("x", "x", "y", "y")]
NONE = Modules([])


def numbers(every: Sequence[Modules], replicas: Replicas, whole: Sequence[str] = ()) -> list[list[int]]:
    return stage_numbers(every, replicas, whole, "mine")


def test_the_model_has_its_stages_in_the_order_of_its_names() -> None:
    assert numbers(V_SHAPED, Replicas.along(2, 4), WHOLE) == [[0, 3], [1, 2]]
    assert numbers([*V_SHAPED, *V_SHAPED], Replicas.along([0, 0, 1, 1], 4), WHOLE) == [[0, 3], [1, 2]] * 2
    tied = [Modules([frozenset({"head", "words"})]), Modules([frozenset({"a", "words"})])]
    assert numbers(tied, Replicas.along(2, 4), ["words", "a", "head"]) == [[1], [0]]


def test_one_module_on_each_rank_has_the_place_of_the_rank_in_its_pipeline() -> None:
    assert numbers(ONE_EACH, Replicas.along(4, 4)) == [[0], [1], [2], [3]]
    assert numbers(ONE_EACH, Replicas.along([0, 1, 0, 1], 4)) == [[0], [0], [1], [1]]
    assert numbers(ONE_EACH, Replicas.along({"dp": 2, "pp": 2}, 4)) == [[0], [1], [0], [1]]
    assert numbers([NONE, *ONE_EACH[:2]], Replicas.along(3, 4)) == [[], [0], [1]]


def test_what_the_runtime_ran_tells_which_stage_a_module_is() -> None:
    calls = [[Call(True, began=1), Call(True, began=4)], [Call(True, began=2)]]
    trace = [Action.parse(one) for one in ("3F0", "0F0", "0B0", "3F1")]
    told = told_by(trace, calls)
    assert told == [3, 0]
    every = [Modules(V_SHAPED[0].names, told), Modules(V_SHAPED[1].names, [1, 2])]
    assert numbers(every, Replicas.along(2, 2)) == [[3, 0], [1, 2]]
    assert told_by(trace[:-1], calls) is told_by(None, calls) is None, "other calls than the trace has"
    assert told_by([Action.parse(one) for one in ("3F0", "3F1", "0F0")], calls) is None, "two stages in one module"


def test_where_nothing_tells_that_is_said_with_the_cure() -> None:
    with pytest.raises(HandBackError, match="mine handed back 2 modules, and nothing tells which stages they are"):
        numbers(V_SHAPED, Replicas.along(2, 4))
    with pytest.raises(HandBackError, match="the model of build= does not have a: say its name there, by names="):
        numbers(V_SHAPED, Replicas.along(2, 4), ["words", "c", "head"])
    bare = [Modules([frozenset()]), Modules([frozenset()])]
    with pytest.raises(HandBackError, match="they have no parameters"):
        numbers(bare, Replicas.along(2, 4), WHOLE)
