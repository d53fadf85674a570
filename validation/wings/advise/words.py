"""Advice in words and tables: what was asked for, what each step held in memory, and the layouts that fit."""

from collections.abc import Iterator, Sequence

from pipeproof.pipeline.schedules import LOOPED
from pipeproof.pipeline.sizes import three_digits
from pipeproof.reports.columns import Column, table
from pipeproof.wings.advise.cluster import ACCELERATORS, GIB, Cluster
from pipeproof.wings.advise.layout import Job
from pipeproof.wings.advise.path import Step
from pipeproof.wings.advise.search import Choice
from pipeproof.wings.advise.transformer import MODELS

_ASSUMED = (
    "bf16, Adam in fp32, gradients summed in fp32, attention that keeps no scores",
    "Use times to compare layouts, not as a forecast.",
)


def known(width: int | None) -> str:
    """The models and devices that are known, with their figures."""
    models = [
        (one.name, _size(one.parameters), _size(one.active_parameters), str(one.layers), str(one.hidden))
        for one in MODELS.values()
    ]
    devices = [
        (one.name, f"{one.flops / 1e12:g}", f"{one.memory / GIB:.0f}", f"{one.link / 1e9:g}", f"{one.network / 1e9:g}")
        for one in ACCELERATORS.values()
    ]
    tables = {
        ("model", "parameters", "active", "layers", "hidden"): models,
        ("device", "TFLOP/s", "GiB", "link GB/s", "network GB/s"): devices,
    }
    return "\n\n".join(
        table([Column(name, right=k > 0, drop=max(0, k - 1)) for k, name in enumerate(names)], rows, width)
        for names, rows in tables.items()
    )


def _size(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def describe_request(job: Job, cluster: Cluster) -> tuple[str, ...]:
    """The model and its sequences, and the devices and their memory, in words."""
    model, device = job.model, cluster.device
    memory = three_digits(device.memory / GIB)
    active = f", {_size(model.active_parameters)} of them active" if model.experts else ""
    return (
        f"{model.name}: {_size(model.parameters)} parameters{active}; {model.layers} layers",
        f"a batch of {job.batch:,} x {job.sequence:,} tokens",
        f"{cluster.devices:,} {device.name}, {cluster.per_node} in a node, {memory} GiB each",
        *_ASSUMED,
    )


_STEPS = [Column(name, right=name == "time") for name in ("add", "", "because", "time", "layout")]


_PARTS = ("weights", "gradients", "optimizer", "activations")


_MEMORY = [Column("GiB"), *(Column(name, right=True) for name in (*_PARTS, "in all"))]


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


def tables(
    steps: Sequence[Step], best: Sequence[Choice], job: Job, cluster: Cluster, width: int | None
) -> Iterator[str]:
    """What was tried, what of it was held in memory, and the layouts that fit."""
    rows: list[tuple[str, ...]] = []
    memory: list[tuple[str, ...]] = []
    for step in steps:
        if (choice := step.choice) is None:
            rows.append((step.name, step.outcome, step.reason, "", ""))
            continue
        time, held = f"{three_digits(choice.time.total)} s", choice.footprint
        rows.append((step.name, step.outcome, step.reason, time, choice.layout.words))
        parts = (*(getattr(held, part) for part in _PARTS), held.total)
        memory.append((step.name, *(f"{part / GIB:,.{0 if part > 100 * GIB else 1}f}" for part in parts)))
    layouts = [_row(choice, job, cluster) for choice in best]
    for columns, cells in ((_STEPS, rows), (_MEMORY, memory), (_LAYOUTS, layouts)):
        if cells or columns is not _LAYOUTS:
            yield table(columns, cells, width)


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
