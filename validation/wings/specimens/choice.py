"""Which specimens are asked for, and where each can show: on which device, on which ranks, in which cases."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from pipeproof.core.cause import RACES
from pipeproof.core.judge import LAWS
from pipeproof.own.case import Case
from pipeproof.own.faults import SpecimenError, unchanged, unknown
from pipeproof.pipeline.schedules import known_are
from pipeproof.pipeline.transports import Transport
from pipeproof.wings.specimens.catalogue import (
    CATALOGUE,
    IN_SIMULATION,
    ON_DEVICES,
    SPECIMENS,
    fault,
)
from pipeproof.wings.specimens.mixed import MIXED
from pipeproof.wings.specimens.mixed_check import try_mixed
from pipeproof.wings.specimens.specimen import Specimen
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
        for over in _transports(one, transport) if simulated else (None,):
            if why := one.missing(case, over):
                left_out[name, case.schedule] = why
            else:
                tries.append((case, over))
    return tries, left_out


def _transports(one: Specimen, transport: Transport | None) -> Sequence[Transport]:
    return (transport,) if transport is not None else one.needs.transports or (Transport.UNLIMITED,)


Run = tuple[str, Callable[[World], Trial]]  # what is said while it runs


def runs_of(
    names: Sequence[str],
    schedules: Sequence[str],
    *,
    device: str = CPU,
    simulated: bool = False,
    transport: Transport | None = None,
    record: bool = True,
) -> tuple[list[Run], dict[tuple[str, str], str]]:
    """As ``tries_on``, and steps by hand, which are on no schedule."""
    own, by_hand = ([name for name in names if (name in MIXED) == hand] for hand in (False, True))
    tries, left_out = tries_on(own, schedules, device=device, simulated=simulated, transport=transport)
    left_out |= {(name, schedule): "a step by hand" for name, schedule in product(by_hand, schedules)}
    runs: list[Run] = [(str(case), partial(_tried, case, over, record=record)) for case, over in tries]
    if not schedules:
        runs += [(MIXED[name].smallest, partial(try_mixed, MIXED[name])) for name in by_hand]
    return runs, left_out


def _tried(case: Case, over: Transport | None, world: World, *, record: bool) -> Trial:
    if over is None:
        return try_out(case, world, record=record)
    world.set_transport(over)
    return search(case, world, record=record)


def known_on(device: str, *, simulated: bool = False, shrinks: bool = False) -> list[str]:
    """The specimens that ``device`` can show, and ``simulated`` ranks; steps by hand are on the CPU, of one size."""
    by_hand = MIXED if device in (CPU, AUTO) and not shrinks else ()
    return [*SPECIMENS, *by_hand, *(() if device == CPU else ON_DEVICES), *(IN_SIMULATION if simulated else ())]


def usual_on(device: str, *, simulated: bool, shrinks: bool = False) -> list[str]:
    """Those that are planted where none are named: on simulated ranks what they alone show."""
    return [*IN_SIMULATION] if simulated else known_on(device, shrinks=shrinks)


def chosen(
    text: str, *, device: str, simulated: bool = False, shrinks: bool = False, otherwise: Sequence[str] = ()
) -> list[str]:
    """The specimens that ``text`` names, separated by commas; for none, those ``otherwise`` given, or the usual ones.

    ``shrinks``: those that have smaller cases. Raises ``SpecimenError`` for one that there is not, or that cannot show
    there.
    """
    known = known_on(device, simulated=simulated, shrinks=shrinks)
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


def loaded(path: str) -> list[str]:
    """The names of the specimens that the file at ``path`` registers. Raises ``SpecimenError``."""
    names = CATALOGUE.load(path)
    for one in (SPECIMENS[name] for name in names):
        laws = (*LAWS, "deadlock", *RACES)
        if one.law not in laws and one.reorder is unchanged:
            hint = known_are(one.law, laws)
            raise SpecimenError(f"{path}: specimen {one.name!r} breaks the law {one.law!r}: {hint}")
    return names
