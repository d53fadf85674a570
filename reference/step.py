"""The reference: a plain loop over the microbatches on one device.

It is one model (a tied weight is one parameter), but it separates the gradients that stages contribute to a parameter,
like a pipeline. So it can add the same numbers in a pipeline's order, and a correct pipeline then agrees to the last
bit.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipeproof.reference.accumulation import PLAIN, Accumulation, add_parts, length_of
from pipeproof.reference.accumulation import Gradient as Gradient
from pipeproof.reference.choices import choosing
from pipeproof.reference.contribution import Contribution as Contribution
from pipeproof.reference.contribution import Site as Site
from pipeproof.reference.contribution import Stage as Stage
from pipeproof.reference.contribution import by_stage
from pipeproof.reference.copied import deep_copy
from pipeproof.reference.data import Batch
from pipeproof.reference.graded import ByUse, differentiate
from pipeproof.reference.model import LossFn, Model

_Leaves = dict[tuple[Stage, int], tuple[Tensor, nn.Parameter]]  # by the stage and the parameter's identity


class LossError(ValueError):
    """A loss without a derivative."""


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum, which, unlike Adam, shows a gradient with a wrong scale."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Loss:
    """A user's loss: ``function(output, target)`` of a microbatch, divided by ``divisor`` before its backward."""

    function: LossFn
    divisor: float


@dataclass(frozen=True)
class Recipe:
    """Everything in a step but its data.

    loss: "mean" divides each microbatch's mean loss by the number of microbatches; "tokens" divides each microbatch's
    summed loss by the global number of counting targets; both are the model's own, others are a ``Loss``. Gradients are
    clipped to ``max_norm``, then ``optimizer``, made from the parameters to train, takes a step. ``late``: a part of
    the divisor left out before the backward; summed gradients are divided by it. accumulation: how they are summed.
    outputs: from the model's output and the target, named tensors to keep; None: nothing.
    """

    loss: str | Loss = "mean"
    max_norm: float = 0.1
    late: float = 1.0
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = sgd
    accumulation: Accumulation = PLAIN
    outputs: Callable[[Any, Tensor], Mapping[str, Tensor]] | None = None


@dataclass(frozen=True)
class Expected:
    """An operation's expected results.

    ``losses`` by microbatch, undivided, and ``loss`` their total after division. ``buffers`` after the operation, by
    name. For "train": ``gradients`` per site after the sum over tied copies and before clipping, their ``norm`` over
    logical parameters, and ``parameters`` per site after clip and optimizer step. ``contributions``: this operation's,
    by microbatch and before any late division; ``before``: its initial parameters, by name.
    """

    operation: str
    losses: tuple[float, ...]
    loss: float
    contributions: tuple[Contribution, ...] = ()
    before: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: Mapping[Site, Gradient] = field(default_factory=dict)
    norm: float | None = None
    parameters: Mapping[Site, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


class Reference:
    """A model on one device, trained operation by operation: "train", "accumulate" or "eval".

    ``owner`` maps every parameter name, each name of a tied one too, to the stage that holds a copy under it.
    ``copies``: further ones, in other stages under the same names. by_use: their shares are separated if each of these
    stages has one use; else the first has all.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        owner: Mapping[str, Stage],
        recipe: Recipe,
        copies: Collection[Site] = (),
        by_use: bool = False,
    ) -> None:
        self.model = model
        self._more = tuple(copies)
        self._by_use = by_use
        self.recipe = recipe
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._sites = {name: (owner[name], name) for name in self._parameters}
        self._first = _first_names(model)
        # For every name the first with the same leaf: one parameter, in one stage.
        names: dict[tuple[Stage, int], str] = {}
        leaves = {name: (self._sites[one][0], id(self._parameters[one])) for name, one in self._first.items()}
        self._leaf = {name: names.setdefault(leaf, self._first[name]) for name, leaf in leaves.items()}
        copies_by_tensor: dict[int, list[Site]] = {}  # sites by logical parameter
        for site in (*self._sites.values(), *copies):
            copies_by_tensor.setdefault(id(self._parameters[site[1]]), []).append(site)
        self._copies = {key: sorted(sites) for key, sites in copies_by_tensor.items()}
        self.late = recipe.late
        self._sums: dict[Site, Gradient] = {}

    @cached_property
    def _optimizer(self) -> torch.optim.Optimizer:  # made when it is to take a step: a part may have nothing to train
        return self.recipe.optimizer([p for p in self.model.parameters() if p.requires_grad])

    def of(self, model: nn.Module) -> "Reference":
        """Use another, similar model."""
        owner = {name: stage for name, (stage, _) in self._sites.items()}
        return Reference(model, owner=owner, recipe=self.recipe, copies=self._more, by_use=self._by_use)

    def perform(
        self,
        operation: str,
        batches: Sequence[Batch],
        *,
        orders: Mapping[Stage, Sequence[int]],
        max_norm: float | None = None,
        update: bool = True,
    ) -> Expected:
        """Do ``operation`` on ``batches``; ``orders[stage]``: the order of microbatches in that stage's backwards.

        ``max_norm`` clips this step in place of the recipe's. Without ``update`` it ends before ``step``.
        """
        if operation == "eval":
            loss_fn, divisor = objective(self.model, batches, self.recipe)
            self.model.eval()
            with torch.no_grad():
                losses = tuple(loss_fn(self.model(*batch.inputs), batch.target).item() for batch in batches)
            self.model.train()
            return Expected(operation, losses, _total(losses) / divisor, buffers=self._buffers())
        before = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        contributions = self.contribute(batches)
        expected = self.before_update(batches, contributions, orders=orders, onto=self._sums)
        expected = replace(expected, operation=operation, before=before, buffers=self._buffers())
        if operation != "train":
            self._sums = self.accumulate(contributions, orders=orders, onto=self._sums)
            return replace(expected, gradients={}, norm=None)
        self._sums, factor = {}, clip_factor(expected.norm or 0.0, max_norm or self.recipe.max_norm)
        return replace(expected, parameters=self.step(expected.gradients, factor) if update else {})

    def before_update(
        self,
        batches: Sequence[Batch],
        contributions: Sequence[Contribution],
        *,
        orders: Mapping[Stage, Sequence[int]],
        onto: Mapping[Site, Gradient] = MappingProxyType({}),
    ) -> Expected:
        """Compute results for "train" up to its update, from the microbatches' contributions.

        ``onto``: earlier accumulated gradients. The model stays unchanged, and lends its parameters to the result.
        """
        _, divisor = objective(self.model, batches, self.recipe)
        losses = tuple(one.loss for one in contributions)
        before = {name: parameter.detach() for name, parameter in self._parameters.items()}
        gradients = self.total(self.accumulate(contributions, orders=orders, onto=onto))
        loss, norm = _total(losses) / divisor, self.norm(gradients)
        return Expected("train", losses, loss, tuple(contributions), before, gradients=gradients, norm=norm)

    def update(
        self,
        gradients: Mapping[Site, Gradient],
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        *,
        max_norm: float | None = None,
        norm: float | None = None,
    ) -> dict[Site, Tensor]:
        """Every parameter after a first step of ``optimizer``, made from a copy of the model.

        ``max_norm``: clips gradients first, as if ``norm`` were theirs, if given.
        """
        model, factor = deep_copy(self.model), clip_factor(self.norm(gradients) if norm is None else norm, max_norm)
        for name, parameter in model.named_parameters():
            gradient = gradients[self._sites[name]]
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype, copy=True) * factor
        optimizer(model).step()
        own = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
        return {site: own[site[1]] for site in (*self._sites.values(), *self._more)}

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}

    def contribute(self, batches: Sequence[Batch]) -> tuple[Contribution, ...]:
        """Compute every microbatch's contribution, without a sum or a change to parameters."""
        return tuple(self.contributing(batches))

    def contributing(self, batches: Sequence[Batch]) -> Iterator[Contribution]:
        """Like ``contribute``, but lazily, by microbatch."""
        loss_fn, divisor = objective(self.model, batches, self.recipe)
        return (self.contribution(batch, loss_fn, divisor / self.late) for batch in batches)

    def contribution(
        self, batch: Batch, loss_fn: LossFn, divisor: float, *, onto: Mapping[Site, Gradient] = MappingProxyType({})
    ) -> Contribution:
        """One forward and backward, with a separate leaf for every stage's use of every parameter.

        ``onto``: tensors that its gradients are added to in place; then they are the sums.
        """
        with choosing(self.model, batch.routers) as choices:
            batch = batch.of_leaves()
            loss, leaves, uses, outputs = self._forward(batch, loss_fn)
            each, parameters = [leaf for leaf, _ in leaves.values()], [own for _, own in leaves.values()]
            apart, wanting = ByUse(loss, each if self._by_use else ()), batch.wanting
            begun = {id(leaf): onto.get(self._sites[name]) for name, leaf in uses.items()}
            sums = {k: one for k, leaf in enumerate(each) if (one := begun.get(id(leaf))) is not None}
            wanted = (*wanting.values(),)
            made = differentiate(loss / divisor, (*each, *wanted), (*parameters, *wanted), onto=sums)
        found = dict(zip(map(id, each), made, strict=False))
        gradients: dict[Site, Gradient] = dict.fromkeys(self._sites.values())
        for name, site in self._sites.items():
            first = self._first[name]
            if site[0] == self._sites[first][0]:  # of a module in several stages only the first has a use
                gradients[site] = None if (own := found[id(uses[first])]) is None else dense(own)
        shares = {name: given for name, leaf in uses.items() if (given := apart.of(leaf, found[id(leaf)]))}
        flowing = dict(zip(wanting, made[len(each) :], strict=True))
        return Contribution(loss.item(), gradients, shares, flowing, outputs, choices)

    def losses(self, batches: Sequence[Batch]) -> Iterator[tuple[Tensor, float]]:
        """Yield each microbatch's loss with its graph, and its divisor."""
        loss_fn, divisor = objective(self.model, batches, self.recipe)
        for batch in batches:
            with choosing(self.model, batch.routers):
                loss, *_ = self._forward(batch, loss_fn)
            yield loss, divisor / self.late

    def _forward(
        self, batch: Batch, loss_fn: LossFn
    ) -> tuple[Tensor, _Leaves, Mapping[str, Tensor], Mapping[str, Tensor]]:
        """A loss, its leaves, each with its parameter, the leaf for each name, and named outputs."""
        leaves: _Leaves = {}
        uses = {}
        for name in dict.fromkeys(self._first.values()):
            parameter = self._parameters[name]
            key = (self._sites[name][0], id(parameter))
            if key not in leaves:
                leaves[key] = parameter.detach().requires_grad_(parameter.requires_grad), parameter
            uses[name] = leaves[key][0]
        output = functional_call(self.model, uses, batch.inputs, tie_weights=False)
        named = {} if self.recipe.outputs is None else self.recipe.outputs(output, batch.target)
        kept = {name: one.detach().clone() for name, one in named.items()}
        return differentiable(loss_fn(output, batch.target)), leaves, uses, kept

    def step(self, gradients: Mapping[Site, Gradient], factor: float) -> dict[Site, Tensor]:
        """Take a step with ``factor`` times these gradients; return every parameter."""
        for name, parameter in self.model.named_parameters():
            gradient = gradients[self._sites[name]]
            parameter.grad = None if gradient is None else (gradient * factor).to(parameter.dtype)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {self._sites[name]: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def accumulate(
        self,
        contributions: Sequence[Contribution],
        *,
        orders: Mapping[Stage, Sequence[int]],
        onto: Mapping[Site, Gradient] | None = None,
        by: Accumulation | None = None,
    ) -> dict[Site, Gradient]:
        """Add contributions to ``onto``, each site in its stage's order, by the recipe, or otherwise ``by``.

        A site without contributions stays None.
        """
        by, onto = self.recipe.accumulation if by is None else by, onto or {}
        parts = self.parts(contributions)
        each = {
            site: by.of_each(own, orders[site[0]], onto=onto.get(site), stage=site[0]) for site, own in parts.items()
        }
        for copies in self._copies.values() if by.tied_first else ():
            shares = by_stage(copies, each)
            whole = [add_parts(own) for own in zip(*shares.values(), strict=True)]
            for site in (site for site in copies if site in each):  # all is in the first stage then
                each[site] = whole if site[0] == min(shares) else [None] * len(whole)
        return {site: by.reduce(sums) for site, sums in each.items()}

    def parts(self, contributions: Sequence[Contribution]) -> dict[Site, list[Gradient]]:
        """Each microbatch's gradient at every site.

        Stages that share a leaf get a use each, in order, if there are as many uses as stages, and all microbatches
        separate them. Else one site has all.
        """
        parts = {site: [one.gradients[site] for one in contributions] for site in contributions[0].gradients}
        for sites in self._copies.values():
            leaf, *others = {self._leaf[name] for _, name in sites}
            stages: dict[Stage, list[Site]] = {}
            for site in sites:
                stages.setdefault(site[0], []).append(site)
            given = [one.uses.get(leaf, ()) for one in contributions]
            if not others and len(stages) > 1 and all(len(one) == len(stages) for one in given):
                for use, own in enumerate(stages.values()):
                    parts |= {site: [one[use] for one in given] for site in own}
        return parts

    def total(self, sums: Mapping[Site, Gradient]) -> dict[Site, Gradient]:
        """Gradients per site, with the sum over all stages' shares for each copy of a tied parameter.

        Shares are added in the order of stages. Names of one parameter within one stage are one use, counted once.
        """
        total: dict[Site, Gradient] = {}
        for copies in self._copies.values():
            whole = add_parts([*by_stage(copies, sums).values()])
            whole = whole if whole is None or self.late == 1.0 else whole / self.late
            total |= dict.fromkeys(copies, whole)
        return total

    def homes(self, site: Site) -> list[Site]:
        """Sites of ``site``'s contributions, in each stage: for a further copy, at its name's owner."""
        copies = self._copies[id(self._parameters[site[1]])]
        return list({home[0]: home for home in (self._sites[name] for _, name in copies)}.values())

    def norm(self, gradients: Mapping[Site, Gradient]) -> float:
        """The 2-norm over logical parameters, a tied one counted once; sums of squares in fp64, added exactly."""
        one_each = (gradients[copies[0]] for copies in self._copies.values())
        squares = (length_of(g) ** 2 for g in one_each if g is not None)
        return math.sqrt(math.fsum(squares))


def _first_names(model: nn.Module) -> dict[str, str]:
    """For every parameter name the first in its module: one module may have several places."""
    first: dict[tuple[int, str], str] = {}
    names = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for own, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{prefix}.{own}" if prefix else own
            names[name] = first.setdefault((id(module), own), name)
    return names


def dense(gradient: Tensor) -> Tensor:
    """Densify ``gradient``: an embedding may give only used rows."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def differentiable(loss: object) -> Tensor:
    """Return ``loss`` if it can be differentiated. Raises ``LossError``."""
    if not isinstance(loss, Tensor):
        raise LossError(f"the loss is a {type(loss).__name__}: expected a tensor of one number")
    if loss.numel() != 1:
        raise LossError(f"the loss has the shape {list(loss.shape)}: expected one number")
    if not loss.requires_grad:
        raise LossError("no parameter that is trained went into the loss, so it has no gradient")
    return loss


def objective(model: nn.Module, batches: Sequence[Batch], recipe: Recipe) -> tuple[LossFn, float]:
    """A microbatch's loss function, and its divisor before the backward."""
    if isinstance(recipe.loss, Loss):
        return recipe.loss.function, recipe.loss.divisor
    assert isinstance(model, Model), f"only our models bring losses of their own, not {type(model).__name__}"
    if recipe.loss == "tokens":
        return model.sum_loss, float(sum(batch.tokens for batch in batches))
    return model.mean_loss, float(len(batches))


def clip_factor(norm: float, max_norm: float | None) -> float:
    """The factor from clipping gradients with ``norm`` to ``max_norm``; 1 for None."""
    # Not min(): Python's min(1.0, nan) is 1.0, and a norm that is not a number must not go unseen.
    factor = 1.0 if max_norm is None or max_norm == math.inf else max_norm / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor


def _total(losses: Sequence[float]) -> float:
    """The exactly rounded sum; a plain one with non-finite values, which fsum refuses."""
    return math.fsum(losses) if all(map(math.isfinite, losses)) else sum(losses)
