"""Every message of a schedule with the actions at its two ends."""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from pipeproof.pipeline.action import Action
from pipeproof.pipeline.dataflow import need_of, product_of
from pipeproof.pipeline.lower import message_of
from pipeproof.pipeline.schedule import Schedule


class Delivery(NamedTuple):
    """What ``maker`` made on rank ``sender`` travels as ``send`` and ``receive`` to ``user`` on rank ``receiver``."""

    maker: Action
    send: Action
    receive: Action
    user: Action
    sender: int
    receiver: int


def deliveries(schedule: Schedule) -> Iterator[Delivery]:
    """The messages of ``schedule``, which keeps the laws, in the order in which its ranks use them."""
    makers = {product_of(action): action for action in chain.from_iterable(schedule.ranks)}
    for receiver, actions in enumerate(schedule.ranks):
        for user in actions:
            need = need_of(user, schedule.n_stages)
            message = message_of(makers[need], schedule) if need is not None else None
            if message is not None:
                send, receive, _ = message
                yield Delivery(makers[need], send, receive, user, schedule.placement[send.stage], receiver)
