"""Step results: accepted forms, with error messages for others."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeproof.core.contract import DEFAULTS, Contract
from pipeproof.core.observe.shards import Shard, ShardError, flat_shard, local_tensor, shard_at, shard_of
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

        def as_tensor(value: Any) -> Tensor:
            if isinstance(value, Tensor):
                return value.detach().to("cpu", copy=True)
            return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)

        every = (self.outputs or {}).items()
        return {name: tuple(map(as_tensor, one)) for name, one in every if one is not None}

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
    if isinstance(result, tuple) and not 1 <= len(result) <= 4:
        also = "at most a trace after that"
        raise HandBackError(f"{step} returned a tuple of {len(result)}: expected {_EXPECTED}; {also}")
    if not isinstance(result, StepResult):
        result = StepResult(*result) if isinstance(result, tuple) else StepResult(result)
    made, gradients = result.modules, result.gradients
    if isinstance(made, nn.Module):
        made = [made]
    elif isinstance(made, Mapping) and gradients is None:
        made, gradients = [], made
    elif not isinstance(made, Sequence) or isinstance(made, str):
        raise HandBackError(f"{step} returned {_name_type(made)}: expected {_EXPECTED}")
    handed = replace(result, modules=list(made), gradients=gradients)
    for why in _complaints(handed):
        raise HandBackError(f"{step} returned {why}")
    for word in ("loss_scale", "max_norm", "accumulation"):
        said, made = getattr(contract, word), getattr(handed, word)
        if said is not None and made is not None and said != made:
            raise HandBackError(
                f"{step} handed back {word}={_name_type(made)}, and the contract says {_name_type(said)}: "
                f"declare {word}={_name_type(made)}, if that is meant, or leave the word out of the contract"
            )
        handed = replace(handed, **{word: said if made is None else made})
    return handed


def _complaints(handed: StepResult) -> Iterator[str]:
    """Yield what was returned that cannot be read."""
    for one in handed.modules:
        if not isinstance(one, nn.Module):
            yield f"{_name_type(one)} among its modules: expected modules only"
    gradients, losses, scale, outputs = handed.gradients, handed.losses, handed.loss_scale, handed.outputs
    if not isinstance(gradients, Mapping | None):
        yield f"{_name_type(gradients)} as gradients: expected a mapping of parameter names"
    for name, gradient in (gradients or {}).items():
        whole = gradient.part if isinstance(gradient, FlatShard) else gradient
        if isinstance(gradient, tuple) and len(gradient) == 2 and isinstance(gradient[1], slice | tuple | list):
            whole = gradient[0]
        known = isinstance(name, str) or (isinstance(name, nn.Parameter) and bool(handed.modules))
        if not known or not isinstance(whole, Tensor | None):
            wanted = "the name of a parameter and its gradient, a tensor or None, or a part of it and its index"
            yield f"a mapping with {name!r}: {_name_type(gradient)}: expected {wanted}"
    if isinstance(losses, Tensor):
        numbers = losses.dim() <= 1 and not losses.is_complex()
    else:
        listed = isinstance(losses, Sequence) and not isinstance(losses, str)
        numbers = all(map(_is_number, losses)) if listed else _is_number(losses)
    for value, what, fits, expected in (
        (losses, "losses", numbers, "a number for each microbatch, or one for the step"),
        (handed.grad_norm, "the gradient norm", _is_number(handed.grad_norm), "a number"),
        (handed.max_norm, "max_norm", _is_number(handed.max_norm), "a number, or None"),
        (scale, "loss_scale", scale is not None and _is_number(scale) and scale > 0, "a number above 0"),
        (outputs, "outputs", isinstance(outputs, Mapping), "a mapping of names to them"),
    ):
        if value is not None and not fits:
            yield f"{_name_type(value)} as {what}: expected {expected}"
    for name, every in (outputs or {}).items():
        listed = isinstance(every, Sequence) and not isinstance(every, str)
        if every is not None and not (listed and all(isinstance(one, Tensor | Real) for one in every)):
            wanted = "a list with a tensor, or a number, for each microbatch"
            yield f"{_name_type(every)} as the output {name!r}: expected {wanted}"
    try:
        handed.actions(0)
    except (ActionError, TypeError) as error:
        yield f"a trace that cannot be read: {error}"


def _float(value: Any) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex())


def _name_type(value: object) -> str:
    text = repr(value) if isinstance(value, str | Real) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:59]}…"


def in_parts(held: Iterable[tuple[str, Any]]) -> tuple[tuple[Tensor | None, ...], dict[int, Shard]]:
    """Split gradients into local tensors and shards. Raises ``HandBackError``."""
    gradients: list[Tensor | None] = []
    shards: dict[int, Shard] = {}
    for k, (name, given) in enumerate(held):
        part, where = given if isinstance(given, tuple) else (given, None)
        try:
            if isinstance(given, FlatShard):
                where = flat_shard(given.start, given.part)
                part = given.part if where.count else None
            elif where is not None:
                where = where if isinstance(where, Shard) else shard_at(where, part)
            elif part is not None:
                where = shard_of(part)
        except ShardError as error:
            raise HandBackError(f"the gradient of {name} cannot be read: {error}") from None
        if where is not None:
            shards[k] = where
        if part is not None:
            part, why = local_tensor(part), ""
            if part.is_meta:
                why = "it is on the meta device, without any numbers"
            elif part.is_quantized:
                why = "it is quantized"
            elif not part.is_floating_point() and not part.is_complex():
                why = f"its type is {part.dtype}: expected floating point"
            if why:
                raise HandBackError(f"the gradient of {name} cannot be read: {why}")
            part = dense(part.detach()).to("cpu", copy=True)
        gradients.append(part)
    return tuple(gradients), shards


_HOW = "it yields what it made of each, as: for operation, microbatches in operations: ...; yield stage, losses"


class Operation(NamedTuple):
    """An operation, ``train``, ``accumulate`` or ``eval``, with this rank's microbatches."""

    name: str
    microbatches: list[Any]


def through_operations(
    call: Callable[[Iterator[Operation]], object],
    expected: Sequence[Operation],
    begins: Callable[[int], None],
    *,
    step: str,
) -> Iterator[object]:
    """Yield the result of each operation from ``call``, the user's function of their iterator, named ``step``.

    ``begins`` gets each operation's number, from 0, first. Raises ``HandBackError`` unless there is one per operation.
    """
    __tracebackhide__ = True
    begun = made = 0

    def each() -> Iterator[Operation]:
        nonlocal begun
        for number, operation in enumerate(expected):
            begins(number)
            begun += 1
            yield operation
            if begun > made:
                raise HandBackError(
                    f"{step} asked for another operation before it handed back operation {begun}: {_HOW}"
                )

    results = call(each())
    if not isinstance(results, Iterator):
        raise HandBackError(f"{step} returned a {type(results).__name__}; with operations= {_HOW}")
    for result in results:
        if made == begun:
            raise HandBackError(f"{step} handed back more than its operations: {_HOW}")
        made += 1
        yield result
    if made < len(expected):
        raise HandBackError(f"{step} handed back {made} of {len(expected)} operations: {_HOW}")
