"""Lowering: every message once on both sides, one order per channel, and no deadlock even where messages block."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product

import pytest

from pipeproof.pipeline.action import COMPUTE, RECEIVES, SENDS, Action, Kind
from pipeproof.pipeline.program import Program, deliveries, lower, message_of
from pipeproof.pipeline.schedule import Schedule, ScheduleError, schedule_from_csv
from pipeproof.pipeline.schedules import FAMILIES, LOOPED, build, virtuals
from tests.support.programs import partner

Rows = Sequence[Sequence[Action]]

# One microbatch each way over a V: stages 1 and 2 share a rank, so nothing travels between them.
VEE = schedule_from_csv("0F0,0F1,3F0,3B0,0B0,3F1,3I1,3W1,0B1\n1F0,2F0,2B0,1F1,1B0,2F1,2B1,1I1,1W1\n", name="vee")


def schedules() -> Iterator[Schedule]:
    """Every family on up to 8 ranks of up to 4 stages, with few, just enough and many microbatches; and a V."""
    for name, ranks in product(FAMILIES, (1, 2, 3, 4, 8)):
        for virtual in (1, 2, 4) if name in LOOPED else (virtuals(name),):
            for microbatches in sorted({2 * ranks, 16} if name == "dualpipev" else {1, ranks, ranks + 1, 12}):
                yield build(name, ranks=ranks, microbatches=microbatches, virtual=virtual)
    yield VEE


ALL = list(schedules())


@cache
def lowered(index: int, early: int = 0) -> Program:
    """The program of one of ``ALL``; several tests look at it."""
    return lower(ALL[index], early=early)


def channels(rows: Rows, placement: Sequence[int], kinds: frozenset[Kind]) -> dict[tuple[int, int], list[Action]]:
    """The messages on each channel (from rank, to rank), named by their sends, in the order of ``kinds``' side."""
    found = defaultdict(list)
    for rank, row in enumerate(rows):
        for action in row:
            if action.kind in kinds:
                send = action if action.kind in SENDS else partner(action)
                channel = rank if kinds is SENDS else placement[send.stage], placement[partner(send).stage]
                found[channel].append(send)
    return dict(found)


def misplaced(rows: Rows, n_stages: int) -> list[str]:
    """Sends not after what they send, and computations not after the receive of what they need."""
    wrong = []
    for row in rows:
        slots = {action: slot for slot, action in enumerate(row)}
        assert len(slots) == len(row), "no action appears twice"
        for action, slot in slots.items():
            stage, kind, m = action
            if kind in (Kind.SEND_F, Kind.RECV_F):
                here = [Action(stage, Kind.FORWARD, m)]
            elif kind in (Kind.SEND_B, Kind.RECV_B):
                here = [Action(stage, Kind.BACKWARD, m), Action(stage, Kind.BACKWARD_INPUT, m)]
            else:
                continue
            own = next(slots[compute] for compute in here if compute in slots)
            if (slot < own) is not (kind in RECEIVES):
                wrong.append(str(action))
    return wrong


def expected(schedule: Schedule) -> Counter[Action]:
    """The messages that the placement calls for: both ends, M times each way over each link between ranks."""
    sends = [
        Action(stage, kind, m)
        for stage, m in product(range(schedule.n_stages), range(schedule.microbatches))
        for kind, to in ((Kind.SEND_F, stage + 1), (Kind.SEND_B, stage - 1))
        if 0 <= to < schedule.n_stages and schedule.placement[to] != schedule.placement[stage]
    ]
    return Counter([*sends, *map(partner, sends)])


def messages(rows: Rows) -> Counter[Action]:
    return Counter(action for row in rows for action in row if action.kind not in COMPUTE)


@pytest.mark.long
def test_nothing_is_lost_and_every_message_has_two_ends() -> None:
    for index, schedule in enumerate(ALL):
        rows = lowered(index).ranks
        assert tuple(tuple(a for a in row if a.kind in COMPUTE) for row in rows) == schedule.ranks
        assert messages(rows) == expected(schedule), schedule
        assert all(schedule.placement[action.stage] == rank for rank, row in enumerate(rows) for action in row), (
            "each end is on the rank of its stage"
        )


def test_a_v_sends_nothing_between_stages_of_one_rank() -> None:
    of_one = {str(action) for action in messages(lower(VEE).ranks) if action.stage == 1}
    assert of_one == {"1RECV_F0", "1RECV_F1", "1SEND_B0", "1SEND_B1"}


@pytest.mark.long
@pytest.mark.parametrize("early", range(5))
def test_the_kth_send_of_a_channel_is_its_kth_receive(early: int) -> None:
    for index in range(len(ALL)) if early == 0 else range(early, len(ALL), 5):
        program, schedule = lowered(index, early), ALL[index]
        sent, received = (channels(program.ranks, schedule.placement, kinds) for kinds in (SENDS, RECEIVES))
        assert sent == received, schedule
        assert misplaced(program.ranks, schedule.n_stages) == []
        assert messages(program.ranks) == expected(schedule)


def swapped(rows: Rows, one: str, other: str) -> Rows:
    """``rows`` with two actions of one rank in each other's place."""
    swap = {Action.parse(one): Action.parse(other), Action.parse(other): Action.parse(one)}
    return [[swap.get(action, action) for action in row] for row in rows]


def test_those_checkers_can_fail() -> None:
    program = lower(build("gpipe", ranks=2, microbatches=2))
    assert program.to_csv() == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B1,0B1,0RECV_B0,0B0\n1RECV_F0,1F0,1RECV_F1,1F1,1B1,1SEND_B1,1B0,1SEND_B0\n"
    )
    out_of_order = swapped(program.ranks, "0RECV_B1", "0RECV_B0")
    assert channels(out_of_order, (0, 1), SENDS) != channels(out_of_order, (0, 1), RECEIVES)
    assert misplaced(out_of_order, 2) == ["0RECV_B1"]
    assert misplaced(swapped(program.ranks, "1B1", "1SEND_B1"), 2) == ["1SEND_B1"]
    assert messages(program.ranks[:1]) != expected(program.schedule)


@pytest.mark.long
def test_early_moves_receives_up_and_nothing_else() -> None:
    for index in range(0, len(ALL), 5):
        for early in range(1, 5):
            for before, after in zip(lowered(index).ranks, lowered(index, early).ranks, strict=True):
                assert [a for a in after if a.kind not in RECEIVES] == [a for a in before if a.kind not in RECEIVES]
                computed, was = computed_before_receives(after), computed_before_receives(before)
                assert computed == [(action, max(0, count - early)) for action, count in was]


def computed_before_receives(row: Sequence[Action]) -> list[tuple[Action, int]]:
    """Each receive with the number of compute actions above it."""
    return [
        (action, sum(above.kind in COMPUTE for above in row[:slot]))
        for slot, action in enumerate(row)
        if action.kind in RECEIVES
    ]


def test_early_drawn() -> None:
    program = lower(build("1f1b", ranks=2, microbatches=2), early=1)
    assert program.to_csv() == (
        "0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0RECV_B1,0B0,0B1\n1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )
    with pytest.raises(ScheduleError, match="early is -1: expected at least 0"):
        lower(program.schedule, early=-1)


def test_evaluation_keeps_the_forwards_alone() -> None:
    program = lower(build("1f1b", ranks=2, microbatches=2)).forward_only
    assert program.to_csv() == "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n"


def test_the_message_of_an_action() -> None:
    send, receive, peer = message_of(Action.parse("2I5"), VEE) or (None, None, None)
    assert (send, receive, peer) == (None, None, None), "stages 1 and 2 share a rank"
    assert tuple(map(str, message_of(Action.parse("1I5"), VEE) or ())) == ("1SEND_B5", "0RECV_B5", "0")
    assert tuple(map(str, message_of(Action.parse("2F5"), VEE) or ())) == ("2SEND_F5", "3RECV_F5", "0")
    assert message_of(Action.parse("1W5"), VEE) is None


def test_a_schedule_that_cannot_run_is_not_lowered() -> None:
    with pytest.raises(ScheduleError, match="rank 1 waits at 1F1 for stage 0's output of microbatch 1"):
        lower(schedule_from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0"))


def test_torch_lowers_to_the_same_messages() -> None:
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    for index in range(0, len(ALL), 6):
        schedule = ALL[index]
        if schedule.overlaps:
            continue
        order = {r: [torch._Action.from_str(str(a)) for a in row] for r, row in enumerate(schedule.ranks)}
        theirs = torch._add_send_recv(order, schedule.placement.__getitem__, schedule.n_stages)
        ours = lowered(index).ranks
        assert {r: sorted(map(str, row)) for r, row in theirs.items()} == {
            r: sorted(map(str, row)) for r, row in enumerate(ours)
        }


def test_the_cost_does_not_grow_with_the_square() -> None:
    """20 000 actions take a third of a second; with any inner loop over the others they would take many minutes."""
    schedule = build("1f1b", ranks=4, microbatches=2_500)
    began = time.process_time()
    lower(schedule, early=2)
    assert time.process_time() - began < 10


def test_a_message_knows_who_made_it_and_who_uses_it() -> None:
    found = [tuple(map(str, delivery)) for delivery in deliveries(build("1f1b", ranks=2, microbatches=1))]
    assert found == [
        ("1B0", "1SEND_B0", "0RECV_B0", "0B0", "1", "0"),
        ("0F0", "0SEND_F0", "1RECV_F0", "1F0", "0", "1"),
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_send_of_the_program_is_delivered_once(name: str) -> None:
    schedule = build(name, ranks=4, microbatches=8, virtual=virtuals(name, looped=2))
    program = lower(schedule)
    sent = sorted((a, rank) for rank, row in enumerate(program.ranks) for a in row if a.kind in SENDS)
    assert sorted((delivery.send, delivery.sender) for delivery in deliveries(schedule)) == sent
    for maker, _, receive, user, sender, receiver in deliveries(schedule):
        assert maker in schedule.ranks[sender]
        assert user in schedule.ranks[receiver]
        assert (user.kind is Kind.FORWARD) == (receive.kind is Kind.RECV_F)
