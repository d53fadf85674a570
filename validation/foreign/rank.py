"""One rank's part: run the user's step under observation and bring back what it made, as values."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeproof.diagnosis.members import Replicas
from pipeproof.foreign.handed_back import FlatShard, HandBackError, HandedBack, understood
from pipeproof.foreign.matching import Local, Names, renamed
from pipeproof.observers.calls import Call
from pipeproof.observers.initial_weights import FirstUse
from pipeproof.observers.shards import Indices, InShards, Shard, ShardError, flat_shard, placed_as, shard_at, shard_of
from pipeproof.observers.sketch import contents, digest
from pipeproof.observers.watching import Watcher, watching
from pipeproof.pipeline.action import Action
from pipeproof.reference.accumulation import Accumulation
from pipeproof.reference.step import dense
from pipeproof.worlds.accelerator import deterministic
from pipeproof.worlds.posted_messages import Message, Sent, noted_messages, sent_messages
from pipeproof.worlds.worker import RankContext

_MASTERS = "updates are not compared where the optimizer has copies of the weights in a wider type"
_GOES_ON = "updates are not compared where the optimizer had stepped before the step that is judged"
Step = Callable[[Any, list[Any]], Any]  # of the model, of whatever class, and the microbatches


@dataclass(frozen=True)
class Order:
    """What every rank is to do: call ``step(build(), microbatches)``.

    ``known`` are the contents of the reference's parameters by name.
    """

    step: Step
    build: Callable[[], nn.Module]
    microbatches: Sequence[Any]
    names: Names | None
    name: str
    known: Mapping[str, bytes]
    replicas: Replicas
    updates: bool = False  # whether weights after the step are wanted


@dataclass(frozen=True)
class Part:
    """One module that was handed back, or all gradients that were handed back by name; by its parameters in order.

    ``values``: weights before the step, where they are not those of any parameter of the reference. ``weights``: of
    those of which the rank has a part, where that lies in the whole, and the part. ``calls`` is None where nobody
    watched, or no call was seen: then ``missed`` says why that may be. ``shards``: where a gradient lies in the whole,
    for those of which the rank has a part only. ``members``: the ranks with this stage and what each handed back, once
    they are put together; ``calls`` are then those of the first line, ``copies`` those of further ones, by the line's
    number. ``lacks``: the parameters that others of them have and this rank has not. ``after``: weights
    after the step, each with where it lies in the whole (None: it is the whole), if they are wanted. ``begun``: what
    gradients were added to, where that was not zero.
    """

    locals: tuple[Local, ...]
    gradients: tuple[Tensor | None, ...]
    values: Mapping[int, Tensor] = field(default_factory=dict)
    calls: tuple[Call, ...] | None = None
    shards: Mapping[int, Shard] = field(default_factory=dict)
    members: tuple[tuple[int, "Part"], ...] = ()
    copies: Mapping[int, tuple[Call, ...]] = field(default_factory=dict)
    missed: str = ""
    lacks: frozenset[int] = frozenset()
    weights: Mapping[int, tuple[Shard, Tensor]] = field(default_factory=dict)
    after: Mapping[int, tuple[Shard | None, Tensor]] = field(default_factory=dict)
    begun: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class RankMade:
    """What one rank brings back.

    ``weights`` are the contents of the reference as this rank builds it, looked up only where some are not the known
    ones; ``given`` are the digests of the microbatches, ``share`` those that it was given to train on. ``sent``: its
    messages, and where the user's code sent them. ``line``: which it is of the ranks with the same stages and data.
    ``max_norm``: to what gradients were clipped. ``unlike``: why its update is not that of the reference's optimizer.
    ``accumulation``, ``loss_scale``: as they were handed back.
    """

    parts: tuple[Part, ...]
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
    loss_scale: float | None = None


def run_step(context: RankContext, order: Order) -> RankMade:
    """One rank's part of a validation; a job for ``World.run``. Raises whatever the user's step raises."""
    __tracebackhide__ = True  # what is told of a failure begins in the user's own code
    deterministic(context.device)
    model = order.build().to(context.device).train()
    origin = _Origin(model)
    share = [order.microbatches[number] for number in order.replicas.share(context.rank)]
    microbatches = tree_map_only(Tensor, lambda tensor: tensor.to(context.device, copy=True), share)
    with noted_messages(), watching() as watcher, FirstUse(order.known.values()) as first_use:
        result = order.step(model, microbatches)
        sent = sent_messages()
    handed = understood(result, order.name)
    given = digests(order.microbatches)
    names = handed.names if order.names is None else order.names
    collect = _Collector(context.rank, names, origin, first_use, watcher, order.updates)
    parts, actions = collect.parts(handed), handed.actions(context.rank)
    doubt = any(part.values for part in parts)
    weights = contents(order.build()) if doubt else order.known
    told = handed.by_microbatch, handed.whole_loss, handed.norm
    unlike = _MASTERS if handed.masters else _GOES_ON if first_use.goes_on else ""
    most = None if handed.max_norm is None else float(handed.max_norm)
    made = RankMade(parts, *told, actions, weights, given, sent=sent, max_norm=most, unlike=unlike)
    scale = None if handed.loss_scale is None else float(handed.loss_scale)
    return replace(made, accumulation=handed.accumulation, loss_scale=scale)


def join_messages(made: Sequence[RankMade]) -> None:
    """Note at the messages that calls were given where they were sent."""
    sent = {message: what for one in made for message, what in one.sent.items()}
    for call in (call for one in made for part in one.parts for call in part.calls or ()):
        call.came = {tensor: came.joined(sent) for tensor, came in call.came.items()}


def digests(microbatches: Sequence[Any]) -> tuple[tuple[bytes, ...], ...]:
    """The digests of every microbatch's tensors."""
    return tuple(tuple(digest(leaf) for leaf in tree_leaves(one) if isinstance(leaf, Tensor)) for one in microbatches)


class _Origin:
    """Where the parameters of the model are that the step was given, so that they are known again as objects."""

    def __init__(self, model: nn.Module) -> None:
        # Kept, for a step may replace any of them: so no id is used again.
        self._kept = [*model.modules(), *model.parameters()]
        self._by_holder: dict[tuple[int, str], str] = {}
        self._by_parameter: dict[int, str] = {}
        for prefix, module in model.named_modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    name = f"{prefix}.{leaf}" if prefix else leaf
                    self._by_holder.setdefault((id(module), leaf), name)
                    self._by_parameter.setdefault(id(parameter), name)

    def name(self, holder: nn.Module, leaf: str, parameter: nn.Parameter) -> str | None:
        """The reference's name, by the module that holds the parameter if that is known: a tied one has several."""
        return self._by_holder.get((id(holder), leaf), self._by_parameter.get(id(parameter)))


@dataclass(frozen=True)
class _Collector:
    rank: int
    names: Names | None
    origin: _Origin
    first_use: FirstUse
    watcher: Watcher
    updates: bool

    def parts(self, handed: HandedBack) -> tuple[Part, ...]:
        if handed.gradients is not None and not handed.modules:
            locals_ = tuple(Local(name, said=renamed(self.names, name, rank=self.rank)) for name in handed.gradients)
            gradients, shards = in_parts(handed.gradients.items())
            return (Part(locals_, gradients, shards=shards),) if locals_ else ()
        given = handed.by_parameter
        return tuple(self._part(module, chunk, given) for chunk, module in enumerate(handed.modules))

    def _part(self, module: nn.Module, chunk: int, given: Mapping[int, Any] | None) -> Part:
        locals_: list[Local] = []
        held: list[tuple[str, Any]] = []
        values: dict[int, Tensor] = {}
        for name, holder, leaf, parameter in _parameters(module):
            seen = self.first_use.of(parameter, holder, leaf)
            identical = self.origin.name(holder, leaf, parameter)
            content = None if seen is None else seen.digest
            if seen is not None and seen.value is not None:
                values[len(locals_)] = seen.value
            locals_.append(Local(name, renamed(self.names, name, rank=self.rank, chunk=chunk), identical, content))
            held.append((name, _gradient(parameter) if given is None else given.get(id(parameter))))
        calls = self.watcher.calls(module)
        parameters = [parameter for *_, parameter in _parameters(module)]
        gradients, shards = in_parts(held)
        shards = {k: shard.in_all(parameters[k].shape) for k, shard in shards.items()}
        weights = dict(self._of_dtensors(parameters))
        cut = list(_weights_in_parts(parameters, shards))
        after = {k: _as_it_is(one, shards[k] if k in cut else None) for k, one in enumerate(parameters) if self.updates}
        for k in cut:
            part = values.pop(k, None)
            if part is None and digest(parameters[k]) == locals_[k].content:
                part = parameters[k].detach().to("cpu", copy=True)  # as others by chance, such as zeros
            weights |= {} if part is None else {k: (shards[k], part)}
            locals_[k] = replace(locals_[k], content=None)
        weights = {k: one for k, one in weights.items() if locals_[k].content is None}
        missed = "" if calls is None or calls else self._missed(module)
        left = {k: self.first_use.begun(one) for k, one in enumerate(parameters)}
        begun = {k: one for k, one in left.items() if one is not None}
        if calls and given is not None:  # copies: what is cleared in ``.grad`` is not lost to them
            calls = [replace(call, cleared=()) for call in calls]
        seen_calls = tuple(calls) if calls else None
        made = Part(tuple(locals_), gradients, values, seen_calls, shards, missed=missed, weights=weights)
        return replace(made, after=after, begun=begun)

    def _of_dtensors(self, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[int, tuple[Shard, Tensor]]]:
        """The parts of weights in shards, where the whole was never seen."""
        for k, parameter in enumerate(parameters):
            part = self.first_use.part_of(parameter)
            where = None if part is None else placed_as(parameter)
            if part is not None and where is not None:
                yield k, (where, part)

    def _missed(self, module: nn.Module) -> str:
        """Why no call of ``module`` may have been seen, although it is watched."""
        if self.watcher.compiled:
            return "it ran inside torch.compile, where nothing can watch: watch what torch.compile gives back"
        if self.first_use.inside(module):
            return "its parts were called and it was not, as by stage.forward(x): call stage(x), or watch the parts"
        return "stage.forward(x) was called in its place, or a copy of it: call stage(x), and watch what is called"


def _parameters(module: nn.Module) -> list[tuple[str, nn.Module, str, nn.Parameter]]:
    """Every parameter under each of its names, with the module that holds it and its name there."""
    return [
        (f"{prefix}.{leaf}" if prefix else leaf, holder, leaf, parameter)
        for prefix, holder in module.named_modules()
        for leaf, parameter in holder._parameters.items()
        if parameter is not None
    ]


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


def in_parts(held: Iterable[tuple[str, Any]]) -> tuple[tuple[Tensor | None, ...], dict[int, Shard]]:
    """What there is of every gradient here, and where it lies in the whole. Raises ``HandBackError``."""
    gradients: list[Tensor | None] = []
    shards: dict[int, Shard] = {}
    for k, (name, given) in enumerate(held):
        try:
            part, where = _placed(given)
            shard = _shard(part, where)
        except ShardError as error:
            raise HandBackError(f"the gradient of {name} cannot be read: {error}") from None
        if shard is not None:
            shards[k] = shard
        gradients.append(_copy(part.to_local() if isinstance(part, InShards) else part, name))
    return tuple(gradients), shards


def _placed(given: Any) -> tuple[Tensor | None, Shard | Indices | None]:
    """What there is of a gradient, and where."""
    if isinstance(given, FlatShard):
        shard = flat_shard(given.start, given.part)
        return given.part if shard.count else None, shard
    return given if isinstance(given, tuple) else (given, None)


def _shard(part: Tensor | None, where: Shard | Indices | None) -> Shard | None:
    if where is None:
        return None if part is None else shard_of(part)
    return where if isinstance(where, Shard) else shard_at(where, part)


def _copy(gradient: Tensor | None, name: str) -> Tensor | None:
    if gradient is None:
        return None
    if why := _unreadable(gradient):
        raise HandBackError(f"the gradient of {name} cannot be read: {why}")
    return dense(gradient.detach()).to("cpu", copy=True)


def _unreadable(gradient: Tensor) -> str:
    """Why nobody can compare it; empty where it can be."""
    if gradient.is_meta:
        return "it is on the meta device, without any numbers"
    if gradient.is_quantized:
        return "it is quantized"
    if gradient.is_floating_point() or gradient.is_complex():
        return ""
    return f"its type is {gradient.dtype}: expected floating point"
