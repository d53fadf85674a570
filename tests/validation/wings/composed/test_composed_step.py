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


WHOLE = ["words", "a", "b", "c", "head"]
V_SHAPED = [Modules([frozenset({"words"}), frozenset({"c", "head"})]), Modules([frozenset({"a"}), frozenset({"b"})])]
ONE_EACH = [Modules([frozenset({name})], [Flow()]) for name in ("x", "x", "y", "y")]
NONE = Modules([])


def numbers(every: Sequence[Modules], replicas: Replicas, whole: Sequence[str] = ()) -> list[list[int]]:
    return [list(one) for one in stage_numbers(every, replicas, whole, "mine")]


def test_the_models_names_tell_the_stages() -> None:
    assert numbers(V_SHAPED, Replicas.along(2, 4), WHOLE) == [[0, 3], [1, 2]]
    assert numbers([*V_SHAPED, *V_SHAPED], Replicas.along([0, 0, 1, 1], 4), WHOLE) == [[0, 3], [1, 2]] * 2
    tied = [Modules([frozenset({"head", "words"})]), Modules([frozenset({"a", "words"})])]
    assert numbers(tied, Replicas.along(2, 4), ["words", "a", "head"]) == [[1], [0]]


def test_one_module_has_its_ranks_place() -> None:
    assert numbers(ONE_EACH, Replicas.along(4, 4)) == [[0], [1], [2], [3]]
    assert numbers(ONE_EACH, Replicas.along([0, 1, 0, 1], 4)) == [[0], [0], [1], [1]]
    assert numbers(ONE_EACH, Replicas.along({"dp": 2, "pp": 2}, 4)) == [[0], [1], [0], [1]]
    assert numbers([NONE, *ONE_EACH[:2]], Replicas.along(3, 4)) == [[], [0], [1]]


def test_what_ran_tells_the_stage() -> None:
    calls = [[Call(True, began=1), Call(True, began=4)], [Call(True, began=2)]]
    trace = [Action.parse(one) for one in ("3F0", "0F0", "0B0", "3F1")]
    told = stages_of_actions(trace, calls)
    assert told == [3, 0]
    every = [replace(V_SHAPED[0], traced=told), replace(V_SHAPED[1], traced=[1, 2])]
    assert numbers(every, Replicas.along(2, 2)) == [[3, 0], [1, 2]]
    assert stages_of_actions(trace[:-1], calls) is stages_of_actions(None, calls) is None, (
        "other calls than the trace has"
    )
    assert stages_of_actions([Action.parse(one) for one in ("3F0", "3F1", "0F0")], calls) is None, (
        "two stages in one module"
    )


def digests(*names: str) -> frozenset[bytes]:
    return frozenset(name.encode() for name in names)


def passed(came: str, gave: str, returned: str = "", handed: str = "") -> Flow:
    """What passed a module of two calls, each tensor by a letter; - is one that is nobody's."""
    return Flow([digests(one) for one in came], [digests(one) for one in returned], digests(*gave), digests(*handed))


FIRST, SECOND, THIRD = passed("ab", "AB"), passed("AB", "cd"), passed("cd", "CD")


def of_flows(*every: Sequence[Flow]) -> list[Modules]:
    return [Modules([frozenset({"x"})] * len(own), own) for own in every]


@pytest.mark.parametrize(
    "flows",
    [[[FIRST], [SECOND], [passed("--", "CD")]], [[FIRST], [passed("AC", "cd")], [THIRD]]],
    ids=["one sees none", "one is another's"],
)
def test_ranks_tell_where_tensors_agree(flows: list[list[Flow]]) -> None:
    assert numbers(of_flows(*flows), Replicas.along(3, 4)) == [[0], [1], [2]]


BACKWARD = [THIRD], [FIRST], [SECOND]


def test_what_the_contract_says_comes_first() -> None:
    said = [[2], [0], [1]]
    assert [*map(list, stage_numbers(of_flows(*BACKWARD), Replicas.along(3, 4), (), "mine", said))] == said
    twice = stage_numbers(V_SHAPED * 2, Replicas.along([0, 0, 1, 1], 4), WHOLE, "mine", [[3, 0], [1, 2]])
    assert [*map(list, twice)] == [[3, 0], [1, 2]] * 2, "for each rank of a pipeline, whatever names tell"


@pytest.mark.parametrize(
    ("one", "said", "told"),
    [
        (V_SHAPED[0], [[0]], "has \\[0\\] for rank 0, which handed back 2 modules: mend one"),
        (V_SHAPED[0], [[0, 1], [2]], "has \\[2\\] for rank 1, which handed back 2 modules"),
        (V_SHAPED[0], [[0, 1]], "has \\[\\] for rank 1, which handed back 2 modules"),
        (replace(V_SHAPED[0], traced=[0, 1]), [[1, 0], [2, 3]], "for rank 0, which handed back the stages \\[0, 1\\]"),
    ],
)
def test_the_contract_may_not_be_contradicted(one: Modules, said: list[list[int]], told: str) -> None:
    with pytest.raises(HandBackError, match=f"stages of the contract .*{told}"):
        stage_numbers([one, one], Replicas.along(2, 4), (), "mine", said)


def test_where_nothing_tells_that_is_said() -> None:
    for flows in (([FIRST, THIRD], [SECOND]), BACKWARD, ([THIRD], [passed("A-", "cd")], [FIRST])):
        with pytest.raises(HandBackError, match="mine handed back modules, and nothing tells in which") as error:
            numbers(of_flows(*flows), Replicas.along(len(flows), 4))
        assert reasons_of(*error.value.args) == (Reason.STAGES,)
    bare = Modules([frozenset(), frozenset({"a"})])
    for every, told in (([bare, *V_SHAPED], "no weights"), (V_SHAPED, "a")):
        with pytest.raises(HandBackError, match=f"mine handed back a module with {told}, .* or stages= of") as error:
            numbers(every, Replicas.along(len(every), 4), ["words", "c", "head"])
        assert reasons_of(*error.value.args) == (Reason.STAGES,)
