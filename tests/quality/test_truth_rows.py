"""Rows of the truth test: each has a truth, and what is said today of some is held; all others are in the campaign."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import truth
from axis_faults import PLANTS, SOUND, step
from axis_planting import finished, having, times
from truth_axes import STACKS
from truth_check import check

from pipeproof.core.cause import KINDS
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from pipeproof.wings.primitives.stacked import validate_stack
from pipeproof.worlds.world import World
from tests.support.sweeps import SWEEP

PARTS = truth.foreign()
ROWS: Mapping[str, Any] = {one.title: one for part, runs in PARTS.items() if part != "cut" for one in runs}
CUT: Mapping[str, Any] = {one.title: one for one in PARTS["cut"]}
# At least so many rows that are right, and with a fault, and kinds of fault: of a part, or of a runtime.
LEAST = {
    **dict.fromkeys(("iterators", "instructions", "two-way", "classes"), (0, 12, 9)),
    **dict.fromkeys(("functional", "async"), (30, 30, 12)),
    **{"axes": (15, 70, 1), "cut": (3, 12, 1), "right": (60, 0, 0), "jobs": (1, 1, 1)},
    **{"faults": (0, 90, 9), "mixtures": (0, 180, 9), "narrow": (48, 80, 5)},
}


@pytest.mark.parametrize("name", LEAST)
def test_every_row_has_a_truth(name: str) -> None:
    every = [one for part, runs in PARTS.items() for one in runs if name in (part, one.title.partition(":")[0])]
    wrong = [one for one in every if one.truth.kinds]
    assert len({one.title for one in every}) == len(every)
    assert {kind for one in wrong for kind in (*one.truth.kinds, *one.truth.alike)} <= set(KINDS)
    found = len(every) - len(wrong), len(wrong), len({one.truth.kinds[0] for one in wrong})
    assert all(map(int.__ge__, found, LEAST[name])), found


def test_every_fault_of_an_axis_is_planted() -> None:
    every = [(one.step.keywords["fault"], one.truth) for one in PARTS["axes"]]
    assert {fault for fault, _ in every} == set(PLANTS)
    assert not {fault for fault, truth in every if truth.kinds} & {"", *SOUND}


# By what is said, rows of every change, and of a sweep. A tuple is from final gradients.
# alone: the kind, and no other. caught: and not all of it is named, maybe.
HOLDS: Mapping[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "right or unknown": (
        (
            *("iterators: static receive buffer", "iterators: first not added", "two-way: second half not added"),
            *("instructions: gradient read before it came", "classes: last microbatch negated"),
            ("instructions: labels exchanged",),
        ),
        (
            *("iterators: activations overtake", "instructions: second layer not called", "classes: other epsilon"),
            *("instructions: labels exchanged", ("iterators: static receive buffer",), ("classes: other epsilon",)),
            *(("iterators: activations overtake",), ("iterators: first not added",)),
            *(("instructions: gradient read before it came",), ("instructions: second layer not called",)),
            *(("two-way: second half not added",), ("classes: last microbatch negated",)),
        ),
    ),
    "right": (
        (
            *("plain: two layers exchanged", "plain: sent with noise + one lost", "tied: first stage halved late"),
            *("zero 3: norm of each rank", "pp dp tp: first stage not reduced", "job, async: never reduced, single"),
            *("iterators: norms added", "chunks: first chunk halved", "two-way: first one run twice"),
            *("instructions: last one without weights", "instructions: inputs exchanged"),
            *("a number aside: second stream is zero", "tp: input gradients not reduced"),
            *("two streams: streams exchanged", "classes: always the first targets", "iterators: loss not divided"),
            *("iterators: weights in bf16", "instructions: weights drawn again"),
            *("two-way: a pair that does not meet", ("two-way: a pair that does not meet",)),
            *("two-way: copies that drifted apart", "iterators: norm of each rank"),
            *("functional: momentum forgotten", "functional: statistics lost", "functional: update skipped"),
            "functional: clipped by its own norm",
            *("tp: mean of input gradients", "tp: norms reduced again", "ep: router not reduced"),
            *("cp: losses of its own part", "cp: parts not reduced", "cp: mask of the neighbour"),
        ),
        (
            *("plain: sent in bf16 + one lost", "residual stream: first stream in bf16"),
            *("zero 3: shards exchanged", "ddp: divided by replicas twice"),
            *("iterators: layers of the next rank", "iterators: losses last first", "iterators: loss not divided"),
            *("plain: sent back in bf16 + another's target", "pp dp tp: one weight on one line of dp"),
            *("tp: outputs reduced twice", "tp: all times tp", "tp: shards of a weight exchanged"),
            *("ep: no gradient from experts", "ep: norm without experts", "ep: experts times ranks"),
            *("ep: last experts first", "cp: mean over parts", "cp: norm over the world"),
        ),
    ),
    "unknown": (
        ("sp: gathered without reduction", "cp: keys' gradients not reduced"),
        ("tp: queries' input gradients not reduced",),
    ),
    "alone": (
        (
            *("functional: sums of the step before", "async: main gradients of the module not cleared"),
            "functional: weights of the step before",
        ),
        ("async: main gradients of the parameter not cleared",),
    ),
    "caught": (
        (
            *("job, async: main gradients not cleared, composed", "async: old casts of weights, small steps"),
            *("async: replicas drawn apart, a list, of its own build", "async: padding weighs half"),
            *("async: first half sent back, against itself", "async: sent out of one buffer"),
        ),
        (
            *("job, async: old casts of weights, small steps, single", "functional: a part is sent back, grad"),
            *("functional: replicas drawn apart, a list", "async: gathered before the update"),
            *("async: read before it came", "functional: newest pullback, vjp"),
        ),
    ),
    "silent": (  # kinds of steps that were judged wrongly once
        (
            *("right: iterators", "right: two-way", "right: backwards shuffled"),
            *("right: two streams, last in first out", "right: a mask and positions go along"),
            *("right: tied copies in two stages", "right: replicas, reduced by hand", "right: replicas in DDP"),
            *("right: bf16, gradients added in fp32", "functional: right, vjp"),
            *("functional: right, gradients_of_rows", "async: right, one replica filled up, against itself"),
            *(
                "functional: right, evaluation in bf16 in two parts",
                "functional: right, replicas, flat, against itself",
            ),
            "async: right, weights gathered late, evaluation between",
        ),
        (
            *("functional: right, value, last in first out", "functional: right, padding in the middle"),
            *("right: rows in shards over replicas", "job, async: right, replicas, single"),
            *("async: right, padding in the middle, against itself", "functional: right, one replica filled up"),
            *("functional: right, rows filled up", "async: right, weights written late"),
            *("functional: right, replicas, handed back flat alone", "async: right, greedy worker and thread"),
            *("job, functional: right, replicas, flat, single", "functional: right, halves of layers, grad"),
            *("tp: right, input gradients reduced by hand", "cp: right, zig-zag parts"),
        ),
    ),
    "silent or needless": (  # where the stages alone may not tell, unknown is an answer, too
        (),
        (
            *(
                "async: right, weights gathered late, against itself",
                "async: right, two halves of rows, against itself",
            ),
            *("functional: right, rows filled up, against itself", "functional: right, vjp, against itself"),
        ),
    ),
}
WORDS = {
    "tp: input gradients not reduced": "ranks 0, 1 each keep their own part: the sum of these is",
    "tp: queries' input gradients not reduced": "the backward first goes wrong at 2.attention_norm.bias",
    "tp: mean of input gradients": "the gradient of the input of each feedforward.up is multiplied by 0.5",
    "tp: outputs reduced twice": "weights are right; no factor gives the gradients",
    "tp: all times tp": "2 = the number of ranks",
    "tp: shards of a weight exchanged": "has its own, put in another order",
    "sp: gathered without reduction": "the backward first goes wrong at 2.norm.bias (stage 0): the 7 parameters",
    "tp: norms reduced again": "1.attention_norm.bias: 2 times",
    "pp dp tp: one weight on one line of dp": "2 lacks microbatches 0, 2",
    "ep: router not reduced": "rank 0 lacks microbatches 1, 3; rank 1 lacks",
    "ep: experts times ranks": "2 = the number of ranks",
    "ep: last experts first": "every loss is wrong, and none is another microbatch's",
    "ep: no gradient from experts": "the gradient of the input of each mixture.experts.*.up is multiplied by 0",
    "ep: norm without experts": "parameters that fewer ranks hold than others are left out",
    "cp: parts not reduced": "stage 0: ranks 0, 1 each keep their own part: the sum of these is expected",
    "cp: mean over parts": "1/2 = 1 / the number of ranks",
    "cp: mask of the neighbour": "or its inputs or targets are not its own",
    "cp: keys' gradients not reduced": "unknown: the evidence does not decide",
    "cp: losses of its own part": "report their own parts', and the mean of these is right",
    "cp: norm over the world": "parameters that several ranks hold are counted once for each rank",
}


def parameters() -> Iterator[Any]:
    for said, kept in HOLDS.items():
        for title, mark in ((title, mark) for titles, mark in zip(kept, ((), SWEEP), strict=True) for title in titles):
            watched = isinstance(title, str)
            name = title if watched else title[0]
            yield pytest.param(said, name, watched, marks=mark, id=f"{name}{'' if watched else ', final'}")


def assert_true(one: Any, whitebox: WhiteBox, said: str, *, watched: bool = True) -> Verdict:
    """What is said of a row: nothing false, and that it is what it is."""
    verdict: Verdict = one.verdict(whitebox, watched=watched)
    found = check(verdict, one.truth, one.counts, watched=watched)
    assert (found.false, found.caught or not one.truth.kinds) == ((), True), f"{found}\n{verdict}"
    assert one.truth.kinds or not verdict.failure, str(verdict)
    if said == "alone":
        assert [cause.kind for cause in verdict.causes] == [one.truth.kinds[0]], str(verdict)
    elif said != "caught":
        assert found.naming in said.split(" or "), f"{found}\n{verdict}"
    return verdict


@pytest.mark.parametrize(("said", "title", "watched"), [*parameters()])
def test_what_is_said_of_a_row_holds(whitebox: WhiteBox, said: str, title: str, watched: bool) -> None:
    verdict = assert_true(ROWS[title], whitebox, said, watched=watched)
    assert WORDS.get(title, "") in verdict.details
    if title.startswith(("tp: right", "cp: right")):
        assert verdict.law("initial-weights").checked == 74, "every rank's, those in shards too"


def test_final_gradients_are_tried_in_every_runtime() -> None:
    titles = [title for said in HOLDS["right or unknown"] for title in said]
    runtimes = [{title.partition(":")[0] for title in titles if isinstance(title, str)}]
    assert {title[0].partition(":")[0] for title in titles if not isinstance(title, str)} == runtimes[0]


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize("title", ["the loss of one rank, twice", "gradients of the step before", "losses times tp"])
def test_a_fault_in_a_cut_stage_is_named(title: str, simulated: World) -> None:
    assert_true(CUT[title], WhiteBox(simulated), "right")


@pytest.mark.sweep
@pytest.mark.parametrize(("times_it", "outcome"), [(1 + 1e-6, "pass"), (1 + 1e-4, "fail")])
def test_a_gap_is_told_as_rounding_or_a_fault_by_number(whitebox: WhiteBox, times_it: float, outcome: str) -> None:
    """Of a step of context parallelism that multiplies one gradient."""
    found = validate_stack(STACKS["cp"], whitebox, step=partial(_with_one_scaled, factor=times_it))
    assert found.law("gradient").outcome == outcome, found
    assert not found.causes or found.causes[0].parameter == "1.feedforward.up.weight"


def _with_one_scaled(model: Any, given: Any, *, factor: float) -> Any:
    with finished("cp", times(factor, having("1.feedforward.up.weight")))():
        return step(model, given, stack=STACKS["cp"], fault="", watched=False)


@pytest.mark.sweep
def test_a_first_wrong_parameter_that_is_another_is_false(whitebox: WhiteBox) -> None:
    one = ROWS["cp: keys' gradients not reduced"]
    verdict = one.verdict(whitebox, watched=False)
    assert check(verdict, one.truth, one.counts, watched=False).false == ()
    elsewhere = truth.replace(one.truth, parameter=r"^1\.")
    (false,) = check(verdict, elsewhere, one.counts, watched=False).false
    assert (false.role, "first wrong at" in false.why) == ("unknown", True)
