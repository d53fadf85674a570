"""Gradients that a stage hands on: only ways from the loss to its inputs through the stage.

A tensor with several consuming stages, or with another made from it, has a gradient of several parts. The stage that is
given it has one of them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeproof.reference.graph import hook_at
from pipeproof.reference.outputs import Place
from pipeproof.reference.step import Gradient


@dataclass(frozen=True)
class Cut:
    """Places at a stage's begin and end."""

    begins: frozenset[Place]
    ends: frozenset[Place]


def flows(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], at: Sequence[Tensor], also: Sequence[Tensor] = ()
) -> tuple[list[Gradient], list[Gradient]]:
    """Compute flow from ``outputs`` to each tensor ``at``, without passing any, and then to ``also``."""
    found: dict[int, Tensor] = {}

    def stop(number: int, gradient: Tensor) -> Tensor:
        found[number] = gradient
        return torch.zeros_like(gradient)

    hooks = [hook_at(tensor, partial(stop, number)) for number, tensor in enumerate(at)]
    try:
        made = torch.autograd.grad(outputs, [*at, *also], gradients, allow_unused=True, retain_graph=True)
    finally:
        for hook in hooks:
            hook.remove()
    return [found.get(number) for number in range(len(at))], list(made[len(at) :])


class AutogradGraph:
    """Autograd's graph after a forward, with tensor places. Flow can be stopped at a place."""

    def __init__(self) -> None:
        self._edges: dict[Place, GradientEdge] = {}
        self._stopped: dict[Place, Gradient] = {}

    def note(self, place: Place, tensor: Tensor) -> None:
        """Record ``tensor`` at ``place``."""
        if tensor.requires_grad:
            self._edges[place] = get_gradient_edge(tensor)
            hook_at(tensor, partial(self._flow_of, place))

    def hand_on(self, objective: Tensor, cut: Cut) -> Mapping[Place, Gradient]:
        """Gradient at each place where a stage begins, from flow through its ends alone."""
        received = self._flow([objective], [torch.ones_like(objective)], cut.ends)
        made = {place: gradient for place, gradient in received.items() if gradient is not None}
        return self._flow([self._edges[place] for place in made], list(made.values()), cut.begins)

    def _flow(
        self, outputs: Sequence[Tensor] | Sequence[GradientEdge], gradients: Sequence[Tensor], to: Collection[Place]
    ) -> dict[Place, Gradient]:
        """Flow from ``outputs`` to these places, stopped at each."""
        known = [place for place in to if place in self._edges]
        self._stopped = dict.fromkeys(known)
        if outputs and known:
            edges = [self._edges[place] for place in known]
            torch.autograd.grad(outputs, edges, gradients, allow_unused=True, retain_graph=True)
        found, self._stopped = self._stopped, {}
        return found

    def _flow_of(self, place: Place, gradient: Tensor) -> Gradient:
        if place not in self._stopped:
            return None
        self._stopped[place] = gradient
        return torch.zeros_like(gradient)
