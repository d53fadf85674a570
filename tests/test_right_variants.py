"""Right steps that run their stages in ways of their own pass, and faulty ones beside them are told what is wrong."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline import PipelineSchedule
from validation.verdict import Verdict
from validation.whitebox import WhiteBox, watch

WIDTH, COUNT = 8, 4
Call = Callable[[nn.Module, int, Tensor], Tensor]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(4, WIDTH, generator=draw), torch.randn(4, WIDTH, generator=draw)) for _ in range(COUNT)]


def model_of(block: Callable[[], nn.Module], *, frozen: int = 0) -> nn.Sequential:
    """Four blocks, of which the first so many are not trained."""
    torch.manual_seed(3)
    model = nn.Sequential(*(block() for _ in range(4)))
    model[:frozen].requires_grad_(False)
    return model


def plain_block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())


def half(model: nn.Sequential) -> nn.Sequential:
    return model[2 * dist.get_rank() : 2 * dist.get_rank() + 2]


def called(stage: nn.Module, microbatch: int, x: Tensor) -> Tensor:
    result: Tensor = stage(x)
    return result


def all_forward_all_backward(
    stage: nn.Module,
    microbatches: list[Any],
    call: Call = called,
    *,
    passed: Callable[[int, Tensor], Tensor] = lambda m, gradient: gradient,
    divisor: float = COUNT,
) -> list[float] | None:
    """The losses, on the last of two ranks. ``passed``: what becomes of the gradients that it hands on."""
    kept, losses = [], []
    for m, (x, target) in enumerate(microbatches):
        if dist.get_rank() == 0:
            y = call(stage, m, x)
            dist.send(y.detach(), 1)
            kept.append((x, y))
            continue
        x = torch.empty_like(x)
        dist.recv(x, 0)
        loss = loss_fn(call(stage, m, x.requires_grad_()), target)
        losses.append(loss.item())
        kept.append((x, loss / divisor))
    for m, (x, end) in enumerate(kept):
        if dist.get_rank():
            end.backward()
            dist.send(passed(m, x.grad if x.grad is not None else torch.zeros_like(x)), 0)
            continue
        gradient = torch.empty_like(end)
        dist.recv(gradient, 1)
        if end.requires_grad:
            end.backward(gradient)
    return losses or None


def step(
    model: nn.Sequential, microbatches: list[Any], call: Call = called, *, training: bool = True, **options: Any
) -> Any:
    stage = watch(half(model)).train(training)
    return stage, all_forward_all_backward(stage, microbatches, call, **options)


def judged(whitebox: WhiteBox, one: Callable[..., Any], build: Callable[[], nn.Module]) -> Verdict:
    return whitebox.validate(one, reference=build, microbatches=data(), ranks=2, loss_fn=loss_fn)


plain = partial(model_of, plain_block)


def passes(verdict: Verdict) -> Verdict:
    assert (verdict.verdict, verdict.tier) == ("pass", "bitwise"), verdict
    return verdict


def named(verdict: Verdict) -> list[tuple[str, int | None, int | None, tuple[int, ...]]]:
    assert verdict.verdict == "fail", verdict
    return [(cause.kind, cause.rank, cause.stage, cause.microbatches) for cause in verdict.cause]


# Calls that hooks do not see.


def by_forward(stage: nn.Module, microbatch: int, x: Tensor) -> Tensor:
    result: Tensor = stage.forward(x)
    return result


def by_parts(stage: nn.Module, microbatch: int, x: Tensor) -> Tensor:
    assert isinstance(stage, nn.Sequential)
    for part in stage:
        x = part(x)
    return x


def now_and_then(stage: nn.Module, microbatch: int, x: Tensor) -> Tensor:
    return by_forward(stage, microbatch, x) if microbatch % 2 else called(stage, microbatch, x)


@pytest.mark.parametrize("call", [by_forward, by_parts])
def test_a_watched_stage_without_calls_decides_nothing(whitebox: WhiteBox, call: Call) -> None:
    verdict = passes(judged(whitebox, partial(step, call=call), plain))
    for law in ("microbatches", "boundaries"):
        assert verdict.law(law).outcome == "not applicable"
        assert "no call of watched stage 0 was seen" in verdict.law(law).note
        assert "call stage(x)" in verdict.law(law).note


def test_calls_of_one_rank_alone_are_judged_alone(whitebox: WhiteBox) -> None:
    def call(stage: nn.Module, m: int, x: Tensor) -> Tensor:
        return (by_forward if dist.get_rank() else called)(stage, m, x)

    verdict = passes(judged(whitebox, partial(step, call=call), plain))
    assert "no call of watched stage 1 was seen" in verdict.law("boundaries").note


def test_calls_of_some_microbatches_decide_nothing(whitebox: WhiteBox) -> None:
    verdict = passes(judged(whitebox, partial(step, call=now_and_then), plain))
    assert "and its gradients are right" in verdict.law("microbatches").note


def without_second(stage: nn.Module, m: int, x: Tensor, *, call: Call = called) -> Tensor:
    """No backward of microbatch 2 comes to a parameter of rank 0."""
    result = call(stage, m, x)
    return result.detach().requires_grad_() if m == 2 and dist.get_rank() == 0 else result


@pytest.mark.parametrize("call", [by_forward, now_and_then, called])
def test_a_dropped_microbatch_is_named_however_a_stage_is_called(whitebox: WhiteBox, call: Call) -> None:
    found = named(judged(whitebox, partial(step, call=partial(without_second, call=call)), plain))
    assert found[0] == ("dropped", 0, 0, (2,)), found


# Checkpoints around a stage.


def recomputed(stage: nn.Module, m: int, x: Tensor, *, reentrant: bool = True) -> Tensor:
    result: Tensor = checkpoint(stage, x if x.requires_grad else x.requires_grad_(), use_reentrant=reentrant)
    return result


def but_for_the_last(stage: nn.Module, m: int, x: Tensor) -> Tensor:
    return called(stage, m, x) if m == COUNT - 1 else recomputed(stage, m, x)


CHECKPOINTS = [recomputed, partial(recomputed, reentrant=False), but_for_the_last]


@pytest.mark.parametrize("call", CHECKPOINTS, ids=["reentrant", "not reentrant", "all but the last"])
def test_a_stage_in_a_checkpoint_runs_once_for_each_microbatch(whitebox: WhiteBox, call: Call) -> None:
    verdict = passes(judged(whitebox, partial(step, call=call), plain))
    assert verdict.law("microbatches").outcome == verdict.law("boundaries").outcome == "pass"
    assert verdict.law("boundaries").checked == verdict.law("boundaries").exact >= 28


def spoilt(stage: nn.Module, m: int, x: Tensor) -> Tensor:
    """What a checkpoint keeps of microbatch 1 is written to before its recompute."""
    result = recomputed(stage, m, x)
    if m == 1 and dist.get_rank() == 1:
        x.data.mul_(2)
    return result


def test_what_goes_wrong_in_a_checkpoint_is_named(whitebox: WhiteBox) -> None:
    found = named(judged(whitebox, partial(step, call=partial(without_second, call=recomputed)), plain))
    assert found[0] == ("dropped", 0, 0, (2,)), found
    found = named(judged(whitebox, partial(step, call=spoilt), plain))
    assert found[0] == ("overwritten", 1, 1, (1,)), found
    half_of_it = partial(step, call=recomputed, passed=lambda m, gradient: gradient / 2 if m == 1 else gradient)
    assert named(judged(whitebox, half_of_it, plain))[0] == ("scale", 0, 0, (1,))


# Weights whose gradients are written past autograd.


class _Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.to = layer, (weight, bias)
        return x @ layer.weight.detach().T + layer.bias.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,), layer = ctx.saved_tensors, ctx.layer
        made = gradient.T @ x, gradient.sum(0)
        for given, own, one in zip(ctx.to, (layer.weight, layer.bias), made, strict=True):
            to = own if given is None else given
            to.grad = one if to.grad is None else to.grad + one
        return gradient @ layer.weight, None, None, None


class ToArguments(nn.Linear):
    """Writes to the weights that it was called with."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Writes.apply(x, self, self.weight, self.bias)
        return result


class ToItsOwn(nn.Linear):
    """Writes to the weights that the module has when the backward runs, which autograd does not know of."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Writes.apply(x if x.requires_grad else x.requires_grad_(), self, None, None)
        return result


class Keeps(nn.Linear):
    """Its gradients are nowhere when the backward is over."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x if x.requires_grad else x.requires_grad_(), self.weight.detach())


def written(layer: type[nn.Linear]) -> nn.Sequential:
    return model_of(lambda: nn.Sequential(layer(WIDTH, WIDTH), nn.Tanh()))


@pytest.mark.parametrize("layer", [ToArguments, ToItsOwn])
def test_a_reference_that_writes_gradients_itself_has_them(whitebox: WhiteBox, layer: type[nn.Linear]) -> None:
    assert passes(judged(whitebox, step, partial(written, layer))).law("gradient").checked == 16 // 2
    found = named(judged(whitebox, partial(step, call=without_second), partial(written, layer)))
    assert found[0] == ("dropped", 0, 0, (2,)), found


def test_a_reference_without_any_gradient_fails_nothing(whitebox: WhiteBox) -> None:
    def full(model: nn.Sequential, microbatches: list[Any]) -> Any:
        handed = step(model, microbatches)
        for parameter in handed[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        return handed

    verdict = judged(whitebox, full, partial(written, Keeps))
    assert verdict.verdict == "unknown"
    assert "gives no parameter a gradient" in verdict.headline


# Modules that are called more than once in a forward.


class Residual(nn.Module):
    """As ResNet's blocks: one activation for both of its ends."""

    def __init__(self, *, inplace: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.relu = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.two(self.relu(self.one(x)))
        result += x
        return self.relu(result)  # type: ignore[no-any-return]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = plain_block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))  # type: ignore[no-any-return]


REPEATING = [Residual, partial(Residual, inplace=True), Twice]


@pytest.mark.parametrize("block", REPEATING, ids=["residual", "in place", "twice"])
def test_a_stage_may_end_in_a_module_that_is_called_twice(whitebox: WhiteBox, block: Callable[[], nn.Module]) -> None:
    build = partial(model_of, block)
    assert passes(judged(whitebox, step, build)).law("boundaries").checked >= 28
    half_of_it = partial(step, passed=lambda m, gradient: gradient / 2 if m == 1 else gradient)
    assert named(judged(whitebox, half_of_it, build)) == [("scale", 0, 0, (1,))]


def test_a_watched_block_that_is_applied_twice_is_one(whitebox: WhiteBox) -> None:
    def inner(model: nn.Sequential, microbatches: list[Any], **options: Any) -> Any:
        stage = half(model)
        assert isinstance(stage[1], Twice)
        watch(stage[1].block)
        return stage, all_forward_all_backward(stage, microbatches, **options)

    build = partial(model_of, Twice)
    assert passes(judged(whitebox, inner, build)).law("boundaries").outcome == "pass"
    half_of_it = partial(inner, passed=lambda m, gradient: gradient / 2 if m == 1 else gradient)
    assert named(judged(whitebox, half_of_it, build)) == [("scale", 0, 0, (1,))]


# First stages that are not trained.


def by_own_schedule(model: nn.Sequential, microbatches: list[Any]) -> Any:
    stage = watch(half(model))
    schedule = PipelineSchedule(
        kind="1F1B", n_microbatches=COUNT, stages=[stage], loss_fn=loss_fn, pp_group=dist.group.WORLD
    )
    known = schedule.accumulate(microbatches)
    return stage, [known[m] for m in sorted(known)] or None


@pytest.mark.parametrize("frozen", [1, 2, 3])
@pytest.mark.parametrize("one", [step, by_own_schedule])
def test_a_frozen_stage_owes_no_backward(whitebox: WhiteBox, one: Callable[..., Any], frozen: int) -> None:
    passes(judged(whitebox, one, partial(plain, frozen=frozen)))


def test_faults_behind_a_frozen_stage_are_named(whitebox: WhiteBox) -> None:
    def dropped(stage: nn.Module, m: int, x: Tensor) -> Tensor:
        result = called(stage, m, x)
        return result.detach().requires_grad_() if m == 2 and dist.get_rank() == 1 else result

    def thawed(model: nn.Sequential, microbatches: list[Any]) -> Any:
        return step(model.requires_grad_(True), microbatches)

    build = partial(plain, frozen=2)
    assert named(judged(whitebox, partial(step, call=dropped), build))[0] == ("dropped", 1, 1, (2,))
    assert {kind for kind, *_ in named(judged(whitebox, thawed, build))} == {"unexpected"}


# Modes and calls that change nothing that was computed.


in_evaluation_mode = partial(step, training=False)


def with_metric(model: nn.Sequential, microbatches: list[Any], *, first: bool = False) -> Any:
    """Rank 0 calls its stage twice more, without any backward."""
    stage, again = watch(half(model)), [x for x, _ in microbatches[1:3]] if dist.get_rank() == 0 else []
    before = [stage(x) for x in again if first]
    losses = all_forward_all_backward(stage, microbatches)
    assert len(before) + len([stage(x) for x in again if not first]) == len(again)
    return stage, losses


@pytest.mark.parametrize("one", [in_evaluation_mode, with_metric, partial(with_metric, first=True)])
def test_a_mode_or_a_call_that_changes_nothing_is_no_fault(whitebox: WhiteBox, one: Callable[..., Any]) -> None:
    passes(judged(whitebox, one, plain))


class Fades(nn.Module):
    """Another computation in evaluation mode, by what is no dropout of torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.9 if self.training else x


def test_a_mode_that_changes_what_is_computed_is_named(whitebox: WhiteBox) -> None:
    found = judged(whitebox, in_evaluation_mode, partial(model_of, lambda: nn.Sequential(plain_block(), Fades())))
    assert named(found)[0][0] == "mode"


def test_a_mode_that_changes_nothing_is_not_blamed_for_another_fault(whitebox: WhiteBox) -> None:
    both = partial(in_evaluation_mode, passed=lambda m, gradient: gradient / 2 if m == 1 else gradient)
    assert named(judged(whitebox, both, plain)) == [("scale", 0, 0, (1,))]


# Gradients that are not the reference's as they pass.


def test_a_late_division_is_no_fault_and_a_gradient_halved_on_its_way_is(whitebox: WhiteBox) -> None:
    def late(model: nn.Sequential, microbatches: list[Any], **options: Any) -> Any:
        stage, losses = step(model, microbatches, divisor=1.0, **options)
        for parameter in stage.parameters():
            parameter.grad /= COUNT
        return stage, losses

    def halved(m: int, gradient: Tensor) -> Tensor:
        return gradient / 2

    assert "were not compared" in passes(judged(whitebox, late, plain)).law("boundaries").note
    for one in (step, late):
        verdict = judged(whitebox, partial(one, passed=halved), plain)
        assert verdict.law("boundaries").outcome == "unknown", verdict
        assert named(verdict) == [("scale", 0, 0, ())]
        assert "every watched boundary tensor is right" not in str(verdict)


# What a watched stage was sent by one that nobody watched, or only in part.


def sent(x: Tensor, m: int, how: Callable[[Tensor], Tensor]) -> Tensor:
    """Rank 0's output, changed for microbatch 1."""
    return how(x) if m == 1 and dist.get_rank() == 0 else x


CHANGES: list[Callable[[Tensor], Tensor]] = [
    lambda y: y + torch.linspace(0, 1, WIDTH),
    lambda y: y * 1.5,
    lambda y: y.flip(0),
    lambda y: y.bfloat16().float(),
]


@pytest.mark.parametrize("how", CHANGES, ids=["added", "times", "order", "rounded"])
def test_what_an_unseen_sender_made_is_not_called_altered_on_its_way(
    whitebox: WhiteBox, how: Callable[[Tensor], Tensor]
) -> None:
    def unwatched(model: nn.Sequential, microbatches: list[Any], *, rank_0: Callable[..., Any]) -> Any:
        stage = half(model)
        rank_0(stage) if dist.get_rank() == 0 else watch(stage)
        return stage, all_forward_all_backward(stage, microbatches, lambda s, m, x: sent(called(s, m, x), m, how))

    seen = named(judged(whitebox, partial(unwatched, rank_0=watch), plain))
    assert seen[0][:3] in (("altered", 1, 1), ("rounded", 1, 1)), seen
    for nobody in (lambda stage: None, lambda stage: watch(stage[0])):
        verdict = judged(whitebox, partial(unwatched, rank_0=nobody), plain)
        assert not {kind for kind, *_ in named(verdict)} & {"altered", "rounded", "scale"}, verdict
        assert "messages, buffers" not in str(verdict) or "does not say" in str(verdict), verdict


# Inputs that no backward reads.


class Positioned(nn.Module):
    """Takes positions beside what flows, and needs them in its forward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = plain_block()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.inner(x + positions) + x  # type: ignore[no-any-return]


class InOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Positioned() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, torch.full((1, WIDTH), float(number)))
        return x


def one_buffer(model: InOrder, microbatches: list[Any], **options: Any) -> Any:
    """Positions lie in one buffer, which is written to for each call and freed for some."""
    stage, buffer = watch(model.layers[dist.get_rank()]), torch.empty(1, WIDTH)

    def call(stage: nn.Module, m: int, x: Tensor) -> Tensor:
        positions = torch.empty(1, WIDTH) if m == 2 else buffer
        result: Tensor = stage(x, positions.fill_(float(dist.get_rank())))
        positions.fill_(-1.0)
        return result

    return stage, all_forward_all_backward(stage, microbatches, call, **options)


def test_what_no_backward_reads_is_not_overwritten(whitebox: WhiteBox) -> None:
    def doubled(m: int, gradient: Tensor) -> Tensor:
        return gradient * 2

    passes(judged(whitebox, one_buffer, InOrder))
    assert named(judged(whitebox, partial(one_buffer, passed=doubled), InOrder)) == [("scale", 0, 0, ())]
