"""The truth test tells false sentences from true ones, and the runs that it holds today stay as they are."""

import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import truth
from truth_check import COUNTS, RIGHT, Truth, check
from truth_claims import EVIDENCE, LAWS, THINGS, denied
from truth_faults import FAULTS
from truth_specimens import WRONG, wanted

from pipeproof.core.cause import Cause, RuledOut
from pipeproof.core.verdict import LawResult, Mismatch, Verdict
from pipeproof.wings.specimens import SPECIMENS
from pipeproof.worlds.world import World
from tests.support.golden import golden

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


def roles(found: Verdict, known: Truth) -> list[str]:
    return [one.role for one in check(found, known, COUNTS).false]


UNHEARD = RuledOut((), "it did not rain", 1)


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


def of(kind: str, **more: Any) -> Cause:
    return replace(CAUSE, kind=kind, **more)


def true(**more: Any) -> Truth:
    return replace(DROPPED, **more)


def of_places(*places: int, text: str = "between rank {0}, stage {0} and rank {1}, stage {1}, {1}F0") -> Verdict:
    return verdict(undecided=(f"first observed wrong: {text.format(*places)}: input is nobody's",))


HALVES = true(also=(true(kinds=("doubled",)),))
TWO = true(also=(true(kinds=("altered",)),))
HERE, ELSEWHERE = Cause("mode", detail="evaluation"), replace(PLACE, stage=3)
NOT_ALTERED = RuledOut(("altered",), "every tensor between stages is right", 1)
MESSAGE = true(kinds=("wrong-message",))
# A verdict, what is true, and the roles of sentences that are false.
FALSE: Mapping[str, tuple[Verdict, Truth, list[str]]] = {
    "a reason that nobody knows": (ruling_out(UNHEARD), DROPPED, ["not"]),
    "an open end that nobody knows": (verdict(undecided=("it may rain",)), DROPPED, ["unknown"]),
    "the fault is ruled out": (replace(ruling_out(NOT_ALTERED), causes=()), true(kinds=("altered",)), ["not"]),
    **{
        f"no {name} is said": (verdict(replace(CAUSE, **{name: nothing})), DROPPED, [])
        for name, nothing in {**dict.fromkeys(("rank", "stage", "parameter", "factor")), "microbatches": ()}.items()
    },
    "an alternative that cannot be": (either(CAUSE, HERE), DROPPED, ["or"]),
    "an alternative that holds as well": (
        either(CAUSE, replace(CAUSE, rank=2, stage=2)),
        true(ranks=(1, 2), stages=(1, 2)),
        ["or"],
    ),
    "an alternative that is the other half": (either(CAUSE, of("doubled")), HALVES, ["or"]),
    "an alternative that is none": (either(CAUSE, of("doubled")), DROPPED, ["or"]),
    "two causes that hold": (verdict(CAUSE, of("doubled")), HALVES, []),
    "two causes of which one holds": (verdict(CAUSE, of("doubled")), DROPPED, ["and"]),
    "one of two faults": (verdict(CAUSE), TWO, ["cause"]),
    "one of two faults, and something is left open": (
        verdict(CAUSE, undecided=("later effects were not analysed: more",)),
        TWO,
        [],
    ),
    "a swap may be the other one": (
        either(of("swapped-activations"), of("swapped-gradients")),
        true(kinds=("swapped-activations",)),
        [],
    ),
    "mispaired, or a message": (either(of("mispaired"), of("wrong-message")), MESSAGE, []),
    "a message, or mispaired": (either(of("wrong-message"), of("mispaired")), true(kinds=("mispaired",)), []),
    "mispaired, and a message is not said": (verdict(of("mispaired")), MESSAGE, ["cause"]),
    "a law that passed over what is wrong": (verdict(CAUSE), true(wrong=frozenset({"loss"})), ["law"]),
    "a place where nothing can show": (verdict(CAUSE, where=ELSEWHERE), DROPPED, ["where"]),
    "first wrong elsewhere": (of_places(2, text="rank {0}, stage {0}, {0}F0"), true(affected=None), ["unknown"]),
    **{
        f"first wrong between {places}": (of_places(*places), true(affected=None), roles_)
        for places, roles_ in {(0, 1): [], (1, 2): [], (2, 3): ["unknown"]}.items()
    },
    "a parameter is wrong": (ruling_out(RuledOut((), "of stage 1, a.weight is right", 1)), DROPPED, ["not"]),
    "a parameter is right": (ruling_out(RuledOut((), "of stage 1, b.weight is right", 1)), DROPPED, []),
    "its own verdict is against it": (ruling_out(SENTENCES["gradients"]), true(wrong=frozenset()), ["not"]),
    "it passes": (replace(verdict(), outcome="pass", laws=(LOSS,), mismatches=()), DROPPED, ["verdict"]),
    "nothing is wrong": (verdict(CAUSE), RIGHT, ["verdict", "cause"]),
}


@pytest.mark.parametrize("name", FALSE)
def test_what_is_not_true_is_false(name: str) -> None:
    found, known, false = FALSE[name]
    assert roles(found, known) == false


def test_what_nobody_knows_denies_nothing() -> None:
    assert denied(UNHEARD) is None
    assert check(verdict(CAUSE, where=ELSEWHERE), true(affected=None), COUNTS).downstream


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


def test_a_verdict_on_what_is_right_is_silent_or_needless() -> None:
    right = Verdict("case", "pass", "bitwise", (LOSS,))
    assert (check(right, RIGHT, COUNTS).naming, roles(right, RIGHT)) == ("silent", [])
    assert check(replace(right, outcome="unknown"), RIGHT, COUNTS).naming == "needless"


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


def test_every_specimen_has_a_truth() -> None:
    assert set(WRONG) == set(SPECIMENS)


# What holds today. All else is in the campaign, whose table has it.
PLANTED = (
    *("replicas-summed", "gradients-crossed", "input-partly-overwritten", "clip-by-stage", "loss-summed"),
    *("layer-skipped", "targets-of-step-before"),
)


@pytest.mark.parametrize("name", PLANTED)
def test_nothing_false_is_said_of_a_specimen(world: World, name: str) -> None:
    (case,) = wanted([name], ())
    for row in truth.of_specimen(case, world):
        assert row.checked is not None, row
        assert (row.checked.caught, row.false) == (True, ()), row


@pytest.mark.sweep
def test_the_command_ends_with_1_where_a_sentence_is_false(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = next(fault for fault in FAULTS if fault.title == "iterators: first not added")
    monkeypatch.setattr(truth, "World", lambda **_: nullcontext(world))
    monkeypatch.setattr(truth, "FAULTS", (fault,))
    assert truth.main(["--part", "faults"]) == 0
    monkeypatch.setattr(truth, "FAULTS", (replace(fault, truth=RIGHT),))
    assert truth.main(["--part", "faults", "--only", "first not"]) == 1
    golden(capsys.readouterr().out, lines="FALSE")
    assert truth.main(["--part", "faults", "--only", "no such run"]) == 1, "nothing was run"
