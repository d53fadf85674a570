"""A rank's job: run the user's step under observation, and return its results as values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeproof.core.contract import Contract
from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.digest import contents, digest
from pipeproof.core.observe.initial_weights import FirstUse, step_begins
from pipeproof.core.observe.posted_messages import Message, Sent, list_sent, note_messages
from pipeproof.core.observe.routes import RouteObserver, Routes
from pipeproof.core.observe.shards import InShards, Shard, find_shard, local_tensor, shard_of
from pipeproof.core.observe.watching import Watcher, watching
from pipeproof.core.replicas import Replicas
from pipeproof.pipeline.action import Action
from pipeproof.reference.accumulation import Accumulation
from pipeproof.reference.products import products_in, sorts_in
from pipeproof.whitebox.handed_back import (
    HandBackError,
    Operation,
    StepResult,
    in_parts,
    through_operations,
    understood,
)
from pipeproof.whitebox.matching import Local, rename
from pipeproof.worlds.accelerator import deterministic
from pipeproof.worlds.worker import RankContext

_MASTERS = "updates are not compared where the optimizer has copies of the weights in a wider type"
_GOES_ON = "updates are not compared where the optimizer had stepped before the step that is judged"
# Takes the model and microbatches; or, for several operations, the model and their iterator.
Step = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class RankOrder:
    """Instructions for all ranks: call ``step(build(), microbatches)``.

    known: reference parameter contents by name. replicas: in the first operation.
    """

    step: Step
    build: Callable[[], Any]
    microbatches: Sequence[Any]
    contract: Contract
    name: str
    known: Mapping[str, bytes]
    replicas: Replicas
    updates: bool = False  # compare weights after the step

    def operations(self, rank: int, device: str) -> list[Operation]:
        """Return ``rank``'s operations with private copies of its microbatches."""
        parts = self.contract.parts(len(self.microbatches))
        shares = [self.replicas.of_as_many(len(part)).share(rank) for part in parts]
        own = [[self.microbatches[part[m]] for m in share] for part, share in zip(parts, shares, strict=True)]
        there = tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), own)
        return [Operation(*one) for one in zip(self.contract.plan, there, strict=True)]


@dataclass(frozen=True)
class ModulePart:
    """A returned module, or all gradients returned by name, in parameter order.

    values: starting weights that match no reference parameter. weights: sharded weights, with position and local part.
    calls: None if unwatched or unobserved; missed: a likely reason. shards: gradient positions, for partial gradients.
    members: ranks with this stage, each with its part, after joining; calls then belong to the first line, copies to
    further lines by number. lacks: parameters that other members have. after: weights after the step with their
    position (None: whole), if compared. begun: nonzero starting gradients. buffers: the module's, after the step.
    later: in a later operation, locals have first contents, and values all weights in use. routes: router choices.
    late: parameters that ranks write after the operation, at their next use.
    """

    locals: tuple[Local, ...]
    gradients: tuple[Tensor | None, ...]
    values: Mapping[int, Tensor] = field(default_factory=dict)
    calls: tuple[Call, ...] | None = None
    shards: Mapping[int, Shard] = field(default_factory=dict)
    members: tuple[tuple[int, "ModulePart"], ...] = ()
    copies: Mapping[int, tuple[Call, ...]] = field(default_factory=dict)
    missed: str = ""
    lacks: frozenset[int] = frozenset()
    weights: Mapping[int, tuple[Shard, Tensor]] = field(default_factory=dict)
    after: Mapping[int, tuple[Shard | None, Tensor]] = field(default_factory=dict)
    begun: Mapping[int, Tensor] = field(default_factory=dict)
    buffers: tuple[tuple[Local, Tensor], ...] = ()
    later: bool = False
    routes: Routes = field(default_factory=dict)
    late: frozenset[int] = frozenset()

    @property
    def nameless(self) -> bool:
        """True if the rank returned gradients without modules, so weights are unknown."""
        return all(one.content is None and one.identical is None for one in self.locals)


@dataclass(frozen=True)
class RankMade:
    """One rank's results.

    weights: contents of this rank's reference, if they differ from the known ones. given: microbatch digests. share:
    microbatches to train on. sent: its messages with user lines. line: index among ranks with the same stages and data.
    max_norm: clipping norm. unlike: why its update differs from the reference optimizer's. accumulation, outputs,
    loss_scale: as returned. products: rounding of fp32 products on its device, as in ``products_in``. unseen: by law,
    why observation is incomplete.
    """

    parts: tuple[ModulePart, ...]
    losses: tuple[float, ...]
    loss: float | None
    norm: float | None
    actions: tuple[Action, ...] | None
    weights: Mapping[str, bytes]
    given: tuple[tuple[bytes, ...], ...] = ()
    share: tuple[int, ...] | None = None
    sent: Mapping[Message, Sent] = field(default_factory=dict)
    line: int = 0
    max_norm: float | None = None
    unlike: str = ""
    accumulation: Accumulation | None = None
    outputs: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)
    loss_scale: float | None = None
    products: Mapping[str, str] = field(default_factory=dict)
    unseen: Mapping[str, str] = field(default_factory=dict)


def run_step(context: RankContext, order: RankOrder) -> tuple[RankMade, ...]:
    """Run one rank's part in a validation, by operation; a job for ``World.run``. Raises the user step's errors."""
    __tracebackhide__ = True  # failure reports start in user code
    deterministic(context.device)
    model = order.build().to(context.device).train()
    origin, expected = Origin(model), order.operations(context.rank, context.device)
    routing = RouteObserver(tuple(order.contract.routers), model)
    with note_messages(), watching() as watcher, FirstUse(order.known.values()) as first_use, routing.open():
        collect = _Collector(context.rank, order, origin, first_use, watcher, routing)
        if not order.contract.operations:
            made = [collect.collect_made(order.step(model, expected[0].microbatches))]
        else:
            results = through_operations(partial(order.step, model), expected, collect.begins, step=order.name)
            made = [collect.collect_made(result) for result in results]
    products = products_in(context.device, sorts_in(model))
    return tuple(replace(one, products=products) for one in made)


def digests(microbatches: Sequence[Any]) -> tuple[tuple[bytes, ...], ...]:
    """Digest each microbatch's tensors."""
    return tuple(tuple(digest(leaf) for leaf in tree_leaves(one) if isinstance(leaf, Tensor)) for one in microbatches)


class Origin:
    """Remembers the step's model parameters, to recognise them as objects."""

    def __init__(self, model: nn.Module) -> None:
        # Keeps all objects, so that replaced ones cannot lend their id.
        self._kept = [*model.modules(), *model.parameters()]
        self._by_holder: dict[tuple[int, str], str] = {}
        self._by_parameter: dict[int, str] = {}
        for name, module, leaf, parameter in parameters_of(model):
            self._by_holder.setdefault((id(module), leaf), name)
            self._by_parameter.setdefault(id(parameter), name)
        for name, module, leaf, _ in _list_held(model, "_buffers"):
            self._by_holder.setdefault((id(module), leaf), name)

    def name(self, holder: nn.Module, leaf: str, held: Tensor) -> str | None:
        """Return the reference's name, by holder if known: a tied parameter has several."""
        return self._by_holder.get((id(holder), leaf), self._by_parameter.get(id(held)))


class _Collector:
    """Collects each operation's results before later code can change them."""

    def __init__(
        self, rank: int, order: RankOrder, origin: Origin, first_use: FirstUse, watcher: Watcher, routing: RouteObserver
    ) -> None:
        self._rank, self._order, self._origin = rank, order, origin
        self._first_use, self._watcher, self._routing = first_use, watcher, routing
        self._names = order.contract.names
        self._first: tuple[StepResult, RankMade] | None = None

    def begins(self, number: int) -> None:
        """Start operation ``number``: earlier observations belong to others."""
        self._watcher.anew()
        self._routing.anew()
        if number:
            self._first_use.next_operation()
        else:
            step_begins()

    def collect_made(self, result: object) -> RankMade:
        """Collect a step's ``result``, and what was sent."""
        order, use, handed = self._order, self._first_use, understood(result, self._order.name, self._order.contract)
        if self._first is not None and not handed.modules and handed.gradients is None:
            handed = replace(handed, modules=self._first[0].modules)  # returning them once suffices
        self._names = handed.names if order.contract.names is None else order.contract.names
        given, parts = handed.by_parameter, tuple[ModulePart, ...]()
        if handed.gradients is not None and not handed.modules:
            locals_ = tuple(Local(name, rename(self._names, name, rank=self._rank)) for name in handed.gradients)
            gradients, shards = in_parts(handed.gradients.items())
            parts = (ModulePart(locals_, gradients, shards=shards),) if locals_ else parts
        else:
            parts = tuple(self._part(module, chunk, given) for chunk, module in enumerate(handed.modules))
        if given is not None:
            use.adds_to(given, handed.modules)
        unseen = {
            "initial-weights": use.weights.broken,
            "gradient": use.sums.broken if given is None else "",
            "updated-parameters": use.steps.broken,
            "routing": self._routing.fence.broken,
        }
        made = RankMade(
            parts,
            handed.by_microbatch,
            handed.whole_loss,
            handed.norm,
            handed.actions(self._rank),
            order.known,
            sent=list_sent(),
            max_norm=None if handed.max_norm is None else float(handed.max_norm),
            unlike=_MASTERS if handed.masters else _GOES_ON if use.goes_on else "",
            accumulation=handed.accumulation,
            outputs=handed.named,
            loss_scale=None if handed.loss_scale is None else float(handed.loss_scale),
            unseen={law: why for law, why in unseen.items() if why},
        )
        if self._first is not None:
            return replace(made, parts=_as_first(parts, self._first[1].parts, order.name))
        weights = contents(order.build()) if any(part.values for part in parts) else order.known
        made = replace(made, weights=weights, given=digests(order.microbatches))
        self._first = handed, made
        return made

    def _part(self, module: nn.Module, chunk: int, given: Mapping[int, Any] | None) -> ModulePart:
        held, use = parameters_of(module), self._first_use
        parameters = [parameter for *_, parameter in held]
        begun = [use.of(parameter, holder, leaf) for _, holder, leaf, parameter in held]
        locals_ = [
            replace(self._local(*one, chunk), content=None if own is None else own.digest)
            for one, own in zip(held, begun, strict=True)
        ]
        values = {k: own.value for k, own in enumerate(begun) if own is not None and own.value is not None}
        gradients, shards = in_parts(
            (name, _gradient(one) if given is None else given.get(id(one))) for name, *_, one in held
        )
        shards = {k: shard.in_all(parameters[k].shape) for k, shard in shards.items()}
        # Parts of sharded weights whose whole was never observed.
        lying = {k: (find_shard(one), use.part_of(one)) for k, one in enumerate(parameters)}
        weights = {k: (at, part) for k, (at, part) in lying.items() if at is not None and part is not None}
        cut = {  # by hand, like their gradients, rather than by DTensor
            k: shard
            for k, shard in shards.items()
            if not isinstance(one := parameters[k], InShards) and not shard.flat and tuple(one.shape) == shard.lengths
        }
        left = enumerate(parameters if self._order.updates else ())
        after = {k: (shard_of(one) or cut.get(k), _copied(local_tensor(one))) for k, one in left}
        for k, shard in cut.items():
            part = values.pop(k, None)
            if part is None and digest(parameters[k]) == locals_[k].content:
                part = _copied(parameters[k])  # others may match by chance, such as zeros
            weights |= {} if part is None else {k: (shard, part)}
            locals_[k] = replace(locals_[k], content=None)
        calls = self._watcher.calls(module, warmup=self._order.contract.warmup if self._first is None else 0)
        sums = {k: use.initial_gradient(one) for k, one in enumerate(parameters)}
        return ModulePart(
            tuple(locals_),
            gradients,
            values,
            # A snapshot: later clearing came after use. With returned copies, clearing ``.grad`` loses nothing.
            tuple(replace(one, cleared=one.cleared if given is None else ()) for one in calls or ()) or None,
            shards,
            missed="" if calls is None or calls else self._explain_missed(module),
            weights={k: one for k, one in weights.items() if locals_[k].content is None},
            after=after,
            begun={k: one for k, one in sums.items() if one is not None},
            buffers=tuple(  # whole ones, if several operations are compared
                (self._local(*one, chunk), _copied(one[-1]))
                for one in (_list_held(module, "_buffers") if self._order.contract.operations else ())
                if not isinstance(one[-1], InShards) and not one[-1].is_meta
            ),
            routes=self._routing.of(module),
        )

    def _local(self, name: str, holder: nn.Module, leaf: str, held: Tensor, chunk: int) -> Local:
        said = rename(self._names, name, rank=self._rank, chunk=chunk)
        return Local(name, said, self._origin.name(holder, leaf, held))

    def _explain_missed(self, module: nn.Module) -> str:
        """Return a likely reason why ``module`` has no observed call."""
        if unseen := self._watcher.unseen(module):
            return unseen
        if self._watcher.compiled:
            return "it ran inside torch.compile, where nothing can watch: watch what torch.compile gives back"
        if self._first_use.inside(module):
            return "its parts were called and it was not, as by stage.forward(x): call stage(x), or watch the parts"
        return "stage.forward(x) was called in its place, or a copy of it: call stage(x), and watch what is called"


def parameters_of(module: nn.Module) -> list[tuple[str, nn.Module, str, nn.Parameter]]:
    """List parameters under all names, each with its module and local name."""
    return _list_held(module, "_parameters")


def _list_held(module: nn.Module, what: str) -> list[tuple[str, nn.Module, str, Any]]:
    return [
        (f"{prefix}.{leaf}" if prefix else leaf, holder, leaf, one)
        for prefix, holder in module.named_modules()
        for leaf, one in getattr(holder, what).items()
        if one is not None
    ]


def _as_first(parts: Sequence[ModulePart], first: Sequence[ModulePart], step: str) -> tuple[ModulePart, ...]:
    """Return a later operation's ``parts`` under ``first`` names.

    With gradients by name, an operation without gradients may return none. Raises ``HandBackError``.
    """
    if not parts:
        return tuple(ModulePart(one.locals, (None,) * len(one.locals), later=True) for one in first)
    if [[one.name for one in part.locals] for part in parts] != [[one.name for one in part.locals] for part in first]:
        raise HandBackError(
            f"{step} handed back other modules than for its first operation: expected the same, in the same order"
        )
    pairs = zip(parts, first, strict=True)
    return tuple(replace(part, locals=one.locals, later=True) for part, one in pairs)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _gradient(parameter: nn.Parameter) -> Any:
    """Return a parameter's gradient, or an empty shard for a sharded one."""
    shard = shard_of(parameter) if parameter.grad is None else None
    return parameter.grad if shard is None else (None, shard)
