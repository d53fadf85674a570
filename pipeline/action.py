"""An action of a rank, in torch's notation: ``2F0`` means stage 2, forward, microbatch 0."""

import re
from enum import StrEnum
from typing import NamedTuple


class ActionError(ValueError):
    """Text that spells no action."""


class ScheduleError(ValueError):
    """An impossible or unlawful schedule; the message lists everything found."""


class Kind(StrEnum):
    """Kinds of actions. The value is their spelling in torch's format."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"


class ShardKind(StrEnum):
    """Kinds of actions on a stage's parameters and gradients as a whole. The value is their spelling in torch's format.

    UNSHARD gathers parameters that lie in shards, RESHARD leaves each rank its own again. REDUCE_GRAD sums gradients
    over replicas; torch 2.15 waits for it by WAIT_REDUCE_GRAD.
    """

    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
# Where a rank waits until a send of its own is done; a program without them waits for all at its end.
WAITS = frozenset({Kind.WAIT_SEND_F, Kind.WAIT_SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
# The kinds after which a stage's gradient with respect to its input exists, and may be sent on.
GIVES_INPUT_GRADIENT = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})
# The kinds that add to the gradients of a stage's parameters.
GIVES_WEIGHT_GRADIENT = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})

# One spelling per number, so that equal actions are equal texts: no leading zeros, ASCII digits (int() reads other
# scripts' too), and no more of them than any schedule needs.
_NUMBER = "0|[1-9][0-9]{0,8}"
_TEXT = re.compile(f"(?P<stage>{_NUMBER})(?P<kind>{'|'.join(Kind)})(?P<microbatch>{_NUMBER})")
_OF_STAGE = re.compile(f"({_NUMBER})({'|'.join(ShardKind)})")


class Action(NamedTuple):
    """Stage ``stage`` does ``kind`` for microbatch ``microbatch``.

    A send is named after the stage that sends, a receive after the stage that receives: ``0SEND_F3`` on one rank
    pairs with ``1RECV_F3`` on another, and ``1SEND_B3`` with ``0RECV_B3``.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Parse ``text`` as an action, in full: ``0F1junk`` is an error, not ``0F1``, and so is ``0F01``.

        ``str`` is its exact inverse. Raises ``ActionError``.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ActionError(
                f"{_show(text)} is not an action: expected stage, kind and microbatch, e.g. 2F0 or 1SEND_B3, "
                f"with a kind out of {', '.join(kind.value for kind in Kind)}"
            )
        return cls(int(match["stage"]), Kind(match["kind"]), int(match["microbatch"]))


class ShardAction(NamedTuple):
    """Rank ``rank`` does ``kind`` for stage ``stage``, after the first ``slot`` of its compute actions."""

    rank: int
    slot: int
    stage: int
    kind: ShardKind

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}"

    @classmethod
    def parse(cls, text: str, rank: int, slot: int) -> "ShardAction | None":
        """Parse text like ``2UNSHARD``; None for anything else."""
        match = _OF_STAGE.fullmatch(text)
        return match and cls(rank, slot, int(match[1]), ShardKind(match[2]))


def _show(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")
