"""What each rank brings to a checked step, and what follows from all of it together."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

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
from pipeproof.records.record import Record, RecordError
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_check import check_step
from pipeproof.records.step_record import record_step
from pipeproof.worlds.side_store import Exchange, SideStore
from tests.support.golden import golden
from tests.support.steps import backward, loss_fn


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
        found: Tensor = self.norm(self.linear(x))
        return found


def build() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(Layer(), Layer())


def checked(monkeypatch: pytest.MonkeyPatch, against: Any, **options: Any) -> Verdict:
    """The verdict on a right step in which each rank has a layer; ``options`` is what goes wrong."""
    store, model, ranks = dist.HashStore(), build(), threading.local()

    def exchange() -> Exchange:
        found = Exchange(SideStore(store, rank=ranks.number, ranks=2))
        found._prefix = "both ranks'"  # they share a process, and its count
        return found

    monkeypatch.setattr("pipeproof.records.checked_step.exchange", exchange)
    losses: list[float] = []
    ready, done = threading.Barrier(2), threading.Barrier(2)

    def run(rank: int) -> Verdict:
        ranks.number = rank
        own = model[rank : rank + 1]
        with check_step({rank: own}, DATA, against=against) as check:
            ready.wait(30)
            if rank == 0:
                losses.extend(backward(model, DATA))
                options.get("fault", lambda model: None)(model)
            done.wait(30)
            shown = {name: p.grad for name, p in own.named_parameters() if name not in options.get("hidden", ())}
            check.gradients(shown)
            check.report(losses=losses if rank == 1 else None)
        return check.verdict

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    assert str(found[0]).splitlines()[:1] == str(found[1]).splitlines()[:1], "all ranks have one verdict"
    return found[0]


@pytest.fixture(scope="module")
def record() -> Record:
    return record_step(build(), DATA, loss_fn=loss_fn)


def test_each_rank_has_its_own_buffers_and_none_is_missed(monkeypatch: pytest.MonkeyPatch, record: Record) -> None:
    verdict = checked(monkeypatch, record)
    assert verdict.outcome == "pass", str(verdict)
    assert verdict.law("buffers").checked == len(list(build().buffers())) == 6
    assert verdict.law("gradient").checked == len(list(build().parameters())) == 8


def test_a_buffer_that_differs_is_told_with_its_rank_and_stage(monkeypatch: pytest.MonkeyPatch, record: Record) -> None:
    def fault(model: nn.Module) -> None:
        model.get_buffer("1.norm.running_mean").add_(1.0)

    verdict = checked(monkeypatch, record, fault=fault)
    assert [(m.law, m.rank, m.stage, m.parameter) for m in verdict.mismatches] == [
        ("buffers", 1, 1, "1.norm.running_mean")
    ]


def test_a_buffer_that_no_rank_has_is_a_failure(monkeypatch: pytest.MonkeyPatch, record: Record) -> None:
    def fault(model: nn.Module) -> None:
        del model.get_submodule("0.norm")._buffers["running_var"]

    (mismatch,) = checked(monkeypatch, record, fault=fault).mismatches
    assert (mismatch.law, mismatch.observed_text, mismatch.expected_text) == ("buffers", "no such buffer", "a buffer")
    assert mismatch.parameter == "0.norm.running_var"


@pytest.mark.parametrize("beside", [False, True])
def test_a_gradient_that_no_rank_shows_makes_the_law_unknown(
    monkeypatch: pytest.MonkeyPatch, record: Record, beside: bool
) -> None:
    against = SingleDevice(build, loss_fn) if beside else record
    law = checked(monkeypatch, against, hidden=("1.linear.bias",)).law("gradient")
    assert (law.outcome, law.checked, law.left_out) == ("unknown", 7, ("1.linear.bias",))
    assert law.note == "not compared: 1.linear.bias"


def test_what_was_there_before_and_was_not_kept_is_noted() -> None:
    kept, large = Kept(0, room=64), torch.ones(32)
    kept.begin({"none": None, "zero": torch.zeros(32), "small": torch.ones(4), "large": large})
    assert (set(kept.notes.begun), kept.notes.untold) == ({"small"}, {"large"})
    kept.begin({"large": None})
    assert not kept.notes.untold
    kept.end("small", torch.ones(4), wrong=True)  # nothing was added since
    assert (set(kept.notes.begun), kept.notes.untold) == (set(), {"small"})


def test_what_passes_and_is_not_what_is_due_is_kept_as_it_is_while_there_is_room() -> None:
    kept, expected = Kept(0, room=40), torch.ones(4)
    for name, off in (("same", 0.0), ("summed", 1e-7), ("near", 1e-2), ("nearer", 1e-3), ("much", 1e-2)):
        kept.end(name, expected + off, wrong=False, apart=off)
    assert (kept.notes.right, set(kept.notes.near)) == ({"same", "summed", "much"}, {"near", "nearer"})
    assert torch.equal(kept.tensors[kept.notes.near["near"]], expected + 1e-2)
    kept.end("wrong", 2 * expected, wrong=True)
    assert (set(kept.notes.wrong), set(kept.notes.near), set(kept.notes.left_out)) == ({"wrong"}, {"near"}, set())
    assert "nearer" in kept.notes.right
    kept.end("large", torch.ones(32), wrong=True)
    assert (set(kept.notes.near), kept.notes.left_out) == ({"near"}, {"large"}), "nothing is let go in vain"
    assert set(kept.tensors) == {*kept.notes.wrong.values(), *kept.notes.near.values()}
