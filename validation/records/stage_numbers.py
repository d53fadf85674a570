"""Which stage each module is that ranks handed back: by the model's names, by what the runtime told, or by what flowed.

Names and calls are of one rank's modules, in the order in which it handed them back.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import permutations

from pipeproof.diagnosis.members import Replicas
from pipeproof.foreign.flow import Flow
from pipeproof.foreign.handed_back import HandBackError
from pipeproof.foreign.rank import Part
from pipeproof.foreign.stages_in_order import Stage, in_order
from pipeproof.observers.calls import Call
from pipeproof.pipeline.action import Action, Kind

_UNKNOWN = (
    "{} handed back modules, and what passed between them does not tell in which order they are the stages: give "
    "Composed a build=, which makes the whole model on the meta device, or hand back a trace"
)
_AS_PASSED = "stages are in the order in which tensors passed them: with a build= of Composed, that is compared, too"
_NO_NAMES = "they have no parameters; let a module with parameters be a part of each stage"


@dataclass(frozen=True)
class Modules:
    """What a rank handed back: the ``names`` of each module's parameters in the whole model, and what passed it.

    ``told``: the stage of each, as the runtime says; None where it does not.
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


@dataclass(frozen=True)
class Numbered:
    """The stage of each module, by rank; ``note``: what that leaves open."""

    stages: Sequence[Sequence[int]]
    note: str = ""


def stage_numbers(every: Sequence[Modules], replicas: Replicas, whole: Collection[str], step: str) -> Numbered:
    """The stage of each module of ``every`` rank. ``whole``: the model's names in order, where that is known.

    Raises ``HandBackError`` where nothing tells.
    """
    if whole:
        return Numbered(_by_names(every, whole, step))
    if all(one.told is not None for one in every):
        return Numbered([one.told or () for one in every])
    return _by_flows(every, replicas.places, step)


def _by_names(every: Sequence[Modules], whole: Collection[str], step: str) -> list[list[int]]:
    """By the order in which the model has the names of each; of replicas all have the same."""
    known = {*whole}
    found = dict[frozenset[str], Stage]()
    strangers = list[frozenset[str]]()
    flows = dict[int, Flow]()
    for rank, one in enumerate(every):
        for chunk, (held, flow) in enumerate(zip(one.names, one.flows or [Flow()] * len(one.names), strict=True)):
            own = held & known
            flows.setdefault(found[own].index if own in found else len(found), flow)
            strangers += [] if own else [held]
            found.setdefault(own, Stage(len(found), rank, Part((), ()), dict(enumerate(sorted(own))), {}, chunk))
    if len(strangers) > 1:
        names = sorted(strangers[0] | strangers[1])
        why = f"the model of build= does not have {names[0]}: say its name there, by names=" if names else _NO_NAMES
        raise HandBackError(f"{step} handed back several modules whose place nothing tells: {why}")

    def fed(one: Stage, other: Stage) -> bool:
        return flows[one.index].feeds(flows[other.index])

    index = {stage.held: stage.index for stage in in_order([*found.values()], [*whole], frozenset, fed)}
    return [[index[held & known] for held in one.names] for one in every]


def _by_flows(every: Sequence[Modules], places: Sequence[int], step: str) -> Numbered:
    """As tensors went from one to another; where that is not seen, as ranks are numbered, if each has one module."""
    flows: dict[tuple[int, int], Flow] = {}
    for place, one in zip(places, every, strict=True):
        for at, flow in zip(((place, chunk) for chunk in range(len(one.names))), one.flows, strict=True):
            flows[at] = flows[at].with_another(flow) if at in flows else flow
    feeds = {(one, other) for one, other in permutations(flows, 2) if flows[one].feeds(flows[other])}
    order, left = list[tuple[int, int]](), dict.fromkeys(sorted(flows))
    while left:
        first = [at for at in left if not any((other, at) in feeds for other in left)]
        if len(first) != 1:
            break
        order += first
        del left[first[0]]
    if left:
        order = sorted(flows)
        against = any(order.index(one) > order.index(other) for one, other in feeds)
        if against or any(chunk for _, chunk in flows):
            raise HandBackError(_UNKNOWN.format(step))
    found = [[order.index((place, k)) for k in range(len(one.names))] for place, one in zip(places, every, strict=True)]
    return Numbered(found, _AS_PASSED if order != sorted(flows) or any(chunk for _, chunk in flows) else "")
