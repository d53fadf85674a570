"""A step of a user's own, held against itself on the ranks of a world, says what it says beside a whole reference.

Which stage a module is that was handed back, the contract says, or names, the runtime or ranks tell.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from pipeproof import Contract, StageByStage, StepResult, World, watch
from pipeproof.core.cause import Cause
from pipeproof.core.observe.calls import Call
from pipeproof.core.reason import Reason, reasons_of
from pipeproof.core.replicas import Replicas
from pipeproof.core.verdict import Verdict
from pipeproof.pipeline.action import Action
from pipeproof.whitebox import WhiteBox, torch_pipelining
from pipeproof.whitebox.handed_back import HandBackError
from pipeproof.whitebox.stages_in_order import Flow
from pipeproof.wings.composed.step import Modules, stage_numbers, stages_of_actions
from tests.examples.my_pipeline import OneFOneB, build_model, loss_fn
from tests.support.golden import golden

COUNT = 4
Pairs = list[tuple[Tensor, Tensor]]


def data() -> Pairs:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 16, generator=draw), torch.randn(8, 16, generator=draw)) for _ in range(COUNT)]


class AcrossReplicas(OneFOneB):
    """Every other rank is of another replica."""

    def __init__(self, stage: nn.Module, microbatches: Pairs) -> None:
        super().__init__(stage, microbatches)
        self.replica = self.rank % 2
        self.rank, self.last = self.rank // 2, self.last // 2

    def send(self, tensor: Tensor, peer: int) -> None:
        super().send(tensor, 2 * peer + self.replica)

    def receive(self, peer: int, like: Tensor) -> Tensor:
        return super().receive(2 * peer + self.replica, like)


class LastIn(OneFOneB):
    """The latest activation in place of the first."""

    def backward(self) -> None:
        self.live.insert(0, self.live.pop())
        super().backward()


class Skipping(OneFOneB):
    """The third backward of rank 0 is not run."""

    done = 0

    def backward(self) -> None:
        self.done += 1
        if self.rank or self.done != 3:
            super().backward()
        else:
            self.receive(1, self.live.pop(0)[1])


def crossed(microbatches: Pairs) -> Pairs:
    (x, own), (y, other) = microbatches[1:3]
    return [microbatches[0], (x, other), (y, own), *microbatches[3:]]


def doubled(stage: nn.Module) -> None:
    for one in stage.parameters():
        if dist.get_rank() == 1 and one.grad is not None:
            one.grad *= 2


def averaged(stage: nn.Module) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for one in stage.parameters():
        if one.grad is not None:
            dist.all_reduce(one.grad, group=groups[dist.get_rank() // 2])
            one.grad /= 2


def updated(stage: nn.Module) -> None:
    torch.optim.SGD(stage.parameters(), lr=0.5).step()


def unchanged(given: Any) -> Any:
    return given


@dataclass(frozen=True)
class Mine:
    """A step of a user's own; of a whole model it takes its stage, and else it makes that itself."""

    runtime: type[OneFOneB] = OneFOneB
    last_data: Callable[[Pairs], Pairs] = unchanged  # what the last stage's rank makes of its microbatches
    after: Callable[[nn.Module], object] = unchanged

    def __call__(self, model: nn.Sequential | None, microbatches: Pairs) -> Any:
        whole = build_model() if model is None or next(model.parameters()).is_meta else model
        runtime = self.runtime(nn.Module(), self.last_data(microbatches) if dist.get_rank() == 1 else microbatches)
        runtime.stage = watch(whole[2 * runtime.rank :][:2])
        losses = runtime.step()
        self.after(runtime.stage)
        return runtime.stage, losses


def judged(whitebox: WhiteBox, step: Callable[..., Any], reference: Any, ranks: Any = 2, **more: Any) -> Verdict:
    return whitebox.validate(step, reference=reference, microbatches=data(), ranks=ranks, **more)


def whole_on_meta() -> nn.Module:
    assert torch.empty(()).is_meta, "nobody has room for the whole model"
    return build_model()


@pytest.mark.sweep
def test_a_right_step_passes_without_a_model(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, Mine(after=updated), StageByStage(build=whole_on_meta), loss_fn=loss_fn)
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), str(verdict)
    golden(verdict.config)
    compared = {law.name: law.checked for law in verdict.laws if law.outcome == "pass"}
    assert compared == {
        "parameters-once": 8,
        "microbatches": 8,
        "boundaries": 36,
        "loss": 4,
        "presence": 8,
        "gradient": 8,
    }
    assert "link by link" in verdict.to_html()


def told(cause: Cause) -> tuple[Any, ...]:
    return cause.kind, cause.rank, cause.stage, cause.microbatches


REPLICAS = {"pp": 2, "dp": 2}
FAULTS: dict[str, tuple[Mine, Any, tuple[Any, ...] | None]] = {
    "wrong activation": (Mine(LastIn), 2, ("mispaired", 0, 0, (0, 1, 2, 3))),
    "gradient scale": (Mine(after=doubled), 2, ("scale", 1, 1, ())),
    "dropped microbatch": (Mine(Skipping), 2, ("dropped", 0, 0, (2,))),
    "another's target": (Mine(last_data=crossed), 2, ("swapped-data", 1, 1, (1, 2))),
    "no reduction": (Mine(AcrossReplicas), REPLICAS, ("not-reduced", 0, 0, ())),
    "none": (Mine(AcrossReplicas, after=averaged), REPLICAS, None),
}


@pytest.mark.parametrize(("step", "ranks", "place"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named_as_beside_a_reference(
    whitebox: WhiteBox, step: Mine, ranks: Any, place: tuple[Any, ...] | None
) -> None:
    alone = judged(whitebox, step, StageByStage(loss_fn), ranks)
    if place is None:
        assert alone.outcome == "pass", str(alone)
        return
    beside = judged(whitebox, step, build_model, ranks, loss_fn=loss_fn)
    assert alone.outcome == beside.outcome == "fail", f"{alone}\n{beside}"
    assert told(alone.causes[0]) == place, str(alone)
    said = zip(told(beside.causes[0]), place, strict=True)
    assert all(one in (other, None) for one, other in said), f"the whole reference says more or else: {beside}"


def interleaved(model: None, microbatches: Pairs, loss_fn: Any = loss_fn, last_data: Any = unchanged) -> StepResult:
    rank, whole = dist.get_rank(), build_model()
    stages = [PipelineStage(whole[k : k + 1], k, 4, torch.device("cpu")) for k in (rank, rank + 2)]
    schedule = ScheduleInterleaved1F1B(stages, COUNT, loss_fn=loss_fn)
    return torch_pipelining.step(schedule, last_data(microbatches) if rank == 1 else microbatches)


def without_trace(model: None, microbatches: Pairs) -> StepResult:
    return replace(interleaved(model, microbatches), trace=None)


@pytest.mark.parametrize(
    ("said", "outcome", "law"),
    [
        ((), "unknown", "comparable"),
        ([[0, 2], [1, 3]], "pass", "boundaries"),
        ([[2, 0], [1, 3]], "fail", "boundaries"),
    ],
    ids=["none", "right", "another order"],
)
def test_where_nothing_tells_the_stages_the_contract_does(
    whitebox: WhiteBox, said: Any, outcome: str, law: str
) -> None:
    verdict = judged(whitebox, without_trace, StageByStage(loss_fn), contract=Contract(stages=said))
    assert (verdict.outcome, verdict.law(law).outcome) == (outcome, outcome), str(verdict)
    assert (Reason.STAGES in verdict.law(law).reasons) == (not said)


def uphill(output: Tensor, target: Tensor) -> Tensor:
    return -loss_fn(output, target)


def shifted(microbatches: Pairs) -> Pairs:
    return [(x, microbatches[k - 1][1]) for k, (x, _) in enumerate(microbatches)]


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({}, None),
        ({"loss_fn": uphill}, ("sign", None, None, ())),
        ({"last_data": shifted}, ("swapped-data", 1, 3, (0, 1, 2, 3))),
    ],
    ids=["right", "uphill", "targets shifted"],
)
def test_a_schedule_of_torch_says_its_stages(whitebox: WhiteBox, options: Any, place: tuple[Any, ...] | None) -> None:
    verdict = judged(whitebox, partial(interleaved, **options), StageByStage(loss_fn))
    assert verdict.outcome == ("pass" if place is None else "fail"), str(verdict)
    assert [told(one) for one in verdict.causes[:1]] == ([] if place is None else [place]), str(verdict)


def unwatched(model: None, microbatches: Pairs) -> Any:
    return build_model()[2 * dist.get_rank() :][:2]


def alone(model: None, microbatches: Pairs) -> Any:
    stage, _ = Mine()(model, microbatches)
    return {name: one.grad for name, one in stage.named_parameters()}


def with_outputs(model: None, microbatches: Pairs) -> Any:
    return StepResult(*Mine()(model, microbatches), outputs={"y": [1, 2, 3, 4]})


def by_index(model: None, microbatches: Pairs) -> Any:
    stage, losses = Mine()(model, microbatches)
    return StepResult(stage, losses, gradients={one: (one.grad, slice(0, 1)) for one in stage.parameters()})


def twice(model: None, microbatches: Pairs) -> Any:
    stage, losses = Mine()(model, microbatches)
    return StepResult([stage, stage], losses, trace=["0F0"])


def of_the_model(model: Any, microbatches: Pairs) -> Any:
    return model[2 * dist.get_rank() :][:2]


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (unwatched, "unwatched handed back module 0, which was not watched: call watch(module)"),
        (alone, "alone handed back gradients alone: hand back its modules, too"),
        (with_outputs, "with_outputs handed back outputs, which no whole model is there to give"),
        (by_index, "by_index handed back a part of a gradient by its index: expected a FlatShard"),
        (twice, "twice handed back modules, and nothing tells in which order they are the stages: say stages="),
        (of_the_model, "the step is given what build= of StageByStage makes on the meta device, or None"),
    ],
)
def test_what_cannot_be_checked_so_is_said(simulated: World, step: Callable[..., Any], said: str) -> None:
    verdict = judged(WhiteBox(simulated), step, StageByStage(loss_fn))
    assert verdict.outcome == "unknown"
    assert said in f"{verdict.headline}\n{verdict.failure}", str(verdict)


def local_names(model: None, microbatches: Pairs) -> Any:
    rank = dist.get_rank()
    stage = watch(nn.Sequential(*build_model()[2 * rank :][:2]))
    return stage, OneFOneB(stage, microbatches).step()


def test_names_tell_what_weights_are_called(simulated: World) -> None:
    whitebox = WhiteBox(simulated)
    verdict = judged(whitebox, local_names, StageByStage(loss_fn))
    assert verdict.outcome == "unknown"
    golden(verdict.headline, numbers=False)
    names = lambda name, rank, module: f"{2 * rank + int(name[0])}{name[1:]}"  # noqa: E731
    assert (
        judged(whitebox, local_names, StageByStage(loss_fn, build=build_model), contract=Contract(names=names)).outcome
        == "pass"
    )


WHOLE, PART = ["words", "a", "b", "c", "head"], ["words", "c", "head"]
ONE_EACH = [Modules([frozenset({name})], [Flow()]) for name in ("x", "x", "y", "y")]
TRACE = [Action.parse(one) for one in ("3F0", "0F0", "0B0", "3F1")]
CALLS = [[Call(True, began=1), Call(True, began=4)], [Call(True, began=2)]]


def of_names(*modules: str, traced: list[int] | None = None) -> Modules:
    """A rank's modules, each by the names of its weights."""
    return Modules([frozenset(one.split()) for one in modules], traced=traced)


def digests(names: str) -> frozenset[bytes]:
    return frozenset(name.encode() for name in names)


def passed(came: str, gave: str) -> Flow:
    """What passed a module of two calls, each tensor by a letter; - is one that is nobody's."""
    return Flow([digests(one) for one in came], [], digests(gave), frozenset())


def of_flows(*every: Sequence[Flow]) -> list[Modules]:
    return [Modules([frozenset({"x"})] * len(own), own) for own in every]


V_SHAPED = [of_names("words", "c head"), of_names("a", "b")]
TRACED = [of_names("words", "c head", traced=[3, 0]), of_names("a", "b", traced=[1, 2])]
FIRST, SECOND, THIRD = passed("ab", "AB"), passed("AB", "cd"), passed("cd", "CD")
BACKWARD = of_flows([THIRD], [FIRST], [SECOND])
NUMBERS: dict[str, tuple[list[Modules], Any, list[str], list[list[int]], list[list[int]]]] = {
    "names": (V_SHAPED, 2, WHOLE, [], [[0, 3], [1, 2]]),
    "names, in replicas": (V_SHAPED * 2, [0, 0, 1, 1], WHOLE, [], [[0, 3], [1, 2]] * 2),
    "names, one is tied": ([of_names("head words"), of_names("a words")], 2, ["words", "a", "head"], [], [[1], [0]]),
    "one module each": (ONE_EACH, 4, [], [], [[0], [1], [2], [3]]),
    "in replicas side by side": (ONE_EACH, [0, 1, 0, 1], [], [], [[0], [0], [1], [1]]),
    "in a mesh": (ONE_EACH, {"dp": 2, "pp": 2}, [], [], [[0], [1], [0], [1]]),
    "a rank has none": ([Modules([]), *ONE_EACH[:2]], 3, [], [], [[], [0], [1]]),
    "a trace": (TRACED, 2, [], [], [[3, 0], [1, 2]]),
    "tensors, one sees none": (of_flows([FIRST], [SECOND], [passed("--", "CD")]), 3, [], [], [[0], [1], [2]]),
    "tensors, one is another's": (of_flows([FIRST], [passed("AC", "cd")], [THIRD]), 3, [], [], [[0], [1], [2]]),
    "the contract, not tensors": (BACKWARD, 3, [], [[2], [0], [1]], [[2], [0], [1]]),
    "nor names, of each pipeline": (V_SHAPED * 2, [0, 0, 1, 1], WHOLE, [[3, 0], [1, 2]], [[3, 0], [1, 2]] * 2),
}


@pytest.mark.parametrize(("every", "ranks", "whole", "said", "numbers"), NUMBERS.values(), ids=NUMBERS)
def test_what_tells_a_modules_stage(
    every: list[Modules], ranks: Any, whole: list[str], said: list[list[int]], numbers: list[list[int]]
) -> None:
    assert [*map(list, stage_numbers(every, Replicas.along(ranks, 4), whole, "mine", said))] == numbers


@pytest.mark.parametrize(
    ("trace", "stages"),
    [(TRACE, [3, 0]), (TRACE[:-1], None), (None, None), ([TRACE[0], TRACE[3], TRACE[1]], None)],
    ids=["right", "other calls than it has", "none", "two stages in one module"],
)
def test_what_ran_tells_the_stage(trace: list[Action] | None, stages: list[int] | None) -> None:
    assert stages_of_actions(trace, CALLS) == stages


REFUSED: list[tuple[list[Modules], list[str], list[list[int]], str]] = [
    (V_SHAPED[:1] * 2, [], [[0]], "stages of .* has \\[0\\] for rank 0, which handed back 2 modules: mend one"),
    (V_SHAPED[:1] * 2, [], [[0, 1], [2]], "stages of .* has \\[2\\] for rank 1, which handed back 2 modules"),
    (V_SHAPED[:1] * 2, [], [[0, 1]], "stages of .* has \\[\\] for rank 1, which handed back 2 modules"),
    (
        [of_names("words", "c head", traced=[0, 1])] * 2,
        [],
        [[1, 0], [2, 3]],
        "for rank 0, which handed back the stages \\[0, 1\\]",
    ),
    (of_flows([FIRST, THIRD], [SECOND]), [], [], "mine handed back modules, and nothing tells in which"),
    (BACKWARD, [], [], "mine handed back modules, and nothing tells in which"),
    (of_flows([THIRD], [passed("A-", "cd")], [FIRST]), [], [], "mine handed back modules, and nothing tells in which"),
    ([of_names("", "a"), *V_SHAPED], PART, [], "mine handed back a module with no weights, .* or stages= of"),
    (V_SHAPED, PART, [], "mine handed back a module with a, .* or stages= of"),
]


@pytest.mark.parametrize(("every", "whole", "said", "told"), REFUSED)
def test_what_tells_no_stage_is_said(every: list[Modules], whole: list[str], said: list[list[int]], told: str) -> None:
    with pytest.raises(HandBackError, match=told) as error:
        stage_numbers(every, Replicas.along(len(every), 4), whole, "mine", said)
    assert reasons_of(*error.value.args) == ((Reason.STAGES,) if not said else ())
