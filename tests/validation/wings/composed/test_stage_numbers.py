"""Which stage a module is that was handed back: the contract says, or names, the runtime or ranks tell."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pipeproof.core.reason import Reason, reasons_of
from pipeproof.core.replicas import Replicas
from pipeproof.foreign.flow import Flow
from pipeproof.foreign.handed_back import HandBackError
from pipeproof.observers.calls import Call
from pipeproof.pipeline.action import Action
from pipeproof.wings.composed.stage_numbers import Modules, stage_numbers, told_by

WHOLE = ["words", "a", "b", "c", "head"]
V_SHAPED = [Modules([frozenset({"words"}), frozenset({"c", "head"})]), Modules([frozenset({"a"}), frozenset({"b"})])]
ONE_EACH = [Modules([frozenset({name})], [Flow()]) for name in ("x", "x", "y", "y")]
NONE = Modules([])


def numbers(every: Sequence[Modules], replicas: Replicas, whole: Sequence[str] = ()) -> list[list[int]]:
    return [list(one) for one in stage_numbers(every, replicas, whole, "mine")]


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
    every = [replace(V_SHAPED[0], told=told), replace(V_SHAPED[1], told=[1, 2])]
    assert numbers(every, Replicas.along(2, 2)) == [[3, 0], [1, 2]]
    assert told_by(trace[:-1], calls) is told_by(None, calls) is None, "other calls than the trace has"
    assert told_by([Action.parse(one) for one in ("3F0", "3F1", "0F0")], calls) is None, "two stages in one module"


def digests(*names: str) -> frozenset[bytes]:
    return frozenset(name.encode() for name in names)


def passed(came: str, gave: str, returned: str = "", handed: str = "") -> Flow:
    """What passed a module of two calls, each tensor by a letter; - is one that is nobody's."""
    return Flow([digests(one) for one in came], [digests(one) for one in returned], digests(*gave), digests(*handed))


FIRST, SECOND, THIRD = passed("ab", "AB"), passed("AB", "cd"), passed("cd", "CD")


def of_flows(*every: Sequence[Flow]) -> list[Modules]:
    return [Modules([frozenset({"x"})] * len(own), own) for own in every]


@pytest.mark.parametrize(
    "flows",
    [[[FIRST], [SECOND], [passed("--", "CD")]], [[FIRST], [passed("AC", "cd")], [THIRD]]],
    ids=["one sees none", "one is another's"],
)
def test_ranks_tell_the_order_where_tensors_went_no_other_way(flows: list[list[Flow]]) -> None:
    assert numbers(of_flows(*flows), Replicas.along(3, 4)) == [[0], [1], [2]]


BACKWARD = [THIRD], [FIRST], [SECOND]


def test_what_the_contract_says_comes_first() -> None:
    said = [[2], [0], [1]]
    assert [*map(list, stage_numbers(of_flows(*BACKWARD), Replicas.along(3, 4), (), "mine", said))] == said
    twice = stage_numbers(V_SHAPED * 2, Replicas.along([0, 0, 1, 1], 4), WHOLE, "mine", [[3, 0], [1, 2]])
    assert [*map(list, twice)] == [[3, 0], [1, 2]] * 2, "for each rank of a pipeline, whatever names tell"


@pytest.mark.parametrize(
    ("one", "said", "told"),
    [
        (V_SHAPED[0], [[0]], "has \\[0\\] for rank 0, which handed back 2 modules: mend one"),
        (V_SHAPED[0], [[0, 1], [2]], "has \\[2\\] for rank 1, which handed back 2 modules"),
        (V_SHAPED[0], [[0, 1]], "has \\[\\] for rank 1, which handed back 2 modules"),
        (replace(V_SHAPED[0], told=[0, 1]), [[1, 0], [2, 3]], "for rank 0, which handed back the stages \\[0, 1\\]"),
    ],
)
def test_what_was_handed_back_may_not_contradict_the_contract(one: Modules, said: list[list[int]], told: str) -> None:
    with pytest.raises(HandBackError, match=f"stages of the contract .*{told}"):
        stage_numbers([one, one], Replicas.along(2, 4), (), "mine", said)


def test_where_nothing_tells_that_is_said_with_the_cure() -> None:
    for flows in (([FIRST, THIRD], [SECOND]), BACKWARD, ([THIRD], [passed("A-", "cd")], [FIRST])):
        with pytest.raises(HandBackError, match="mine handed back modules, and nothing tells in which") as error:
            numbers(of_flows(*flows), Replicas.along(len(flows), 4))
        assert reasons_of(*error.value.args) == (Reason.STAGES,)
    bare = Modules([frozenset(), frozenset({"a"})])
    for every, told in (([bare, *V_SHAPED], "no weights"), (V_SHAPED, "a")):
        with pytest.raises(HandBackError, match=f"mine handed back a module with {told}, .* or stages= of") as error:
            numbers(every, Replicas.along(len(every), 4), ["words", "c", "head"])
        assert reasons_of(*error.value.args) == (Reason.STAGES,)
