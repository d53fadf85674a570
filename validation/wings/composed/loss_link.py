"""The loss as a link of its own: what ``loss_fn`` makes of the last stage's output, and what flows back from it."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pipeproof.core.limits import precision_of
from pipeproof.observers.calls import Call
from pipeproof.observers.own_losses import leaves_of
from pipeproof.observers.recording import RECEIVED
from pipeproof.observers.sketch import Sketch, sketch
from pipeproof.observers.tensors_in import tensors_in
from pipeproof.reference.again import Again, State, repeats
from pipeproof.reference.step import LossError, differentiable
from pipeproof.wings.composed.division import round_factor
from pipeproof.wings.composed.link import Link, Point, seen_at
from pipeproof.worlds.drawing import draw_some


@dataclass(frozen=True)
class LossDue:
    """What is due of one call: its loss, undivided, and the gradient of each output, by number.

    ``trained``: the tensors that the loss trains besides what the stage gives, with their gradients.
    """

    loss: Tensor | None = None
    flows: Mapping[int, Tensor] = field(default_factory=dict)
    trained: Sequence[tuple[Tensor, Tensor]] = ()


@dataclass
class LossLink:
    """``loss_fn`` of each call's output and its target, divided by ``divisor``; None: the last stage gives the loss.

    Outputs are leaves here, so that the loss is held against ``loss_fn`` alone, and the stage against what came back.
    """

    loss_fn: Callable[[Any, Any], Tensor] | None
    divisor: float
    targets: Sequence[Any]
    _cast: bool | None = None  # whether it is cast as the calls are, once that is known

    def due(self, k: int, output: object, *, call: Call, model: Again, disturb: bool = False) -> LossDue:
        """What the loss of call ``k``, which gave ``output``, gives. ``disturb``: random numbers are others."""
        if disturb:
            draw_some()
        both = self._cast is None and _state(call).casts and not disturb
        ways = [True, False] if both else [self._cast is not False]
        found = [self._made_in(call, model, output, self.targets[k], cast=way) for way in ways]
        if not both:
            return found[0]
        apart = [_apart(one, call) for one in found]  # what came back tells which was meant
        best = apart.index(min(apart))
        self._cast = None if apart[best] or len({*apart}) == 1 else ways[best]  # zeros are as near to both
        return found[best]

    def of_another(self, k: int, output: object, *, call: Call, model: Again) -> tuple[int, LossDue] | None:
        """The call by whose target the loss of ``output`` gives what came back in call ``k``, and what it gives."""
        for j, target in enumerate(self.targets):
            if _form(target) != _form(self.targets[k]):
                continue
            try:
                due = self._made_in(call, model, output, target, cast=self._cast is not False)
            except Exception:  # no one type: it is the user's code, on a target that is not meant for it
                continue
            if due.flows and not _apart(due, call):
                return j, due
        return None

    def _made_in(self, call: Call, model: Again, output: object, target: Any, *, cast: bool) -> LossDue:
        """What a loss gives; ``cast``: types are cast as in the call."""
        state = _state(call)
        with state.cast() if cast else nullcontext(), model.looking(state, "the loss"):
            return self._made(output, target)

    def _made(self, output: object, target: Any) -> LossDue:
        made = tensors_in(output)
        leaves = {id(one): one.detach().requires_grad_(one.requires_grad) for one in made}
        given = {key: one.clone() for key, one in leaves.items()}  # it may write to them
        own = tree_map_only(Tensor, lambda one: given.get(id(one), one), output)
        loss = own if self.loss_fn is None else self.loss_fn(own, target)
        try:
            loss = differentiable(loss)
        except LossError:  # it may train nothing
            one_number = isinstance(loss, Tensor) and loss.numel() == 1
            return LossDue(loss.detach()) if one_number else LossDue()
        again = repeats(made)
        wanting = {n: leaves[id(one)] for n, one in enumerate(made) if one.requires_grad and n not in again}
        more = leaves_of(loss, wanting.values())
        every = [*wanting.values(), *more]
        flows = torch.autograd.grad(loss / self.divisor, every, allow_unused=True) if every else ()
        came = {n: flow for n, flow in zip(wanting, flows, strict=False) if flow is not None}
        return LossDue(loss.detach(), came, [*zip(more, flows[len(wanting) :], strict=True)])


def _form(target: object) -> list[torch.Size]:
    return [one.shape for one in tensors_in(target)]


def _state(call: Call) -> State:
    assert call.again is not None, "the calls of a stage that is checked so are kept"
    return call.again.state


def _apart(due: LossDue, call: Call) -> float:
    """How far, relative to its size, what came back to ``call`` is from any multiple of what is due; 0: to the bit."""

    def apart(seen: Sketch | None, flow: Tensor) -> float:
        if seen is None or (own := sketch(flow, known=seen)) is seen:
            return math.inf if seen is None else 0.0
        size = seen.norm / own.norm if own.norm else 1.0
        return min(seen.distance(own.times(times)) for times in (size, -size))

    return max((apart(call.output_gradients.get(n), flow) for n, flow in due.flows.items()), default=0.0)


def factors_of(calls: Sequence[Call], links: Sequence[Link]) -> list[float | None]:
    """How many times what is due came back from the loss: one number, None if several, none if nothing is due."""
    every = [
        (call, link, at) for call, link in zip(calls, links, strict=True) for at, one in link.gives.items() if one.norm
    ]
    found = [factor_at(call, link, at) for call, link, at in every if at[0] == RECEIVED]
    within = max((precision_of(link.gives[at].dtype).least for _, link, at in every if at[0] == RECEIVED), default=0.0)
    first = found[0] if found else None
    alike = first is not None and all(one is not None and abs(one - first) <= within * abs(first) for one in found)
    return found[:1] if alike or not found else [None]


def factor_at(call: Call, link: Link, at: Point) -> float | None:
    """How many times what is due came back there; None if it is no multiple."""
    due, seen = link.gives[at], seen_at(call, at)
    if seen is not None and seen.distance(due) <= link.allowed.get(at, 0.0):
        return 1.0
    factor = None if seen is None else seen.factor(due)
    return None if factor is None else round_factor(factor, precision_of(due.dtype).least)


def scale_flows(link: Link, factor: float) -> Link:
    """``link``, where so many times what was due comes back: to rounding, for products may have another order."""
    due = {at: one for at, one in link.gives.items() if at[0] == RECEIVED and one.norm and factor != 1.0}
    limits = {at: precision_of(one.dtype).least for at, one in due.items()}
    more = {at: one.times(factor) for at, one in due.items()}
    return replace(link, gives={**link.gives, **more}, limits={**limits, **link.limits})


def take_target(call: Call, link: Link, due: LossDue) -> Link:
    """``link`` of a call that met another target, of which that is ``due`` which was seen."""
    came = {(RECEIVED, n): call.output_gradients[n] for n in due.flows if n in call.output_gradients}
    return link if due.loss is None else replace(link, gives={**link.gives, **came}, loss=due.loss.item())


def weightless_microbatches(numbers: Sequence[int], links: Sequence[Link]) -> frozenset[int]:
    """Of the microbatches of the last stage's calls, by ``numbers``, those whose loss is known and trains nothing.

    Where that is so of all, nobody knows whether it is meant.
    """
    owing = {m: link.owes for m, link in zip(numbers, links, strict=False) if link.loss is not None}
    return frozenset(m for m, owes in owing.items() if not owes) if any(owing.values()) else frozenset()
