"""Static laws for programs, one function each: messages, their order, and freedom from deadlock."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from pipeproof.pipeline.action import COMPUTE, WAITS, Kind
from pipeproof.pipeline.columns import Columns, Ints
from pipeproof.pipeline.dataflow import NONE
from pipeproof.pipeline.deadlock import deadlocks
from pipeproof.pipeline.laws import LawBroken, Violation, at, find_misplaced, report
from pipeproof.pipeline.laws import violations as of_schedule
from pipeproof.pipeline.messages import Messages, consumers, producers
from pipeproof.pipeline.program import Program
from pipeproof.pipeline.transports import Transport

ProgramLaw = Callable[[Program], Iterator[Violation]]


def placement(program: Program) -> Iterator[Violation]:
    """Every end of a message lies on its stage's rank, for an existing stage and microbatch."""
    columns = program.columns
    ends = ~columns.is_kind(*COMPUTE)
    yield from find_misplaced(columns, program.schedule, among=ends)


def messages(program: Program) -> Iterator[Violation]:
    """Neighbouring stages on two ranks exchange one send and one receive each way; others exchange nothing."""
    schedule, found = program.schedule, Messages.of(program)
    columns, size = program.columns, schedule.n_stages * schedule.microbatches
    maker = np.arange(2 * size) % size // max(1, schedule.microbatches)
    taker = maker + np.where(np.arange(2 * size) < size, 1, -1)
    rank = np.array([*schedule.placement, NONE])
    taker = np.where((taker >= 0) & (taker < schedule.n_stages), taker, schedule.n_stages)
    crosses = (taker < schedule.n_stages) & (rank[maker] != rank[taker])
    for ends, kinds in ((found.sends, (Kind.SEND_F, Kind.SEND_B)), (found.receives, (Kind.RECV_F, Kind.RECV_B))):
        counts = np.bincount(found.key[ends], minlength=2 * size)
        for key in np.flatnonzero(counts != crosses).tolist():
            stage = int((maker if kinds[0] is Kind.SEND_F else taker)[key])
            name = f"{stage}{kinds[key >= size].value}{key % size % schedule.microbatches}"
            cells = tuple(columns.cell(int(entry)) for entry in ends[found.key[ends] == key])
            expected = "expected once" if crosses[key] else "but both stages are on one rank, where nothing is sent"
            yield Violation("messages", f"{name} appears {counts[key]} times, {expected}", None, cells)
    yield from _unknown(columns, found)


def _unknown(columns: Columns, found: Messages) -> Iterator[Violation]:
    """Messages beyond the first or the last stage."""
    for entry in np.flatnonzero(~columns.is_kind(*COMPUTE) & (found.key == NONE)).tolist():
        yield at(columns, entry, "messages", f"{columns.action(entry)} has no stage at its other end")


def message_order(program: Program) -> Iterator[Violation]:
    """Sends follow their products, receives precede their uses, and each send has a wait, or no send does."""
    columns, found = program.columns, Messages.of(program)
    yield from _in_order(columns, producers(program, found), found.sends, "comes before what it sends")
    yield from _in_order(columns, found.receives, consumers(program, found), "comes before what it needs")
    waits = np.flatnonzero(columns.is_kind(*WAITS) & (found.key >= 0))
    if not len(waits):
        return
    sent = found.first(found.sends)
    yield from _in_order(columns, sent[found.key[waits]], waits, "comes before its send")
    counts = np.bincount(found.key[waits], minlength=len(sent))[found.key[found.sends]]
    for entry, count in zip(found.sends[counts != 1].tolist(), counts[counts != 1].tolist(), strict=True):
        yield at(columns, entry, "message-order", f"{columns.action(entry)} is waited for {count} times, expected once")


def _in_order(columns: Columns, first: Ints, second: Ints, words: str) -> Iterator[Violation]:
    """Complaints about entries of ``second`` before ``first`` on the same rank; NEVER stands for none."""
    wrong = (first >= 0) & (second >= 0) & (first > second)
    wrong[wrong] = columns.rank[first[wrong]] == columns.rank[second[wrong]]
    for one, other in zip(first[wrong].tolist(), second[wrong].tolist(), strict=True):
        message = f"{columns.action(other)} {words}, {columns.action(one)}"
        cells = (columns.cell(other), columns.cell(one))
        yield Violation("message-order", message, int(columns.rank[other]), cells)


def channel_order(program: Program) -> Iterator[Violation]:
    """The k-th send between two ranks meets its own receive: else data lands in another's place."""
    columns, found = program.columns, Messages.of(program)
    sends, receives = found.match_in_order()
    crossed = np.flatnonzero(found.key[sends] != found.key[receives])
    channel = np.stack([columns.rank[sends[crossed]], columns.rank[receives[crossed]]])
    _, first = np.unique(channel, axis=1, return_index=True)
    for pair in crossed[first].tolist():
        send, receive = int(sends[pair]), int(receives[pair])
        message = (
            f"from rank {columns.rank[send]} to rank {columns.rank[receive]}, {columns.action(send)} arrives as "
            f"{columns.action(receive)}"
        )
        yield Violation("channel-order", message, None, (columns.cell(send), columns.cell(receive)))


def no_deadlock(*transports: Transport) -> ProgramLaw:
    """Build the law against deadlock under ``transports``: it shows a shortest cycle of waits for each."""

    def deadlock(program: Program) -> Iterator[Violation]:
        for transport, cycle in deadlocks(program).items():
            if cycle is not None and transport in transports:
                cells = tuple(map(program.columns.cell, cycle.entries))
                yield Violation("deadlock", f"under {transport.value}: {cycle.text}", None, cells)

    return deadlock


ANYWHERE: tuple[ProgramLaw, ...] = (placement, messages, message_order, channel_order)
LAWS: tuple[ProgramLaw, ...] = (*ANYWHERE, no_deadlock(*Transport))


def runnable(*, in_order: bool) -> tuple[ProgramLaw, ...]:
    """Laws for a program to run: no deadlock on its real transport.

    ``in_order``: messages run in posting order, as NCCL's do: then each may hold up its rank. Else they match by name,
    any number in flight.
    """
    return (*ANYWHERE, no_deadlock(Transport.STRICT if in_order else Transport.UNLIMITED))


def violations(program: Program, *, laws: Iterable[ProgramLaw] = LAWS) -> tuple[Violation, ...]:
    """All violations: of its schedule's laws, then of ``laws``; cells refer to the program."""
    inner = of_schedule(program.schedule)
    bounds, computes = program.columns.bounds, np.flatnonzero(program.columns.is_kind(*COMPUTE))
    starts = program.schedule.columns.bounds

    def move(violation: Violation) -> Violation:
        cells = ((rank, int(computes[starts[rank] + slot] - bounds[rank])) for rank, slot in violation.cells)
        return replace(violation, cells=tuple(cells))

    return (*map(move, inner), *(violation for law in laws for violation in law(program)))


def check(program: Program, *, laws: Iterable[ProgramLaw] = LAWS) -> Program:
    """Return ``program`` if lawful; else raise ``LawBroken`` with all violations, grouped by law."""
    found = violations(program, laws=laws)
    if found:
        raise LawBroken(report(program.schedule.name, found, program.ranks))
    return program
