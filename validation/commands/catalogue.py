"""The catalogue at work: planted faults in their smallest cases or on whole schedules, caught and named."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product

from pipeproof.cases.case import Case
from pipeproof.cases.mixed.specimens import MIXED, RIGHT, MixedCase, MixedFault
from pipeproof.cases.shrinking import Shrunk, shrink
from pipeproof.cases.specimens import (
    CONTROLS,
    DEVICE_CONTROLS,
    FAMILIES,
    IN_SIMULATION,
    ON_DEVICES,
    PLUGINS,
    SIMULATED_CONTROLS,
    SIMULATED_FAMILIES,
    SPECIMENS,
    SpecimenError,
    fault,
    unknown,
)
from pipeproof.cases.specimens.specimen import Planted, Specimen, unchanged
from pipeproof.cases.trial import Named, Trial, case_for, search, smallest_of, try_out
from pipeproof.commands.campaign import Setting, not_run, validated
from pipeproof.core.cause import RACES
from pipeproof.core.judge import LAWS
from pipeproof.pipeline.schedules import known_are
from pipeproof.pipeline.transports import Transport, everyday, transport_of
from pipeproof.reports.columns import Column, header, row, table
from pipeproof.reports.table import confusion, pairs_of, totals
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.accelerator import AUTO, CPU
from pipeproof.worlds.world import World

_EVIDENCE: Mapping[str, str] = {
    "recorded": "with boundary tensors",
    "final": "from final gradients alone",
}
_BY_HAND = "plant it without --device, and without --shrink"
_SIMULATED_EVIDENCE: Mapping[str, str] = {"recorded": "on simulated ranks"}


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
    names = PLUGINS.load(path)
    for one in (SPECIMENS[name] for name in names):
        laws = (*LAWS, "deadlock", *RACES)
        if one.law not in laws and one.reorder is unchanged:
            hint = known_are(one.law, laws)
            raise SpecimenError(f"{path}: specimen {one.name!r} breaks the law {one.law!r}: {hint}")
    return names


def try_all(
    names: Sequence[str],
    schedules: Sequence[str],
    setting: Setting,
    *,
    final_only: bool = False,
    transport: Transport | None = None,
) -> int:
    """Run specimens on schedules, or in their smallest cases where there is no schedule; returns the exit status.

    A line for each, then how often each planted kind was named what. 1 where a specimen was not caught or was named
    as something else. ``final_only``: no case is run again to record its boundary tensors. On simulated ranks each is
    tried over ``transport``, or those that show it, under one seed after the other.
    """
    simulated, device, terminal = setting.simulation is not None, setting.chosen_device, Terminal()
    own = [name for name in names if name not in MIXED]
    tries, left_out = tries_on(own, schedules, device=device, simulated=simulated, transport=transport)
    by_hand = [name for name in names if name in MIXED]
    left_out |= {(name, schedule): "a step by hand" for name, schedule in product(by_hand, schedules)}
    runs = [*((str(case), partial(_tried, case, over, record=not final_only)) for case, over in tries)]
    if by_hand and not schedules:
        from pipeproof.wings.composed import try_mixed

        runs += [(MIXED[name].smallest, partial(try_mixed, MIXED[name])) for name in by_hand]
    trials = list[Trial]()
    columns = IN_SIMULATION_COLUMNS if simulated else COLUMNS
    with setting.outputs.opened("specimens") as files, setting.world() as world:
        terminal.detail(header(columns, terminal.width))
        with files.asked:
            for number, (said, run) in enumerate(runs, start=1):
                with terminal.progress(f"{number} of {len(runs)}: {said}"):
                    trials.append(run(world))
                (terminal.detail if _sound(trials[-1]) else terminal.say)(
                    line(trials[-1], terminal.width, columns=columns)
                )
            if not schedules and set(names) >= set(usual_on(device, simulated=simulated)):
                terminal.say(_controls(world, setting))
        for why, those in _grouped(left_out).items():
            terminal.detail(f"left out, {why}: {', '.join(those)}")
        for which, words in (_SIMULATED_EVIDENCE if simulated else _EVIDENCE).items():
            if which == "final" or not final_only:
                terminal.say(f"\n{words}:")
                terminal.detail(confusion(pairs_of(trials, which), terminal.width))
                terminal.say(totals(trials, which) + not_run(len(runs) - len(trials)))
        status = 0 if trials and all(_sound(trial) for trial in trials) else 1
        return files.finish(status, specimens=[trial.as_dict() for trial in trials])


def _tried(case: Case, over: Transport | None, world: World, *, record: bool) -> Trial:
    if over is None:
        return try_out(case, world, record=record)
    world.transport = over
    return search(case, world, seeds=world.seeds, record=record)


def shrink_all(names: Sequence[str], setting: Setting, *, seed: int) -> int:
    """Shrink a random failing case of each specimen; 1 where one does not end in the case that it states."""
    terminal, found = Terminal(), list[Shrunk]()
    with setting.outputs.opened("specimens") as files, setting.world() as world:
        with files.asked:
            for number, name in enumerate(names, start=1):
                with terminal.progress(f"{number} of {len(names)}: {name}"):
                    found.append(shrink(SPECIMENS[name], world, seed=seed))
                (terminal.detail if found[-1].as_stated else terminal.say)(str(found[-1]))
        said = f"{sum(one.as_stated for one in found)} of {len(found)} shrink to the case that they state"
        terminal.say(said + not_run(len(names) - len(found)))
        status = 0 if found and all(one.as_stated for one in found) else 1
        return files.finish(status, seed=seed, shrunk=[asdict(one) for one in found])


def _sound(trial: Trial) -> bool:
    """Whether it was caught, and was not named as something else."""
    return trial.caught and not any(one is not None and one.wrong for one in (trial.recorded, trial.final))


def _controls(world: World, setting: Setting) -> str:
    """A sentence on the changes that are no faults, and the steps by hand that have none."""
    device, known = setting.chosen_device, CONTROLS if setting.simulation is None else SIMULATED_CONTROLS
    if device != CPU:
        known = {**known, **DEVICE_CONTROLS}
    cases = {name: Case.parse(f"{one.smallest} specimen={name} device={device}") for name, one in known.items()}
    passes = {name: (str(case), partial(_passes, case, known[name])) for name, case in cases.items()}
    if device == CPU and setting.simulation is None:
        passes |= {name: (one.smallest, partial(_passes_by_hand, one)) for name, one in RIGHT.items()}
    alarms = []
    for number, (name, (said, run)) in enumerate(passes.items(), start=1):
        with Terminal().progress(f"no fault, {number} of {len(passes)}: {said}"):
            alarms += [] if run(world) else [name]
    said = f"; FALSE ALARM for {', '.join(alarms)}" if alarms else ""
    return f"{len(passes) - len(alarms)} of {len(passes)} changes that are no faults pass{said}"


def _passes_by_hand(case: MixedCase, world: World) -> bool:
    from pipeproof.wings.composed import validate_mixed

    return validate_mixed(case, world).verdict == "pass"


def _passes(case: Case, control: Planted, world: World) -> bool:
    """Whether it does: on simulated ranks over each of its transports, under each seed."""
    for over in control.needs.transports or (world.transport,):
        world.transport = over
        if validated(case, world, measure=False)[0].verdict != "pass":
            return False
    return True


def _grouped(left_out: Mapping[tuple[str, str], str]) -> dict[str, list[str]]:
    """By reason: the specimens, each with its schedules."""
    by_reason: dict[str, dict[str, list[str]]] = {}
    for (name, schedule), why in left_out.items():
        by_reason.setdefault(why, {}).setdefault(name, []).append(schedule)
    return {why: [f"{n} on {' '.join(where)}" for n, where in those.items()] for why, those in by_reason.items()}


COLUMNS = (
    Column("specimen", 30),
    Column("schedule", 12, drop=4),
    Column("planted", 20, drop=2),
    Column("caught by", 18, drop=5),
    Column("named", 20),
    Column("place", 5, drop=3),
    Column("from gradients", 20, drop=6),
    Column("time", 7, right=True, drop=7),
)
IN_SIMULATION_COLUMNS = (
    Column("specimen", 30),
    Column("schedule", 12, drop=4),
    Column("planted", 22, drop=2),
    Column("named", 22),
    Column("place", 5, drop=3),
    Column("transport", 10, drop=1),
    Column("seed", 4, right=True, drop=6),
    Column("time", 7, right=True, drop=7),
)


def line(trial: Trial, width: int | None = None, *, columns: Sequence[Column] = COLUMNS) -> str:
    """One line of the table of these columns."""
    cells = {
        "specimen": trial.specimen,
        "schedule": trial.case.partition(" ")[0],
        "planted": trial.planted,
        "caught by": trial.law if trial.caught else f"NOT: {', '.join(trial.laws) or 'nothing'}",
        "named": _kind(trial.recorded),
        "place": "-" if trial.recorded is None or trial.recorded.kind is None else _place(trial.recorded),
        "from gradients": _kind(trial.final),
        "transport": "-" if trial.transport is None else everyday(transport_of(trial.transport)),
        "seed": f"{trial.seed}",
        "time": f"{trial.seconds:.1f} s",
    }
    return row(columns, [cells[column.name] for column in columns], width)


def _kind(one: Named | None) -> str:
    if one is None:
        return "-"
    return "unknown" if one.kind is None else one.kind if one.right else f"NOT: {one.kind}"


def _place(one: Named) -> str:
    return "right" if one.located else "wrong"


_LISTED = (
    Column(""),
    Column("", drop=3),
    Column("", drop=2),
    Column("", drop=4),
    Column("", drop=1),
)


def _families() -> list[tuple[str, Sequence[Specimen | MixedFault]]]:
    """All, also those that are by hand, or need a device or simulated ranks, and those of one's own."""
    more = ("mixed", [*MIXED.values()]), ("devices", [*ON_DEVICES.values()])
    return [*FAMILIES.items(), *more, *SIMULATED_FAMILIES.items(), ("own", PLUGINS.own)]


def listing(names: Collection[str], *, width: int | None = None) -> str:
    """One line for each of these specimens: name, family and classes, kind of cause, smallest case, summary, origin."""
    rows = [
        (
            specimen.name,
            f"{family} {','.join(specimen.classes)}".rstrip(),
            specimen.fault.kind,
            specimen.smallest,
            f"{specimen.summary} ({specimen.origin})",
        )
        for family, those in _families()
        for specimen in those
        if specimen.name in names
    ]
    return table(_LISTED, rows, width)
