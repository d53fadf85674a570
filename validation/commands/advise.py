"""``advise``: which kind of parallelism to add next, with the numbers, and the fastest layouts that fit."""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pipeproof.commands.ending import WRONG
from pipeproof.commands.option_parser import UsageError, add, add_flag, number, refuse_unused, whole
from pipeproof.commands.outputs import Outputs, add_file, add_outputs
from pipeproof.commands.work import case_of
from pipeproof.own.config import Config
from pipeproof.pipeline.files import read_json
from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import LOOPED
from pipeproof.pipeline.sizes import check_count, some
from pipeproof.reports.terminal import Terminal
from pipeproof.wings import is_present
from pipeproof.wings.advise import (
    ACCELERATORS,
    MODELS,
    UNITS,
    Advice,
    Allowed,
    Choice,
    Cluster,
    Experts,
    Found,
    Job,
    Layout,
    Outcome,
    Recompute,
    Step,
    Transformer,
    accelerator_named,
    advice_page,
    describe_request,
    find_layouts,
    find_path,
    known,
    model_named,
    model_of_config,
    stages_of,
    tables,
)
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
_WITH_PRIMITIVE = {"--primitive", "--json", "--quiet", "--verbose", "--color"}


def add_advise_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command."""
    about = "which kind of parallelism to add next, and the fastest layouts that fit, with the numbers"
    parser = commands.add_parser("advise", help=about)
    model = parser.add_argument_group("the model")
    add(model, "--model", "NAME", "a name that --list has, or a config.json of Hugging Face", known=MODELS)
    for name, says in _SIZES.items():
        add(model, f"--{name}", "N", says, whole, rare=name in ("vocab", "experts"))
    job = parser.add_argument_group("the job")
    add(job, "--batch", "N", "sequences a step", whole, default=512)
    add(job, "--sequence", "N", "tokens of a sequence", whole, default=4096)
    cluster = parser.add_argument_group("the cluster")
    add(cluster, "--devices", "N", "how many devices there are", whole, default=8)
    add(cluster, "--per-node", "N", "how many devices are in a node", whole, default=8)
    kinds = f"what each is: one of {', '.join(ACCELERATORS)}"
    add(cluster, "--accelerator", "NAME", kinds, known=ACCELERATORS, default="h100")
    for option, unit, what in (
        ("--memory", "GIB", "memory of a device"),
        ("--flops", "TFLOPS", "speed of a device in bf16"),
        ("--link", "GB/S", "bandwidth between two devices of a node, in one direction"),
        ("--network", "GB/S", "bandwidth from a device to other nodes, in one direction"),
    ):
        add(cluster, option, unit, f"{what} (default: the device's, as --list has it)", number, rare=True)
    limits = parser.add_argument_group("what may be used")
    add(limits, "--zero", None, "the highest stage of ZeRO", whole, choices=(0, 1, 2, 3), default=3, rare=True)
    again = "whether activations may be recomputed"
    add(limits, "--recompute", None, again, choices=("allowed", "never"), default="allowed", rare=True)
    add(limits, "--most", "N", "how many layouts are listed", whole, default=3, rare=True)
    add_flag(parser, "--list", says="the models and devices that are known, and their figures")
    if is_present("primitives"):
        each = "all, or some kinds of parallelism: what each saves and costs, and how it was validated; nothing else"
        add(parser, "--primitive", "NAME,...", each)
    add_file(parser, "--write", "keep the layout to begin with in this file, for validate --config and --bench")
    chosen = "with --write: the K-th of the listed layouts instead; 1 is the fastest"
    add(parser, "--layout", "K", chosen, whole)
    add_outputs(parser, what="steps and layouts", page=True)
    parser.set_defaults(run=_advise)


def _advise(options: argparse.Namespace) -> int:
    refuse_unused(options, options.given - _WITH_LIST, "with --list", where=options.list)
    if options.list:
        Terminal().say(known(Terminal().width))
        return 0
    if getattr(options, "primitive", None) is not None:
        from pipeproof.commands.primitive_commands import describe_primitives

        refuse_unused(options, sorted(options.given - _WITH_PRIMITIVE), "with --primitive")
        return describe_primitives(options.primitive, Outputs.of(options))
    refuse_unused(options, ["--layout"], "without --write", where=options.write is None)
    job = Job(
        _model(options),
        check_count("batch", options.batch, most=_MOST_BATCH),
        check_count("sequence", options.sequence, most=_MOST_SEQUENCE),
    )
    given = {name: unit * value for name, unit in UNITS.items() if (value := getattr(options, name)) is not None}
    device = replace(accelerator_named(options.accelerator), **given)
    cluster = Cluster(device, options.devices, options.per_node)
    allowed = Allowed(zero=tuple(range(options.zero + 1)))
    if options.recompute == "never":
        allowed = replace(allowed, recompute=(Recompute.NONE,))
    most = check_count("most", options.most, most=100)
    if options.layout is not None:
        check_count("--layout", options.layout, most=most)
    with Outputs.of(options).open("advise") as files:
        with Terminal().progress("advise"):
            steps, found = find_path(job, cluster, allowed), find_layouts(job, cluster, allowed, most=most)
        if options.layout is not None and found.best and options.layout > len(found.best):
            listed = some(len(found.best), "layout")
            raise UsageError(f"--layout {options.layout}: only {listed} can be listed; give one of these")
        ending, asked = _ending(found, steps, job, cluster), describe_request(job, cluster)
        Terminal().detail("\n".join(asked))
        for text in tables(steps, found.best, job, cluster, Terminal().width):
            Terminal().detail(f"\n{text}")
        Terminal().detail("")
        Terminal().say(" ".join(filter(None, ending)))
        if found.best:
            own = options.layout is not None
            _write(found.best[options.layout - 1].layout if own else _last_taken(steps), job, files.files["write"])
        elif options.write is not None:
            Terminal().detail(f"{options.write}: not written, for there is no layout to begin with")
        advice = Advice(job, cluster, steps, found.best, asked, *ending, allowed.room)
        return files.finish(
            0 if found.best else WRONG,
            page=partial(advice_page, advice),
            steps=[
                {"add": step.name, "outcome": str(step.outcome), "reason": step.reason, **_layout(step.choice)}
                for step in steps
            ],
            layouts=[_data(choice, cluster) for choice in found.best],
            next=ending.line or None,
        )


def _write(layout: Layout, job: Job, file: OutputFile) -> None:
    file.write(_config(layout, job).text())
    if file.name:
        schedule = f", {layout.schedule}" if layout.pp > 1 else ""
        runs = f"pipeproof validate --config {shlex.quote(file.name)}"
        Terminal().detail(f"{file.name}: {layout.words}{schedule}; {runs} runs it small")


def _config(layout: Layout, job: Job) -> Config:
    """What ``validate --config`` runs small."""
    split = [len(layers) for layers, _ in stages_of(layout.pipeline, job.model.layers)]
    sizes = {"microbatches": layout.microbatches(job), "split": split, "sequence": job.sequence}
    name = Path(job.model.name).name if job.model.name.endswith(".json") else job.model.name  # without its folders
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
        Experts(check_count("experts", given["experts"], least=2, most=1 << 16), 2, width)
        if "experts" in given
        else None
    )
    vocabulary = given.get("vocab", _VOCABULARY)
    name = ", ".join(f"{size} {count}" for size, count in given.items())
    return Transformer(name, given["layers"], hidden, given["heads"], vocabulary, width, experts=experts)


class _Conclusion(NamedTuple):
    """How it ends: what was found, what to do next, and the line to type for that; the last two may be empty."""

    said: str
    do: str = ""
    line: str = ""


def _ending(found: Found, steps: Sequence[Step], job: Job, cluster: Cluster) -> _Conclusion:
    """Where to begin and what to type next, or why there is nothing to begin with."""
    if found.best:
        return _next(_last_taken(steps), job)
    if found.least is None:
        return _Conclusion(
            f"No layout is legal: use another number of devices than {cluster.devices:,}, or another batch."
        )
    return _Conclusion("Nothing fits: use more devices, or devices with more memory.")


def _last_taken(steps: Sequence[Step]) -> Layout:
    """Where the steps led: what is faster than that by little has more that can go wrong."""
    return next(step.choice.layout for step in reversed(steps) if step.choice and step.outcome is Outcome.TAKEN)


def _next(layout: Layout, job: Job) -> _Conclusion:
    """To begin with ``layout``."""
    from pipeproof.wings.primitives import not_stacked, stack_of

    begin, config = f"Begin with {layout.words}.", _config(layout, job)
    if (stack := stack_of(config)) is not None:
        left = not_stacked(config)
        without = f" (not run: {'; '.join(left)})" if left else ""
        return _Conclusion(begin, f"Validate a small one of its kind{without}:", stack.replay)
    if layout.pp == 1:
        return _Conclusion(begin, "Validate one step of your own:", "pipeproof init")
    case = case_of(config)
    looped = f" --virtual {layout.virtual} --layers {sum(case.split)}" if case.schedule in LOOPED else ""
    line = f"pipeproof validate --schedule {case.schedule} --ranks {case.ranks}{looped}"
    return _Conclusion(begin, "Validate its schedule, small:", f"{line} --microbatches {case.microbatches}")


def _layout(choice: Choice | None) -> dict[str, object]:
    """A layout, and what it holds in bytes."""
    if choice is None:
        return {}
    held = {**asdict(choice.footprint), "total": choice.footprint.total}
    return {"layout": asdict(choice.layout), "bytes": held}


def _data(choice: Choice, cluster: Cluster) -> dict[str, object]:
    """A layout with bytes and seconds."""
    time = {**asdict(choice.time), "total": choice.time.total, "utilization": choice.time.utilization(cluster)}
    return {**_layout(choice), "seconds": time}
