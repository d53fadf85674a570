"""Deadlocks: find messages that never came although their sender went on."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeproof.pipeline.action import GIVES_INPUT_GRADIENT, Action, Kind
from pipeproof.pipeline.program import Program
from pipeproof.worlds.rank_report import Ending, RankReport

_WAITED = re.compile(r"(?P<action>\d+RECV_[FB]\d+) with rank (?P<peer>\d+)")


@dataclass(frozen=True)
class Lost:
    """A message that ``rank`` awaited while ``sender`` was already past its send."""

    rank: int
    receive: Action
    sender: int
    send: Action
    slot: int

    def __str__(self) -> str:
        return (
            f"{self.receive} never came, although rank {self.sender} was past {self.send}, slot {self.slot} of its list"
        )


def find_lost_message(program: Program, reports: Sequence[RankReport]) -> Lost | None:
    """Return the first lost message along the data flow. None if waits show none."""
    waits = {report.rank: wait for report in reports if (wait := _wait(report)) is not None}
    lost: dict[tuple[bool, int, int], Lost] = {}  # by its place along the data
    for rank, (receive, sender) in waits.items():
        forward, row = receive.kind is Kind.RECV_F, list(program.ranks[sender])
        kind, stage = (Kind.SEND_F, receive.stage - 1) if forward else (Kind.SEND_B, receive.stage + 1)
        send = Action(stage, kind, receive.microbatch)
        if sender in waits and send in row:
            stopped = _consumer(waits[sender][0], row)
            if stopped is not None and row.index(send) < stopped:
                along = (not forward, receive.stage if forward else -receive.stage, receive.microbatch)
                lost[along] = Lost(rank, receive, sender, send, row.index(send))
    return lost[min(lost)] if lost else None


def waiting_in(program: Program, reports: Sequence[RankReport]) -> list[RankReport]:
    """Rewrite ``reports`` for readers of a hang: awaited messages, and sends completed."""
    found = []
    for report in reports:
        wait = _wait(report)
        if wait is None or report.rank >= len(program.ranks):
            found.append(report)
            continue
        (receive, peer), row = wait, list(program.ranks[report.rank])
        stopped = _consumer(receive, row)
        sends = [k for k, one in enumerate(row) if one.kind in (Kind.SEND_F, Kind.SEND_B)]
        sent = "" if stopped is None else f"sent {sum(slot < stopped for slot in sends)} of {len(sends)}"
        if report.ending is Ending.RAISED:  # a transport's timeout message adds nothing
            text, ending = f"{receive} with rank {peer}", Ending.STUCK
            report = replace(report, ending=ending, message="gave up", traceback="", waiting=text, peers=(peer,))
        found.append(replace(report, progress=sent))
    return found


def _wait(report: RankReport) -> tuple[Action, int] | None:
    """Return the receive that a rank awaits, and its peer."""
    found = _WAITED.search(report.waiting or "") or _WAITED.search(report.message.partition("\n")[0])
    return None if found is None else (Action.parse(found["action"]), int(found["peer"]))


def _consumer(receive: Action, row: Sequence[Action]) -> int | None:
    """Return the slot of the action behind a receive."""
    kinds = {Kind.FORWARD} if receive.kind is Kind.RECV_F else GIVES_INPUT_GRADIENT
    slots = (slot for slot, (s, kind, m) in enumerate(row) if (s, m) == receive[::2] and kind in kinds)
    return next(slots, None)
