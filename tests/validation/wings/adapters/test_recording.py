"""A step of a framework's is recorded: what it gave, by the names of the whole model; what cannot be is a warning."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeproof import World
from pipeproof.core.verdict import Verdict
from pipeproof.records.compare import RUNS, compare
from pipeproof.records.record import OtherSteps, Record
from pipeproof.records.record_file import read
from pipeproof.records.step_record import record_step
from pipeproof.whitebox import FlatShard
from pipeproof.whitebox.task import WhiteBoxError
from pipeproof.wings.adapters.framework import Framework
from pipeproof.wings.adapters.recording import recording
from pipeproof.wings.adapters.step import FrameworkStep
from pipeproof.worlds.worker import RankContext
from tests.support.golden import golden
from tests.support.steps import blocks, loss_fn, pairs
from tests.validation.wings.adapters.test_adapter import Job as Watched

OURS = Framework("ours", "pipeproof", ("0.1",), "pip install pipeproof")


INSIDE = replace(OURS, child="whole")


class Job(Watched):
    """A job with an optimizer, and names of its own."""

    def __init__(self, *, prefix: str = "") -> None:
        super().__init__(blocks(2))
        self.prefix = prefix

    def as_step(self, **changed: Any) -> FrameworkStep:
        step = FrameworkStep(
            {0: self.model},
            lambda stage, name: self.prefix + name,
            lambda: {one: one.grad for one in self.model.parameters()},
            lambda: self.losses,
            self.watching,
        )
        return replace(step, **changed)

    def step(self, factor: float = 1.0) -> None:
        super().step(factor)
        with torch.no_grad():
            for one in (one for one in self.model.parameters() if one.grad is not None):
                one -= 0.1 * one.grad  # type: ignore[operator]  # it has one


def recorded(path: Path, job: Job, *, data: Any = None, factor: float = 1.0, steps: int = 1, **changed: Any) -> None:
    data = pairs(3) if data is None else data
    with recording(lambda: (job.as_step(**changed), data), str(path), framework=OURS, timeout_s=5):
        for _ in range(steps):
            job.step(factor)


def test_a_record_has_what_the_step_gave(tmp_path: Path) -> None:
    job = Job(prefix="whole.")
    before = {f"whole.{name}": one.detach().clone() for name, one in job.model.named_parameters()}
    recorded(tmp_path / "a", job)
    record = read(tmp_path / "a")
    (one,) = record.operations
    assert (record.kind, record.framework) == ("observed", "ours 0.1.0")
    golden(record.name)
    assert one.losses == tuple(job.losses)
    assert one.norm is not None
    assert one.norm > 0
    for name, parameter in job.model.named_parameters():
        assert one.before[f"whole.{name}"].equal(before[f"whole.{name}"])
        gradient = one.gradients[f"whole.{name}"]
        assert gradient.equal(parameter.grad)
        assert one.parameters[f"whole.{name}"].equal(parameter)
        assert not one.parameters[f"whole.{name}"].equal(before[f"whole.{name}"])


def compared(tmp_path: Path, **second: Any) -> Verdict:
    recorded(tmp_path / "one", Job(prefix="whole."))
    recorded(tmp_path / "other", Job(prefix="their/"), **second)
    return compare(read(tmp_path / "one"), read(tmp_path / "other"), sides=RUNS)


def test_two_frameworks_are_compared_by_weights_where_names_are_others(tmp_path: Path) -> None:
    verdict = compared(tmp_path)
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), str(verdict)
    assert verdict.law("gradient").checked == 4
    golden(verdict.law("parameters-once").note)


def test_two_frameworks_that_differ_are_told_apart(tmp_path: Path) -> None:
    verdict = compared(tmp_path, factor=3.0)
    assert verdict.outcome == "fail"
    assert {law.name for law in verdict.laws if law.outcome == "fail"} == {
        "gradient",
        "grad-norm",
        "updated-parameters",
    }


def test_a_step_is_held_against_one_device(tmp_path: Path) -> None:
    job, model = Job(prefix="whole."), blocks(2)
    for one in (job.model, model):
        next(one.parameters()).requires_grad_(False)

    def trained() -> dict[nn.Parameter, Any]:
        return {one: one.grad for one in job.model.parameters() if one.requires_grad}

    data = [{"y": target, "x": inputs} for inputs, target in pairs(3)]
    with recording(lambda: (job.as_step(gradients=trained), data), str(tmp_path / "a"), framework=INSIDE, timeout_s=5):
        job.step(factor=3.0)
    expected = record_step(model, pairs(3), loss_fn=loss_fn)
    verdict = compare(expected, read(tmp_path / "a"))
    assert (verdict.outcome, [cause.kind for cause in verdict.causes]) == ("fail", ["scale"]), str(verdict)
    assert verdict.law("presence").outcome == verdict.law("loss").outcome == "pass"
    golden(verdict.law("updated-parameters").note)
    golden(verdict.law("buffers").note)


def test_microbatches_are_matched_by_content(tmp_path: Path) -> None:
    recorded(tmp_path / "a", Job(), data=pairs(3))
    one = read(tmp_path / "a")
    (step,) = one.operations
    order = (2, 0, 1)
    moved = {name: tuple(getattr(step, name)[k] for k in order) for name in ("microbatches", "contents", "losses")}
    other = replace(one, operations=(replace(step, **moved),))  # type: ignore[arg-type]  # each is what it was
    assert compare(one, other, sides=RUNS).tier == "bitwise"
    wrong = replace(other, operations=(replace(other.operations[0], losses=step.losses),))
    assert compare(one, wrong, sides=RUNS).law("loss").outcome == "fail"


def test_the_form_of_a_microbatch_does_not_matter_and_its_content_does(tmp_path: Path) -> None:
    assert compared(tmp_path, data=[{"y": target, "x": inputs} for inputs, target in pairs(3)]).outcome == "pass"
    with pytest.raises(OtherSteps, match="microbatches that are not the same"):
        compared(tmp_path, data=pairs(3, seed=1))


def test_weights_that_do_not_tell_a_parameter_are_said(tmp_path: Path) -> None:
    for name, prefix in (("one", "whole."), ("other", "their/")):
        job = Job(prefix=prefix)
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.fill_(0.5)
        recorded(tmp_path / name, job)
    sentence = r"of other names: weights do not tell which one their/.* is; record a later step"
    with pytest.raises(OtherSteps, match=sentence):
        compare(read(tmp_path / "one"), read(tmp_path / "other"), sides=RUNS)


def test_other_weights_are_said(tmp_path: Path) -> None:
    recorded(tmp_path / "one", Job(prefix="whole."))
    job = Job(prefix="their/")
    with torch.no_grad():
        job.model.get_parameter("1.0.bias").add_(1.0)
    recorded(tmp_path / "other", job)
    sentence = "weights that differ before .* no parameter of the first has those of their/1"
    with pytest.raises(OtherSteps, match=sentence):
        compare(read(tmp_path / "one"), read(tmp_path / "other"), sides=RUNS)


def test_a_norm_that_a_framework_does_not_tell_is_not_compared(tmp_path: Path) -> None:
    def blind(job: Job) -> Any:
        return lambda sight: nullcontext()

    job = Job()
    recorded(tmp_path / "one", Job())
    recorded(tmp_path / "other", job, watching=blind(job))
    for one, other in (("one", "other"), ("other", "one"), ("other", "other")):
        verdict = compare(read(tmp_path / one), read(tmp_path / other), sides=RUNS)
        assert verdict.outcome == "pass", str(verdict)
        assert verdict.law("grad-norm").outcome == "not observed", (one, other)


def refused(tmp_path: Path, sentence: str, job: Job | None = None, **changed: Any) -> None:
    with pytest.warns(UserWarning, match=f"^the step was not recorded: {sentence}"):
        recorded(tmp_path / "a", job or Job(), **changed)
    assert [*tmp_path.iterdir()] == []


def test_what_cannot_be_recorded_is_a_warning_and_nothing_is_written(tmp_path: Path) -> None:
    refused(tmp_path, "the block took more than one step", steps=2)

    def raising() -> Any:
        raise RuntimeError("gradients")

    refused(tmp_path, "recording raised RuntimeError: gradients", gradients=raising)
    blind = {"watching": lambda sight: nullcontext()}
    refused(tmp_path, "call it", unfinished=WhiteBoxError("call it in the block"), **blind)


def test_microbatches_that_are_none_end_no_job(tmp_path: Path) -> None:
    refused(tmp_path, "recording raised TypeError", data=5)


def test_a_step_that_raises_is_the_job_s_own_and_nothing_is_written(tmp_path: Path) -> None:
    job, path = Job(), str(tmp_path / "a")
    with (
        pytest.warns(UserWarning, match="the step was not recorded: the step raised"),
        pytest.raises(KeyError),
        recording(lambda: (job.as_step(), pairs(3)), path, framework=OURS, timeout_s=5),
    ):
        raise KeyError("x")
    assert [*tmp_path.iterdir()] == []


def test_names_that_weights_do_not_tell_are_not_guessed(tmp_path: Path) -> None:
    """Two norms of ones, in another order of modules: neighbours would tell the wrong one."""
    for file, order in (("one", ("a", "b")), ("other", ("b", "a"))):
        job = Job()
        job.model = nn.Sequential(*job.model, nn.ModuleDict({name: nn.LayerNorm(8) for name in order}))
        forward = job.model[:2].forward
        job.model.forward = forward  # type: ignore[method-assign]  # the norms only hold weights here
        job.prefix = "" if file == "one" else "their."
        gradients = {one: torch.ones_like(one) for one in job.model.parameters()}
        with recording(
            lambda job=job, found=gradients: (  # type: ignore[misc]
                job.as_step(gradients=lambda: found, watching=lambda _: nullcontext()),
                pairs(3),
            ),
            str(tmp_path / file),
            framework=OURS,
            timeout_s=5,
        ):
            pass
    with pytest.raises(OtherSteps, match="weights do not tell which one"):
        compare(read(tmp_path / "one"), read(tmp_path / "other"), sides=RUNS)


def test_a_file_that_cannot_be_written_ends_no_job(tmp_path: Path) -> None:
    job = Job()
    with pytest.warns(UserWarning, match="cannot write .*nowhere/a"):
        recorded(tmp_path / "nowhere" / "a", job)
    assert job.losses


def of_a_rank(context: RankContext, path: str, shift: int, other: float) -> str:
    """Two replicas, each with half of every gradient, in a step that is recorded."""
    job = Job()
    job.step()

    def part(gradient: Any) -> FlatShard:
        half = gradient.numel() // 2
        start = half * context.rank
        return FlatShard(gradient.flatten()[start : start + half], start + shift * context.rank)

    with torch.no_grad():
        next(job.model.parameters()).add_(other * context.rank)
    step = job.as_step(
        gradients=lambda: {one: part(one.grad) for one in job.model.parameters()},
        watching=lambda sight: nullcontext(),
    )
    data = pairs(6)[context.rank :: 2]
    job.losses = [float(context.rank + 2 * k) for k in range(3)]
    with recording(lambda: (step, data), path, framework=OURS, timeout_s=20) as observed:
        pass
    return observed.problem


def of_two(world: World, path: Path, *, shift: int = 0, other: float = 0.0) -> Record | str:
    found = world.run(of_a_rank, str(path), shift, other, ranks=2)
    assert found[0] == found[1]
    return str(found[0]) if found[0] else read(path)


@pytest.mark.pipeproof_ranks
@pytest.mark.filterwarnings("ignore:the step was not recorded")
def test_parts_that_replicas_have_are_put_together(world: World, tmp_path: Path) -> None:
    record = of_two(world, tmp_path / "a")
    assert isinstance(record, Record), record
    (one,) = record.operations
    job = Job()
    job.step()
    for name, parameter in job.model.named_parameters():
        gradient = one.gradients[name]
        assert gradient.equal(parameter.grad)
    assert one.losses == (0, 2, 4, 1, 3, 5)  # the first replica's microbatches come first
    assert compare(record, record, sides=RUNS).outcome == "pass"  # although two ranks hold every parameter
    gap = of_two(world, tmp_path / "b", shift=1)
    golden(str(gap))
    weights = of_two(world, tmp_path / "c", other=1.0)
    golden(str(weights))
