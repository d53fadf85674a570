"""What cannot be run, differentiated, read or explained ends in a verdict or in one sentence: never in a pass."""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import StepResult
from pipeproof.commands.cli import main
from pipeproof.core.comparison import Comparison
from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.own.case import Case
from pipeproof.own.judgement import judge
from pipeproof.own.observe import observe
from pipeproof.own.validator import explain_case
from pipeproof.whitebox import WhiteBox
from pipeproof.whitebox.task import WhiteBoxError
from pipeproof.wings.specimens import SPECIMENS
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.steps import backward, loss_fn, pairs

WIDTH = 8
Reference = Callable[[], nn.Module]


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


data = partial(pairs, 3)


def right(model: nn.Module, microbatches: list[Any]) -> Any:
    return model, backward(model, microbatches)


def own(model: nn.Module, microbatches: list[Any]) -> Any:
    """A step that runs whatever the reference does."""
    return right(build(), microbatches)


def wrong(model: nn.Module, microbatches: list[Any]) -> Any:
    made = right(model, microbatches)
    next(model.parameters()).grad.mul_(2)  # type: ignore[union-attr]
    return made


def warmed_up(model: nn.Module, microbatches: list[Any]) -> Any:
    """A right step whose weights come after a first call with others."""
    weights = {name: one.clone() for name, one in model.state_dict().items()}
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(2)
        model(microbatches[0][0])
    model.load_state_dict(weights)
    return right(model, microbatches)


def judged(whitebox: WhiteBox, step: Any = right, **more: Any) -> Verdict:
    given: dict[str, Any] = {"reference": build, "microbatches": data(), "ranks": 1, "loss_fn": loss_fn}
    verdict = whitebox.validate(step, **given | more)
    assert json.loads(json.dumps(verdict.as_dict()))["outcome"] == verdict.outcome
    return verdict


# References that cannot be built, run or differentiated.


def unbuilt() -> nn.Module:
    raise FileNotFoundError("no checkpoint")


def altered(forward: Callable[[Tensor], Tensor]) -> Reference:
    """The model with something else than its output."""

    def reference() -> nn.Module:
        model = build()
        plain = model.forward
        model.forward = lambda x: forward(plain(x))  # type: ignore[method-assign]
        return model

    return reference


class NoBackward(torch.autograd.Function):
    """What cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("no way back")


CANNOT = "on microbatch 0 the reference reference cannot be differentiated"
REFERENCES: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "built": ({"reference": unbuilt}, "the reference unbuilt cannot be built: it raised FileNotFoundError: no check"),
    "forward": ({"reference": altered(lambda y: y[:, 99])}, "on microbatch 0 the reference reference raised IndexErr"),
    "backward": ({"reference": altered(NoBackward.apply)}, "on microbatch 0 the reference reference raised RuntimeErr"),
    "no graph": ({"reference": altered(Tensor.detach)}, f"{CANNOT}: no parameter that is trained went into the loss"),
    "a tuple": (
        {"loss_fn": lambda y, t: (y, t)},
        "cannot be differentiated: the loss is a tuple: expected a tensor of",
    ),
    "a float": ({"loss_fn": lambda y, t: 1.0}, "cannot be differentiated: the loss is a float: expected a tensor of"),
    "a vector": ({"loss_fn": lambda y, t: y[0]}, "cannot be differentiated: the loss has the shape [8]: expected one"),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_that_cannot_be_run_is_said_in_a_sentence(whitebox_here: WhiteBox, name: str) -> None:
    given, sentence = REFERENCES[name]
    verdict = judged(whitebox_here, own, **given)
    assert (verdict.outcome, verdict.exit_status, verdict.causes) == ("unknown", 3, ())
    assert sentence in verdict.details.splitlines()[0]
    assert "Traceback" not in verdict.details
    assert "Traceback" in verdict.traceback


def test_a_reference_with_nothing_to_train_is_refused(whitebox_here: WhiteBox) -> None:
    with pytest.raises(WhiteBoxError, match="has no parameter to train: nothing could be compared"):
        judged(whitebox_here, reference=lambda: build().requires_grad_(False))


# Steps that cannot travel, and what they hand back that cannot be read.


@pytest.mark.sweep
def test_a_step_that_cannot_travel_is_said(whitebox: WhiteBox) -> None:
    lock = threading.Lock()
    verdict = judged(whitebox, lambda model, microbatches: (lock, right(model, microbatches))[1])
    assert verdict.outcome == "unknown"
    golden(verdict.headline)


def test_a_loss_that_was_forgotten_is_said_with_the_cure(whitebox_here: WhiteBox) -> None:
    verdict = judged(whitebox_here, right, loss_fn=None)
    golden(verdict.headline)
    with pytest.raises(TypeError, match="unexpected keyword argument 'lossfn'"):
        whitebox_here.validate(right, reference=build, microbatches=[], ranks=1, lossfn=None)


def by_name(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def step(model: nn.Module, microbatches: list[Any]) -> Any:
        right(model, microbatches)
        return {name: change(p.grad) for name, p in model.named_parameters() if p.grad is not None}

    return step


def reporting(losses: Any, norm: Any = None) -> Callable[..., Any]:
    return lambda model, microbatches: StepResult(right(model, microbatches)[0], losses, norm)


def no_name(name: str) -> str:
    raise KeyError(name)


@pytest.mark.parametrize(
    ("step", "more", "words"),
    [
        (by_name(lambda g: g.to("meta")), {}, "the gradient of 0.weight cannot be read: it is on the meta device"),
        (reporting([torch.tensor(1j)] * 3), {}, "returned a list as losses: expected a number for each microbatch"),
        (reporting(None, torch.tensor(1j)), {}, "returned a Tensor as the gradient norm: expected a number"),
        (
            by_name(lambda g: g),
            {"names": no_name},
            "names= raised KeyError: '0.weight' (test_bad_input.py:",
        ),
        (
            by_name(lambda g: g),
            {"names": lambda name: 7},
            "names= gives a int for 0.weight: expected a name, or None",
        ),
    ],
    ids=["meta", "complex losses", "complex norm", "names raises", "names gives none"],
)
def test_what_cannot_be_read_is_said(whitebox_here: WhiteBox, step: Any, more: Any, words: str) -> None:
    verdict = judged(whitebox_here, step, contract=Contract(**more))
    assert verdict.outcome == "unknown"
    assert words in verdict.details.splitlines()[0]
    assert "Traceback" not in verdict.details


class Looked(nn.Module):
    """An embedding that gives the gradients of the rows that were used alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.out = nn.Embedding(WIDTH, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.rows(x.abs().argmax(-1)))


def test_sparse_gradients_are_compared(whitebox_here: WhiteBox) -> None:
    assert (judged(whitebox_here, reference=Looked).outcome, judged(whitebox_here, own, reference=Looked).outcome) == (
        "pass",
        "fail",
    )


class Grouped(nn.Module):
    """A model that cannot be copied: it holds a process group and a lock."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lock = build(), threading.Lock()
        self.group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class MakesItsOwn(nn.Module):
    """A model that cannot run in fp64: it makes a matrix of fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x @ torch.eye(x.shape[-1]))


def scaled(factor: float) -> Callable[..., Any]:
    def step(model: nn.Module, microbatches: list[Any]) -> Any:
        made = right(model, microbatches)
        for parameter in model.parameters():
            parameter.grad.mul_(factor)
        return made

    return step


@pytest.mark.parametrize(
    ("reference", "outcomes", "note"),
    [
        (Grouped, ["pass", "pass", "unknown", "fail"], ""),
        (
            MakesItsOwn,
            ["pass", "pass", "unknown", "fail"],
            "against fp64: there the reference raised RuntimeError: expected m1",
        ),
    ],
)
def test_a_reference_that_cannot_be_copied_or_run_in_fp64_is_judged(
    whitebox_here: WhiteBox, reference: Reference, outcomes: list[str], note: str
) -> None:
    verdicts = [judged(whitebox_here, scaled(factor), reference=reference) for factor in (1, 1 + 1e-6, 1 + 5e-5, 1.01)]
    assert [verdict.outcome for verdict in verdicts] == outcomes
    for verdict in verdicts[1:]:
        assert note in verdict.law("gradient").note
    assert verdicts[-1].causes[0].kind == "scale"


# Crashes of the judge and of the explanation.


def crash(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("a rule is wrong")


@pytest.mark.parametrize(
    "where", ["whitebox.evidence.explain_verdict", "explain.evidence.attribute", "whitebox.evidence.Traced"]
)
def test_a_verdict_never_depends_on_its_explanation(
    whitebox_here: WhiteBox, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = judged(whitebox_here, wrong)
    monkeypatch.setattr(f"pipeproof.{where}", crash)
    verdict = judged(whitebox_here, wrong)
    assert (verdict.outcome, verdict.exit_status, verdict.causes) == ("fail", 1, ())
    assert (verdict.laws, verdict.mismatches) == (plain.laws, plain.mismatches)
    golden(verdict.details, lines="^  cause")
    assert "in crash" in verdict.traceback


def test_an_interrupt_is_no_crash(whitebox_here: WhiteBox, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeproof.whitebox.evidence.explain_verdict", interrupt)
    with pytest.raises(KeyboardInterrupt):
        judged(whitebox_here, wrong)


@pytest.mark.parametrize(("step", "outcome"), [(right, "unknown"), (wrong, "fail")])
def test_what_failed_before_the_judge_crashed_has_failed(
    whitebox_here: WhiteBox, step: Any, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Comparison, "follow", crash)
    verdict = judged(whitebox_here, step)
    assert (verdict.outcome, verdict.tier) == (outcome, "none")
    assert verdict.law("gradient").outcome == ("pass" if outcome == "unknown" else "fail")
    golden(verdict.stopped)


def test_what_only_locates_a_fault_is_no_fault_where_the_judge_crashed(
    whitebox_here: WhiteBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = judged(whitebox_here, warmed_up)
    monkeypatch.setattr(Comparison, "follow", crash)
    stopped = judged(whitebox_here, warmed_up)
    assert (whole.outcome, stopped.outcome, stopped.mismatches) == ("pass", "unknown", ())
    golden("\n".join(one.law("initial-weights").note for one in (whole, stopped)))


def test_a_crash_of_ours_is_no_pass(whitebox_here: WhiteBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeproof.whitebox.validator.Assembled", crash)
    verdict = judged(whitebox_here, right)
    assert (verdict.outcome, verdict.laws) == ("unknown", ())
    golden(verdict.details.splitlines()[0])


@pytest.mark.sweep
@pytest.mark.parametrize(
    "where",
    ["explain.explain.follow_rules", "explain.explain.of_run", "own.validator.diagnose", "own.validator.observe"],
)
def test_a_case_of_ours_fails_without_its_explanation(
    world: World, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = SPECIMENS["stage-negated"]
    case = replace(Case.parse(planted.smallest), specimen=planted.name)
    observed = observe(case, world)
    plain = judge(case, observed)
    monkeypatch.setattr(f"pipeproof.{where}", crash)
    verdict = explain_case(case, world, observed, plain)
    assert (verdict.outcome, verdict.exit_status, verdict.causes) == ("fail", 1, ())
    assert (verdict.laws, verdict.mismatches) == (plain.laws, plain.mismatches)
    assert verdict.unsought.startswith("ZeroDivisionError: ")


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
def test_a_command_ends_as_its_verdict_does_without_an_explanation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    planted = SPECIMENS["stage-negated"]
    monkeypatch.setattr("pipeproof.explain.explain.of_run", crash)
    line = str(replace(Case.parse(planted.smallest), specimen=planted.name))
    assert main(["replay", line, "--json", str(tmp_path / "x")]) == 1
    out = capsys.readouterr()
    golden(out.out, lines="^  cause")
    assert "Traceback" not in out.out + out.err
    assert "in crash" in (tmp_path / "x").read_text()
