"""Replicas that were reduced in part: which parameters, or which microbatches came too late, is told."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeproof.core.cause import Cause
from pipeproof.core.verdict import Verdict
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.members import Members, Replicas
from pipeproof.diagnosis.record_sums import RecordSums
from pipeproof.diagnosis.rules.shared import by_sender, on_rank
from pipeproof.foreign import WhiteBox
from tests.support.golden import golden
from tests.support.steps import loss_fn, pairs

COUNT = 6
Names = Callable[[str], bool]


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


data = partial(pairs, COUNT, rows=6, width=5, to=3, seed=1)


def judged(
    whitebox: WhiteBox,
    reduced: Names,
    *,
    before: int = COUNT // 2,
    noise: float = 0.0,
    times: float = 1.0,
    summed: bool = False,
) -> Verdict:
    """Two replicas that take the mean of some parameters' gradients, before the microbatch ``before`` of each."""

    def step(model: Any, microbatches: list[Any]) -> Any:
        losses = []
        for m, (x, target) in enumerate([*microbatches, (None, None)]):
            if m == before:
                for name, p in model.named_parameters():
                    if reduced(name):
                        dist.all_reduce(p.grad)
                        p.grad /= 1 if summed else 2
            if m < len(microbatches):
                loss = times * loss_fn(model(x), target)
                (loss / len(microbatches)).backward()
                losses.append(loss.item())
        if noise:
            model[0].weight.grad += dist.get_rank() * noise * torch.randn(8, 5)
        return model, losses

    return whitebox.validate(step, reference=build_model, microbatches=data(), ranks=[0, 1], loss_fn=loss_fn)


def test_what_is_reduced_in_time_is_right(whitebox: WhiteBox) -> None:
    assert judged(whitebox, lambda name: True).verdict == "pass"


@pytest.mark.parametrize(("left", "parameter"), [("0.weight", "0.weight"), ("2.bias", "2.bias")])
def test_a_parameter_that_was_not_reduced(whitebox: WhiteBox, left: str, parameter: str) -> None:
    (cause,) = judged(whitebox, lambda name: name != left).cause
    assert (cause.kind, cause.stage, cause.parameter) == ("not-reduced", 0, parameter)
    golden(cause.detail, numbers=False)


def test_a_reduction_before_the_last_microbatch(whitebox: WhiteBox) -> None:
    (cause,) = judged(whitebox, lambda name: True, before=2).cause
    assert (cause.kind, cause.stage, cause.parameter) == ("not-reduced", 0, None)
    golden(cause.detail, numbers=False)


def test_replicas_that_differ_in_a_way_that_tells_nothing(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, lambda name: True, noise=1e-2)
    assert (verdict.verdict, verdict.cause) == ("fail", ())


def test_what_is_wrong_on_one_replica_alone_is_told_of_its_rank(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        for x, target in microbatches:
            (loss_fn(model(x), target) / len(microbatches)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 2 * (1 + dist.get_rank())
        return model

    verdict = whitebox.validate(step, reference=build_model, microbatches=data(), ranks=[0, 1], loss_fn=loss_fn)
    (cause,) = verdict.cause
    assert (cause.kind, cause.rank, cause.stage, cause.factor) == ("scale", 1, 0, 0.5)
    assert verdict.law("gradient").outcome == "unknown", "rank 1's gradients are wrong"
    assert verdict.mismatches[0].rank == 1


def test_a_sum_in_place_of_a_mean_is_told(whitebox: WhiteBox) -> None:
    (cause,) = judged(whitebox, lambda name: True, summed=True).cause
    golden(cause.detail, numbers=False)


def test_losses_that_are_too_large_are_no_sum_over_replicas(whitebox: WhiteBox) -> None:
    (cause,) = judged(whitebox, lambda name: True, times=2.0).cause
    assert (cause.kind, cause.factor) == ("scale", 2.0)
    golden(cause.detail, numbers=False)


def test_a_factor_of_all_is_told_where_rounding_hides_each_microbatch_s(whitebox: WhiteBox) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(8))
        return nn.Sequential(*layers).bfloat16()

    def step(model: Any, microbatches: list[Any]) -> Any:
        losses = [loss_fn(model(x), target) for x, target in microbatches]
        for loss in losses:
            (loss / len(losses)).backward()
        for parameter in model.parameters():
            parameter.grad *= 4
        return model, [loss.item() for loss in losses]

    draw = torch.Generator().manual_seed(1)
    given = [tuple(torch.randn(6, 16, generator=draw).bfloat16() for _ in range(2)) for _ in range(4)]
    verdict = whitebox.validate(step, reference=build, microbatches=given, ranks=1, loss_fn=loss_fn)
    assert [(cause.kind, cause.factor) for cause in verdict.cause] == [("scale", 4.0)], str(verdict)


def test_every_stage_that_was_not_reduced_is_told(whitebox: WhiteBox) -> None:
    """Every rank runs the whole model, and hands back its own half."""

    def step(model: Any, microbatches: list[Any]) -> Any:
        losses = [loss_fn(model(x), target) for x, target in microbatches]
        (torch.stack(losses).sum() / COUNT).backward()
        return model[:2] if dist.get_rank() < 2 else model[2:], [loss.item() for loss in losses]

    options: dict[str, Any] = {"microbatches": data(), "ranks": [0, 1, 0, 1], "loss_fn": loss_fn}
    causes = whitebox.validate(step, reference=build_model, **options).cause
    assert [(cause.kind, cause.stage) for cause in causes] == [("not-reduced", 0), ("not-reduced", 1)]


@pytest.mark.parametrize(
    ("shares", "microbatches", "rank"),
    [(((0, 1), (2, 3)), (2,), 1), (((0, 1), (2, 3)), (1, 2), None), ((), (2,), None)],
    ids=["its own rank", "of both", "nobody says"],
)
def test_in_a_job_the_rank_is_told_that_ran_it(
    shares: tuple[tuple[int, ...], ...], microbatches: tuple[int, ...], rank: int | None
) -> None:
    sums = RecordSums(replicas=Replicas((0, 1), 4, shares=shares), places={"weight": [(0, 0), (1, 0)]})
    verdict = Verdict("a step", "fail", "none", ())
    evidence = Evidence(verdict, (0,), 4, 2, gradients={}, norms=(None, None), sums=sums)
    assert on_rank(Cause("dropped", rank=0, stage=0, microbatches=microbatches), evidence).rank == rank


OWN = Cause("not-reduced", stage=0, detail="what they have adds up")


@pytest.mark.parametrize(
    ("outputs", "gradients", "stages", "instead"),
    [
        (("a", "a"), ("b", "c"), [1], []),  # each rank was handed a part: its sender is at fault
        (("a", "a"), ("b", "b"), [0], []),  # it came whole
        (("a", "d"), ("b", "c"), [0], []),  # ranks have parts of sequences, whose gradients are other ones
        (("", ""), ("", ""), [0], [1]),  # nobody watched
    ],
)
def test_who_was_handed_parts_is_not_blamed_for_them(
    outputs: tuple[str, str], gradients: tuple[str, str], stages: list[int], instead: list[int]
) -> None:
    def part(output: str, gradient: str) -> Any:
        made, came = (SimpleNamespace(digest=one.encode()) for one in (output, gradient))
        return SimpleNamespace(calls=[SimpleNamespace(outputs=[made], output_gradients={0: came})] if output else None)

    receiver = [*enumerate(map(part, outputs, gradients))]
    sender = [(2, part("e", "f")), (3, part("e", "f"))]
    two = [SimpleNamespace(index=k, part=SimpleNamespace(members=each)) for k, each in enumerate((receiver, sender))]
    members: Any = Members(two, Replicas((0, 0, 0, 0), 4), (), ())  # type: ignore[arg-type]  # no more than it reads
    (found,) = by_sender([OWN], members)
    assert ([found.stage], [one.stage for one in found.instead]) == (stages, instead)
    assert by_sender([replace(OWN, parameter="w")], members) == [replace(OWN, parameter="w")], "another is right"
    assert by_sender([replace(OWN, stage=1)], members) == [replace(OWN, stage=1)], "no stage hands on to the last one"
