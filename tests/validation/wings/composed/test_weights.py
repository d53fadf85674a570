"""Weights as a step begins: replicas that have others are told, and names that may stand for one weight or several."""

import pytest
import torch
from torch import nn

from pipeproof.core.ledger import Ledger
from pipeproof.records.rank_part import RankStages
from pipeproof.wings.composed.shards import OwnShards
from pipeproof.wings.composed.weights import (
    WeightHere,
    Weights,
    enter_equal,
    enter_weights,
    equal_weights,
    explain_hand_cut,
    not_one,
    weights_apart,
    weights_here,
)
from pipeproof.wings.composed.whole import OF_REPLICAS
from tests.support.golden import golden

SAME = {(0, "a"): ("", b"1"), (0, "b"): ("[0:2]", b"2")}
OTHER = {**SAME, (0, "b"): ("[0:2]", b"9")}
HALF, OTHER_HALF = {(0, "b"): ("[0:2]", b"2")}, {(0, "b"): ("[2:4]", b"3")}


@pytest.mark.parametrize(
    ("ranks", "outcome", "apart"),
    [
        ([SAME, {**SAME, **OTHER_HALF}, SAME], "pass", []),
        ([SAME, OTHER], "fail", [(1, 0, "b")]),
        ([HALF, OTHER_HALF], "not applicable", []),
    ],
)
def test_ranks_with_one_part_begin_alike(ranks: list[Weights], outcome: str, apart: list[tuple[int, int, str]]) -> None:
    ledger = Ledger(OF_REPLICAS)
    enter_weights(ledger, ranks)
    assert [(one.rank, one.stage, one.parameter) for one in weights_apart(ledger.mismatches)] == apart
    assert [(one.rank, one.stage, one.parameter) for one in ledger.mismatches] == apart
    assert [one.outcome for one in ledger.laws() if one.name == "initial-weights"] == [outcome]


def test_one_name_of_several_weights_is_said() -> None:
    assert not not_one([SAME, {(1, "a"): ("", b"1"), (1, "b"): ("[2:4]", b"3")}, SAME])
    golden(not_one([SAME, {(1, "a"): ("", b"5"), (1, "b"): ("[0:2]", b"6")}]))


def test_weights_of_other_parts_may_differ() -> None:
    whole: list[Weights] = [{(0, "w"): ("", digest)} for digest in (b"a", b"b")]
    assert not explain_hand_cut([HALF, OTHER_HALF], [0, 0])
    assert not explain_hand_cut(whole, [0, 1])
    golden(explain_hand_cut(whole, [0, 0]))


def here(digest: str, *, constant: bool = False, part: str = "", trains: bool = True) -> WeightHere:
    return WeightHere(part, digest.encode(), constant, trains)


A, B, C = here("a"), here("b"), here("c")
RANKS = {
    "one name": ([{(0, "w"): A}, {(1, "w"): A}], {}),
    "one stage": ([{(0, "v"): A, (0, "w"): A}], {}),
    "two stages": ([{(0, "v"): A}, {(1, "w"): A}], {(0, 1): ["v", "w"]}),
    "parts": ([{(0, "v"): A, (1, "w"): A}, {(0, "v"): B, (1, "w"): C}], {}),
    "equal parts": ([{(0, "v"): A, (1, "w"): A}, {(0, "v"): B, (1, "w"): B}], {(0, 1): ["v", "w"]}),
    "several of a stage": ([{(0, "u"): A, (0, "v"): A}, {(2, "w"): A}], {(0, 2): ["u", "v", "w"]}),
}


@pytest.mark.parametrize(("ranks", "found"), RANKS.values(), ids=RANKS)
def test_weights_are_equal_where_all_ranks_parts_are(
    ranks: list[dict[tuple[int, str], WeightHere]], found: dict[tuple[int, ...], list[str]]
) -> None:
    assert equal_weights(ranks) == found


def test_only_the_compared_stage_is_in_doubt() -> None:
    for only, names in ((None, ["v", "w"]), (0, ["v", "w"]), (1, ["v", "w"]), (2, [])):
        ledger = Ledger(["presence", "gradient"])
        assert [*enter_equal(ledger, RANKS["two stages"][0], only)] == names
        assert ledger.failed == bool(names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.complex128])
@pytest.mark.parametrize(("begun", "constant"), [([1.0, 1.0], True), ([1.0, 2.0], False), ([1.0], True), ([], True)])
def test_weights_are_constant_in_any_type(dtype: torch.dtype, begun: list[float], constant: bool) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.tensor(begun, dtype=dtype))
    shards = OwnShards(RankStages({0: module}, lambda stage, name: name))
    assert [one.constant for one in weights_here(shards, {}, {}).values()] == [constant]
