"""What a recorder keeps of a step on one rank: every tensor as it was then, whoever writes to it later and how."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from pipeproof.core.observe.recorder import Recorder
from pipeproof.core.observe.recording import (
    FLOWED,
    GIVEN,
    HANDED_ON,
    KEPT,
    LATE,
    MADE,
    OUTPUT,
    RECEIVED,
    USED,
    Point,
    Recording,
)
from pipeproof.core.observe.wrappers import AroundStage
from pipeproof.pipeline import PipelineSchedule
from pipeproof.pipeline.boundary import Gradients, Tensors
from pipeproof.pipeline.stage import Goal
from pipeproof.pipeline.step import Parts

MICROBATCHES = 2


def inputs() -> list[Tensor]:
    return [torch.arange(4.0).view(2, 2) + m for m in range(MICROBATCHES)]


def schedule(kind: str = "interleaved") -> PipelineSchedule:
    """Two stages on one rank: y = 2x, then its sum."""
    stages = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    for stage in stages:
        with torch.no_grad():
            stage.weight.copy_(2 * torch.eye(2))
    return PipelineSchedule(
        kind=kind, n_microbatches=MICROBATCHES, stages=stages, loss_fn=lambda output, _: output.sum()
    )


def step(one: PipelineSchedule) -> None:
    one.accumulate([(x.clone(), None) for x in inputs()], loss_divisor=1.0)


def at(recording: Recording, stage: int, microbatch: int, where: str) -> list[list[float]]:
    (tensor,) = recording.tensors[Point(stage, microbatch, where)]
    assert not tensor.requires_grad
    return tensor.tolist()


def on_first(around: type[AroundStage], parts: Parts) -> Parts:
    return replace(parts, stages=(around(parts.stages[0]), *parts.stages[1:]))


class Overwrites(AroundStage):
    """Writes into its input before the backward, past torch's count of writes."""

    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        self.kept = inputs[0]
        return self.inner.forward(microbatch, inputs, goal)

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        self.kept.data.fill_(7.0)
        return self.inner.backward(microbatch, gradients)


class Doubles(AroundStage):
    """Its second backward finds gradients that somebody has put others in the place of."""

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        for parameter in self.module.parameters():
            parameter.grad = parameter.grad * 2 if microbatch and parameter.grad is not None else parameter.grad
        return self.inner.backward(microbatch, gradients)


def test_every_boundary_is_kept_as_it_was() -> None:
    one, recorder = schedule(), Recorder()
    step(one.wrap(recorder.wrap))
    recording = recorder.take()
    for m, x in enumerate(inputs()):
        for where, factor in ((GIVEN, 1), (USED, 1), (KEPT, 1), (MADE, 2), (OUTPUT, 2)):
            assert at(recording, 0, m, where) == (factor * x).tolist(), where
        for where in (RECEIVED, FLOWED):
            assert at(recording, 0, m, where) == [[2.0, 2.0]] * 2, where
        assert at(recording, 1, m, FLOWED) == [[1.0, 1.0]] * 2
        assert at(recording, 1, m, HANDED_ON) == [[2.0, 2.0]] * 2
        assert recording.graphs[0, m] == (m,)
    assert recording.adders == dict.fromkeys(range(2), tuple(range(MICROBATCHES)))
    assert torch.equal(recording.parameters[0, "weight"], next(one.parts.stages[0].module.parameters()))


def test_a_gradient_kept_for_the_second_half_is_seen_again() -> None:
    recorder = Recorder()
    step(schedule("zb-v").wrap(recorder.wrap))
    recording = recorder.take()
    assert at(recording, 0, 0, LATE) == at(recording, 0, 0, RECEIVED) == [[2.0, 2.0]] * 2


def test_what_is_written_past_torchs_count_shows_where_it_is_read_next() -> None:
    recorder = Recorder()
    step(schedule().wrap(partial(on_first, Overwrites)).wrap(recorder.wrap))
    recording = recorder.take()
    last = MICROBATCHES - 1
    assert at(recording, 0, last, GIVEN) == at(recording, 0, last, USED) == inputs()[last].tolist()
    assert at(recording, 0, last, KEPT) == [[7.0, 7.0]] * 2


def test_a_module_is_watched_only_while_its_recording_is_under_way() -> None:
    one, recorder = schedule(), Recorder()
    watched = one.wrap(recorder.wrap)
    step(watched)
    step(watched)
    taken = recorder.take()
    before = len(taken.tensors)
    modules = [stage.module for stage in one.parts.stages]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    step(one)
    assert len(recorder.take().tensors) == before
