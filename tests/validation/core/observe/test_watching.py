"""What a watcher notes of a call is that call's own, however long the tensors live that came into it."""

from functools import partial
from threading import Event, Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint

from pipeproof import StepResult, watch
from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.sketch import sketch
from pipeproof.core.observe.watching import Watcher, watching
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox, torch_pipelining
from tests.support.golden import golden
from tests.support.steps import WIDTH, backward, blocks, loss_fn
from tests.support.two_ranks import COUNT, called, data, half, named, one_by_one, passes, plain, step, without_second
from tests.support.two_ranks import Call as Way
from tests.support.two_ranks import judged as judged_as


def judged(whitebox: WhiteBox, step: Any, **more: Any) -> Verdict:
    given = {"reference": blocks, "microbatches": data(), "ranks": 2, "loss_fn": loss_fn} | more
    return whitebox.validate(step, **given)


def one_leaf(model: nn.Sequential, microbatches: list[Any], *, twice: int | None = None) -> Any:
    """All of rank 1's microbatches are received into one leaf. ``twice`` is run backward twice."""
    stage, leaf = watch(half(model)), torch.empty(4, WIDTH).requires_grad_()
    if dist.get_rank() == 0:
        one_by_one(stage, microbatches)
        return stage, None
    losses = []
    for m, (_, target) in enumerate(microbatches):
        dist.recv(leaf.data, 0)
        leaf.grad = None
        loss = loss_fn(stage(leaf), target)
        losses.append(loss.item())
        if m == twice:
            (loss / COUNT).backward(retain_graph=True)  # type: ignore[no-untyped-call]
        (loss / COUNT).backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        dist.send(leaf.grad, 0)
    return stage, losses


def test_one_leaf_for_all_that_is_received_is_no_fault(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, one_leaf)
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), verdict
    assert verdict.law("boundaries").exact == verdict.law("boundaries").checked


@pytest.mark.sweep
def test_a_backward_that_runs_twice_is_seen_at_such_a_leaf(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, lambda model, microbatches: one_leaf(model, microbatches, twice=2))
    assert [(c.kind, c.rank, c.stage, c.microbatches) for c in verdict.causes[:1]] == [("doubled", 1, 1, (2,))], verdict
    own = verdict.causes[0].lines[0]
    assert (own.what, own.line.function) == ("1B2", "one_leaf")
    assert own.line.text.startswith("(loss / COUNT).backward(retain_graph=True)")


@pytest.mark.parametrize("none", [True, False])
@pytest.mark.parametrize("by_optimizer", [True, False])
def test_what_a_call_had_added_is_noted_as_cleared(none: bool, by_optimizer: bool) -> None:
    stage, kept = nn.Linear(WIDTH, WIDTH), nn.Module.zero_grad
    with watching() as watcher:
        watch(stage)
        clearing = torch.optim.SGD(stage.parameters()) if by_optimizer else stage
        clearing.zero_grad()
        for x, _ in data()[:2]:
            stage(x).sum().backward()
        waiting = stage(x)
        torch.optim.SGD([stage.bias]).zero_grad()
        clearing.zero_grad(set_to_none=none)
        waiting.sum().backward()
    lines = [[line.text for line in call.cleared[:1]] for call in watcher.calls(stage) or []]
    assert lines == [["clearing.zero_grad(set_to_none=none)"]] * 2 + [[]]
    assert nn.Module.zero_grad is kept


def no_leaf(model: nn.Sequential, microbatches: list[Any], *, silent: bool = False) -> Any:
    """Rank 1 cannot hand on a gradient: what it received wants none, or its forward has none."""
    (x, target), rank = microbatches[0], dist.get_rank()
    stage = watch(half(model))
    if rank == 0:
        dist.send(stage(x).detach(), 1)
        dist.recv(torch.empty_like(x), 1)
    dist.recv(x, 0)
    with torch.set_grad_enabled(not silent):
        loss = loss_fn(stage(x), target)
    loss.backward()
    dist.send(x.grad, 0)


@pytest.mark.parametrize(("silent", "said"), [(False, "a message that wants no gradient"), (True, "without gradients")])
def test_a_step_that_finds_no_gradient_is_told_whose(silent: bool, said: str, whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, partial(no_leaf, silent=silent))
    assert verdict.word == "error", verdict
    *_, told = verdict.details.partition("the stage was last called at")
    assert said in told
    assert "no_leaf: loss =" in told
    assert ("no_leaf: dist.recv(x, 0)" in told) != silent


def compiled(model: nn.Sequential, microbatches: list[Any], *, itself: bool) -> Any:
    """What ``torch.compile`` gives back is called; that is watched, or the stage ``itself``."""
    made = torch.compile(model, backend="eager")
    watch(model if itself else made)
    return model, backward(made, microbatches)


@pytest.mark.parametrize("itself", [True, False])
def test_a_stage_that_is_compiled_is_watched_from_outside(itself: bool, whitebox: WhiteBox) -> None:
    law = passes(judged(whitebox, partial(compiled, itself=itself), ranks=1)).law("boundaries")
    assert law.outcome == ("not observed" if itself else "pass")
    golden(law.note)


def two_steps(model: nn.Sequential, microbatches: list[Any], *, divides: bool = True) -> StepResult:
    """Half of the microbatches in each of two steps of one schedule, whose stages keep what they receive into."""
    rank = dist.get_rank()
    stage = pipelining.PipelineStage(model[2 * rank : 2 * rank + 2], rank, 2, torch.device("cpu"))
    share = COUNT // (COUNT // 2) if divides else 1
    schedule = pipelining.Schedule1F1B(
        stage,
        COUNT // 2,
        loss_fn=lambda output, target: loss_fn(output, target) / share / (COUNT // 2),
        scale_grads=False,
    )
    steps = [torch_pipelining.step(schedule, half) for half in (microbatches[:2], microbatches[2:])]
    losses = [float(loss) * COUNT for one in steps for loss in one.losses or ()]
    return StepResult(steps[0].modules, losses or None)


def test_calls_of_two_threads_keep_their_own_inputs() -> None:
    """The second call begins after the first, and ends after it."""
    begun = [Event(), Event()]

    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            number = int(x[0, 0])
            begun[number].set()
            begun[1].wait(10)
            made = super().forward(x)
            return made if number == 0 else (threads[0].join(10), made)[1]

    watcher, stages = Watcher(), [Slow(2, 2), Slow(2, 2)]
    inputs = [torch.full((1, 2), float(number)) for number in range(2)]
    threads = [Thread(target=stage, args=(x,)) for stage, x in zip(stages, inputs, strict=True)]
    for stage, thread, one in zip(stages, threads, begun, strict=True):
        watcher.watch(stage)
        thread.start()
        one.wait(10)
    threads[1].join(10)
    observed = [(watcher.calls(stage) or [])[0].inputs[0].digest for stage in stages]
    assert observed == [sketch(x).digest for x in inputs]


@pytest.mark.sweep
def test_two_steps_of_one_schedule_of_torchs_pass(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, two_steps)
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), verdict
    assert verdict.law("microbatches").outcome == "pass"


@pytest.mark.sweep
def test_two_steps_that_each_divide_by_their_own_count_are_twice_as_large(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, lambda model, microbatches: two_steps(model, microbatches, divides=False))
    assert verdict.outcome == "fail", verdict
    assert [(cause.kind, cause.factor) for cause in verdict.causes[:1]] == [("scale", pytest.approx(2.0))], verdict


class Carrying(nn.Module):
    """Hands a tensor on as it is, beside what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x) + kept, kept


def test_a_leaf_that_is_handed_on_as_it_is_has_each_calls_own_gradients() -> None:
    watcher, stage, kept = Watcher(), Carrying(), torch.randn(4, WIDTH, requires_grad=True)
    watcher.watch(stage)
    leaf, expected = torch.empty(4, WIDTH, requires_grad=True), []
    for x, target in data():
        leaf.data.copy_(x)
        outputs, gradients = stage(leaf, kept), (target, target * 2)
        torch.autograd.backward(outputs, gradients)
        expected.append((sketch(target), sketch(target * 2)))
    found: list[Call] | None = watcher.calls(stage)
    assert found is not None
    assert [call.output_gradients[0] for call in found] == [first for first, _ in expected]
    assert [(call.began, call.backwards) for call in found] == [(0, [2]), (3, [5]), (6, [8]), (9, [11])]
    assert len({call.input_gradients[0].digest for call in found}) == COUNT


class Forked(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        made = super().forward(x)
        return made, made * 2


def test_backwards_count_once_without_inputs_that_want_gradients() -> None:
    watcher, stage = Watcher(), Forked(WIDTH, WIDTH)
    watcher.watch(stage)
    outputs = stage(torch.ones(1, WIDTH))
    for _ in range(2):
        torch.autograd.backward(outputs, outputs, retain_graph=True)
    (call,) = watcher.calls(stage) or []
    assert (call.began, call.backwards, len(call.flowed)) == (0, [3, 6], 2)


class Cut(nn.Module):
    """Its second layer's gradients are whole, and nothing comes to its first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).detach())


@pytest.mark.parametrize("stage", [Cut(), nn.Linear(WIDTH, WIDTH)], ids=["cut", "whole"])
def test_a_backward_that_comes_to_no_input_ran_and_one_that_stops_at_the_output_did_not(stage: nn.Module) -> None:
    watcher, inputs = Watcher(), [x.requires_grad_() for x, _ in data()[:3]]
    watcher.watch(stage)
    made = [stage(x) for x in inputs]
    torch.autograd.grad(made[0].sum(), made[0])
    made[1].sum().backward()
    for parameter in list(stage.parameters())[-2:]:  # in two halves, as where weights have backwards of their own
        torch.autograd.grad(made[2].sum(), parameter, retain_graph=True)
    asked, ran, halves = watcher.calls(stage) or []
    assert (asked.ran, len(ran.ran), len(halves.ran)) == ([], 1, 1)
    assert bool(asked.output_gradients)
    assert (bool(ran.backwards), bool(ran.flowed)) == (not isinstance(stage, Cut), True)


class Fed(nn.Module):
    """A stage whose input is put into it before it is called, as Megatron's."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.given = torch.empty(0)

    def forward(self) -> Tensor:
        return self.layers(self.given)


def fed(model: nn.Sequential, microbatches: list[Any], *, wrong: int | None = None) -> Any:
    """``wrong``: a microbatch whose input is not what was received."""
    stage = watch(Fed(half(model)))

    def feed(x: Tensor) -> Tensor:
        stage.given = x
        return stage()

    return stage, one_by_one(feed, microbatches, lambda m, x: 2 * x if m == wrong else x) or None


def test_a_stage_that_is_fed_otherwise_than_by_its_arguments_is_said(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, fed)
    assert verdict.outcome == "pass", str(verdict)
    golden(verdict.law("boundaries").note)
    wrong = judged(whitebox, lambda model, microbatches: fed(model, microbatches, wrong=2))
    assert wrong.mismatches[0].law == "boundaries"
    assert (wrong.mismatches[0].stage, wrong.mismatches[0].microbatch) == (1, 2)


def recomputed(stage: nn.Module, m: int, x: Tensor, *, reentrant: bool = True) -> Tensor:
    return checkpoint(stage, x if x.requires_grad else x.requires_grad_(), use_reentrant=reentrant)


def but_for_the_last(stage: nn.Module, m: int, x: Tensor) -> Tensor:
    return called(stage, m, x) if m == COUNT - 1 else recomputed(stage, m, x)


CHECKPOINTS = [recomputed, partial(recomputed, reentrant=False), but_for_the_last]


@pytest.mark.parametrize("call", CHECKPOINTS, ids=["reentrant", "not reentrant", "all but the last"])
def test_a_stage_in_a_checkpoint_runs_once_for_each_microbatch(whitebox: WhiteBox, call: Way) -> None:
    verdict = passes(judged_as(whitebox, partial(step, call=call), plain))
    assert verdict.law("microbatches").outcome == verdict.law("boundaries").outcome == "pass"
    assert verdict.law("boundaries").checked == verdict.law("boundaries").exact >= 28


def spoilt(stage: nn.Module, m: int, x: Tensor) -> Tensor:
    """What a checkpoint keeps of microbatch 1 is written to before its recompute."""
    result = recomputed(stage, m, x)
    if m == 1 and dist.get_rank() == 1:
        x.data.mul_(2)
    return result


def test_what_goes_wrong_in_a_checkpoint_is_named(whitebox: WhiteBox) -> None:
    found = named(judged_as(whitebox, partial(step, call=partial(without_second, call=recomputed)), plain))
    assert found[0] == ("dropped", 0, 0, (2,)), found
    found = named(judged_as(whitebox, partial(step, call=spoilt), plain))
    assert found[0] == ("overwritten", 1, 1, (1,)), found
    half_of_it = partial(step, call=recomputed, passed=lambda m, gradient: gradient / 2 if m == 1 else gradient)
    assert named(judged_as(whitebox, half_of_it, plain))[0] == ("scale", 0, 0, (1,))
