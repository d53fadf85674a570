"""How a step's stages are wired: which inputs are known to be which output or datum, and what that leaves open."""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations

from pipeproof.core.cause import listed
from pipeproof.core.ledger import Ledger
from pipeproof.core.reason import Reason
from pipeproof.observers.observed import UNKNOWN_MICROBATCH
from pipeproof.pipeline.sizes import some
from pipeproof.wings.composed.chain import Chain, place_of
from pipeproof.wings.composed.sources import TARGETS, Source, is_target

_LAW = "boundaries"
_UNSURE = "{} are equal, so gradients cannot be traced to one of them: check a later step, in which they differ"
_UNUSED_TARGET = (
    "without loss_fn= a stage needs the target, and none was given it: call one with it, or pass None for it"
)


def enter_wiring(chain: Chain, ledger: Ledger, *, loss_inside: bool = False) -> None:
    """Enter which inputs nobody sent, what nobody received, and what was exchanged wherever it was given.

    ``loss_inside``: the last stage makes the loss, so that targets must have come to a stage.

    Inputs are known by their content. So one that is exchanged for another of its form in every call is not seen to be.
    """
    unplaced, unused = list(_unplaced(chain)), list(_unused(chain))
    data = [one for one in unused if one[0] is None]
    if any(not flows for _, _, flows in unplaced):  # it may have come as one of those
        ledger.leave_out(_LAW, [_name(one) for one in data], "no stage is known to have been given it", Reason.WIRING)
    for stage, number, flows in unplaced:
        name = f"input {number} of stage {stage}"
        if flows:
            ledger.leave_out(_LAW, [name], "nobody is known to have sent it", Reason.WIRING)
        else:
            ledger.remark(_LAW, f"{name} is no stage's and no data: it was taken as it came")
    lost = chain.sources.unreceived()
    ledger.leave_out(_LAW, [place_of(one) for one in lost], "nobody is known to have received it", Reason.WIRING)
    instead = dict(_instead(chain, [one for one in unused if one not in lost]))
    for source, other in instead.items():
        told = f"no stage was given it, and {_name(other)} went to several inputs"
        ledger.leave_out(_LAW, [_name(source)], told, Reason.WIRING)
    for source, name in _altered(chain, [one for one in unused if one not in lost and one not in instead]):
        told = f"no stage was given it, and {name}, which has its form, was sent by nobody"
        ledger.leave_out(_LAW, [_name(source)], told, Reason.WIRING)
    used = {*chain.sources.of_inputs.values()}
    targets = [_name(one) for one in chain.sources.sent if is_target(one) and one not in used]
    ledger.leave_out(_LAW, targets if loss_inside else [], _UNUSED_TARGET, Reason.WIRING)
    for one in data:
        if one not in instead:
            ledger.remark(_LAW, f"{_name(one)} went to no stage")
    for those in chain.sources.unsure.values():
        stages = sorted({stage for stage, _ in those})
        which = f"outputs of stages {listed(stages)}" if len(stages) > 1 else f"several outputs of stage {stages[0]}"
        ledger.doubt(_LAW, _UNSURE.format(which), Reason.EQUAL_OUTPUTS)
    for told in _exchanged(chain):
        ledger.remark(_LAW, told)


def refusals(chain: Chain) -> Iterator[str]:
    """Why it is not known what stages were called on, or what they give."""
    yield from gives_nothing(chain)
    yield from _called_too_often(chain)
    yield from _called_too_seldom(chain)
    for stage in _on_several_inputs(chain):
        yield several_calls(stage, "on several inputs of each microbatch")


def _on_several_inputs(chain: Chain) -> Iterator[int]:
    """The stages that were called several times for each microbatch, each time on something else that was sent."""
    sent = _sent(chain)
    for stage, seen in chain.stages.items():
        given = {tuple(one.digest for one in call.inputs) for call in seen.calls}
        if chain.microbatches and sum(sent.issuperset(one) for one in given) >= 2 * chain.microbatches:
            yield stage


def gives_nothing(chain: Chain) -> Iterator[str]:
    """Where a stage before the last gave no tensor, so that nobody saw what it sends: it may come out later."""
    for stage, seen in chain.stages.items():
        if stage != chain.last and any(not (call.outputs or call.unread) for call in seen.calls):
            told = f"stage {stage} gave no tensor that is seen: let its module give them in tuples, lists or mappings"
            yield Reason.HIDDEN.doubt(told)


def _called_too_often(chain: Chain) -> Iterator[str]:
    """Where stages were called more often than there are microbatches, on what nobody sent and no microbatch brings."""
    sent, count = _sent(chain), chain.microbatches
    for stage, seen in chain.stages.items():
        unknown = [m == UNKNOWN_MICROBATCH for m in chain.orders[stage].numbers]
        given = [{one.digest for one in call.inputs} for call in seen.calls]
        strange = [k + 1 for k, one in enumerate(given) if unknown[k] and sent.isdisjoint(one)]
        if strange and len(given) > count:
            told = f"stage {stage} was called {len(given)} times, and {count} microbatches were given"
            which = f"call {strange[0]}" if len(strange) == 1 else f"each of calls {listed(strange)}"
            told += (
                f": what {which} was given is none of theirs; pass all microbatches that the step runs, or say warmup"
            )
            yield Reason.CALLS.doubt(told)


def _called_too_seldom(chain: Chain) -> Iterator[str]:
    """Where stages had fewer calls than there are microbatches, and some on nothing that was sent: perhaps on several.

    Where all are on what was sent, microbatches are missing.
    """
    sent, count = _sent(chain), chain.microbatches
    for stage, seen in chain.stages.items():
        given = [{one.digest for one in call.inputs} for call in seen.calls]
        if 0 < len(given) < count and all(given) and any(map(sent.isdisjoint, given)):
            times = some(len(given), "time")
            told = f"stage {stage} was called {times} for {count} microbatches, also on what nobody sent"
            told += ": if that is several at once, call it for each microbatch in the step that is checked"
            yield Reason.CALLS.doubt(told)


def _sent(chain: Chain) -> set[bytes]:
    """The digests of all that stages put out and microbatches bring, but for targets."""
    return {one.digest for source, those in chain.sources.sent.items() if not is_target(source) for one in those}


def several_calls(stage: int, how: str) -> str:
    """That nobody knows which of a stage's calls is about which microbatch."""
    told = f"stage {stage}'s module is called {how}: pass one that makes all of its calls for a microbatch in one"
    return Reason.CALLS.doubt(told)


def _unplaced(chain: Chain) -> Iterator[tuple[int, int, bool]]:
    """The inputs of which nobody is known to have sent them: stage, number, and whether a gradient flows there."""
    for stage, number in chain.sources.places_in:
        if (stage, number) not in chain.sources.of_inputs:
            yield stage, number, any(number in call.needing for call in chain.stages[stage].calls)


def _unused(chain: Chain) -> Iterator[Source]:
    """The inputs of microbatches, and outputs of stages before the last, that are known to have come nowhere.

    An input that is a target, too, went into the loss.
    """
    used = set(chain.sources.of_inputs.values())
    again = {(stage, k) for stage, seen in chain.stages.items() for call in seen.calls for k in call.repeated}
    targets = [_contents(chain, source) for source in chain.sources.sent if is_target(source)]
    for source in chain.sources.sent:
        if source in used | again or source[0] == chain.last or is_target(source):
            continue
        if source[0] is not None or _contents(chain, source) not in targets:
            yield source


def _contents(chain: Chain, source: Source) -> list[bytes]:
    return [one.digest for one in chain.sources.sent[source]]


def _instead(chain: Chain, unused: list[Source]) -> Iterator[tuple[Source, Source]]:
    """Each of the ``unused`` with another of its form that went to several inputs: it may have come in its place."""
    several = [source for source, count in Counter(chain.sources.of_inputs.values()).items() if count > 1]
    for source in unused:
        forms = chain.sources.forms(source)
        other = next((one for one in several if one[0] == source[0] and chain.sources.forms(one) == forms), None)
        if other is not None:
            yield source, other


def _altered(chain: Chain, unused: list[Source]) -> Iterator[tuple[Source, str]]:
    """Each of the ``unused`` outputs with an input of its form, of a later stage, that nobody sent: it may be that.

    What is the same in every call may be a rank's own, as positions are. Then no stage need have sent any.
    """
    for stage, number, flows in _unplaced(chain):
        calls = [call for call in chain.stages[stage].calls if number < len(call.inputs)]
        forms = {(call.inputs[number].shape, call.inputs[number].dtype) for call in calls}
        for source in unused if not flows else ():
            if source[0] is not None and source[0] < stage and chain.sources.forms(source) == forms:
                yield source, f"input {number} of stage {stage}"


def _exchanged(chain: Chain) -> Iterator[str]:
    """Inputs of one form that come from one place, and in another order than there."""
    known = sorted((at, source) for at, source in chain.sources.of_inputs.items() if at not in chain.sources.unsure)
    for stage in chain.stages:
        own = [(number, source) for (of, number), source in known if of == stage]
        for (i, one), (j, other) in combinations(own, 2):
            if one[0] == other[0] and one[1] > other[1] and chain.sources.forms(one) == chain.sources.forms(other):
                yield (
                    f"inputs {i} and {j} of stage {stage} are {_name(one)} and {_name(other)}: that order was taken"
                    " as meant"
                )


def _name(source: Source) -> str:
    if source[0] is not None:
        return place_of(source)
    return f"target {source[1] - TARGETS}" if is_target(source) else f"input {source[1]} of the microbatches"
