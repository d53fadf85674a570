"""A step of a user's own, run on the ranks of a world and then held against itself, link by link."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from pipeproof.core.tolerance import same_bits
from pipeproof.core.verdict import Verdict
from pipeproof.foreign.flow import Flow
from pipeproof.foreign.handed_back import FlatShard, HandBackError, HandedBack, understood
from pipeproof.foreign.matching import renamed
from pipeproof.foreign.rank import Origin, RankOrder, parameters_of
from pipeproof.observers.initial_weights import FirstUse
from pipeproof.observers.shards import InShards, held_here
from pipeproof.observers.watching import Watcher, watching
from pipeproof.records.rank_part import AdapterNames, Rename
from pipeproof.records.step_record import Pairs
from pipeproof.wings.composed.check import ComposedCheck
from pipeproof.wings.composed.composed import AgainstItself
from pipeproof.wings.composed.stage_numbers import Modules, stage_numbers, told_by
from pipeproof.worlds.accelerator import deterministic
from pipeproof.worlds.posted_messages import Message, Sent, noted_messages, sent_messages
from pipeproof.worlds.side_store import exchange
from pipeproof.worlds.worker import RankContext

_NAMED = "names= gives each weight its name in the whole model, of a name, a rank and the module's number there"
_MODEL = (
    "nobody builds the whole model here: the step is given what build= of Composed makes on the meta device, or None; "
    "let it make the weights of its own stages"
)


@dataclass(frozen=True)
class Composed(AgainstItself):
    """A step is held against itself, link by link, so that no rank needs more of the model than it has.

    It is given what ``AgainstItself`` has, which says what each field means: ``Composed(loss_fn, build=build_model)``.
    """

    def check_of(
        self,
        modules: nn.Module | Mapping[int, nn.Module],
        microbatches: Pairs | None,
        *,
        rename: Rename,
        timeout_s: float,
        turn: int,
    ) -> ComposedCheck:
        return ComposedCheck(modules, microbatches, against=self, rename=rename, timeout_s=timeout_s, turn=turn)

    def checked(self, context: RankContext, order: RankOrder, bound_s: float) -> Verdict:
        __tracebackhide__ = True  # what is told of a failure begins in the user's own code
        deterministic(context.device)
        given, own = (order.operations(context.rank, context.device)[0].microbatches for _ in range(2))
        model, watcher = order.build(), Watcher(keep=self.keep)
        origin = Origin(nn.Module() if model is None else model)
        with noted_messages(), watching(watcher), FirstUse(()) as first_use:
            try:
                handed = understood(order.step(model, own), order.name, order.contract)
            except Exception as error:
                if ("NoneType" if model is None else "meta") in str(error):
                    error.add_note(_MODEL)
                raise
            finally:
                watcher.close()
            made = _StepOnRank(context.rank, order, handed, origin, watcher, sent_messages())
        whole = [] if model is None else [name for name, _ in model.named_parameters(remove_duplicate=False)]
        stages = made.stages(whole, bound_s)
        said = replace(self.contract, accumulation=handed.accumulation, loss_scale=handed.loss_scale)
        named = AdapterNames(lambda stage, name: made.name(stages[stage], name), cure=_NAMED)
        check = ComposedCheck(stages, given, against=replace(self, contract=said), rename=named, timeout_s=bound_s)
        with _as_begun(stages, first_use):
            check.seen_by(watcher)
            if why := first_use.weights.broken or first_use.sums.broken:
                check.refuse(f"what the step began with was not seen: {why}")
            with check:
                check.begin(made.begun(stages, first_use))
                check.gradients(made.gradients(stages))
                check.report(losses=handed.by_microbatch or None, loss=handed.whole_loss, norm=handed.norm)
        return check.verdict


@dataclass(frozen=True)
class _StepOnRank:
    """What a step handed back on a rank, with what is known of its modules; ``sent``: the messages of this rank."""

    rank: int
    order: RankOrder
    handed: HandedBack
    origin: Origin
    watcher: Watcher
    sent: Mapping[Message, Sent]

    def stages(self, whole: Sequence[str], bound_s: float) -> dict[int, nn.Module]:
        """The watched modules by the number of their stage. ``whole``: the model's names, if they are known."""
        if wrong := next(self._wrong(), ""):
            raise HandBackError(f"{self.order.name} handed back {wrong}")
        modules, contract = self._modules, self.order.contract
        calls = [self.watcher.calls(module, warmup=contract.warmup) or [] for module in modules]
        names = [frozenset(self._names[id(module)].values()) for module in modules]
        mine = Modules(names, [Flow.of(one) for one in calls], told_by(self.handed.actions(self.rank), calls))
        every: list[tuple[Modules, Mapping[Message, Sent]]] = exchange().gather(
            (mine, self.sent), what="the modules that were handed back", bound_s=bound_s
        )
        sent = {message: what for _, messages in every for message, what in messages.items()}
        for call in (call for one in calls for call in one):
            call.came = {tensor: came.joined(sent) for tensor, came in call.came.items()}
        known = self.order.replicas, whole, self.order.name, contract.stages
        own = stage_numbers([one for one, _ in every], *known)[self.rank]
        if len({*own}) < len(modules):
            raise HandBackError(f"{self.order.name} handed back a stage twice: expected each of its modules once")
        return dict(zip(own, modules, strict=True))

    def _wrong(self) -> Iterator[str]:
        """What was handed back and cannot be run again, or compared."""
        handed = self.handed
        if not handed.modules and handed.gradients is not None:
            yield "gradients alone: hand back its modules, too, for they run again"
        for number, module in enumerate(handed.modules):
            if self.watcher.watched(module) is None:
                yield f"module {number}, which was not watched: call watch(module) before its first call"
        if handed.outputs:
            yield "outputs, which no whole model is there to give: leave them out"
        if any(isinstance(one, tuple) for one in (handed.by_parameter or {}).values()):
            yield "a part of a gradient by its index: expected a FlatShard"

    @cached_property
    def _modules(self) -> list[nn.Module]:
        return [found for one in self.handed.modules if (found := self.watcher.watched(one)) is not None]

    @cached_property
    def _names(self) -> dict[int, dict[str, str]]:
        """By the id of a watched module: what its parameters are called in the whole model, by their names in it."""
        said = self.handed.names if self.order.contract.names is None else self.order.contract.names
        return {
            id(module): {
                name: renamed(said, name, rank=self.rank, chunk=chunk) or self.origin.name(holder, leaf, one) or name
                for name, holder, leaf, one in parameters_of(module)
            }
            for chunk, module in enumerate(self._modules)
        }

    def name(self, module: nn.Module, name: str) -> str:
        """What a parameter of a watched ``module`` is called in the whole model."""
        return self._names[id(module)].get(name, name)

    def begun(self, stages: Mapping[int, nn.Module], first_use: FirstUse) -> dict[str, Tensor]:
        """What gradients were added to, where that was not zero."""
        found = {name: first_use.begun(one) for name, one in self._parameters(stages)}
        return {name: one for name, one in found.items() if one is not None}

    def gradients(self, stages: Mapping[int, nn.Module]) -> dict[str, Tensor | FlatShard | None] | None:
        """Those that were handed back; None where they are in ``.grad``."""
        known = self.handed.by_parameter
        return None if known is None else {name: known.get(id(one)) for name, one in self._parameters(stages)}

    def _parameters(self, stages: Mapping[int, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
        for module in stages.values():
            for name, one in module.named_parameters(remove_duplicate=False):
                yield self.name(module, name), one


@contextmanager
def _as_begun(stages: Mapping[int, nn.Module], first_use: FirstUse) -> Iterator[None]:
    """While this is open, weights are those that the step began with."""
    left = list[tuple[Tensor, Tensor]]()
    with torch.no_grad():
        for module in stages.values():
            for _, holder, leaf, one in parameters_of(module):
                begun, here = _first(first_use, holder, leaf, one), held_here(one).detach()
                if begun is not None and not same_bits(begun, here.cpu()):
                    left.append((here, here.clone()))
                    here.copy_(begun)
    try:
        yield
    finally:
        for here, as_left in left:
            here.copy_(as_left)


def _first(first_use: FirstUse, holder: nn.Module, leaf: str, parameter: nn.Parameter) -> Tensor | None:
    """What this rank had of a parameter when it was first used; None where nobody saw that."""
    if isinstance(parameter, InShards):
        return first_use.part_of(parameter)
    seen = first_use.of(parameter, holder, leaf)
    return None if seen is None else seen.value
