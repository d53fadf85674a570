"""What the command ``bench`` does: configs take turns on real ranks, and are compared with the first."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipeproof.cases.case import Case
from pipeproof.cases.config import Config
from pipeproof.cases.primitives.stacks import Stack
from pipeproof.cases.timed_step import take_turn
from pipeproof.cases.timings import FEWEST, Ratio, Timing
from pipeproof.cases.work import Work
from pipeproof.commands.campaign import Setting, enough_ranks
from pipeproof.commands.ending import NO_VERDICT, WRONG
from pipeproof.commands.selection import tell_notes
from pipeproof.pipeline.sizes import some
from pipeproof.reports.columns import Column, table
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.accelerator import CPU
from pipeproof.worlds.processors import crowded, shared
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.world import World

_COLUMNS = (
    Column("config"),
    Column("ranks", right=True, drop=2),
    Column("step", right=True),
    Column("spread", right=True, drop=3),
    Column("ratio", right=True),
    Column("memory", right=True, drop=1),
    Column("runs", drop=4),
)
_SMALL = "These are small steps over gloo on a CPU: their times say little of GPUs, or of large models."
_SMALL_THERE = "These are small steps: their times say little of large models."


def bench(wanted: Sequence[tuple[Config, Work]], setting: Setting, *, rounds: int) -> int:
    """Time a step of each; returns the exit status: 1 where a loss is not finite, 3 where ranks failed."""
    terminal, device = Terminal(), setting.chosen_device
    works = [replace(work, device=device) if isinstance(work, Case) else work for _, work in wanted]
    timings = [Timing(config.name, *_told(work)) for (config, _), work in zip(wanted, works, strict=True)]
    with setting.outputs.opened("bench") as files, setting.world() as world:
        for config, work in wanted:
            tell_notes(config, work)
        if many := crowded(max(work.ranks for work in works)):
            terminal.detail(many)
        failed = False
        with files.asked:
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
        return files.finish(status, rounds=done, timings=[_data(one, timings[0]) for one in timings])


def _take_turns(works: Sequence[Work], timings: list[Timing], world: World, rounds: int) -> None:
    """Let each take its turn, in every round; the first round counts memory alone, and links and allocators warm up."""
    for number in range(rounds + 1):
        for k, work in enumerate(works):
            with Terminal().progress(f"round {number} of {rounds}: {timings[k].name}"), enough_ranks():
                turns = world.run(take_turn, work, number == 0, ranks=work.ranks)
            timings[k] = timings[k].after(turns)


def _told(work: Work) -> tuple[str, str]:
    """What is run, and what a step of it computes."""
    if isinstance(work, Stack):
        model = "decoder with experts" if work.has_experts else "decoder"
        return f"stack {work}", f"{model}, {some(work.layers, 'layer')}, {some(work.microbatches, 'microbatch')}"
    model = f"{work.model} in {work.dtype}, {some(work.layers, 'layer')}, {some(work.microbatches, 'microbatch')}"
    return str(work), model + ", ragged" * work.ragged + ", unequal" * work.unequal


def _tell(terminal: Terminal, timings: Sequence[Timing], device: str) -> None:
    first, *others = timings
    rows = [
        (
            one.name,
            str(len(one.bytes)),
            f"{one.seconds * 1e3:.2f} ms",
            f"{one.spread:.0%}",
            f"{Ratio(first, one).value:.2f}",
            f"{max(one.bytes, default=0) / 2**20:.2f} MiB",
            one.runs,
        )
        for one in timings
    ]
    terminal.say(table(_COLUMNS, rows, terminal.width))
    for one in others:
        terminal.say("\n".join(_compared(first, one)))
    terminal.detail("\n".join(_about(timings, device)))


def _compared(first: Timing, other: Timing) -> Iterator[str]:
    """How the other compares, in words."""
    ratio = Ratio(first, other)
    each = f"{min(ratio.rounds):.2f} to {max(ratio.rounds):.2f} in single rounds"
    if len(first.rounds) < FEWEST:
        yield f"{other.name} and {first.name}: too few rounds to compare"
    elif ratio.noise:
        known = f"no difference from {first.name} that can be told from noise"
        yield f"{other.name}: {known}: ratio {ratio.value:.2f}, {each}"
    else:
        yield f"{other.name} takes {ratio.value:.2f} times as long as {first.name}, {each}"
    if first.work != other.work:
        yield f"{other.name} has other work: {other.work}; {first.name}: {first.work}"


def _about(timings: Sequence[Timing], device: str) -> Iterator[str]:
    """What a reader must know of these numbers."""
    count, most = len(timings[0].rounds), max(len(one.bytes) for one in timings)
    yield (
        f"{some(count, 'round')} each. step: the median of the slowest rank. spread: the slowest round to the fastest. "
        "memory: parameters and what a step allocates, at most, of the rank with most."
    )
    if device == CPU and (said := shared(most)):
        yield f"{said}."
    yield _SMALL if device == CPU else _SMALL_THERE


def _data(one: Timing, first: Timing) -> dict[str, object]:
    compared = bool(one.rounds)
    ratio = Ratio(first, one)
    data = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(one).items()}
    return data | {
        "seconds": one.seconds if compared else None,
        "spread": one.spread if compared else None,
        "ratio": ratio.value if compared else None,
        "noise": ratio.noise if compared else None,
    }
