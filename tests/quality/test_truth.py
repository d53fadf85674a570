"""The truth test tells false sentences from true ones, and the runs that it holds today stay as they are."""

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import truth
from truth_check import Counts, Truth, check
from truth_claims import EVIDENCE, LAWS, THINGS, denied
from truth_faults import FAULTS, Planted
from truth_mixtures import mixtures
from truth_rights import Right, rights
from truth_specimens import WRONG, tried, truth_of, wanted

from pipeproof.core.cause import KINDS, Cause, RuledOut
from pipeproof.core.verdict import LawResult, Mismatch, Verdict
from pipeproof.whitebox import WhiteBox
from pipeproof.wings.specimens import SPECIMENS
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.sweeps import SWEEP, sampled

COUNTS = Counts(4, 4, 8)
DROPPED = Truth(
    ("dropped",),
    frozenset({"sums", "gradients"}),
    ranks=(1,),
    stages=(1,),
    microbatches=(2, 3),
    parameter="weight$",
    factors=(0.5,),
    affected=(1,),
)
CAUSE = Cause("dropped", rank=1, stage=1, microbatches=(2, 3), parameter="a.weight", factor=0.5, detail="both")
PLACE = Mismatch("gradient", 1, "observed", "expected", rank=1, stage=1, parameter="a.weight")
GRADIENT, LOSS = LawResult("gradient", "fail", 4, 3, 1), LawResult("loss", "pass", 4, 4)
# What a line under ``not`` may say of each thing, and the kinds that it rules out.
SENTENCES = {
    "held": RuledOut((), "every parameter is held once", 1),
    "partition": RuledOut(("partition",), "every parameter is in the stage that should hold it", 1),
    "weights": RuledOut((), "every stage began with the model's parameters", 1),
    "order": RuledOut((), "every stage ran once each way for each microbatch, in the right mode", 1),
    "mode": RuledOut(("order", "mode"), "every stage ran once each way for each microbatch, in its mode", 1),
    "boundary": RuledOut((), "every tensor between stages is right, to half of its digits", 1),
    "messages": RuledOut(("wrong-message", "swapped-data"), "every boundary tensor is right", 1),
    "sums": RuledOut((), "each action added what its microbatch contributes", 1),
    "tied": RuledOut(("tied-not-summed", "tied-doubled"), "every copy has the sum of all shares", 1),
    "replicas": RuledOut(("not-reduced",), "ranks that have a stage in common agree", 1),
    "gradients": RuledOut((), "every gradient that was compared is what it should be", 1),
    "norm": RuledOut(("norm",), "the norm is that of the gradients", 1),
    "clip": RuledOut(("clip",), "all gradients were multiplied alike", 1),
    "update": RuledOut(("update",), "the optimizer did what it should", 1),
    "buffers": RuledOut(("buffers",), "what forwards leave behind is right", 1),
    "report": RuledOut(("report",), "every reported loss is right", 1),
    "dropped": RuledOut((), "every microbatch is in every stage's sum", 1),
    "doubled": RuledOut(("doubled",), "no microbatch is there twice", 1),
    "swapped": RuledOut(("swapped-activations",), "every activation met its own microbatch's output gradient", 1),
    "stale": RuledOut(("stale-gradient", "stale-tensor"), "nothing of an earlier step is in the sums", 1),
    "scale": RuledOut(("scale", "sign"), "every contribution has factor 1", 1),
}


def verdict(*causes: Cause, undecided: tuple[str, ...] = (), where: Mismatch = PLACE) -> Verdict:
    return Verdict("case", "fail", "none", (GRADIENT, LOSS), (where,), causes, undecided=undecided)


def either(*causes: Cause) -> Verdict:
    return replace(verdict(causes[0]), alternatives=tuple((cause,) for cause in causes[1:]))


def ruling_out(*reasons: RuledOut) -> Verdict:
    return replace(verdict(CAUSE), ruled_out=reasons)


def roles(found: Verdict, known: Truth, counts: Counts = COUNTS) -> list[str]:
    return [one.role for one in check(found, known, counts).false]


def test_a_true_verdict_has_no_false_sentence() -> None:
    reasons = [reason for thing, reason in SENTENCES.items() if thing not in ("sums", "gradients", "dropped")]
    found = check(ruling_out(*reasons), DROPPED, COUNTS)
    assert found.false == ()
    assert (found.naming, found.caught, found.garbled, found.downstream) == ("right", True, (), "")
    assert found.sentences == 1 + 1 + 1 + len(reasons) + 1


@pytest.mark.parametrize("thing", SENTENCES)
def test_a_denial_of_what_is_wrong_is_false(thing: str) -> None:
    known = replace(DROPPED, wrong=frozenset({thing}))
    found = [role for role in roles(ruling_out(SENTENCES[thing]), known) if role == "not"]
    assert len(found) == (2 if thing == "gradients" else 1), "the law that failed denies it too"


def test_every_evidence_is_tried_and_says_known_things() -> None:
    tried = [reason.evidence for reason in SENTENCES.values()]
    assert all(any(re.match(pattern, text) for text in tried) for pattern, _ in EVIDENCE)
    assert all(things <= THINGS for things in (*(things for _, things in EVIDENCE), *LAWS.values()))


def test_a_sentence_that_nobody_knows_is_no_true_one() -> None:
    unheard = RuledOut((), "it did not rain", 1)
    assert denied(unheard) is None
    assert roles(ruling_out(unheard), DROPPED) == ["not"]
    assert roles(verdict(undecided=("it may rain",)), DROPPED) == ["unknown"]


def test_a_kind_that_is_the_fault_is_never_ruled_out() -> None:
    known = replace(DROPPED, kinds=("altered",))
    found = replace(ruling_out(RuledOut(("altered",), "every tensor between stages is right", 1)), causes=())
    assert roles(found, known) == ["not"]


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "doubled"},
        {"rank": 2},
        {"stage": 2},
        {"microbatches": (2,)},
        {"microbatches": (2, 3, 4)},
        {"parameter": "a.bias"},
        {"factor": 2.0},
        {"detail": "8 = the number of ranks"},
        {"rank": None, "stage": None, "microbatches": (), "parameter": None},
    ],
)
def test_a_cause_that_is_another_or_elsewhere_is_false(change: dict[str, object]) -> None:
    wrong = replace(CAUSE, **change)
    found = check(verdict(wrong), DROPPED, COUNTS)
    assert {one.role for one in found.false} == {"cause"}
    expected = {"kind": "wrong", "factor": "right", "detail": "right"}.get(next(iter(change)), "elsewhere")
    assert found.naming == expected


def test_what_is_not_said_of_a_place_is_not_false() -> None:
    for change in ({"rank": None}, {"stage": None}, {"microbatches": ()}, {"parameter": None}, {"factor": None}):
        assert roles(verdict(replace(CAUSE, **change)), DROPPED) == []


def test_an_alternative_must_be_possible_and_none_that_holds_as_well() -> None:
    assert roles(either(CAUSE, Cause("mode", detail="evaluation")), DROPPED) == ["or"]
    both = replace(DROPPED, ranks=(1, 2), stages=(1, 2))
    assert roles(either(CAUSE, replace(CAUSE, rank=2, stage=2)), both) == ["or"]
    halves = replace(DROPPED, also=(replace(DROPPED, kinds=("doubled",)),))
    assert roles(either(CAUSE, replace(CAUSE, kind="doubled")), halves) == ["or"]
    assert roles(either(CAUSE, replace(CAUSE, kind="doubled")), DROPPED) == ["or"]


def test_causes_that_hold_together_must_all_hold() -> None:
    halves = replace(DROPPED, also=(replace(DROPPED, kinds=("doubled",)),))
    assert roles(verdict(CAUSE, replace(CAUSE, kind="doubled")), halves) == []
    assert roles(verdict(CAUSE, replace(CAUSE, kind="doubled")), DROPPED) == ["and"]


def test_of_two_faults_both_are_told_or_something_is_left_open() -> None:
    halves = replace(DROPPED, also=(replace(DROPPED, kinds=("altered",)),))
    assert roles(verdict(CAUSE), halves) == ["cause"]
    assert roles(verdict(CAUSE, undecided=("later effects were not analysed: more",)), halves) == []


def test_a_swap_may_be_the_other_one() -> None:
    known = replace(DROPPED, kinds=("swapped-activations",))
    found = either(replace(CAUSE, kind="swapped-activations"), replace(CAUSE, kind="swapped-gradients"))
    assert roles(found, known) == []


def test_a_wrong_pairing_may_be_a_wrong_message_where_both_are_told() -> None:
    known = replace(DROPPED, kinds=("wrong-message",))
    mispaired, message = replace(CAUSE, kind="mispaired"), replace(CAUSE, kind="wrong-message")
    assert roles(either(mispaired, message), known) == []
    assert roles(either(message, mispaired), replace(DROPPED, kinds=("mispaired",))) == []
    assert roles(verdict(mispaired), known) == ["cause"]


def test_a_law_that_passed_over_what_is_wrong_is_false() -> None:
    assert roles(verdict(CAUSE), replace(DROPPED, wrong=frozenset({"loss"}))) == ["law"]


def test_a_place_where_nothing_can_show_is_false() -> None:
    assert roles(verdict(CAUSE, where=replace(PLACE, stage=3)), DROPPED) == ["where"]
    first = "first observed wrong: rank 2, stage 2, 2F0: input is nobody's"
    assert roles(verdict(undecided=(first,)), replace(DROPPED, affected=None)) == ["unknown"]
    between = "first observed wrong: between rank {0}, stage {0} and rank {1}, stage {1}, {1}F0: input is nobody's"
    places = [((0, 1), []), ((1, 2), []), ((2, 3), ["unknown"])]
    for stages, false in places:
        assert roles(verdict(undecided=(between.format(*stages),)), replace(DROPPED, affected=None)) == false
    assert check(verdict(CAUSE, where=replace(PLACE, stage=3)), replace(DROPPED, affected=None), COUNTS).downstream


def test_sentences_that_their_own_verdict_speaks_against_are_false() -> None:
    assert roles(ruling_out(RuledOut((), "of stage 1, a.weight is right", 1)), DROPPED) == ["not"]
    assert roles(ruling_out(RuledOut((), "of stage 1, b.weight is right", 1)), DROPPED) == []
    assert roles(ruling_out(SENTENCES["gradients"]), replace(DROPPED, wrong=frozenset())) == ["not"]


def test_verdicts_are_sentences_too() -> None:
    assert roles(replace(verdict(), outcome="pass", laws=(LOSS,), mismatches=()), DROPPED) == ["verdict"]
    assert roles(verdict(CAUSE), Truth()) == ["verdict", "cause"]
    right = Verdict("case", "pass", "bitwise", (LOSS,))
    assert check(right, Truth(), COUNTS) == check(right, Truth(), COUNTS)
    assert (check(right, Truth(), COUNTS).naming, roles(right, Truth())) == ("silent", [])
    assert check(replace(right, outcome="unknown"), Truth(), COUNTS).naming == "needless"


@pytest.mark.parametrize(
    ("outcome", "faint", "caught"), [("unknown", True, True), ("unknown", False, False), ("pass", True, False)]
)
def test_unknown_is_an_answer_only_where_rounding_may_do_as_much(outcome: Any, faint: bool, caught: bool) -> None:
    found = replace(verdict(), outcome=outcome)
    assert check(found, replace(DROPPED, faint=faint), COUNTS).caught == caught


def test_sentences_without_an_end_are_garbled() -> None:
    assert check(verdict(replace(CAUSE, detail="microbatch 3: ")), DROPPED, COUNTS).garbled
    assert check(verdict(replace(CAUSE, detail="of stage 0 has ; and more")), DROPPED, COUNTS).garbled


def test_final_gradients_may_name_what_is_alike() -> None:
    known = replace(DROPPED, alike=("scale",))
    found = verdict(replace(CAUSE, kind="scale"))
    assert check(found, known, COUNTS, watched=False).naming == "right"
    assert check(found, known, COUNTS).naming == "wrong"


def test_every_fault_has_a_truth() -> None:
    assert set(WRONG) == set(SPECIMENS)
    told = {kind for fault in FAULTS for kind in (*fault.truth.kinds, *fault.truth.alike)}
    assert told <= set(KINDS)
    for runtime in ("iterators", "instructions", "two-way", "classes"):
        kinds = {fault.truth.kinds[0] for fault in FAULTS if fault.runtime == runtime}
        assert len(kinds) >= 9, f"{runtime} has {sorted(kinds)}"
        assert sum(fault.runtime == runtime for fault in FAULTS) >= 12
    assert len({fault.title for fault in FAULTS}) == len(FAULTS)
    assert len({right.name for right in rights()}) >= 60


# What holds today. All else is in the campaign, whose table has it.
HOLDS = (
    "iterators: static receive buffer",
    "iterators: first not added",
    "iterators: activations overtake",
    "instructions: second layer not called",
    "classes: other epsilon",
    "instructions: labels exchanged",
    "instructions: gradient read before it came",
    "two-way: second half not added",
    "classes: last microbatch negated",
)
SILENT = (
    "right: iterators",
    "right: two-way",
    "right: backwards shuffled",
    "right: two streams, last in first out",
    "right: a mask and positions go along",
    "right: tied copies in two stages",
    "right: replicas, reduced by hand",
    "right: bf16, gradients added in fp32",
)
MIXED = (
    "plain: two layers exchanged",
    "plain: sent in bf16 + one lost",
    "plain: sent with noise + one lost",
    "residual stream: first stream in bf16",
    "a number aside: second stream is zero",
    "plain: sent back in bf16 + another's target",
    "tied: first stage halved late",
)
PLANTED = (
    *("replicas-summed", "gradients-crossed", "input-partly-overwritten", "clip-by-stage", "loss-summed"),
    *("layer-skipped", "targets-of-step-before"),
)


# From final gradients: one of each runtime, and the others in a sweep.
FINAL = ("first not added", "labels exchanged", "second half not added", "last microbatch negated")
HELD = [fault for fault in FAULTS if fault.title in HOLDS]


def test_final_gradients_are_tried_in_every_runtime() -> None:
    assert {one.runtime for one in HELD if one.name in FINAL} == {one.runtime for one in HELD}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fault", "watched"),
    [
        *(
            pytest.param(one, True, id=f"watched-{one.name}", marks=SWEEP if k % 2 else ())
            for k, one in enumerate(HELD)
        ),
        *(pytest.param(one, False, id=f"final-{one.name}", marks=() if one.name in FINAL else SWEEP) for one in HELD),
    ],
)
def test_nothing_false_is_said_of_a_fault(whitebox: WhiteBox, fault: Planted, watched: bool) -> None:
    found = check(fault.verdict(whitebox, watched=watched), fault.truth, COUNTS, watched=watched)
    assert found.caught, found
    assert found.false == (), found
    assert found.naming in ("right", "unknown"), found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("title", sampled(MIXED, 2))
def test_nothing_false_is_said_of_a_fault_in_its_surroundings(whitebox: WhiteBox, title: str) -> None:
    (mixture,) = (one for one in mixtures() if one.title == title)
    found = check(mixture.verdict(whitebox, watched=True), mixture.truth, COUNTS)
    assert (found.naming, found.false) == ("right", ()), found


@pytest.mark.parametrize("right", [right for right in rights() if right.title in SILENT], ids=lambda right: right.name)
def test_nothing_is_said_against_what_is_right(whitebox: WhiteBox, right: Right) -> None:
    found = right.verdict(whitebox, watched=True)
    assert check(found, right.truth, COUNTS).naming == "silent", str(found)


@pytest.mark.parametrize("name", PLANTED)
def test_nothing_false_is_said_of_a_specimen(world: World, name: str) -> None:
    (case,) = wanted([name], ())
    for one in tried(case, world):
        counts = Counts(case.ranks, case.stages, case.microbatches)
        found = check(one.verdict, truth_of(SPECIMENS[name], case), counts, watched=one.watched)
        assert (found.caught, found.false) == (True, ()), str(one.verdict)


@pytest.mark.sweep
def test_the_command_ends_with_1_where_a_sentence_is_false(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = next(fault for fault in FAULTS if fault.title == HOLDS[1])
    monkeypatch.setattr(truth, "World", lambda **_: nullcontext(world))
    monkeypatch.setattr(truth, "FAULTS", (fault,))
    assert truth.main(["--part", "faults"]) == 0
    monkeypatch.setattr(truth, "FAULTS", (replace(fault, truth=Truth()),))
    assert truth.main(["--part", "faults", "--only", "first not"]) == 1
    golden(capsys.readouterr().out, lines="FALSE")
    assert truth.main(["--part", "faults", "--only", "no such run"]) == 1, "nothing was run"
