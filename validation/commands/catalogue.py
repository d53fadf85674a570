"""The catalogue at work: planted faults in their smallest cases or on whole schedules, caught and named."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace

from pipeproof.cases.case import Case
from pipeproof.cases.shrinking import Shrunk, shrink
from pipeproof.cases.specimens import (
    CONTROLS,
    DEVICE_CONTROLS,
    FAMILIES,
    ON_DEVICES,
    PLUGINS,
    SPECIMENS,
    SpecimenError,
    fault,
    unknown,
)
from pipeproof.cases.specimens.specimen import unchanged
from pipeproof.cases.trial import Named, Trial, case_for, smallest_of, try_out
from pipeproof.cases.validator import validate
from pipeproof.commands.campaign import Setting, not_run
from pipeproof.judging.judge import LAWS
from pipeproof.pipeline.schedules import known_are
from pipeproof.reports.columns import Column, Layout, table
from pipeproof.reports.table import confusion, pairs_of, totals
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.accelerator import CPU
from pipeproof.worlds.world import World

_EVIDENCE: Mapping[str, str] = {
    "recorded": "with boundary tensors",
    "final": "from final gradients alone",
}


def cases_on(
    names: Iterable[str], schedules: Iterable[str], *, device: str = CPU
) -> tuple[list[Case], dict[tuple[str, str], str]]:
    """The cases to run, by schedule; and for each (specimen, schedule) that cannot show the fault, why."""
    wanted = list(names)
    cases, left_out = [], {}
    for schedule in schedules:
        for name in wanted:
            case = replace(case_for(fault(name), schedule), device=device)
            why = fault(name).missing(case)
            if why:
                left_out[name, schedule] = why
            else:
                cases.append(case)
    return cases, left_out


def known_on(device: str) -> list[str]:
    """The specimens that ``device`` can show."""
    return [*SPECIMENS, *(() if device == CPU else ON_DEVICES)]


def chosen(text: str, *, device: str, otherwise: Sequence[str] = ()) -> list[str]:
    """The specimens that ``text`` names, separated by commas; for none, those ``otherwise`` given, or all.

    Raises ``SpecimenError`` for one that there is not, or that ``device`` cannot show.
    """
    known = known_on(device)
    names = [name.strip() for name in text.split(",")] if text else list(otherwise) or known
    for name in names:
        if name in ON_DEVICES and name not in known:
            raise SpecimenError(f"specimen {name!r} needs a device other than the CPU: name its type with --device")
        if name not in known:
            raise unknown(name)
    return names


def loaded(path: str) -> list[str]:
    """The names of the specimens that the file at ``path`` registers. Raises ``SpecimenError``."""
    names = PLUGINS.load(path)
    for one in (SPECIMENS[name] for name in names):
        laws = (*LAWS, "deadlock")
        if one.law not in laws and one.reorder is unchanged:
            hint = known_are(one.law, laws)
            raise SpecimenError(f"{path}: specimen {one.name!r} breaks the law {one.law!r}: {hint}")
    return names


def try_all(names: Sequence[str], schedules: Sequence[str], setting: Setting, *, final_only: bool = False) -> int:
    """Run specimens on schedules, or in their smallest cases where there is no schedule; returns the exit status.

    A line for each, then how often each planted kind was named what. 1 where a specimen was not caught or was named
    as something else. ``final_only``: no case is run again to record its boundary tensors.
    """
    device, terminal, trials = setting.chosen_device, Terminal(), list[Trial]()
    smallest = [] if schedules else [replace(smallest_of(fault(name)), device=device) for name in names]
    cases, left_out = cases_on(names, schedules, device=device) if schedules else (smallest, {})
    with setting.outputs.opened("specimens") as files, setting.world() as world:
        terminal.detail(Layout.of(COLUMNS, terminal.width).header)
        with files.asked:
            for number, case in enumerate(cases, start=1):
                with terminal.progress(f"{number} of {len(cases)}: {case}"):
                    trials.append(try_out(case, world, record=not final_only))
                (terminal.detail if _sound(trials[-1]) else terminal.say)(line(trials[-1], terminal.width))
            if not schedules and len(names) == len(known_on(device)):
                terminal.say(_controls(world, device))
        for why, those in _grouped(left_out).items():
            terminal.detail(f"left out, {why}: {', '.join(those)}")
        for which, words in _EVIDENCE.items():
            if which == "final" or not final_only:
                terminal.say(f"\n{words}:")
                terminal.detail(confusion(pairs_of(trials, which), terminal.width))
                terminal.say(totals(trials, which) + not_run(len(cases) - len(trials)))
        status = 0 if trials and all(_sound(trial) for trial in trials) else 1
        return files.finish(status, specimens=[trial.as_dict() for trial in trials])


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


def _controls(world: World, device: str) -> str:
    """A sentence on the changes that are no faults."""
    known = {**CONTROLS, **({} if device == CPU else DEVICE_CONTROLS)}
    cases = {name: Case.parse(f"{one.smallest} specimen={name} device={device}") for name, one in known.items()}
    verdicts = {name: validate(case, world).verdict for name, case in cases.items()}
    alarms = [name for name, verdict in verdicts.items() if verdict != "pass"]
    said = f"; FALSE ALARM for {', '.join(alarms)}" if alarms else ""
    return f"{len(verdicts) - len(alarms)} of {len(verdicts)} changes that are no faults pass{said}"


def _grouped(left_out: Mapping[tuple[str, str], str]) -> dict[str, list[str]]:
    """By reason: the specimens, each with its schedules."""
    by_reason: dict[str, dict[str, list[str]]] = {}
    for (name, schedule), why in left_out.items():
        by_reason.setdefault(why, {}).setdefault(name, []).append(schedule)
    return {why: [f"{n} on {' '.join(where)}" for n, where in those.items()] for why, those in by_reason.items()}


COLUMNS = (
    Column("specimen", 30, gap=0),
    Column("schedule", 12, drop=4),
    Column("planted", 20, drop=2),
    Column("caught by", 18, drop=5),
    Column("named", 20),
    Column("place", 5, drop=3),
    Column("from gradients", 20, drop=6),
    Column("time", 7, right=True, drop=7),
)


def line(trial: Trial, width: int | None = None) -> str:
    """One line of the table of ``COLUMNS``."""
    caught = trial.law if trial.caught else f"NOT: {', '.join(trial.laws) or 'nothing'}"
    place = "-" if trial.recorded is None or trial.recorded.kind is None else _place(trial.recorded)
    cells = [trial.specimen, trial.case.partition(" ")[0], trial.planted, caught, _kind(trial.recorded), place]
    return Layout.of(COLUMNS, width).row([*cells, _kind(trial.final), f"{trial.seconds:.1f} s"])


def _kind(one: Named | None) -> str:
    if one is None:
        return "-"
    return "unknown" if one.kind is None else one.kind if one.right else f"NOT: {one.kind}"


def _place(one: Named) -> str:
    return "right" if one.located else "wrong"


_LISTED = (
    Column("", gap=0),
    Column("", drop=3, gap=2),
    Column("", drop=2, gap=2),
    Column("", drop=4, gap=2),
    Column("", drop=1, least=12, gap=2),
)


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
        for family, those in [*FAMILIES.items(), ("devices", [*ON_DEVICES.values()]), ("own", PLUGINS.own)]
        for specimen in those
        if specimen.name in names
    ]
    return table(_LISTED, rows, width)
