"""Receiving ahead of need: what is posted when."""

import pytest
import torch

from pipeproof.pipeline.mailbox import Mailbox
from pipeproof.pipeline.transport import Message


class Notes:
    """A transport that notes what it is asked to do; whatever is received is zeros."""

    rank = 0
    n_ranks = 2

    def __init__(self, *, in_order: bool = False) -> None:
        self.in_order = in_order
        self.posted: list[int] = []
        self.bytes: dict[Message, int] = {}

    def send(self, message: Message, buffer: torch.Tensor) -> None:
        raise AssertionError("a mailbox sends nothing")

    def post(self, message: Message, nbytes: int) -> None:
        self.posted.append(message.tag)
        self.bytes[message] = nbytes

    def receive(self, message: Message) -> torch.Tensor:
        return torch.zeros(self.bytes.pop(message), dtype=torch.uint8)

    def flush(self) -> None:
        raise AssertionError("a mailbox waits for one message at a time")


def letter(tag: int) -> Message:
    return Message(f"letter {tag}", 1, tag)


def expecting(count: int, nbytes: int, *, in_order: bool = False) -> tuple[Mailbox, Notes]:
    notes = Notes(in_order=in_order)
    mailbox = Mailbox(notes, ahead_bytes=100)
    for tag in range(count):
        mailbox.expect(letter(tag), nbytes)
    return mailbox, notes


def test_small_messages_are_all_posted_when_they_are_expected() -> None:
    _, notes = expecting(10, 10)
    assert notes.posted == list(range(10))


@pytest.mark.parametrize(("nbytes", "ahead"), [(30, 3), (100, 2), (1000, 2)], ids=["room", "full", "larger than all"])
def test_large_ones_wait_for_room_and_two_always_have_it(nbytes: int, ahead: int) -> None:
    mailbox, notes = expecting(6, nbytes)
    for tag in range(6):
        assert notes.posted == list(range(min(6, tag + ahead)))
        assert len(mailbox.take(letter(tag), nbytes)) == nbytes


def test_a_small_one_does_not_overtake_a_large_one() -> None:
    mailbox, notes = expecting(3, 60)
    mailbox.expect(letter(3), 1)
    assert notes.posted == [0, 1]
    mailbox.take(letter(0), 60)
    assert notes.posted == [0, 1, 2]
    mailbox.take(letter(1), 60)
    assert notes.posted == [0, 1, 2, 3]


def test_a_transport_that_runs_in_posting_order_gets_all_of_them_at_once() -> None:
    _, notes = expecting(6, 1000, in_order=True)
    assert notes.posted == list(range(6))


def test_what_is_taken_is_posted_by_then_held_back_or_never_expected() -> None:
    mailbox, notes = expecting(4, 100)
    mailbox.take(letter(3), 100)
    mailbox.take(letter(9), 5)
    assert notes.posted == [0, 1, 3, 9]
    for tag in (0, 1, 2):
        mailbox.take(letter(tag), 100)
    assert notes.posted == [0, 1, 3, 9, 2]


def test_a_new_step_forgets_the_old_one() -> None:
    mailbox, notes = expecting(4, 100)
    mailbox.clear()
    mailbox.take(letter(0), 100)
    assert notes.posted == [0, 1, 0]
