"""Which stage each module is that ranks handed back: by the model's names, by what the runtime told, or by their ranks.

Names and calls are of one rank's modules, in the order in which it handed them back.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pipeproof.diagnosis.members import Replicas
from pipeproof.foreign.handed_back import HandBackError
from pipeproof.foreign.rank import Part
from pipeproof.foreign.stages_in_order import Stage, in_order
from pipeproof.observers.calls import Call
from pipeproof.pipeline.action import Action, Kind

_UNKNOWN = (
    "{} handed back {} modules, and nothing tells which stages they are: give Composed a build=, which makes the whole "
    "model on the meta device; or hand back a trace, as torch_pipelining.step does"
)
_NO_NAMES = "they have no parameters; let a module with parameters be a part of each stage"


@dataclass(frozen=True)
class Modules:
    """What a rank handed back: the ``names`` of each module's parameters in the whole model.

    ``told``: the stage of each, as the runtime says; None where it does not.
    """

    names: Sequence[frozenset[str]]
    told: Sequence[int] | None = None


def told_by(actions: Sequence[Action] | None, calls: Sequence[Sequence[Call]]) -> list[int] | None:
    """The stage of each module, where a rank's ``actions`` have a forward for each of the modules' ``calls``."""
    forwards = [action.stage for action in actions or () if action.kind is Kind.FORWARD]
    order = sorted((call.began or 0, number) for number, own in enumerate(calls) for call in own)
    if len(forwards) != len(order):
        return None
    found = [{stage for stage, (_, at) in zip(forwards, order, strict=True) if at == k} for k in range(len(calls))]
    return [min(stages) for stages in found] if all(len(stages) == 1 for stages in found) else None


def stage_numbers(every: Sequence[Modules], replicas: Replicas, whole: Collection[str], step: str) -> list[list[int]]:
    """The stage of each module of ``every`` rank. ``whole``: the model's names in order, where that is known.

    Raises ``HandBackError`` where nothing tells.
    """
    if whole:
        return _by_names(every, whole, step)
    if all(one.told is not None for one in every):
        return [list(one.told or ()) for one in every]
    if many := next((one for one in every if len(one.names) > 1), None):
        raise HandBackError(_UNKNOWN.format(step, len(many.names)))
    places = _places([bool(one.names) for one in every], replicas)
    return [[place] * len(one.names) for place, one in zip(places, every, strict=True)]


def _by_names(every: Sequence[Modules], whole: Collection[str], step: str) -> list[list[int]]:
    """By the order in which the model has the names of each; of replicas all have the same."""
    known = {*whole}
    found = dict[frozenset[str], Stage]()
    strangers = list[frozenset[str]]()
    for rank, one in enumerate(every):
        for chunk, held in enumerate(one.names):
            own = held & known
            strangers += [] if own else [held]
            found.setdefault(own, Stage(len(found), rank, Part((), ()), dict(enumerate(sorted(own))), {}, chunk))
    if len(strangers) > 1:
        names = sorted(strangers[0] | strangers[1])
        why = f"the model of build= does not have {names[0]}: say its name there, by names=" if names else _NO_NAMES
        raise HandBackError(f"{step} handed back several modules whose place nothing tells: {why}")
    index = {stage.held: stage.index for stage in in_order([*found.values()], [*whole], frozenset)}
    return [[index[held & known] for held in one.names] for one in every]


def _places(holding: Sequence[bool], replicas: Replicas) -> Sequence[int]:
    """The place of each rank along the pipeline of its replica, of those that hold anything."""
    if replicas.together:
        return replicas.together
    numbers: dict[int, int] = {}
    found = []
    for holds, replica in zip(holding, replicas.of, strict=True):
        found.append(numbers.get(replica, 0))
        numbers[replica] = found[-1] + holds
    return found
