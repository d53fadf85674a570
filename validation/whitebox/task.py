"""A validation's task, from the user's arguments."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipeproof.core.contract import DEFAULTS, Contract, Outputs
from pipeproof.core.verdict import describe_error
from pipeproof.pipeline.sizes import first_few, some
from pipeproof.reference.choices import Chosen, Routers
from pipeproof.reference.copied import deep_copy
from pipeproof.reference.data import Batch
from pipeproof.reference.graph import ends_of, uses
from pipeproof.reference.model import LossFn
from pipeproof.reference.products import settings_off
from pipeproof.reference.step import Gradient, Loss, Reference, Site
from pipeproof.whitebox.rank import Step
from pipeproof.worlds.accelerator import first_of

MakesOptimizer = Callable[[nn.Module], Optimizer | tuple[Optimizer, LRScheduler]]


class OptimizerError(Exception):
    """An optimizer function returned something else."""


@dataclass
class Optimizing:
    """Builds ``func``'s optimizer for a model, in ``state``; ``left`` stores its state after the last step.

    States cover the optimizer and, if any, its scheduler.
    """

    func: MakesOptimizer
    state: tuple[dict[str, Any], ...] = ()
    left: tuple[dict[str, Any], ...] = field(default=(), init=False)

    def __call__(self, model: nn.Module) -> Optimizer:
        """Build the optimizer for ``model``; a scheduler steps after it. Raises ``OptimizerError``."""
        made = self.func(model)
        optimizer, *schedulers = made if isinstance(made, tuple) else (made,)
        wanted = ("step", "state_dict", "load_state_dict")
        steps = all(callable(getattr(one, name, None)) for one in schedulers for name in wanted)
        if not isinstance(optimizer, Optimizer) or len(schedulers) > 1 or not steps:
            gave = " and ".join(type(one).__name__ for one in (optimizer, *schedulers))
            raise OptimizerError(f"gave {gave}: expected an optimizer, or a pair of it and the scheduler of its rate")
        every: tuple[Any, ...] = (optimizer, *schedulers)
        for one, state in zip(every, self.state, strict=bool(self.state)):
            one.load_state_dict(copy.deepcopy(state))

        def note_step(*_: Any) -> None:
            for one in every[1:]:
                one.step()
            self.left = tuple(one.state_dict() for one in every)

        optimizer.register_step_post_hook(note_step)
        return optimizer

    def next(self) -> "Optimizing":
        """Continue from the last step's state."""
        return Optimizing(self.func, copy.deepcopy(self.left))


@dataclass(frozen=True)
class LossOfAll:
    """A loss function over the whole step: ``of`` builds it from all microbatches' inputs and targets.

    In a check of the step against itself inputs are None: they stay on their ranks.
    """

    of: Callable[[Sequence[tuple[Any, Any]]], LossFn]


class WhiteBoxError(ValueError):
    """Raised for an impossible validation request."""


class ReferenceRaised(Exception):
    """The reference, user code, cannot run; its error is the cause."""


@dataclass(frozen=True)
class Continued:
    """Copies ``model`` from the previous operation, built by ``func``, with new weights and buffers."""

    func: Callable[[], nn.Module]
    model: nn.Module
    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    def __call__(self) -> nn.Module:
        model = deep_copy(self.model)
        with torch.no_grad():
            for name, parameter in model.named_parameters(remove_duplicate=False):
                parameter.copy_(self.weights[name])
        for name, buffer in self.buffers.items():
            holder, _, leaf = name.rpartition(".")
            model.get_submodule(holder)._buffers[leaf] = buffer.clone()
        return model


@dataclass(frozen=True)
class Task:
    """A validation's subject, from the user's arguments.

    evaluates: a single evaluation. routed: prescribed router choices by microbatch, overriding scores. by: an
    ``Expectation``, which judges the step on its own ranks, without a whole model here.
    """

    step: Step
    reference: Callable[[], Any]
    microbatches: tuple[Any, ...]
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None
    optimizer: MakesOptimizer | None = None
    contract: Contract = DEFAULTS
    evaluates: bool = False
    routed: tuple[Mapping[str, Chosen], ...] = ()
    by: object = None

    @property
    def counts(self) -> tuple[int, ...]:
        """Microbatches per operation."""
        return tuple(map(len, self.contract.parts(len(self.microbatches))))

    def operation(self, number: int, begun: "Continued | None" = None) -> "Task":
        """Return operation ``number`` as a task; ``begun``: its starting reference."""
        if not self.contract.operations:
            return self
        own = self.contract.parts(len(self.microbatches))[number]
        return replace(
            self,
            reference=begun or self.reference,
            microbatches=tuple(self.microbatches[m] for m in own),
            contract=replace(self.contract, operations=()),
            evaluates=self.contract.plan[number] == "eval",
        )

    def check(self) -> None:
        """Raise ``WhiteBoxError`` for invalid arguments."""
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
        """Raise ``WhiteBoxError`` if ``routers`` match no module in the reference ``model``."""
        if self.routers and not Routers(self.routers).among(model):
            have = first_few([name for name, _ in model.named_modules() if name])
            wanted = " or ".join(map(repr, self.routers))
            raise WhiteBoxError(f"routers: no module of the reference {self.name} is called {wanted}; it has {have}")

    def update(
        self,
        reference: Reference,
        gradients: Mapping[Site, Gradient],
        *,
        by: Optimizing | None,
        max_norm: float | None,
        norm: float | None = None,
        off: float = 0.0,
    ) -> dict[Site, Tensor]:
        """Return parameters after the optimizer step with these gradients, clipped to ``max_norm``.

        norm: used for clipping instead. off: relative change to all settings. Raises ``ReferenceRaised``.
        """
        if by is None:
            return {}
        try:
            made = lambda model: settings_off(by(model), off)  # noqa: E731
            return reference.update(gradients, made, max_norm=max_norm, norm=norm)
        except OptimizerError as error:
            raise ReferenceRaised(f"optimizer={name_of(by.func)} {error}") from error
        except Exception as error:  # any type: user code
            raise ReferenceRaised(f"optimizer={name_of(by.func)} raised {describe_error(error)}") from error

    @property
    def name(self) -> str:
        return name_of(self.reference)

    @property
    def routers(self) -> tuple[str, ...]:
        """Modules that choose experts."""
        return tuple(self.contract.routers)

    @property
    def loss(self) -> Loss:
        """Loss function and divisor."""
        function = self.loss_fn or (lambda output, target: output)
        return Loss(function, float(self.contract.loss_divisor or len(self.microbatches)))

    @property
    def named(self) -> Outputs | None:
        """Function for named outputs, if any; it raises ``WhiteBoxError`` for other results."""
        if (outputs := self.contract.outputs) is None:
            return None

        def named(output: Any, target: Tensor) -> Mapping[str, Tensor]:
            made = outputs(output, target)
            if not isinstance(made, Mapping):
                raise WhiteBoxError(f"outputs= gave a {type(made).__name__}: expected a mapping of names to tensors")
            for name, one in made.items():
                if not isinstance(one, Tensor):
                    raise WhiteBoxError(f"outputs= gave a {type(one).__name__} as {name!r}: expected a tensor")
            return made

        return named

    def title(self, ranks: int) -> str:
        """Describe the subject."""
        counts, plan = self.counts, self.contract.plan if self.contract.operations else ()
        beside = "link by link" if self.by else f"reference {self.name}"
        count = some(counts[-1], "microbatch")
        if len({*counts}) > 1:
            count = f"{', '.join(f'{name} of {each}' for name, each in zip(plan, counts, strict=True))} microbatches"
        elif plan:
            count = f"{', '.join(plan)} of {count}"
        return f"{name_of(self.step)} on {some(ranks, 'rank')}, {count}, {beside}"

    def build(self, device: str) -> nn.Module:
        """Build the reference, as all ranks do."""
        try:
            model: nn.Module = self.reference()
        except Exception as error:  # any type: user code
            raise ReferenceRaised(
                f"the reference {self.name} cannot be built: it raised {describe_error(error)}"
            ) from error
        check_module(f"reference {self.name} returned", model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise WhiteBoxError(f"reference {self.name} has no parameter to train: nothing could be compared")
        return model.to(first_of(device)).train(not self.evaluates)

    def batches(self, model: nn.Module) -> list[Batch]:
        """Return the reference's microbatches, on ``model``'s device."""
        device = str(next(model.parameters()).device)
        return [self._batch(number).to(device) for number in range(len(self.microbatches))]

    def _batch(self, number: int) -> Batch:
        given, in_pairs = self.microbatches[number], self.loss_fn is not None or self.by is not None
        batch = Batch.of(*pair_of(number, given)) if in_pairs else Batch.of(given, torch.empty(0))
        for tensor in (*batch.inputs, batch.target):
            if not isinstance(tensor, Tensor):
                raise WhiteBoxError(f"microbatch {number} has a {type(tensor).__name__} in it: expected tensors only")
        if not self.routers:
            return batch
        return replace(batch, routers=Routers(self.routers, self.routed[number] if self.routed else {}))


def check_builds(what: str, given: Any, error: type[WhiteBoxError] = WhiteBoxError) -> None:
    """Raise ``error`` unless ``given`` is a function that builds a model."""
    if isinstance(given, nn.Module) or not callable(given):
        raise error(f"{what} is a {type(given).__name__}: expected a function that builds it")


def check_module(what: str, given: Any, error: type[WhiteBoxError] = WhiteBoxError) -> None:
    """Raise ``error`` unless ``given`` is a model; ``what`` names its source."""
    if not isinstance(given, nn.Module):
        raise error(f"{what} a {type(given).__name__}: expected a torch.nn.Module")


def check_loss_fn(given: Any) -> None:
    """Raise ``WhiteBoxError`` unless ``given`` is callable."""
    if not callable(given):
        raise WhiteBoxError(f"loss_fn is {given!r}: expected a function of output and target")


def pair_of(
    number: int, given: Any, *, target: str = "target", error: type[ValueError] = WhiteBoxError
) -> tuple[Any, Any]:
    """Split a microbatch into inputs and ``target``. Raises ``error``."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        many = f" of length {len(given)}" if isinstance(given, tuple | list) else ""
        raise error(f"microbatch {number} is a {type(given).__name__}{many}: expected a pair of inputs and {target}")
    return given[0], given[1]


def repeated_parameters(model: nn.Module, batch: Batch, loss_fn: Callable[[Any, Tensor], Tensor]) -> frozenset[str]:
    """Return parameters with several uses in ``model`` on ``batch``, under all names; consumes the model.

    They may have a copy in each stage. Undetectable uses are omitted.
    """
    model.requires_grad_()
    inputs = [one.detach().requires_grad_() * 1 if one.is_floating_point() else one for one in batch.inputs]
    try:
        loss = loss_fn(model(*inputs), batch.target)
    except RuntimeError:  # user code may reject inputs with gradients
        return frozenset()
    count, parameters = uses(ends_of([loss])), model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, one in parameters if count[id(one)] > 1)


def name_of(function: object) -> str:
    """Return a name for ``function``."""
    function = getattr(function, "func", function)  # functools.partial
    return str(getattr(function, "__name__", None) or type(function).__name__)


def show(value: Any) -> str:
    """Describe a value: itself if short, otherwise its type."""
    return repr(value) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"


def form(tensor: Tensor) -> str:
    """Describe shape and dtype."""
    return f"shape {list(tensor.shape)} in {tensor.dtype}".replace("torch.", "")
