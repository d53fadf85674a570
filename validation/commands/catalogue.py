"""The catalogue at work: planted faults in their smallest cases or on whole schedules, caught and named."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from pipeproof.commands.campaign import Setting, not_run, validate_case
from pipeproof.own.case import Case
from pipeproof.pipeline.transports import Transport
from pipeproof.reports.columns import header
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.accelerator import CPU
from pipeproof.worlds.world import World

if TYPE_CHECKING:
    from pipeproof.wings.specimens.shrinking import Shrunk
    from pipeproof.wings.specimens.trial import Trial

_EVIDENCE: Mapping[str, str] = {"recorded": "with boundary tensors", "final": "from final gradients alone"}
_SIMULATED_EVIDENCE: Mapping[str, str] = {"recorded": "on simulated ranks"}


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
    from pipeproof.wings.specimens import choice, tables

    simulated, device, terminal = setting.simulation is not None, setting.chosen_device, Terminal()
    runs, left_out = choice.runs_of(
        names, schedules, device=device, simulated=simulated, transport=transport, record=not final_only
    )
    trials = list["Trial"]()
    columns = tables.IN_SIMULATION_COLUMNS if simulated else tables.COLUMNS
    with setting.world() as world:
        terminal.detail(header(columns, terminal.width))
        with setting.outputs.asked:
            for trial in terminal.in_turn([(said, partial(run, world)) for said, run in runs]):
                trials.append(trial)
                terminal.tell(tables.line(trial, terminal.width, columns=columns), passed=_sound(trial))
            if not schedules and set(names) >= set(choice.usual_on(device, simulated=simulated)):
                terminal.say(_controls(world, setting))
        reasons = defaultdict[str, dict[str, list[str]]](lambda: defaultdict(list))
        for (name, schedule), why in left_out.items():
            reasons[why][name].append(schedule)
        for why, those in reasons.items():
            places = ", ".join(f"{name} on {' '.join(where)}" for name, where in those.items())
            terminal.detail(f"left out, {why}: {places}")
        for which, words in (_SIMULATED_EVIDENCE if simulated else _EVIDENCE).items():
            if which == "final" or not final_only:
                terminal.say(f"\n{words}:")
                terminal.detail(tables.confusion(tables.pairs_of(trials, which), terminal.width))
                terminal.say(tables.totals(trials, which) + not_run(len(runs) - len(trials)))
        status = 0 if trials and all(_sound(trial) for trial in trials) else 1
        return setting.outputs.finish(status, specimens=[trial.as_dict() for trial in trials])


def shrink_all(names: Sequence[str], setting: Setting, *, seed: int) -> int:
    """Shrink a random failing case of each specimen; 1 where one does not end in the case that it states."""
    from pipeproof.wings.specimens import SPECIMENS
    from pipeproof.wings.specimens.shrinking import shrink

    terminal, found = Terminal(), list["Shrunk"]()
    with setting.world() as world:
        with setting.outputs.asked:
            for one in terminal.in_turn([(name, partial(shrink, SPECIMENS[name], world, seed=seed)) for name in names]):
                found.append(one)
                terminal.tell(str(one), passed=one.as_stated)
        said = f"{sum(one.as_stated for one in found)} of {len(found)} shrink to the case that they state"
        terminal.say(said + not_run(len(names) - len(found)))
        status = 0 if found and all(one.as_stated for one in found) else 1
        return setting.outputs.finish(status, seed=seed, shrunk=[asdict(one) for one in found])


def _sound(trial: "Trial") -> bool:
    """Whether it was caught, and was not named as something else."""
    return trial.caught and not any(one is not None and one.wrong for one in (trial.recorded, trial.final))


def _controls(world: World, setting: Setting) -> str:
    """A sentence on the changes that are no faults, and the steps by hand that have none."""
    from pipeproof.wings.specimens import CONTROLS, DEVICE_CONTROLS, SIMULATED_CONTROLS, mixed

    device, known = setting.chosen_device, CONTROLS if setting.simulation is None else SIMULATED_CONTROLS
    if device != CPU:
        known = {**known, **DEVICE_CONTROLS}
    passes: dict[str, tuple[str, Callable[[], bool]]] = {}
    for name, one in known.items():
        case = Case.parse(f"{one.smallest} specimen={name} device={device}")
        passes[name] = str(case), partial(_passes, case, one.needs.transports or (None,), world)
    if device == CPU and setting.simulation is None:
        for name, by_hand in mixed.RIGHT.items():
            passes[name] = by_hand.smallest, lambda one=by_hand: mixed.validate_mixed(one, world).outcome == "pass"  # type: ignore[misc]
    results = Terminal().in_turn([*passes.values()], start="no fault, ")
    alarms = [name for name, right in zip(passes, results, strict=True) if not right]
    said = f"; FALSE ALARM for {', '.join(alarms)}" if alarms else ""
    return f"{len(passes) - len(alarms)} of {len(passes)} changes that are no faults pass{said}"


def _passes(case: Case, transports: Sequence[Transport | None], world: World) -> bool:
    """Whether it does: on simulated ranks over each of its transports, under each seed."""
    for over in transports:
        if over is not None:
            world.set_transport(over)
        if validate_case(case, world, measure=False)[0].outcome != "pass":
            return False
    return True
