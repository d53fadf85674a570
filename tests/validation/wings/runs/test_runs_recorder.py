"""Recording a run: what a line holds and costs, what is refused, and that the job goes on with the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeproof import record_run
from pipeproof.core.tolerance import same_bits
from pipeproof.records.record import RecordError
from pipeproof.wings.runs.file import RankFile, other_options
from pipeproof.wings.runs.run import WholeRun
from tests.support.long_runs import Loop, microbatches_of

BYTES = 250  # that record_run and the guide state


def test_the_job_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    ways = []
    for recorded in (True, False):
        torch.manual_seed(7)
        loop = Loop()
        if recorded:
            loop.train(tmp_path / "run", range(3))
        for number in () if recorded else range(3):
            loop.step(None, loop.microbatches(number), number)
        ways.append((loop.model.state_dict(), torch.rand(3)))
    assert all(same_bits(one, ways[1][0][name]) for name, one in ways[0][0].items())
    assert same_bits(ways[0][1], ways[1][1]), "nothing was drawn"


def test_a_line_costs_what_is_stated_however_large_parameters_are(tmp_path: Path) -> None:
    sizes = []
    for width in (4, 200):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
        with record_run(model, tmp_path / str(width)) as run:
            for _ in range(3):
                with run.step() as step:
                    model(torch.ones(width)).sum().backward()
                    step.gradients()
        lines = (tmp_path / str(width) / "rank-0.jsonl").read_bytes().splitlines()
        sizes.append(len(lines[-1]) / 16)
    assert sizes[0] <= BYTES + 15
    assert abs(sizes[1] - sizes[0]) < 1


def test_without_a_call_gradients_are_those_that_the_optimizer_is_given(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.5}], lr=1e-3)
    with record_run(model, tmp_path / "run", optimizer=optimizer) as run, run.step():
        model(torch.ones(2)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 9.0  # of the next step
    step = WholeRun(tmp_path / "run").step(0)
    assert step.clipped
    assert sum(one.norm**2 for one in step.gradients.values() if one is not None) == pytest.approx(0.25)
    assert (step.options["bias"]["weight_decay"], step.options["weight"]["lr"]) == (0.5, 1e-3)


def test_the_type_that_modules_compute_in_is_kept_and_no_hook_stays(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(1e-3), foreach=True)
    with record_run(model, tmp_path / "run", optimizer=optimizer) as run:
        for _ in range(2):
            with run.step(), torch.autocast("cpu", torch.bfloat16):
                model(torch.ones(2)).sum().backward()
            assert not model[0]._forward_hooks
    steps = [WholeRun(tmp_path / "run").step(number) for number in range(2)]
    assert [one.computed.name for one in steps] == ["bf16", "bf16"]
    assert "foreach" not in steps[0].options["0.bias"]
    told = steps[1].options
    assert not other_options(told, {"0.bias": {**told["0.bias"], "lr": 1e-3}})
    assert other_options(told, {"0.bias": {"lr": 1.001e-3}})


def test_a_step_that_is_made_anew_has_all_weights_it_begins_with(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with record_run(model, tmp_path / "run") as run:
        for number in (0, 1, 1):
            with run.step(number=number):
                pass
    kept = WholeRun(tmp_path / "run")
    assert kept.numbers == [0, 1]
    assert kept.step(1).before.keys() == {"weight", "bias"}


def other_tensor(model: nn.Linear) -> None:
    model.weight = nn.Parameter(torch.zeros(2, 2))


def other_shape(model: nn.Linear) -> None:
    model.weight.data = torch.zeros(0)


@pytest.mark.parametrize(
    ("change", "words"),
    [(other_tensor, "weight is another tensor than when"), (other_shape, r"weight has shape \[0\], and had \[2, 2\]")],
)
def test_parameters_that_are_replaced_are_told(change: Callable[[nn.Linear], None], words: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with record_run(model, tmp_path / "run") as run:
        change(model)
        with pytest.warns(UserWarning, match=f"step 0 was not recorded: {words}"), run.step():
            pass


def test_what_cannot_be_kept_is_a_warning_and_the_job_goes_on(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with record_run(model, tmp_path / "run") as run:
        with pytest.warns(UserWarning, match="step 0 was not recorded: losses has 1 numbers"), run.step([1, 2]) as step:
            step.report(losses=[1.0])
        with run.step() as step:
            step.gradients()
        with pytest.raises(ZeroDivisionError), run.step():
            raise ZeroDivisionError
    kept = WholeRun(tmp_path / "run")
    assert kept.numbers == [0, 1]
    assert kept.step(1).before.keys() == {"weight", "bias"}
    with pytest.raises(RecordError, match="lacks step 0, which was not recorded: rank 0: losses has 1 numbers"):
        kept.step(0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "modules": ({"modules": 3}, "modules is 3: expected this rank's stage"),
    "every": ({"every": 0}, "every is 0: expected how many steps"),
    "optimizer": ({"optimizer": 3}, "optimizer is 3: expected this rank's torch.optim.Optimizer"),
    "lazy": ({"modules": nn.LazyLinear(2)}, "weight has no shape yet: run the model once before"),
    "there": ({}, "is there already: name a new folder, or say resume=True"),
    "resume": ({"modules": nn.Linear(3, 3), "resume": True}, "is of a job with other ranks, parameters or every="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_of_no_use_is_refused_before_the_first_step(name: str, tmp_path: Path) -> None:
    given, words = REFUSED[name]
    record_run(nn.Linear(2, 2), tmp_path / "run")
    with pytest.raises(RecordError, match=words):
        record_run(**{"modules": nn.Linear(2, 2), "to": tmp_path / "run", **given})


def test_a_job_that_is_resumed_after_a_torn_line_writes_whole_ones(tmp_path: Path) -> None:
    loop = Loop().train(tmp_path / "run", range(3))
    file = tmp_path / "run" / "rank-0.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    assert RankFile(file).numbers == [0, 1]
    with record_run(loop.model, tmp_path / "run", resume=True) as run:
        with pytest.raises(
            RecordError, match="expected that of the step, from 0, as the run goes on from a checkpoint"
        ):
            run.step()
        with run.step(microbatches_of(2), number=2):
            pass
        assert run.step()._step is not None
    assert RankFile(file).numbers == [0, 1, 2]
