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
SPECIMENS = {
    "a wait on another rank than its send": (
        GOOD.replace("0B1", "0B1,0WAIT_SEND_F1")
        .replace("1SEND_B1", "1SEND_B1,1WAIT_SEND_B0,1WAIT_SEND_B1,0WAIT_SEND_F0"),
        ["placement: rank 1: 0WAIT_SEND_F0: stage 0 is on rank 0"],
    ),
    "a receive that is missing": (
        GOOD.replace("1RECV_F1,", ""), ["messages: 1RECV_F1 appears 0 times, expected once"]
    ),
    "a send twice": (
        GOOD.replace("1SEND_B1", "1SEND_B1,1SEND_B1"), ["messages: 1SEND_B1 appears 2 times, expected once"]
    ),
    "a message beyond the last stage": (
        GOOD.replace("1SEND_B1", "1SEND_B1,1SEND_F1"), ["messages: rank 1: 1SEND_F1 has no stage at its other end"]
    ),
    "a message to oneself": (
        "0F0,0SEND_F0,1RECV_F0,1F0,1B0,0B0",
        [
            "messages: 0SEND_F0 appears 1 times, but both stages are on one rank, where nothing is sent",
            "messages: 1RECV_F0 appears 1 times, but both stages are on one rank, where nothing is sent",
        ],
    ),
    "a receive after what needs it": (
        GOOD.replace("1RECV_F1,1B0,1SEND_B0,1F1", "1B0,1SEND_B0,1F1,1RECV_F1"),
        ["message-order: rank 1: 1F1 comes before what it needs, 1RECV_F1"],
    ),
    "a send before what it sends": (
        GOOD.replace("0F1,0SEND_F1", "0SEND_F1,0F1"),
        ["message-order: rank 0: 0SEND_F1 comes before what it sends, 0F1"],
    ),
    "a send that nothing waits for where others are": (
        GOOD.replace("0B1", "0B1,0WAIT_SEND_F0").replace("1SEND_B1", "1SEND_B1,1WAIT_SEND_B0,1WAIT_SEND_B1"),
        ["message-order: rank 0: 0SEND_F1 is waited for 0 times, expected once"],
    ),
    "a wait before its send": (
        lower(build("1f1b", ranks=2, microbatches=1)).with_waits.to_csv().replace(
            "1SEND_B0,1WAIT_SEND_B0", "1WAIT_SEND_B0,1SEND_B0"
        ),
        ["message-order: rank 1: 1WAIT_SEND_B0 comes before its send, 1SEND_B0"],
    ),
    "messages that arrive as one another": (
        GOOD.replace("1RECV_F0,1F0,1RECV_F1", "1RECV_F1,1RECV_F0,1F0"),
        ["channel-order: from rank 0 to rank 1, 0SEND_F0 arrives as 1RECV_F1"],
    ),
    "both ranks receive first": (
        "0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
        [
            "deadlock: under strict: rank 1 waits at 1B0 for 1F0 on rank 1, which waits for 0SEND_F0 from rank 0 to "
            "rank 1, which waits for 0F0 on rank 0, which waits for 1SEND_B0 from rank 1 to rank 0, which waits for "
            "1B0 on rank 1",
            *(
                f"deadlock: under {model}: rank 1 waits at 1SEND_B0 for 0SEND_F0 from rank 0 to rank 1, "
                "which waits for 1SEND_B0 from rank 1 to rank 0"
                for model in ("rank", "pair")
            ),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECIMENS)
def test_a_specimen_is_refused_with_the_reason(name: str) -> None:
    text, messages = SPECIMENS[name]
    program = program_from_csv(text, name="specimen")
    found = violations(program)
    mine = messages[0].split(":")[0]
    assert [str(violation) for violation in found if violation.law == mine] == messages
    with pytest.raises(ScheduleError, match=r"^specimen breaks \d laws?:"):
        check(program)


def test_every_law_has_a_specimen() -> None:
    broken = {messages[0].split(":")[0] for _, messages in SPECIMENS.values()}
    assert broken == {"placement", "messages", "message-order", "channel-order", "deadlock"}
    assert len(LAWS) == len(broken)
    assert violations(program_from_csv(GOOD)) == ()


def test_laws_that_stand_alone_are_broken_alone() -> None:
    alone = {
        messages[0].split(":")[0]
        for text, messages in SPECIMENS.values()
        if len({violation.law for violation in violations(program_from_csv(text))}) == 1
    }
    assert alone == {"placement", "messages", "message-order", "channel-order", "deadlock"}


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
    text = SPECIMENS["both ranks receive first"][0]
    assert check(program_from_csv(text), laws=[no_deadlock(Transport.DIRECTED, Transport.UNLIMITED)])


def test_a_v_needs_no_message_at_its_turn() -> None:
    for name in VEE:
        program = lower(build(name, ranks=1, microbatches=3))
        assert len(program.columns) == len(program.schedule.columns)
