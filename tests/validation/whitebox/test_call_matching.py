"""Of which microbatch a call was: only what tells it is believed, and what nothing tells stays unknown."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import watch
from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.observed import UNKNOWN_MICROBATCH, Passed
from pipeproof.core.observe.sketch import Sketch, sketch
from pipeproof.core.observe.watching import Watcher
from pipeproof.whitebox import WhiteBox
from pipeproof.whitebox.crossings import find_passages
from pipeproof.whitebox.tensor_index import TensorIndex
from tests.support.boundary_calls import MICROBATCHES, STAGES, batches, calls, drawn, flowing, model
from tests.support.golden import golden
from tests.support.two_ranks import (
    WIDTH,
    all_forward_all_backward,
    called,
    half,
    judged,
    model_of,
    named,
    passes,
    plain_block,
    step,
)


def strange(call: Call, seed: int, *, keep: tuple[str, ...] = ()) -> Call:
    """``call`` with other numbers everywhere but in what is to ``keep``."""
    one = sketch(drawn(seed))
    new: dict[str, list[Sketch] | dict[int, Sketch]] = {"inputs": [one], "outputs": [one]}
    new |= {name: {0: one} for name in ("output_gradients", "input_gradients", "kept")}
    return replace(call, **{name: observed for name, observed in new.items() if name not in keep})  # type: ignore[arg-type]


def forwards(flow: Passed) -> list[int]:
    return [action.microbatch for action, _ in flow.called]


def with_strangers(order: list[int], *at: int, stage: int = 1, keep: tuple[str, ...] = ()) -> dict[int, list[Call]]:
    """The calls of a right step, in which those ``at`` of a stage are of nothing known."""
    observed = calls(batches(), order)
    for call in at:
        observed[stage][call] = strange(observed[stage][call], 50 + call, keep=keep)
    return observed


def sent(observed: dict[int, list[Call]], *, same: bool = False) -> dict[int, list[Call]]:
    """The stage before knows its own calls, and sent on what calls 1 and 2 were given; ``same``: one tensor twice."""
    for call in (1, 2):
        observed[0][call] = replace(observed[0][call], outputs=observed[1][1 if same else call].inputs)
    return observed


def turned(observed: dict[int, list[Call]]) -> dict[int, list[Call]]:
    observed[1][1:3] = reversed(observed[1][1:3])
    return observed


NONE, ORDER = UNKNOWN_MICROBATCH, [3, 1, 0, 2]
# Calls, their microbatches in the last stage, the microbatches of no call, whether there can be one call for each.
CALLS: dict[str, tuple[Callable[[], dict[int, list[Call]]], list[int], tuple[int, ...], bool]] = {
    "two unknown": (lambda: with_strangers(ORDER, 1, 2), [3, NONE, NONE, 2], (0, 1), True),
    "one unknown": (lambda: with_strangers(ORDER, 2), ORDER, (), True),
    "one unknown beside a repeated one": (lambda: with_strangers([3, 1, 3, 2], 1), [3, NONE, 3, 2], (0, 1), False),
    "one unknown, and one too few": (lambda: with_strangers([3, 1, 0], 1), [3, NONE, 0], (1, 2), False),
    **{
        f"told by {keep}": (partial(with_strangers, ORDER, 1, 2, keep=(keep,)), ORDER, (), True)
        for keep in ("output_gradients", "input_gradients", "kept")
    },
    "told by who sent it": (lambda: sent(with_strangers(ORDER, 1, 2)), ORDER, (), True),
    "told by who sent it, turned": (lambda: turned(sent(with_strangers(ORDER, 1, 2))), [3, 0, 1, 2], (), True),
    "sent twice": (lambda: sent(with_strangers(ORDER, 1, 2), same=True), [3, NONE, NONE, 2], (0, 1), True),
}


@pytest.mark.parametrize("name", CALLS)
def test_only_what_tells_a_microbatch_is_believed(name: str) -> None:
    made, numbers, left, complete = CALLS[name]
    flow = flowing(made())[1]
    assert (forwards(flow), flow.lost, flow.complete) == (numbers, left, complete)
    assert flow.untold == (NONE in numbers)
    wrong = [one for one in flow.crossings if one.what == "input" and not one.same]
    if name == "two unknown":
        assert [one.at for one in wrong] == [f"1F of call {number}" for number in (2, 3)]
    if name in ("one unknown", "two unknown"):
        golden(wrong[0].observed, numbers=False)


def test_zeros_may_be_the_only_call_left() -> None:
    observed = calls(batches(), ORDER)
    observed[1][2] = replace(strange(observed[1][2], 50), inputs=[sketch(torch.zeros(4, 8))])
    (one,) = (one for one in flowing(observed)[1].crossings if one.what == "input" and not one.same)
    assert one.at == "1F0"
    golden(one.observed)


def test_a_changed_input_is_still_its_microbatch_s() -> None:
    for change in (Tensor.half, lambda x: x.flip(0), lambda x: x * 2, lambda x: x + 0.05 * drawn(60)):
        observed = with_strangers([3, 1, 0, 2], 1, 2)
        for call, number in ((1, 1), (2, 0)):
            given = change(model()[0](batches()[number].inputs[0]).detach()).float()
            observed[1][call] = replace(observed[1][call], inputs=[sketch(given)])
        assert forwards(flowing(observed)[1]) == [3, 1, 0, 2]


def test_what_flows_back_tells_equal_inputs_apart() -> None:
    given = batches(equal=True)
    flows = flowing(calls(given, [3, 2, 1, 0]), given)
    assert [forwards(flow) for flow in flows.values()] == [[3, 2, 1, 0]] * STAGES
    assert all(one.same for flow in flows.values() for one in flow.crossings)


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


REPEATING = {"residual": Residual, "in place": partial(Residual, inplace=True), "twice": Twice}


def twice(model: nn.Sequential, microbatches: list[Any], *, cleared: bool) -> Any:
    """Two of the microbatches to warm up, then all of them, with the gradients ``cleared`` between or not."""
    stage = watch(half(model))
    all_forward_all_backward(stage, microbatches[:2], divisor=2)
    if cleared:
        stage.zero_grad()
    return stage, all_forward_all_backward(stage, microbatches)


def skips_after_other_data(model: nn.Sequential, microbatches: list[Any]) -> Any:
    """Other data to warm up, cleared; then a step in which the first stage leaves out a backward."""
    stage = watch(half(model))
    all_forward_all_backward(stage, [(x.flip(-1), target) for x, target in microbatches])
    stage.zero_grad()
    first = dist.get_rank() == 0

    def call(module: nn.Module, microbatch: int, x: Tensor) -> Tensor:
        result = called(module, microbatch, x)
        return result.detach() if first and microbatch == 1 else result

    return stage, all_forward_all_backward(stage, microbatches, call)


class Begun(nn.Module):
    """Two streams of one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), torch.tanh(x)


class Passing(Begun):
    """The second stream is read, and goes on as it is."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Any:
        return self.linear(x) * gate, gate


class Streams(nn.Module):
    """Three stages of two streams; ``gate``: what stage 1 is given for the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList([Begun(), Passing(), Passing()])

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        x, own = self.stages[0](x)
        x, gate = self.stages[1](x, own if gate is None else gate)
        return self.stages[2](x, gate)[0]


def streamed(gates: list[Tensor]) -> dict[int, Passed]:
    """What passed where stage 1 is given these for the second stream."""
    whole, given, watcher = Streams(), batches(), Watcher()
    survey = TensorIndex(whole)
    for number, batch in enumerate(given):
        survey.watch(number, batch, partial(whole, *batch.inputs))
    for stage in whole.stages:
        watcher.watch(stage)
    for batch, gate in zip(given, gates, strict=True):
        whole(*batch.inputs, gate)
    observed = {stage: watcher.calls(module) or [] for stage, module in enumerate(whole.stages)}
    return find_passages([observed], MICROBATCHES, survey.places)[0]


def wrong_inputs(flow: Passed) -> list[tuple[str, str]]:
    return [(one.at, one.observed) for one in flow.crossings if one.what == "input 1" and not one.same]


def test_a_call_with_anothers_stream_keeps_its_number() -> None:
    flows = streamed([torch.tanh(*batches()[max(m - 1, 0)].inputs) for m in range(MICROBATCHES)])
    assert [forwards(flow) for flow in flows.values()] == [[0, 1, 2, 3]] * 3
    assert wrong_inputs(flows[1]) == [(f"1F{m}", f"microbatch {m - 1}'s") for m in (1, 2, 3)]


def test_what_a_stage_only_passed_on_tells_nothing() -> None:
    observed = wrong_inputs(streamed([torch.ones(4, 8)] * MICROBATCHES)[1])
    assert [at for at, _ in observed] == ["1F0", "1F1", "1F2", "1F3"]
    assert all("no microbatch's" in what for _, what in observed), observed


def without_parameters() -> nn.Sequential:
    """Its first stage has no backward to run."""
    model = model_of(plain_block)
    model[0], model[1] = nn.Tanh(), nn.Tanh()
    return model


def second_halved(m: int, gradient: Tensor) -> Tensor:
    return gradient / 2 if m == 1 else gradient


halved, plain = partial(step, passed=second_halved), partial(model_of, plain_block)
# A step, its reference, what it is called if it is wrong.
STEPS: dict[str, tuple[Any, Callable[[], nn.Module], list[Any] | None]] = {
    **{f"right, {block}": (step, partial(model_of, kind), None) for block, kind in REPEATING.items()},
    **{block: (halved, partial(model_of, kind), [("scale", 0, 0, (1,))]) for block, kind in REPEATING.items()},
    "no parameters": (step, without_parameters, None),
    "warmed up": (partial(twice, cleared=True), plain, None),
    "warmed up, not cleared": (partial(twice, cleared=False), plain, [("stale-gradient", None, None, ())]),
    "other data before": (skips_after_other_data, plain, [("dropped", 0, 0, (1,))]),
}


@pytest.mark.parametrize("name", STEPS)
def test_calls_are_those_of_microbatches(whitebox: WhiteBox, name: str) -> None:
    """A stage may end in a module that is called twice, and what warmed it up is no part of the step."""
    one, build, causes = STEPS[name]
    verdict = judged(whitebox, one, build)
    if causes is None:
        assert passes(verdict).law("boundaries").checked >= (24 if name == "no parameters" else 28)
        if name == "warmed up":
            golden(verdict.law("microbatches").note, numbers=False)
        return
    if name == "warmed up, not cleared":
        assert (verdict.law("microbatches").outcome, verdict.law("gradient").outcome) == ("fail", "fail")
        assert "stale-gradient" not in {kind for one in verdict.ruled_out for kind in one.kinds}  # that is what it is
        return
    assert named(verdict) == causes, str(verdict)
    assert verdict.law("boundaries").outcome == ("pass" if name == "other data before" else "fail")
