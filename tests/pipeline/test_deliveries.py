"""Messages with both of their ends."""

import pytest

from pipeproof.pipeline import Kind, build, lower
from pipeproof.pipeline.action import SENDS
from pipeproof.pipeline.deliveries import deliveries
from pipeproof.pipeline.schedules import FAMILIES, virtuals


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
