"""What a specimen is: a fault planted on purpose, by composition, with the cause that a diagnosis should name."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pipeline.action import Kind
from pipeline.lower import Program
from pipeline.step import Parts
from reference.data import Batch
from reference.model import build_model
from validation.cases.case import Case
from validation.cases.stages import owners
from validation.judging.cause import Cause
from validation.observers.wrappers import Steps

Plant = Callable[[Parts], Parts]
Feed = Callable[[Sequence[Batch], Parts], Sequence[Batch]]
Drive = Callable[[Steps], Steps]
Reorder = Callable[[Program], Program]
StageAt = Callable[[int], int]  # the stage concerned, from the number of stages

# The classes into which faults reported in public fall, for two families of projects: t for PyTorch's (and PiPPy,
# torchtitan, fairscale, picotron), m for Megatron's (and DeepSpeed, zero-bubble, ColossalAI).
CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "tA": "scale of gradients, normalisation of the loss",
        "tB": "gradients lost, duplicated or stale",
        "tC": "backward in two halves",
        "tD": "gradient synchronisation of replicas",
        "tE": "tied parameters and buffers across stages",
        "tF": "norm and clipping",
        "tG": "cutting into microbatches, interface of stages",
        "tH": "autograd, modes, random numbers",
        "tI": "communication: order, deadlock, races",
        "tJ": "initial weights, reports",
        "mA": "scale of losses and gradients",
        "mB": "when gradients are synchronised and finished",
        "mC": "tied and replicated parameters",
        "mD": "norm, clipping, update",
        "mE": "life of buffers, aliasing, races",
        "mF": "what two ends of a message agree on",
        "mG": "making schedules, edge cases",
        "mH": "weight gradients put off",
        "mI": "collectives across stages",
        "mJ": "routing of data",
        "mK": "which stage has which layers",
        "mL": "state from one step to the next",
    }
)


def unchanged_parts(parts: Parts) -> Parts:
    """Plants nothing."""
    return parts


def unchanged_data(batches: Sequence[Batch], parts: Parts) -> Sequence[Batch]:
    """Feeds what the case says."""
    return batches


def unchanged_steps(steps: Steps) -> Steps:
    """Takes steps as they are."""
    return steps


def unchanged_order(program: Program) -> Program:
    """Runs the program as it is."""
    return program


def nothing_more(case: Case) -> str:
    """Every case will do."""
    return ""


@dataclass(frozen=True)
class Fault:
    """The cause to be named: its kind, and where it is, from the case.

    ``alike`` are kinds that final gradients alone may tell no better. ``parameter`` is a pattern: the first parameter
    of the stage that it is found in. What is left out is not asked for.
    """

    kind: str
    stage: StageAt | None = None
    microbatches: tuple[int, ...] | Callable[[Case], tuple[int, ...]] = ()
    parameter: str = ""
    factor: Callable[[Case], float] | None = None
    alike: tuple[str, ...] = ()

    def cause(self, case: Case) -> Cause:
        """The cause in ``case``."""
        stage = None if self.stage is None else self.stage(case.stages)
        return Cause(
            self.kind,
            rank=None if stage is None else case.built.placement[stage],
            stage=stage,
            microbatches=self.microbatches(case) if callable(self.microbatches) else self.microbatches,
            parameter=self._parameter(case, stage) if self.parameter and stage is not None else None,
            factor=None if self.factor is None else self.factor(case),
        )

    def _parameter(self, case: Case, stage: int) -> str:
        model = build_model(case.model, layers=case.layers, seed=case.seed, dtype=case.dtype)
        names = (name for name, owner in owners(model, case.split).items() if owner == stage)
        return next(name for name in names if re.search(self.parameter, name))


@dataclass(frozen=True)
class Needs:
    """What a case must have to show a fault. ``models`` are those that can; empty for all. ``plan`` must occur in the
    case's in this order. ``layers``: on each stage. ``split``: the kinds of backward that the middle stage needs some
    of. ``also``: why a case will not do for any other reason, or nothing."""

    microbatches: int = 1
    ranks: int = 1
    stages: int = 1
    layers: int = 1
    models: tuple[str, ...] = ()
    plan: tuple[str, ...] = ("train",)
    loss: str = ""
    ragged: bool = False
    unequal: bool = False
    split: bool = False
    also: Callable[[Case], str] = nothing_more

    def missing(self, case: Case) -> str:
        """Why ``case`` cannot show the fault; empty if it can."""
        least = (
            ("microbatches", case.microbatches, self.microbatches),
            ("ranks", case.ranks, self.ranks),
            ("stages", case.stages, self.stages),
            ("layers a stage", min(case.split), self.layers),
        )
        for what, has, needed in least:
            if has < needed:
                return f"needs {needed} {what}"
        if self.models and case.model not in self.models:
            return f"needs a model out of {', '.join(self.models)}"
        if not _within(self.plan, case.plan):
            return f"needs a plan with {'+'.join(self.plan)}"
        if self.loss and case.loss != self.loss:
            return f"needs loss={self.loss}"
        for what in ("ragged", "unequal"):
            if getattr(self, what) and not getattr(case, what):
                return f"needs {what}"
        if self.split and not halved(case, case.stages // 2):
            return "needs a backward in two halves on the middle stage"
        return self.also(case)


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A change to a step, where it comes from, and the smallest case that shows what it does.

    ``plant`` changes the parts of a rank's step; ``feed`` the microbatches that this rank is given; ``drive`` how steps
    are taken; ``reorder`` the program. ``timeout_s`` bounds the waits of ranks that can never end.
    """

    name: str
    summary: str
    origin: str
    smallest: str
    needs: Needs = Needs()
    plant: Plant = unchanged_parts
    feed: Feed = unchanged_data
    drive: Drive = unchanged_steps
    reorder: Reorder = unchanged_order
    timeout_s: float | None = None

    def missing(self, case: Case) -> str:
        """Why ``case`` cannot show it; empty if it can."""
        return self.needs.missing(case)


@dataclass(frozen=True, kw_only=True)
class Specimen(Planted):
    """A fault: the classes of ``CLASSES`` that it stands for, the law that must fail, and the cause to be named.

    The law is one of the judge's; a static one, where ``reorder`` breaks it; or "deadlock", where ranks never end.
    """

    classes: tuple[str, ...]
    law: str
    fault: Fault

    def cause(self, case: Case) -> Cause:
        """What a diagnosis of ``case`` should name."""
        return self.fault.cause(case)


def halved(case: Case, stage: int) -> tuple[int, ...]:
    """The microbatches whose backward comes in two halves on ``stage``, in the order of the second."""
    row = case.built.ranks[case.built.placement[stage]]
    return tuple(m for s, kind, m in row if s == stage and kind is Kind.BACKWARD_WEIGHT)


def _within(some: Sequence[str], plan: Sequence[str]) -> bool:
    """Whether ``some`` occur in ``plan`` in their order."""
    rest = iter(plan)
    return all(operation in rest for operation in some)
