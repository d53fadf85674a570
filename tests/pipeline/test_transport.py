"""Messages between ranks: delivery by tag, bounds, and words that name the message and the other rank."""

import pytest
import torch

from pipeproof.pipeline.transport import Alone, DistributedTransport, Message, TransportError, TransportTimeout
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World


def transport_of(context: RankContext, timeout_s: float = 10.0) -> DistributedTransport:
    return DistributedTransport(context.group, timeout_s=timeout_s)


def crosswise(context: RankContext) -> list[str]:
    """Two messages, received in the other order than sent: tags match them."""
    transport, peer = transport_of(context), 1 - context.rank
    for tag, text in ((7, "first"), (8, "second")):
        sent = torch.tensor(list(f"{text}{context.rank}".encode()), dtype=torch.uint8)
        transport.send(Message(text, peer, tag), sent)
    received = []
    for tag, text in ((8, "second"), (7, "first")):
        transport.post(Message(text, peer, tag), len(text) + 1)
        received.append(bytes(transport.receive(Message(text, peer, tag)).tolist()).decode())
    transport.flush()
    return received


def test_messages_are_matched_by_tag(world: World) -> None:
    assert world.run(crosswise, ranks=2) == [["second1", "first1"], ["second0", "first0"]]


def silent(context: RankContext) -> None:
    transport = transport_of(context, timeout_s=0.5)
    if context.rank == 0:
        message = Message("1RECV_F0", 1, 3)
        transport.post(message, 4)
        transport.receive(message)


def test_a_message_that_never_comes_ends_in_words(world: World) -> None:
    with pytest.raises(RankFailed, match=r"rank 0 waited 0\.5 s at 1RECV_F0 with rank 1, which did not come"):
        world.run(silent, ranks=2)


class Lost:
    """A message's work that ends in gloo's ``words``."""

    def __init__(self, words: str) -> None:
        self._words = words

    def wait(self, timeout: object) -> None:
        raise RuntimeError(self._words)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("Timed out waiting 10ms for recv operation to complete", TransportTimeout),
        ("Operation Timeout", TransportTimeout),
        ("Connection closed by peer", TransportError),
    ],
)
def test_gloos_words_tell_a_bound_from_a_lost_peer(here: World, words: str, kind: type[TransportError]) -> None:
    def raised(context: RankContext) -> type[TransportError]:
        with pytest.raises(TransportError) as error:
            transport_of(context)._wait(Message("1RECV_F0", 1, 3), Lost(words))  # type: ignore[arg-type]
        return error.type

    assert here.run(raised, ranks=1) == [kind]


def test_alone_there_is_nobody_to_talk_to() -> None:
    for call in (
        lambda: Alone().send(Message("x", 1, 0), torch.zeros(1)),
        lambda: Alone().post(Message("x", 1, 0), 1),
        lambda: Alone().receive(Message("x", 1, 0)),
    ):
        with pytest.raises(TransportError, match="x with rank 1: there is only one rank"):
            call()
    Alone().flush()
    assert issubclass(TransportTimeout, TransportError)


def destroyed(context: RankContext) -> None:
    group = torch.distributed.new_group()
    transport = DistributedTransport(group)
    torch.distributed.destroy_process_group(group)
    del group
    transport.send(Message("late", 0, 0), torch.zeros(1, dtype=torch.uint8))


@pytest.mark.sweep
def test_a_group_that_is_gone_is_said_to_be(world: World) -> None:
    with pytest.raises(RankFailed, match="the process group is gone"):
        world.run(destroyed, ranks=1)
