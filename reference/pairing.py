"""Contributions by pairing: a stage's gradient for a microbatch's activation and another's output gradient.

A correct backward pairs microbatch i's activation with microbatch i's output gradient. A wrong pairing can be found in
its gradients, if the contributions of the other pairings are known. Everything here is in fp64.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pipeproof.reference.data import Batch
from pipeproof.reference.handed_on import flows
from pipeproof.reference.model import Model
from pipeproof.reference.step import Gradient, Recipe, Site, Stage, objective

Tensors = tuple[Tensor, ...]
# From a stage's outputs to the gradients in them; None where it does not fit them.
Flow = Callable[[Tensors], Sequence[Gradient] | None]


@dataclass(frozen=True)
class Contributed:
    """A stage backward's result: gradients by parameter name, and for each stage input."""

    gradients: Mapping[str, Gradient]
    inputs: tuple[Gradient, ...]


class Pairings:
    """An operation on a single device, in stages: gradients by pairing.

    Here no pair is known. unpaired: why; empty if pairs are known.
    """

    stages: int
    batches: Sequence[Batch]
    unpaired = ""

    @property
    def microbatches(self) -> int:
        return len(self.batches)

    def parameters(self, stage: Stage) -> Mapping[str, Tensor]:
        """Trained parameters by name, each once."""
        raise NotImplementedError

    def contribution(self, stage: Stage, j: int) -> Contributed:
        """Microbatch j's contribution."""
        raise NotImplementedError

    def pair(self, stage: Stage, i: int, flows: Sequence[Flow]) -> Sequence[Contributed | None]:
        """Microbatch i's activation with each of ``flows``; None for one that does not fit, or is unknown."""
        return [None] * len(flows)

    def seed(self, stage: Stage, j: int) -> Flow:
        """Microbatch j's seed for a backward: its target on the last stage, else its flow."""
        return self.target(j) if stage == self.stages - 1 else self.flow(stage, j)

    def target(self, j: int) -> Flow:
        """The flow from the loss with microbatch j's target, for any outputs."""
        return lambda _: None

    def flow(self, stage: Stage, j: int) -> Flow:
        """Microbatch j's output gradient of ``stage``, unchanged."""
        return lambda _: None


class Sums(Pairings):
    """Contributions ``made``, and ``before``, the parameters as far as known, all by site.

    A single one for all ``batches`` is their sum.
    """

    def __init__(
        self,
        made: Sequence[Mapping[Site, Gradient]],
        before: Mapping[Site, Tensor],
        batches: Sequence[Batch],
        *,
        unpaired: str,
    ) -> None:
        self._made, self._before, self.batches, self.unpaired = made, before, batches, unpaired
        self.stages = 1 + max((stage for stage, _ in made[0]), default=0)

    @property
    def microbatches(self) -> int:
        return len(self._made)

    def parameters(self, stage: Stage) -> Mapping[str, Tensor]:
        own = {site: one for site, one in self._made[0].items() if site[0] == stage and one is not None}
        return {site[1]: self._before.get(site, torch.zeros_like(one)) for site, one in own.items()}

    def contribution(self, stage: Stage, j: int) -> Contributed:
        own = {site[1]: one for site, one in self._made[j].items() if site[0] == stage}
        return Contributed({name: None if one is None else one.cpu().double() for name, one in own.items()}, ())


class Pairing(Pairings):
    """An operation in our model, by stage: inputs, and every possible contribution.

    ``before``: the operation's initial parameters, by name; ``layers``: the layers of each stage. A parameter with
    several names in one stage is listed under the first.
    """

    def __init__(
        self,
        model: Model,
        *,
        before: Mapping[str, Tensor],
        layers: Sequence[range],
        batches: Sequence[Batch],
        recipe: Recipe,
    ) -> None:
        self._recipe, self._layers, self._before = recipe, layers, before
        self._model = copy.deepcopy(model).double()
        with torch.no_grad():
            for name, parameter in self._model.named_parameters(remove_duplicate=False):
                parameter.copy_(before[name])
        self._model.train()
        self.stages = len(layers)
        self.batches = [batch.cast(torch.float64) for batch in batches]
        self._loss_fn, self._divisor = objective(self._model, self.batches, recipe)
        self._made: dict[tuple[Stage, int], Contributed] = {}

    def with_batches(self, batches: Sequence[Batch]) -> "Pairing":
        """Keep the parameters, with other microbatches."""
        return Pairing(self._model, before=self._before, layers=self._layers, batches=batches, recipe=self._recipe)

    def parameters(self, stage: Stage) -> Mapping[str, Tensor]:
        return self._trained[stage]

    @cached_property
    def _trained(self) -> list[dict[str, Tensor]]:
        """Trained parameters by stage. Kept: the search takes as long as a small backward."""
        model = self._model
        every = [[piece for layer in layers for piece in model.layers[layer]] for layers in self._layers]
        return [
            trained(
                (f"{piece}.{name}", parameter)
                for piece in pieces
                for name, parameter in model.get_submodule(piece).named_parameters(remove_duplicate=False)
            )
            for pieces in every
        ]

    @cached_property
    def inputs(self) -> list[list[Tensors]]:
        """``inputs[s][i]``: inputs to stage s for microbatch i."""
        with torch.no_grad():
            rows = [[batch.inputs for batch in self.batches]]
            for stage in range(self.stages - 1):
                rows.append([self._model.through(self._layers[stage], x) for x in rows[-1]])
        return rows

    @cached_property
    def _outputs(self) -> list[Tensors]:
        """Last stage's outputs for each microbatch."""
        with torch.no_grad():
            return [self._model.through(self._layers[-1], x) for x in self.inputs[-1]]

    def target(self, j: int) -> Flow:
        target = self.batches[j].target
        return loss_flow(self._outputs[j], lambda leaves: self._loss_fn(leaves[0], target) / self._divisor)

    def flow(self, stage: Stage, j: int) -> Flow:
        last = stage == self.stages - 1
        gradients = self.target(j)(self._outputs[j]) if last else self.contribution(stage + 1, j).inputs
        return lambda _: gradients

    def contribution(self, stage: Stage, j: int) -> Contributed:
        if (stage, j) not in self._made:
            (made,) = self.contribute(stage, self.inputs[stage][j], [self.seed(stage, j)])
            assert made is not None, "a microbatch fits itself"
            self._made[stage, j] = made
        return self._made[stage, j]

    def pair(self, stage: Stage, i: int, flows: Sequence[Flow]) -> list[Contributed | None]:
        return self.contribute(stage, self.inputs[stage][i], flows)

    def contribute(self, stage: Stage, inputs: Tensors, flows: Sequence[Flow]) -> list[Contributed | None]:
        """Run a forward on ``stage`` and a backward for each flow; None for a flow that does not fit."""
        leaves = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs)
        outputs = self._model.through(self._layers[stage], leaves)
        return [backward(self.parameters(stage), leaves, outputs, flow) for flow in flows]


def trained(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Trained parameters by name, each once, by its first."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            found.setdefault(id(parameter), (name, parameter))
    return dict(found.values())


def loss_flow(own: Tensors, loss: Callable[[Tensors], Tensor]) -> Flow:
    """The flow from a ``loss`` of outputs like ``own``, for any such outputs."""

    def flow(outputs: Tensors) -> Sequence[Gradient] | None:
        if [y.shape for y in outputs] != [y.shape for y in own]:
            return None
        leaves = tuple(y.detach().requires_grad_() for y in outputs)
        with torch.enable_grad():
            return torch.autograd.grad(loss(leaves), leaves, allow_unused=True)

    return flow


def backward(parameters: Mapping[str, Tensor], leaves: Tensors, outputs: Tensors, flow: Flow) -> Contributed | None:
    """Compute gradients from ``flow`` into ``outputs``; None if it does not fit."""
    gradients = flow(outputs)
    if gradients is None or len(gradients) != len(outputs):
        return None
    seeds = [(y, d) for y, d in zip(outputs, gradients, strict=True) if d is not None and y.requires_grad]
    if any(y.shape != d.shape for y, d in seeds):
        return None
    if not seeds:
        return Contributed(dict.fromkeys(parameters), (None,) * len(leaves))
    outputs, gradients = zip(*seeds, strict=True)
    wanted = [x for x in leaves if x.requires_grad]
    handed_on, found = flows(outputs, gradients, wanted, list(parameters.values()))
    rest = iter(handed_on)
    inputs = tuple(next(rest) if x.requires_grad else None for x in leaves)
    return Contributed(dict(zip(parameters, found, strict=True)), inputs)
