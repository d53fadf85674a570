"""Laws and right answers for custom runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from pipeproof.core.floors import Floors
from pipeproof.core.judge import scenarios
from pipeproof.core.limits import Precision, precision_among
from pipeproof.core.nudged import Nudged, OtherProducts
from pipeproof.core.observe.observed import Observed, RankOperation
from pipeproof.core.oracle import Answer, Requirements
from pipeproof.core.reason import Reason
from pipeproof.core.updates import Orders, Pending
from pipeproof.pipeline.sizes import first_few
from pipeproof.reference.products import products_in, sorts_in
from pipeproof.reference.step import Gradient, Site
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
        return precision_among(self._runs[0].reference.model.parameters())

    def answer(self, number: int, orders: Orders) -> Answer:
        """Return expected results for operation ``number``."""
        one = self._runs[number]
        name, batches, reference = one.found.name, one.run.batches, one.reference
        expected = reference.before_update(batches, one.made, orders=orders, onto=self._sums)
        expected = replace(expected, operation=name, buffers=one.like.buffers)
        if name == "eval":
            floors = Floors(reference, [Pending(expected, batches, orders)])  # as in training: gradients count too
            return Answer(replace(expected, gradients={}, norm=None), floors, math.inf)
        self._pending.append(Pending(expected, batches, orders, reference))
        if name == "accumulate":
            self._sums = reference.accumulate(one.made, orders=orders, onto=self._sums)
            return Answer(replace(expected, gradients={}, norm=None), Floors(reference, self._pending), math.inf)
        optimizer, pending = self._optimizer, self._pending
        updated = partial(self._task.update, reference, by=optimizer, max_norm=one.found.max_norm)

        def follow(gradients: Mapping[Site, Gradient]) -> tuple[float, Mapping[Site, Tensor]]:
            parameters = updated(gradients)
            if optimizer is not None:  # later floors start from this state
                self._optimizer = optimizer.next()
            return reference.norm(gradients), parameters

        floors = Floors(reference, pending, updated=None if optimizer is None else updated)
        self._pending, self._sums, self._floors[number] = [], {}, floors
        return Answer(expected, floors, math.inf, follow)

    def nudged(self, number: int) -> Nudged | None:
        """Measure movement under weights one rounding off in operation ``number``. None without an update."""
        return self._floors[number].moved if number in self._floors else None

    def products(self, number: int) -> OtherProducts | None:
        """Return products that a rank rounded otherwise than the reference in operation ``number``."""
        one = self._runs[number]
        own = products_in(next(one.run.model.parameters()).device, sorts_in(one.run.model))
        return OtherProducts.among(own, [made.products for made in one.found.made])


def requirements_of(course: Course, observed: Observed) -> Requirements:
    """Return the requirements on ``observed`` results in ``course``."""
    task, runs, contract = course.task, course.runs, course.task.contract
    first, found = runs[0], runs[0].found
    unlike = next((one.found.unlike for one in runs if one.found.unlike), "")
    judged = replace(task, optimizer=None) if unlike else task
    if contract.operations and task.optimizer is None:
        unlike = unlike or "optimizer= makes the reference's, and was not given"
    every, plan = scenarios(contract.plan), contract.plan[: len(runs)]
    later = set[str]().union(*every[len(runs) :]) - set[str]().union(*every[: len(runs)])
    laws = (
        *LAWS,
        *(NAMED if contract.outputs is not None else ()),
        *(ROUTED if task.routers else ()),
        *(UPDATED if task.optimizer is not None or contract.operations else ()),
        *(OF_SEVERAL if contract.operations else ()),
    )
    remarks = found.remarks | ({"routing": first.routing.reason} if first.routing.reason else {})
    remarks |= dict.fromkeys({*UPDATED} & {*laws}, unlike) if unlike else {}
    reports = [one for row in observed.ranks for one in row]
    if not any(one.losses or one.loss is not None for one in reports):
        remarks["loss"] = Reason.UNREPORTED.doubt("no rank reports a loss: hand losses back beside the modules")
    named = {name for one in reports for name in one.outputs}
    if named and (left := [name for name in first.made[0].outputs if name not in named]):
        remarks["outputs"] = f"no rank hands back {first_few(left)}"
    claimed = {claim.law for one in reports for claim in one.claims}
    apart = {"shards": "no parameter is in shards", "replicas": "no stage is held by several ranks"}
    missed = {law: why for law, (there, why) in _reports(found, reports, unlike, first).items() if not there}
    if "updated-parameters" in claimed:
        missed.pop("updated-parameters", None)
    return Requirements(
        config=course.title,
        laws=laws,
        plan=plan,
        counts=tuple(len(one.made) for one in runs),
        expected=found.sites,
        oracle=StepOracle(judged, runs),
        tied=found.tied,
        skipped={law: why for law, why in apart.items() if law not in claimed},
        missed=missed | dict.fromkeys(later, course.halted),
        remarks=remarks,
        unmatched=found.unmatched,
        unseen=frozenset[int]().union(*(one.found.unseen for one in runs)),
        uncalled=frozenset(one.index for one in found.stages if one.part.calls is None),
        frozen=found.frozen,
        traced=frozenset[int]().union(*(one.found.traced for one in runs)),
        foreign=True,
        mode_matters=lambda: course.second.mode_matters([one.loss for one in first.made], first.run.batches),
    )


def _reports(
    found: Assembled, reports: Sequence[RankOperation], unlike: str, first: OperationRun
) -> Mapping[str, tuple[bool, str]]:
    """Return, by law, whether ranks reported what it needs, and otherwise why not.

    unlike: why updates are not compared, if known.
    """
    modules = any(local.content is not None for stage in found.stages for local in stage.part.locals)
    nameless = any(one.part.locals for one in found.stages) and all(one.part.nameless for one in found.stages)
    named = "gradients were handed back, not watched modules" if nameless else ""
    unwatched = found.missed or named or "no stage was watched: call watch(module)"
    if axis := found.replicas.sequence:
        unwatched = f"ranks along {axis} have parts of every sequence, so boundary tensors are not compared"
    unseen = "gradients were handed back, not modules" if nameless else "no weight was observed before the step"
    unbuffered = "no stage that has any was observed to run all microbatches in their order"
    unrouted = first.routing.reason or "no router of the step was observed to choose"
    return {
        "initial-weights": (modules or not found.stages, unseen),
        "microbatches": (len(found.unseen) < len(found.stages) or not found.stages, unwatched),
        "boundaries": (found.watched, unwatched),
        "grad-norm": (any(one.norm is not None for one in reports), "no rank reports a norm"),
        "outputs": (any(one.outputs for one in reports), "no rank hands any back"),
        "routing": (any(one.routes for one in reports), unrouted),
        "updated-parameters": (not unlike, Reason.OPTIMIZER.doubt(unlike)),
        "buffers": (
            any(one.buffers for one in reports),
            unbuffered if found.watched else f"{unbuffered}; {unwatched}",
        ),
    }
