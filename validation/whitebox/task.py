"""What is to be validated, as the user gave it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipeproof.core.contract import DEFAULTS, Contract, Outputs
from pipeproof.core.verdict import raised
from pipeproof.pipeline.sizes import first_few, some
from pipeproof.reference.choices import Chosen, Routers
from pipeproof.reference.copied import copied
from pipeproof.reference.data import Batch
from pipeproof.reference.graph import ends_of, uses
from pipeproof.reference.model import LossFn
from pipeproof.reference.products import settings_off
from pipeproof.reference.step import Gradient, Loss, Reference, Site
from pipeproof.whitebox.rank import Step
from pipeproof.worlds.accelerator import first_of

MakesOptimizer = Callable[[nn.Module], Optimizer | tuple[Optimizer, LRScheduler]]


class OptimizerError(Exception):
    """What is to make an optimizer makes something else."""


def _steps(one: object) -> bool:
    return all(callable(getattr(one, name, None)) for name in ("step", "state_dict", "load_state_dict"))


@dataclass
class Optimizing:
    """What ``func`` makes of a model, as it was in ``state``; what its last step made of that is ``left``.

    The states are the optimizer's and, if there is one, its scheduler's.
    """

    func: MakesOptimizer
    state: tuple[dict[str, Any], ...] = ()
    left: tuple[dict[str, Any], ...] = field(default=(), init=False)

    def __call__(self, model: nn.Module) -> Optimizer:
        """The optimizer of ``model``, whose step is followed by its scheduler's. Raises ``OptimizerError``."""
        made = self.func(model)
        optimizer, *schedulers = made if isinstance(made, tuple) else (made,)
        if not isinstance(optimizer, Optimizer) or len(schedulers) > 1 or not all(map(_steps, schedulers)):
            gave = " and ".join(type(one).__name__ for one in (optimizer, *schedulers))
            raise OptimizerError(f"gave {gave}: expected an optimizer, or a pair of it and the scheduler of its rate")
        every: tuple[Any, ...] = (optimizer, *schedulers)
        for one, state in zip(every, self.state, strict=bool(self.state)):
            one.load_state_dict(copy.deepcopy(state))

        def stepped(*_: Any) -> None:
            for one in every[1:]:
                one.step()
            self.left = tuple(one.state_dict() for one in every)

        optimizer.register_step_post_hook(stepped)
        return optimizer

    def next(self) -> "Optimizing":
        """The same, going on with what the last step left."""
        return Optimizing(self.func, copy.deepcopy(self.left))


@dataclass(frozen=True)
class LossOfAll:
    """A loss function that depends on all microbatches of the step: ``of`` makes it of their inputs and targets.

    Where a step is held against itself, inputs are None: they stay where they are.
    """

    of: Callable[[Sequence[tuple[Any, Any]]], LossFn]


class WhiteBoxError(ValueError):
    """A validation that cannot be: what was asked for makes no sense."""


class ReferenceRaised(Exception):
    """The reference, which is the user's own code, cannot be run. Its cause is what it raised."""


@dataclass(frozen=True)
class Continued:
    """Copies the ``model`` of the operation before, which ``func`` built, and gives it these weights and buffers."""

    func: Callable[[], nn.Module]
    model: nn.Module
    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    def __call__(self) -> nn.Module:
        model = copied(self.model)
        with torch.no_grad():
            for name, parameter in model.named_parameters(remove_duplicate=False):
                parameter.copy_(self.weights[name])
        for name, buffer in self.buffers.items():
            holder, _, leaf = name.rpartition(".")
            model.get_submodule(holder)._buffers[leaf] = buffer.clone()
        return model


@dataclass(frozen=True)
class Task:
    """What is to be validated, as the user gave it.

    ``evaluates``: it is one evaluation. ``routed``: by microbatch, what routers are to choose in place of what their
    scores say.
    """

    step: Step
    reference: Callable[[], Any]
    microbatches: tuple[Any, ...]
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None
    optimizer: MakesOptimizer | None = None
    contract: Contract = DEFAULTS
    evaluates: bool = False
    routed: tuple[Mapping[str, Chosen], ...] = ()

    @property
    def plan(self) -> tuple[str, ...]:
        """The operations."""
        return self.contract.plan

    @property
    def counts(self) -> tuple[int, ...]:
        """How many microbatches every operation has."""
        return tuple(map(len, self.contract.parts(len(self.microbatches))))

    def operation(self, number: int, begun: "Continued | None" = None) -> "Task":
        """Operation ``number`` as a task of its own; ``begun``: the reference that it begins with."""
        if not self.contract.operations:
            return self
        own = self.contract.parts(len(self.microbatches))[number]
        return replace(
            self,
            reference=begun or self.reference,
            microbatches=tuple(self.microbatches[m] for m in own),
            contract=replace(self.contract, operations=()),
            evaluates=self.plan[number] == "eval",
        )

    def check(self) -> None:
        """Raise ``WhiteBoxError`` for what cannot be."""
        if not callable(self.step):
            raise WhiteBoxError(f"step is {self.step!r}: expected a function step(model, microbatches)")
        check_builds("reference", self.reference)
        if self.loss_fn is not None:
            check_loss_fn(self.loss_fn)
        if not self.microbatches:
            raise WhiteBoxError("microbatches is empty: expected at least one")
        if not isinstance(self.contract, Contract):
            raise WhiteBoxError(f"contract is {self.contract!r}: expected a pipeproof.Contract")
        if self.optimizer is not None and not callable(self.optimizer):
            raise WhiteBoxError(
                f"optimizer is {type(self.optimizer).__name__}: expected a function that makes one of the model"
            )
        self.contract.parts(len(self.microbatches))
        for number in range(len(self.microbatches)):
            self._batch(number)

    def check_routers(self, model: nn.Module) -> None:
        """Raise ``WhiteBoxError`` where ``routers`` name no module of the reference, which is ``model``."""
        if self.routers and not Routers(self.routers).among(model):
            have = first_few([name for name, _ in model.named_modules() if name])
            wanted = " or ".join(map(repr, self.routers))
            raise WhiteBoxError(f"routers: no module of the reference {self.name} is called {wanted}; it has {have}")

    def updated(
        self,
        reference: Reference,
        gradients: Mapping[Site, Gradient],
        *,
        by: Optimizing | None,
        max_norm: float | None,
        norm: float | None = None,
        off: float = 0.0,
    ) -> dict[Site, Tensor]:
        """What the optimizer, if there is one, makes of the parameters with these gradients, clipped to ``max_norm``.

        ``norm``: as if that were theirs; ``off``: with settings so far off. Raises ``ReferenceRaised``.
        """
        if by is None:
            return {}
        try:
            made = lambda model: settings_off(by(model), off)  # noqa: E731
            return reference.updated(gradients, made, max_norm=max_norm, norm=norm)
        except OptimizerError as error:
            raise ReferenceRaised(f"optimizer={name_of(by.func)} {error}") from error
        except Exception as error:  # no one type: it is the user's code
            raise ReferenceRaised(f"optimizer={name_of(by.func)} raised {raised(error)}") from error

    @property
    def name(self) -> str:
        return name_of(self.reference)

    @property
    def routers(self) -> tuple[str, ...]:
        """The modules that choose experts."""
        return tuple(self.contract.routers)

    @property
    def in_pairs(self) -> bool:
        """Whether a microbatch is a pair of inputs and target."""
        return self.loss_fn is not None

    @property
    def beside(self) -> str:
        """What the step is held against, in words."""
        return f"reference {self.name}"

    @property
    def loss(self) -> Loss:
        """The loss of a microbatch, and what it is divided by."""
        function = self.loss_fn or (lambda output, target: output)
        return Loss(function, float(self.contract.loss_divisor or len(self.microbatches)))

    @property
    def named(self) -> Outputs | None:
        """What of the model's output and the target is compared, by name."""
        return None if self.contract.outputs is None else self._named

    def _named(self, output: Any, target: Tensor) -> Mapping[str, Tensor]:
        assert self.contract.outputs is not None, "asked for where there are some"
        made = self.contract.outputs(output, target)
        if not isinstance(made, Mapping):
            raise WhiteBoxError(f"outputs= gave a {type(made).__name__}: expected a mapping of names to tensors")
        for name, one in made.items():
            if not isinstance(one, Tensor):
                raise WhiteBoxError(f"outputs= gave a {type(one).__name__} as {name!r}: expected a tensor")
        return made

    @property
    def hint(self) -> str:
        """What a reference that cannot be run may lack."""
        called = "it was called with all of a microbatch, inputs and target, and has to give the loss"
        return "" if self.loss_fn else f"; no loss_fn was given, so {called}: give loss_fn=, if it gives the output"

    def title(self, ranks: int) -> str:
        """The subject in words."""
        counts, plan = self.counts, self.plan if self.contract.operations else ()
        count = some(counts[-1], "microbatch")
        if len({*counts}) > 1:
            count = f"{', '.join(f'{name} of {each}' for name, each in zip(plan, counts, strict=True))} microbatches"
        elif plan:
            count = f"{', '.join(plan)} of {count}"
        return f"{name_of(self.step)} on {some(ranks, 'rank')}, {count}, {self.beside}"

    def built(self, device: str) -> nn.Module:
        """The reference, as every rank builds it."""
        try:
            model: nn.Module = self.reference()
        except Exception as error:  # no one type: it is the user's code
            raise ReferenceRaised(f"the reference {self.name} cannot be built: it raised {raised(error)}") from error
        check_module(f"reference {self.name} returned", model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise WhiteBoxError(f"reference {self.name} has no parameter to train: nothing could be compared")
        return model.to(first_of(device)).train(not self.evaluates)

    def batches(self, model: nn.Module) -> list[Batch]:
        """The microbatches for the reference, where ``model`` is."""
        device = str(next(model.parameters()).device)
        return [self._routed(number).to(device) for number in range(len(self.microbatches))]

    def repeated(self, device: str) -> frozenset[str]:
        """The parameters that the reference uses in several places, by all their names, as its first microbatch shows.

        Such a one may have a copy in every stage that uses it. What cannot be told is in none.
        """
        model = self.built(device)
        return repeated(model, self.batches(model)[0], self.loss.function)

    def _routed(self, number: int) -> Batch:
        if not self.routers:
            return self._batch(number)
        told = self.routed[number] if self.routed else {}
        return replace(self._batch(number), routers=Routers(self.routers, told))

    def _batch(self, number: int) -> Batch:
        given = self.microbatches[number]
        batch = Batch.of(*pair_of(number, given)) if self.in_pairs else Batch.of(given, torch.empty(0))
        for tensor in (*batch.inputs, batch.target):
            if not isinstance(tensor, Tensor):
                raise WhiteBoxError(f"microbatch {number} has a {type(tensor).__name__} in it: expected tensors only")
        return batch


def check_builds(what: str, given: Any, error: type[WhiteBoxError] = WhiteBoxError) -> None:
    """Raise ``error`` where what is ``given`` as ``what`` is no function that builds a model."""
    if isinstance(given, nn.Module) or not callable(given):
        raise error(f"{what} is a {type(given).__name__}: expected a function that builds it")


def check_module(what: str, given: Any, error: type[WhiteBoxError] = WhiteBoxError) -> None:
    """Raise ``error`` where what is ``given``, ``what`` says by whom, is no model."""
    if not isinstance(given, nn.Module):
        raise error(f"{what} a {type(given).__name__}: expected a torch.nn.Module")


def check_loss_fn(given: Any) -> None:
    """Raise ``WhiteBoxError`` where it is no function."""
    if not callable(given):
        raise WhiteBoxError(f"loss_fn is {given!r}: expected a function of output and target")


def pair_of(number: int, given: Any) -> tuple[Any, Any]:
    """Inputs and target of the microbatch of this number. Raises ``WhiteBoxError``."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        many = f" of {len(given)}" if isinstance(given, tuple | list) else ""
        raise WhiteBoxError(
            f"microbatch {number} is a {type(given).__name__}{many}: expected a pair of inputs and target"
        )
    inputs, target = given
    return inputs, target


def repeated(model: nn.Module, batch: Batch, loss_fn: Callable[[Any, Tensor], Tensor]) -> frozenset[str]:
    """The parameters that ``model``, which is used up by it, uses in several places for ``batch``, by all names."""
    model.requires_grad_()
    inputs = [one.detach().requires_grad_() * 1 if one.is_floating_point() else one for one in batch.inputs]
    try:
        loss = loss_fn(model(*inputs), batch.target)
    except RuntimeError:  # of the user's own code, which may not like that its data has a gradient
        return frozenset()
    count, parameters = uses(ends_of([loss])), model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, one in parameters if count[id(one)] > 1)


def name_of(function: object) -> str:
    """What to call ``function``."""
    function = getattr(function, "func", function)  # of a functools.partial
    return str(getattr(function, "__name__", None) or type(function).__name__)


def shown(value: Any) -> str:
    """A value in words: itself where it is short, else what it is."""
    return repr(value) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"


def form(tensor: Tensor) -> str:
    """Its shape and type, in words."""
    return f"shape {list(tensor.shape)} in {tensor.dtype}".replace("torch.", "")
