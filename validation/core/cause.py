"""Causes: faults that explain mismatches, with their evidence."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from types import MappingProxyType

from pipeproof.core.observe.stack import Line
from pipeproof.pipeline.sizes import digits, first_few

# One word per kind, with its sentence: specimens plant these faults, and diagnosis names them.
KINDS: Mapping[str, str] = MappingProxyType(
    {
        # Right values, multiplied wrongly.
        "scale": "gradients are a multiple of what they should be",
        "sign": "gradients have the wrong sign",
        "unequal-weights": "microbatches were weighted by another number than they should be, such as their tokens",
        "step-skipped": "some ranks skipped their step, and others did not",
        # Microbatches, counted or exchanged.
        "dropped": "a microbatch's gradient is missing from the sum",
        "doubled": "a microbatch's gradient was added more than once",
        "swapped-activations": "a call used another microbatch's activation",
        "swapped-gradients": "a backward used another microbatch's output gradient",
        "swapped-data": "a microbatch's inputs and targets do not belong together, or are not its own",
        "stale-gradient": "gradients were added to what was there before the step",
        "stale-tensor": "a tensor of an earlier step was used",
        # Single parameters.
        "zero": "a gradient is zero",
        "missing": "a parameter got no gradient at all",
        "unexpected": "a parameter got a gradient that should have none",
        "tied-not-summed": "copies of a tied parameter do not have each stage's share once",
        "tied-doubled": "a tied parameter's share was counted more than once",
        "extra-term": "something was added to the gradient that is no microbatch's",
        # Ranks that share a stage.
        "not-reduced": "ranks that share parameters keep their own part of the gradient",
        "replicas-apart": "replicas of a stage began the step with other weights",
        "misplaced": "a gradient or a weight, or a part of one, lies where another belongs",
        # Around the step.
        "norm": "the gradient norm is not that of the gradients",
        "clip": "gradients were not clipped alike",
        "update": "the optimizer did not do with the gradients what it should",
        "report": "what was computed is right, what was reported is not",
        "mode": "a module ran in the wrong mode",
        "buffers": "state that forwards leave behind is wrong",
        # Messages and memory.
        "wrong-message": "a message arrived as another",
        "mispaired": "a call used another microbatch's activation or gradient",
        "overwritten": "a tensor was overwritten while it was still needed",
        "uninitialised": "a tensor was read before it was filled, or never passed on",
        "rounded": "a tensor went through a narrower type",
        "altered": "a tensor was changed on its way",
        "not-finite": "a tensor is not finite",
        # The model itself.
        "computation": "a stage computed something else from right inputs",
        "randomness": "random numbers differ from the reference's",
        "partition": "a stage does not hold the layers that it should",
        # The order of things.
        "order": "the order of actions breaks a law",
        "deadlock": "ranks wait for each other",
        # Messages in flight, in the simulated world.
        "read-before-wait": "a buffer was used before its message had been waited for",
        "overwritten-in-flight": "a buffer was written while its message was on its way",
        "freed-in-flight": "a buffer was freed or resized while its message was on its way",
        "never-waited": "a message was never waited for",
        "received-twice": "two messages were to be received into one buffer",
        "mismatched": "a message was received as another size or type than it was sent",
        "desynchronised": "ranks did not call the same collective",
        "crash": "a rank failed",
    }
)
# Kinds that concern microbatch coefficients in a stage's sums.
OF_MICROBATCHES = frozenset(
    {"dropped", "doubled", "scale", "sign", "unequal-weights", "swapped-activations", "swapped-gradients"}
    | {"swapped-data", "mispaired", "extra-term"}
)
# Kinds raised by the simulated world, each with its rank.
RACES = (
    *("read-before-wait", "overwritten-in-flight", "freed-in-flight", "never-waited", "received-twice"),
    *("mismatched", "desynchronised"),
)


@dataclass(frozen=True)
class OwnLine:
    """A user code line for an action, such as ``2B0``, or for a described event."""

    what: str
    line: Line


@dataclass(frozen=True)
class Cause:
    """A fault with its place and certainty.

    Fields are None if they do not apply or remain undecided.

    microbatches: affected microbatches. stages, ranks: for a fault in several places. detail: text for people, such as
    ``microbatch 3's, expected microbatch 2's``. instead: causes with the same evidence. earlier: the accumulating call
    at fault, counted back from the step; 0 means the step. cut: the autograd graph was cut, so a backward gave its
    input nothing. lines: user code lines, most useful first. parameters: affected parameters, if the cause names them
    all.
    """

    kind: str
    rank: int | None = None
    stage: int | None = None
    microbatches: tuple[int, ...] = ()
    action: str | None = None
    parameter: str | None = None
    factor: float | None = None
    detail: str = ""
    stages: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    instead: tuple["Cause", ...] = ()
    earlier: int = 0
    cut: bool = False
    lines: tuple[OwnLine, ...] = field(default=(), compare=False)
    parameters: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        assert self.kind in KINDS, f"{self.kind!r} is no kind of cause"

    @property
    def in_forward(self) -> bool:
        """True for a cause in a forward."""
        return self.action is not None and "F" in self.action

    @property
    def in_backward(self) -> bool:
        """True for a cause in a backward."""
        return self.action is not None and "B" in self.action

    @property
    def numbered(self) -> tuple[str, str, str]:
        """Known stages, ranks and microbatches, such as ``stages 0, 2``; empty if unknown."""
        stages = self.stages or (() if self.stage is None else (self.stage,))
        ranks = self.ranks or (() if self.rank is None else (self.rank,))
        return _numbered("stage", stages), _numbered("rank", ranks), _numbered("microbatch", self.microbatches, "es")

    @property
    def place(self) -> str:
        """Known rank, stage, microbatches, action and parameter."""
        stages, ranks, microbatches = self.numbered
        exact = [f"{what} {name}" for what in ("action", "parameter") if (name := getattr(self, what)) is not None]
        return ", ".join(filter(None, [ranks, stages, microbatches, *exact])) or "everywhere"

    def own_lines(self) -> list[str]:
        """Format ``lines`` for readers."""
        width = max((len(one.what) for one in self.lines), default=0)
        return [f"{one.what:<{width}} {one.line}" for one in self.lines]

    @property
    def short(self) -> str:
        """Kind and place in short form, such as ``scale x4 everywhere``."""
        return f"{self.kind}{'' if self.factor is None else f' x{digits(self.factor)}'} {self.place}"

    def __str__(self) -> str:
        return f"{self.place}: {self.detail}" if self.detail else self.place


@dataclass(frozen=True)
class RuledOut:
    """Evidence against cause kinds: observed, compared and in agreement.

    kinds: excluded cause kinds. compared: number of comparisons behind ``evidence``.
    """

    kinds: tuple[str, ...]
    evidence: str
    compared: int

    def __post_init__(self) -> None:
        assert self.compared > 0, "what was not compared rules out nothing"
        assert KINDS.keys() >= set(self.kinds), f"{self.kinds} are no kinds of cause"

    def __str__(self) -> str:
        return f"{', '.join(self.kinds)}: {self.evidence}".removeprefix(": ") + f" ({self.compared} compared)"


@dataclass(frozen=True)
class Cell:
    """How often one microbatch's activations enter a stage's gradients.

    own: with its own output gradient, expected once; None if unknown. others: with another microbatch's, and how often.
    behind: share that follows from the next stage's wrong gradient.
    """

    own: float | None
    others: tuple[tuple[int, float], ...] = ()
    behind: float = 0.0

    @property
    def right(self) -> bool:
        """True for exactly one own share."""
        return self.own == 1.0 and not self.others and not self.behind

    def __str__(self) -> str:
        if self.own is None:
            return "?"
        others = [f"{m}'s" if c == 1.0 else f"{digits(c)} of {m}'s" for m, c in self.others]
        others += [f"{digits(self.behind)}*"] if self.behind else []
        own = [digits(self.own)] if self.own or not others else []
        return " + ".join([*own, *others])


@dataclass(frozen=True)
class Cells:
    """Coefficients: one row of microbatches per stage.

    apart: per stage, parameters outside its row's pattern.
    """

    rows: tuple[tuple[Cell, ...], ...]
    apart: tuple[tuple[str, ...], ...] = ()

    @property
    def right(self) -> bool:
        """True if all cells are right."""
        return all(cell.right for row in self.rows for cell in row)

    @property
    def known(self) -> bool:
        """True if any coefficient is known."""
        return any(cell.own is not None for row in self.rows for cell in row)

    @property
    def but_for(self) -> list[str]:
        """List stages with the parameters outside their row's pattern."""
        pairs = zip(self.rows, self.apart, strict=False)
        some = {k: names for k, (row, names) in enumerate(pairs) if any(cell.own is not None for cell in row)}
        return [f"stage {stage} but for {first_few(names)}" for stage, names in some.items() if names]

    def lines(self, most: int = 16) -> list[str]:
        """Format a table: groups of equal stages down, microbatches across.

        Beyond ``most`` microbatches, show only wrong ones.
        """
        columns = range(len(self.rows[0]))
        wrong = [m for m in columns if not all(row[m].right for row in self.rows)]
        shown = list(columns) if len(columns) <= most else wrong[:most]
        table = [["microbatch", *map(str, shown)]]
        for row, alike in groupby(enumerate(self.rows), key=lambda one: one[1]):
            first, *more = (stage for stage, _ in alike)
            name = f"stages {first}-{more[-1]}" if more else f"stage {first}"
            table.append([name, *(str(row[m]) for m in shown)])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table]
        left = len(columns) - len(shown)
        all_right = " that are 1 everywhere" if len(shown) == len(wrong) else ""
        lines += [f"and {left} more microbatches{all_right}"] if left else []
        lines += self.but_for
        behind = any(row[m].behind for row in self.rows for m in shown)
        return [f"{lines[0]}   *: from a wrong gradient of the next stage", *lines[1:]] if behind else lines


def alternatives(causes: Sequence[Cause]) -> tuple[tuple[Cause, ...], ...]:
    """Expand ``causes`` into whole explanations, likeliest first."""
    options = [(replace(cause, instead=()), *cause.instead) for cause in causes]
    return tuple(product(*options))


def _numbered(what: str, numbers: Sequence[int], plural: str = "s") -> str:
    return f"{what}{plural * (len(numbers) > 1)} {join_numbers(numbers)}" if numbers else ""


def join_numbers(numbers: Iterable[int]) -> str:
    """``1, 2, 5``."""
    return ", ".join(map(str, numbers))
