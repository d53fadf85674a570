"""A specimen: a fault planted on purpose, by composition, with the cause that a diagnosis should name."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pipeproof.core.cause import RACES, Cause
from pipeproof.own.case import MODELS, Case, plainest_first
from pipeproof.own.data import model_for
from pipeproof.own.faults import Change
from pipeproof.own.stages import owners
from pipeproof.pipeline.action import Kind
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules import virtuals
from pipeproof.pipeline.transports import Transport, everyday
from pipeproof.worlds.accelerator import CPU

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


@dataclass(frozen=True)
class Fault:
    """The cause to name: its kind, and its place in the case; and the law that must fail.

    The law is the judge's; a static one for a changed program; "deadlock" if ranks never end; "crash" if one fails; or
    a race's name in the simulated world. ``alike``: kinds that final gradients cannot tell apart from it.
    ``parameter``: a pattern, for the first match in the stage. ``rank``: for a fault without a stage. Absent fields are
    not checked.
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
        parameter = None
        if self.parameter and stage is not None:
            owned = owners(model_for(case), case.split).items()
            parameter = next(name for name, own in owned if own == stage and re.search(self.parameter, name))
        return Cause(
            self.kind,
            rank=self.rank if stage is None else case.built.placement[stage],
            stage=None if self.kind in ("crash", *RACES) else stage,  # a rank that failed tells no stage
            microbatches=self.microbatches(case) if callable(self.microbatches) else self.microbatches,
            parameter=parameter,
            factor=None if self.factor is None else self.factor(case),
        )


@dataclass(frozen=True)
class Needs:
    """Requirements of a case to show a fault.

    ``models``: suitable ones; empty for all. ``plan``: occurs in the case's plan in this order. ``layers``: on each
    stage. ``split``: the kinds of backward, some needed on the middle stage. ``one_size``: microbatches have one shape.
    ``device``: ranks compute on a device, not on the CPU. ``transports``: for simulated ranks, those that show it;
    empty if real ranks do. ``also``: returns another reason against a case, or nothing.
    """

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
            (not occurs_in(self.plan, case.plan), f"a plan with {'+'.join(self.plan)}"),
            (case.loss != (self.loss or case.loss), f"loss={self.loss}"),
            (self.ragged and not case.ragged, "ragged"),
            (self.unequal and not case.unequal, "unequal"),
            (self.one_size and case.sizes_differ, "microbatches of one size"),
            (
                self.split and not split_microbatches(case.built, case.stages // 2),
                "a backward in two halves on the middle stage",
            ),
        )
        return next((f"needs {what}" for lacking, what in lacks if lacking), "") or self.also(case)

    def smallest(self, schedule: str = "") -> Case:
        """Return the smallest suitable case, on ``schedule`` or a plain one, with the plainest suitable model."""
        schedule = schedule or ("zb-h1" if self.split else "naive")
        virtual = virtuals(schedule, looped=-(-self.stages // self.ranks))
        ranks = max(self.ranks, -(-self.stages // virtual))
        return self.case(schedule, ranks, virtual, self.microbatches, plainest_first(self.models or MODELS)[0])

    def case(self, schedule: str, ranks: int, virtual: int, microbatches: int, model: str) -> Case:
        """Return a case in this shape with the remaining needs."""
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


ANYTHING = Needs()


@dataclass(frozen=True, kw_only=True)
class Entry(Change):
    """A change to a step, its description, and its needs; without a fault, it is a control.

    ``classes``: its entries in ``CLASSES``. ``schedule``: the smallest case's, unless a plain one suffices.
    """

    summary: str = ""
    origin: str = ""
    classes: tuple[str, ...] = ()
    family: str = "own"
    needs: Needs = ANYTHING
    schedule: str = ""

    @property
    def smallest(self) -> str:
        return str(self.needs.smallest(self.schedule))

    def missing(self, case: Case, transport: Transport | None = None) -> str:
        if self.needs.device and case.device == CPU:
            return "needs a device other than the CPU"
        if self.needs.transports and transport not in self.needs.transports:
            known = " or ".join(map(everyday, self.needs.transports))
            return f"needs --world simulated --transport {known}" if transport is None else f"needs --transport {known}"
        return self.needs.missing(case)


@dataclass(frozen=True, kw_only=True)
class Specimen(Entry):
    """A fault: the law that must fail, and the cause to be named."""

    fault: Fault

    @property
    def law(self) -> str:
        """The law that must fail."""
        return self.fault.law

    def hidden(self, room: int) -> str:
        kept = f"needs --room below {room}: who sends does not wait for what is kept"
        return kept if room and self.fault.kind == "deadlock" else ""

    def cause(self, case: Case) -> Cause:
        """Return the cause that a diagnosis of ``case`` should name."""
        return self.fault.cause(case)


def split_microbatches(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """Return the microbatches with a split backward on ``stage``, in the order of the second half."""
    row = schedule.ranks[schedule.placement[stage]]
    return tuple(m for s, kind, m in row if s == stage and kind is Kind.BACKWARD_WEIGHT)


def occurs_in(some: Sequence[str], plan: Sequence[str]) -> bool:
    """True if ``some`` occur in ``plan`` in their order."""
    rest = iter(plan)
    return all(operation in rest for operation in some)
