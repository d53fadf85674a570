"""Deadlocks under every model, against ranks that really step through their programs."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.pipeline.action import COMPUTE, SENDS, Action, Kind
from pipeproof.pipeline.deadlock import deadlocks, least_room
from pipeproof.pipeline.program import Program, lower, program_from_csv
from pipeproof.pipeline.schedules import FAMILIES, build, virtuals
from pipeproof.pipeline.transports import RULES, Transport
from tests.support.golden import golden
from tests.support.programs import partner, programs

End = tuple[int, int]  # (rank, slot)


def meetings(program: Program, *, by_name: bool) -> dict[End, End]:
    """Each end of a message and the end it meets: by name, or the k-th of each channel with the k-th."""
    placement = program.schedule.placement
    ends: dict[object, End] = {}
    meets: dict[End, End] = {}
    counts: Counter[tuple[int, int, bool]] = Counter()
    for rank, row in enumerate(program.ranks):
        for slot, action in enumerate(row):
            if action.kind in COMPUTE:
                continue
            peer, sends = placement[partner(action).stage], action.kind in SENDS
            own: object = action
            other: object = partner(action)
            if not by_name:
                k = counts[rank, peer, sends]
                counts[rank, peer, sends] += 1
                own, other = (rank, peer, sends, k), (peer, rank, not sends, k)
            ends[own] = (rank, slot)
            if other in ends:
                meets[ends[other]], meets[rank, slot] = (rank, slot), ends[other]
    return meets


def finishes(program: Program, transport: Transport, room: int = 0) -> bool:
    """Step every rank as far as it gets, again and again, until nothing moves."""
    meets = meetings(program, by_name=RULES[transport].by_name)
    rows = program.ranks
    at = [0] * len(rows)
    done: set[End] = set()

    def queue(rank: int, slot: int) -> object:
        peer = meets[rank, slot][0]
        sends = rows[rank][slot].kind in SENDS
        return {"rank": 0, "pair": peer, "directed": (peer, sends)}.get(transport.value, slot)

    def may_run(rank: int, slot: int) -> bool:
        action = rows[rank][slot]
        kind = Kind.RECV_F if action.kind is Kind.FORWARD else Kind.RECV_B
        needed = Action(action.stage, kind, action.microbatch) if action.kind is not Kind.BACKWARD_WEIGHT else None
        return all((rank, k) in done for k, other in enumerate(rows[rank]) if other == needed)

    def may_pass(end: End) -> bool:
        """Whether this end of a message is the next of its queue, and its rank has come to it."""
        rank, slot = end
        if transport is Transport.STRICT:
            return at[rank] == slot
        earlier = (k for k in range(slot) if (rank, k) in meets and queue(rank, k) == queue(rank, slot))
        return at[rank] > slot and all((rank, k) in done for k in earlier)

    def kept(send: End) -> int:
        """How many messages are on their way where this one goes."""
        way = send[0], meets[send][0]
        sent = (one for one in done if rows[one[0]][one[1]].kind in SENDS and (one[0], meets[one][0]) == way)
        return sum(meets[one] not in done for one in sent)

    while True:
        before = (tuple(at), len(done))
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                message = row[at[rank]].kind not in COMPUTE
                strict = transport is Transport.STRICT
                if message and strict and (rank, at[rank]) not in done:
                    break
                if not message and not strict and not may_run(rank, at[rank]):
                    break
                at[rank] += 1
        for end, other in meets.items():
            if end in done or not may_pass(end):
                continue
            if rows[end[0]][end[1]].kind in SENDS and kept(end) < room:
                done.add(end)
            elif other in done:
                done.add(end)
            elif may_pass(other):
                done |= {end, other}
        if (tuple(at), len(done)) == before:
            return all(at[rank] == len(row) for rank, row in enumerate(rows)) and len(done) == len(meets)


@pytest.mark.long
@given(programs())
def test_a_model_has_a_cycle_exactly_where_its_ranks_get_stuck(program: Program) -> None:
    for transport, found in deadlocks(program).items():
        assert finishes(program, transport) is (found is None), transport


@pytest.mark.long
@given(programs(), st.integers(1, 4))
def test_so_it_has_where_messages_are_kept_and_the_least_room_is_the_first_that_helps(
    program: Program, room: int
) -> None:
    for transport, found in deadlocks(program, room=room).items():
        if RULES[transport].by_name:
            assert least_room(program, transport) is None
            continue
        assert finishes(program, transport, room) is (found is None), (transport, room)
        least = least_room(program, transport)
        assert (found is None) is (least is not None and room >= least)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_lowering_makes_is_free_of_deadlock_everywhere(name: str) -> None:
    for ranks in (1, 2, 3, 5, 8):
        lowered = lower(build(name, ranks=ranks, microbatches=2 * ranks, virtual=virtuals(name, looped=2)))
        for program in (lowered, lowered.with_waits, lowered.forward_only):
            assert not any(deadlocks(program).values())


BOTH_RECEIVE_FIRST = "0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0"


def test_a_shortest_cycle_reads_as_who_waits_for_what() -> None:
    found = deadlocks(program_from_csv(BOTH_RECEIVE_FIRST))
    assert [transport.value for transport, deadlock in found.items() if deadlock] == ["strict", "rank", "pair"]
    golden(found[Transport.PAIR].text)
    assert least_room(program_from_csv(BOTH_RECEIVE_FIRST), Transport.PAIR) is None
    golden(found[Transport.STRICT].text)


def test_a_wait_that_comes_too_early_is_a_deadlock_everywhere() -> None:
    """Each rank waits for its own send before it posts the receive that the other one's wait needs."""
    text = (
        "0F0,0SEND_F0,0WAIT_SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F1,1F1,1RECV_F0,1F0,1B1,1SEND_B1,1B0,1SEND_B0"
    )
    assert deadlocks(program_from_csv(text))[Transport.UNLIMITED] is not None
    assert deadlocks(program_from_csv(text.replace("0WAIT_SEND_F0,", "")))[Transport.UNLIMITED] is None
