"""Step results: accepted forms, with error messages for others."""

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
    """Raised for a step result that cannot be judged."""


@dataclass(frozen=True)
class FlatShard:
    """A gradient part: elements of the flattened whole, from ``start`` on. None: this rank has no element."""

    part: Tensor | None
    start: int = 0


Gradient = Tensor | FlatShard | None


def copy_gradient(gradient: Gradient) -> Gradient:
    """Return a copy that later steps cannot change."""
    if isinstance(gradient, FlatShard):
        return replace(gradient, part=None if gradient.part is None else gradient.part.clone())
    return None if gradient is None else gradient.detach().clone()


@dataclass(frozen=True)
class StepResult:
    """A step's results on one rank. A tuple with the first four, in order, works too.

    modules: one, or a list; empty on a rank without stages. A mapping from parameter names to gradients may replace
    them. losses: one per microbatch, undivided; or one number, the whole step's, over all replicas; None if another
    rank reports it. grad_norm: before clipping, if the step computes it. trace: this rank's action order, if the
    runtime knows it: a ``Trace``, actions, or their names (``0F1``). gradients: the modules' gradients, if they are not
    in ``.grad``. Keys are names in the module, or the parameters themselves. A missing key means no gradient, or, if
    other ranks of the stage return a ``FlatShard``, no part. A gradient may be a DTensor, a part with its index in the
    whole, ``(part, slice(0, 4))``, or a ``FlatShard``. Several pieces, as in fused queries, keys and values, take a
    list index, ``(part, [slice(0, 4), slice(8, 12)])``, and lie in sequence in the part. A parameter may itself be the
    part at this index; without a gradient, return ``(None, slice(0, 4))``. names: the parameters' names in the
    reference, if the runtime knows them; like the contract's ``names``, which take precedence. max_norm: clipping norm
    before the update, for ``optimizer=``. masters: updates apply to copies in a wider type, so weights after them are
    not compared. accumulation: how the runtime sums gradients, except replicas' shares, if it declares so. outputs: by
    the names from the contract's ``outputs``, this rank's outputs per microbatch, in order. loss_scale: this rank's
    factor on losses before their backwards, divided out of its gradients before return.
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
        """Current outputs, as tensors."""
        given = {} if self.outputs is None else self.outputs
        return {name: tuple(_tensor(one) for one in every) for name, every in given.items() if every is not None}

    @cached_property
    def by_parameter(self) -> Mapping[int, Any] | None:
        """Gradients by parameter id. None if they are in ``.grad``."""
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
        """Microbatch losses, if returned as such."""
        return () if self.losses is None or _is_number(self.losses) else tuple(map(_float, self.losses))

    @property
    def whole_loss(self) -> float | None:
        """The step's total loss, if returned as such."""
        return _float(self.losses) if _is_number(self.losses) else None

    @property
    def norm(self) -> float | None:
        return None if self.grad_norm is None else _float(self.grad_norm)

    def actions(self, rank: int) -> tuple[Action, ...] | None:
        """Return ``rank``'s actions in order, if the runtime reports them."""
        if isinstance(self.trace, Trace):
            return tuple(span.action for span in self.trace.spans[rank])
        return (
            None if self.trace is None else tuple(a if isinstance(a, Action) else Action.parse(a) for a in self.trace)
        )


def understood(result: object, step: str, contract: Contract = DEFAULTS) -> StepResult:
    """Parse the result of ``step``, with defaults from ``contract``.

    Raises ``HandBackError`` for other results, or contradictions with the contract.
    """
    if result is None:
        raise HandBackError(f"{step} returned None: expected {_EXPECTED}")
    if isinstance(result, Generator):
        raise HandBackError(f"{step} yields, but is one step: pass operations=, the list that it goes through")
    handed = _in_place(result if isinstance(result, StepResult) else _from_tuple(result, step), step)
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
            raise HandBackError(f"{step} returned {_name_type(value)} as {what}: expected {expected}")
    try:
        handed.actions(0)
    except (ActionError, TypeError) as error:
        raise HandBackError(f"{step} returned a trace that cannot be read: {error}") from None
    _check_outputs(handed.outputs, step)
    return _by_contract(handed, step, contract)


def _by_contract(handed: StepResult, step: str, contract: Contract) -> StepResult:
    """Add the contract's words. Raises ``HandBackError`` for contradictions."""
    for word in ("loss_scale", "max_norm", "accumulation"):
        said, made = getattr(contract, word), getattr(handed, word)
        if said is not None and made is not None and said != made:
            raise HandBackError(
                f"{step} handed back {word}={_name_type(made)}, and the contract says {_name_type(said)}: "
                f"declare {word}={_name_type(made)}, if that is meant, or leave the word out of the contract"
            )
        handed = replace(handed, **{word: said if made is None else made})
    return handed


def _check_outputs(given: object, step: str) -> None:
    if given is not None and not isinstance(given, Mapping):
        raise HandBackError(f"{step} returned {_name_type(given)} as outputs: expected a mapping of names to them")
    for name, every in (given or {}).items():
        listed = isinstance(every, Sequence) and not isinstance(every, str)
        if every is not None and not (listed and all(isinstance(one, Tensor | Real) for one in every)):
            raise HandBackError(
                f"{step} returned {_name_type(every)} as the output {name!r}: expected a list with a tensor, or a "
                "number, for each microbatch"
            )


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def _from_tuple(result: object, step: str) -> StepResult:
    if not isinstance(result, tuple):
        return StepResult(result)
    if not 1 <= len(result) <= 4:
        raise HandBackError(
            f"{step} returned a tuple of {len(result)}: expected {_EXPECTED}; at most a trace after that"
        )
    return StepResult(*result)


def _in_place(handed: StepResult, step: str) -> StepResult:
    """Return ``handed`` with modules in a list, and bare gradients in their field."""
    made, gradients = handed.modules, handed.gradients
    if isinstance(made, nn.Module):
        made = [made]
    elif isinstance(made, Mapping) and gradients is None:
        made, gradients = [], made
    elif not isinstance(made, Sequence) or isinstance(made, str):
        raise HandBackError(f"{step} returned {_name_type(made)}: expected {_EXPECTED}")
    for one in made:
        if not isinstance(one, nn.Module):
            raise HandBackError(f"{step} returned {_name_type(one)} among its modules: expected modules only")
    if gradients is not None:
        _check_gradients(gradients, step, named=not made)
    return replace(handed, modules=list(made), gradients=gradients)


def _check_gradients(gradients: object, step: str, *, named: bool) -> None:
    if not isinstance(gradients, Mapping):
        raise HandBackError(
            f"{step} returned {_name_type(gradients)} as gradients: expected a mapping of parameter names"
        )
    for name, gradient in gradients.items():
        whole = gradient.part if isinstance(gradient, FlatShard) else gradient[0] if _is_part(gradient) else gradient
        known = isinstance(name, str) or (isinstance(name, nn.Parameter) and not named)
        if not known or not (whole is None or isinstance(whole, Tensor)):
            raise HandBackError(
                f"{step} returned a mapping with {name!r}: {_name_type(gradient)}: expected the name of a parameter "
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


def _name_type(value: object) -> str:
    text = repr(value) if isinstance(value, str | Real) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:59]}…"


def in_parts(held: Iterable[tuple[str, Any]]) -> tuple[tuple[Tensor | None, ...], dict[int, Shard]]:
    """Split gradients into local tensors and shards. Raises ``HandBackError``."""
    gradients: list[Tensor | None] = []
    shards: dict[int, Shard] = {}
    for k, (name, given) in enumerate(held):
        try:
            part, shard = _split_shard(given)
        except ShardError as error:
            raise HandBackError(f"the gradient of {name} cannot be read: {error}") from None
        if shard is not None:
            shards[k] = shard
        own = part.to_local() if isinstance(part, InShards) else part
        if own is not None and (why := _unreadable(own)):
            raise HandBackError(f"the gradient of {name} cannot be read: {why}")
        gradients.append(None if own is None else dense(own.detach()).to("cpu", copy=True))
    return tuple(gradients), shards


def _split_shard(given: Any) -> tuple[Tensor | None, Shard | None]:
    """Return a gradient's local tensor and its shard."""
    if isinstance(given, FlatShard):
        shard = flat_shard(given.start, given.part)
        return given.part if shard.count else None, shard
    part, where = given if isinstance(given, tuple) else (given, None)
    if where is None:
        return part, None if part is None else shard_of(part)
    return part, where if isinstance(where, Shard) else shard_at(where, part)


def _unreadable(gradient: Tensor) -> str:
    """Return why a gradient cannot be compared; empty if it can."""
    if gradient.is_meta:
        return "it is on the meta device, without any numbers"
    if gradient.is_quantized:
        return "it is quantized"
    if gradient.is_floating_point() or gradient.is_complex():
        return ""
    return f"its type is {gradient.dtype}: expected floating point"


_HOW = "it yields what it made of each, as: for operation, microbatches in operations: ...; yield stage, losses"


class Operation(NamedTuple):
    """An operation, ``train``, ``accumulate`` or ``eval``, with this rank's microbatches."""

    name: str
    microbatches: list[Any]


class Operations:
    """Iterates over expected operations; calls ``begins`` with each number, from 0, first.

    step: the user function's name.
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

    def collect(self, results: object) -> Iterator[object]:
        """Yield the result of each operation from ``results``, the user function's iterator.

        Raises ``HandBackError`` unless there is one per operation.
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
