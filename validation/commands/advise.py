"""``advise``: which kind of parallelism to add next, with the numbers, and the fastest layouts that fit."""

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pipeproof.cases.config import Config
from pipeproof.cases.work import case_of, not_stacked, stack_of
from pipeproof.commands.ending import WRONG
from pipeproof.commands.option_parser import UsageError, add_count, number, offers, whole, without_effect
from pipeproof.commands.outputs import Outputs, add_file, add_outputs
from pipeproof.pipeline.files import read_json
from pipeproof.pipeline.layouts.cluster import ACCELERATORS, GIB, UNITS, Accelerator, Cluster, accelerator_named
from pipeproof.pipeline.layouts.footprint import Footprint
from pipeproof.pipeline.layouts.layout import Job, Layout, Recompute
from pipeproof.pipeline.layouts.path import Outcome, Step, path
from pipeproof.pipeline.layouts.pipelined import stages_of
from pipeproof.pipeline.layouts.search import Allowed, Choice, Found, search
from pipeproof.pipeline.layouts.transformer import MODELS, Experts, Transformer, model_named, model_of_config
from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import LOOPED
from pipeproof.pipeline.sizes import counted, some, three_digits
from pipeproof.reports.columns import Column, table
from pipeproof.reports.page.advice import Advice, advice_page
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.output_file import OutputFile

_MOST_BATCH = 1 << 24
_MOST_SEQUENCE = 1 << 24
_VOCABULARY = 128_256
_SIZES = {
    "layers": "how many layers; with --hidden and --heads it describes a model of your own, without --model",
    "hidden": "the width of a layer",
    "heads": "attention heads of a layer",
    "vocab": f"tokens in the vocabulary (default {_VOCABULARY})",
    "experts": "experts of a layer, of which each token visits 2 (default: none)",
}
_WITH_LIST = {"--list", "--quiet", "--verbose", "--color"}
_ASSUMED = (
    "bf16, Adam in fp32, gradients summed in fp32, attention that keeps no scores",
    "Use times to compare layouts, not as a forecast.",
)


def add_advise_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command."""
    about = "which kind of parallelism to add next, and the fastest layouts that fit, with the numbers"
    parser = commands.add_parser("advise", help=about)
    model = parser.add_argument_group("the model")
    offers(
        model.add_argument("--model", metavar="NAME", help="a name that --list has, or a config.json of Hugging Face"),
        MODELS,
    )
    for name, says in _SIZES.items():
        add_count(model, f"--{name}", "N", says)
    job = parser.add_argument_group("the job")
    add_count(job, "--batch", "N", "sequences a step", default=512)
    add_count(job, "--sequence", "N", "tokens of a sequence", default=4096)
    _add_cluster(parser.add_argument_group("the cluster"))
    limits = parser.add_argument_group("what may be used")
    limits.add_argument("--zero", type=whole, choices=(0, 1, 2, 3), default=3, help="the highest stage of ZeRO")
    limits.add_argument(
        "--recompute", choices=("allowed", "never"), default="allowed", help="whether activations may be recomputed"
    )
    add_count(limits, "--most", "N", "how many layouts are listed", default=3)
    parser.add_argument("--list", action="store_true", help="the models and devices that are known, and their figures")
    add_file(parser, "--write", "keep the layout to begin with in this file, a config for validate --config and bench")
    add_count(parser, "--layout", "K", "with --write: the K-th of the listed layouts instead; 1 is the fastest")
    add_outputs(parser, what="steps and layouts", page=True)
    parser.set_defaults(run=_advise)


def _add_cluster(group: "argparse._ArgumentGroup") -> None:
    add_count(group, "--devices", "N", "how many devices there are", default=8)
    add_count(group, "--per-node", "N", "how many devices are in a node", default=8)
    known = f"one of {', '.join(ACCELERATORS)}"
    offers(group.add_argument("--device", default="h100", metavar="NAME", help=known), ACCELERATORS)
    for option, unit, what in (
        ("--memory", "GIB", "memory of a device"),
        ("--flops", "TFLOPS", "speed of a device in bf16"),
        ("--link", "GB/S", "bandwidth between two devices of a node, in one direction"),
        ("--network", "GB/S", "bandwidth from a device to other nodes, in one direction"),
    ):
        group.add_argument(option, type=number, metavar=unit, help=f"{what} (default: the device's, as --list has it)")


def _advise(options: argparse.Namespace) -> int:
    without_effect(options, options.given - _WITH_LIST if options.list else (), "with --list")
    if options.list:
        Terminal().say(_known())
        return 0
    without_effect(options, ["--layout"] if options.write is None else (), "without --write")
    job = Job(
        _model(options),
        counted("batch", options.batch, most=_MOST_BATCH),
        counted("sequence", options.sequence, most=_MOST_SEQUENCE),
    )
    cluster = Cluster(_device(options), options.devices, options.per_node)
    allowed = Allowed(zero=tuple(range(options.zero + 1)))
    if options.recompute == "never":
        allowed = replace(allowed, recompute=(Recompute.NONE,))
    most = counted("most", options.most, most=100)
    if options.layout is not None:
        counted("--layout", options.layout, most=most)
    with Outputs.of(options).opened("advise") as files:
        with Terminal().progress("advise"):
            steps, found = path(job, cluster, allowed), search(job, cluster, allowed, most=most)
        chosen = _chosen(found, steps, options.layout)
        ending = _ending(found, steps, job, cluster)
        Terminal().detail("\n".join(_asked(job, cluster)))
        Terminal().detail("\n" + table(_STEPS, list(map(_step, steps)), Terminal().width) + "\n")
        Terminal().detail(table(_MEMORY, list(_memory(steps)), Terminal().width) + "\n")
        if found.best:
            rows = [_row(choice, job, cluster) for choice in found.best]
            Terminal().detail(table(_LAYOUTS, rows, Terminal().width) + "\n")
        Terminal().say(" ".join(filter(None, ending)))
        if chosen is not None:
            _write(_config(chosen, job), chosen, files.write)
        elif options.write is not None:
            Terminal().detail(f"{options.write}: not written, for there is no layout to begin with")
        advice = Advice(job, cluster, steps, found.best, _asked(job, cluster), *ending, allowed.room)
        return files.finish(
            0 if found.best else WRONG,
            page=partial(advice_page, advice),
            steps=[_step_data(step) for step in steps],
            layouts=[_data(choice, cluster) for choice in found.best],
            next=ending.line or None,
        )


def _chosen(found: Found, steps: Sequence[Step], number: int | None) -> Layout | None:
    """The layout to begin with, or the one with this ``number`` in the list; None where nothing fits."""
    if not found.best:
        return None
    if number is None:
        return _last_taken(steps)
    if number > len(found.best):
        raise UsageError(f"--layout {number}: only {some(len(found.best), 'layout')} can be listed; give one of these")
    return found.best[number - 1].layout


def _write(config: Config, layout: Layout, file: OutputFile) -> None:
    file.write(config.text())
    if file.name:
        schedule = f", {layout.schedule}" if layout.pp > 1 else ""
        runs = f"pipeproof validate --config {shlex.quote(file.name)}"
        Terminal().detail(f"{file.name}: {layout.words}{schedule}; {runs} runs it small")


def _config(layout: Layout, job: Job) -> Config:
    """What ``validate --config`` runs small."""
    split = [len(layers) for layers, _ in stages_of(layout.pipeline, job.model.layers)]
    sizes = {"microbatches": layout.microbatches(job), "split": split, "sequence": job.sequence}
    name = Path(job.model.name).name if job.model.name.endswith(".json") else job.model.name  # nobody else's folders
    return Config({**asdict(layout), **sizes, "model": name, "dtype": "bf16"})


def _model(options: argparse.Namespace) -> Transformer:
    given = {name: value for name in _SIZES if (value := getattr(options, name)) is not None}
    if options.model is None:
        return _by_hand(given)
    if given:
        raise UsageError(f"--model with --{next(iter(given))}: expected one of the two; leave one out")
    if not options.model.endswith(".json"):
        if Path(options.model).exists():
            raise UsageError(f"--model {options.model}: expected a name that --list has, or a file that ends in .json")
        return model_named(options.model)
    data = read_json(options.model, expected="the config.json of a decoder")
    try:
        return model_of_config(data, name=options.model)
    except ScheduleError as error:
        raise UsageError(f"{options.model}: {error}") from None


def _by_hand(given: Mapping[str, int]) -> Transformer:
    """A gated decoder, whose inner width is 8/3 of hidden, in steps of 256."""
    missing = [name for name in ("layers", "hidden", "heads") if name not in given]
    if missing:
        raise UsageError(
            f"no model: give --model NAME, out of pipeproof advise --list, or --{' and --'.join(missing)} of your own"
        )
    hidden = given["hidden"]
    width = -(-8 * hidden // (3 * 256)) * 256
    experts = (
        Experts(counted("experts", given["experts"], least=2, most=1 << 16), 2, width) if "experts" in given else None
    )
    vocabulary = given.get("vocab", _VOCABULARY)
    name = ", ".join(f"{size} {count}" for size, count in given.items())
    return Transformer(name, given["layers"], hidden, given["heads"], vocabulary, width, experts=experts)


def _device(options: argparse.Namespace) -> Accelerator:
    given = {name: unit * value for name, unit in UNITS.items() if (value := getattr(options, name)) is not None}
    return replace(accelerator_named(options.device), **given)


def _known() -> str:
    models = [
        (
            model.name,
            _size(model.parameters),
            _size(model.active_parameters),
            str(model.layers),
            str(model.hidden),
        )
        for model in MODELS.values()
    ]
    devices = [
        (one.name, f"{one.flops / 1e12:g}", f"{one.memory / GIB:.0f}", f"{one.link / 1e9:g}", f"{one.network / 1e9:g}")
        for one in ACCELERATORS.values()
    ]
    titles = (
        ("model", "parameters", "active", "layers", "hidden"),
        ("device", "TFLOP/s", "GiB", "link GB/s", "network GB/s"),
    )
    return "\n\n".join(
        table(
            [Column(name, right=k > 0, drop=max(0, k - 1)) for k, name in enumerate(names)],
            rows,
            Terminal().width,
        )
        for names, rows in zip(titles, (models, devices), strict=True)
    )


def _size(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def _asked(job: Job, cluster: Cluster) -> tuple[str, ...]:
    model, device = job.model, cluster.device
    memory = three_digits(device.memory / GIB)
    active = f", {_size(model.active_parameters)} of them active" if model.experts else ""
    return (
        f"{model.name}: {_size(model.parameters)} parameters{active}; {model.layers} layers",
        f"a batch of {job.batch:,} x {job.sequence:,} tokens",
        f"{cluster.devices:,} {device.name}, {cluster.per_node} in a node, {memory} GiB each",
        *_ASSUMED,
    )


_STEPS = [
    Column("add"),
    Column(""),
    Column("because"),
    Column("time", right=True),
    Column("layout"),
]
_MEMORY = [
    Column("GiB"),
    Column("weights", right=True),
    Column("gradients", right=True),
    Column("optimizer", right=True),
    Column("activations", right=True),
    Column("in all", right=True),
]


def _step(step: Step) -> tuple[str, ...]:
    if step.choice is None:
        return (step.name, step.outcome, step.reason, "", "")
    time = f"{three_digits(step.choice.time.total)} s"
    return (step.name, step.outcome, step.reason, time, step.choice.layout.words)


def _memory(steps: Sequence[Step]) -> Iterator[tuple[str, ...]]:
    for name, held in ((step.name, step.choice.footprint) for step in steps if step.choice is not None):
        parts = (held.weights, held.gradients, held.optimizer, held.activations, held.total)
        yield (name, *(f"{part / GIB:,.{0 if part > 100 * GIB else 1}f}" for part in parts))


_LAYOUTS = [
    Column("layout"),
    Column("schedule", drop=1),
    Column("microbatches", right=True, drop=4),
    Column("GiB", right=True, drop=2),
    Column("bubble", right=True, drop=5),
    Column("communication", right=True, drop=6),
    Column("time", right=True),
    Column("MFU", right=True, drop=3),
]


class _Ending(NamedTuple):
    """How it ends: what was found, what to do next, and the line to type for that; the last two may be empty."""

    said: str
    do: str = ""
    line: str = ""


def _ending(found: Found, steps: Sequence[Step], job: Job, cluster: Cluster) -> _Ending:
    """Where to begin and what to type next, or why there is nothing to begin with."""
    if found.best:
        return _next(_last_taken(steps), job)
    if found.least is None:
        return _Ending(f"No layout is legal: use another number of devices than {cluster.devices:,}, or another batch.")
    return _Ending("Nothing fits: use more devices, or devices with more memory.")


def _last_taken(steps: Sequence[Step]) -> Layout:
    """Where the steps led: what is faster than that by little has more that can go wrong."""
    return next(step.choice.layout for step in reversed(steps) if step.choice and step.outcome is Outcome.TAKEN)


def _row(choice: Choice, job: Job, cluster: Cluster) -> tuple[str, ...]:
    layout, time = choice.layout, choice.time
    chunks = f" V={layout.virtual}" if layout.schedule in LOOPED and layout.virtual > 1 else ""
    return (
        layout.words,
        f"{layout.schedule}{chunks}" if layout.pp > 1 else "",
        f"{layout.microbatches(job)} of {layout.micro}",
        f"{choice.footprint.total / GIB:.1f}",
        f"{time.bubble / time.total:.1%}",
        f"{time.communication / time.total:.1%}",
        f"{three_digits(time.total)} s",
        f"{time.utilization(cluster):.1%}",
    )


def _next(layout: Layout, job: Job) -> _Ending:
    """To begin with ``layout``."""
    begin, config = f"Begin with {layout.words}.", _config(layout, job)
    if (stack := stack_of(config)) is not None:
        left = not_stacked(config)
        without = f" (not run: {'; '.join(left)})" if left else ""
        return _Ending(begin, f"Validate a small one of its kind{without}:", stack.replay)
    if layout.pp == 1:
        return _Ending(begin, "Validate one step of your own:", "pipeproof init")
    case = case_of(config)
    looped = f" --virtual {layout.virtual} --layers {sum(case.split)}" if case.schedule in LOOPED else ""
    line = f"pipeproof validate --schedule {case.schedule} --ranks {case.ranks}{looped}"
    return _Ending(begin, "Validate its schedule, small:", f"{line} --microbatches {case.microbatches}")


def _held(held: Footprint) -> dict[str, float]:
    return {**asdict(held), "total": held.total}


def _data(choice: Choice, cluster: Cluster) -> dict[str, object]:
    """A layout with bytes and seconds."""
    time = {**asdict(choice.time), "total": choice.time.total, "utilization": choice.time.utilization(cluster)}
    return {"layout": asdict(choice.layout), "bytes": _held(choice.footprint), "seconds": time}


def _step_data(step: Step) -> dict[str, object]:
    choice = step.choice
    more = {"layout": asdict(choice.layout), "bytes": _held(choice.footprint)} if choice else {}
    return {"add": step.name, "outcome": str(step.outcome), "reason": step.reason, **more}
