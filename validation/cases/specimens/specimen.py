"""What a specimen is: a fault planted on purpose, by composition, with the cause that a diagnosis should name."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from pipeproof.cases.case import MODELS, Case, plainest_first
from pipeproof.cases.data import model_for
from pipeproof.cases.stages import owners
from pipeproof.core.cause import RACES, Cause
from pipeproof.observers.wrappers import Steps
from pipeproof.pipeline.action import Kind
from pipeproof.pipeline.lower import Program
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules import virtuals
from pipeproof.pipeline.step import Parts
from pipeproof.pipeline.transports import Transport, everyday
from pipeproof.reference.data import Batch
from pipeproof.worlds.accelerator import CPU

Plant = Callable[[Parts], Parts]
Feed = Callable[[Sequence[Batch], Parts], Sequence[Batch]]
Drive = Callable[[Steps], Steps]
Reorder = Callable[[Program], Program]
T = TypeVar("T")
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


def unchanged(what: T, about: object = None) -> T:
    """Plants nothing: what passes is passed on."""
    return what


@dataclass(frozen=True)
class Fault:
    """The cause to be named: its kind, and where it is, from the case; and the law that must fail.

    The law is one of the judge's; a static one, where a program is changed; "deadlock", where ranks never end;
    "crash", where one fails; or a race's name, where the simulated world tells of one.
    ``alike`` are kinds that final gradients alone may tell no better. ``parameter`` is a pattern: the first parameter
    of the stage that it is found in. ``rank``: of a fault that is at no stage. What is left out is not asked for.
    """

    kind: str
    law: str
    stage: StageAt | None = None
    microbatches: tuple[int, ...] | Callable[[Case], tuple[int, ...]] = ()
    parameter: str = ""
    factor: Callable[[Case], float] | None = None
    alike: tuple[str, ...] = ()
    rank: int | None = None

    def cause(self, case: Case) -> Cause:
        """The cause in ``case``."""
        stage = None if self.stage is None else self.stage(case.stages)
        return Cause(
            self.kind,
            rank=self.rank if stage is None else case.built.placement[stage],
            stage=None if self.kind in ("crash", *RACES) else stage,  # a rank that failed tells no stage
            microbatches=self.microbatches(case) if callable(self.microbatches) else self.microbatches,
            parameter=self._parameter(case, stage) if self.parameter and stage is not None else None,
            factor=None if self.factor is None else self.factor(case),
        )

    def _parameter(self, case: Case, stage: int) -> str:
        model = model_for(case)
        names = (name for name, owner in owners(model, case.split).items() if owner == stage)
        return next(name for name in names if re.search(self.parameter, name))


@dataclass(frozen=True)
class Needs:
    """What a case must have to show a fault. ``models`` are those that can; empty for all. ``plan`` must occur in the
    case's in this order. ``layers``: on each stage. ``split``: the kinds of backward that the middle stage needs some
    of. ``one_size``: its microbatches are alike in shape. ``device``: ranks compute on one, and not on the CPU.
    ``transports``: of simulated ranks, those that show it; none for what real ranks show. ``also``: why a case will
    not do for any other reason, or nothing."""

    microbatches: int = 1
    ranks: int = 1
    stages: int = 1
    layers: int = 1
    models: tuple[str, ...] = ()
    plan: tuple[str, ...] = ("train",)
    loss: str = ""
    ragged: bool = False
    unequal: bool = False
    one_size: bool = False
    split: bool = False
    device: bool = False
    transports: tuple[Transport, ...] = ()
    also: Callable[[Case], str] = lambda case: ""

    def missing(self, case: Case) -> str:
        """Why ``case`` cannot show the fault; empty if it can."""
        lacks = (
            (case.microbatches < self.microbatches, f"{self.microbatches} microbatches"),
            (case.ranks < self.ranks, f"{self.ranks} ranks"),
            (case.stages < self.stages, f"{self.stages} stages"),
            (min(case.split) < self.layers, f"{self.layers} layers a stage"),
            (case.model not in (self.models or MODELS), f"a model out of {', '.join(self.models)}"),
            (not _within(self.plan, case.plan), f"a plan with {'+'.join(self.plan)}"),
            (case.loss != (self.loss or case.loss), f"loss={self.loss}"),
            (self.ragged and not case.ragged, "ragged"),
            (self.unequal and not case.unequal, "unequal"),
            (self.one_size and case.sizes_differ, "microbatches of one size"),
            (self.split and not halved(case.built, case.stages // 2), "a backward in two halves on the middle stage"),
        )
        return next((f"needs {what}" for lacking, what in lacks if lacking), "") or self.also(case)

    def smallest(self, schedule: str = "") -> Case:
        """The smallest case that has all this, on ``schedule`` or a plain one; its model is the plainest that can."""
        schedule = schedule or ("zb-h1" if self.split else "naive")
        virtual = virtuals(schedule, looped=-(-self.stages // self.ranks))
        ranks = max(self.ranks, -(-self.stages // virtual))
        return self.case(schedule, ranks, virtual, self.microbatches, plainest_first(self.models or MODELS)[0])

    def case(self, schedule: str, ranks: int, virtual: int, microbatches: int, model: str) -> Case:
        """The case of this shape that has what else is needed."""
        return Case(
            schedule,
            ranks,
            virtual,
            microbatches,
            (self.layers,) * (ranks * virtual),
            model=model,
            loss=self.loss or "mean",
            ragged=self.ragged,
            unequal=self.unequal,
            plan=self.plan,
        )


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A change to a step, where it comes from, and what a case needs to show it.

    ``schedule`` is that of the smallest case, where no plain one will do. ``plant`` changes the parts of a rank's step;
    ``feed`` the microbatches that this rank is given; ``drive`` how steps are taken; ``reorder`` the program.
    ``timeout_s`` bounds the waits of ranks that can never end.
    """

    summary: str
    origin: str
    name: str = ""
    needs: Needs = Needs()
    schedule: str = ""
    plant: Plant = unchanged
    feed: Feed = unchanged
    drive: Drive = unchanged
    reorder: Reorder = unchanged
    timeout_s: float | None = None

    @property
    def smallest(self) -> str:
        """The line of the smallest case that shows what it does, without it."""
        return str(self.needs.smallest(self.schedule))

    def missing(self, case: Case, transport: Transport | None = None) -> str:
        """Why ``case`` cannot show it; empty if it can. ``transport``: that of simulated ranks; None on real ones."""
        if self.needs.device and case.device == CPU:
            return "needs a device other than the CPU"
        if self.needs.transports and transport not in self.needs.transports:
            known = " or ".join(map(everyday, self.needs.transports))
            return f"needs --world simulated --transport {known}" if transport is None else f"needs --transport {known}"
        return self.needs.missing(case)

    def hidden(self, room: int) -> str:
        """Why a run with this room for messages, in bytes, passes all the same; empty if room changes nothing."""
        del room
        return ""


@dataclass(frozen=True, kw_only=True)
class Specimen(Planted):
    """A fault: the classes of ``CLASSES`` that it stands for, the law that must fail, and the cause to be named."""

    fault: Fault
    classes: tuple[str, ...] = ()

    @property
    def law(self) -> str:
        """The law that must fail."""
        return self.fault.law

    def hidden(self, room: int) -> str:
        """Why a run with this room for messages, in bytes, passes all the same; empty if room changes nothing."""
        kept = f"needs --room below {room}: who sends does not wait for what is kept"
        return kept if room and self.fault.kind == "deadlock" else ""

    def cause(self, case: Case) -> Cause:
        """What a diagnosis of ``case`` should name."""
        return self.fault.cause(case)


def halved(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """The microbatches whose backward comes in two halves on ``stage``, in the order of the second."""
    row = schedule.ranks[schedule.placement[stage]]
    return tuple(m for s, kind, m in row if s == stage and kind is Kind.BACKWARD_WEIGHT)


def _within(some: Sequence[str], plan: Sequence[str]) -> bool:
    """Whether ``some`` occur in ``plan`` in their order."""
    rest = iter(plan)
    return all(operation in rest for operation in some)
