"""A user's step, run on a world's ranks, and the check of the stages that they hand back.

The contract, the model's names, a trace, or the ranks give each module's stage.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.initial_weights import FirstUse
from pipeproof.core.observe.posted_messages import Message, Sent, list_sent, note_messages
from pipeproof.core.observe.shards import InShards, local_tensor
from pipeproof.core.observe.watching import Watcher, watching
from pipeproof.core.reason import Reason
from pipeproof.core.replicas import Replicas
from pipeproof.core.tolerance import same_bits
from pipeproof.core.verdict import Verdict
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.sizes import some
from pipeproof.records.rank_part import AdapterNames
from pipeproof.records.step_record import Pairs
from pipeproof.whitebox.handed_back import HandBackError, StepResult, understood
from pipeproof.whitebox.matching import rename
from pipeproof.whitebox.rank import ModulePart, Origin, RankOrder, parameters_of
from pipeproof.whitebox.stages_in_order import Flow, PlacedStage, in_order
from pipeproof.wings.composed.check import ComposedCheck
from pipeproof.wings.composed.composed import AgainstItself
from pipeproof.worlds.accelerator import deterministic
from pipeproof.worlds.side_store import exchange
from pipeproof.worlds.worker import RankContext

_NAMED = "names= gives each weight its name in the whole model, of a name, a rank and the module's number there"
_MODEL = (
    "no whole model is built here: the step is given what build= of StageByStage makes on the meta device, or None; "
    "let it make the weights of its own stages"
)
_UNKNOWN = (
    "{} handed back modules, and nothing tells in which order they are the stages: say stages= of the contract, give "
    "StageByStage a build=, which makes the whole model on the meta device, or hand back a trace"
)
_STRANGER = (
    "{} handed back a module with {}, and the model of build= does not tell which stage that is: say names=, if its "
    "weights have other names there, or stages= of the contract"
)


@dataclass(frozen=True)
class StageByStage(AgainstItself):
    """Check a step link by link, without a reference: each rank needs only its part of the model.

    Its fields are documented at ``AgainstItself``: ``StageByStage(loss_fn, build=build_model)``.
    """

    def check_of(
        self, modules: nn.Module | Mapping[int, nn.Module], microbatches: Pairs | None, **options: Any
    ) -> ComposedCheck:
        return ComposedCheck(modules, microbatches, against=self, **options)

    def check_on_rank(self, context: RankContext, order: RankOrder, bound_s: float) -> Verdict:
        __tracebackhide__ = True  # a failure's traceback begins in the user's own code
        deterministic(context.device)
        given, own = (order.operations(context.rank, context.device)[0].microbatches for _ in range(2))
        model, watcher = order.build(), Watcher(keep=self.keep)
        origin = Origin(nn.Module() if model is None else model)
        with note_messages(), watching(watcher), FirstUse(()) as first_use:
            try:
                handed = understood(order.step(model, own), order.name, order.contract)
            except Exception as error:
                if ("NoneType" if model is None else "meta") in str(error):
                    error.add_note(_MODEL)
                raise
            finally:
                watcher.close()
            sent = list_sent()
        whole = [] if model is None else [name for name, _ in model.named_parameters(remove_duplicate=False)]
        stages, names = _stages_of(order, handed, watcher, origin, whole=whole, sent=sent, bound_s=bound_s)
        said = replace(self.contract, accumulation=handed.accumulation, loss_scale=handed.loss_scale)
        named = AdapterNames(lambda stage, name: names[stage].get(name, name), cure=_NAMED)
        check = ComposedCheck(stages, given, against=replace(self, contract=said), rename=named, timeout_s=bound_s)
        weights = {
            named(stage, name): one
            for stage, module in stages.items()
            for name, one in module.named_parameters(remove_duplicate=False)
        }
        begun = {
            name: one for name, weight in weights.items() if (one := first_use.initial_gradient(weight)) is not None
        }
        known = handed.by_parameter  # None: in ``.grad``
        with _as_begun(stages, first_use):
            check.take(watcher)
            if why := first_use.weights.broken or first_use.sums.broken:
                check.refuse(f"what the step began with was not observed: {why}")
            with check:
                check.begin(begun)
                check.gradients(None if known is None else {name: known.get(id(one)) for name, one in weights.items()})
                check.report(losses=handed.by_microbatch or None, loss=handed.whole_loss, norm=handed.norm)
        return check.verdict


def _stages_of(
    order: RankOrder,
    handed: StepResult,
    watcher: Watcher,
    origin: Origin,
    *,
    whole: Sequence[str],
    sent: Mapping[Message, Sent],
    bound_s: float,
) -> tuple[dict[int, nn.Module], dict[int, dict[str, str]]]:
    """The watched modules by the number of their stage, and their parameters' names in the whole model, by name.

    ``whole``: the model's names, if they are known. ``sent``: this rank's messages.
    """
    contract, ranks = order.contract, exchange()
    modules = [found for one in handed.modules if (found := watcher.find_watched(one)) is not None]
    unwatched = [k for k, one in enumerate(handed.modules) if watcher.find_watched(one) is None]
    alone = handed.gradients is not None and not handed.modules
    by_index = any(isinstance(one, tuple) for one in (handed.by_parameter or {}).values())
    first = f"module {min(unwatched, default=0)}, which was not watched: call watch(module) before its first call"
    wrong = {  # what cannot be rerun or compared
        "gradients alone: hand back its modules, too, for they run again": alone,
        first: unwatched,
        "outputs, which no whole model is there to give: leave them out": handed.outputs,
        "a part of a gradient by its index: expected a FlatShard": by_index,
    }
    for what in (what for what, found in wrong.items() if found):
        raise HandBackError(f"{order.name} handed back {what}")
    said = handed.names if contract.names is None else contract.names
    names = [
        {
            name: rename(said, name, rank=ranks.rank, chunk=chunk) or origin.name(holder, leaf, one) or name
            for name, holder, leaf, one in parameters_of(module)
        }
        for chunk, module in enumerate(modules)
    ]
    calls = [watcher.calls(module, warmup=contract.warmup) or [] for module in modules]
    traced, flows = stages_of_actions(handed.actions(ranks.rank), calls), [Flow.of(one) for one in calls]
    mine = Modules([frozenset(one.values()) for one in names], flows, traced)
    every: list[tuple[Modules, Mapping[Message, Sent]]] = ranks.gather(
        (mine, sent), what="the modules that were handed back", bound_s=bound_s
    )
    sent = {message: what for _, messages in every for message, what in messages.items()}
    for call in (call for one in calls for call in one):
        call.came = {tensor: came.join(sent) for tensor, came in call.came.items()}
    known = order.replicas, whole, order.name, contract.stages
    own = stage_numbers([one for one, _ in every], *known)[ranks.rank]
    if len({*own}) < len(modules):
        raise HandBackError(f"{order.name} handed back a stage twice: expected each of its modules once")
    return dict(zip(own, modules, strict=True)), dict(zip(own, names, strict=True))


@contextmanager
def _as_begun(stages: Mapping[int, nn.Module], first_use: FirstUse) -> Iterator[None]:
    """Set weights to their initial values while open."""
    left = list[tuple[Tensor, Tensor]]()
    with torch.no_grad():
        for module in stages.values():
            for _, holder, leaf, one in parameters_of(module):
                if isinstance(one, InShards):
                    begun = first_use.part_of(one)
                else:
                    begun = None if (observed := first_use.of(one, holder, leaf)) is None else observed.value
                here = local_tensor(one).detach()
                if begun is not None and not same_bits(begun, here.cpu()):
                    left.append((here, here.clone()))
                    here.copy_(begun)
    try:
        yield
    finally:
        for here, as_left in left:
            here.copy_(as_left)


@dataclass(frozen=True)
class Modules:
    """A rank's modules: the ``names`` of each module's parameters in the whole model, and its tensors.

    ``traced``: each module's stage in a trace; None without one.
    """

    names: Sequence[frozenset[str]]
    flows: Sequence[Flow] = ()
    traced: Sequence[int] | None = None


def stages_of_actions(actions: Sequence[Action] | None, calls: Sequence[Sequence[Call]]) -> list[int] | None:
    """Return each module's stage, if ``actions`` has a forward for each of its ``calls``."""
    forwards = [action.stage for action in actions or () if action.kind is Kind.FORWARD]
    order = sorted((call.began or 0, number) for number, own in enumerate(calls) for call in own)
    if len(forwards) != len(order):
        return None
    found = [{stage for stage, (_, at) in zip(forwards, order, strict=True) if at == k} for k in range(len(calls))]
    return [min(stages) for stages in found] if all(len(stages) == 1 for stages in found) else None


def stage_numbers(
    every: Sequence[Modules], replicas: Replicas, whole: Collection[str], step: str, said: Sequence[Sequence[int]] = ()
) -> Sequence[Sequence[int]]:
    """Number the stage of each module on ``every`` rank.

    ``whole``: the model's names in order, if known. ``said``: a pipeline's stages by rank, from the contract. Raises
    ``HandBackError`` if the stages remain unknown, or contradict ``said``.
    """
    places, known = replicas.places, frozenset(whole)
    if said:
        for rank, (one, place) in enumerate(zip(every, places, strict=True)):
            own = [number for numbers in said[place : place + 1] for number in numbers]
            if len(own) != len(one.names) or one.traced not in (None, own):
                seen = some(len(one.names), "module") if one.traced is None else f"the stages {one.traced}"
                what = f"has {own} for rank {rank}, which handed back {seen}"
                raise HandBackError(f"stages of the contract {what}: mend one")
        return [[number for numbers in said[place : place + 1] for number in numbers] for place in places]
    if whole:  # by the order of names in the model; replicas share them
        found = dict[frozenset[str], PlacedStage]()
        for rank, chunk, names in ((rank, *pair) for rank, one in enumerate(every) for pair in enumerate(one.names)):
            if not (mine := names & known):
                raise HandBackError(Reason.STAGES.doubt(_STRANGER.format(step, min(names, default="no weights"))))
            named = dict(enumerate(sorted(mine)))
            found.setdefault(mine, PlacedStage(len(found), rank, ModulePart((), ()), named, {}, chunk))
        ordered = in_order([*found.values()], [*whole], frozenset, lambda *_: False)
        index = {stage.held: stage.index for stage in ordered}
        return [[index[names & known] for names in one.names] for one in every]
    if all(one.traced is not None for one in every):
        return [one.traced or () for one in every]
    # By rank, if each has at most one module and tensors follow the ranks.
    order = sorted({place for place, one in zip(places, every, strict=True) if one.names})
    numbers = [[order.index(place) for _ in one.names] for place, one in zip(places, every, strict=True)]
    flows = [(own[0], one.flows[0]) for own, one in zip(numbers, every, strict=True) if own]
    back = any(stage > other and flow.feeds(its) for stage, flow in flows for other, its in flows)
    if back or any(len(own) > 1 for own in numbers):
        raise HandBackError(Reason.STAGES.doubt(_UNKNOWN.format(step)))
    return numbers
