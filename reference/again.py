"""A stage as a model of its own: its calls run again as they ran, and what flowed back to each is its objective."""

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from pipeproof.reference.attributes import Attribute, attributes_of, changed, put_back
from pipeproof.reference.copied import hooks_of
from pipeproof.reference.drawn_from import DrawnFrom
from pipeproof.reference.generators import Generator, GeneratorState, set_states_on, states_on
from pipeproof.reference.graph import hook_first

_run_again = set[int]()  # the ids of modules
Tensors = Callable[[object], list[Tensor]]  # those in a structure that this process can read, in order


@dataclass(frozen=True)
class State:
    """What a call of a module depends on besides its inputs and its weights, as it was when the call began.

    ``drawn``: the state of each device's random numbers, by device; ``python`` and ``arrays``: of Python's own and of
    numpy's; ``generators``: other ones, and their states. ``training``: of each module inside, in order. ``autocast``:
    by device, whether it is on, and its type. ``buffers`` by name, also those that are none yet; what several names
    share is one here as well. ``attributes``: what else modules have; they are put back in a ``whole`` one.
    """

    drawn: Mapping[torch.device, Tensor]
    training: tuple[bool, ...]
    autocast: Mapping[str, tuple[bool, torch.dtype]]
    buffers: Mapping[str, Tensor | None]
    python: Any
    arrays: Any
    generators: tuple[GeneratorState, ...] = ()
    attributes: tuple[Attribute, ...] = ()
    whole: bool = False

    @staticmethod
    def of(module: nn.Module, generators: Sequence[Generator] = ()) -> "State":
        """The state that a call of ``module`` would have now, which may draw from these ``generators``."""
        devices = _devices(module)
        return State(
            states_on(devices),
            tuple(part.training for part in module.modules()),
            {
                device.type: (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
                for device in devices
            },
            _copies(_buffers(module)),
            random.getstate(),
            numpy.random.get_state(),
            tuple(map(GeneratorState.of, generators)),
            tuple(attributes_of(module)),
        )

    @contextmanager
    def resumed(self, module: nn.Module) -> Iterator[None]:
        """While this is open, a call of ``module`` has this state; then all is as before, but for random numbers.

        Those go on from there, as for a loss that draws some. Buffers are others meanwhile: a backward may still need
        those that a call has written to.
        """
        modes = tuple(part.training for part in module.modules())
        buffers = [(part, dict(part._buffers)) for part in module.modules()]
        with ExitStack() as stack:
            stack.callback(_switch, module, modes)
            stack.callback(_put_back, buffers)
            self._draw()
            _switch(module, self.training)
            now = _buffers(module)
            for name, kept in _copies(self.buffers).items():
                prefix, _, leaf = name.rpartition(".")
                module.get_submodule(prefix)._buffers[leaf] = _as_now(kept, now.get(name))
            if self.whole:
                stack.enter_context(put_back(module, self.attributes))
            stack.enter_context(self.cast())
            yield

    @contextmanager
    def cast(self) -> Iterator[None]:
        """While this is open, types are cast as in the call."""
        with ExitStack() as stack:
            for kind, (enabled, dtype) in self.autocast.items():
                if enabled or torch.is_autocast_enabled(kind):  # not every device knows how to cast
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield

    @property
    def casts(self) -> bool:
        """Whether any types are cast in the call."""
        return any(enabled for enabled, _ in self.autocast.values())

    @property
    def drew(self) -> bool:
        """Whether anything was drawn since, where a device draws."""
        now = states_on(self.drawn)
        on_devices = any(not torch.equal(now[device], state) for device, state in self.drawn.items())
        return on_devices or any(kept.moved for kept in self.generators)

    def with_attributes(self) -> "State":
        """The same with what modules had in attributes, too."""
        return replace(self, whole=True)

    def in_training(self) -> "State":
        """The same with everything in training mode."""
        return replace(self, training=(True,) * len(self.training))

    def _draw(self) -> None:
        set_states_on(self.drawn)
        random.setstate(self.python)
        numpy.random.set_state(self.arrays)
        for kept in self.generators:
            kept.put_back()


@contextmanager
def undisturbed(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While this is open, ``modules`` are run again.

    Backwards can run, and no types are cast where they are, whatever the caller set.
    """
    every = list(modules)
    own = {id(part) for module in every for part in module.modules()} - _run_again
    with ExitStack() as stack:
        _run_again.update(own)
        stack.callback(_run_again.difference_update, own)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in {device.type for module in every for device in _devices(module)}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def is_run_again(module: nn.Module) -> bool:
    """Whether its calls are none of a step that anybody watches, but come from one that is checked."""
    return id(module) in _run_again


def _devices(module: nn.Module) -> set[torch.device]:
    return {torch.device("cpu"), *(one.device for one in module.parameters() if not one.is_meta)}


def _switch(module: nn.Module, modes: Sequence[bool]) -> None:
    for part, training in zip(module.modules(), modes, strict=True):
        part.training = training


def _buffers(module: nn.Module) -> dict[str, Tensor | None]:
    every = ((prefix, leaf, one) for prefix, part in module.named_modules() for leaf, one in part._buffers.items())
    return {f"{prefix}.{leaf}" if prefix else leaf: one for prefix, leaf, one in every}


def _copies(buffers: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    made = {id(one): one.detach().clone() for one in buffers.values() if one is not None}
    return {name: made.get(id(one)) for name, one in buffers.items()}


def _as_now(kept: Tensor | None, now: Tensor | None) -> Tensor | None:
    """``kept``, where and as wide as it is ``now``: the model may be a wider copy."""
    if kept is None or now is None:
        return kept
    return kept.to(now.device, now.dtype if now.is_floating_point() else kept.dtype)


def _put_back(buffers: Sequence[tuple[nn.Module, dict[str, Tensor | None]]]) -> None:
    for part, own in buffers:
        part._buffers.update(own)


class _Here:
    """In the place of a tensor that is kept apart."""


@dataclass(frozen=True)
class Called:
    """A call of a module, as it was when it began: its tensors, what else it was given, and its state.

    ``wanting`` are the numbers of those tensors that want a gradient. Of one that was given in several places the first
    counts, and ``repeated`` has its number for the others. ``places`` are the devices that they were on: they may be
    kept elsewhere. ``flows`` are the gradients that came to what it gave, by number, in its first backward, and
    ``parts`` those of all, each once, by digest; whoever sees them come notes them here.
    """

    tensors: tuple[Tensor, ...]
    places: tuple[torch.device, ...]
    others: tuple[object, ...]
    form: TreeSpec
    state: State
    wanting: frozenset[int]
    repeated: Mapping[int, int]
    flows: dict[int, Tensor] = field(default_factory=dict)
    parts: dict[int, dict[bytes, Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(
        module: nn.Module,
        arguments: Sequence[Any],
        named: Mapping[str, Any],
        *,
        tensors: Tensors,
        copy: Callable[[Tensor], Tensor],
        generators: Sequence[Generator] = (),
    ) -> "Called":
        """The call that begins now; ``copy`` copies a tensor to where it is kept."""
        leaves, form = tree_flatten((tuple(arguments), dict(named)))
        own = {id(one) for one in tensors(leaves)}
        seen = [one for one in leaves if id(one) in own]
        others = tuple(_Here() if id(one) in own else one for one in leaves)
        repeated = repeats(seen)
        wanting = frozenset(k for k, one in enumerate(seen) if one.requires_grad and k not in repeated)
        kept, places = tuple(copy(one.detach()) for one in seen), tuple(one.device for one in seen)
        return Called(kept, places, others, form, State.of(module, generators), wanting, repeated)

    def given(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What it was called with, with these in place of its tensors: copies, for the module may write to them."""
        there = [one.to(place) for one, place in zip(tensors, self.places, strict=True)]
        own = [one if one.requires_grad else one.clone() for one in there]
        rest = iter([own[self.repeated.get(k, k)] for k in range(len(own))])
        leaves = [next(rest) if isinstance(one, _Here) else one for one in self.others]
        arguments, named = tree_unflatten(leaves, self.form)
        return arguments, named

    def sum_of(self, output: int, digests: Iterable[bytes]) -> Tensor:
        """The sum of those of its ``parts`` that have these ``digests``."""
        return reduce(torch.add, (self.parts[output][one] for one in digests))

    def __deepcopy__(self, memo: object) -> "Called":
        return self  # whoever copies a model, or what it is given, has no use for another


def repeats(tensors: Sequence[Tensor]) -> dict[int, int]:
    """The number of each tensor that is the very one of an earlier number, with the first of those."""
    first: dict[int, int] = {}
    each = [first.setdefault(id(tensor), number) for number, tensor in enumerate(tensors)]
    return {number: one for number, one in enumerate(each) if one != number}


class Again(nn.Module):
    """A ``stage``, called as it was: of a call and its tensors, what the stage makes of them.

    It has the stage's own members, under the names that they have there. ``others``: the generators of random numbers
    that its first call drew from, and whose states are not known, and those of what else ran with it. Either
    raises ``KeptElsewhere`` where a state is.
    """

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.__dict__["stage"] = stage
        self.__dict__["drew"] = False  # whether any call drew random numbers
        self.__dict__.update(others={}, known=[])
        for members in ("_parameters", "_buffers", "_modules"):
            self.__dict__[members] = stage.__dict__[members]

    def __deepcopy__(self, memo: dict[int, object]) -> "Again":
        stage: nn.Module = self.__dict__["stage"]
        memo.update((id(one), one) for one in (*hooks_of(stage), *self.__dict__["known"]))
        made = Again(copy.deepcopy(stage, memo))
        made.__dict__.update(others=self.__dict__["others"], known=self.__dict__["known"])
        return made

    def forward(self, called: Called, *tensors: Tensor) -> Any:
        """What the stage returns."""
        stage: nn.Module = self.__dict__["stage"]
        arguments, named = called.given(tensors)
        with called.state.resumed(stage), self.looking(called.state):
            made = stage(*arguments, **named)
            self.__dict__["drew"] = self.__dict__["drew"] or called.state.drew
            return made

    @contextmanager
    def looking(self, state: State, who: str = "") -> Iterator[None]:
        """While it runs for the first time, note what it draws from: its call, or ``who`` else computes with it."""
        if who in self.__dict__["others"]:
            yield
            return
        known = self.__dict__["known"] = [kept.generator for kept in state.generators]
        with DrawnFrom(known, state.drawn) as drawn:
            yield
        self.__dict__["others"][who] = tuple(drawn.others)

    def changed_since(self, called: Called) -> list[str]:
        """The attributes that the stage has no more as it had them in that call, by their names."""
        return changed(self.__dict__["stage"], called.state.attributes)

    @property
    def drawn_from(self) -> tuple[str, Generator] | None:
        """Who draws from a generator whose state is not known, and that."""
        return next(((who, one) for who, those in self.__dict__["others"].items() for one in those), None)


class _Flow(torch.autograd.Function):
    """One number made of tensors, in whose backward each gets its own gradient, bit for bit."""

    @staticmethod
    def forward(ctx: Any, flows: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.flows = [flow.to(one.device, one.dtype) for flow, one in zip(flows, tensors, strict=True)]
        sizes = [(one * flow.conj()).abs().sum().double() for one, flow in zip(tensors, ctx.flows, strict=True)]
        return torch.stack([one.cpu() for one in sizes]).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return None, *(flow * gradient.to(flow.device, flow.real.dtype) for flow in ctx.flows)


def _whole(came: Tensor, *, flow: Tensor, note: Callable[[Tensor], None]) -> Tensor:
    """The gradient of an output as it was in the step: ``flow``, all that came to it, in place of that and more."""
    own = flow.to(came.device, came.dtype)
    if not torch.equal(came, own) and not torch.allclose(came, own, rtol=0, atol=0, equal_nan=True):
        note(came - own)
    return own


def flowed(
    output: object,
    flows: Mapping[int, Tensor],
    *,
    tensors: Tensors = tree_leaves,
    note: Callable[[int, Tensor], None] = lambda number, more: None,
) -> Tensor:
    """The objective of a stage to whose ``output`` these gradients came: its backward hands them on as they are.

    Its value is the size of the product of both, element by element: other random numbers would change that, and
    rounding hardly does, for nothing in it cancels. ``note`` is told how much of the gradient of an output came from
    others that the stage made of it, and not from behind the stage.
    """
    every = tensors(output)
    pairs = [(every[number], flow) for number, flow in flows.items() if every[number].requires_grad]
    if not pairs:
        return torch.zeros((), dtype=torch.float64)
    made, given = zip(*pairs, strict=True)
    for number, flow in flows.items():
        if every[number].requires_grad:
            hook_first(every[number], partial(_whole, flow=flow, note=partial(note, number)))
    found: Tensor = _Flow.apply(given, *made)  # type: ignore[no-untyped-call]  # in torch
    return found
