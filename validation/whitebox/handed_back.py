"""What a foreign step hands back on a rank, in the forms that are understood, and sentences for all others."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeproof.core.contract import DEFAULTS, Contract
from pipeproof.core.observe.shards import InShards, Shard, ShardError, flat_shard, shard_at, shard_of
from pipeproof.pipeline.action import Action, ActionError
from pipeproof.pipeline.trace import Trace
from pipeproof.reference.accumulation import Accumulation
from pipeproof.reference.step import dense

_EXPECTED = "its local modules, or a mapping of parameter names to gradients; then losses; then the gradient norm"


class HandBackError(ValueError):
    """A step handed back what cannot be judged."""


@dataclass(frozen=True)
class FlatShard:
    """A part of a gradient: elements of the flattened whole, from number ``start`` on. None: this rank has nothing."""

    part: Tensor | None
    start: int = 0


Gradient = Tensor | FlatShard | None


def copied(gradient: Gradient) -> Gradient:
    """A copy, which nothing that comes after the step can change."""
    if isinstance(gradient, FlatShard):
        return replace(gradient, part=None if gradient.part is None else gradient.part.clone())
    return None if gradient is None else gradient.detach().clone()


@dataclass(frozen=True)
class HandedBack:
    """What a step made on one rank. A tuple of the first four, in this order, is as good.

    modules: one, or a list; empty on a rank that holds nothing. A mapping of parameter names to gradients may take
    their place. losses: one for each of its microbatches, undivided; or one number, the whole step's, of all replicas;
    None if another rank knows. grad_norm: before clipping, if the step computes it. trace: the order in which this rank
    worked, if the runtime knows: a ``Trace``, actions, or their names (``0F1``). gradients: those of the modules, if
    they are not in ``.grad``. The keys are names in the module, or the parameters themselves. What is not in it has no
    gradient; where ranks of its stage hand back a ``FlatShard``, this one has no part of it. A gradient may be a
    DTensor, a part and its index in the whole, ``(part, slice(0, 4))``, or a ``FlatShard``. Of several pieces, as of
    fused queries, keys and values, the index is a list, ``(part, [slice(0, 4), slice(8, 12)])``, and the part has them
    behind each other. A parameter may itself be the part that has this index; where it has no gradient, hand back
    ``(None, slice(0, 4))``. names: what parameters are called in the reference, where the runtime knows; as ``names``
    of the contract, which comes first. max_norm: to what norm gradients were clipped before the update, for
    ``optimizer=``. masters: the update is of copies in a wider type, so that weights after it are not compared.
    accumulation: how the runtime adds gradients up, but for the shares of replicas, if it says so. outputs: by the
    names that ``outputs`` of the contract gives, what this rank put out for each of its microbatches, in their order.
    loss_scale: what losses are multiplied by before their backwards, as this rank has it, and its gradients divided by
    before they are handed back.
    """

    modules: Any = ()
    losses: Any = None
    grad_norm: Any = None
    trace: Any = None
    gradients: Any = None
    names: Any = None
    max_norm: float | None = None
    masters: bool = False
    accumulation: Accumulation | None = None
    outputs: Any = None
    loss_scale: float | None = None

    @property
    def named(self) -> Mapping[str, tuple[Tensor, ...]]:
        """The outputs as they are now; numbers are tensors, too."""
        given = {} if self.outputs is None else self.outputs
        return {name: tuple(_tensor(one) for one in every) for name, every in given.items() if every is not None}

    @cached_property
    def by_parameter(self) -> Mapping[int, Any] | None:
        """The gradients of the modules, by the ids of their parameters; None where they are in ``.grad``."""
        if self.gradients is None or not self.modules:
            return None
        places: dict[object, list[int]] = {}
        for module in self.modules:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                places.setdefault(name, []).append(id(parameter))
                places[id(parameter)] = [id(parameter)]
        found = {}
        for key, gradient in self.gradients.items():
            of = places.get(key if isinstance(key, str) else id(key), [])
            if len(set(of)) != 1:
                name = repr(key) if isinstance(key, str) else "a parameter"
                have = f"{len(of)} of the modules have" if of else "no module that is handed back has"
                why = f"{have}: key them by the parameters themselves"
                raise HandBackError(f"the gradients are also of {name}, which {why}")
            found[of[0]] = gradient
        return found

    @property
    def by_microbatch(self) -> tuple[float, ...]:
        """The microbatches' losses, if that is what the losses are."""
        return () if self.losses is None or _is_number(self.losses) else tuple(map(_float, self.losses))

    @property
    def whole_loss(self) -> float | None:
        """The whole step's loss, if that is what was handed back."""
        return _float(self.losses) if _is_number(self.losses) else None

    @property
    def norm(self) -> float | None:
        return None if self.grad_norm is None else _float(self.grad_norm)

    def actions(self, rank: int) -> tuple[Action, ...] | None:
        """What ``rank`` did, in order, if the runtime told."""
        if isinstance(self.trace, Trace):
            return tuple(span.action for span in self.trace.spans[rank])
        return (
            None if self.trace is None else tuple(a if isinstance(a, Action) else Action.parse(a) for a in self.trace)
        )


def understood(result: object, step: str, contract: Contract = DEFAULTS) -> HandedBack:
    """What the function called ``step`` returned, and what the ``contract`` says where that says nothing.

    Raises ``HandBackError`` where it returned no such thing, or one that contradicts the contract.
    """
    if result is None:
        raise HandBackError(f"{step} returned None: expected {_EXPECTED}")
    if isinstance(result, Generator):
        raise HandBackError(f"{step} yields, and there is one step: pass operations=, those that it goes through")
    handed = _in_place(result if isinstance(result, HandedBack) else _from_tuple(result, step), step)
    losses, scale = handed.losses, handed.loss_scale
    for value, what, fits, expected in (
        (
            losses,
            "losses",
            _is_number(losses) or _is_numbers(losses),
            "a number for each microbatch, or one for the step",
        ),
        (handed.grad_norm, "the gradient norm", _is_number(handed.grad_norm), "a number"),
        (handed.max_norm, "max_norm", _is_number(handed.max_norm), "a number, or None"),
        (scale, "loss_scale", scale is not None and _is_number(scale) and scale > 0, "a number above 0"),
    ):
        if value is not None and not fits:
            raise HandBackError(f"{step} returned {_named(value)} as {what}: expected {expected}")
    try:
        handed.actions(0)
    except (ActionError, TypeError) as error:
        raise HandBackError(f"{step} returned a trace that cannot be read: {error}") from None
    _check_outputs(handed.outputs, step)
    return _by_contract(handed, step, contract)


def _by_contract(handed: HandedBack, step: str, contract: Contract) -> HandedBack:
    """``handed`` with what the ``contract`` says of it. Raises ``HandBackError`` where the two contradict."""
    for word in ("loss_scale", "max_norm", "accumulation"):
        said, made = getattr(contract, word), getattr(handed, word)
        if said is not None and made is not None and said != made:
            raise HandBackError(
                f"{step} handed back {word}={_named(made)}, and the contract says {_named(said)}: "
                f"declare {word}={_named(made)}, if that is meant, or leave the word out of the contract"
            )
        handed = replace(handed, **{word: said if made is None else made})
    return handed


def _check_outputs(given: object, step: str) -> None:
    if given is not None and not isinstance(given, Mapping):
        raise HandBackError(f"{step} returned {_named(given)} as outputs: expected a mapping of names to them")
    for name, every in (given or {}).items():
        listed = isinstance(every, Sequence) and not isinstance(every, str)
        if every is not None and not (listed and all(isinstance(one, Tensor | Real) for one in every)):
            raise HandBackError(
                f"{step} returned {_named(every)} as the output {name!r}: expected a list with a tensor, or a number, "
                "for each microbatch"
            )


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def _from_tuple(result: object, step: str) -> HandedBack:
    if not isinstance(result, tuple):
        return HandedBack(result)
    if not 1 <= len(result) <= 4:
        raise HandBackError(
            f"{step} returned a tuple of {len(result)}: expected {_EXPECTED}; at most a trace after that"
        )
    return HandedBack(*result)


def _in_place(handed: HandedBack, step: str) -> HandedBack:
    """``handed`` with its modules in a list, and gradients in their place in theirs."""
    made, gradients = handed.modules, handed.gradients
    if isinstance(made, nn.Module):
        made = [made]
    elif isinstance(made, Mapping) and gradients is None:
        made, gradients = [], made
    elif not isinstance(made, Sequence) or isinstance(made, str):
        raise HandBackError(f"{step} returned {_named(made)}: expected {_EXPECTED}")
    for one in made:
        if not isinstance(one, nn.Module):
            raise HandBackError(f"{step} returned {_named(one)} among its modules: expected modules only")
    if gradients is not None:
        _check_gradients(gradients, step, named=not made)
    return replace(handed, modules=list(made), gradients=gradients)


def _check_gradients(gradients: object, step: str, *, named: bool) -> None:
    if not isinstance(gradients, Mapping):
        raise HandBackError(f"{step} returned {_named(gradients)} as gradients: expected a mapping of parameter names")
    for name, gradient in gradients.items():
        whole = gradient.part if isinstance(gradient, FlatShard) else gradient[0] if _is_part(gradient) else gradient
        known = isinstance(name, str) or (isinstance(name, nn.Parameter) and not named)
        if not known or not (whole is None or isinstance(whole, Tensor)):
            raise HandBackError(
                f"{step} returned a mapping with {name!r}: {_named(gradient)}: expected the name of a parameter "
                "and its gradient, a tensor or None, or a part of it and its index"
            )


def _float(value: Any) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)


def _is_part(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], slice | tuple | list)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex())


def _is_numbers(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 1 and not value.is_complex()
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_number, value))


def _named(value: object) -> str:
    text = repr(value) if isinstance(value, str | Real) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:59]}…"


def in_parts(held: Iterable[tuple[str, Any]]) -> tuple[tuple[Tensor | None, ...], dict[int, Shard]]:
    """What there is of every gradient here, and where it lies in the whole. Raises ``HandBackError``."""
    gradients: list[Tensor | None] = []
    shards: dict[int, Shard] = {}
    for k, (name, given) in enumerate(held):
        try:
            part, shard = _placed(given)
        except ShardError as error:
            raise HandBackError(f"the gradient of {name} cannot be read: {error}") from None
        if shard is not None:
            shards[k] = shard
        own = part.to_local() if isinstance(part, InShards) else part
        if own is not None and (why := _unreadable(own)):
            raise HandBackError(f"the gradient of {name} cannot be read: {why}")
        gradients.append(None if own is None else dense(own.detach()).to("cpu", copy=True))
    return tuple(gradients), shards


def _placed(given: Any) -> tuple[Tensor | None, Shard | None]:
    """What there is of a gradient, and where that lies in the whole."""
    if isinstance(given, FlatShard):
        shard = flat_shard(given.start, given.part)
        return given.part if shard.count else None, shard
    part, where = given if isinstance(given, tuple) else (given, None)
    if where is None:
        return part, None if part is None else shard_of(part)
    return part, where if isinstance(where, Shard) else shard_at(where, part)


def _unreadable(gradient: Tensor) -> str:
    """Why it cannot be compared; empty where it can be."""
    if gradient.is_meta:
        return "it is on the meta device, without any numbers"
    if gradient.is_quantized:
        return "it is quantized"
    if gradient.is_floating_point() or gradient.is_complex():
        return ""
    return f"its type is {gradient.dtype}: expected floating point"


_HOW = "it yields what it made of each, as: for operation, microbatches in operations: ...; yield stage, losses"


class Operation(NamedTuple):
    """One operation: ``train``, ``accumulate`` or ``eval``, and this rank's microbatches."""

    name: str
    microbatches: list[Any]


class Operations:
    """An iterator of the expected operations; before it gives one, it calls ``begins`` with its number, from 0.

    ``step``: what the function that goes through it is called.
    """

    def __init__(self, expected: Sequence[Operation], begins: Callable[[int], None], *, step: str) -> None:
        self._expected, self._begins, self._step = expected, begins, step
        self._begun = self._made = 0

    def __iter__(self) -> Iterator[Operation]:
        return self

    def __next__(self) -> Operation:
        if self._begun > self._made:
            raise HandBackError(
                f"{self._step} asked for another operation before it handed back operation {self._begun}: {_HOW}"
            )
        if self._begun == len(self._expected):
            raise StopIteration
        self._begins(self._begun)
        self._begun += 1
        return self._expected[self._begun - 1]

    def handed_back(self, results: object) -> Iterator[object]:
        """What was handed back of each operation; ``results``: what the function gave that goes through them.

        Raises ``HandBackError`` where that is not one thing for each operation.
        """
        __tracebackhide__ = True
        if not isinstance(results, Iterator):
            raise HandBackError(f"{self._step} returned a {type(results).__name__}; with operations= {_HOW}")
        for result in results:
            if self._made == self._begun:
                raise HandBackError(f"{self._step} handed back more than its operations: {_HOW}")
            self._made += 1
            yield result
        if self._made < len(self._expected):
            raise HandBackError(f"{self._step} handed back {self._made} of {len(self._expected)} operations: {_HOW}")
