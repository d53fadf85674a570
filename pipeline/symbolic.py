"""Every stage's gradient, in symbols, for all inputs: terms, each of an activation and a gradient.

A program is run without numbers. A value is known by its maker's stage and its data's microbatch. A stage's backward
adds one term to its parameters' gradient: its forward's input, with the output gradient that it was given. The gradient
is right, whatever the model and the data, if the term of each microbatch is there once, its input with its gradient.
Messages meet by name, or in posting order.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeproof.pipeline.action import GIVES_INPUT_GRADIENT, GIVES_WEIGHT_GRADIENT, Kind
from pipeproof.pipeline.columns import Ints, Mask
from pipeproof.pipeline.dataflow import NEVER
from pipeproof.pipeline.laws import Violation
from pipeproof.pipeline.messages import Messages
from pipeproof.pipeline.program import Program
from pipeproof.pipeline.sizes import LONGEST, SHOWN

_ITSELF = -3  # an action that needs nothing of another stage: data, or its own loss


@dataclass(frozen=True)
class Terms:
    """A program's additions to gradients: ``entries[i]`` adds a term to the gradient of ``stage[i]``.

    The term pairs the input of microbatch ``activation[i]`` with the output gradient of microbatch ``gradient[i]``.
    Numbers from ``microbatches`` on are ``others``, in words; NEVER is made by no action.
    """

    stages: int
    microbatches: int
    entries: Ints
    stage: Ints
    activation: Ints
    gradient: Ints
    others: Sequence[str]

    @cached_property
    def right(self) -> Mask:
        """Mask of terms from a single microbatch."""
        found: Mask = (self.activation == self.gradient) & (self.activation >= 0)
        return found & (self.activation < self.microbatches)

    @cached_property
    def counts(self) -> Ints:
        """Count terms by stage and microbatch."""
        own = self.stage[self.right] * self.microbatches + self.activation[self.right]
        return np.bincount(own, minlength=self.stages * self.microbatches).reshape(self.stages, self.microbatches)

    @property
    def proven(self) -> bool:
        """True if each stage's gradient has each microbatch's own term once."""
        return bool(self.right.all() and (self.counts == 1).all())

    def name(self, value: int) -> str:
        """Name the data of a term."""
        if value < 0:
            return "what never comes"
        return f"microbatch {value}" if value < self.microbatches else self.others[value - self.microbatches]


def terms(program: Program, *, by_name: bool) -> Terms:
    """Run ``program``, with a lawful placement, in symbols.

    ``by_name``: a receive gets the message of its name; else the next in its channel.
    """
    return _SymbolicRun(program, by_name=by_name).terms()


def wrong_terms(program: Program, found: Terms) -> Iterator[Violation]:
    """Wrong terms in ``found``, the terms of ``program``; for each stage the first few."""
    columns, reported = program.columns, Counter[int]()
    for i in np.flatnonzero(~found.right).tolist():
        stage, entry = int(found.stage[i]), int(found.entries[i])
        reported[stage] += 1
        if reported[stage] <= SHOWN:
            kept, given = found.name(int(found.activation[i])), found.name(int(found.gradient[i]))
            what = f"{columns.action(entry)} adds the input of {kept} with the gradient of {given}"
            yield Violation("terms", what, int(columns.rank[entry]), (columns.cell(entry),))
    for stage, m in np.argwhere(found.counts != 1).tolist():
        reported[stage] += 1
        if reported[stage] <= SHOWN:
            often = int(found.counts[stage, m])
            yield Violation("terms", f"stage {stage}'s gradient has microbatch {m} {often} times, expected once")
    if more := sum(max(0, count - SHOWN) for count in reported.values()):
        yield Violation("terms", f"and {more} more")


class _SymbolicRun:
    """Values made by a program's actions, each a number: kind, stage, and microbatch.

    An output of stage s of microbatch m is ``s * M + m``, the gradient that stage s hands back ``(S + s) * M + m``.
    From ``2 * S * M`` on they are mixtures.
    """

    def __init__(self, program: Program, *, by_name: bool) -> None:
        self._columns = columns = program.columns
        self._width, self._stages = program.schedule.microbatches, program.schedule.n_stages
        self._size = self._stages * self._width
        self._placement = np.array(program.schedule.placement)
        self._stage, self._microbatch = columns.stage.astype(np.int64), columns.microbatch.astype(np.int64)
        self._number = self._stage * self._width + self._microbatch
        self._forwards = self._first(columns.is_kind(Kind.FORWARD))
        self._backwards = self._first(columns.is_kind(*GIVES_INPUT_GRADIENT))
        self._messages = Messages.of(program)
        matched = self._messages.match_by_name() if by_name else self._messages.match_in_order()
        self._sent = np.full(len(columns), NEVER)
        self._sent[matched[1]] = matched[0]
        self._source = self._sources()
        self._value = np.full(len(columns), NEVER)
        self._mixtures: dict[tuple[int, ...], int] = {}
        self._texts: list[str] = []  # of mixtures

    def terms(self) -> Terms:
        """All additions to gradients."""
        self._run(self._columns.is_kind(Kind.FORWARD), self._outputs)
        self._run(self._columns.is_kind(*GIVES_INPUT_GRADIENT), self._output_gradients)
        adding = np.flatnonzero(self._columns.is_kind(*GIVES_WEIGHT_GRADIENT))
        own, made = self._forwards[self._number[adding]], self._backwards[self._number[adding]]
        kept, given = np.full(len(adding), NEVER), np.full(len(adding), NEVER)
        for found, whose, entries in ((kept, self._kept_inputs, own), (given, self._given_gradients, made)):
            done = (entries >= 0) & (self._value[entries] != NEVER)
            found[done] = whose(entries[done])
        return Terms(self._stages, self._width, adding, self._stage[adding], kept, given, tuple(self._texts))

    def _first(self, which: Mask) -> Ints:
        """By stage and microbatch, the first of these entries, or NEVER."""
        entries = np.flatnonzero(which)[::-1]
        found = np.full(self._size, NEVER)
        found[self._number[entries]] = entries
        return found

    def _sources(self) -> Ints:
        """For every forward and backward, the entry that makes its need, ``_ITSELF``, or NEVER."""
        found = np.full(len(self._columns), NEVER)
        ways = ((Kind.RECV_F, -1, (Kind.FORWARD,)), (Kind.RECV_B, 1, tuple(GIVES_INPUT_GRADIENT)))
        for receive, step, kinds in ways:
            entries = np.flatnonzero(self._columns.is_kind(*kinds))
            other = self._stage[entries] + step
            inside = (other >= 0) & (other < self._stages)
            found[entries[~inside]] = _ITSELF
            entries, other = entries[inside], other[inside]
            here = self._placement[other] == self._columns.rank[entries]
            makers = self._forwards if step < 0 else self._backwards
            found[entries[here]] = makers[other[here] * self._width + self._microbatch[entries[here]]]
            received = self._first(self._columns.is_kind(receive))[self._number[entries[~here]]]
            sends = np.where(received >= 0, self._sent[received], NEVER)
            found[entries[~here]] = self._carriers(sends)
        return found

    def _carriers(self, sends: Ints) -> Ints:
        """The entry that makes each send's content."""
        numbers = self._number[np.maximum(sends, 0)]
        forward = self._columns.is_kind(Kind.SEND_F)[np.maximum(sends, 0)]
        return np.where(sends < 0, NEVER, np.where(forward, self._forwards[numbers], self._backwards[numbers]))

    def _run(self, which: Mask, make: Callable[[Ints], Ints]) -> None:
        """Evaluate these entries, starting from those without needs, until the rest waits for ever."""
        left = np.flatnonzero(which)
        while len(left):
            source, own = self._source[left], self._forwards[self._number[left]]
            ready = (source == _ITSELF) | ((source >= 0) & (self._value[source] != NEVER))
            ready &= (own == left) | ((own >= 0) & (self._value[own] != NEVER))
            if not ready.any():
                return
            self._value[left[ready]] = make(left[ready])
            left = left[~ready]

    def _outputs(self, forwards: Ints) -> Ints:
        kept, stage = self._kept_inputs(forwards), self._stage[forwards]
        found = stage * self._width + kept
        for i in np.flatnonzero(kept >= self._width).tolist():
            found[i] = 2 * self._size + self._mixture(
                (0, int(stage[i]), int(kept[i])), f"stage {stage[i]}'s output of {self._of(int(kept[i]))}"
            )
        return found

    def _output_gradients(self, backwards: Ints) -> Ints:
        kept, given, stage = self._kept_inputs(backwards), self._given_gradients(backwards), self._stage[backwards]
        found = (self._stages + stage) * self._width + kept
        for i in np.flatnonzero((kept != given) | (kept >= self._width)).tolist():
            both = f"the input of {self._of(int(kept[i]))} and the gradient of {self._of(int(given[i]))}"
            key = (1, int(stage[i]), int(kept[i]), int(given[i]))
            found[i] = 2 * self._size + self._mixture(key, f"what stage {stage[i]} makes of {both}")
        return found

    def _kept_inputs(self, entries: Ints) -> Ints:
        """Microbatch of the input to each entry's forward."""
        forwards = self._forwards[self._number[entries]]
        return self._whose(forwards, self._stage[entries] - 1, self._microbatch[entries])

    def _given_gradients(self, backwards: Ints) -> Ints:
        """Microbatch of the output gradient given to each backward."""
        stage, m = self._stage[backwards], self._microbatch[backwards]
        found = self._whose(backwards, self._stages + stage + 1, m)
        output = self._value[self._forwards[self._number[backwards]]]
        lost = (self._source[backwards] == _ITSELF) & (output != stage * self._width + m)
        for i in np.flatnonzero(lost).tolist():
            loss = f"the loss of {self._words(int(output[i]))} with microbatch {m[i]}'s target"
            found[i] = self._width + self._mixture((2, int(output[i]), int(m[i])), loss)
        return found

    def _whose(self, entries: Ints, maker: Ints, own: Ints) -> Ints:
        """Microbatch of each entry's input, expected from ``maker``; a mixture otherwise."""
        source = self._source[entries]
        value = np.where(source == _ITSELF, maker * self._width + own, self._value[source])
        found = value - maker * self._width
        for i in np.flatnonzero((found < 0) | (found >= self._width)).tolist():
            found[i] = self._width + self._mixture((3, int(value[i])), self._words(int(value[i])))
        return found

    def _mixture(self, key: tuple[int, ...], text: str) -> int:
        """Number the mixture with ``key``; ``text`` describes it, if short enough."""
        number = self._mixtures.setdefault(key, len(self._texts))
        if number == len(self._texts):
            self._texts.append(text if len(text) <= 2 * LONGEST else "what is mixed of many")
        return number

    def _of(self, whose: int) -> str:
        return f"microbatch {whose}" if whose < self._width else self._texts[whose - self._width]

    def _words(self, value: int) -> str:
        """Describe a value."""
        if value >= 2 * self._size:
            return self._texts[value - 2 * self._size]
        stage, microbatch = divmod(value, self._width)
        if stage < self._stages:
            return f"stage {stage}'s output of microbatch {microbatch}"
        return f"the gradient that stage {stage - self._stages} hands back of microbatch {microbatch}"
