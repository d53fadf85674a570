"""One rank's part: run the user's step under observation and bring back what it made, as values."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeproof.core.contract import Contract
from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.digest import contents, digest
from pipeproof.core.observe.initial_weights import FirstUse, step_begins
from pipeproof.core.observe.posted_messages import Message, Sent, noted_messages, sent_messages
from pipeproof.core.observe.routes import RouteObserver, Routes
from pipeproof.core.observe.shards import InShards, Shard, placed_as, shard_of
from pipeproof.core.observe.watching import Watcher, watching
from pipeproof.core.replicas import Replicas
from pipeproof.pipeline.action import Action
from pipeproof.reference.accumulation import Accumulation
from pipeproof.reference.products import products_in, sorts_in
from pipeproof.whitebox.handed_back import HandBackError, HandedBack, Operation, Operations, in_parts, understood
from pipeproof.whitebox.matching import Local, renamed
from pipeproof.worlds.accelerator import deterministic
from pipeproof.worlds.worker import RankContext

_MASTERS = "updates are not compared where the optimizer has copies of the weights in a wider type"
_GOES_ON = "updates are not compared where the optimizer had stepped before the step that is judged"
# Of the model, of whatever class, and the microbatches; or of a run of several operations, and what it goes through.
Step = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class RankOrder:
    """What every rank is to do: call ``step(build(), microbatches)``.

    ``known`` are the contents of the reference's parameters by name. ``replicas``: of the first operation.
    """

    step: Step
    build: Callable[[], Any]
    microbatches: Sequence[Any]
    contract: Contract
    name: str
    known: Mapping[str, bytes]
    replicas: Replicas
    updates: bool = False  # whether weights after the step are wanted

    def operations(self, rank: int, device: str) -> list[Operation]:
        """What ``rank`` is to do, with its microbatches, which are its own."""
        parts = self.contract.parts(len(self.microbatches))
        shares = [self.replicas.of_as_many(len(part)).share(rank) for part in parts]
        own = [[self.microbatches[part[m]] for m in share] for part, share in zip(parts, shares, strict=True)]
        there = tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), own)
        return [Operation(*one) for one in zip(self.contract.plan, there, strict=True)]


@dataclass(frozen=True)
class ModulePart:
    """One module that was handed back, or all gradients that were handed back by name; by its parameters in order.

    ``values``: weights before the step, where they are not those of any parameter of the reference. ``weights``: of
    those of which the rank has a part, where that lies in the whole, and the part. ``calls`` is None where none is
    watched, or none was seen: then ``missed`` says why that may be. ``shards``: where a gradient lies in the whole,
    for those of which the rank has a part only. ``members``: the ranks with this stage and what each handed back, once
    they are put together; ``calls`` are then those of the first line, ``copies`` those of further ones, by the line's
    number. ``lacks``: the parameters that others of them have and this rank has not. ``after``: weights
    after the step, each with where it lies in the whole (None: it is the whole), if they are wanted. ``begun``: what
    gradients were added to, where that was not zero. ``buffers``: those of the module, as the step left them. Of
    a ``later`` operation, ``locals`` have the contents of the first, and ``values`` all weights that it used.
    ``routes``: what its routers chose. ``late``: the parameters that are written after the operation, when next used.
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
        """Whether gradients alone were handed back, so that no weights are known."""
        return all(one.content is None and one.identical is None for one in self.locals)


@dataclass(frozen=True)
class RankMade:
    """What one rank brings back.

    ``weights`` are the contents of the reference as this rank builds it, looked up only where some are not the known
    ones; ``given`` are the digests of the microbatches, ``share`` those that it was given to train on. ``sent``: its
    messages, and where the user's code sent them. ``line``: which it is of the ranks with the same stages and data.
    ``max_norm``: to what gradients were clipped. ``unlike``: why its update is not that of the reference's optimizer.
    ``accumulation``, ``outputs`` and ``loss_scale``: as they were handed back. ``products``: as what its device rounds
    those of fp32, as ``products_in`` has it. ``unseen``: by law, why not all was seen here that it needs.
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
    """One rank's part of a validation, by operation; a job for ``World.run``. Raises what the user's step raises."""
    __tracebackhide__ = True  # what is told of a failure begins in the user's own code
    deterministic(context.device)
    model = order.build().to(context.device).train()
    origin, due = Origin(model), order.operations(context.rank, context.device)
    routing = RouteObserver(tuple(order.contract.routers), model)
    with noted_messages(), watching() as watcher, FirstUse(order.known.values()) as first_use, routing.opened():
        collect = _Collector(context.rank, order, origin, first_use, watcher, routing)
        if not order.contract.operations:
            made = [collect.made(order.step(model, due[0].microbatches), sent_messages())]
        else:
            operations = Operations(due, collect.begins, step=order.name)
            results = operations.handed_back(order.step(model, operations))
            made = [collect.made(result, sent_messages()) for result in results]
    products = products_in(context.device, sorts_in(model))
    return tuple(replace(one, products=products) for one in made)


def digests(microbatches: Sequence[Any]) -> tuple[tuple[bytes, ...], ...]:
    """The digests of every microbatch's tensors."""
    return tuple(tuple(digest(leaf) for leaf in tree_leaves(one) if isinstance(leaf, Tensor)) for one in microbatches)


class Origin:
    """Where the parameters of the model are that the step was given, so that they are known again as objects."""

    def __init__(self, model: nn.Module) -> None:
        # Kept, for a step may replace any of them: so no id is used again.
        self._kept = [*model.modules(), *model.parameters()]
        self._by_holder: dict[tuple[int, str], str] = {}
        self._by_parameter: dict[int, str] = {}
        for name, module, leaf, parameter in parameters_of(model):
            self._by_holder.setdefault((id(module), leaf), name)
            self._by_parameter.setdefault(id(parameter), name)
        for name, module, leaf, _ in _held(model, "_buffers"):
            self._by_holder.setdefault((id(module), leaf), name)

    def name(self, holder: nn.Module, leaf: str, held: Tensor) -> str | None:
        """The reference's name, by the module that holds it if that is known: a tied parameter has several."""
        return self._by_holder.get((id(holder), leaf), self._by_parameter.get(id(held)))


class _Collector:
    """Takes what is handed back of one operation after another, before anything can change it."""

    def __init__(
        self, rank: int, order: RankOrder, origin: Origin, first_use: FirstUse, watcher: Watcher, routing: RouteObserver
    ) -> None:
        self._rank, self._order, self._origin = rank, order, origin
        self._first_use, self._watcher, self._routing = first_use, watcher, routing
        self._names = order.contract.names
        self._first: tuple[HandedBack, RankMade] | None = None

    def begins(self, number: int) -> None:
        """Operation ``number`` begins: what was seen before is of others, or of none."""
        self._watcher.anew()
        self._routing.anew()
        if number:
            self._first_use.next_operation()
        else:
            step_begins()

    def made(self, result: object, sent: Mapping[Message, Sent]) -> RankMade:
        """What a step made that returned ``result``."""
        order, handed = self._order, understood(result, self._order.name, self._order.contract)
        if self._first is not None and not handed.modules and handed.gradients is None:
            handed = replace(handed, modules=self._first[0].modules)  # it is enough to hand them back once
        self._names = handed.names if order.contract.names is None else order.contract.names
        parts = self._parts(handed)
        if handed.by_parameter is not None:
            self._first_use.adds_to(handed.by_parameter, handed.modules)
        made = RankMade(
            parts,
            handed.by_microbatch,
            handed.whole_loss,
            handed.norm,
            handed.actions(self._rank),
            order.known,
            sent=sent,
            max_norm=None if handed.max_norm is None else float(handed.max_norm),
            unlike=_MASTERS if handed.masters else _GOES_ON if self._first_use.goes_on else "",
            accumulation=handed.accumulation,
            outputs=handed.named,
            loss_scale=None if handed.loss_scale is None else float(handed.loss_scale),
            unseen=self._unseen(added=handed.by_parameter is None),
        )
        if self._first is not None:
            return replace(made, parts=_as_first(parts, self._first[1].parts, order.name))
        weights = contents(order.build()) if any(part.values for part in parts) else order.known
        made = replace(made, weights=weights, given=digests(order.microbatches))
        self._first = handed, made
        return made

    def _unseen(self, *, added: bool) -> dict[str, str]:
        """By law, why not all was seen that it needs. ``added``: gradients are what the step added to ``.grad``."""
        first = self._first_use
        broken = {
            "initial-weights": first.weights.broken,
            "gradient": first.sums.broken if added else "",
            "updated-parameters": first.steps.broken,
            "routing": self._routing.fence.broken,
        }
        return {law: why for law, why in broken.items() if why}

    def _parts(self, handed: HandedBack) -> tuple[ModulePart, ...]:
        if handed.gradients is not None and not handed.modules:
            locals_ = tuple(Local(name, renamed(self._names, name, rank=self._rank)) for name in handed.gradients)
            gradients, shards = in_parts(handed.gradients.items())
            return (ModulePart(locals_, gradients, shards=shards),) if locals_ else ()
        given = handed.by_parameter
        return tuple(self._part(module, chunk, given) for chunk, module in enumerate(handed.modules))

    def _part(self, module: nn.Module, chunk: int, given: Mapping[int, Any] | None) -> ModulePart:
        held = parameters_of(module)
        parameters = [parameter for *_, parameter in held]
        begun = [self._first_use.of(parameter, holder, leaf) for _, holder, leaf, parameter in held]
        content = [None if use is None else use.digest for use in begun]
        locals_ = [self._local(*one, chunk, own) for one, own in zip(held, content, strict=True)]
        values = {k: use.value for k, use in enumerate(begun) if use is not None and use.value is not None}
        gradients, shards = in_parts(
            (name, _gradient(one) if given is None else given.get(id(one))) for name, *_, one in held
        )
        shards = {k: shard.in_all(parameters[k].shape) for k, shard in shards.items()}
        weights = dict(self._of_dtensors(parameters))
        cut = list(_weights_in_parts(parameters, shards))
        left = enumerate(parameters if self._order.updates else ())
        after = {k: _as_it_is(one, shards[k] if k in cut else None) for k, one in left}
        for k in cut:
            part = values.pop(k, None)
            if part is None and digest(parameters[k]) == locals_[k].content:
                part = parameters[k].detach().to("cpu", copy=True)  # as others by chance, such as zeros
            weights |= {} if part is None else {k: (shards[k], part)}
            locals_[k] = replace(locals_[k], content=None)
        weights = {k: one for k, one in weights.items() if locals_[k].content is None}
        calls = self._watcher.calls(module, warmup=self._order.contract.warmup if self._first is None else 0)
        sums = {k: self._first_use.begun(one) for k, one in enumerate(parameters)}
        return ModulePart(
            tuple(locals_),
            gradients,
            values,
            # As they are now: what is cleared later was used, and of copies nothing is lost in ``.grad``.
            tuple(replace(one, cleared=one.cleared if given is None else ()) for one in calls or ()) or None,
            shards,
            missed="" if calls is None or calls else self._missed(module),
            weights=weights,
            after=after,
            begun={k: one for k, one in sums.items() if one is not None},
            buffers=tuple(self._buffers(module, chunk)),
            routes=self._routing.of(module),
        )

    def _local(
        self, name: str, holder: nn.Module, leaf: str, held: Tensor, chunk: int, content: bytes | None = None
    ) -> Local:
        said = renamed(self._names, name, rank=self._rank, chunk=chunk)
        return Local(name, said, self._origin.name(holder, leaf, held), content)

    def _buffers(self, module: nn.Module, chunk: int) -> Iterator[tuple[Local, Tensor]]:
        """The buffers of a module that this rank has whole, where several operations are compared."""
        for name, holder, leaf, buffer in _held(module, "_buffers") if self._order.contract.operations else ():
            if not isinstance(buffer, InShards) and not buffer.is_meta:
                yield self._local(name, holder, leaf, buffer, chunk), buffer.detach().to("cpu", copy=True)

    def _of_dtensors(self, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[int, tuple[Shard, Tensor]]]:
        """The parts of weights in shards, where the whole was never seen."""
        for k, parameter in enumerate(parameters):
            part = self._first_use.part_of(parameter)
            where = None if part is None else placed_as(parameter)
            if part is not None and where is not None:
                yield k, (where, part)

    def _missed(self, module: nn.Module) -> str:
        """Why no call of ``module`` may have been seen, although it is watched."""
        if unseen := self._watcher.unseen(module):
            return unseen
        if self._watcher.compiled:
            return "it ran inside torch.compile, where nothing can watch: watch what torch.compile gives back"
        if self._first_use.inside(module):
            return "its parts were called and it was not, as by stage.forward(x): call stage(x), or watch the parts"
        return "stage.forward(x) was called in its place, or a copy of it: call stage(x), and watch what is called"


def parameters_of(module: nn.Module) -> list[tuple[str, nn.Module, str, nn.Parameter]]:
    """Every parameter under each of its names, with the module that holds it and its name there."""
    return _held(module, "_parameters")


def _held(module: nn.Module, what: str) -> list[tuple[str, nn.Module, str, Any]]:
    return [
        (f"{prefix}.{leaf}" if prefix else leaf, holder, leaf, one)
        for prefix, holder in module.named_modules()
        for leaf, one in getattr(holder, what).items()
        if one is not None
    ]


def _as_first(parts: Sequence[ModulePart], first: Sequence[ModulePart], step: str) -> tuple[ModulePart, ...]:
    """``parts`` of a later operation, whose parameters go by what they were in the ``first``.

    Where gradients are handed back by name, an operation that gives none may hand back none. Raises ``HandBackError``.
    """
    if not parts:
        return tuple(ModulePart(one.locals, (None,) * len(one.locals), later=True) for one in first)
    if [[one.name for one in part.locals] for part in parts] != [[one.name for one in part.locals] for part in first]:
        raise HandBackError(
            f"{step} handed back other modules than for its first operation: expected the same, in the same order"
        )
    pairs = zip(parts, first, strict=True)
    return tuple(replace(part, locals=one.locals, later=True) for part, one in pairs)


def _weights_in_parts(parameters: Sequence[nn.Parameter], shards: Mapping[int, Shard]) -> Iterator[int]:
    """The weights of which this rank has just the part that it has of the gradient: cut up by hand, not by DTensors."""
    for k, shard in shards.items():
        if not isinstance(parameters[k], InShards) and not shard.flat and tuple(parameters[k].shape) == shard.lengths:
            yield k


def _as_it_is(parameter: nn.Parameter, shard: Shard | None) -> tuple[Shard | None, Tensor]:
    """Where this rank's part of a parameter lies, and the part. ``shard``: where its gradient does, if cut alike."""
    held = parameter.to_local() if isinstance(parameter, InShards) else parameter
    return shard_of(parameter) or shard, held.detach().to("cpu", copy=True)


def _gradient(parameter: nn.Parameter) -> Any:
    """A parameter's gradient; where there is none, a sharded one's shard all the same."""
    shard = shard_of(parameter) if parameter.grad is None else None
    return parameter.grad if shard is None else (None, shard)
