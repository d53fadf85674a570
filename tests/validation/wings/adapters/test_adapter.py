"""What users call is what an adapter has; another framework's is one class; what goes wrong in it ends no job."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import pipeproof
from pipeproof import StepResult
from pipeproof.core.verdict import Verdict
from pipeproof.records.record_file import read
from pipeproof.records.single_device import SingleDevice
from pipeproof.whitebox import WhiteBox
from pipeproof.whitebox.task import WhiteBoxError
from pipeproof.wings.adapters import adapter
from pipeproof.wings.adapters.adapter import Adapter
from pipeproof.wings.adapters.framework import AdapterError, Framework
from pipeproof.wings.adapters.step import Drawn, FrameworkStep, Sight, contents
from pipeproof.wings.adapters.whole import Whole
from tests.support.doubles import InThisProcess
from tests.support.golden import golden
from tests.support.steps import blocks, loss_fn, pairs

FRONTS = ("colossalai", "deepspeed", "megatron", "nanotron", "torchtitan", "transformers")


@pytest.mark.parametrize("name", FRONTS)
def test_an_adapter_imports_nothing_of_its_framework(name: str) -> None:
    own = getattr(pipeproof, name)
    assert own is import_module(f"pipeproof.wings.adapters.{name}")
    assert {"check_step", "imports", "observe", "record_step", "validate"} <= {*own.__all__}
    assert name not in sys.modules


@pytest.mark.parametrize(
    ("name", "given", "sentence"),
    [
        ("megatron", {"forward_step": len}, "megatron-core is not installed: pip install"),
        ("deepspeed", {}, r"deepspeed is not installed: pip install deepspeed==0\.19"),
        ("torchtitan", {"loss_fn": len}, "torchtitan is not installed: pip install"),
        ("colossalai", {"criterion": len}, r"colossalai is not installed: pip install --no-deps colossalai==0\.5"),
        ("nanotron", {}, "nanotron is not installed: pip install"),
        ("transformers", {}, "transformers is not installed: pip install"),
    ],
)
def test_without_its_framework_or_with_another_version_a_sentence_says_so(
    name: str, given: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = sentence.partition(" ")[0], ModuleType(name)
    other.__version__ = "0.0.1"  # type: ignore[attr-defined]  # a package's
    for package, told in (
        (None, sentence),
        (other, rf"{own} is 0\.0\.1: this pipeproof knows .*, so install one of it"),
    ):
        monkeypatch.setitem(sys.modules, name, package)
        monkeypatch.setitem(sys.modules, "megatron.core", package)
        with pytest.raises(AdapterError, match=f"^{told}"):
            getattr(pipeproof, name).validate(len, reference=nn.Module, microbatches=[], ranks=2, **given)


class Engine:
    """A framework's engine, as its makers could have written it."""

    def __init__(self, factor: float) -> None:
        self.model, self.losses, self.factor = blocks(2), list[torch.Tensor](), factor

    def train(self, microbatches: Sequence[Any]) -> None:
        for inputs, target in microbatches:
            loss = loss_fn(self.model(inputs), target)
            self.losses.append(loss.detach())
            (loss * self.factor / len(microbatches)).backward()
        self.step()

    def step(self) -> None:
        """The optimizer's."""


@dataclass(frozen=True)
class Own(Adapter):
    engine: Engine
    framework = Framework("ours", "pipeproof", ("0.1",), "pip install pipeproof")

    def step(self) -> FrameworkStep:
        return FrameworkStep(
            {0: self.engine.model},
            lambda stage, name: name,
            lambda: {one: one.grad for one in self.engine.model.parameters()},
            lambda: self.engine.losses,
            self._watching,
        )

    @contextmanager
    def _watching(self, sight: Sight) -> Iterator[None]:
        self.engine.step = sight.complete  # type: ignore[method-assign]
        yield
        del self.engine.step

    def whole(self, reference: Any, microbatches: Sequence[Any]) -> Whole:
        return Whole(reference, reference, microbatches, loss_fn)


def build() -> nn.Module:
    return blocks(2)


@pytest.mark.parametrize(("factor", "said"), [(1.0, ("pass", [])), (3.0, ("fail", ["scale"]))])
def test_a_step_of_another_framework_is_checked(factor: float, said: Any) -> None:
    engine = Engine(factor)
    with adapter.check_step(Own(engine), pairs(3), reference=build, timeout_s=5) as check:
        engine.train(pairs(3))
    assert (check.verdict.outcome, [one.kind for one in check.verdict.causes]) == said, str(check.verdict)
    assert "step" not in vars(engine)


@pytest.mark.parametrize(("factor", "said"), [(1.0, ("pass", [])), (3.0, ("fail", ["scale"]))])
def test_a_step_of_it_is_validated(factor: float, said: Any) -> None:
    def step(model: nn.Module, microbatches: list[Any]) -> StepResult:
        engine = Engine(factor)
        with adapter.observe(Own(engine), microbatches, model) as observed:
            engine.train([*observed.data_iterator])
        return observed.result()

    whole, whitebox = Whole(build, build, pairs(3), loss_fn), WhiteBox(InThisProcess())
    verdict = adapter.validate(Own.framework, step, whole, ranks=1, whitebox=whitebox)
    assert (verdict.outcome, [one.kind for one in verdict.causes]) == said, str(verdict)


def test_it_is_recorded_and_observed(tmp_path: Path) -> None:
    engine = Engine(1.0)
    with adapter.record_step(Own(engine), pairs(3), str(tmp_path / "a"), timeout_s=5):
        engine.train(pairs(3))
    (one,) = read(tmp_path / "a").operations
    assert one.losses == tuple(map(float, engine.losses))
    engine, reference = Engine(1.0), build()
    with torch.no_grad():
        next(reference.parameters()).add_(1.0)
    with adapter.observe(Own(engine), pairs(3), reference) as observed:
        engine.train([*observed.data_iterator])
    handed = observed.result()
    assert next(engine.model.parameters()).equal(next(reference.parameters()))
    assert len(handed.losses) == 3
    assert set(handed.gradients) == set(engine.model.parameters())


def test_a_step_that_cannot_be_held_against_itself_says_so() -> None:
    composed = import_module("pipeproof.wings.composed").StageByStage()
    with adapter.check_step(Own(Engine(1.0)), pairs(3), reference=composed, timeout_s=5) as check:
        pass
    assert "held against itself" in check.verdict.details


def test_a_whole_model_that_cannot_be_built_leaves_its_contract_to_the_verdict() -> None:
    def failing() -> nn.Module:
        raise RuntimeError("the user's")

    whole = Whole(failing, failing, pairs(1), loss_fn, lambda model, every: 1 / 0)
    assert whole.contract_in_step() == Whole(build, build, ()).contract_in_step()
    assert replace(whole, microbatches=()).contract_in_step() == whole.contract_in_step()


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


class Job:
    """A job with a hook before its optimizer, that an adapter sets while a step is watched."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model, self.losses, self.drawn = model or seeded(), list[float](), Drawn()
        self.draws: list[int] = [0, 1, 2]
        self.before: Callable[[], None] = lambda: None
        self.after_complete: Callable[[], None] = lambda: None  # of the optimizer's, before it forms the norm

    @contextmanager
    def watching(self, sight: Sight) -> Iterator[None]:
        def before() -> None:
            sight.complete()
            self.after_complete()
            sight.norm(torch.stack([one.grad.norm() for one in self.model.parameters() if one.grad is not None]).norm())

        self.before = before
        try:
            yield
        finally:
            del self.before

    def step(self, factor: float = 1.0) -> None:
        self.losses.clear()
        self.model.zero_grad()
        data = pairs(3, width=8)
        for inputs, target in (data[number] for number in self.draws):
            loss = loss_fn(self.model(inputs), target)
            self.losses.append(loss.item())
            self.drawn.note((inputs, target))
            (loss * factor / 3).backward()
        self.before()

    def as_job_step(self, **changed: Any) -> adapter.JobStep:
        against = changed.pop("against", SingleDevice(seeded, loss_fn))
        given: dict[str, Any] = {
            "stages": {0: self.model},
            "name": lambda stage, name: name,
            "gradients": lambda: {one: one.grad for one in self.model.parameters()},
            "losses": lambda: self.losses,
            "watching": self.watching,
            "drawn": self.drawn,
        }
        data = pairs(3, width=8)
        return adapter.JobStep(FrameworkStep(**given | changed), data, against, contents(data))


def judged(job: Job, *, factor: float = 1.0, steps: int = 1, **changed: Any) -> Verdict:
    with adapter.checking(lambda: job.as_job_step(**changed), timeout_s=5) as check:
        for _ in range(steps):
            job.step(factor)
    assert "before" not in vars(job)
    return check.verdict


def test_a_right_step_passes_with_losses_gradients_and_norm() -> None:
    verdict = judged(Job())
    assert verdict.outcome == "pass", str(verdict)
    assert {name: verdict.law(name).checked for name in ("loss", "gradient", "grad-norm")} == {
        "loss": 3,
        "gradient": 4,
        "grad-norm": 1,
    }


@pytest.mark.parametrize(("losses", "outcome"), [(slice(None), "pass"), (slice(None, None, -1), "fail")])
def test_losses_are_those_of_what_the_job_drew_in_this_order(losses: slice, outcome: str) -> None:
    job = Job()
    job.draws = [2, 0, 1]
    verdict = judged(job, losses=lambda: job.losses[losses])
    assert verdict.law("loss").outcome == outcome, str(verdict)
    assert verdict.law("gradient").outcome == "pass"


def test_a_wrong_step_is_named() -> None:
    verdict = judged(Job(), factor=3.0)
    assert (verdict.outcome, [cause.kind for cause in verdict.causes]) == ("fail", ["scale"])


def test_a_norm_that_is_told_in_parts_is_not_said_to_be_told_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeproof.wings.adapters.step.whole_here", lambda norm: None)
    law = judged(Job()).law("grad-norm")
    assert law.outcome == "not observed"
    golden(law.note)


def test_a_norm_like_nothing_known_is_not_laid_upon_the_norm_alone() -> None:
    job = Job()

    def lose_a_part() -> None:
        gradient = job.model.get_parameter("0.weight").grad
        gradient[0] = 0.0

    job.after_complete = lose_a_part
    verdict = judged(job)
    assert (verdict.outcome, verdict.causes) == ("fail", ())
    golden(verdict.undecided[0], numbers=False)
    assert "scale" in {kind for one in verdict.ruled_out for kind in one.kinds}


def test_names_of_the_whole_model_are_used() -> None:
    def whole() -> nn.Module:
        return nn.Sequential(seeded())

    against = SingleDevice(whole, loss_fn)
    assert judged(Job(), against=against, name=lambda stage, name: f"{stage}.{name}").outcome == "pass"


def test_names_that_do_not_fit_are_said_without_an_option_that_users_lack() -> None:
    def longer() -> nn.Module:
        return nn.Sequential(*seeded(), nn.Linear(8, 8))

    told = judged(Job(), against=SingleDevice(longer, loss_fn)).details
    golden(told.splitlines()[0])
    job = Job()
    twice = judged(job, stages={0: job.model, 1: job.model}).details
    golden(twice.splitlines()[0])
    assert "rename=" not in told + twice


def test_several_steps_in_one_block_are_no_verdict_on_the_first() -> None:
    verdict = judged(Job(), steps=2)
    assert verdict.outcome == "unknown"
    golden(verdict.details.splitlines()[0])


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (WhiteBoxError("fp16 is not covered: switch it off"), "rank 0: fp16 is not covered: switch it off"),
        (AttributeError("no module"), "rank 0: the check cannot be made of this: AttributeError: no module"),
    ],
)
def test_what_is_refused_is_said_and_the_job_goes_on(error: Exception, sentence: str) -> None:
    def refused() -> adapter.JobStep:
        raise error

    went_on = False
    with adapter.checking(refused, timeout_s=5) as check:
        went_on = True
    assert went_on
    assert check.verdict.outcome == "unknown"
    assert sentence in check.verdict.details


def test_an_adapter_that_raises_ends_no_job() -> None:
    @contextmanager
    def broken(sight: Sight) -> Iterator[None]:
        raise RuntimeError("hooks")
        yield

    verdict = judged_with(watching=broken)
    assert verdict.outcome == "unknown"
    assert "RuntimeError: hooks" in verdict.details

    def blind() -> Any:
        raise RuntimeError("gradients")

    assert "RuntimeError: gradients" in str(judged_with(gradients=blind))


def judged_with(**changed: Any) -> Verdict:
    with adapter.checking(lambda: Job().as_job_step(**changed), timeout_s=5) as check:
        pass
    return check.verdict


def test_a_step_that_was_never_complete_is_judged_as_it_is_at_the_end_or_refused() -> None:
    unfinished = WhiteBoxError("call train_batch in the block")
    golden(judged_with(unfinished=unfinished).details.splitlines()[0])
    job = Job()
    with adapter.checking(lambda: job.as_job_step(watching=lambda _: nullcontext()), timeout_s=5) as check:
        job.step()
    assert check.verdict.outcome == "pass", str(check.verdict)


def test_what_the_job_raises_is_its_own() -> None:
    job = Job()
    with pytest.raises(KeyError), adapter.checking(job.as_job_step, timeout_s=5) as check:
        raise KeyError("x")
    golden(check.verdict.details.splitlines()[0])
    assert "before" not in vars(job)


def test_the_reference_draws_apart_from_the_job() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    job = Job()
    torch.manual_seed(3)
    with adapter.checking(job.as_job_step, timeout_s=5):
        found = torch.rand(3)
    assert found.equal(expected)


def test_what_is_frozen_has_no_gradient_and_is_compared() -> None:
    def frozen() -> nn.Module:
        model = seeded()
        model.get_parameter("0.weight").requires_grad_(False)
        return model

    job = Job()
    job.model = frozen()
    trained = {"gradients": lambda: {one: one.grad for one in job.model.parameters() if one.requires_grad}}
    verdict = judged(job, against=SingleDevice(frozen, loss_fn), **trained)
    assert verdict.outcome == "pass", str(verdict)
    assert verdict.law("presence").checked == 4


@pytest.mark.parametrize("timeout_s", [-1, None])
def test_a_timeout_that_is_none_is_said_and_the_job_goes_on(timeout_s: Any) -> None:
    job = Job()
    with adapter.checking(job.as_job_step, timeout_s=timeout_s) as check:
        job.step()
    golden(check.verdict.details.splitlines()[0])
