"""``validate --bench``: a small step of each of some configs, which take turns on real ranks, beside the first."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pipeproof.commands.ending import NO_VERDICT, WRONG
from pipeproof.commands.option_parser import add, refuse_unused, whole
from pipeproof.commands.selection import device_of, tell_notes
from pipeproof.commands.work import Work, work_of
from pipeproof.own.case import Case, CaseError
from pipeproof.own.config import read_config
from pipeproof.own.runtimes import OWN
from pipeproof.own.timings import FEWEST, Timing
from pipeproof.pipeline.sizes import check_count, some
from pipeproof.reports.terminal import Terminal
from pipeproof.reports.timing_table import as_data, compare_medians, timing_table
from pipeproof.worlds.accelerator import CPU
from pipeproof.worlds.launcher import describe_sharing, start_fork_server, warn_of_crowd
from pipeproof.worlds.rank_report import RankFailed

if TYPE_CHECKING:
    from pipeproof.worlds.world import World

_MOST = 10_000  # rounds
_TIMED = frozenset("--bench --rounds --device --timeout --json --quiet --verbose --color".split())


def add_bench(parser: argparse.ArgumentParser) -> None:
    """What is timed in place of being judged."""
    files = (
        "say how long a small step of each of these configs takes, and how much memory; they take turns, and nothing "
        "is judged, except that a loss that is not finite ends with 1"
    )
    add(parser, "--bench", "FILE", files, nargs="+", default=[], rare=True)
    often = "with --bench: how often each takes its turn, after one that does not count"
    add(parser, "--rounds", "N", often, whole, default=5, rare=True)


def bench_configs(options: argparse.Namespace) -> int:
    """Time a step of each config, beside the first: 1 where a loss is not finite, 3 where ranks failed."""
    refuse_unused(options, sorted(options.given - _TIMED), "with --bench, which times configs")
    rounds = check_count("--rounds", options.rounds, least=FEWEST, most=_MOST)
    configs = [read_config(path) for path in options.bench]
    wanted = [(config, work_of(config)) for config in configs]
    for config, work in wanted:
        if isinstance(work, Case) and work.runtime != OWN:
            raise CaseError(f"{config.name}: runtime {work.runtime} is not timed here: expected {OWN}; leave it out")
        if isinstance(work, Case) and work.specimen:
            planted = f"specimen {work.specimen} is a planted fault"
            raise CaseError(f"{config.name}: {planted}: expected a right step; leave it out")
    start_fork_server()
    from pipeproof.commands.campaign import Setting

    setting, terminal = Setting.of(options, device=device_of(options, configs)), Terminal()
    device = setting.chosen_device
    works = [replace(work, device=device) if isinstance(work, Case) else work for _, work in wanted]
    timings = [Timing(config.name, *_describe_work(work)) for config, work in zip(configs, works, strict=True)]
    with setting.world() as world:
        for config, work in wanted:
            tell_notes(config, work)
        if many := warn_of_crowd(max(work.ranks for work in works)):
            terminal.detail(many)
        failed = False
        with setting.outputs.asked:
            try:
                _take_turns(works, timings, world, rounds)
            except RankFailed as failure:
                failed = True
                terminal.say(str(failure))
        done = min(len(one.rounds) for one in timings)
        timings = [replace(one, rounds=one.rounds[:done]) for one in timings]  # of a round that was not whole, none
        if done:
            _tell(terminal, timings, device)
        strange = [one for one in timings if one.strange]
        for one in strange:
            found = f"{len(one.strange)} of {some(one.losses, 'loss')} not finite, the first {one.strange[0]}"
            terminal.say(f"{one.name}: {found}; `pipeproof validate --config {one.name}` says where")
        vacuous = not done or not all(one.losses for one in timings)
        status = WRONG if strange else NO_VERDICT if failed or vacuous else 0
        return setting.outputs.finish(status, rounds=done, timings=[as_data(one, timings[0]) for one in timings])


def _take_turns(works: Sequence[Work], timings: list[Timing], world: "World", rounds: int) -> None:
    """Let each take its turn, in every round; the first round counts memory alone, and links and allocators warm up."""
    from pipeproof.own.timed_step import setup_case, take_turn
    from pipeproof.wings.primitives import setup_stack

    for number in range(rounds + 1):
        for k, work in enumerate(works):
            setup = partial(setup_case, case=work) if isinstance(work, Case) else partial(setup_stack, stack=work)
            with Terminal().progress(f"round {number} of {rounds}: {timings[k].name}"):
                turns = world.run(take_turn, setup, number == 0, ranks=work.ranks)
            timings[k] = timings[k].after(turns)


def _describe_work(work: Work) -> tuple[str, str]:
    """What is run, and what a step of it computes."""
    if isinstance(work, Case):
        model = f"{work.model} in {work.dtype}, {some(work.layers, 'layer')}, {some(work.microbatches, 'microbatch')}"
        return str(work), model + ", ragged" * work.ragged + ", unequal" * work.unequal
    model = "decoder with experts" if work.has_experts else "decoder"
    return f"stack {work}", f"{model}, {some(work.layers, 'layer')}, {some(work.microbatches, 'microbatch')}"


def _tell(terminal: Terminal, timings: Sequence[Timing], device: str) -> None:
    first, *others = timings
    terminal.say(timing_table(timings, terminal.width))
    for one in others:
        terminal.say("\n".join(compare_medians(first, one)))
    terminal.detail(
        f"{some(len(first.rounds), 'round')} each. step: the median of the slowest rank. spread: the slowest round to "
        "the fastest. memory: parameters and what a step allocates, at most, of the rank with most."
    )
    if device == CPU and (said := describe_sharing(max(len(one.bytes) for one in timings))):
        terminal.detail(f"{said}.")
    over, of = (" over gloo on a CPU", "GPUs, or of ") if device == CPU else ("", "")
    terminal.detail(f"These are small steps{over}: their times say little of {of}large models.")
