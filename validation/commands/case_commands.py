"""The commands that run steps: ``validate``, ``replay``, ``fuzz``, ``gate`` and ``mutate``, as options.

Each runs a step of the user's where one is named, and pipeproof's own schedules otherwise. torch is imported by the one
that runs, and meanwhile by the fork server where ranks will.
"""

import argparse
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeproof.commands.option_parser import add, add_flag, refuse_unused, whole
from pipeproof.commands.outputs import add_file, add_outputs
from pipeproof.commands.own_step import OwnStep, add_step, is_step, step_of, steps_named
from pipeproof.commands.selection import (
    COMPOSED,
    DTYPE_NAMES,
    OF_TABLE,
    add_config,
    add_search,
    add_simulation,
    add_table,
    add_timeout,
    add_world,
    config_of,
    decisions_of,
    device_of,
    dtype_names,
    schedule_names,
    table_of,
    tell_notes,
)
from pipeproof.commands.work import work_of
from pipeproof.own.case import DTYPES, FUZZED_DTYPES, SCHEDULES, Case, CaseError
from pipeproof.own.runtimes import OWN, TORCH
from pipeproof.pipeline.files import is_csv
from pipeproof.pipeline.sizes import MOST_ACTIONS, MOST_PROCESSES, MOST_SEED, check_count
from pipeproof.pipeline.transports import transport_of
from pipeproof.reports.terminal import Terminal
from pipeproof.wings import is_present
from pipeproof.worlds.accelerator import AUTO, CPU, parse_device
from pipeproof.worlds.launcher import start_fork_server

if TYPE_CHECKING:
    from pipeproof.commands.campaign import Setting

Commands: TypeAlias = "argparse._SubParsersAction[Any]"

_NOT_COMPOSED = ("--record", "--profile")  # what a composed check has not
_EVERY = ("all", *SCHEDULES)
_OF_STEP = frozenset(
    "--reference --microbatches --ranks --loss-fn --optimizer --contract --timeout --device --world --transport --room "
    "--interleaving --interleavings --exhaust --json --html --quiet --verbose --color".split()
)


def add_case_commands(commands: Commands) -> None:
    """Add the commands."""
    for add_command in (_add_validate, _add_replay, _add_fuzz, _add_mutate, _add_gate):
        add_command(commands)


def own_step(options: argparse.Namespace, name: str | None, *more: str) -> OwnStep | None:
    """The user's step that is asked for; raises where the command line says what has no effect on one.

    ``more``: options that have.
    """
    if (step := step_of(options, name)) is not None:
        refuse_unused(options, sorted(options.given - _OF_STEP - {*more}), "on a step of yours")
    return step


def setting_of(options: argparse.Namespace, *, device: str | None = None, explain: bool = False) -> "Setting":
    """Where what is asked for runs; the fork server imports torch while this does."""
    if not vars(options).get("list"):
        start_fork_server()
    from pipeproof.commands.campaign import Setting

    return Setting.of(options, device=device, explain=explain)


def _add_validate(commands: Commands) -> None:
    parser = commands.add_parser(
        "validate",
        help="is a step right? it runs on ranks, and beside it on one device",
        description="Run a step of yours beside its reference and compare everything. Without STEP, run the built-in "
        "schedules: by default every one, with a GPT and with one whose weights are tied.",
    )
    add_step(parser, shape=True)
    add_table(parser, of_steps=True)
    if is_present("primitives"):
        from pipeproof.commands.primitive_commands import add_stacks

        add_stacks(parser)
    add_config(parser)
    add_flag(parser, "--profile", says="print where each rank's time went", rare=True)
    _add_check(parser)
    add_world(parser)
    add_simulation(parser)
    add_outputs(parser, page=True, record=True)
    if is_present("primitives"):
        from pipeproof.commands.bench_command import add_bench

        add_bench(parser)
    parser.set_defaults(run=_validate)


def _add_check(parser: argparse.ArgumentParser) -> None:
    about = "whole: beside a reference on one device; composed: each stage is run again on its own rank"
    choices = ("whole", COMPOSED)
    add(parser, "--check", None, f"{about} (default: whole)", choices=choices, default="whole", rare=True)


def _add_fuzz(commands: Commands) -> None:
    parser = commands.add_parser(
        "fuzz",
        help="run many random cases; a failure shrinks to a line that replays it",
        description="Run many random cases: of a step of yours, or without STEP of the built-in schedules.",
    )
    add_step(parser)
    add(parser, "--cases", "N", "how many are drawn", whole, default=200)
    add(parser, "--seed", "N", "one seed draws the same cases again", whole, default=0)
    names = f"all, or some of {', '.join(SCHEDULES)}"
    add(parser, "--schedule", "NAME,...", names, known=_EVERY, default="all")
    add(parser, "--dtype", "NAME,...", DTYPE_NAMES, known=DTYPES, default=",".join(FUZZED_DTYPES), rare=True)
    add(parser, "--max-ranks", "P", "the most ranks that a drawn case may have", whole, default=4)
    runtimes = "which one runs them: torch is torch.distributed.pipelining"
    add(parser, "--runtime", None, runtimes, choices=(OWN, TORCH), default=OWN, rare=True)
    far = "where a long campaign says how far it has come; the same call goes on from there"
    add(parser, "--resume", "FILE", far, rare=True)
    _add_check(parser)
    add_world(parser)
    add_simulation(parser, drawn=True)
    add_outputs(parser, page=True)
    parser.set_defaults(run=_fuzz)


def _add_gate(commands: Commands) -> None:
    parser = commands.add_parser(
        "gate",
        help="decide whether to merge: steps or schedules, random cases, and a planted fault",
        description="Decide whether to merge: every step of the table [tool.pipeproof.steps], and a fault in each, "
        "which has to be caught. Where there is none, or --schedule names some: the built-in schedules, random cases "
        "of them, and a planted fault.",
    )
    add(parser, "step", "STEP", "these steps of the table (default: all)", nargs="*")
    add_table(parser)
    add(parser, "--cases", "N", "how many cases of schedules are drawn from the seed", whole, default=50)
    line = "one more case, as replay takes it; may be given again"
    add(parser, "--case", "LINE", line, action="append", default=[], rare=True)
    most = "the most ranks that a drawn case may have (default: as in the table)"
    add(parser, "--max-ranks", "P", most, whole, rare=True)
    add_file(parser, "--junit", "write a test report there")
    add_file(parser, "--summary", "write verdicts in Markdown there")
    add(parser, "--artifacts", "DIR", "write what is known of failing cases there")
    add(parser, "--annotations", None, "print failures as annotations for GitHub Actions", choices=("github",))
    add_world(parser)
    add_simulation(parser)
    add_outputs(parser, page=True)
    parser.set_defaults(run=_gate)


def _add_replay(commands: Commands) -> None:
    parser = commands.add_parser("replay", help="run one case, or a step of yours, again; say all about it")
    line = "what a failure printed: 1f1b r4 s4 m8 split=2,2,2,2 seed=17 (quotes may be left out), or a step of yours, "
    line += "with what fuzz drew for it"
    add(parser, "case", None, line, nargs="+")
    add_step(parser, positional=False)
    add(parser, "--plugin", "FILE", "a Python file that registers the specimen of the line", rare=True)
    _add_check(parser)
    add_world(parser)
    add_simulation(parser)
    add_outputs(parser, what="the verdict", page=True, record=True)
    parser.set_defaults(run=_replay)


def _add_mutate(commands: Commands) -> None:
    parser = commands.add_parser(
        "mutate",
        help="plant faults, in a step of yours or in schedules; see that each is caught",
        description="Plant faults and see that each is caught: in a step of yours, which should then be no pass. "
        "Without STEP, plant the specimens of the catalogue, or your own, in the built-in schedules.",
    )
    add_step(parser)
    add_flag(parser, "--list", says="a line for each fault; nothing runs")
    add(parser, "--only", "NAME,...", "these faults alone (default: all)", known=_all_specimens, default="")
    there = "plant each on these schedules, or on all, and not in its smallest case"
    add(parser, "--schedule", "NAME,...", there, known=_EVERY, default="")
    where = "where ranks compute (default: cpu); other devices show more faults than the CPU does"
    add(parser, "--device", "TYPE", where, parse_device, default=CPU)
    add_search(parser)
    own = "a Python file that registers specimens of your own: those alone, unless --only says more"
    add(parser, "--plugin", "FILE", own)
    add_flag(parser, "--shrink", says="shrink a random failing case of each to its smallest", rare=True)
    add(parser, "--seed", "N", "one seed lets --shrink draw the same cases again", whole, default=0, rare=True)
    add_flag(parser, "--final-only", says="name faults from final gradients alone: record no tensors", rare=True)
    add_timeout(parser)
    add_outputs(parser, what="results")
    parser.set_defaults(run=_mutate)


def _all_specimens() -> Sequence[str]:
    from pipeproof.wings.specimens.choice import specimens_on

    return specimens_on(AUTO, simulated=True)


def _validate(options: argparse.Namespace) -> int:
    if (step := own_step(options, options.step)) is not None:
        setting = setting_of(options)
        from pipeproof.commands.step_commands import validate_step

        return validate_step(step, setting)
    if options.bench:
        from pipeproof.commands.bench_command import bench_configs

        return bench_configs(options)
    refuse_unused(options, ["--rounds"], "without --bench")
    composed = options.check == COMPOSED
    refuse_unused(options, _NOT_COMPOSED, "with --check composed", where=composed)
    if is_present("primitives"):
        from pipeproof.commands.primitive_commands import asks_for_stacks, validate_config, validate_stacks

        if asks_for_stacks(options):
            refuse_unused(options, ["--check"], "with parallel primitives, which are checked whole", where=composed)
            return validate_stacks(options)
    if options.config is None:
        (cases, left_out), device = table_of(options), options.device
    else:
        config = config_of(options)
        work = work_of(config)
        if not isinstance(work, Case):
            return validate_config(options, config, work)
        tell_notes(config, work)
        cases, left_out, device = [work], {}, device_of(options, [config])
    setting = setting_of(options, device=device)
    from pipeproof.commands.campaign import validate_all

    return validate_all(cases, setting, left_out=left_out)


def _gate(options: argparse.Namespace) -> int:
    refuse_unused(options, ["--max-ranks"], "with --cases 0", where=not options.cases)
    steps = steps_named(options.step)
    built_in = not steps or bool({"--schedule", "--case", "--cases"} & options.given)
    of_cases = [*(f"--{name}" for name in OF_TABLE), "--max-ranks"]
    refuse_unused(options, of_cases, "on steps of yours, unless --schedule names some, too", where=not built_in)
    table, missing = table_of(options) if built_in else ([], {})
    setting = setting_of(options)
    from pipeproof.commands.gate import Gate

    budget = options.cases if built_in else 0
    if options.max_ranks is None:
        options.max_ranks = max((case.ranks for case in table), default=1)
    _check_draw(options, least=0)
    families = ",".join(name for name in options.schedule.split(",") if not is_csv(name))
    if budget and not families:
        raise CaseError(f"--cases {budget} are drawn from families, and --schedule names none: give --cases 0")
    pinned = [Case.parse(text) for text in options.case]
    schedules = schedule_names(families) if families else []
    drawn = (schedules, budget, options.seed, options.max_ranks)
    return Gate(setting, steps, table, missing, pinned, *drawn).run(options)


def _check_draw(options: argparse.Namespace, *, least: int) -> None:
    """Raise a ``ValueError`` for numbers of what is drawn that cannot be."""
    check_count("--cases", options.cases, least=least, most=MOST_ACTIONS)
    check_count("--seed", options.seed, least=0, most=MOST_SEED)
    check_count("--max-ranks", options.max_ranks, most=MOST_PROCESSES)


def _fuzz(options: argparse.Namespace) -> int:
    _check_draw(options, least=1)
    if (step := own_step(options, options.step, "--cases", "--seed")) is not None:
        setting = setting_of(options)
        from pipeproof.commands.step_commands import fuzz_own

        return fuzz_own(step, setting, cases=options.cases, seed=options.seed)
    other = options.runtime != OWN
    refuse_unused(options, ["--dtype"], "with --runtime torch, which is run in fp32", where=other)
    refuse_unused(options, ["--check"], f"with --runtime {options.runtime}", where=other)
    schedules, dtypes = schedule_names(options.schedule), dtype_names(options.dtype)
    setting = setting_of(options)
    from pipeproof.commands.fuzzing import Wish, fuzz_all

    drawn = (options.cases, options.seed, schedules, dtypes, options.max_ranks, options.runtime)
    return fuzz_all(setting, Wish(*drawn, decisions_of(options)), resume=options.resume)


def _replay(options: argparse.Namespace) -> int:
    if is_step(options.case):
        name, *drawn = options.case
        step = own_step(options, name)
        assert step is not None, "it is named"
        setting = setting_of(options, explain=True)
        from pipeproof.commands.step_commands import fuzz_own, validate_step

        return fuzz_own(step, setting, case=shlex.join(drawn)) if drawn else validate_step(step, setting)
    step_of(options, None)
    case = Case.parse(" ".join(options.case))
    refuse_unused(options, _NOT_COMPOSED, "with --check composed", where=options.check == COMPOSED)
    refuse_unused(options, ["--plugin"], "on a line without specimen=", where=not case.specimen)
    refuse_unused(options, ["--device", "--ranks", "--microbatches"], "on a line, which says it")
    setting = setting_of(options, device=case.device, explain=True)
    from pipeproof.commands.campaign import validate_all

    if options.plugin is not None:
        from pipeproof.wings.specimens import CATALOGUE

        CATALOGUE.load(options.plugin)
    return validate_all([case], setting)


def _mutate(options: argparse.Namespace) -> int:
    step = own_step(options, options.step, "--only", "--list")
    places = ("--schedule", "--device", "--transport", "--interleavings", "--final-only")
    runs = (*places, "--shrink", "--seed", "--timeout", "--json")
    refuse_unused(options, runs, "with --list, which runs nothing", where=options.list)
    refuse_unused(options, ["--seed"], "without --shrink", where=not options.shrink)
    why = "with --shrink, which draws its own schedules and names nothing"
    refuse_unused(options, (*places, "--world"), why, where=options.shrink)
    if step is None:
        return _plant_specimens(options)
    only = [name.strip() for name in options.only.split(",") if name]
    if options.list:
        from pipeproof.wings.mutate import MUTANTS, choose

        Terminal().say("\n".join(f"{name:<24}{MUTANTS[name].summary}" for name in choose(only)))
        return 0
    setting = setting_of(options)
    from pipeproof.commands.step_commands import mutate_own

    return mutate_own(step, setting, only=only)


def _plant_specimens(options: argparse.Namespace) -> int:
    from pipeproof.commands.catalogue import shrink_all, try_all
    from pipeproof.wings.specimens.choice import choose, load
    from pipeproof.wings.specimens.tables import listing

    setting, own = setting_of(options), [] if options.plugin is None else load(options.plugin)
    simulated = setting.simulation is not None
    if options.list:
        usual = own or ([] if simulated else _all_specimens())
        listed = choose(options.only, otherwise=usual, device=AUTO, simulated=True)
        Terminal().say(listing(listed, width=Terminal().width))
        return 0
    names = choose(options.only, otherwise=own, device=options.device, simulated=simulated, shrinks=options.shrink)
    schedules = schedule_names(options.schedule) if options.schedule else []
    check_count("--seed", options.seed, least=0, most=MOST_SEED)
    if options.shrink:
        return shrink_all(names, setting, seed=options.seed)
    transport = None if options.transport is None else transport_of(options.transport)
    return try_all(names, schedules, setting, final_only=options.final_only, transport=transport)
