"""What a contract may say, and the sentence where it may not."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

from pipeproof import Contract, StepResult, watch
from pipeproof.core.verdict import Verdict
from pipeproof.errors import ContractError
from pipeproof.reference.accumulation import Accumulation
from pipeproof.whitebox import WhiteBox
from tests.support.pipeline_here import Job, checked, layers
from tests.support.steps import backward, blocks, loss_fn, pairs, sgd


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"loss_divisor": 0.0}, "loss_divisor is 0.0: expected a number above 0"),
        ({"loss_divisor": float("nan")}, "loss_divisor is nan: expected a number above 0"),
        ({"loss_scale": -2}, "loss_scale is -2: expected a number above 0"),
        ({"loss_scale": True}, "loss_scale is True: expected a number above 0"),
        ({"max_norm": "1"}, "max_norm is '1': expected a number above 0"),
        ({"accumulation": torch.float32}, "accumulation is torch.float32: expected an Accumulation"),
        ({"operations": "train"}, "operations is 'train': expected a list"),
        ({"operations": 2}, "operations is 2: expected a list"),
        ({"operations": ["train", "test"]}, "operations has 'test' in it: expected some of 'train', 'accumulate'"),
        ({"operations": ["eval"]}, "operations is \\['eval'\\]: expected at least one 'train'"),
        ({"operations": ["train", "accumulate"]}, "expected 'train' after each 'accumulate'"),
        ({"operations": [("train", 0)]}, "operations has 0 microbatches for 'train': expected a number from 1"),
        ({"operations": [("train",)]}, "operations has \\('train',\\) in it"),
        ({"operations": [("train", 2), "eval"]}, "expected how many microbatches each of them has, or none"),
        ({"outputs": ["logits"]}, "outputs is \\['logits'\\]: expected a function of output and target"),
        ({"routers": 3}, "routers is 3: expected the name of the modules that choose experts"),
        ({"routers": ["a", ""]}, "routers is \\['a', ''\\]"),
        ({"warmup": -1}, "warmup is -1: expected how many first calls are no microbatch's, from 0"),
        ({"warmup": 1.0}, "warmup is 1.0"),
        ({"ties": ["a"]}, "ties is \\['a'\\]: expected lists of names"),
        ({"ties": [["a", 1]]}, "ties is \\[\\['a', 1\\]\\]"),
        ({"stages": 2}, "stages is 2: expected the numbers of each rank's stages, all from 0"),
        ({"stages": [[0, 3], [1]]}, "stages is \\[\\[0, 3\\], \\[1\\]\\]"),
        ({"stages": [[0, 0]]}, "stages is \\[\\[0, 0\\]\\]"),
        ({"stages": [["0"]]}, "stages is \\[\\['0'\\]\\]"),
        ({"names": 3}, "names is 3: expected prefixes and what replaces them, or a function of a name"),
        ({"names": {"a": 1}}, "names is {'a': 1}"),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_is_said(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ContractError, match=sentence):
        Contract(**said)


def test_every_word_has_a_value_that_is_taken() -> None:
    said = Contract(
        loss_divisor=3,
        loss_scale=1024.0,
        accumulation=Accumulation(torch.float32),
        max_norm=float("inf"),
        operations=[["train", 3], ("eval", 1)],  # type: ignore[list-item]
        outputs=dict,
        routers="gate",
        names={"a": "b"},
        warmup=2,
        stages=[[0, 1], [1, 0], []],
    )
    assert said.stages == ((0, 1), (1, 0), ()), "a stage may be of several ranks"
    assert (said.operations, said.routers) == ((("train", 3), ("eval", 1)), ("gate",))
    assert Contract(names=str.upper).plan == ("train",)
    assert isinstance(ContractError(), ValueError)


@pytest.mark.parametrize(
    ("operations", "count", "parts"),
    [
        ((), 3, [[0, 1, 2]]),
        (["train", "eval"], 4, [[0, 1], [2, 3]]),
        ([("train", 1), ("accumulate", 3), ("train", 2)], 6, [[0], [1, 2, 3], [4, 5]]),
    ],
)
def test_microbatches_are_dealt_in_order(operations: Any, count: int, parts: list[list[int]]) -> None:
    assert [[*part] for part in Contract(operations=operations).parts(count)] == parts


@pytest.mark.parametrize(
    ("operations", "sentence"),
    [
        (["train", "eval"], "3 microbatches for 2 operations: expected a multiple"),
        ([("train", 1), ("eval", 3)], "operations want 1 \\+ 3 microbatches, and there are 3"),
    ],
)
def test_microbatches_that_cannot_be_dealt_are_refused(operations: Any, sentence: str) -> None:
    with pytest.raises(ContractError, match=sentence):
        Contract(operations=operations).parts(3)


def test_a_word_that_nothing_reads_is_refused() -> None:
    Contract(loss_divisor=2).reads(("loss_divisor",), "here")
    with pytest.raises(ContractError, match="max_norm of the contract is not read here: say it there"):
        Contract(loss_divisor=2, max_norm=1.0).reads(("loss_divisor",), "here", "say it there")


# What words do to a verdict: a step that does what its contract says passes, and one that does not is told so.

SCALE, BOUND = 1024.0, 0.05


@dataclass(frozen=True)
class Step:
    """One step of a watched model on one rank: losses are scaled by ``times``, sums divided by ``by``, then clipped."""

    times: float = 1.0
    by: float = 1.0
    clips: float | None = None
    handed: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, model: nn.Module, microbatches: list[Any]) -> StepResult:
        optimizer, losses = sgd(model), backward(watch(model), microbatches, divisor=1 / self.times)
        for one in model.parameters():
            assert one.grad is not None, "all are trained"
            one.grad /= self.by
        gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        if self.clips is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.clips)
        optimizer.step()
        return StepResult(model, losses, gradients=gradients, **self.handed)


def judged(whitebox: WhiteBox, step: Step, **said: Any) -> Verdict:
    given = {"reference": blocks, "microbatches": pairs(4), "ranks": 1, "loss_fn": loss_fn, "optimizer": sgd}
    return whitebox.validate(step, contract=Contract(**said), **given)


LATE = Accumulation(late=True)
UNSCALED = Step(times=SCALE / 4, by=SCALE)
CLIPPED = Step(times=0.25, clips=BOUND)
STEPS: dict[str, tuple[Step, dict[str, Any], dict[str, str]]] = {  # the law that is broken, and the kind of cause
    "loss_divisor": (Step(times=0.5), {"loss_divisor": 2}, {}),
    "loss_scale": (UNSCALED, {"loss_scale": SCALE}, {}),
    "loss_scale, handed back, too": (replace(UNSCALED, handed={"loss_scale": SCALE}), {"loss_scale": SCALE}, {}),
    "accumulation": (Step(by=4.0), {"accumulation": LATE}, {}),
    "max_norm": (CLIPPED, {"max_norm": BOUND}, {}),
    "max_norm, handed back alone": (replace(CLIPPED, handed={"max_norm": BOUND}), {}, {}),
    "no divisor": (Step(), {}, {"gradient": "scale"}),
    "another divisor": (Step(times=0.25), {"loss_divisor": 2}, {"gradient": "scale"}),
    "not unscaled": (Step(times=SCALE / 4), {"loss_scale": SCALE}, {"gradient": "scale"}),
    "clipped, and none was said": (CLIPPED, {}, {"updated-parameters": "update"}),
    "not clipped": (Step(times=0.25), {"max_norm": BOUND}, {"updated-parameters": "clip"}),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_passes_if_it_does_what_it_claims(whitebox_here: WhiteBox, name: str) -> None:
    step, said, wrong = STEPS[name]
    verdict = judged(whitebox_here, step, **said)
    assert verdict.outcome == ("fail" if wrong else "pass"), verdict
    assert wrong or verdict.law("gradient").exact == 8, "bit for bit"
    assert [verdict.law(law).outcome for law in wrong] == ["fail"] * len(wrong), verdict
    assert [cause.kind for cause in verdict.causes] == [*wrong.values()], verdict


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("said", "handed"),
    [
        ({"loss_scale": SCALE}, {"loss_scale": 2.0}),
        ({"max_norm": BOUND}, {"max_norm": 1.0}),
        ({"accumulation": LATE}, {"accumulation": Accumulation(torch.float64)}),
    ],
)
def test_what_is_handed_back_may_not_contradict_the_contract(
    whitebox: WhiteBox, said: dict[str, Any], handed: dict[str, Any]
) -> None:
    verdict, (word,) = judged(whitebox, Step(times=0.25, handed=handed), **said), said
    assert verdict.outcome == "unknown"
    assert f"handed back {word}=" in verdict.headline
    assert f"declare {word}=" in verdict.headline


@dataclass
class Warm(Job):
    """Runs its first microbatches first, and clears what that gave."""

    first: int = 0

    def step(self) -> list[float]:
        for m in range(self.first):
            self._train(m, *self.data[m])
        for stage in self.stages:
            stage.zero_grad()
        return super().step()


@pytest.mark.parametrize(
    ("first", "warmup", "kinds"),
    [(1, 1, []), (2, 2, []), (1, 0, ["doubled"]), (2, 1, ["doubled"]), (1, 2, ["dropped"])],
)
def test_first_calls_that_are_no_microbatchs_have_to_be_said_in_a_composed_check(
    first: int, warmup: int, kinds: list[str]
) -> None:
    verdict = checked(Warm(layers(torch.tanh, torch.tanh), first=first), contract=Contract(warmup=warmup))
    assert (verdict.outcome == "pass") == (not kinds), verdict
    assert [cause.kind for cause in verdict.causes] == kinds, verdict


def warmed(model: nn.Module, microbatches: list[Any]) -> StepResult:
    """A step whose model is called once before it."""
    stage = watch(model)
    backward(stage, microbatches[:1])
    model.zero_grad()
    return StepResult(model, backward(stage, microbatches))


@pytest.mark.parametrize(
    ("warmup", "note"), [(1, ""), (0, "1 call of stage 0 beside those"), (2, "and every result is right: first rank 0")]
)
def test_beside_a_whole_reference_they_are_told_as_a_remark(whitebox_here: WhiteBox, warmup: int, note: str) -> None:
    given = {"reference": blocks, "microbatches": pairs(4), "ranks": 1, "loss_fn": loss_fn}
    verdict = whitebox_here.validate(warmed, contract=Contract(warmup=warmup), **given)
    assert verdict.outcome == "pass", verdict
    assert note in (law := verdict.law("microbatches")).note
    assert bool(law.note) == bool(note)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"names": {"a": "b"}}, "names of the contract is not read by check_step: give rename=, from stage and name"),
        ({"stages": [[0]]}, "stages of the contract is not read by check_step: its modules are given by their numbers"),
    ],
)
def test_a_check_of_a_job_says_which_words_it_does_not_read(said: dict[str, Any], sentence: str) -> None:
    verdict = checked(Job(layers(torch.tanh)), contract=Contract(**said))
    assert (verdict.outcome, sentence in verdict.details) == ("unknown", True), verdict


def test_words_may_be_said_beside_the_contract() -> None:
    assert Contract(warmup=1).with_words({"loss_divisor": 8, "steps": ["train", "eval"], "names": None}) == Contract(
        loss_divisor=8, operations=["train", "eval"], warmup=1
    )
    with pytest.raises(ContractError, match="loss_divisor is 0"):
        Contract().with_words({"loss_divisor": 0})
    with pytest.raises(TypeError, match="divisor"):
        Contract().with_words({"divisor": 8})
