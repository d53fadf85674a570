"""Which stage each module is that ranks handed back: the contract says, or the model's names, a trace, or the ranks."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pipeproof.core.reason import Reason
from pipeproof.core.replicas import Replicas
from pipeproof.foreign.flow import Flow
from pipeproof.foreign.handed_back import HandBackError
from pipeproof.foreign.rank import ModulePart
from pipeproof.foreign.stages_in_order import PlacedStage, in_order
from pipeproof.observers.calls import Call
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.sizes import some

_UNKNOWN = (
    "{} handed back modules, and nothing tells in which order they are the stages: say stages= of the contract, give "
    "Composed a build=, which makes the whole model on the meta device, or hand back a trace"
)
_STRANGER = (
    "{} handed back a module with {}, and the model of build= does not tell which stage that is: say names=, if its "
    "weights have other names there, or stages= of the contract"
)


@dataclass(frozen=True)
class Modules:
    """What a rank handed back: the ``names`` of each module's parameters in the whole model, and what passed it.

    ``told``: the stage of each, as a trace has it; None where there is none.
    """

    names: Sequence[frozenset[str]]
    flows: Sequence[Flow] = ()
    told: Sequence[int] | None = None


def told_by(actions: Sequence[Action] | None, calls: Sequence[Sequence[Call]]) -> list[int] | None:
    """The stage of each module, where a rank's ``actions`` have a forward for each of the modules' ``calls``."""
    forwards = [action.stage for action in actions or () if action.kind is Kind.FORWARD]
    order = sorted((call.began or 0, number) for number, own in enumerate(calls) for call in own)
    if len(forwards) != len(order):
        return None
    found = [{stage for stage, (_, at) in zip(forwards, order, strict=True) if at == k} for k in range(len(calls))]
    return [min(stages) for stages in found] if all(len(stages) == 1 for stages in found) else None


def stage_numbers(
    every: Sequence[Modules], replicas: Replicas, whole: Collection[str], step: str, said: Sequence[Sequence[int]] = ()
) -> Sequence[Sequence[int]]:
    """The stage of each module of ``every`` rank.

    ``whole``: the model's names in order, where that is known. ``said``: what the contract says of a pipeline's ranks.
    Raises ``HandBackError`` where nothing tells, or ``said`` is otherwise than what was handed back.
    """
    if said:
        both = zip(every, replicas.places, strict=True)
        return [_declared(rank, one, said[place : place + 1]) for rank, (one, place) in enumerate(both)]
    if whole:
        return _by_names(every, whole, step)
    if all(one.told is not None for one in every):
        return [one.told or () for one in every]
    return _by_ranks(every, replicas.places, step)


def _declared(rank: int, one: Modules, said: Sequence[Sequence[int]]) -> Sequence[int]:
    """The numbers that the contract has for ``rank``; none where ``said`` is empty."""
    own = [number for numbers in said for number in numbers]
    if len(own) != len(one.names) or one.told not in (None, own):
        seen = some(len(one.names), "module") if one.told is None else f"the stages {one.told}"
        raise HandBackError(f"stages of the contract has {own} for rank {rank}, which handed back {seen}: mend one")
    return own


def _by_names(every: Sequence[Modules], whole: Collection[str], step: str) -> list[list[int]]:
    """By the order in which the model has the names of each; of replicas all have the same."""
    known = frozenset(whole)
    found = dict[frozenset[str], PlacedStage]()
    for rank, one in enumerate(every):
        for chunk, names in enumerate(one.names):
            if not (own := names & known):
                raise HandBackError(Reason.STAGES.doubt(_STRANGER.format(step, min(names, default="no weights"))))
            named = dict(enumerate(sorted(own)))
            found.setdefault(own, PlacedStage(len(found), rank, ModulePart((), ()), named, {}, chunk))
    index = {stage.held: stage.index for stage in in_order([*found.values()], [*whole], frozenset, lambda *_: False)}
    return [[index[names & known] for names in one.names] for one in every]


def _by_ranks(every: Sequence[Modules], places: Sequence[int], step: str) -> list[list[int]]:
    """As ranks are numbered, if each has one module at most, and tensors went no other way."""
    order = sorted({place for place, one in zip(places, every, strict=True) if one.names})
    numbers = [[order.index(place) for _ in one.names] for place, one in zip(places, every, strict=True)]
    flows = [(own[0], one.flows[0]) for own, one in zip(numbers, every, strict=True) if own]
    back = any(stage > other and flow.feeds(its) for stage, flow in flows for other, its in flows)
    if back or any(len(own) > 1 for own in numbers):
        raise HandBackError(Reason.STAGES.doubt(_UNKNOWN.format(step)))
    return numbers
