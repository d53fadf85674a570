"""What a rank cannot collect of a step is said in a sentence: calls of microbatches, and weights as they were."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof import StageByStage, check_step
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Verdict
from tests.support.golden import golden
from tests.support.pipeline_here import DATA, MSE, Job, checked, layers
from tests.support.steps import backward

UNSEEN = "compile it by torch.compile and pass what that returns, or compile the modules in it"
Update = Callable[[torch.optim.Optimizer], None]


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.inner(x))


def verdict_on(given: nn.Module, called: Callable[[Tensor], Any], data: Any = DATA) -> Verdict:
    """On a step of the one stage ``given``, which is ``called`` so."""
    with check_step(given, data, against=StageByStage(MSE)) as check:
        backward(called, DATA, by=MSE)
        check.gradients()
    return check.verdict


def test_a_module_whose_calls_nobody_sees_is_refused() -> None:
    inner = layers(torch.tanh)[0]
    golden(verdict_on(inner, inner.forward).details.splitlines()[0])


@pytest.mark.parametrize(
    ("how", "sentence"),
    [("in place", UNSEEN), ("beside", UNSEEN), ("blocks", "PASS"), ("returned", "PASS")],
)
def test_what_to_pass_of_compiled_modules(how: str, sentence: str) -> None:
    given = called = nn.Sequential(*layers(torch.tanh))
    if how == "in place":
        given.compile(backend="eager")
    elif how == "blocks":
        for block in given:
            block.compile(backend="eager")
    else:
        called = torch.compile(given, backend="eager")  # type: ignore[assignment]  # it is a module, too
        given = called if how == "returned" else given
    verdict = verdict_on(given, called)
    assert sentence in verdict.details, str(verdict)


@pytest.mark.parametrize("several", [False, True])
def test_several_calls_for_a_microbatch_are_refused(several: bool) -> None:
    inner = layers(torch.tanh)[0]
    around = (lambda x: inner(x) * inner(x + 1)) if several else Around(inner)
    verdict = verdict_on(inner, around, [((x, x + 1), target) for x, target in DATA] if several else DATA)
    assert verdict.law("comparable").reasons == (Reason.CALLS,), str(verdict)
    golden(verdict.law("comparable").note)


@pytest.mark.parametrize("trained", [True, False])
def test_only_frozen_stages_may_run_without_gradients(trained: bool) -> None:
    first, last = layers(torch.tanh, torch.sin)
    first.requires_grad_(trained)
    with check_step({0: first, 1: last}, DATA, against=StageByStage(MSE), rename="{}.{}".format) as check:
        for x, target in DATA:
            with torch.no_grad():
                sent = first(x)
            (MSE(last(sent), target) / 3).backward()
        check.gradients()
    assert check.verdict.outcome == ("unknown" if trained else "pass"), str(check.verdict)
    assert ("call requires_grad_(False)" in check.verdict.details) == trained


def verdict_of(update: Update, *, midst: bool = False, own: bool = True) -> Verdict:
    """Of a step in which ``update`` comes before ``gradients()``, or in the ``midst`` of all backwards as well.

    ``own``: it is of the step's own weights.
    """
    job = Job(layers(torch.tanh, torch.sin))
    optimizer = torch.optim.SGD(nn.ModuleList(job.stages if own else layers(torch.tanh)).parameters(), lr=0.1)
    with check_step(dict(enumerate(job.stages)), DATA, against=StageByStage(MSE), rename="{}.{}".format) as check:
        for m, pair in enumerate(DATA):
            job._train(m, *pair)
            if midst or m == len(DATA) - 1:
                update(optimizer)
        check.gradients()
        check.report()
    return check.verdict


def alone(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def and_cleared(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("update", [alone, and_cleared])
def test_steps_over_too_early_are_not_judged(update: Update) -> None:
    verdict = verdict_of(update)
    assert verdict.outcome == "unknown", str(verdict)
    golden(verdict.details.splitlines()[0])


def test_a_step_amid_backwards_is_a_fault() -> None:
    assert {one.kind for one in verdict_of(alone, midst=True).causes} == {"computation"}


def test_steps_of_other_weights_do_not_matter() -> None:
    assert verdict_of(alone, own=False).outcome == "pass"


@pytest.mark.parametrize("microbatches", [1, 3])
def test_steps_inside_backwards_are_not_judged(microbatches: int) -> None:
    job = Job(layers(torch.tanh, torch.sin), DATA[:microbatches])
    for one in nn.ModuleList(job.stages).parameters():
        optimizer = torch.optim.SGD([one], lr=0.1)
        one.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    verdict = checked(job)
    assert verdict.outcome == "unknown", str(verdict)
    golden(verdict.details.splitlines()[0])
