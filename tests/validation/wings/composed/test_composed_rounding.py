"""Kernels that add up in any order never give the same twice: that is no fault, and hides none that is larger.

In bf16 sums and losses are as exact as that; hooks that make other gradients leave them unknown, with the norm.
"""

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof import StageByStage, check_step
from pipeproof.core.observe.recording import MADE
from pipeproof.core.observe.sketch import sketch
from pipeproof.core.verdict import Verdict
from pipeproof.reference.step import Contribution
from pipeproof.wings.composed.rounding import Envelopes, Made
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.pipeline_here import DATA, Job, checked, layers
from tests.support.steps import backward

LOSS = nn.functional.mse_loss
WIDTH, ROWS, COUNT = 8, 5, 4
RUNS, CALLS = "RUNS", "CALLS"  # how many, in the environment: a race is the machine's, and no check puts it back


class Unsteady(torch.autograd.Function):
    """Passes on, and in its backward differs by so much each time, as where atomics race."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: float) -> Tensor:
        ctx.size = size
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        number = int(os.environ[RUNS])
        os.environ[RUNS] = f"{number + 1}"
        draw = torch.Generator().manual_seed(number)
        return gradients[0] * (1 + ctx.size * torch.randn(gradients[0].shape, generator=draw)), None


class Stage(nn.Module):
    """Two layers with an unsteady kernel between them."""

    def __init__(self, size: float, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last, self.size = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), size

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Unsteady.apply(torch.tanh(self.first(x)), self.size))


def padded(output: Tensor, target: Tensor) -> Tensor:
    """The loss, to which a target of ones adds nothing."""
    return (output * 0).sum() if bool((target == 1).all()) else LOSS(output, target)


def job(context: RankContext, size: float, factor: float, lost: int | None, cast: bool = False) -> tuple[Verdict, int]:
    """A step of two stages; the verdict, and how many calls of stages the check made."""
    os.environ |= {RUNS: "0", CALLS: "0"}
    stages = [Stage(size, 0), Stage(size, 1)]
    data = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) for _ in range(COUNT)]
    data[0] = data[0][0], torch.ones(ROWS, WIDTH)  # the first tells nothing
    losses = list[float]()
    with check_step(dict(enumerate(stages)), data, against=StageByStage(padded), rename="{}.{}".format) as check:
        for number, (x, target) in enumerate(data):
            before = [None if one.grad is None else one.grad.clone() for one in stages[0].parameters()]
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                passed = stages[0](x)
                given = passed.detach().requires_grad_()
                loss = padded(stages[1](given), target)
            losses.append(loss.item())
            (loss / COUNT).backward()
            passed.backward(given.grad)
            if number == lost:
                for one, was in zip(stages[0].parameters(), before, strict=True):
                    one.grad = was
        stages[0].first.weight.grad *= factor  # type: ignore[operator]  # it is there
        for stage in stages:
            stage.register_forward_pre_hook(lambda *_: os.environ.update({CALLS: f"{int(os.environ[CALLS]) + 1}"}))
        check.gradients()
        check.report(losses=losses)
    return check.verdict, int(os.environ[CALLS])


UNSTEADY = [  # by how much kernels differ, the factor and the microbatch that is lost, whether types are cast
    (0.0, 1.0, None, False, "bitwise"),
    (1e-7, 1.0, None, False, "fp32"),
    (5e-3, 1.0, None, True, "bf16"),
    (2e-4, 1.0, None, False, "unknown"),  # by more than their type rounds
    (1e-7, 1.001, None, False, "fail"),
    (1e-5, 0.99, None, False, "fail"),
    (5e-3, 1.2, None, True, "fail"),
    (1e-7, 1.0, 2, False, "lost"),
    (5e-3, 1.0, 2, True, "lost"),
]


@pytest.mark.parametrize(("size", "factor", "lost", "cast", "said"), UNSTEADY)
def test_kernels_may_differ_as_their_type_rounds(
    size: float, factor: float, lost: int | None, cast: bool, said: str, here: World
) -> None:
    ((verdict, calls),) = here.run(job, size, factor, lost, cast, ranks=1)
    if said in ("unknown", "fail", "lost"):
        assert verdict.outcome == ("unknown" if said == "unknown" else "fail"), str(verdict)
    else:
        assert (verdict.outcome, verdict.tier) == ("pass", said), str(verdict)
        assert (verdict.law("gradient").worst > 0) == (size > 0)
        assert 2 * COUNT <= calls <= 2 * COUNT + (2 * 4 if size else 0), "each once, and rounding of one of each stage"
    if said == "fail":
        assert {(one.law, one.parameter) for one in verdict.mismatches} == {("gradient", "0.first.weight")}


def before(weight: nn.Parameter) -> None:
    weight.register_hook(lambda one: one * 0.5)


def after(weight: nn.Parameter) -> None:
    def halve(parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)

    weight.register_post_accumulate_grad_hook(halve)


def looking(weight: nn.Parameter) -> None:
    weight.register_post_accumulate_grad_hook(lambda _: None)


@pytest.mark.parametrize(("hook", "known"), [(before, False), (after, False), (looking, True)])
def test_what_hooks_make_of_gradients_is_unknown(hook: Callable[[nn.Parameter], None], known: bool) -> None:
    stages = layers(torch.tanh, torch.sin)
    hook(stages[1].layer.weight)  # type: ignore[arg-type, union-attr]  # it is a Layer
    verdict = checked(Job(stages))
    outcomes = {law.name: (law.outcome, law.left_out) for law in verdict.laws}
    assert outcomes["gradient"] == (("pass", ()) if known else ("unknown", ("1.layer.weight",))), str(verdict)
    assert outcomes["grad-norm"][0] == ("pass" if known else "unknown")
    assert {outcomes[law][0] for law in ("microbatches", "boundaries", "loss", "presence")} == {"pass"}


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, "pass"), (1.01, "unknown"), (1.1, "fail")])
def test_a_multiple_in_bf16_is_no_rounding(factor: float, outcome: str) -> None:
    """Sums in another order do: they lead nowhere."""
    stages = [one.bfloat16() for one in layers(torch.tanh, torch.sin)]
    data = [(x.bfloat16(), y.bfloat16()) for x, y in DATA]
    apart = Job([copy.deepcopy(one) for one in stages], data[::-1])
    apart.step()

    def change() -> None:
        for one, other in zip(stages[1].parameters(), apart.stages[1].parameters(), strict=True):
            assert other.grad is not None
            one.grad = other.grad * factor

    verdict = checked(Job(stages, data, change=change))
    law = verdict.law("gradient")
    assert (law.outcome, law.exact < law.checked) == (outcome, True), str(verdict)


def in_fp32(output: Tensor, target: Tensor) -> Tensor:
    return LOSS(output.float(), target.float())


@pytest.mark.parametrize(
    ("loss_fn", "factor", "outcome"),
    [
        (in_fp32, 1.0, "pass"),
        (in_fp32, 1.002, "unknown"),
        (in_fp32, 1.2, "fail"),
        (LOSS, 1.0, "pass"),
        (LOSS, 1.2, "fail"),
    ],
)
def test_a_loss_is_off_as_its_type_rounds(loss_fn: object, factor: float, outcome: str) -> None:
    torch.manual_seed(0)
    stage = nn.Linear(8, 8).bfloat16()
    data = [(torch.randn(2, 4, 8).bfloat16()).unbind() for _ in range(3)]
    with check_step(stage, data, against=StageByStage(loss_fn)) as check:  # type: ignore[arg-type]
        losses = backward(stage, data, by=loss_fn)  # type: ignore[arg-type]
        check.gradients()
        check.report(losses=[factor * loss for loss in losses])
    assert check.verdict.law("loss").outcome == outcome, str(check.verdict)


def test_a_call_is_measured_once_and_two_at_most() -> None:
    """The first that differs, and one that differs more; of sums, the largest contributor, or one half as large."""
    at, site, ran = (MADE, 0), (0, "w"), list[int]()

    def made(k: int, off: float = 0.0) -> Made:
        part = Contribution(0.0, {site: torch.ones(4) * (1 + off)})
        return Made(k, tensors={at: torch.ones(4) * (1 + off)}, contribution=part)

    def again(k: int) -> Made:
        ran.append(k)
        return made(k, 1e-6)

    def limit(k: int, off: float) -> float:
        one = made(k)
        pairs = {at: (sketch(torch.ones(4) * (1 + off)), sketch(one.tensors[at]))}
        limits, strange, _ = rounding.of_call(one, pairs)
        assert not strange
        return limits[at]

    rounding = Envelopes(again, lambda k: made(k, 2e-6), lambda k: None, narrowest=None, inside=None)
    assert limit(0, 1e-7) < limit(0, 2e-5) < 1e-4  # fp64 is asked where two runs explain too little
    assert ran == [0]
    assert rounding.of_sum(site, torch.ones(4), {0: 1.0, 1: 2.0}, size=2.0) is not None
    assert ran == [0]
    assert limit(3, 0.5) < 1e-4
    assert rounding.of_sum(site, torch.ones(4), {0: 1.0, 1: 9.0}, size=2.0) is not None
    assert (ran, rounding.is_full) == ([0, 3], True)
