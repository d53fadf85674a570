"""A case: everything that one validation depends on, as a value and as the line that replays it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from pipeline.partition import by_sizes, even
from pipeline.schedule import Schedule
from pipeline.schedules import FAMILIES, build, canonical_name

# One step; a second one; an accumulation over two calls; an evaluation between two steps.
FULL_PLAN = ("train", "train", "accumulate", "train", "eval", "train")
SCHEDULES = tuple(FAMILIES)
OPERATIONS = ("train", "accumulate", "eval")
MODELS = ("gpt", "gpt-tied", "mlp", "twice", "frozen", "batchnorm", "dropout", "pair")
LOSSES = ("mean", "tokens")
DEVICES = ("cpu", "cuda")


class CaseError(ValueError):
    """A case that cannot be, or text that does not spell one."""


@dataclass(frozen=True)
class Case:
    """One validation. ``str(case)`` is the replay line and ``parse`` its inverse.

    split: layers per stage. plan: the operations that are run and compared, in order; the last must be "train".
    loss: "mean" over microbatches, or "tokens", a sum divided by the global count. ragged: microbatches differ in
    length. unequal: they differ in how many targets count. specimen: the name of a planted fault.
    """

    schedule: str
    ranks: int
    virtual: int
    microbatches: int
    split: tuple[int, ...]
    model: str = "gpt"
    loss: str = "mean"
    ragged: bool = False
    unequal: bool = False
    plan: tuple[str, ...] = FULL_PLAN
    seed: int = 0
    device: str = "cpu"
    specimen: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", canonical_name(self.schedule))
        by_sizes(sum(self.split), self.built.n_stages, self.split)
        choices = (("model", self.model, MODELS), ("loss", self.loss, LOSSES), ("device", self.device, DEVICES))
        for what, value, known in choices:
            if value not in known:
                raise CaseError(f"unknown {what} {value!r}: known are {', '.join(known)}")
        for operation in self.plan:
            if operation not in OPERATIONS:
                raise CaseError(f"unknown operation {operation!r} in the plan: known are {', '.join(OPERATIONS)}")
        if not self.plan or self.plan[-1] != "train":
            plan = "+".join(self.plan) or "(empty)"
            raise CaseError(f"the plan {plan} must end with train, or it compares no gradient")

    @cached_property
    def built(self) -> Schedule:
        """The case's schedule. Raises ``ScheduleError`` where it cannot be."""
        return build(self.schedule, ranks=self.ranks, virtual=self.virtual, microbatches=self.microbatches)

    @property
    def stages(self) -> int:
        return len(self.split)

    @property
    def layers(self) -> int:
        return sum(self.split)

    def __str__(self) -> str:
        head = f"{self.schedule} r{self.ranks} s{self.stages} m{self.microbatches}"
        return " ".join([head, f"split={','.join(map(str, self.split))}", *self._options()])

    def _options(self) -> Iterator[str]:
        for option in fields(self)[5:]:
            value = getattr(self, option.name)
            if option.name == "plan":
                if value != option.default:
                    yield f"plan={'+'.join(value)}"
            elif isinstance(value, bool):
                if value:
                    yield option.name
            elif value != option.default or option.name in ("model", "seed"):
                yield f"{option.name}={value}"

    @classmethod
    def parse(cls, text: str) -> "Case":
        """The case that ``text`` spells: ``1f1b r4 s4 m8 split=2,2,2,2 model=gpt seed=17``; the rest has defaults."""
        words = text.split()
        head, options = words[:4], words[4:]
        shape = re.fullmatch(r"(\S+) r(\d+) s(\d+) m(\d+)", " ".join(head), flags=re.ASCII)
        if shape is None:
            raise CaseError(
                f"{text!r} is no case: expected a schedule, ranks, stages and microbatches first, "
                "e.g. 1f1b r4 s4 m8 split=2,2,2,2 model=gpt seed=17"
            )
        ranks, stages, microbatches = (int(shape[k]) for k in (2, 3, 4))
        if ranks < 1 or stages < 1 or stages % ranks:
            raise CaseError(f"{text!r}: {stages} stages do not spread evenly over {ranks} ranks")
        case = cls(shape[1], ranks, stages // ranks, microbatches, even(2 * stages, stages))
        for word in options:
            case = case._with(word, text)
        return case

    def _with(self, word: str, text: str) -> "Case":
        name, equals, value = word.partition("=")
        known = {option.name: option for option in fields(self)[4:]}
        flag = name in ("ragged", "unequal")
        if name not in known or bool(equals) == flag:
            raise CaseError(f"{text!r}: {word!r} is no option; known are {', '.join(known)}")
        changes: dict[str, Any] = {name: True if flag else value}
        try:
            if name == "split":
                changes = {"split": tuple(map(int, value.split(",")))}
            elif name == "plan":
                changes = {"plan": tuple(value.split("+"))}
            elif name == "seed":
                changes = {"seed": int(value)}
        except ValueError:
            raise CaseError(f"{text!r}: {word!r} needs numbers") from None
        return replace(self, **changes)
