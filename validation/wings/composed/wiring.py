"""Loose ends of a chain: inputs without a sender, outputs without a receiver, unidentified calls."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypeVar

from pipeproof.core.cause import join_numbers
from pipeproof.core.ledger import Ledger
from pipeproof.core.observe.observed import UNKNOWN_MICROBATCH
from pipeproof.core.reason import Reason
from pipeproof.pipeline.sizes import some
from pipeproof.wings.composed.chain import Chain, input_of, place_of
from pipeproof.wings.composed.link import Data, Input, Sources, StageCalls, forms, is_target

_LAW = "boundaries"
Value = TypeVar("Value")
_EQUAL = "gradients cannot be traced to one of these equal outputs: check a later step, in which they differ"
_UNUSED_TARGET = (
    "without loss_fn= a stage needs the target, and none was given it: call one with it, or pass None for it"
)
_HIDDEN = (
    "stage {stage} is given or gives {what}, in which tensors are not observed: pass plain tensors, in tuples, lists "
    "or mappings, or register its class with torch.utils._pytree"
)
_ATTRIBUTE = (
    "stage {stage} has a tensor that wants a gradient in its attribute {what}: what is passed on there is not "
    "observed; call the stage's module with it, or make it a parameter"
)
_GIVES_NOTHING = "stage {stage} gave no tensor that is observed: let its module give them in tuples, lists or mappings"
_SEVERAL = (
    "stage {stage}'s module is called on several inputs of each microbatch, or on what it gave itself: pass one that "
    "makes all of its calls for a microbatch in one"
)
_IDLE = "calls that add nothing: {} of stage {}"
_EXTRA = "stage {} was called {} times for {} microbatch{}: the first call is none of theirs"
_ADDED = "; it had a backward, and gradients are wrong: pass all microbatches that the step runs, or let it add nothing"
_TOO_OFTEN = (
    "stage {stage} was called {times} for {count}, and these calls were on nothing that was sent: {what}; pass all "
    "microbatches that the step runs, or say warmup"
)
_TOO_SELDOM = (
    "stage {stage} was called {times} for {count}, also on inputs without a sender: if that is several at once, "
    "call it for each microbatch in the step that is checked"
)


def enter_wiring(chain: Chain, ledger: Ledger, *, loss_inside: bool = False) -> None:
    """Enter inputs without a sender, outputs without a receiver, and consistent exchanges.

    ``loss_inside``: the last stage makes the loss, so targets must reach a stage. Content identifies inputs, so an
    exchange in every call between inputs of one form stays hidden.
    """
    rows = dict[tuple[str, Reason | None], list[str]]()
    for name, why, reason in _open(chain.sources, loss_inside=loss_inside):
        rows.setdefault((why, reason), []).append(name)
    for (why, reason), names in rows.items():
        if reason is not None:
            ledger.leave_out(_LAW, names, why, reason)
        for name in names if reason is None else ():
            ledger.remark(_LAW, f"{name} {why}")


def _open(sources: Sources, *, loss_inside: bool) -> Iterator[tuple[str, str, Reason | None]]:
    """What is open: an input or a source, why, and the reason, if a fault may hide there."""
    wired, sent, last = sources.of_inputs, sources.sent, max(sources.stages)
    for stage, number in [one for one in sources.inputs if one not in wired]:
        of_targets = any(count for source, count in sources.votes[stage, number].items() if is_target(source))
        if sources.flows((stage, number)) or (loss_inside and of_targets):
            yield input_of(stage, number), "it has no known sender", Reason.WIRING
        else:
            yield input_of(stage, number), "is no stage's and no data: it was taken as it came", None
    contents = {source: [one.digest for one in those] for source, those in sent.items()}
    of_loss, times = [those for source, those in contents.items() if is_target(source)], Counter(wired.values())
    for source in [one for one in sent if one not in wired.values() and one[0] != last]:
        name, is_datum = place_of(source), source[0] is None
        if is_target(source) or (is_datum and contents[source] in of_loss):
            if loss_inside and is_target(source):
                yield name, _UNUSED_TARGET, Reason.WIRING
        elif sources.gives(source):
            yield name, "it has no known receiver", Reason.WIRING
        else:
            form, instead = forms(sent[source]), list[Input]()  # inputs without a sender, or with several candidates
            for at in sources.inputs:
                if (other := wired.get(at)) is not None:
                    fits = times[other] > 1 and other[0] == source[0] and forms(sent[other]) == form
                else:
                    fits = is_datum or ((source[0] or 0) < at[0] and forms(sources.came(at)) == form)
                instead += [at] if fits else []
            if instead:
                why = f"no stage was given it, and {input_of(*instead[0])} may be another in its place"
                yield name, why, Reason.WIRING
            elif is_datum:
                yield name, "went to no stage", None
    for output in sorted(sources.untold):
        yield place_of(output), _EQUAL, Reason.EQUAL_OUTPUTS
    known = sorted((at, source) for at, source in wired.items() if at not in sources.unsure)
    for (at, one), (to, other) in combinations(known, 2):
        alike = (at[0], one[0], forms(sent[one])) == (to[0], other[0], forms(sent[other]))
        if alike and one[1] > other[1]:
            message = f"are {place_of(one)} and {place_of(other)}: that order was taken as meant"
            yield f"inputs {at[1]} and {to[1]} of stage {at[0]}", message, None


def refusals(chain: Chain) -> Iterator[str]:
    """Yield reasons why the inputs or outputs of stages are unknown."""
    count, sources = chain.microbatches, chain.sources
    sent = {one.digest for source, those in sources.sent.items() if not is_target(source) for one in those}
    for stage, here in chain.stages.items():
        calls, times = here.calls, len(here.calls)
        given = [frozenset(one.digest for one in call.inputs) for call in calls]
        made = {one.digest for call in calls for one in call.outputs if one.norm and one not in call.inputs}
        own = any(map(made.intersection, given)) or sum(map(sent.issuperset, {*given})) >= 2 * count
        gives_nothing = stage != chain.last and not all(call.outputs or call.unread for call in calls)
        nobodys = [sent.isdisjoint(one) for one in given]
        strange = [k for k, (m, _) in enumerate(chain.calls(stage)) if m == UNKNOWN_MICROBATCH and nobodys[k]]
        table: Mapping[str, tuple[object, Reason]] = {
            _HIDDEN: (next((call.hidden for call in calls if call.hidden), ""), Reason.HIDDEN),
            _ATTRIBUTE: (next((call.attribute for call in calls if call.attribute), ""), Reason.HIDDEN),
            _GIVES_NOTHING: (gives_nothing, Reason.HIDDEN),
            _TOO_OFTEN: (times > count and join_numbers(k + 1 for k in strange), Reason.CALLS),
            _TOO_SELDOM: (0 < times < count and all(given) and any(nobodys), Reason.CALLS),
            _SEVERAL: (times >= 2 * count > 0 and own, Reason.CALLS),
        }
        counts = {"times": some(times, "time"), "count": some(count, "microbatch")}
        for sentence, (holds, reason) in table.items():
            if holds:
                yield reason.doubt(sentence.format(stage=stage, what=holds, **counts))


@dataclass(frozen=True)
class ExtraCalls:
    """Places of calls without a microbatch, by stage, each with another call in its place.

    ``idle``: calls with all-zero gradients, as from padding. ``first``: an additional first call, for example to learn
    shapes, with any gradient; the accumulated gradients decide.
    """

    stages: Mapping[int, StageCalls]
    microbatches: int
    idle: Mapping[int, frozenset[int]]
    first: Mapping[int, frozenset[int]]

    @classmethod
    def among(cls, stages: Mapping[int, StageCalls], data: Data) -> "ExtraCalls":
        """Find the extra calls of ``stages``; ``data`` is each microbatch's content."""
        chain, idle, first = Chain(stages, data), dict[int, frozenset[int]](), dict[int, frozenset[int]]()
        for stage in stages:
            calls = chain.calls(stage)
            adding = {m for m, call in calls if not call.is_idle}
            idle[stage] = frozenset(k for k, (m, call) in enumerate(calls) if call.is_idle and m in adding)
            left = [k for k in range(len(calls)) if k not in idle[stage]]
            others = {calls[k][0]: calls[k][1].output_gradients for k in left[1:]}
            whole = len(left) == len(data) + 1 and others.keys() == {*range(len(data))}
            again = any(others.get(calls[k][0]) == calls[k][1].output_gradients for k in left[:1])
            first[stage] = frozenset(left[:1] if whole and not again else ())
        return cls(stages, len(data), idle, first)

    @property
    def without(self) -> dict[int, StageCalls]:
        """Return the stages without extra calls."""
        return {
            stage: replace(here, calls=tuple(self.without_extra(stage, here.calls)))
            for stage, here in self.stages.items()
        }

    def without_extra(self, stage: int, every: Sequence[Value]) -> list[Value]:
        """Return the entries of ``every`` that belong to microbatches' calls."""
        return [one for k, one in enumerate(every) if k not in self.idle[stage] | self.first[stage]]

    def enter(self, ledger: Ledger, own: Iterable[int]) -> None:
        """Report extra calls of a rank's ``own`` stages after the comparison of gradients in ``ledger``."""
        wrong = {one.stage for one in ledger.mismatches if one.law in ("gradient", "presence")}
        for stage in sorted(own):
            calls = self.stages[stage].calls
            if self.idle[stage]:
                ledger.remark("microbatches", _IDLE.format(len(self.idle[stage]), stage))
            for k in self.first[stage]:
                message = _EXTRA.format(stage, len(calls), self.microbatches, "es" * (self.microbatches != 1))
                ledger.remark("microbatches", message + _ADDED * (stage in wrong and calls[k].trained))
