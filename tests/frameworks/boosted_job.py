"""A job that trains the tiny boosted model on ranks of its own."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

import pipeproof
from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.records.record import Record
from pipeproof.wings.adapters.colossalai_whole import as_launched
from pipeproof.wings.adapters.whole import Packed
from pipeproof.worlds.worker import RankContext
from tests.frameworks import tiny_colossal
from tests.frameworks.colossalai_faults import FAULTS
from tests.frameworks.jobs import Job
from tests.frameworks.left import left
from tests.frameworks.tiny_colossal import Layout

MICROBATCHES = 4


@contextmanager
def job_of(layout: Layout, fault: str = "", microbatches: int = 0, batches: int = 1) -> Iterator[Job]:
    """The booster, model and optimizer are what is made; so many batches of this rank's replica are in one."""
    microbatches = microbatches or layout.microbatches
    with as_launched("cpu"), ExitStack() as stack:
        if fault:
            FAULTS[fault].plant(stack)
        made = tiny_colossal.made(layout, microbatches)
        plugin = made[0].plugin
        mine = tiny_colossal.data_of(microbatches * batches * layout.dp)[
            plugin.pg_mesh.coordinate(plugin.dp_axis) :: layout.dp
        ]
        packed = Packed.of(mine)
        tensors = zip(*(packed.pack(one) for one in mine), strict=True)
        batch = packed.unpack([torch.cat(parts) for parts in tensors])
        yield Job(
            made,
            [batch],
            [{key: one.flip(-1) for key, one in batch.items()}],
            lambda by_itself: check_of(made, [batch], layout, **({"reference": itself(layout)} if by_itself else {})),
            lambda given: tiny_colossal.train_step(*made, iter(given)),
            partial(state, *made),
            lambda path: pipeproof.colossalai.record_step(*made, [batch], path, timeout_s=100.0),
            lambda: "step" not in vars(made[2]) and "forward_backward_step" not in vars(plugin.scheduler),
        )


def itself(layout: Layout) -> pipeproof.StageByStage:
    return pipeproof.StageByStage(build=partial(tiny_colossal.build, layout) if layout.tied else None)


def check_of(made: Any, batches: list[Any], layout: Layout, **other: Any) -> Any:
    """The check of a step; ``other``: what it is given otherwise."""
    given = {"criterion": tiny_colossal.criterion, "reference": partial(tiny_colossal.build, layout)} | other
    return pipeproof.colossalai.check_step(*made, batches=batches, timeout_s=100.0, **given)


def without_names(_: RankContext, layout: Layout) -> Verdict:
    """The verdict on a step that is held against itself, where nothing tells by which names weights are shared."""
    with job_of(layout) as job:
        with check_of(job.made, job.data, layout, reference=pipeproof.StageByStage()) as check:
            job.train(job.data)
        return check.verdict  # type: ignore[no-any-return]


def expected(layout: Layout) -> Record:
    """The record of the same step on one device."""
    model = tiny_colossal.build(layout).to(layout.dtype)
    every = tiny_colossal.data_of(layout.microbatches * layout.dp)
    return pipeproof.record_step(
        model,
        [((one["words"], one["labels"]), one["labels"]) for one in every],
        loss_fn=lambda outputs, labels: tiny_colossal.criterion(outputs, {"labels": labels}),
        # In bf16 the job's optimizer has weights of its own, in fp32.
        optimizer=None if layout.bf16 else torch.optim.Adam(model.parameters(), lr=0.01),
        contract=Contract(max_norm=1.0 if layout.clipped else None),
    )


def state(booster: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    """That of the job, and whether a call of the model is its own again."""
    module: nn.Module = model.module
    held = left([module], optimizer.optim, model, optimizer, booster.plugin, booster.plugin.scheduler)
    return held | {"forward": "routed" in repr(module.forward)}


def refused(_: RankContext, layout: Layout, kind: str) -> tuple[str, bool]:
    """The verdict on a block that cannot be checked, in words, and whether the job took its step."""
    with job_of(layout, microbatches=MICROBATCHES) as job:
        made, batch = job.made, job.data[0]
        booster, model, optimizer = made
        before = [one.detach().clone() for one in model.module.parameters()]
        given = {key: one[:-1] for key, one in batch.items()} if kind == "ragged" else batch
        others = {"criterion": "mse", "reference": tiny_colossal.build(layout)}
        other = {kind: others[kind]} if kind in others else {}
        with check_of(made, [] if kind == "empty" else [given], layout, **other) as check:
            if kind == "twice":
                booster.execute_pipeline(iter([batch]), model, tiny_colossal.criterion, optimizer)
            if kind != "no step":
                tiny_colossal.train_step(*made, iter([batch]))
        trained = any(not one.equal(was) for one, was in zip(model.module.parameters(), before, strict=True))
        return check.verdict.details, trained


def accumulated(_: RankContext, layout: Layout, without_sync: bool) -> Verdict:
    """The verdict on a step that adds up the gradients of two batches, the first of which need not be reduced."""
    with job_of(layout, microbatches=MICROBATCHES, batches=2) as job:
        made, every = job.made, job.data[0]
        booster, model, optimizer = made
        batches = [{key: one.chunk(2)[number] for key, one in every.items()} for number in (0, 1)]
        with check_of(made, batches, layout) as check:
            optimizer.zero_grad()
            with booster.no_sync(model, optimizer) if without_sync else nullcontext():
                booster.execute_pipeline(iter(batches[:1]), model, tiny_colossal.criterion, optimizer)
            booster.execute_pipeline(iter(batches[1:]), model, tiny_colossal.criterion, optimizer)
            optimizer.step()
        return check.verdict
