"""The loss as a link: ``loss_fn`` on the last stage's output, its gradients, and its divisor."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pipeproof.core.ledger import Ledger
from pipeproof.core.limits import precision_of
from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.own_losses import leaves_of
from pipeproof.core.observe.sketch import Sketch, sketch
from pipeproof.core.observe.tensors_in import tensors_in
from pipeproof.core.reason import Reason
from pipeproof.reference.accumulation import Accumulation
from pipeproof.reference.again import Again, Called, State, repeats
from pipeproof.reference.step import LossError, differentiable
from pipeproof.whitebox.crossings import is_near
from pipeproof.wings.composed.link import Link, Point, sketch_at
from pipeproof.worlds.settings import draw_some

_TIMES = "all losses are {:g} times the contract's: if that is meant, loss_scale={:g}"
_OR_ELSE = ", or loss_divisor={:g} where gradients are not divided by it"
_NO_SCALE = "all losses are {:g} times the contract's, which no contract says: let loss_fn give what is trained"
_UNEQUAL = (
    "replicas have unequal numbers of microbatches, and losses are not divided by these and averaged: say "
    "loss_divisor={:g}, or what it is"
)


@dataclass(frozen=True)
class LossExpected:
    """The expected undivided loss of one call, and the gradient of each output, by number.

    ``trained``: gradients of other tensors that the loss trains.
    """

    value: Tensor | None = None
    flows: Mapping[int, Tensor] = field(default_factory=dict)
    trained: Sequence[tuple[Tensor, Tensor]] = ()


@dataclass
class LossLink:
    """``loss_fn`` of each call's output and target, divided by ``divisor``; None: the last stage gives the loss.

    Outputs are leaves here: the loss is checked against ``loss_fn`` alone, and the stage against its output gradients.
    """

    loss_fn: Callable[[Any, Any], Tensor] | None
    divisor: float
    targets: Sequence[Any]
    _cast: bool | None = None  # cast like the calls, once known

    def expect(self, k: int, output: object, *, call: Call, model: Again, disturb: bool = False) -> LossExpected:
        """Compute the loss of call ``k`` from ``output``. ``disturb``: draws different random numbers."""
        if disturb:
            draw_some()
        both = self._cast is None and copy_call(call).state.casts and not disturb
        ways = [True, False] if both else [self._cast is not False]
        found = [self._make_in(call, model, output, self.targets[k], cast=way) for way in ways]
        if not both:
            return found[0]
        apart = [_distance(one, call) for one in found]  # the observed gradient decides
        best = apart.index(min(apart))
        self._cast = None if apart[best] or len({*apart}) == 1 else ways[best]  # zeros are as near to both
        return found[best]

    def of_another(self, k: int, output: object, *, call: Call, model: Again) -> tuple[int, LossExpected] | None:
        """Find the call whose target, with ``output``, explains the gradient in call ``k``; with its loss."""
        forms = [[one.shape for one in tensors_in(target)] for target in self.targets]
        for j, target in enumerate(self.targets):
            if forms[j] != forms[k]:
                continue
            try:
                found = self._make_in(call, model, output, target, cast=self._cast is not False)
            except Exception:  # all types: user code, on another call's target
                continue
            if found.flows and not _distance(found, call):
                return j, found
        return None

    def _make_in(self, call: Call, model: Again, output: object, target: Any, *, cast: bool) -> LossExpected:
        """Compute a loss; ``cast``: cast types as in the call."""
        state: State = copy_call(call).state
        with state.cast() if cast else nullcontext(), model.looking(state, "the loss"):
            made = tensors_in(output)
            leaves = {id(one): one.detach().requires_grad_(one.requires_grad) for one in made}
            given = {key: one.clone() for key, one in leaves.items()}  # a loss may write to outputs
            own = tree_map_only(Tensor, lambda one: given.get(id(one), one), output)
            loss = own if self.loss_fn is None else self.loss_fn(own, target)
            try:
                loss = differentiable(loss)
            except LossError:  # it may train nothing
                one_number = isinstance(loss, Tensor) and loss.numel() == 1
                return LossExpected(loss.detach() if one_number else None)
            again = repeats(made)
            wanting = {n: leaves[id(one)] for n, one in enumerate(made) if one.requires_grad and n not in again}
            more = leaves_of(loss, wanting.values())
            every = [*wanting.values(), *more]
            flows = torch.autograd.grad(loss / self.divisor, every, allow_unused=True) if every else ()
        came = {n: flow for n, flow in zip(wanting, flows, strict=False) if flow is not None}
        return LossExpected(loss.detach(), came, [*zip(more, flows[len(wanting) :], strict=True)])


def copy_call(call: Call) -> Called:
    """Return ``call`` in the form for a rerun, which checked calls keep."""
    assert call.again is not None, "the calls of a stage that is checked so are kept"
    return call.again


def _distance(expected: LossExpected, call: Call) -> float:
    """Relative distance from the gradient of ``call`` to a multiple of the expected; 0 if equal in all bits."""

    def distance(observed: Sketch | None, flow: Tensor) -> float:
        if observed is None or (own := sketch(flow, known=observed)) is observed:
            return math.inf if observed is None else 0.0
        size = observed.norm / own.norm if own.norm else 1.0
        return min(observed.distance(own.times(times)) for times in (size, -size))

    return max((distance(call.output_gradients.get(n), flow) for n, flow in expected.flows.items()), default=0.0)


def factor_at(call: Call, link: Link, at: Point) -> float | None:
    """Return the factor on the expected gradient; None if it is no multiple."""
    expected, observed = link.gives[at], sketch_at(call, at)
    if link.is_right(at, observed):
        return 1.0
    factor = None if observed is None else observed.factor(expected)
    return None if factor is None else round_factor(factor, precision_of(expected.dtype).least)


def round_factor(factor: float, within: float) -> float:
    """Round ``factor`` to a whole number, or its inverse, if it lies ``within`` rounding; else return it."""
    for one in (round(factor), 1 / (round(1 / factor) or float("inf"))):
        if one and abs(factor - one) <= within * abs(factor):
            return float(one)
    return factor


@dataclass(frozen=True)
class Division:
    """The step's division by its contract: losses by the number of microbatches, or gradients at the end.

    ``scaled``: factor on losses, divided out before gradients are read. ``own``: divisor of losses in each of the
    ``replicas``, which then average. ``alike``: all have the same divisor. ``declared``: the contract gives the scale.
    ``came``: observed gradients of losses, in multiples of the expected; 1 if ``unclear``, as they have no common one.
    ``undeclared``: another factor came back, and replicas have unequal numbers of microbatches.
    """

    accumulation: Accumulation
    scaled: float = 1.0
    own: float = 1.0
    replicas: int = 1
    alike: bool = True
    declared: bool = False
    came: float = 1.0
    unclear: bool = False
    undeclared: bool = False

    def with_factors(self, factors: Sequence[float | None]) -> "Division":
        """Return the division with the last stages' ``factors``; None if microbatches have several."""
        first = factors[0] if factors else 1.0
        unclear = first is None or not all(is_near(one, first) for one in factors)
        came = 1.0 if first is None or unclear else first
        return replace(
            self, came=came, unclear=unclear, undeclared=not self.alike and any(one != 1.0 for one in factors)
        )

    @property
    def divisor(self) -> float:
        """Divisor of losses before their backwards."""
        return (1.0 if self.accumulation.late else self.own) / self.scaled

    @property
    def whole(self) -> float:
        """Divisor of the loss over all replicas."""
        return self.own * self.replicas

    @property
    def scale(self) -> float:
        """Divisor of sums over all replicas."""
        return (self.whole if self.accumulation.late else self.replicas) * self.scaled * self.times

    @property
    def times(self) -> float:
        """Undeclared factor on sums, which the step should still divide out.

        Gradients show whether it did. With a declared scale, the mismatch is at the loss, and gradients follow from it.
        """
        return self.came if self.adds_up or not self.declared else 1.0

    @property
    def adds_up(self) -> bool:
        """Whether replicas divide losses by their number, too, and add gradients up: these are the same."""
        return self.alike and self.replicas > 1 and not self.accumulation.late and self.came == 1 / self.replicas

    def doubt(self, ledger: Ledger, microbatches: int) -> str:
        """Enter an undeclared factor on losses. Returns why gradients are then unknown, or an empty string."""
        if self.undeclared:
            return Reason.LOSS_SCALE.doubt(_UNEQUAL.format(microbatches))
        if self.came == 1.0 or self.adds_up:
            return ""
        scale = self.scaled * self.came
        message = (_TIMES if scale > 0 else _NO_SCALE).format(self.came, scale)
        if self.declared:
            ledger.remark("boundaries", message)
        else:
            more = scale > 0 and not self.accumulation.late
            ledger.doubt("boundaries", message + more * _OR_ELSE.format(self.whole / self.came), Reason.LOSS_SCALE)
        return ""

    def divide(self, sums: Mapping[str, Any], *, undo: bool = False) -> dict[str, Any]:
        """Divide ``sums`` by their excess factor, or ``undo`` that: causes are computed on undivided gradients."""
        scale = self.scale
        by = {name: one for name, one in sums.items() if isinstance(one, Tensor) and scale != 1.0}
        return {**sums, **{name: one * scale if undo else one / scale for name, one in by.items()}}
