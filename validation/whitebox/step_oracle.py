"""Laws and right answers for custom runs."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from pipeproof.core.floors import Floors
from pipeproof.core.judge import scenarios
from pipeproof.core.limits import Precision
from pipeproof.core.nudged import Nudged, OtherProducts
from pipeproof.core.observe.observed import Observed
from pipeproof.core.oracle import Answer, Requirements, precision_of_reference
from pipeproof.core.reason import Reason
from pipeproof.core.updates import Orders, Pending
from pipeproof.pipeline.sizes import first_few
from pipeproof.reference.products import products_in, sorts_in
from pipeproof.reference.step import Expected, Gradient, Site
from pipeproof.whitebox.assemble import Assembled
from pipeproof.whitebox.operation_run import Course, OperationRun
from pipeproof.whitebox.task import Optimizing, Task

LAWS = (
    "parameters-once",  # ranks hold each reference parameter once, and no others
    "initial-weights",  # weights at the step's start
    "microbatches",  # each watched stage ran each microbatch forward and backward once
    "boundaries",  # tensors at watched stages' boundaries
    "loss",  # per microbatch, or the step's total, on each reporting rank
    "presence",  # a gradient is None exactly where the reference has None
    "gradient",  # per parameter
    "shards",  # a parameter's shards make up the whole
    "replicas",  # each replica has each stage, with equal gradients
    "tied-copies",  # gradients agree between all copies
    "grad-norm",  # on each reporting rank
)
NAMED = ("outputs",)  # named outputs, per microbatch
ROUTED = ("routing",)  # experts per token
UPDATED = ("updated-parameters",)  # after the optimizer
OF_SEVERAL = (
    "buffers",  # state written by forwards, such as running statistics
    "second-step",  # all laws in a later step: no stale state
    "accumulation",  # all laws when gradients come from two operations
    "eval",  # an evaluation: losses, unchanged state, and all laws in the next step
)


class StepOracle:
    """Knows each microbatch's contribution, and sums them in any requested order."""

    def __init__(self, task: Task, runs: Sequence[OperationRun]) -> None:
        self._task, self._runs = task, runs
        self._optimizer = None if task.optimizer is None else Optimizing(task.optimizer)
        self._pending: list[Pending] = []  # operations before the next update
        self._sums: Mapping[Site, Gradient] = {}
        self._floors: dict[int, Floors] = {}  # by update operation

    @property
    def precision(self) -> Precision:
        """The reference parameters' precision."""
        return precision_of_reference(self._runs[0].reference)

    def answer(self, number: int, orders: Orders) -> Answer:
        """Return expected results for operation ``number``."""
        one = self._runs[number]
        name, batches, reference = self._task.plan[number], one.run.batches, one.reference
        expected = reference.before_update(batches, one.made, orders=orders, onto=self._sums)
        expected = replace(expected, operation=name, buffers=one.like.buffers)
        if name == "eval":
            floors = Floors(reference, [Pending(expected, batches, orders)])  # as in training: gradients count too
            return Answer(replace(expected, gradients={}, norm=None), floors, math.inf)
        self._pending.append(Pending(expected, batches, orders, reference))
        if name == "accumulate":
            self._sums = reference.accumulate(one.made, orders=orders, onto=self._sums)
            return Answer(replace(expected, gradients={}, norm=None), Floors(reference, self._pending), math.inf)
        answer = self._update(one, expected)
        self._floors |= {} if answer.floors is None else {number: answer.floors}
        return answer

    def nudged(self, number: int) -> Nudged | None:
        """Measure movement under weights one rounding off in operation ``number``. None without an update."""
        return self._floors[number].moved if number in self._floors else None

    def products(self, number: int) -> OtherProducts | None:
        """Return products that a rank rounded otherwise than the reference in operation ``number``."""
        one = self._runs[number]
        own = products_in(next(one.run.model.parameters()).device, sorts_in(one.run.model))
        return OtherProducts.among(own, [made.products for made in one.found.made])

    def _update(self, one: OperationRun, expected: Expected) -> Answer:
        optimizer = self._optimizer
        updated = partial(self._task.update, one.reference, by=optimizer, max_norm=one.found.max_norm)

        def follow(gradients: Mapping[Site, Gradient]) -> tuple[float, Mapping[Site, Tensor]]:
            parameters = updated(gradients)
            if optimizer is not None:  # later floors start from this state
                self._optimizer = optimizer.next()
            return one.reference.norm(gradients), parameters

        known = None if optimizer is None else updated
        floors = Floors(one.reference, self._pending, updated=known)
        self._pending, self._sums = [], {}
        return Answer(expected, floors, math.inf, follow)


def laws_of(task: Task) -> tuple[str, ...]:
    """Return the laws for ``task``."""
    updates = UPDATED if task.optimizer is not None or task.contract.operations else ()
    named = NAMED if task.contract.outputs is not None else ()
    routed = ROUTED if task.routers else ()
    return (*LAWS, *named, *routed, *updates, *(OF_SEVERAL if task.contract.operations else ()))


def requirements_of(course: Course, observed: Observed) -> Requirements:
    """Return the requirements on ``observed`` results in ``course``."""
    task, runs = course.task, course.runs
    first, found = runs[0], runs[0].found
    unlike = next((one.found.unlike for one in runs if one.found.unlike), "")
    judged = replace(task, optimizer=None) if unlike else task
    if task.contract.operations and task.optimizer is None:
        unlike = unlike or "optimizer= makes the reference's, and was not given"
    every, plan = scenarios(task.plan), task.plan[: len(runs)]
    later = set[str]().union(*every[len(runs) :]) - set[str]().union(*every[: len(runs)])
    laws = laws_of(task)
    return Requirements(
        config=course.title,
        laws=laws,
        plan=plan,
        counts=tuple(len(one.made) for one in runs),
        expected=found.sites,
        oracle=StepOracle(judged, runs),
        tied=found.tied,
        skipped=dict(not_applicable(observed)),
        missed=dict(not_observed(found, observed, unlike, first.routing.reason)) | dict.fromkeys(later, course.halted),
        remarks=found.remarks
        | list_unreported(observed, first.made[0].outputs)
        | ({"routing": first.routing.reason} if first.routing.reason else {})
        | (dict.fromkeys({*UPDATED} & {*laws}, unlike) if unlike else {}),
        unmatched=found.unmatched,
        unseen=frozenset[int]().union(*(one.found.unseen for one in runs)),
        uncalled=found.uncalled,
        frozen=found.frozen,
        traced=frozenset[int]().union(*(one.found.traced for one in runs)),
        every_rank=False,
        results_decide=True,
        mode_matters=lambda: course.second.mode_matters([one.loss for one in first.made], first.run.batches),
    )


_UNROUTED = "no router of the step was observed to choose"
_BUFFERS = "no stage that has any was observed to run all microbatches in their order"


def not_applicable(observed: Observed) -> Sequence[tuple[str, str]]:
    """Return inapplicable laws with reasons."""
    claimed = _laws_of_claims(observed)
    laws = (("shards", "no parameter is in shards"), ("replicas", "no stage is held by several ranks"))
    return [(law, reason) for law, reason in laws if law not in claimed]


def not_observed(found: Assembled, observed: Observed, unlike: str, unrouted: str) -> Sequence[tuple[str, str]]:
    """Return unobserved laws with reasons.

    unlike, unrouted: why updates or experts are not compared, if known.
    """
    modules = any(local.content is not None for stage in found.stages for local in stage.part.locals)
    every, claimed = [one for row in observed.ranks for one in row], _laws_of_claims(observed)
    norm, buffers = any(one.norm is not None for one in every), any(one.buffers for one in every)
    ordered = len(found.unseen) < len(found.stages) or not found.stages
    named = "gradients were handed back, not watched modules" if found.nameless else ""
    unwatched = found.missed or named or "no stage was watched: call watch(module)"
    if axis := found.replicas.sequence:
        unwatched = f"ranks along {axis} have parts of every sequence, so boundary tensors are not compared"
    unseen = "gradients were handed back, not modules" if found.nameless else "no weight was observed before the step"
    return [
        (law, reason)
        for law, reported, reason in (
            ("initial-weights", modules or not found.stages, unseen),
            ("microbatches", ordered, unwatched),
            ("boundaries", found.watched, unwatched),
            ("grad-norm", norm, "no rank reports a norm"),
            ("outputs", any(one.outputs for one in every), "no rank hands any back"),
            ("routing", any(one.routes for one in every), unrouted or _UNROUTED),
            ("updated-parameters", not unlike or "updated-parameters" in claimed, Reason.OPTIMIZER.doubt(unlike)),
            ("buffers", buffers, f"{_BUFFERS}; {unwatched}" if not found.watched else _BUFFERS),
        )
        if not reported
    ]


def _laws_of_claims(observed: Observed) -> set[str]:
    return {claim.law for row in observed.ranks for one in row for claim in one.claims}


def list_unreported(observed: Observed, outputs: Collection[str]) -> dict[str, str]:
    """Return missing reports by law; ``outputs``: names the step could return."""
    reported = any(one.losses or one.loss is not None for row in observed.ranks for one in row)
    why = Reason.UNREPORTED.doubt("no rank reports a loss: hand losses back beside the modules")
    found: dict[str, str] = {} if reported else {"loss": why}
    named = {name for row in observed.ranks for one in row for name in one.outputs}
    if named and (left := [name for name in outputs if name not in named]):
        found["outputs"] = f"no rank hands back {first_few(left)}"
    return found
