"""Traces of what ran: torch's profiler's and our own are read, steps told apart, and what tells too little refused."""

import json
from collections.abc import Sequence
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from pipeproof.pipeline.action import Action, ScheduleError, ShardKind
from pipeproof.pipeline.chrome_trace import chrome_trace
from pipeproof.pipeline.mesh import Groups
from pipeproof.pipeline.program import Program, lower, read_csv
from pipeproof.pipeline.program_laws import ANYWHERE, violations
from pipeproof.pipeline.recorded import is_trace, read_traces
from pipeproof.pipeline.schedules import build
from pipeproof.pipeline.trace import Span, Trace
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.pipeline.test_cells import torch_s
from tests.support.golden import golden

PROGRAM = lower(build("1f1b", ranks=2, microbatches=2))


def profiled(path: Path, rank: int | None, *steps: Sequence[object], marks: bool = False) -> str:
    """A file as torch's profiler writes it, of one rank's steps; its name."""
    events: list[dict[str, Any]] = []
    time = 0.0
    for number, step in enumerate(steps):
        began = time
        for action in step:
            for category in ("gpu_user_annotation", "user_annotation"):
                name = {"ph": "X", "name": f"PP:{action}", "cat": category}
                events.insert(0, {**name, "ts": time, "dur": 1.5, "args": {}})  # they lie in no order
            time += 2
        if marks:
            mark = {"ph": "X", "cat": "user_annotation", "ts": began, "dur": time - began}
            events.append({**mark, "name": f"ProfilerStep#{number + 3}"})
    noise = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.5, "dur": 0.1}, {"ph": "i", "name": "x"}]
    said = {} if rank is None else {"distributedInfo": {"backend": "gloo", "rank": rank, "world_size": 2}}
    path.write_text(json.dumps({"schemaVersion": 1, **said, "traceEvents": events + noise}))
    return str(path)


def steps_of(files: list[str], *, pipelines: Groups = ()) -> Sequence[Any]:
    return read_traces(files, pipelines=pipelines).steps


def test_a_rank_s_file_each(tmp_path: Path) -> None:
    files = [profiled(tmp_path / f"{rank}.json", rank, PROGRAM.ranks[rank]) for rank in (1, 0)]
    (found,) = steps_of(files)
    assert found.ranks == PROGRAM.ranks
    assert found.schedule.name == "1.json"
    assert all(map(is_trace, files))
    assert not is_trace("x.csv")


def test_ranks_that_no_file_tells_are_as_files_come(tmp_path: Path) -> None:
    (found,) = steps_of([profiled(tmp_path / f"{rank}.json", None, PROGRAM.ranks[rank]) for rank in (0, 1)])
    assert found.ranks == PROGRAM.ranks


def test_what_torch_does_with_shards_is_there_too(tmp_path: Path) -> None:
    program = read_csv(torch_s("interleaved", messages=True))
    rows = [line.split(",") for line in torch_s("interleaved", messages=True).splitlines()]
    (found,) = steps_of([profiled(tmp_path / f"{rank}.json", rank, row) for rank, row in enumerate(rows)])
    assert (found.ranks, found.schedule.shard_actions) == (program.ranks, program.schedule.shard_actions)
    assert found.schedule.shard_actions


@pytest.mark.parametrize("marks", [True, False])
def test_steps_that_ran_alike_are_one(marks: bool, tmp_path: Path) -> None:
    files = [profiled(tmp_path / f"{rank}.json", rank, *[PROGRAM.ranks[rank]] * 3, marks=marks) for rank in (0, 1)]
    (found,) = steps_of(files)
    assert found.ranks == PROGRAM.ranks
    golden(found.schedule.name)


def test_a_step_that_ran_otherwise_is_found(tmp_path: Path) -> None:
    first, second = (list(row) for row in PROGRAM.ranks)
    lost = [action for action in second if action != Action.parse("1B1")]
    files = [
        profiled(tmp_path / "0.json", 0, first, first, first, marks=True),
        profiled(tmp_path / "1.json", 1, second, lost, second, marks=True),
    ]
    right, wrong = steps_of(files)
    golden(f"{right.schedule.name}\n{wrong.schedule.name}")
    assert violations(right, laws=ANYWHERE) == ()
    golden(str(violations(wrong, laws=ANYWHERE)[0]))


def test_what_runs_twice_in_one_step_is_no_second_step(tmp_path: Path) -> None:
    first, second = (list(row) for row in PROGRAM.ranks)
    twice = [*second, Action.parse("1B1")]
    files = [profiled(tmp_path / f"{rank}.json", rank, row) for rank, row in enumerate((first, twice))]
    (found,) = steps_of(files)
    golden(str(violations(found, laws=ANYWHERE)[0]))


def test_our_own_trace_of_what_was_measured(tmp_path: Path) -> None:
    def trace(program: Program) -> Trace:
        rows = enumerate(program.ranks)
        spans = (tuple(Span(rank, action, k + 0.1, k + 0.9) for k, action in enumerate(row)) for rank, row in rows)
        return Trace(program.schedule, tuple(spans))

    other, path = lower(build("gpipe", ranks=2, microbatches=3)), tmp_path / "x.json"
    path.write_text(json.dumps(chrome_trace({"gpipe, simulated": trace(other), "1f1b, measured": trace(PROGRAM)})))
    (found,) = steps_of([str(path)])
    assert found.ranks == PROGRAM.ranks
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"traceEvents": data["traceEvents"][::-1]}))  # a file has no order
    (turned,) = steps_of([str(path)])
    assert turned.ranks == PROGRAM.ranks
    del next(one for one in data["traceEvents"] if one.get("cat") == "compute" and one["pid"] == 1)["ts"]
    path.write_text(json.dumps(data))
    with pytest.raises(ScheduleError, match="has ts null: expected a finite number"):
        steps_of([str(path)])


def test_traces_of_all_replicas_are_told_by_pipelines(tmp_path: Path) -> None:
    """Ranks 0 and 2 are one pipeline, 1 and 3 the other, which lost a backward in its second step."""
    first, second = PROGRAM.ranks
    lost = [action for action in second if action != Action.parse("1B1")]
    steps = {0: [first] * 2, 1: [first] * 2, 2: [second] * 2, 3: [second, lost]}
    files = [profiled(tmp_path / f"{rank}.json", rank, *each, marks=True) for rank, each in steps.items()]
    right, wrong = steps_of(files, pipelines=((0, 2), (1, 3)))
    golden(right.schedule.name)
    golden(wrong.schedule.name)
    assert right.ranks == PROGRAM.ranks
    with pytest.raises(ScheduleError, match="rank 3 has no trace, but rank 1 of its pipeline has: give both"):
        read_traces(files[:3], pipelines=((0, 2), (1, 3)))
    with pytest.raises(ScheduleError, match="a trace is of rank 1, which the mesh does not have: give it all axes"):
        read_traces(files, pipelines=((0, 2),))
    with pytest.raises(ScheduleError, match=r"^0\.json: ranks 0 and 1 both have stage 0: give the traces of one"):
        read_traces(files)


def test_groups_of_a_job_are_those_of_all_its_ranks(tmp_path: Path) -> None:
    files = [profiled(tmp_path / f"{rank}.json", rank, PROGRAM.ranks[rank]) for rank in (0, 1)]
    assert (read_traces(files).groups, read_traces(files).ranks) == ({}, 2)
    for rank, file in enumerate(files):
        data = json.loads(Path(file).read_text())
        own = {"pg_desc": "mesh_dp", "ranks": [rank, rank + 2]}
        others = [{"pg_desc": "default_pg", "ranks": [0, 1]}, {"pg_desc": "mesh_dp"}, {"pg_desc": 3, "ranks": []}, 7]
        data["distributedInfo"]["pg_config"] = [*others, {"pg_desc": "mesh_pp", "ranks": [0, 1]}, own]
        Path(file).write_text(json.dumps(data))
    assert read_traces(files).groups == {"pp": ((0, 1),), "dp": ((0, 2), (1, 3))}


ONE = {"ph": "X", "cat": "user_annotation", "name": "PP:0F0", "ts": 0.0, "dur": 1.0}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({}, "x.json has no traceEvents: expected a trace of torch's profiler with actions such as PP:0F0"),
        ({"traceEvents": []}, "x.json has no action: expected a trace of torch's profiler"),
        ({"traceEvents": [{**ONE, "ts": "soon"}]}, "x.json: the event 'PP:0F0' has ts \"soon\": expected a finite num"),
        ({"traceEvents": [{**ONE, "ts": nan}]}, "x.json: the event 'PP:0F0' has ts NaN: expected a finite number"),
        ({"traceEvents": [{**ONE, "ts": -inf}]}, "x.json: the event 'PP:0F0' has ts -Infinity: expected a finite num"),
        ({"traceEvents": [{**ONE, "ts": None}]}, "x.json: the event 'PP:0F0' has ts null: expected a finite number"),
        ({"traceEvents": [{**ONE, "dur": -5}]}, "x.json: the event 'PP:0F0' has dur -5: expected a finite number, at"),
        (
            {"traceEvents": [{"ph": "X", "cat": "user_annotation"}]},
            "x.json has events that are not as they are written",
        ),
        ({"traceEvents": [{**ONE, "name": "PP:zero"}]}, "x.json: row 1, column 1: 'zero' is not an action"),
        (
            {"traceEvents": [{**ONE, "name": "PP:2F0"}]},
            "x.json: no row has an action of stage 0, but one has of stage 2",
        ),
        (
            {"traceEvents": [ONE, {**ONE, "name": "PP:0SEND_F0", "ts": 2}]},
            "x.json: 0SEND_F0 meets stage 1, of which no trace tells: give those of all ranks of the pipeline",
        ),
    ],
)
def test_what_tells_no_pipeline_is_refused(document: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(document))
    with pytest.raises(ScheduleError) as caught:
        read_traces([str(tmp_path / "x.json")])
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(said)


def test_a_rank_is_given_once(tmp_path: Path) -> None:
    files = [profiled(tmp_path / f"{k}.json", 0, PROGRAM.ranks[0]) for k in (0, 1)]
    with pytest.raises(ScheduleError, match=r"1\.json is of rank 0, as a file before .* give each rank's trace once"):
        read_traces(files)


def run_torch(context: RankContext, folder: str) -> str:
    """Two steps of torch's own runtime, with the profiler around them."""
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
    from torch.profiler import ProfilerActivity, profile

    rank, device = context.rank, torch.device("cpu")
    stages = [PipelineStage(nn.Linear(4, 4), index, 4, device) for index in (rank, rank + 2)]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)
    inputs, target = torch.ones(4, 4), torch.zeros(4, 4)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(2):
            schedule.step(*(inputs,) * (rank == 0), target=target if rank == 1 else None)
    found.export_chrome_trace(f"{folder}/{rank}.json")
    return f"{folder}/{rank}.json"


@pytest.mark.pipeproof_ranks
@pytest.mark.long
def test_what_torch_s_profiler_writes_of_a_real_step_is_read(world: World, tmp_path: Path) -> None:
    (found,) = steps_of(world.run(run_torch, str(tmp_path), ranks=2))
    golden(found.schedule.name)
    assert violations(found, laws=ANYWHERE) == ()
    kinds = {one.kind for one in found.schedule.shard_actions}
    assert ShardKind.REDUCE_GRAD in kinds
    assert (found.schedule.n_stages, found.schedule.microbatches) == (4, 4)


BEFORE = "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0RECV_B1"
AFTER = "1UNSHARD,1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD"
ENDINGS = {
    "0B0,0B1,0REDUCE_GRAD,0RESHARD": True,
    "0B0,0REDUCE_GRAD,0B1,0RESHARD": False,
    "0B0,0REDUCE_GRAD,0B1,0REDUCE_GRAD,0RESHARD": False,
    "0B0,0B1,0RESHARD": False,
}


def run_shards(context: RankContext, folder: str, endings: Sequence[str]) -> list[bool]:
    """Whether the gradient of stage 0 is right in torch's runtime under ``fully_shard``, for each ending of its row."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
    from torch.profiler import ProfilerActivity, profile

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica, place = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    right, mse = [], nn.functional.mse_loss
    for number, ending in enumerate(endings):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        data, target = torch.randn(2, 4, 4), torch.zeros(2, 4, 4)
        mse(model(data.flatten(0, 1)), target.flatten(0, 1)).backward()
        expected = [layer.weight.grad.clone() for layer in model]
        model.zero_grad(set_to_none=True)
        stage = fully_shard(model[place], mesh=mesh["dp"])
        own = PipelineStage(stage, place, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = _PipelineScheduleRuntime([own], 2, loss_fn=mse)
        plan = f"{folder}/{context.rank}.csv"
        Path(plan).write_text(f"{BEFORE},{ending}\n{AFTER}\n")
        schedule._load_csv(plan, format="compute_comms")
        with profile(activities=[ProfilerActivity.CPU]) as found:
            schedule.step(*(data[replica],) * (place == 0), target=target[replica] if place else None)
        found.export_chrome_trace(f"{folder}/{number}-{context.rank}.json")
        whole = None if stage.weight.grad is None else stage.weight.grad.full_tensor()
        right.append(whole is not None and bool(torch.allclose(whole, expected[place], atol=1e-6)))
    return right


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
@pytest.mark.long
@pytest.mark.pipeproof_fresh_ranks  # a profile tells of every mesh that its process ever had
def test_reductions_that_break_the_law_make_wrong_gradients_in_torch(world: World, tmp_path: Path) -> None:
    ranks = world.run(run_shards, str(tmp_path), list(ENDINGS), ranks=4)
    assert [ranks[0], ranks[1], ranks[2]] == [list(ENDINGS.values()), [True] * 4, list(ENDINGS.values())]
    for number, right in enumerate(ENDINGS.values()):
        ran = read_traces([f"{tmp_path}/{number}-{rank}.json" for rank in range(4)], pipelines=((0, 1), (2, 3)))
        (found,) = ran.steps
        assert (violations(found, laws=ANYWHERE) == ()) is right
        assert ran.groups == {"dp": ((0, 2), (1, 3)), "pp": ((0, 1), (2, 3))}
