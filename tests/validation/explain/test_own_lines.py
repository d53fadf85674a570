"""A cause shows the lines of the actions that it is about, and of no others."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipeproof.core.cause import Cause
from pipeproof.core.observe.observed import Crossing, Passed
from pipeproof.core.observe.posted_messages import Came, Message, Sent
from pipeproof.core.observe.recording import GIVEN, KEPT
from pipeproof.core.observe.stack import Line, Stack
from pipeproof.explain.own_lines import with_lines
from pipeproof.pipeline.action import Action
from tests.support.golden import golden


def at(text: str, *outer: str) -> Stack:
    """A stack of lines that differ, from the innermost out."""
    return tuple(Line("step.py", hash(one) % 10**9, "step", one) for one in (text, *outer))


class _Seen:
    """As much of ``Evidence`` as lines need: two stages of three microbatches; stage 1 was cleared behind the first."""

    stages = 2

    def __init__(self, missing: Sequence[str] = (), wrong: Sequence[Crossing] = (), *, flowed: bool = False) -> None:
        self.passed = {stage: self._stage(stage, missing, wrong) for stage in (0, 1)}
        self._flowed = flowed

    def is_flow_right(self, stages: Collection[int], factor: float | None) -> bool:
        return self._flowed

    def _stage(self, stage: int, missing: Sequence[str], wrong: Sequence[Crossing]) -> Passed:
        names = [f"{stage}{kind}{m}" for kind in "FB" for m in range(3) if f"{stage}{kind}{m}" not in missing]
        actions = [Action.parse(name) for name in names]
        came = {
            action: {k: self._message(f"{action}", k) for k in (0, 1)}
            for action in actions
            if (stage, action.kind.value) in ((1, "F"), (0, "B"))
        }
        stacks = {action: at(str(action), f"loop {stage}") for action in actions}
        cleared = {0: at("zero_grad")} if stage else {}
        return replace(Passed(tuple(actions), (), tuple(wrong)), stacks=stacks, came=came, cleared=cleared)

    @staticmethod
    def _message(action: str, tensor: int) -> Came:
        received, sent = (at(f"{what} {tensor} of {action}", f"{what}er") for what in ("receive", "send"))
        return Came(received, Message("", 7, 0, 0, 1), Sent(sent))


def shown(cause: Cause, observed: Any = None, **options: bool) -> list[str]:
    found = with_lines(cause, observed or _Seen(), **options)
    return [f"{own.what}: {own.line.text}" for own in found.lines]


def message(action: str, tensor: int = 0) -> list[str]:
    sent = [f"sent by rank 7: send {tensor} of {action}", "from: sender"]
    return [*sent, f"received: receive {tensor} of {action}", "from: receiveer", f"{action}: {action}"]


def ran(action: str) -> list[str]:
    return [f"{action}: {action}", f"from: loop {action[0]}"]


@pytest.mark.parametrize(
    ("cause", "lines"),
    [
        (Cause("doubled", stage=1, microbatches=(2,), action="1B2"), ran("1B2")),
        (Cause("doubled", stage=1, microbatches=(2,), action="1W2"), ran("1B2")),
        (Cause("doubled", stage=0, microbatches=(1, 2)), ran("0B1")),
        (Cause("doubled", microbatches=(1, 2)), ran("1B1")),
        (Cause("dropped", stage=1, microbatches=(0, 1)), ["cleared: zero_grad", *ran("1B0")]),
        (Cause("dropped", stage=1, microbatches=(1,)), ran("1B1")),
        (Cause("zero", stage=1, parameter="1.bias"), ["cleared: zero_grad"]),
        (Cause("missing", stage=0), ran("0F0")),
        (Cause("missing", stage=0, parameter="1.bias"), []),
        (Cause("computation", stage=1, microbatches=(1,)), ran("1F1")),
        (Cause("mode"), ran("0F0")),
        (Cause("swapped-data", microbatches=(1, 2)), ran("0F1")),
        (Cause("wrong-message", stage=1, microbatches=(1,), action="1F1"), message("1F1")),
        (Cause("altered", stage=0, microbatches=(1,), action="0B1"), message("0B1")),
        (Cause("wrong-message", stage=0, microbatches=(1,), action="0F1"), ran("0F1")),
        (Cause("scale", stage=0, factor=2.0, action="0B1"), message("0B1")),
        (Cause("mispaired", stage=0, microbatches=(1,), action="0B1"), ran("0B1")),
        (
            Cause("overwritten", stage=1, microbatches=(0,), action="1B0"),
            ["received: receive 0 of 1F0", "from: receiveer", *ran("1B0")],
        ),
        (Cause("scale", factor=4.0), ran("1B0")),
        (Cause("scale", stage=0, factor=4.0), ran("0B0")),
        (Cause("scale", stage=0, parameter="0.weight", factor=4.0), []),
        (Cause("norm", rank=1), []),
        (Cause("mispaired", stage=1, action="1B of call 2"), []),
    ],
    ids=str,
)
def test_a_cause_shows_the_lines_of_what_it_is_about(cause: Cause, lines: list[str]) -> None:
    assert shown(cause) == lines


def test_what_was_not_seen_has_no_line() -> None:
    assert shown(Cause("doubled", stage=1, microbatches=(2,)), _Seen(["1B2"])) == []


def test_of_a_backward_that_never_ran_the_last_that_did_is_shown() -> None:
    last = ["last 0B1: 0B1", "from: loop 0"]
    assert shown(Cause("dropped", stage=0, microbatches=(2,)), _Seen(["0B2"])) == last


def test_a_pairing_shows_its_message_where_that_may_be_the_wrong_one() -> None:
    cause = Cause("mispaired", stage=0, microbatches=(1,), action="0B1")
    assert shown(cause, or_message=True) == message("0B1")


@pytest.mark.parametrize("kind", ["mispaired", "altered"])
def test_no_message_is_shown_of_an_action_that_nobody_names(kind: str) -> None:
    lines = ran("0B1" if kind == "mispaired" else "0F1")
    assert shown(Cause(kind, stage=0, microbatches=(1,)), or_message=True) == lines


@pytest.mark.parametrize(("kind", "where", "action"), [("altered", GIVEN, "1F0"), ("overwritten", KEPT, "1B0")])
def test_of_several_tensors_the_wrong_one_is_shown(kind: str, where: str, action: str) -> None:
    crossings = [Crossing(Action.parse(action), "input", k == 0, k == 0, where=where, number=k) for k in (0, 1)]
    found = shown(Cause(kind, stage=1, microbatches=(0,), action=action), _Seen(wrong=crossings))
    golden("\n".join(found))
    assert not any("0 of" in line for line in found)


def test_what_came_after_the_backwards_shows_none_of_their_lines() -> None:
    for cause in (Cause("scale", factor=4.0), Cause("sign", stage=0)):
        assert shown(cause, _Seen(flowed=True)) == []
        assert shown(cause)
