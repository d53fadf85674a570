"""Selection of specimens, and places where each can show: devices, ranks, cases."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from pipeproof.core.cause import RACES
from pipeproof.core.judge import LAWS
from pipeproof.own.case import Case
from pipeproof.own.faults import SpecimenError, pass_on, unknown
from pipeproof.pipeline.schedules import list_known
from pipeproof.pipeline.transports import Transport
from pipeproof.wings.specimens.catalogue import (
    CATALOGUE,
    IN_SIMULATION,
    ON_DEVICES,
    SPECIMENS,
    fault,
)
from pipeproof.wings.specimens.mixed import MIXED, try_mixed
from pipeproof.wings.specimens.trial import Trial, case_for, search, smallest_of, try_out
from pipeproof.worlds.accelerator import AUTO, CPU
from pipeproof.worlds.world import World

_BY_HAND = "plant it without --device, and without --shrink"

Try = tuple[Case, Transport | None]  # the transport of simulated ranks; None on real ones


def tries_on(
    names: Iterable[str],
    schedules: Sequence[str],
    *,
    device: str = CPU,
    simulated: bool = False,
    transport: Transport | None = None,
) -> tuple[list[Try], dict[tuple[str, str], str]]:
    """What to run: on these schedules, or in smallest cases; on ``simulated`` ranks over this transport, or over those
    that show the fault. And for each (specimen, schedule) that cannot show it, why."""
    tries, left_out = list[Try](), {}
    for schedule, name in product(schedules or [""], list(names)):
        one = fault(name)
        case = replace(case_for(one, schedule) if schedule else smallest_of(one), device=device)
        own = (transport,) if transport is not None else one.needs.transports or (Transport.UNLIMITED,)
        for over in own if simulated else (None,):
            if why := one.missing(case, over):
                left_out[name, case.schedule] = why
            else:
                tries.append((case, over))
    return tries, left_out


Run = tuple[str, Callable[[World], Trial]]  # the progress message, and the run


def runs_of(
    names: Sequence[str],
    schedules: Sequence[str],
    *,
    device: str = CPU,
    simulated: bool = False,
    transport: Transport | None = None,
    record: bool = True,
) -> tuple[list[Run], dict[tuple[str, str], str]]:
    """Return the runs of ``tries_on``, and steps by hand, which have no schedule."""
    own, by_hand = ([name for name in names if (name in MIXED) == hand] for hand in (False, True))
    tries, left_out = tries_on(own, schedules, device=device, simulated=simulated, transport=transport)
    left_out |= {(name, schedule): "a step by hand" for name, schedule in product(by_hand, schedules)}
    runs: list[Run] = [(str(case), partial(_try, case, over, record=record)) for case, over in tries]
    if not schedules:
        runs += [(MIXED[name].smallest, partial(try_mixed, MIXED[name])) for name in by_hand]
    return runs, left_out


def _try(case: Case, over: Transport | None, world: World, *, record: bool) -> Trial:
    if over is None:
        return try_out(case, world, record=record)
    world.set_transport(over)
    return search(case, world, record=record)


def specimens_on(device: str, *, simulated: bool = False, shrinks: bool = False) -> list[str]:
    """List specimens for ``device`` and ``simulated`` ranks; steps by hand need the CPU, and have one size."""
    by_hand = MIXED if device in (CPU, AUTO) and not shrinks else ()
    return [*SPECIMENS, *by_hand, *(() if device == CPU else ON_DEVICES), *(IN_SIMULATION if simulated else ())]


def usual_on(device: str, *, simulated: bool, shrinks: bool = False) -> list[str]:
    """List the default specimens: on simulated ranks, those that show only there."""
    return [*IN_SIMULATION] if simulated else specimens_on(device, shrinks=shrinks)


def choose(
    text: str, *, device: str, simulated: bool = False, shrinks: bool = False, otherwise: Sequence[str] = ()
) -> list[str]:
    """Return the specimens in ``text``, separated by commas; if empty, those in ``otherwise``, or the default.

    ``shrinks``: only specimens with smaller cases. Raises ``SpecimenError`` for an unknown or unsuitable one.
    """
    known = specimens_on(device, simulated=simulated, shrinks=shrinks)
    usual = list(otherwise) or usual_on(device, simulated=simulated, shrinks=shrinks)
    names = [name.strip() for name in text.split(",")] if text else usual
    for name in names:
        if name in ON_DEVICES and name not in known:
            raise SpecimenError(f"specimen {name!r} needs a device other than the CPU: name its type with --device")
        if name in IN_SIMULATION and name not in known:
            raise SpecimenError(f"specimen {name!r} needs simulated ranks: say --world simulated")
        if name in MIXED and name not in known:
            raise SpecimenError(f"specimen {name!r} is a step by hand, on the CPU and of one size: {_BY_HAND}")
        if name not in known:
            raise unknown(name)
    return names


def load(path: str) -> list[str]:
    """Load the file at ``path``; return its specimens' names. Raises ``SpecimenError``."""
    names = CATALOGUE.load(path)
    for one in (SPECIMENS[name] for name in names):
        laws = (*LAWS, "deadlock", *RACES)
        if one.law not in laws and one.reorder is pass_on:
            hint = list_known(one.law, laws)
            raise SpecimenError(f"{path}: specimen {one.name!r} breaks the law {one.law!r}: {hint}")
    return names
