"""``advise``: which kind of parallelism to add next, with the numbers, and the fastest layouts that fit."""

import argparse
import shlex
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

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
from pipeproof.wings import advise, is_present

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
    add(model, "--model", "NAME", "a name that --list has, or a config.json of Hugging Face", known=advise.MODELS)
    for name, says in _SIZES.items():
        add(model, f"--{name}", "N", says, whole, rare=name in ("vocab", "experts"))
    job = parser.add_argument_group("the job")
    add(job, "--batch", "N", "sequences a step", whole, default=512)
    add(job, "--sequence", "N", "tokens of a sequence", whole, default=4096)
    cluster = parser.add_argument_group("the cluster")
    add(cluster, "--devices", "N", "how many devices there are", whole, default=8)
    add(cluster, "--per-node", "N", "how many devices are in a node", whole, default=8)
    kinds = f"what each is: one of {', '.join(advise.ACCELERATORS)}"
    add(cluster, "--accelerator", "NAME", kinds, known=advise.ACCELERATORS, default="h100")
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
        Terminal().say(advise.known(Terminal().width))
        return 0
    if getattr(options, "primitive", None) is not None:
        from pipeproof.commands.primitive_commands import describe_primitives

        refuse_unused(options, sorted(options.given - _WITH_PRIMITIVE), "with --primitive")
        return describe_primitives(options.primitive, options.outputs)
    refuse_unused(options, ["--layout"], "without --write", where=options.write is None)
    job, cluster, allowed = _asked(options)
    most = check_count("most", options.most, most=100)
    if options.layout is not None:
        check_count("--layout", options.layout, most=most)
    with Terminal().progress("advise"):
        steps, found = (
            advise.find_path(job, cluster, allowed),
            advise.find_layouts(job, cluster, allowed, most=most),
        )
    if options.layout is not None and found.best and options.layout > len(found.best):
        listed = some(len(found.best), "layout")
        raise UsageError(f"--layout {options.layout}: only {listed} can be listed; give one of these")
    # Where the steps led: what is faster than that by little has more that can go wrong.
    taken = [step.choice.layout for step in steps if step.choice and step.outcome is advise.Outcome.TAKEN]
    if found.best:
        ending = _next(taken[-1], job)
    elif found.least is None:
        few = f"use another number of devices than {cluster.devices:,}, or another batch."
        ending = f"No layout is legal: {few}", "", ""
    else:
        ending = "Nothing fits: use more devices, or devices with more memory.", "", ""
    asked, terminal = advise.describe_request(job, cluster), Terminal()
    terminal.detail("\n".join(asked))
    for text in advise.tables(steps, found.best, job, cluster, terminal.width):
        terminal.detail(f"\n{text}")
    terminal.detail("")
    terminal.say(" ".join(filter(None, ending)))
    outputs: Outputs = options.outputs
    file = outputs.files["write"]
    if found.best:
        layout = taken[-1] if options.layout is None else found.best[options.layout - 1].layout
        file.write(_config(layout, job).text())
        if file.name:
            schedule = f", {layout.schedule}" if layout.pp > 1 else ""
            runs = f"pipeproof validate --config {shlex.quote(file.name)}"
            terminal.detail(f"{file.name}: {layout.words}{schedule}; {runs} runs it small")
    elif options.write is not None:
        terminal.detail(f"{options.write}: not written, for there is no layout to begin with")
    return outputs.finish(
        0 if found.best else WRONG,
        page=partial(advise.advice_page, advise.Advice(job, cluster, steps, found.best, asked, *ending, allowed.room)),
        steps=[
            {"add": one.name, "outcome": str(one.outcome), "reason": one.reason, **_layout(one.choice)} for one in steps
        ],
        layouts=[{**_layout(one), "seconds": _seconds(one, cluster)} for one in found.best],
        next=ending[2] or None,
    )


def _asked(options: argparse.Namespace) -> tuple[advise.Job, advise.Cluster, advise.Allowed]:
    job = advise.Job(
        _model(options),
        check_count("batch", options.batch, most=_MOST_BATCH),
        check_count("sequence", options.sequence, most=_MOST_SEQUENCE),
    )
    given = {name: unit * value for name, unit in advise.UNITS.items() if (value := getattr(options, name)) is not None}
    device = replace(advise.accelerator_named(options.accelerator), **given)
    cluster = advise.Cluster(device, options.devices, options.per_node)
    allowed = advise.Allowed(zero=tuple(range(options.zero + 1)))
    if options.recompute == "never":
        allowed = replace(allowed, recompute=(advise.Recompute.NONE,))
    return job, cluster, allowed


def _config(layout: advise.Layout, job: advise.Job) -> Config:
    """What ``validate --config`` runs small."""
    split = [len(layers) for layers, _ in advise.stages_of(layout.pipeline, job.model.layers)]
    sizes = {"microbatches": layout.microbatches(job), "split": split, "sequence": job.sequence}
    name = Path(job.model.name).name if job.model.name.endswith(".json") else job.model.name  # without its folders
    return Config({**asdict(layout), **sizes, "model": name, "dtype": "bf16"})


def _model(options: argparse.Namespace) -> advise.Transformer:
    """The model that is named, or described: a gated decoder, whose inner width is 8/3 of hidden, in steps of 256."""
    given = {name: value for name in _SIZES if (value := getattr(options, name)) is not None}
    if options.model is not None and given:
        raise UsageError(f"--model with --{next(iter(given))}: expected one of the two; leave one out")
    if options.model is None:
        if missing := [name for name in ("layers", "hidden", "heads") if name not in given]:
            own = f"--{' and --'.join(missing)} of your own"
            raise UsageError(f"no model: give --model NAME, out of pipeproof advise --list, or {own}")
        width = -(-8 * given["hidden"] // (3 * 256)) * 256
        count = given.get("experts")
        experts = (
            None if count is None else advise.Experts(check_count("experts", count, least=2, most=1 << 16), 2, width)
        )
        name, vocabulary = ", ".join(f"{size} {one}" for size, one in given.items()), given.get("vocab", _VOCABULARY)
        sizes = (given["layers"], given["hidden"], given["heads"], vocabulary, width)
        return advise.Transformer(name, *sizes, experts=experts)
    if options.model.endswith(".json"):
        data = read_json(options.model, expected="the config.json of a decoder")
        try:
            return advise.model_of_config(data, name=options.model)
        except ScheduleError as error:
            raise UsageError(f"{options.model}: {error}") from None
    if Path(options.model).exists():
        raise UsageError(f"--model {options.model}: expected a name that --list has, or a file that ends in .json")
    return advise.model_named(options.model)


def _next(layout: advise.Layout, job: advise.Job) -> tuple[str, str, str]:
    """To begin with ``layout``: what was found, what to do next, and the line to type for that."""
    from pipeproof.wings.primitives import not_stacked, stack_of

    begin, config = f"Begin with {layout.words}.", _config(layout, job)
    if (stack := stack_of(config)) is not None:
        left = not_stacked(config)
        without = f" (not run: {'; '.join(left)})" if left else ""
        return begin, f"Validate a small one of its kind{without}:", stack.replay
    if layout.pp == 1:
        return begin, "Validate one step of your own:", "pipeproof init"
    case = case_of(config)
    looped = f" --virtual {layout.virtual} --layers {sum(case.split)}" if case.schedule in LOOPED else ""
    line = f"pipeproof validate --schedule {case.schedule} --ranks {case.ranks}{looped}"
    return begin, "Validate its schedule, small:", f"{line} --microbatches {case.microbatches}"


def _layout(choice: advise.Choice | None) -> dict[str, object]:
    """A layout, and what it holds in bytes."""
    if choice is None:
        return {}
    held = {**asdict(choice.footprint), "total": choice.footprint.total}
    return {"layout": asdict(choice.layout), "bytes": held}


def _seconds(choice: advise.Choice, cluster: advise.Cluster) -> dict[str, float]:
    time = choice.time
    return {**asdict(time), "total": time.total, "utilization": time.utilization(cluster)}
