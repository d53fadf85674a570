"""Replicas that begin a step with other weights are told, and weights that have one name and are two."""

from pipeproof.core.ledger import Ledger
from pipeproof.wings.composed.composed_verdict import OF_REPLICAS
from pipeproof.wings.composed.replica_weights import enter_weights, not_one
from tests.support.golden import golden

SAME = {(0, "a"): ("", b"1"), (0, "b"): ("[0:2]", b"2")}


def test_ranks_with_the_same_weights_agree() -> None:
    ledger = Ledger(OF_REPLICAS)
    other_half = {(0, "a"): ("", b"1"), (0, "b"): ("[2:4]", b"3")}
    assert enter_weights(ledger, [SAME, other_half, SAME]) == []
    (law,) = [one for one in ledger.laws() if one.name == "initial-weights"]
    assert (law.outcome, law.checked) == ("pass", 3)


def test_a_rank_with_others_is_named() -> None:
    ledger = Ledger(OF_REPLICAS)
    (cause,) = enter_weights(ledger, [SAME, {**SAME, (0, "b"): ("[0:2]", b"9")}])
    assert (cause.kind, cause.rank, cause.stage, cause.parameter) == ("replicas-apart", 1, 0, "b")
    assert [(one.law, one.rank, one.parameter) for one in ledger.mismatches] == [("initial-weights", 1, "b")]


def test_where_nobody_has_the_same_the_law_does_not_apply() -> None:
    ledger = Ledger(OF_REPLICAS)
    enter_weights(ledger, [{(0, "b"): ("[0:2]", b"2")}, {(0, "b"): ("[2:4]", b"3")}])
    (law,) = [one for one in ledger.laws() if one.name == "initial-weights"]
    assert law.outcome == "not applicable"


def test_one_weight_of_several_stages_is_one_where_they_have_the_same_in_it() -> None:
    other_half = {(1, "b"): ("[2:4]", b"3")}
    assert not_one([SAME, {(1, "a"): ("", b"1")} | other_half, SAME]) == ""


def test_one_name_of_several_weights_is_said_with_its_cure() -> None:
    told = not_one([SAME, {(1, "a"): ("", b"5"), (1, "b"): ("[0:2]", b"6")}])
    golden(told)
    assert "rename=" in told
