"""Cases: a validation's inputs as one value, and as its replay line.

A user's schedule goes by file name, and is read once: the file's content travels with the case, for ranks may lack it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeproof.own.runtimes import OPTIONS, OWN, RUNTIMES, why_not
from pipeproof.pipeline.files import is_csv, read_file
from pipeproof.pipeline.laws import check
from pipeproof.pipeline.mesh import AXES
from pipeproof.pipeline.partition import by_sizes
from pipeproof.pipeline.program import Program
from pipeproof.pipeline.program_laws import check as check_program
from pipeproof.pipeline.program_laws import runnable
from pipeproof.pipeline.schedule import Schedule, ScheduleError
from pipeproof.pipeline.schedules import FAMILIES, build, canonical_name, list_known
from pipeproof.pipeline.sizes import MOST_LAYERS, MOST_PROCESSES, MOST_SEED, check_count
from pipeproof.pipeline.waiting import DEFAULT_TIMEOUT_S
from pipeproof.worlds import accelerator
from pipeproof.worlds.launcher import under_torchrun

# One step; a second one; an accumulation over two calls; an evaluation between two steps.
FULL_PLAN = ("train", "train", "accumulate", "train", "eval", "train")
SCHEDULES = tuple(FAMILIES)
OPERATIONS = ("train", "accumulate", "eval")
STREAMS = ("pair", "view", "carry", "fresh", "prompt", "sometimes")  # unusual data between stages
MODELS = ("gpt", "gpt-tied", "mlp", "twice", "frozen", "batchnorm", "dropout", *STREAMS)
LOSSES = ("mean", "tokens")
DTYPES = ("fp32", "bf16", "fp64")
FUZZED_DTYPES = DTYPES[:2]  # common in training
_KNOWN: Mapping[str, tuple[str, str, Sequence[str]]] = {  # what a value is called, and what it may be
    "model": ("model", "", MODELS),
    "dtype": ("dtype", "", DTYPES),
    "loss": ("loss", "", LOSSES),
    "runtime": ("runtime", "", RUNTIMES),
    "options": ("option", "", OPTIONS),
    "plan": ("operation", " in the plan", OPERATIONS),
}


def plainest_first(models: Iterable[str]) -> list[str]:
    """Return ``models`` with ``mlp`` first."""
    return sorted(models, key=lambda model: model != "mlp")


class CaseError(ValueError):
    """Raised for impossible cases, and for text without one."""


@dataclass(frozen=True)
class Case:
    """One validation. ``str(case)`` returns the replay line, ``parse`` reads it.

    schedule: a family, or a FILE.csv. virtual: stages per rank; with a file, the largest number. split: layers per
    stage. dtype: for weights, activations and gradients. plan: operations to run and compare, in order; the last must
    be "train". loss: "mean" over microbatches, or "tokens", a sum divided by the global count. ragged: microbatches
    differ in length. unequal: they differ in counted targets. specimen: a planted fault's name. runtime: the runtime to
    use. options: its options. replicas: pipelines side by side, with DDP around their stages, each with its own ranks
    and microbatches.
    """

    schedule: str
    ranks: int
    virtual: int
    microbatches: int
    split: tuple[int, ...]
    model: str = "gpt"
    dtype: str = "fp32"
    loss: str = "mean"
    ragged: bool = False
    unequal: bool = False
    plan: tuple[str, ...] = FULL_PLAN
    seed: int = 0
    device: str = "cpu"
    specimen: str = ""
    runtime: str = OWN
    options: tuple[str, ...] = ()
    replicas: int = 1
    own: Schedule | Program | None = field(default=None, repr=False)  # the file's content; read if absent

    def __post_init__(self) -> None:
        check_count("ranks", self.ranks, most=MOST_PROCESSES)
        check_count("replicas", self.replicas, most=MOST_PROCESSES // self.ranks)
        check_count("layers", self.layers, most=MOST_LAYERS)
        check_count("seed", self.seed, least=0, most=MOST_SEED)
        if not is_csv(self.schedule):
            object.__setattr__(self, "schedule", canonical_name(self.schedule))
        elif self.own is None:
            object.__setattr__(self, "own", own_schedule(self.schedule))
        if self.own is not None:
            found = self.built.n_ranks, self.built.n_stages, self.built.microbatches, most_stages(self.own)
            said = self.ranks, self.stages, self.microbatches, self.virtual
            if found != said:
                numbers = "{} ranks, {} stages, {} microbatches and up to {} stages on a rank"
                texts = (numbers.format(*shape) for shape in (found, said))
                raise CaseError(f"{self.schedule} has {', not '.join(texts)}")
        by_sizes(sum(self.split), self.built.n_stages, self.split)
        for name, (what, where, known) in _KNOWN.items():
            value = getattr(self, name)
            for one in value if isinstance(value, tuple) else (value,):
                if one not in known:
                    raise CaseError(f"unknown {what} {one!r}{where}: {list_known(one, known)}")
        if why := accelerator.refusal(self.device):
            raise CaseError(why)
        if not self.plan or self.plan[-1] != "train":
            plan = "+".join(self.plan) or "(empty)"
            raise CaseError(f"the plan {plan} must end with train, or it compares no gradient")
        of_case = {name: getattr(self, name) for name in ("schedule", "model", "sizes_differ", "specimen")}
        shape = (self.ranks, self.stages, self.microbatches, self.replicas)
        if reason := why_not(self.runtime, self.options, shape=shape, **of_case):
            raise CaseError(f"runtime={self.runtime} cannot run this: {reason}")

    @property
    def sizes_differ(self) -> bool:
        """True if microbatches differ in shape; text with fewer counted targets does not."""
        return self.ragged or (self.unequal and not self.model.startswith("gpt"))

    @cached_property
    def built(self) -> Schedule:
        """The case's schedule. Raises ``ScheduleError`` for an impossible one."""
        if self.own is None:
            return build(self.schedule, ranks=self.ranks, virtual=self.virtual, microbatches=self.microbatches)
        return self.own.schedule if isinstance(self.own, Program) else self.own

    @property
    def run(self) -> Schedule | Program:
        """The schedule for ranks, or a file's program with messages."""
        return self.built if self.own is None else self.own

    @property
    def late(self) -> float:
        """Divisor on gradients after backward: torch's ``scale_grads`` divides by M, and DDP averages over replicas."""
        scaled = self.runtime != OWN and "unscaled" not in self.options
        return float(self.replicas * (self.microbatches if scaled else 1))

    @property
    def processes(self) -> int:
        """All replicas' ranks: rank k in replica r has world rank r * P + k."""
        return self.ranks * self.replicas

    def share(self, replica: int) -> range:
        """Return ``replica``'s microbatches: every n-th."""
        return range(replica, self.microbatches * self.replicas, self.replicas)

    @property
    def stages(self) -> int:
        return len(self.split)

    @property
    def layers(self) -> int:
        return sum(self.split)

    @property
    def bindings(self) -> str:
        """The case's numbers in words, for failure reports."""
        split = ",".join(map(str, self.split))
        sizes = f"P {self.ranks}, V {self.virtual}, M {self.microbatches}, split {split}"
        sizes += f", {self.replicas} replicas" if self.replicas > 1 else ""
        return f"{self.schedule}, {sizes}, seed {self.seed}, model {self.model}, loss {self.loss}"

    def __str__(self) -> str:
        split = ",".join(map(str, self.split))
        words = [f"{self.schedule} r{self.ranks} s{self.stages} m{self.microbatches} split={split}"]
        for option in _options()[1:]:
            value = getattr(self, option.name)
            if value is True:
                words.append(option.name)
            elif value != option.default or option.name in ("model", "seed"):
                words.append(f"{option.name}={'+'.join(value) if isinstance(value, tuple) else value}")
        return " ".join(words)

    @property
    def config(self) -> dict[str, Any]:
        """Plain data, as in configs and records: axes under their own names."""
        found = {name: getattr(self, option.name) for name, option in config_fields().items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "Case":
        """Build a case from ``config`` values typed as in ``config_fields``; other entries are ignored."""
        named: dict[str, Any] = {
            option.name: config[name] for name, option in config_fields().items() if name in config
        }
        tuples = {name: tuple(one) for name, one in named.items() if isinstance(one, list)}
        return cls(**{**named, **tuples})

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Parse a replay line: ``1f1b r4 s4 m8 split=2,2,2,2 model=gpt seed=17``; other fields have defaults."""
        shape = re.fullmatch(r"(.+?)\s+r(\d+)\s+s(\d+)\s+m(\d+)((?:\s+\S+)*)\s*", text, flags=re.ASCII)
        if shape is None:
            raise CaseError(
                f"not a case: {text!r}; expected a schedule, ranks, stages and microbatches first, "
                "e.g. 1f1b r4 s4 m8 split=2,2,2,2 model=gpt seed=17"
            )
        name, (ranks, stages, microbatches) = shape[1], map(int, shape.group(2, 3, 4))
        options: dict[str, Any] = {}
        for word in shape[5].split():
            option, value = _option(word, text)
            if option in options:
                raise CaseError(f"{text!r}: {option} is said twice")
            options[option] = value
        check_count("stages", stages, most=MOST_LAYERS)
        split = options.pop("split", (2,) * stages)
        if is_csv(name):
            own = own_schedule(name)
            return cls(name, ranks, most_stages(own), microbatches, split, own=own, **options)
        if ranks < 1 or stages % ranks:
            raise CaseError(f"{text!r}: {stages} stages on {ranks} ranks: expected a rank, and as many stages on each")
        by_sizes(sum(split), stages, split)
        return cls(name, ranks, stages // ranks, microbatches, split, **options)


def _option(word: str, text: str) -> tuple[str, Any]:
    """Parse one option ``word`` in the line ``text``."""
    name, equals, value = word.partition("=")
    known = [option.name for option in _options()]
    flag = name in ("ragged", "unequal")
    if name not in known or bool(equals) == flag:
        raise CaseError(f"{text!r}: {word!r} is no option: {list_known(name, known)}")
    try:
        if name == "split":
            return name, tuple(map(int, value.split(",")))
        if name in ("plan", "options"):
            return name, tuple(value.split("+"))
        return name, int(value) if name in ("seed", "replicas") else flag or value
    except ValueError:
        expected = "whole numbers with commas between" if name == "split" else "a whole number"
        raise CaseError(f"{text!r}: {word!r}: expected {expected} behind the =") from None


def _options() -> list[Field[Any]]:
    """Return fields that a replay line names, split first."""
    return [option for option in fields(Case)[4:] if option.name != "own"]


def config_fields() -> dict[str, Field[Any]]:
    """Return case fields by config name."""
    return {AXES.get(option.name, option.name): option for option in fields(Case) if option.name != "own"}


def most_stages(own: Schedule | Program) -> int:
    """Return the largest stage count per rank: V if all are equal."""
    schedule = own.schedule if isinstance(own, Program) else own
    return max(Counter(schedule.placement).values())


def own_schedule(path: str | Path) -> Schedule | Program:
    """Read and check a schedule file. Under torchrun rank 0 reads it, and all ranks must call this.

    Raises ``LawBroken``, or ``ScheduleError`` for an unreadable schedule.
    """
    if not under_torchrun():
        found = _read(path)
    else:
        from pipeproof.worlds.side_store import side_store  # it loads torch

        side = side_store()
        mine = _read(path) if side.rank == 0 else None
        found = side.gather(mine, what="reading a schedule", bound_s=DEFAULT_TIMEOUT_S)[0]
    if isinstance(found, ScheduleError):
        raise found
    return found


def _read(path: str | Path) -> Schedule | Program | ScheduleError:
    """Return a schedule or an error, so that errors can reach other ranks."""
    try:
        found = read_file(path)
        # A program that deadlocks only on ordered transports may run on others.
        return check_program(found, laws=runnable(in_order=False)) if isinstance(found, Program) else check(found)
    except ScheduleError as error:
        return error
