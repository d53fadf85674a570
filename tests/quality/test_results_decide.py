"""Results decide; calls, boundaries and starting weights locate: what changes no result is told, and is no fault."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import Contract, StageByStage, watch
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.two_ranks import COUNT, data, half, judged, loss_fn, model_of, named, passes, plain_block

build = partial(model_of, plain_block)
Row = Callable[[nn.Sequential, list[Any]], Any]


def run(
    model: nn.Sequential,
    microbatches: list[Any],
    *,
    order: tuple[int, ...] = tuple(range(COUNT)),
    idle: tuple[int, ...] = (),
    rows: int = 0,
    also: Callable[[nn.Module, list[Any]], object] = lambda stage, microbatches: None,
    lost: int | None = None,
) -> Any:
    """Forwards and backwards of the microbatches in ``order``, one after another.

    idle: the turns whose loss weighs nothing. rows: zeros that travel below each microbatch and are cut off before the
    loss. also: done before all. lost: the microbatch whose backward the first rank leaves out.
    """
    stage, losses = watch(half(model)), []
    also(stage, microbatches)
    for turn, m in enumerate(order):
        x, target = microbatches[m]
        weight = 0.0 if turn in idle else 1.0
        if dist.get_rank() == 0:
            y = stage(x)
            dist.send(torch.cat([y.detach(), torch.zeros(rows, y.shape[1])]), 1)
            gradient = torch.empty(len(x) + rows, y.shape[1])
            dist.recv(gradient, 1)
            if m != lost:
                y.backward(gradient[: len(x)])
            continue
        came = torch.empty(len(x) + rows, x.shape[1])
        dist.recv(came, 0)
        loss = (stage(came.requires_grad_())[: len(x)] - target).square().mean()
        (weight * loss / len(microbatches)).backward()
        dist.send(came.grad, 0)
        losses += [loss.item()] * bool(weight)
    return stage, losses or None


def looks_once_more(stage: nn.Module, microbatches: list[Any]) -> None:
    with torch.no_grad():
        stage(microbatches[0][0])


def trains(stage: nn.Module, microbatches: list[Any], *, others: int = 0) -> None:
    """On the first microbatch, or so often on other data."""
    for x in [torch.ones_like(microbatches[0][0])] * others or [microbatches[0][0]]:
        stage(x).sum().backward()
    stage.zero_grad()


def weighs_late(stage: nn.Module, microbatches: list[Any]) -> None:
    """The weights of a layer are written by its own hook, when it is first used."""
    expected: dict[nn.Module, Tensor] = {}

    def fetch(module: nn.Module, _: object) -> None:
        if module in expected:
            module.weight.data.copy_(expected.pop(module))

    for layer in (one for one in stage.modules() if isinstance(one, nn.Linear)):
        expected[layer] = layer.weight.detach().clone()
        layer.weight.data.zero_()
        layer.register_forward_pre_hook(fetch)


RIGHT: dict[str, tuple[Row, str]] = {
    "padding-last": (partial(run, order=(0, 1, 2, 3, 0), idle=(4,)), "microbatches"),
    "padding-first": (partial(run, order=(0, 0, 1, 2, 3), idle=(0,)), "microbatches"),
    "padding-between": (partial(run, order=(0, 1, 1, 2, 3, 2), idle=(2, 5)), "microbatches"),
    "rows": (partial(run, rows=3), "boundaries"),
    "forward-more": (partial(run, also=looks_once_more), ""),
    "warm-up": (partial(run, also=trains), ""),
    "warm-up-on-other-data": (partial(run, also=partial(trains, others=2)), ""),
    "late-weights": (partial(run, also=weighs_late), ""),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_changes_no_result_passes_and_is_told(name: str, whitebox: WhiteBox) -> None:
    row, law = RIGHT[name]
    verdict = passes(judged(whitebox, row, build))
    assert not law or verdict.law(law).note, verdict


@pytest.mark.parametrize("name", RIGHT)
def test_a_dropped_microbatch_beside_it_is_a_fault(name: str, whitebox: WhiteBox) -> None:
    row, _ = RIGHT[name]
    verdict = judged(whitebox, partial(row, lost=3), build)
    assert ("dropped", 0, 0, (3,)) in named(verdict), verdict
    assert verdict.law("gradient").outcome == "fail"


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["padding-last", "padding-first", "padding-between"])
def test_padding_adds_nothing_to_a_step_that_is_held_against_itself(name: str, whitebox: WhiteBox) -> None:
    padded, _ = RIGHT[name]

    def row(_: object, microbatches: list[Any], **options: Any) -> Any:
        return padded(build(), microbatches, **options)

    against = partial(whitebox.validate, reference=StageByStage(loss_fn), microbatches=data(), ranks=2)
    golden(passes(against(row)).law("microbatches").note)
    assert against(partial(row, lost=3)).outcome == "fail"


@pytest.mark.sweep
def test_a_law_that_does_not_apply_is_said_not_to(whitebox: WhiteBox) -> None:
    """What results say of a law outlasts what was known of it before anything was compared."""

    def twice(model: nn.Sequential, operations: Any) -> Any:
        for _, microbatches in operations:
            yield run(model, microbatches, order=(0, 1))
            model.zero_grad()

    steps = ["train", "train"]
    verdict = whitebox.validate(
        twice, reference=build, microbatches=data(), ranks=2, loss_fn=loss_fn, contract=Contract(operations=steps)
    )
    assert verdict.outcome == "pass", str(verdict)
    assert verdict.law("buffers").outcome == "not applicable"


@pytest.mark.sweep
def test_what_is_filled_up_between_stages_is_not_known_to_be_meant_against_itself(whitebox: WhiteBox) -> None:
    def row(_: object, microbatches: list[Any]) -> Any:
        return run(build(), microbatches, rows=3)

    def of_rows(output: Tensor, target: Tensor) -> Tensor:
        return (output[: len(target)] - target).square().mean()

    verdict = whitebox.validate(row, reference=StageByStage(of_rows), microbatches=data(), ranks=2)
    assert [law.name for law in verdict.laws if law.outcome in ("fail", "unknown")] == ["boundaries"], str(verdict)
    assert (verdict.outcome, verdict.law("gradient").outcome) == ("unknown", "pass")
