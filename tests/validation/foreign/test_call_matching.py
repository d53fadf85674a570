"""Of which microbatch a call was: only what tells it is believed, and what nothing tells stays unknown."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof.foreign import WhiteBox, watch
from pipeproof.foreign.crossings import passed
from pipeproof.foreign.survey import Places, Survey
from pipeproof.observers.calls import Call
from pipeproof.observers.observed import UNKNOWN_MICROBATCH, Passed
from pipeproof.observers.sketch import Sketch, sketch
from pipeproof.observers.watching import Watcher
from pipeproof.reference.data import Batch
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

MICROBATCHES, STAGES = 4, 2


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean() / MICROBATCHES


def drawn(seed: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def batches(*, equal: bool = False) -> list[Batch]:
    """``equal``: of equal inputs and different targets."""
    return [Batch((drawn(0 if equal else m),), drawn(100 + m), 4) for m in range(MICROBATCHES)]


def places(given: list[Batch]) -> tuple[Places, Places]:
    whole = model()
    survey = Survey(whole)
    for microbatch, batch in enumerate(given):

        def train(batch: Batch = batch) -> None:
            loss_fn(whole(*batch.inputs), batch.target).backward()  # type: ignore[no-untyped-call]

        survey.watch(microbatch, batch, train)
    return survey.places


def calls(given: list[Batch], order: list[int]) -> dict[int, list[Call]]:
    """Both stages' calls of a right step that takes microbatches in this order."""
    watcher, whole = Watcher(), model()
    for stage in whole:
        watcher.watch(stage)
    for number in order:
        loss_fn(whole(*given[number].inputs), given[number].target).backward()  # type: ignore[no-untyped-call]
    return {stage: list(watcher.calls(module) or ()) for stage, module in enumerate(whole)}


def strange(call: Call, seed: int, *, keep: tuple[str, ...] = ()) -> Call:
    """``call`` with other numbers everywhere but in what is to ``keep``."""
    one = sketch(drawn(seed))
    new: dict[str, list[Sketch] | dict[int, Sketch]] = {"inputs": [one], "outputs": [one]}
    new |= {name: {0: one} for name in ("output_gradients", "input_gradients", "kept")}
    return replace(call, **{name: seen for name, seen in new.items() if name not in keep})  # type: ignore[arg-type]


def flowing(seen: dict[int, list[Call]], given: list[Batch] | None = None) -> dict[int, Passed]:
    return passed([seen], MICROBATCHES, places(given or batches()))[0]


def forwards(flow: Passed) -> list[int]:
    return [action.microbatch for action, _ in flow.called]


def with_strangers(order: list[int], *at: int, stage: int = 1, keep: tuple[str, ...] = ()) -> dict[int, list[Call]]:
    """The calls of a right step, in which those ``at`` of a stage are of nothing known."""
    seen = calls(batches(), order)
    for call in at:
        seen[stage][call] = strange(seen[stage][call], 50 + call, keep=keep)
    return seen


def test_of_two_unknown_calls_none_is_given_a_number() -> None:
    flow = flowing(with_strangers([3, 1, 0, 2], 1, 2))[1]
    assert forwards(flow) == [3, UNKNOWN_MICROBATCH, UNKNOWN_MICROBATCH, 2]
    assert (flow.lost, flow.complete, flow.untold) == ((0, 1), True, True)
    first, second = (one for one in flow.crossings if one.what == "input" and not one.same)
    assert [one.at for one in (first, second)] == [f"1F of call {number}" for number in (2, 3)]
    told = "like no output of the reference's modules and no gradient of one, so its microbatch is not known"
    assert first.seen == told


def test_a_single_unknown_call_is_the_microbatch_that_no_other_was_about() -> None:
    flow = flowing(with_strangers([3, 1, 0, 2], 2))[1]
    assert (forwards(flow), flow.lost) == ([3, 1, 0, 2], ())
    (one,) = (one for one in flow.crossings if one.what == "input" and not one.same)
    golden(one.seen, numbers=False)


def test_that_it_was_the_only_one_left_is_said_of_zeros_too() -> None:
    seen = calls(batches(), [3, 1, 0, 2])
    zero = sketch(torch.zeros(4, 8))
    seen[1][2] = replace(strange(seen[1][2], 50), inputs=[zero])
    (one,) = (one for one in flowing(seen)[1].crossings if one.what == "input" and not one.same)
    assert one.at == "1F0"
    golden(one.seen)


def test_beside_a_microbatch_that_came_twice_a_single_unknown_call_is_not_known() -> None:
    flow = flowing(with_strangers([3, 1, 3, 2], 1))[1]
    assert (forwards(flow), flow.lost, flow.complete) == ([3, UNKNOWN_MICROBATCH, 3, 2], (0, 1), False)


def test_where_a_call_is_missing_a_single_unknown_one_is_not_known() -> None:
    flow = flowing(with_strangers([3, 1, 0], 1))[1]
    assert (forwards(flow), flow.complete) == ([3, UNKNOWN_MICROBATCH, 0], False)


def test_what_flows_back_and_what_was_kept_tell_as_well() -> None:
    for keep in ("output_gradients", "input_gradients", "kept"):
        assert forwards(flowing(with_strangers([3, 1, 0, 2], 1, 2, keep=(keep,)))[1]) == [3, 1, 0, 2], keep


def test_what_a_neighbour_sent_or_was_sent_tells_bit_for_bit() -> None:
    seen = with_strangers([3, 1, 0, 2], 1, 2)
    for call in (1, 2):  # the stage before knows its own calls, and sent this on
        seen[0][call] = replace(seen[0][call], outputs=seen[1][call].inputs)
    assert forwards(flowing(seen)[1]) == [3, 1, 0, 2]
    seen[1][1:3] = reversed(seen[1][1:3])
    assert forwards(flowing(seen)[1]) == [3, 0, 1, 2]


def test_a_tensor_that_was_sent_twice_tells_nothing() -> None:
    seen = with_strangers([3, 1, 0, 2], 1, 2)
    for call in (1, 2):
        seen[0][call] = replace(seen[0][call], outputs=seen[1][1].inputs)
    assert forwards(flowing(seen)[1]) == [3, UNKNOWN_MICROBATCH, UNKNOWN_MICROBATCH, 2]


def test_a_changed_input_is_still_its_microbatch_s() -> None:
    for change in (Tensor.half, lambda x: x.flip(0), lambda x: x * 2, lambda x: x + 0.05 * drawn(60)):
        seen = with_strangers([3, 1, 0, 2], 1, 2)
        for call, number in ((1, 1), (2, 0)):
            given = change(model()[0](batches()[number].inputs[0]).detach()).float()
            seen[1][call] = replace(seen[1][call], inputs=[sketch(given)])
        assert forwards(flowing(seen)[1]) == [3, 1, 0, 2]


def test_equal_inputs_are_told_apart_by_what_flows_back() -> None:
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


REPEATING = [Residual, partial(Residual, inplace=True), Twice]


@pytest.mark.parametrize("block", REPEATING, ids=["residual", "in place", "twice"])
def test_a_stage_may_end_in_a_module_that_is_called_twice(whitebox: WhiteBox, block: Callable[[], nn.Module]) -> None:
    build = partial(model_of, block)
    assert passes(judged(whitebox, step, build)).law("boundaries").checked >= 28
    half_of_it = partial(step, passed=lambda m, gradient: gradient / 2 if m == 1 else gradient)
    assert named(judged(whitebox, half_of_it, build)) == [("scale", 0, 0, (1,))]


def twice(model: nn.Sequential, microbatches: list[Any], *, cleared: bool) -> Any:
    """Two of the microbatches to warm up, then all of them, with the gradients ``cleared`` between or not."""
    stage = watch(half(model))
    all_forward_all_backward(stage, microbatches[:2], divisor=2)
    if cleared:
        stage.zero_grad()
    return stage, all_forward_all_backward(stage, microbatches)


def test_what_warmed_stages_up_and_was_cleared_is_no_part_of_the_step(whitebox: WhiteBox) -> None:
    build = partial(model_of, plain_block)
    verdict = passes(judged(whitebox, partial(twice, cleared=True), build))
    golden(verdict.law("microbatches").note, numbers=False)
    kept = judged(whitebox, partial(twice, cleared=False), build)
    assert (kept.verdict, kept.law("microbatches").outcome, kept.law("gradient").outcome) == ("fail", "fail", "fail")
    assert "stale-gradient" not in {kind for one in kept.ruled_out for kind in one.kinds}  # that is what it is


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


def test_a_fault_is_named_also_where_other_data_warmed_stages_up(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, skips_after_other_data, partial(model_of, plain_block))
    assert named(verdict) == [("dropped", 0, 0, (1,))], str(verdict)
    assert verdict.law("boundaries").outcome == "pass"


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
        made: Tensor = self.stages[2](x, gate)[0]
        return made


def streamed(gates: list[Tensor]) -> dict[int, Passed]:
    """What passed where stage 1 is given these for the second stream."""
    whole, given, watcher = Streams(), batches(), Watcher()
    survey = Survey(whole)
    for number, batch in enumerate(given):
        survey.watch(number, batch, partial(whole, *batch.inputs))
    for stage in whole.stages:
        watcher.watch(stage)
    for batch, gate in zip(given, gates, strict=True):
        whole(*batch.inputs, gate)
    seen = {stage: watcher.calls(module) or [] for stage, module in enumerate(whole.stages)}
    return passed([seen], MICROBATCHES, survey.places)[0]


def wrong_inputs(flow: Passed) -> list[tuple[str, str]]:
    return [(one.at, one.seen) for one in flow.crossings if one.what == "input 1" and not one.same]


def test_a_call_with_a_stream_of_another_microbatch_is_the_one_that_leaves_none_twice() -> None:
    flows = streamed([torch.tanh(*batches()[max(m - 1, 0)].inputs) for m in range(MICROBATCHES)])
    assert [forwards(flow) for flow in flows.values()] == [[0, 1, 2, 3]] * 3
    assert wrong_inputs(flows[1]) == [(f"1F{m}", f"microbatch {m - 1}'s") for m in (1, 2, 3)]


def test_what_a_stage_passed_on_as_it_came_is_not_where_it_came_from() -> None:
    seen = wrong_inputs(streamed([torch.ones(4, 8)] * MICROBATCHES)[1])
    assert [at for at, _ in seen] == ["1F0", "1F1", "1F2", "1F3"]
    assert all("no microbatch's" in what for _, what in seen), seen


def test_a_first_stage_without_parameters_has_no_backward_to_run(whitebox: WhiteBox) -> None:
    def build() -> nn.Sequential:
        model = model_of(plain_block)
        model[0], model[1] = nn.Tanh(), nn.Tanh()
        return model

    passes(judged(whitebox, step, build))
