"""A step of a framework's in a job: what its adapter shows is judged, and what goes wrong there ends no job."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from pipeproof.core.verdict import Verdict
from pipeproof.records.single_device import SingleDevice
from pipeproof.whitebox.task import WhiteBoxError
from pipeproof.wings.adapters.drawn import Drawn, contents
from pipeproof.wings.adapters.job import JobStep, checking
from pipeproof.wings.adapters.step import FrameworkStep, Sight
from tests.support.golden import golden
from tests.support.steps import pairs

loss_fn = nn.functional.mse_loss


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


class Job:
    """A job with a hook before its optimizer, that an adapter sets while a step is watched."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model, self.losses, self.drawn = model or build(), list[float](), Drawn()
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

    def as_job_step(self, **changed: Any) -> JobStep:
        against = changed.pop("against", SingleDevice(build, loss_fn))
        given: dict[str, Any] = {
            "stages": {0: self.model},
            "name": lambda stage, name: name,
            "gradients": lambda: {one: one.grad for one in self.model.parameters()},
            "losses": lambda: self.losses,
            "watching": self.watching,
            "drawn": self.drawn,
        }
        data = pairs(3, width=8)
        return JobStep(FrameworkStep(**given | changed), data, against, contents(data))


def judged(job: Job, *, factor: float = 1.0, steps: int = 1, **changed: Any) -> Verdict:
    with checking(lambda: job.as_job_step(**changed), timeout_s=5) as check:
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
    monkeypatch.setattr("pipeproof.wings.adapters.sight.whole_here", lambda norm: None)
    law = judged(Job()).law("grad-norm")
    assert law.outcome == "not observed"
    golden(law.note)


def test_a_norm_like_nothing_known_is_not_laid_upon_the_norm_alone() -> None:
    job = Job()

    def lose_a_part() -> None:
        gradient = job.model.get_parameter("0.weight").grad
        assert gradient is not None
        gradient[0] = 0.0

    job.after_complete = lose_a_part
    verdict = judged(job)
    assert (verdict.outcome, verdict.causes) == ("fail", ())
    golden(verdict.undecided[0], numbers=False)
    assert "scale" in {kind for one in verdict.ruled_out for kind in one.kinds}


def test_names_of_the_whole_model_are_used() -> None:
    def whole() -> nn.Module:
        return nn.Sequential(build())

    against = SingleDevice(whole, loss_fn)
    assert judged(Job(), against=against, name=lambda stage, name: f"{stage}.{name}").outcome == "pass"


def test_names_that_do_not_fit_are_said_without_an_option_that_users_lack() -> None:
    def longer() -> nn.Module:
        return nn.Sequential(*build(), nn.Linear(8, 8))

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
    def refused() -> JobStep:
        raise error

    went_on = False
    with checking(refused, timeout_s=5) as check:
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
    with checking(lambda: Job().as_job_step(**changed), timeout_s=5) as check:
        pass
    return check.verdict


def test_a_step_that_was_never_complete_is_judged_as_it_is_at_the_end_or_refused() -> None:
    unfinished = WhiteBoxError("call train_batch in the block")
    golden(judged_with(unfinished=unfinished).details.splitlines()[0])
    job = Job()
    with checking(lambda: job.as_job_step(watching=lambda _: nullcontext()), timeout_s=5) as check:
        job.step()
    assert check.verdict.outcome == "pass", str(check.verdict)


def test_what_the_job_raises_is_its_own() -> None:
    job = Job()
    with pytest.raises(KeyError), checking(job.as_job_step, timeout_s=5) as check:
        raise KeyError("x")
    golden(check.verdict.details.splitlines()[0])
    assert "before" not in vars(job)


def test_the_reference_draws_apart_from_the_job() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    job = Job()
    torch.manual_seed(3)
    with checking(job.as_job_step, timeout_s=5):
        found = torch.rand(3)
    assert found.equal(expected)


def test_what_is_frozen_has_no_gradient_and_is_compared() -> None:
    def frozen() -> nn.Module:
        model = build()
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
    with checking(job.as_job_step, timeout_s=timeout_s) as check:
        job.step()
    golden(check.verdict.details.splitlines()[0])
