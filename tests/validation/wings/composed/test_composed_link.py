"""Steps whose calls are not quite as they should be, or are right in an unusual way."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import Contract, StageByStage, check_step
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Verdict
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.pipeline_here import DATA, MSE, Job, Layer, OneByOne, checked, layers, summed

WIDTH, ROWS, COUNT = 8, 4, 3
Around = Callable[[], AbstractContextManager[object]]
in_bf16, in_fp16 = (partial(torch.autocast, "cpu", dtype=one) for one in (torch.bfloat16, torch.float16))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Of means over rows: any number of rows has one."""
    return (output.float().mean(0) - target.mean(0)).square().mean()


class Boxed:
    """Two tensors in an object that nobody looks into."""

    def __init__(self, *both: Tensor) -> None:
        self.both = both

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.both)


class Fork(nn.Module):
    def __init__(self, *, wide: bool = False, boxed: bool = False) -> None:
        super().__init__()
        self.made = Boxed if boxed else lambda *both: both
        self.left, self.right, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), wide

    def forward(self, x: Tensor) -> Iterable[Tensor]:
        left, right = torch.tanh(self.left(x)), self.right(x)
        return self.made(left.float(), right.float()) if self.wide else self.made(left, right)


class Join(nn.Module):
    def __init__(self, *, one_side: bool = False) -> None:
        super().__init__()
        self.layer, self.one_side = nn.Linear(WIDTH, WIDTH), one_side

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.layer(left.float()) + (right.detach() if self.one_side else right)


@dataclass(frozen=True)
class Way:
    """How a step is done: ``wanting`` are the messages that want a gradient, ``told`` the call of ``gradients()``.

    ``tried``: each stage runs once before the step, on memory that holds what it was given in an earlier one.
    """

    wanting: Sequence[bool] = (True, True)
    one_side: bool = False
    wide: bool = False
    given: Callable[[Tensor], Tensor] = torch.clone
    sent: Callable[[Tensor], Tensor] = torch.clone
    took: Callable[[Tensor], Tensor] = torch.clone
    back: Callable[[Tensor], Tensor] = torch.clone
    run: Around = nullcontext
    told: Around = nullcontext
    tried: bool = False
    boxed: bool = False
    times: float = 1.0  # what losses are multiplied by, as the check knows


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(7)
    return [(torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw)) for _ in range(COUNT)]


def step(context: RankContext, way: Way) -> Verdict:
    torch.manual_seed(context.rank)
    by = StageByStage(loss_fn, contract=Contract(loss_divisor=COUNT / way.times))
    stage, losses = Join(one_side=way.one_side) if context.rank else Fork(wide=way.wide, boxed=way.boxed), list[float]()
    with check_step(stage, data(), against=by, rename="{}.{}".format, timeout_s=20) as check:
        if way.tried:
            try_out(stage, context.rank)
        for x, target in data():
            if context.rank:
                losses.append(ending(stage, target, way))
            else:
                beginning(stage, x, way)
        with way.told():
            check.gradients()
        check.report(losses=losses or None)
    return check.verdict


def try_out(stage: nn.Module, rank: int) -> None:
    """Run ``stage`` as torch.distributed.pipelining does to learn shapes: its weights get no gradient."""
    old = data()[1][0]
    if rank:
        torch.manual_seed(0)
        inputs = [one.detach() for one in Fork()(old)]
    else:
        inputs = [old]
    made = stage(*(one.requires_grad_() for one in inputs))
    outputs = made if isinstance(made, tuple) else (made,)
    torch.autograd.grad(outputs, inputs, [torch.ones_like(one) for one in outputs])


def beginning(stage: nn.Module, x: Tensor, way: Way) -> None:
    with way.run():
        outputs = list(stage(way.given(x)))
    flows = [torch.empty(one.shape) for one in outputs]
    for one in outputs:
        dist.send(way.sent(one.detach().float()), 1)
    for flow in flows:
        dist.recv(flow, 1)
    torch.autograd.backward(outputs, [flow.to(one.dtype) for flow, one in zip(flows, outputs, strict=True)])


def ending(stage: nn.Module, target: Tensor, way: Way) -> float:
    rows = len(way.given(target))
    inputs = [torch.empty(rows, WIDTH) for _ in way.wanting]
    for one in inputs:
        dist.recv(one, 0)
    inputs = [way.took(one).requires_grad_(wants) for one, wants in zip(inputs, way.wanting, strict=True)]
    with way.run():
        loss = loss_fn(stage(*inputs), target)
    torch.autograd.backward(loss * way.times / COUNT)
    for one in inputs:
        dist.send(torch.zeros_like(one) if one.grad is None else way.back(one.grad.float()), 0)
    return loss.item()


def half(x: Tensor) -> Tensor:
    return x[: ROWS // 2].clone()


ALTERED = partial(torch.mul, other=1.01)
WAYS: dict[str, tuple[Way, str, Any]] = {  # how it is done, the tier of a right one or the outcome, and what is said
    "as usual": (Way(), "bitwise", None),
    "a message of which no gradient is needed": (Way(one_side=True, wanting=(True, False)), "bitwise", None),
    "bf16 is sent as fp32": (Way(run=in_bf16), "fp32", None),  # a gradient may have to be rounded to what was made
    "bf16 is sent as fp32 and made bf16": (Way(run=in_bf16, took=torch.Tensor.bfloat16), "bitwise", None),
    "fp32 is sent as bf16": (Way(run=in_bf16, wide=True, took=torch.Tensor.bfloat16), "bitwise", None),
    "shapes are learned on old messages": (Way(tried=True), "bitwise", None),
    "told without gradients": (Way(told=torch.no_grad), "bitwise", None),
    "told in inference mode": (Way(told=torch.inference_mode), "bitwise", None),
    "told where types are cast": (Way(told=in_bf16), "bitwise", None),
    "the first message wants no gradient": (Way(wanting=(False, True)), "fail", "without requires_grad"),
    "nor the second": (Way(wanting=(True, False)), "fail", "without requires_grad"),
    "nor any": (Way(wanting=(False, False)), "fail", "without requires_grad"),
    "widened and altered": (Way(run=in_bf16, sent=ALTERED), "fail", "boundaries"),
    "narrowed and altered on its way back": (Way(run=in_bf16, back=ALTERED), "fail", "boundaries"),
    "digits are lost": (Way(took=torch.Tensor.bfloat16), "fail", "rounded"),
    "not a number": (Way(run=in_fp16, back=lambda one: one * torch.nan), "fail", "not-finite"),
    "too large for the type that it comes in": (Way(run=in_fp16, times=2.0**30), "unknown", Reason.NOT_FINITE),
    "tensors in an object": (Way(boxed=True), "unknown", Reason.HIDDEN),
    "half of the data": (Way(given=half), "unknown", None),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_step_in_an_unusual_way(name: str, simulated: World) -> None:
    way, outcome, said = WAYS[name]
    verdict = simulated.run(step, way, ranks=2)[0]
    laws = [law for law in verdict.laws if law.outcome == outcome]
    assert outcome in (verdict.outcome, verdict.tier), str(verdict)
    if outcome == "fail":
        assert (verdict.causes[0].rank, verdict.causes[0].stage) == (1, 1) or said != "without requires_grad"
        assert said in (verdict.mismatches[0].law, verdict.causes[0].kind) or said in verdict.details, str(verdict)
    elif said is not None:
        assert any(said in law.reasons for law in laws), str(verdict)
    elif outcome == "unknown":
        golden("\n".join(verdict.law("boundaries").left_out))


class Told(nn.Module):
    """Is told its input before it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.input_tensor: Tensor | None = None

    def forward(self) -> Tensor:
        assert self.input_tensor is not None
        return self.layer(self.input_tensor)


def test_an_input_in_an_attribute_is_not_seen() -> None:
    first, last = nn.Linear(WIDTH, WIDTH), Told()
    given = [(torch.ones(ROWS, WIDTH) * m, torch.ones(ROWS, WIDTH)) for m in range(COUNT)]
    with check_step({0: first, 1: last}, given, against=StageByStage(loss_fn), rename=lambda s, n: f"{s}.{n}") as check:
        for x, target in given:
            made = first(x)
            last.input_tensor = made.detach().requires_grad_()
            (loss_fn(last(), target) / COUNT).backward()
            made.backward(last.input_tensor.grad)
        check.gradients()
    golden(check.verdict.details.splitlines()[0])


@dataclass
class Tried(Job):
    """Runs one microbatch more, first of all, of which nobody told. ``cleared``: what it gave is."""

    cleared: bool = True

    def step(self) -> list[float]:
        self._train(0, torch.ones(4, 8), DATA[0][1])
        for one in (one for stage in self.stages for one in stage.parameters()):
            one.grad = None if self.cleared else one.grad
        return super().step()


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize("cleared", [True, False])
def test_sums_decide_on_a_call_too_many(cleared: bool, warmup: int) -> None:
    job = Tried(layers(torch.tanh, torch.sin), cleared=cleared)
    verdict = checked(job, given=DATA, contract=Contract(warmup=warmup))
    assert verdict.outcome == ("pass" if cleared else "fail"), str(verdict)
    note = verdict.law("microbatches").note
    assert bool(note) == (not warmup)
    assert ("gradients are wrong" in note) == (not warmup and not cleared)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_call_too_many_rules_nothing_out(wrong: bool) -> None:
    job = Job(layers(torch.tanh, torch.sin, torch.tanh), trial=True)
    job.fault = lambda stage, m, given: [one * 1.5 if wrong and (stage, m) == (1, 1) else one for one in given]
    verdict = checked(job)
    assert verdict.outcome == ("fail" if wrong else "pass"), str(verdict)
    assert verdict.law("microbatches").note
    assert not any("order" in one.kinds for one in verdict.ruled_out)


class Next(Layer):
    """As many as its inputs, all of which get one gradient."""

    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Tensor:
        return sum(others, x + 1)


@pytest.mark.parametrize(("apart", "causes"), [({}, []), ({1: 1}, []), ({1: 2}, [("doubled", 1)])])
def test_two_consumers_may_send_the_same(apart: Mapping[int, int], causes: list[tuple[str, int]]) -> None:
    """The second stage's output goes to the third, and to the fourth, which adds both up."""
    job = Job([*layers(torch.tanh, torch.sin), Next(), Next()], route={3: [(2, 0), (1, 0)]}, apart=apart)
    verdict = checked(job)
    assert verdict.outcome == ("fail" if causes else "pass"), str(verdict)
    assert [(one.kind, one.stage) for one in verdict.causes] == causes


@pytest.mark.parametrize(("keep", "outcome"), [(1.0, "pass"), (0.5, "fail")])
def test_what_two_consumers_send_may_cancel(keep: float, outcome: str) -> None:
    stages = [*layers(torch.tanh), Layer(torch.neg, plain=True), Layer(of=summed)]
    verdict = checked(Job(stages, route={2: [(1, 0), (0, 0)]}, keep=keep))
    assert verdict.law("boundaries").outcome == outcome, str(verdict)


@pytest.mark.parametrize("often", [1, 2])
def test_each_output_may_have_its_own_backward(often: int) -> None:
    torch.manual_seed(0)
    shared = (Layer(lambda whole: (whole.sin(), whole.exp()), of=summed) for _ in range(2))  # both of one tensor
    verdict = checked(OneByOne([*shared, Layer(of=summed)], often=often))
    assert verdict.outcome == ("pass" if often == 1 else "fail"), str(verdict)
    assert {(one.kind, one.stage) for one in verdict.causes} <= {("doubled", 0), ("doubled", 1)}


@pytest.mark.parametrize(("times", "outcome"), [(1.0, "pass"), (2.0, "fail")])
def test_each_term_of_a_loss_may_have_one(times: float, outcome: str) -> None:
    def both(output: Tensor, target: Tensor) -> Tensor:
        return MSE(output, target) + output.abs().mean()

    first, last = layers(torch.tanh, torch.sin)
    with check_step({0: first, 1: last}, DATA, against=StageByStage(both), rename="{}.{}".format) as check:
        for x, target in DATA:
            sent = first(x)
            came = sent.detach().requires_grad_()
            made = last(came)
            (MSE(made, target) / len(DATA)).backward(retain_graph=True)
            (times * made.abs().mean() / len(DATA)).backward()
            sent.backward(came.grad)
        check.gradients()
    assert check.verdict.outcome == outcome, str(check.verdict)
