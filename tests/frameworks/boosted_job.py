"""A job that trains the tiny boosted model on ranks of its own: a step of it is checked, then it goes on."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import pipeproof
from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.foreign.frameworks.colossalai import _on, _state_kept
from pipeproof.foreign.frameworks.colossalai_whole import Packed
from pipeproof.records.record import Record
from pipeproof.worlds.worker import RankContext
from tests.frameworks import tiny_colossal
from tests.frameworks.colossalai_faults import FAULTS
from tests.frameworks.left import differences, left, seed
from tests.frameworks.tiny_colossal import Layout

MICROBATCHES = 4


@contextmanager
def boosted(
    layout: Layout, fault: str = "", microbatches: int = MICROBATCHES, batches: int = 1
) -> Iterator[tuple[Any, Any]]:
    """The booster, model and optimizer, and the batches of this rank's replica, in one."""
    with _on("cpu"), _state_kept(), ExitStack() as stack:
        if fault:
            FAULTS[fault].plant(stack)
        made = tiny_colossal.made(layout, microbatches)
        plugin = made[0].plugin
        mine = tiny_colossal.data_of(microbatches * batches * layout.dp)[
            plugin.pg_mesh.coordinate(plugin.dp_axis) :: layout.dp
        ]
        packed = Packed.of(mine)
        yield made, packed.joined([packed.pack(one) for one in mine])


def check_of(made: Any, batches: list[Any], layout: Layout, **other: Any) -> Any:
    """The check of a step; ``other``: what it is given otherwise."""
    given = {"criterion": tiny_colossal.criterion, "reference": partial(tiny_colossal.build, layout)} | other
    return pipeproof.colossalai.check_step(*made, batches=batches, timeout_s=100.0, **given)


def checked(_: RankContext, layout: Layout, fault: str, by: pipeproof.Composed | None = None) -> Verdict:
    """The verdict on a step that has a fault; ``by``: how it is held against itself."""
    with boosted(layout, fault, layout.microbatches) as (made, batch):
        with check_of(made, [batch], layout, **_against(by)) as check:
            tiny_colossal.train_step(*made, iter([batch]))
        return check.verdict


class Whole(nn.Module):
    """The model on one device, called as record_step calls it."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._modules = (model := tiny_colossal.build(layout))._modules
        self._model = [model]

    def forward(self, words: Tensor, labels: Tensor) -> Any:
        return self._model[0](words, labels)


def due(layout: Layout) -> Record:
    """The record of the same step on one device."""
    model = Whole(layout).to(layout.dtype)
    every = tiny_colossal.data_of(layout.microbatches * layout.dp)
    return pipeproof.record_step(
        model,
        [((one["words"], one["labels"]), one["labels"]) for one in every],
        loss_fn=lambda outputs, labels: tiny_colossal.criterion(outputs, {"labels": labels}),
        # In bf16 the job's optimizer has weights of its own, in fp32.
        optimizer=None if layout.bf16 else torch.optim.Adam(model.parameters(), lr=0.01),
        contract=Contract(max_norm=1.0 if layout.clipped else None),
    )


def recorded(_: RankContext, layout: Layout, path: str, fault: str) -> str:
    """Record a step that has a fault, or none; why that cannot be."""
    with boosted(layout, fault, layout.microbatches) as (made, batch):
        with pipeproof.colossalai.record_step(*made, [batch], path, timeout_s=100.0) as seen:
            tiny_colossal.train_step(*made, iter([batch]))
        return seen.problem


def _against(by: pipeproof.Composed | None) -> dict[str, Any]:
    return {} if by is None else {"reference": by}


def checked_and_unchecked(
    _: RankContext, layout: Layout, microbatches: int, by: pipeproof.Composed | None = None
) -> tuple[Verdict, list[str]]:
    """The verdict on a right step, and what is another after it and one more than in a job without a check."""
    found = []
    for check_it in (False, True):
        with boosted(layout, microbatches=microbatches) as (made, batch):
            seed()
            new = check_of(made, [batch], layout, **_against(by))
            with new if check_it else nullcontext() as check:
                tiny_colossal.train_step(*made, iter([batch]))
            first = state(*made)
            tiny_colossal.train_step(*made, iter([batch]))
            found.append([first, state(*made)])
    return check.verdict, differences(*found)


def state(booster: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    """That of the job, and whether a call of the model is its own again."""
    module: nn.Module = model.module
    held = left([module], optimizer.optim, model, optimizer, booster.plugin, booster.plugin.scheduler)
    return held | {"forward": "routed" in repr(module.forward)}


def refused(_: RankContext, layout: Layout, kind: str) -> tuple[str, bool]:
    """The verdict on a block that cannot be checked, in words, and whether the job took its step."""
    with boosted(layout) as (made, batch):
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
    with boosted(layout, batches=2) as (made, every):
        booster, model, optimizer = made
        batches = [{key: one.chunk(2)[number] for key, one in every.items()} for number in (0, 1)]
        with check_of(made, batches, layout) as check:
            optimizer.zero_grad()
            with booster.no_sync(model, optimizer) if without_sync else nullcontext():
                booster.execute_pipeline(iter(batches[:1]), model, tiny_colossal.criterion, optimizer)
            booster.execute_pipeline(iter(batches[1:]), model, tiny_colossal.criterion, optimizer)
            optimizer.step()
        return check.verdict


def ended_early(_: RankContext, layout: Layout) -> tuple[str, str, bool]:
    """What a step that raises on every rank raises, the verdict on it, and whether all is as it was."""
    with boosted(layout) as (made, batch):
        booster, _, optimizer = made
        check = check_of(made, [batch], layout)
        try:
            with check as found:
                raise KeyError("the job's own")
        except KeyError as error:
            clean = "step" not in vars(optimizer) and "forward_backward_step" not in vars(booster.plugin.scheduler)
            return repr(error), found.verdict.details, clean
    raise AssertionError("what the job raises is the job's")


def drew_others(_: RankContext, layout: Layout) -> Verdict:
    """The verdict on a right step of other words than the check was given."""
    with boosted(layout) as (made, batch):
        with check_of(made, [batch], layout) as check:
            tiny_colossal.train_step(*made, iter([{key: one.flip(-1) for key, one in batch.items()}]))
        return check.verdict
