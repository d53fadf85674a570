"""The check of a step inside a job: here of one rank alone; under torchrun in examples/test_checked_training."""

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from pipeproof import Contract, SingleDevice
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Verdict
from pipeproof.pipeline import PipelineSchedule
from pipeproof.records import checked_step
from pipeproof.records.record import Record
from pipeproof.records.step_check import CheckError, check_step
from pipeproof.records.step_record import record_step, write_record
from pipeproof.worlds.side_store import Exchange, RanksAbsent
from tests.support.golden import golden
from tests.support.steps import backward, loss_fn, pairs

Pairs = list[tuple[object, object]]


def build(width: int = 8) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.BatchNorm1d(width), nn.Linear(width, width))


def data(seed: int = 0, width: int = 8) -> Pairs:
    return pairs(3, width=width, seed=seed)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def expected(model: nn.Module, microbatches: Pairs) -> Record:
    return record_step(model, microbatches, loss_fn=loss_fn, optimizer=sgd(model), contract=Contract(max_norm=0.5))


def step(
    against: Any,
    *,
    microbatches: Pairs | None = None,
    fault: Callable[[nn.Module], object] = lambda model: None,
    late: Callable[[nn.Module], object] = lambda model: None,
    report: Callable[[list[float], float], dict[str, Any]] = lambda losses, norm: {"losses": losses, "norm": norm},
    **options: Any,
) -> Verdict:
    """A user's checked step of ``microbatches``; faults before and after clipping."""
    model, said = build(), data() if microbatches is None else microbatches
    optimizer = sgd(model)
    with check_step({3: model}, said, against=against, **options) as check:
        losses = backward(model, said)
        fault(model)
        check.gradients()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        optimizer.step()
        late(model)
        check.report(**report(losses, norm))
    return check.verdict


def grad(model: nn.Module) -> Tensor:
    found = model.get_parameter("3.weight").grad
    assert found is not None
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("record") / "expected"
    write_record(expected(build(), data()), str(file))
    return file


BESIDE = SingleDevice(build, loss_fn)
AT = "rank 0, stage 3, parameter 3.weight"


def test_a_right_step_agrees_with_its_record(path: Path) -> None:
    verdict = step(path)
    assert verdict.outcome == "pass", str(verdict)
    compared = {law.name: law.checked for law in verdict.laws}
    assert compared == {
        "parameters-once": 6,
        "loss": 3,
        "presence": 6,
        "gradient": 6,
        "grad-norm": 1,
        "updated-parameters": 6,
        "buffers": 3,
    }
    assert verdict.replay.startswith("torchrun --nproc-per-node 1 ")


def test_a_right_step_agrees_with_the_model_beside_it() -> None:
    verdict = step(BESIDE)
    assert (verdict.outcome, verdict.law("gradient").checked) == ("pass", 6), str(verdict)
    golden(verdict.law("updated-parameters").note)


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "tripled": ({"fault": lambda model: grad(model).mul_(3)}, "gradient", AT),
    "zero": ({"fault": lambda model: grad(model).zero_()}, "gradient", AT),
    "none": ({"fault": lambda model: setattr(model.get_parameter("3.weight"), "grad", None)}, "presence", AT),
    "losses": ({"report": lambda losses, norm: {"losses": losses[::-1]}}, "loss", "rank 0, microbatch 0"),
    "whole loss": ({"report": lambda losses, norm: {"losses": losses, "loss": sum(losses)}}, "loss", "rank 0"),
    "norm": ({"report": lambda losses, norm: {"losses": losses, "norm": 2 * norm}}, "grad-norm", "rank 0"),
    "weights": (
        {"late": lambda model: model.get_parameter("3.weight").data.mul_(2)},
        "updated-parameters",
        AT,
    ),
}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_with_its_place(name: str, beside: bool, path: Path) -> None:
    options, law, where = WRONG[name]
    verdict = step(BESIDE if beside else path, **options)
    if beside and law == "updated-parameters":  # the optimizer is the job's
        assert verdict.outcome == "pass", str(verdict)
        return
    assert verdict.outcome == "fail"
    assert [(one.law, one.where) for one in verdict.mismatches[:1]] == [(law, where)]
    after = law in ("grad-norm", "updated-parameters")
    assert not after or [one.name for one in verdict.laws if one.outcome == "fail"] == [law]


def test_what_nobody_looked_at_is_no_pass(path: Path) -> None:
    silent = step(path, report=lambda losses, norm: {})
    assert (silent.outcome, silent.law("loss").note) == ("unknown", "nothing was compared")
    assert silent.law("grad-norm").reasons == (Reason.UNREPORTED,)
    model = build()
    with check_step(model, data(), against=path) as check:
        pass
    assert check.verdict.law("gradient").outcome == "unknown"


def idle(model: Any, microbatches: Pairs | None, against: Any) -> Verdict:
    """The verdict on a block in which nothing happens."""
    with check_step(model, microbatches, against=against) as check:
        pass
    return check.verdict


def moved() -> nn.Module:
    model = build()
    model.get_parameter("0.bias").data[0] += 1e-3
    return model


def stages() -> dict[int, nn.Module]:
    whole = build()
    assert isinstance(whole, nn.Sequential)
    return {1: whole[:2], 5: nn.Sequential(whole[2], whole[3])}


def beside(*layers: nn.Module) -> SingleDevice:
    return SingleDevice(lambda: nn.Sequential(*layers), loss_fn)


def broken() -> nn.Module:
    raise RuntimeError("out of memory")


REFUSED: dict[str, Callable[[Path], Verdict]] = {
    "other weights": lambda path: idle(moved(), data(), path),
    "other data": lambda path: step(path, microbatches=data(seed=1)),
    "another order": lambda path: step(path, microbatches=data()[::-1]),
    "fewer microbatches": lambda path: step(path, microbatches=data()[:2]),
    "no such operation": lambda path: step(path, operation=1),
    "no record": lambda path: step(__file__),
    "no file": lambda path: step("nowhere"),
    "no microbatches": lambda path: idle(build(), None, path),
    "no microbatches beside": lambda path: idle(build(), None, BESIDE),
    "no digest": lambda path: idle(build(), [(object(), None)], path),
    "two of a name": lambda path: idle(stages(), data(), path),
    "fewer layers": lambda path: step(beside(nn.Linear(8, 8))),
    "more layers": lambda path: step(beside(*build().children(), nn.Linear(8, 8))),
    "random": lambda path: step(beside(*build().children(), nn.Dropout())),
    "broken": lambda path: step(SingleDevice(broken, loss_fn)),
    "no number": lambda path: step(path, report=lambda losses, norm: {"norm": object()}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_judged_is_said(name: str, path: Path) -> None:
    verdict = REFUSED[name](path)
    assert (verdict.outcome, verdict.exit_status) == ("unknown", 3)
    golden(verdict.details.splitlines()[0], numbers=False)


def test_other_names_are_no_matter_with_a_rename(path: Path) -> None:
    model = nn.ModuleDict({"net": build()})
    with check_step(model, data(), against=path, rename=lambda _, name: name.removeprefix("net.")) as check:
        pass
    assert check.verdict.law("parameters-once").outcome == "pass"


def test_a_rename_tells_stages_apart(path: Path) -> None:
    with check_step(stages(), data(), against=path, rename=lambda s, n: f"{int(n[0]) + s // 2}{n[1:]}") as check:
        pass
    law = check.verdict.law("parameters-once")
    assert (law.checked, law.outcome) == (6, "pass")


def test_a_record_that_was_altered_is_said_where_it_is_read(path: Path, tmp_path: Path) -> None:
    gradient = expected(build(), data()).operations[0].gradients["3.weight"]
    assert gradient is not None
    content = bytearray(path.read_bytes())
    content[content.index(gradient.numpy().tobytes())] ^= 1
    (tmp_path / "altered").write_bytes(content)
    verdict = step(tmp_path / "altered")
    assert verdict.outcome == "unknown"
    golden(verdict.details.splitlines()[0])


def test_a_step_that_raises_keeps_its_own_error(path: Path) -> None:
    check = check_step(build(), data(), against=path)
    with pytest.raises(RuntimeError, match="shapes cannot"), check:
        build()(torch.zeros(2, 3))
    assert check.verdict.outcome == "unknown"
    golden(check.verdict.details.splitlines()[0], numbers=False)


class Lonely(Exchange):
    """The exchange of rank 0 of two, whose other rank does not come to the end."""

    def __init__(self, late: bool) -> None:
        super().__init__(None)
        self.late = late

    def finish(self, value: object, *, what: str, bound_s: float) -> Any:
        reason = f"within {bound_s:g} s" if self.late else "as it had ended its part already"
        raise RanksAbsent({1: f"did not come to {what} {reason}"}, late=self.late)


@pytest.mark.parametrize("late", [True, False])
def test_a_rank_that_never_came_is_named_first(path: Path, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_step, "exchange", lambda: Lonely(late))
    verdict = step(path, timeout_s=4.0)
    why = "within 4 s" if late else "as it had ended its part already"
    head = f"{'HANG' if late else 'ERROR'} rank 1 did not come to the end of the checked step {why}"
    assert verdict.details.splitlines()[:2] == [head, "rank 0: finished"]
    assert (verdict.outcome, verdict.exit_status, verdict.reason) == ("unknown", 3, head)
    check = check_step(build(), data(), against=path, timeout_s=4.0)
    with pytest.raises(KeyError), check:
        raise KeyError("x")
    golden(check.verdict.details, lines="^ERROR|rank 1: did")


def test_a_verdict_before_the_end_is_refused(path: Path) -> None:
    with check_step(build(), data(), against=path) as check, pytest.raises(CheckError, match="at the end of the with"):
        check.verdict.raise_if_failed()


def test_our_own_runtime_looks_at_the_right_moment(path: Path) -> None:
    model = build()
    schedule = PipelineSchedule(kind="1f1b", n_microbatches=3, stages=[model], loss_fn=loss_fn, optimizer=sgd(model))
    with check_step(model, data(), against=path) as check:
        result = schedule.wrap(check.wrap).train_step(data(), max_norm=0.5)
        check.report(losses=result.losses, loss=result.loss, norm=result.grad_norm)
    assert check.verdict.outcome == "pass", str(check.verdict)
    assert check.verdict.law("gradient").checked == 6


def taken(model: nn.Module, microbatches: Pairs, file: Path, *, factor: float) -> list[float]:
    """What is allocated until gradients are compared, allocation by allocation, in shares of the stage.

    The record's file is mapped, not read: its pages are the system's, which lets go of them when memory is short.
    """
    gradients = []
    backward(model, microbatches)
    for parameter in model.parameters():
        gradients.append(parameter.grad.mul_(factor))
        parameter.grad = None
    stage = sum(parameter.nbytes for parameter in model.parameters())
    check = check_step(model, microbatches, against=file)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as observed:
        check.__enter__()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        check.gradients()
    check.__exit__(None, None, None)
    assert check.verdict.law("gradient").outcome == ("pass" if factor == 1 else "fail")
    sizes = [event.nbytes() for event in observed.profiler.kineto_results.events() if event.name() == "[memory]"]
    mapped = [size for size in sizes if size > stage]
    assert len(mapped) == 1, "the file"
    return [held / stage for held in accumulate(size for size in sizes if size not in mapped)]


@pytest.mark.long
def test_comparing_takes_less_memory_than_a_stage(tmp_path: Path) -> None:
    """What is right is compared piece by piece, and what is wrong is kept: one stage more, for the cause's sake."""
    model, microbatches, file = nn.Sequential(nn.Linear(1024, 1024)), data(width=1024), tmp_path / "wide"
    write_record(expected(model, microbatches), str(file))
    right, wrong = (taken(model, microbatches, file, factor=factor) for factor in (1, 3))
    assert right[-1] < 0.01
    assert max(right) < 0.5
    assert 0.99 < wrong[-1] < 1.01
    assert max(wrong) < 1.01


def test_a_crash_of_the_check_ends_no_job(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object, **given: object) -> None:
        raise ZeroDivisionError("a rule is wrong")

    for part, fault, outcome in (
        ("norm", lambda model: None, "unknown"),
        ("norm", lambda model: grad(model).mul_(2), "fail"),
        ("gradient", lambda model: None, "unknown"),
        ("count_holders", lambda model: None, "unknown"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"pipeproof.core.comparison.Comparison.{part}", crash)
            verdict = step(path, fault=fault)
        assert verdict.outcome == outcome, part
        assert verdict.stopped.partition(":")[0] == ZeroDivisionError.__name__
        assert "in crash" in verdict.traceback
    monkeypatch.setattr("pipeproof.records.step_check.read", crash)
    verdict = step(path)
    assert verdict.outcome == "unknown"
    assert verdict.law("comparable").reasons == (Reason.CRASH,)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("seed", [0, 5], ids=["the same data", "other data"])
def test_a_gradient_that_was_left_is_stale_also_where_it_is_the_same(path: Path, beside: bool, seed: int) -> None:
    model = build()
    backward(model, data(seed))
    with check_step({3: model}, data(), against=BESIDE if beside else path) as check:
        backward(model, data())
        check.gradients()
    (cause,) = check.verdict.causes
    assert (cause.kind, cause.stage) == ("stale-gradient", 3), check.verdict
    others = [one.kind for (one,) in check.verdict.alternatives]
    assert others == (["scale"] if seed == 0 else []), "nobody can tell it from this step's own, added twice"
