"""What each rank brings to a checked step, and what follows from all of it together."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof import PipelineSchedule, World
from pipeproof.core.verdict import Verdict
from pipeproof.records.rank_part import (
    Arrival,
    Kept,
    RankStages,
    Run,
    describe_problems,
    disagreement,
    places_of,
    run_of,
)
from pipeproof.records.record import RecordError
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_check import check_step
from pipeproof.records.step_record import record_step
from pipeproof.worlds.worker import RankContext
from tests.support.golden import golden
from tests.support.steps import loss_fn


def test_ranks_that_run_other_microbatches_are_named() -> None:
    assert disagreement([None, ("a", "b"), ("a", "b")]) == {}
    golden(describe_problems(disagreement([("a", "b"), None, ("b", "a")])))
    golden(disagreement([None, None])[0])


def test_a_parameter_has_as_many_places_as_hold_it() -> None:
    arrivals = [Arrival({"a": 0, "b": 2}, None, ""), Arrival({"b": 1}, None, "")]
    assert places_of(arrivals) == {"a": [(0, 0)], "b": [(0, 2), (1, 1)]}


def test_two_stages_of_a_rank_that_share_a_weight_have_two_names_of_it() -> None:
    one = nn.Linear(2, 2)
    stages = RankStages({0: nn.Sequential(one), 3: nn.Sequential(one)}, lambda stage, name: name)
    with pytest.raises(RecordError, match=r"stages 0 and 3 both have .* a name of each stage; that it is one weight"):
        stages.check_names()
    with pytest.raises(RecordError, match=r"stages 0 and 3 both have a parameter weight: give rename=, from stage and"):
        RankStages({0: nn.Linear(2, 2), 3: one}, lambda stage, name: name).check_names()


def test_what_is_wrong_is_told_in_one_line() -> None:
    golden(describe_problems({0: "", 1: "x", 2: "y"}))
    assert describe_problems({0: ""}) == ""


def test_ranks_that_hold_the_same_are_replicas_with_microbatches_of_their_own() -> None:
    first, last = {"a": 0}, {"b": 1}
    arrivals = [Arrival(held, given, "") for held in (first, last) for given in (("x", "y"), ("z", "w"))]
    run, problems = run_of(arrivals)
    assert problems == {}
    assert run == Run((0, 1, 0, 1), ("x", "y", "z", "w"), ((0, 1), (2, 3), (0, 1), (2, 3)))
    assert run.as_in(("x", "z", "y", "w")).shares == ((0, 2), (1, 3), (0, 2), (1, 3))
    assert run.as_in(("x", "z", "y", "v")) == run, "other microbatches than those keep their numbers"
    assert run.together([["X", "Y"], None, None, ["Z", "W"]]) == ["X", "Y", "Z", "W"]


def test_replicas_that_say_all_microbatches_leave_open_which_are_theirs() -> None:
    run, problems = run_of([Arrival({"a": 0}, ("x", "y"), ""), Arrival({"a": 0}, None, "")])
    assert (run, problems) == (Run((0, 1), ("x", "y"), (None, None)), {})


def test_a_stage_alone_in_replicas_makes_none_of_the_model() -> None:
    arrivals = [Arrival({"a": 0}, ("x",), ""), Arrival({"a": 0}, ("x",), ""), Arrival({"b": 1}, ("x",), "")]
    run, problems = run_of(arrivals)
    assert (run.count, run.shares, problems) == (1, ((0,), (0,), (0,)), {})


def test_a_replica_s_ranks_must_agree() -> None:
    arrivals = [Arrival({"a": 0}, ("x",), ""), Arrival({"a": 0}, ("y",), "")] + [Arrival({"b": 1}, ("x",), "")] * 2
    assert list(run_of(arrivals)[1]) == [3]


DATA: list[tuple[object, object]] = [
    (torch.randn(4, 3, generator=torch.Generator().manual_seed(k)), torch.full((4, 3), float(k))) for k in range(2)
]


class Layer(nn.Module):
    """A layer whose running statistics are what its forwards left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def build() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(Layer(), Layer())


RECORD = record_step(build(), DATA, loss_fn=loss_fn)
BESIDE = SingleDevice(build, loss_fn)


def step(context: RankContext, against: Any, buffer: str, hidden: str) -> Verdict:
    """A step in which each rank has a layer; a ``buffer`` is moved, or taken away, and a gradient is not shown."""
    rank = context.rank
    own = build()[rank : rank + 1]
    schedule = PipelineSchedule(kind="gpipe", n_microbatches=2, stages=[own], loss_fn=loss_fn)
    with check_step({rank: own}, DATA, against=against, timeout_s=20.0) as check:
        losses = schedule.train_step(DATA).losses
        norm = own[0].norm
        if buffer == f"{rank}.norm.running_mean":
            norm.running_mean.add_(1.0)  # type: ignore[operator, union-attr]  # it is a tensor
        elif buffer == f"{rank}.norm.running_var":
            del norm._buffers["running_var"]  # type: ignore[union-attr]  # it is a module
        check.gradients({name: one.grad for name, one in own.named_parameters() if name != hidden})
        check.report(losses=losses if rank else None)
    return check.verdict


@pytest.mark.parametrize(
    ("against", "buffer", "hidden"),
    [
        (RECORD, "", ""),
        (RECORD, "1.norm.running_mean", ""),
        (RECORD, "0.norm.running_var", ""),
        (RECORD, "", "1.linear.bias"),
        (BESIDE, "", "1.linear.bias"),
    ],
)
def test_what_some_rank_lacks_or_has_otherwise_is_told(
    against: Any, buffer: str, hidden: str, simulated: World
) -> None:
    verdict, other = simulated.run(step, against, buffer, hidden, ranks=2)
    assert str(verdict) == str(other), "all ranks have one verdict"
    buffers, gradients = verdict.law("buffers"), verdict.law("gradient")
    assert against is BESIDE or buffers.checked == len(list(build().buffers())) == 6, "each rank has its own"
    assert gradients.checked == len(list(build().parameters())) - bool(hidden) == 8 - bool(hidden)
    if hidden:
        assert (gradients.outcome, gradients.left_out) == ("unknown", (hidden,))
        assert gradients.note == f"not compared: {hidden}"
    elif not buffer:
        assert verdict.outcome == "pass", str(verdict)
    else:
        (one,) = verdict.mismatches
        gone = buffer.endswith("var")
        place = (None, None) if gone else (1, 1)
        assert (one.law, one.rank, one.stage, one.parameter) == ("buffers", *place, buffer)
        assert ((one.observed_text, one.expected_text) == ("no such buffer", "a buffer")) == gone


def test_what_was_there_before_and_was_not_kept_is_noted() -> None:
    kept, large = Kept(0, room=64), torch.ones(32)
    begun = kept.notes.begun
    kept.begin({"none": None, "zero": torch.zeros(32), "small": torch.ones(4), "large": large})
    assert (set(begun), begun["large"], set(kept.tensors)) == ({"small", "large"}, None, {begun["small"]})
    kept.begin({"large": None})
    assert set(begun) == {"small"}
    kept.end("small", torch.ones(4), wrong=True)  # nothing was added since
    assert begun == {"small": None}


def kinds(kept: Kept) -> dict[str, str]:
    """What became of each gradient; what is kept is that of which an address is noted."""
    assert set(kept.tensors) == {address for _, address in kept.notes.ends.values() if address is not None}
    return {name: kind for name, (kind, _) in kept.notes.ends.items()}


def test_what_passes_and_is_not_what_is_due_is_kept_as_it_is_while_there_is_room() -> None:
    kept, expected = Kept(0, room=40), torch.ones(4)
    for name, off in (("same", 0.0), ("summed", 1e-7), ("near", 1e-2), ("nearer", 1e-3), ("much", 1e-2)):
        kept.end(name, expected + off, wrong=False, apart=off)
    passing = {"same": "right", "summed": "right", "near": "near", "nearer": "near", "much": "right"}
    assert kinds(kept) == passing
    assert torch.equal(kept.tensors[kept.notes.ends["near"][1] or ""], expected + 1e-2)
    kept.end("wrong", 2 * expected, wrong=True)
    assert kinds(kept) == passing | {"nearer": "right", "wrong": "wrong"}
    kept.end("large", torch.ones(32), wrong=True)
    assert kinds(kept) == passing | {"nearer": "right", "wrong": "wrong", "large": "left out"}
    kept.end("lost", None, wrong=True)
    kept.end("wrong", expected, wrong=False)  # as where a step shows its gradients twice
    assert (kept.notes.ends["lost"], kinds(kept)["wrong"]) == (("wrong", None), "wrong")
