"""A cause shows the lines of the actions that it is about, and of no others."""

from dataclasses import replace
from typing import Any

import pytest

from pipeproof.diagnosis.own_lines import with_lines
from pipeproof.judging.cause import Cause
from pipeproof.observers.observed import Passed
from pipeproof.pipeline.action import Action
from pipeproof.worlds.stack import Line


class _Seen:
    """As much of ``Evidence`` as lines need: two stages of three microbatches, each stage on a rank of its own."""

    stages = 2

    def __init__(self, *missing: str) -> None:
        actions = [f"{stage}{kind}{m}" for stage in (0, 1) for kind in ("F", "B", "RECV_F", "RECV_B") for m in range(3)]
        seen = [one for one in actions if one not in ("0RECV_F0", "0RECV_F1", "0RECV_F2", *missing)]
        stacks = {Action.parse(one): (Line("step.py", 1, "step", one),) for one in seen}
        self.passed = {
            stage: replace(Passed((), (), ()), stacks={a: line for a, line in stacks.items() if a.stage == stage})
            for stage in (0, 1)
        }


def shown(cause: Cause, *missing: str) -> list[str]:
    seen: Any = _Seen(*missing)
    found = with_lines(cause, seen).calls
    assert all(call.stack[0].text == call.action for call in found)
    return [call.action for call in found]


@pytest.mark.parametrize(
    ("cause", "actions"),
    [
        (Cause("doubled", stage=1, microbatches=(2,), action="1B2"), ["1B2"]),
        (Cause("doubled", stage=1, microbatches=(2,), action="1W2"), ["1B2"]),
        (Cause("doubled", stage=1, microbatches=(1, 2)), ["1B1"]),
        (Cause("computation", stage=1, microbatches=(1,)), ["1F1"]),
        (Cause("wrong-message", stage=1, microbatches=(1,), action="1F1"), ["1RECV_F1", "1F1"]),
        (Cause("wrong-message", stage=0, microbatches=(1,), action="0B1"), ["0RECV_B1", "0B1"]),
        (Cause("wrong-message", stage=0, microbatches=(1,), action="0F1"), ["0F1"]),
        (Cause("overwritten", stage=1, microbatches=(0,), action="1B0"), ["1RECV_F0", "1B0"]),
        (Cause("scale", factor=4.0), ["1B0"]),
        (Cause("scale", stage=0, factor=4.0), ["0B0"]),
        (Cause("scale", stage=0, parameter="0.weight", factor=4.0), []),
        (Cause("norm", rank=1), []),
        (Cause("zero", stage=1, parameter="1.bias"), []),
        (Cause("mispaired", stage=1, action="1B of call 2"), []),
    ],
    ids=str,
)
def test_a_cause_shows_the_lines_of_what_it_is_about(cause: Cause, actions: list[str]) -> None:
    assert shown(cause) == actions


def test_what_was_not_seen_has_no_line() -> None:
    assert shown(Cause("dropped", stage=1, microbatches=(2,)), "1B2") == []
