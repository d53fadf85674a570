"""The laws of programs: each has specimens that break it and no other, and lowering keeps them all."""

import pytest

from pipeproof.pipeline.program import lower, program_from_csv
from pipeproof.pipeline.program_laws import LAWS, check, no_deadlock, violations
from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import FAMILIES, LOOPED, VEE, build, virtuals
from pipeproof.pipeline.transports import Transport
from tests.support.golden import golden

# Two stages on two ranks, two microbatches: what the specimens below are changes of.
GOOD = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
)  # fmt: skip
SPECIMENS = {  # a program, and the law that it breaks
    "a wait on another rank than its send": (
        "placement",
        GOOD.replace("0B1", "0B1,0WAIT_SEND_F1")
        .replace("1SEND_B1", "1SEND_B1,1WAIT_SEND_B0,1WAIT_SEND_B1,0WAIT_SEND_F0"),
    ),
    "a receive that is missing": ("messages", GOOD.replace("1RECV_F1,", "")),
    "a send twice": ("messages", GOOD.replace("1SEND_B1", "1SEND_B1,1SEND_B1")),
    "a message beyond the last stage": ("messages", GOOD.replace("1SEND_B1", "1SEND_B1,1SEND_F1")),
    "a message to oneself": ("messages", "0F0,0SEND_F0,1RECV_F0,1F0,1B0,0B0"),
    "a receive after what needs it": (
        "message-order", GOOD.replace("1RECV_F1,1B0,1SEND_B0,1F1", "1B0,1SEND_B0,1F1,1RECV_F1"),
    ),
    "a send before what it sends": ("message-order", GOOD.replace("0F1,0SEND_F1", "0SEND_F1,0F1")),
    "a send that nothing waits for where others are": (
        "message-order",
        GOOD.replace("0B1", "0B1,0WAIT_SEND_F0").replace("1SEND_B1", "1SEND_B1,1WAIT_SEND_B0,1WAIT_SEND_B1"),
    ),
    "a wait before its send": (
        "message-order",
        lower(build("1f1b", ranks=2, microbatches=1)).with_waits.to_csv().replace(
            "1SEND_B0,1WAIT_SEND_B0", "1WAIT_SEND_B0,1SEND_B0"
        ),
    ),
    "messages that arrive as one another": (
        "channel-order", GOOD.replace("1RECV_F0,1F0,1RECV_F1", "1RECV_F1,1RECV_F0,1F0"),
    ),
    "both ranks receive first": ("deadlock", "0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECIMENS)
def test_a_specimen_is_refused_with_the_reason(name: str) -> None:
    law, text = SPECIMENS[name]
    program = program_from_csv(text, name="specimen")
    golden("\n".join(str(violation) for violation in violations(program) if violation.law == law))
    with pytest.raises(ScheduleError, match=r"^specimen breaks \d laws?:"):
        check(program)


def test_every_law_is_broken_alone_by_a_specimen() -> None:
    assert violations(program_from_csv(GOOD)) == ()
    broken = [{violation.law for violation in violations(program_from_csv(text))} for _, text in SPECIMENS.values()]
    alone = {law for (law, _), laws in zip(SPECIMENS.values(), broken, strict=True) if laws == {law}}
    assert alone == {"placement", "messages", "message-order", "channel-order", "deadlock"}
    assert len(LAWS) == len(alone)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_lowering_keeps_every_law(name: str) -> None:
    for ranks in (1, 2, 3, 4):
        for virtual in (1, 2, 4) if name in LOOPED else (virtuals(name),):
            for microbatches in {2 * ranks, 2 * ranks + 1} | (set() if name == "dualpipev" else {1, ranks}):
                program = lower(build(name, ranks=ranks, microbatches=microbatches, virtual=virtual))
                assert violations(program) == ()
                assert violations(program.with_waits) == ()


def test_the_schedule_s_own_laws_are_laws_of_a_program() -> None:
    program = program_from_csv(GOOD.replace("0RECV_B0,0B0", "0RECV_B0,0B0,0B0"))
    found = violations(program, laws=())
    golden("\n".join(map(str, found)))
    assert found[0].cells == ((0, 5), (0, 6)), "cells of the program, not of the schedule"


def test_a_transport_of_one_s_own() -> None:
    text = SPECIMENS["both ranks receive first"][1]
    assert check(program_from_csv(text), laws=[no_deadlock(Transport.DIRECTED, Transport.UNLIMITED)])


def test_a_v_needs_no_message_at_its_turn() -> None:
    for name in VEE:
        program = lower(build(name, ranks=1, microbatches=3))
        assert len(program.columns) == len(program.schedule.columns)
