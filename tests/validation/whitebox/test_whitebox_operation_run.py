"""Runs of several operations that are not ours: right ones pass, and what goes wrong between operations is caught."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import StepResult, watch
from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support import steps
from tests.support.golden import golden
from tests.support.steps import WIDTH, loss_fn, pairs
from tests.support.sweeps import sampled
from tests.support.two_ranks import one_by_one

BOUND = 0.05
STEPS = ["train", "train", "eval", "accumulate", "train", "eval"]
MICROBATCHES = 3


def build() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(4)))


sgd = partial(steps.sgd, momentum=0.9)


class Run:
    """Training on two ranks, microbatch by microbatch; ``fault`` is asked at each ``moment`` what it does in its place.

    The moments: ``begin``, and of each operation ``before``, ``after``, ``update``, ``made``, ``clear`` and ``end``.
    """

    def __init__(self, model: nn.Sequential, fault: "Moments") -> None:
        self.rank, self.fault, self.number, self.operation = dist.get_rank(), fault, 0, ""
        self.stage: Any = watch(model[2 * self.rank :][:2])
        self.used, self.optimizer, self.microbatches = self.stage, sgd(self.stage), list[Any]()
        self.kept: Any = None  # by a fault
        self.losses: list[float] = []
        self.at("begin")

    def at(self, moment: str) -> Any:
        return self.fault(self, moment)

    def through(self, operations: Iterator[tuple[str, list[Any]]]) -> Iterator[Any]:
        for self.number, (self.operation, self.microbatches) in enumerate(operations):
            self.stage.train(self.operation != "eval")
            self.at("before")
            backward = self.operation != "eval" or self.fault is evaluation_trains
            self.losses = one_by_one(self.used, self.microbatches, backward=backward)
            self.at("after")
            if self.operation == "train":
                self.at("update")
                self.optimizer.step()
            yield self.at("made") or (self.stage, self.losses)
            if self.operation == "train" and not self.at("clear"):
                self.optimizer.zero_grad()
            self.at("end")


Moments = Callable[[Run, str], Any]


def right(run: Run, moment: str) -> None:
    """Nothing is done otherwise."""


def judged(whitebox: WhiteBox, fault: Moments, **more: Any) -> Verdict:
    steps = more.pop("steps", STEPS)
    wanted = {"reference": build, "ranks": 2, "loss_fn": loss_fn, "optimizer": sgd} | more
    wanted["contract"] = Contract(operations=steps)
    step = lambda model, operations: Run(model, fault).through(operations)  # noqa: E731
    return whitebox.validate(step, microbatches=pairs(MICROBATCHES * len(steps)), **wanted)


def evaluates_unseen(run: Run, moment: str) -> None:
    """Evaluation calls no stage as a module, so that nobody sees it."""
    if run.operation == "eval" and moment in ("before", "after"):
        run.used = run.stage.forward if moment == "before" else run.stage


def runs_on_a_copy(run: Run, moment: str) -> None:
    """The last rank's forwards run on a copy, which no update reaches."""
    if moment == "begin" and run.rank:
        run.used = watch(copy.deepcopy(run.stage))
    if moment == "after" and run.rank and run.operation != "eval":
        for own, other in zip(run.stage.parameters(), run.used.parameters(), strict=True):
            own.grad, other.grad = other.grad, None
        for own, other in zip(run.stage.buffers(), run.used.buffers(), strict=True):
            own.copy_(other)


def clears_between(run: Run, moment: str) -> None:
    """Gradients are cleared before every operation, so that an update lacks what was accumulated."""
    if moment == "before" and run.operation != "eval" and run.rank:
        run.optimizer.zero_grad()


def evaluates_in_training(run: Run, moment: str) -> None:
    if moment == "before" and run.operation == "eval" and run.rank:
        run.stage.train()


def evaluation_trains(run: Run, moment: str) -> None:
    """An evaluation runs backwards, too."""


def evaluation_updates(run: Run, moment: str) -> None:
    if moment == "after" and run.operation == "eval" and run.rank:
        with torch.no_grad():
            next(run.stage.parameters()).mul_(1.01)


def accumulation_updates(run: Run, moment: str) -> None:
    if moment == "after" and run.number == 3 and run.rank:
        run.optimizer.step()


def keeps_its_data(run: Run, moment: str) -> None:
    """The first rank feeds the microbatches that it was given first."""
    if moment == "before" and run.operation != "eval":
        run.kept = run.kept or run.microbatches
        run.microbatches = run.microbatches if run.rank else run.kept


def clips(run: Run, moment: str) -> Any:
    """Gradients are clipped to a bound by their norm on all ranks."""
    if moment == "update":
        run.kept = {one: None if one.grad is None else one.grad.clone() for one in run.stage.parameters()}
        size = torch.stack([one.square().sum() for one in run.kept.values() if one is not None]).double().sum()
        dist.all_reduce(size)
        nn.utils.clip_grads_with_norm_(run.stage.parameters(), BOUND, size.sqrt())
    return StepResult(run.stage, run.losses, gradients=run.kept, max_norm=BOUND) if moment == "made" else None


def loses_the_last(run: Run, moment: str, *, lossy: int = 0) -> None:
    """The last rank does not keep what the last microbatch gives in the operation that is ``lossy``."""
    if run.rank != 1 or run.number != lossy:
        return
    if moment == "before":
        left = dict.fromkeys(run.stage.parameters(), len(run.microbatches))
        kept: dict[nn.Parameter, Tensor | None] = {}

        def added(one: nn.Parameter) -> None:
            left[one] -= 1
            kept.update({one: one.grad.clone()} if left[one] == 1 and one.grad is not None else {})

        run.kept = kept, [one.register_post_accumulate_grad_hook(added) for one in left]
    if moment == "after":
        kept, hooks = run.kept
        for hook, one in zip(hooks, run.stage.parameters(), strict=True):
            hook.remove()
            one.grad = kept[one]


def loses_the_last_of_an_accumulation(run: Run, moment: str) -> None:
    loses_the_last(run, moment, lossy=3)


def changes_between(run: Run, moment: str) -> None:
    """The first rank's weights are changed after an accumulation was handed back."""
    for one in run.stage.parameters() if (moment, run.rank, run.number) == ("end", 0, 0) else ():
        one.data.mul_(1.01)


def divides_an_accumulation(run: Run, moment: str) -> None:
    """An accumulation divides each loss twice as much as it should."""
    for one in run.stage.parameters() if (moment, run.number) == ("after", 3) else ():
        one.grad = None if one.grad is None else one.grad / 2


# A right run, its operations if they are others, and a law whose note is golden.
RIGHT: dict[str, tuple[Moments, list[str], str]] = {
    "all": (right, STEPS, ""),
    "an evaluation that is not observed": (evaluates_unseen, ["train", "eval", "train"], "microbatches"),
    "clipped by the norm of all": (clips, ["train", "train"], ""),
    "an evaluation first": (right, ["eval", "train"], ""),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_run_passes(whitebox: WhiteBox, name: str) -> None:
    kind, steps, law = RIGHT[name]
    verdict = judged(whitebox, kind, steps=steps)
    assert verdict.outcome == "pass", verdict
    if name == "all":
        assert verdict.tier == "bitwise"
        laws = ("second-step", "accumulation", "eval", "buffers", "updated-parameters", "microbatches", "boundaries")
        assert {verdict.law(each).outcome for each in laws} == {"pass"}, verdict
    if law:
        golden(verdict.law(law).note)


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a run: the law about its operation, all that are broken, where, and the kind of its cause.

    at: the operation, what it does, rank and stage. told: its text is golden.
    """

    kind: Moments
    law: str
    broken: set[str]
    at: tuple[int, str, int, int | None]
    cause: str
    steps: list[str] = field(default_factory=lambda: STEPS)
    told: bool = False


FAULTS = [
    Fault(runs_on_a_copy, "second-step", {"loss", "gradient"}, (2, "train", 1, 1), "stale-tensor"),
    Fault(clears_between, "accumulation", {"gradient"}, (5, "train", 1, 1), "dropped"),
    Fault(evaluation_trains, "eval", {"presence"}, (3, "eval", 0, 0), "unexpected"),
    Fault(evaluation_updates, "eval", {"updated-parameters"}, (3, "eval", 1, 1), "update"),
    Fault(accumulation_updates, "accumulation", {"updated-parameters"}, (4, "accumulate", 1, 1), "update"),
    Fault(keeps_its_data, "second-step", {"loss", "buffers", "gradient"}, (2, "train", 0, 0), "stale-tensor"),
]
EVAL_FIRST, TWO = ["eval", "train"], ["accumulate", "train"]
# In every change, beside those that are sampled.
ALWAYS = [
    Fault(evaluates_in_training, "eval", {"microbatches", "loss", "buffers"}, (1, "eval", 1, 1), "mode", EVAL_FIRST),
    Fault(loses_the_last, "gradient", {"gradient"}, (1, "train", 1, 1), "dropped"),
    Fault(loses_the_last_of_an_accumulation, "accumulation", {"gradient"}, (5, "train", 1, 1), "dropped"),
    Fault(changes_between, "accumulation", {"initial-weights"}, (2, "train", 0, 0), "altered", TWO, told=True),
    Fault(divides_an_accumulation, "accumulation", {"gradient"}, (5, "train", 1, 1), "scale", told=True),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", [*sampled(FAULTS, 2), *ALWAYS], ids=lambda fault: fault.kind.__name__)
def test_what_goes_wrong_is_named_and_placed(whitebox: WhiteBox, fault: Fault) -> None:
    verdict = judged(whitebox, fault.kind, steps=fault.steps)
    first = verdict.mismatches[0]
    assert verdict.outcome == "fail"
    assert verdict.law(fault.law).outcome == "fail"
    assert {one.law for one in verdict.mismatches} == fault.broken, verdict
    assert (first.operation, first.doing, first.rank, first.stage) == fault.at, verdict
    (cause,) = verdict.causes
    assert cause.kind == fault.cause, verdict
    assert ("operation {}, {}".format(*fault.at) in verdict.details) == (first.operation > 1 or first.doing == "eval")
    if fault.kind in (loses_the_last, loses_the_last_of_an_accumulation):
        assert (cause.rank, cause.microbatches) == (1, (MICROBATCHES - 1,))
        assert not any("zero_grad" in one.line.text for one in cause.lines), "it is cleared once it was used"
        assert cause.earlier == (fault.kind is loses_the_last_of_an_accumulation)
    if fault.kind is changes_between:
        assert (cause.rank, cause.stage) == (0, 0)
    if fault.kind is divides_an_accumulation:
        assert (cause.factor, cause.earlier) == (0.5, 1)
    if fault.told:
        golden(cause.detail)
