"""Contributions by pairing in a foreign model: its graphs are kept, and differentiated between stages.

Only the stages of such a model's parameters are known. A stage ends at the last module outputs without a parameter of a
later stage in them. A trial confirms these ends: flow through them must give each microbatch's gradients.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pipeproof.reference.choices import choosing
from pipeproof.reference.copied import deep_copy
from pipeproof.reference.data import Batch
from pipeproof.reference.graded import ByUse, differentiate
from pipeproof.reference.graph import Edge, depths, ends_of, frontier
from pipeproof.reference.handed_on import flows
from pipeproof.reference.outputs import Place, module_of, outputs_noted
from pipeproof.reference.pairing import Contributed, Flow, Pairings, Tensors, backward, loss_flow, trained
from pipeproof.reference.step import Gradient, Loss, Site, Stage, dense

_ALIKE = 1e-4  # losses in two precisions that differ by more were not drawn alike
_THROUGH = 1e-3  # relative: gradients through the ends of stages against the direct ones
_MOST = 1 << 27  # numbers that all pairs of a stage may need


@dataclass(frozen=True)
class TracedRun:
    """A microbatch in the model: its output's leaves, their structure, and the divided loss.

    ``noted``: modules' output tensors, in order, with their places.
    """

    leaves: list[Any]
    form: TreeSpec
    objective: Tensor
    loss: float
    noted: tuple[tuple[Place, Tensor], ...]

    @property
    def outputs(self) -> Tensors:
        """Output leaves receiving gradients."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Tensor) and leaf.requires_grad)

    def rebuilt(self, outputs: Sequence[Tensor]) -> Any:
        """Rebuild the output with replaced tensors."""
        own, others = {id(one) for one in self.outputs}, iter(outputs)
        return tree_unflatten([next(others) if id(leaf) in own else leaf for leaf in self.leaves], self.form)


class Traced(Pairings):
    """Any model's step on a single device, for ``Pairings``.

    ``held``: the parameters of every stage, by their names in the model; it begins with the first stage that has any,
    as for a part of a larger one. ``losses``: each microbatch's. Everything is in fp64 unless the model does not run in
    it, or draws other random numbers there. ``ends``: places where a stage is known to end; unknown ones are searched.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        held: Collection[Site],
        batches: Sequence[Batch],
        loss: Loss,
        losses: Sequence[float],
        ends: Mapping[Stage, Collection[Place]],
    ) -> None:
        self._held, self._loss, self._ends = sorted(held), loss, ends
        self.stages = 1 + max(stage for stage, _ in held)
        self._first = min(stage for stage, _ in held)
        self._flowing: dict[tuple[Stage, int], tuple[Gradient, ...]] = {}
        try:
            self._use(deep_copy(model).double())
            self.batches = [batch.cast(torch.float64) for batch in batches]
            self._runs = [self._run(batch) for batch in self.batches]
            wide = [run.loss for run in self._runs]
        except Exception:  # no one type: the user's own code ran, which may know of one dtype only
            wide = [math.nan] * len(losses)
        if not all(abs(one - loss) <= _ALIKE * abs(loss) for one, loss in zip(wide, losses, strict=True)):
            self._use(model)
            self.batches = list(batches)
            self._runs = [self._run(batch) for batch in self.batches]

    def parameters(self, stage: Stage) -> Mapping[str, Tensor]:
        return trained((name, self._leaves[owner, name]) for owner, name in self._held if owner == stage)

    def contribution(self, stage: Stage, j: int) -> Contributed:  # needs no stage end
        return Contributed(self._direct[j][stage], ())

    def pair(self, stage: Stage, i: int, flows: Sequence[Flow]) -> list[Contributed | None]:
        if self.unpaired:
            return [None] * len(flows)
        (leaves, outputs), parameters = self._between(stage, i), self.parameters(stage)
        made = [backward(parameters, leaves, outputs, flow) for flow in flows]
        return [None if one is None else Contributed(_wide(one.gradients), one.inputs) for one in made]

    def flow(self, stage: Stage, j: int) -> Flow:
        return lambda _: () if self.unpaired else self._output_gradients(stage, j)

    def end(self, stage: Stage) -> frozenset[Place]:
        """Places that end ``stage``, not the last; empty if not found."""
        cut = self._cuts[stage]
        last = {id(tensor) for tensor in cut[0]} if cut is not None else set()
        return frozenset(place for place, tensor in self._runs[0].noted if id(tensor) in last)

    @cached_property
    def unpaired(self) -> str:  # type: ignore[override]  # worked out on demand
        size = max(sum(one.numel() for one in self.parameters(stage).values()) for stage in range(self.stages))
        if size * self.microbatches**2 > _MOST:
            return f"the pairs of {self.microbatches} microbatches with stages of {size} parameters are too many to try"
        every = [(stage, j) for stage in range(self._first, self.stages - 1) for j in range(self.microbatches)]
        if any(cut is None for cut in self._cuts[self._first :]) or not all(self._flows_through(*at) for at in every):
            return "where the reference passes from stage to stage could not be found, so exchanges were not tried"
        return ""

    def _use(self, model: nn.Module) -> None:
        """Give every stage a separate leaf for each of its parameters."""
        self._model, self._leaves, made = model, dict[Site, Tensor](), dict[tuple[Stage, int], Tensor]()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for stage, name in self._held:
            parameter = parameters[name]
            leaf = made.setdefault((stage, id(parameter)), parameter.detach().requires_grad_(parameter.requires_grad))
            self._leaves[stage, name] = leaf
        owner = {id(parameters[name]): stage for stage, name in self._held}
        by_name = {name: self._leaves[stage, name] for stage, name in reversed(self._held)}  # of copies, the first
        for name, parameter in parameters.items():  # further names of held parameters
            if name not in by_name and id(parameter) in owner:
                by_name[name] = made[owner[id(parameter)], id(parameter)]
        self._uses = by_name

    def _run(self, batch: Batch, *, once: bool = False) -> TracedRun:
        """Run one microbatch, with a graph for several walks unless for ``once``."""
        noted: list[tuple[Place, Tensor]] = []
        noting = outputs_noted(self._model, lambda place, tensor: noted.append((place, tensor)))
        # A backward may write into its saved tensors, so each gets a copy.
        with nullcontext() if once else saved_tensors_hooks(lambda saved: saved.detach(), lambda saved: saved.clone()):
            with noting, choosing(self._model, batch.routers):
                output = functional_call(self._model, self._uses, batch.inputs, tie_weights=False)
            loss = self._loss.function(output, batch.target)
        leaves, form = tree_flatten(output)
        return TracedRun(leaves, form, loss / self._loss.divisor, loss.item(), tuple(noted))

    @cached_property
    def _direct(self) -> list[list[Mapping[str, Gradient]]]:
        """``_direct[j][s]``: microbatch j's gradients for parameters of stage s."""
        rows = [self.parameters(stage) for stage in range(self.stages)]
        wanted = [leaf for row in rows for leaf in row.values()]
        own = dict(self._model.named_parameters(remove_duplicate=False))
        parameters = [own[name] for row in rows for name in row]
        found: list[list[Mapping[str, Gradient]]] = []
        uses: list[Mapping[str, tuple[Gradient, ...]]] = []
        for run, batch in zip(self._runs, self.batches, strict=True):
            apart = ByUse(run.objective, [self._uses[name] for name in self._joint])
            given = differentiate(run.objective, wanted, parameters, retain_graph=True)
            if any(gradient is None for gradient in given):
                given = self._run_written(batch, run, wanted, parameters) or given
            whole = dict(zip(map(id, wanted), given, strict=True))
            gradients = iter(given)
            found.append([_wide({name: next(gradients) for name in row}) for row in rows])
            uses.append({n: apart.of(self._uses[n], whole[id(self._uses[n])]) for n in self._joint})
        for name, stages in self._joint.items():
            if all(len(each[name]) == len(stages) for each in uses):
                for row, each in zip(found, uses, strict=True):
                    for stage, share in zip(stages, each[name], strict=True):
                        row[stage] = {**row[stage], **_wide({name: share})}
        return found

    @cached_property
    def _joint(self) -> Mapping[str, list[Stage]]:
        """Stages that share a parameter under the same name, perhaps each with a use, in order."""
        holders: dict[str, list[Stage]] = {}
        for stage, name in self._held:
            holders.setdefault(name, []).append(stage)
        names = Counter(id(leaf) for leaf in self._leaves.values())  # leaves with a single name
        return {n: stages for n, stages in holders.items() if len(stages) > 1 and names[id(self._uses[n])] == 1}

    def _run_written(
        self, batch: Batch, run: TracedRun, wanted: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> list[Gradient] | None:
        """Gradients of ``run`` for a backward that writes ``.grad`` itself and must find the weight, not a copy.

        None if the model draws other random numbers each time.
        """
        again = self._run(batch, once=True)
        return differentiate(again.objective, wanted, parameters) if again.loss == run.loss else None

    @cached_property
    def _cuts(self) -> list[list[Tensors] | None]:
        """For every stage but the last, its last tensors by microbatch; None if unknown."""
        stage_of = {id(leaf): stage for (stage, _), leaf in self._leaves.items()}
        deep = [depths(ends_of(run.outputs), stage_of) for run in self._runs]
        return [self._cut(stage, deep) if stage >= self._first else None for stage in range(self.stages - 1)]

    def _cut(self, stage: Stage, deep: Sequence[Mapping[Any, int]]) -> list[Tensors] | None:
        # A later stage's module may begin with work of no stage, as a residual stream that is added up first.
        places, later = {place for run in self._runs for place, _ in run.noted}, self.later(stage)
        own = frozenset(place for place in places if module_of(place) not in later)
        given = self._ends.get(stage)
        for allowed in (own if given is None else given, own, None):
            found = [self._last(stage, run, known, allowed) for run, known in zip(self._runs, deep, strict=True)]
            if None not in found:
                return [tensors for tensors in found if tensors is not None]
        return None

    def later(self, stage: Stage) -> frozenset[str]:
        """Modules with parameters in later stages only."""
        found: dict[str, bool] = {}
        for owner, name in self._held:
            parts = name.split(".")[:-1]
            for module in (".".join(parts[: k + 1]) for k in range(len(parts))):
                found[module] = found.get(module, True) and owner > stage
        return frozenset(module for module, is_later in found.items() if is_later)

    def _last(
        self, stage: Stage, run: TracedRun, deep: Mapping[Any, int], allowed: Collection[Place] | None
    ) -> Tensors | None:
        known: dict[Edge, Tensor] = {}
        for place, tensor in run.noted:
            if tensor.grad_fn is not None and (allowed is None or place in allowed):
                known[tensor.grad_fn, tensor.output_nr] = tensor
        edges = frontier(ends_of(run.outputs), deep, stage, known.keys())
        return None if not edges else tuple(tensor for edge, tensor in known.items() if edge in edges)

    def _between(self, stage: Stage, i: int) -> tuple[Tensors, Tensors]:
        """Microbatch i's tensors at the begin and the end of ``stage``."""
        before = self._cuts[stage - 1] if stage > self._first else None
        after = self._cuts[stage] if stage < self.stages - 1 else None
        return () if before is None else before[i], self._runs[i].outputs if after is None else after[i]

    def _output_gradients(self, stage: Stage, j: int) -> tuple[Gradient, ...]:
        if (stage, j) not in self._flowing:
            _, outputs = self._between(stage, j)
            objective = self._runs[j].objective
            made, _ = flows([objective], [torch.ones_like(objective)], outputs)
            self._flowing[stage, j] = tuple(made)
        return self._flowing[stage, j]

    def target(self, j: int) -> Flow:
        own, target, loss = self._runs[j], self.batches[j].target, self._loss
        if isinstance(target, Tensor) and not target.numel():
            return lambda _: None  # the model makes the loss itself
        return loss_flow(own.outputs, lambda leaves: loss.function(own.rebuilt(leaves), target) / loss.divisor)

    def _flows_through(self, stage: Stage, j: int) -> bool:
        """True if flow through the end of ``stage`` gives microbatch j's gradients."""
        leaves, outputs = self._between(stage, j)
        gradients = self._output_gradients(stage, j)
        made = backward(self.parameters(stage), leaves, outputs, lambda _: gradients)
        return made is not None and all(map(_is_near, made.gradients.values(), self._direct[j][stage].values()))


def _is_near(one: Gradient, other: Gradient) -> bool:
    if one is None or other is None:
        return one is other
    return bool((one.cpu() - other).norm() <= _THROUGH * other.norm())


def _wide(gradients: Mapping[str, Gradient]) -> dict[str, Gradient]:
    """``gradients`` dense, on the CPU, in fp64: ready for sums."""
    return {name: None if one is None else dense(one).cpu().double() for name, one in gradients.items()}
