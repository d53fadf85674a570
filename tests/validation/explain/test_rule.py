"""Rules followed in their order: what is sound rules out only what was compared, what is left stops the search."""

from types import SimpleNamespace
from typing import Any

from pipeproof.core.cause import Cause, RuledOut
from pipeproof.core.verdict import LawResult, Mismatch, Verdict
from pipeproof.explain.rule import Rule, clears, follow_rules

LAWS = (
    LawResult("loss", "pass", 8, 8),
    LawResult("gradient", "fail", 4, 2, 2),
    LawResult("grad-norm", "pass"),  # nothing was compared
    LawResult("buffers", "unknown", 3),
)
WRONG = tuple(Mismatch("gradient", 1, "norm 1", "norm 2", rank=s, stage=s, parameter="w") for s in (3, 2, 1))


FAILED = Verdict("case", "fail", "none", LAWS, WRONG)


def evidence(attribution: Any = None) -> Any:
    return SimpleNamespace(verdict=FAILED, attribution=attribution)


def sound(_: Any) -> list[Cause]:
    return []


def broken(*causes: Cause) -> Any:
    return lambda _: list(causes)


def test_a_sound_rule_rules_out_what_its_law_compared_and_nothing_else() -> None:
    rules = [
        Rule(sound, clears(law, (kind,), f"{law} is right"))
        for law, kind in (("loss", "report"), ("gradient", "scale"), ("grad-norm", "norm"), ("buffers", "buffers"))
    ]
    verdict = follow_rules(evidence(), [*rules, Rule(broken(Cause("zero", stage=1)))])
    assert verdict.ruled_out == (RuledOut(("report",), "loss is right", 8),)
    assert follow_rules(evidence(), rules).causes == ()


def test_a_rule_without_its_evidence_is_passed_over() -> None:
    verdict = follow_rules(evidence(), [Rule(broken(Cause("zero")), needs=lambda _: False)])
    assert (verdict.causes, verdict.ruled_out, verdict.undecided) == ((), (), ())


def test_what_is_wrong_without_a_cause_stops_the_search() -> None:
    rules = [Rule(sound, left=lambda _: ["it tells nothing"]), Rule(broken(Cause("zero")))]
    assert follow_rules(evidence(), rules).undecided == ("it tells nothing",)
    assert follow_rules(evidence(), rules).causes == ()


def test_the_kind_that_is_named_is_not_ruled_out() -> None:
    first = Rule(sound, clears("loss", ("report",), "every loss is right"))
    named = Cause("dropped", stage=1, instead=(Cause("report"),))
    verdict = follow_rules(evidence(), [first, Rule(broken(named))])
    assert [[one.kind for one in each] for each in (verdict.causes, *verdict.alternatives)] == [["dropped"], ["report"]]
    assert verdict.ruled_out == ()


def test_what_was_seen_where_it_happened_comes_first_and_the_rest_stays() -> None:
    verdict = follow_rules(evidence(), [Rule(broken(Cause("zero", stage=1)))])
    assert [one.stage for one in verdict.mismatches] == [1, 3, 2]
    assert follow_rules(evidence(), [Rule(broken(Cause("zero")))]).mismatches == WRONG


def test_coefficients_are_shown_where_a_cause_rests_on_them() -> None:
    cells = SimpleNamespace(rows=((SimpleNamespace(own=0.0),),) * 2, right=False)
    known = evidence(attribution=SimpleNamespace(cells=cells))
    for cause, shown in ((Cause("dropped", stage=1), cells), (Cause("norm"), None)):
        assert follow_rules(known, [Rule(broken(cause))]).cells is shown
