"""A stage as a model: its calls run again, with the gradients that flowed back as objective."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from pipeproof.reference.attributes import Attribute, attributes_of, list_changed, put_back
from pipeproof.reference.copied import hooks_of
from pipeproof.reference.drawn_from import DrawnFrom
from pipeproof.reference.generators import Generator, GeneratorState, drew, own_generators, set_states_on, states_on
from pipeproof.reference.graph import hook_first

_run_again = set[int]()  # the ids of modules
Tensors = Callable[[object], list[Tensor]]  # readable tensors in a structure, in order


@dataclass(frozen=True)
class State:
    """A call's dependencies besides inputs and weights, at its start.

    ``drawn``: random number state by device; ``own``: Python's and numpy's; ``generators``: other ones, with their
    states. ``training``: of each module inside, in order. ``autocast``: by device, whether it is on,
    and its type. ``buffers`` by name, also empty ones; names that share a buffer share it here too. ``attributes``:
    other module members; a ``whole`` state restores them.
    """

    drawn: Mapping[torch.device, Tensor]
    training: tuple[bool, ...]
    autocast: Mapping[str, tuple[bool, torch.dtype]]
    buffers: Mapping[str, Tensor | None]
    own: tuple[GeneratorState, ...]
    generators: tuple[GeneratorState, ...] = ()
    attributes: tuple[Attribute, ...] = ()
    whole: bool = False

    @staticmethod
    def of(module: nn.Module, generators: Sequence[Generator] = ()) -> "State":
        """Capture the state for a call now, with ``generators`` that it may draw from."""
        devices = _devices(module)
        return State(
            states_on(devices),
            tuple(part.training for part in module.modules()),
            {
                device.type: (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
                for device in devices
            },
            _copies(_buffers(module)),
            tuple(map(GeneratorState.of, own_generators(()))),
            tuple(map(GeneratorState.of, generators)),
            tuple(attributes_of(module)),
        )

    @contextmanager
    def resume(self, module: nn.Module) -> Iterator[None]:
        """Give calls this state; afterwards restore everything but random numbers.

        Those go on from there, as for a loss that draws some. Buffers are replaced meanwhile: a backward may still need
        the ones that a call has written to.
        """
        every = [(part, part.training, dict(part._buffers)) for part in module.modules()]
        now = _buffers(module)
        for kept in (*self.own, *self.generators):
            kept.put_back()
        set_states_on(self.drawn)
        try:
            for (part, *_), training in zip(every, self.training, strict=True):
                part.training = training
            for name, buffer in _copies(self.buffers).items():
                prefix, _, leaf = name.rpartition(".")
                module.get_submodule(prefix)._buffers[leaf] = _as_now(buffer, now.get(name))
            with put_back(module, self.attributes if self.whole else ()), self.cast():
                yield
        finally:
            for part, training, buffers in every:
                part.training = training
                part._buffers.update(buffers)

    @contextmanager
    def cast(self) -> Iterator[None]:
        """Cast types like the call."""
        with ExitStack() as stack:
            for kind, (enabled, dtype) in self.autocast.items():
                if enabled or torch.is_autocast_enabled(kind):  # not every device knows how to cast
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield

    @property
    def casts(self) -> bool:
        """True if autocast changes types in the call."""
        return any(enabled for enabled, _ in self.autocast.values())

    @property
    def drew(self) -> bool:
        """True if random numbers were drawn since the capture."""
        return drew(self.drawn) or any(kept.moved for kept in self.generators)

    def with_attributes(self) -> "State":
        """Include module attributes."""
        return replace(self, whole=True)

    def in_training(self) -> "State":
        """Set everything to training mode."""
        return replace(self, training=(True,) * len(self.training))


@contextmanager
def keep_undisturbed(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Allow ``modules`` to run again: backwards can run, and no types are cast on their devices."""
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
    """True if calls come from a check, not from a watched step."""
    return id(module) in _run_again


def _devices(module: nn.Module) -> set[torch.device]:
    return {torch.device("cpu"), *(one.device for one in module.parameters() if not one.is_meta)}


def _buffers(module: nn.Module) -> dict[str, Tensor | None]:
    every = ((prefix, leaf, one) for prefix, part in module.named_modules() for leaf, one in part._buffers.items())
    return {f"{prefix}.{leaf}" if prefix else leaf: one for prefix, leaf, one in every}


def _copies(buffers: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    made = {id(one): one.detach().clone() for one in buffers.values() if one is not None}
    return {name: made.get(id(one)) for name, one in buffers.items()}


def _as_now(kept: Tensor | None, now: Tensor | None) -> Tensor | None:
    """Move ``kept`` to the device and width of ``now``: the model may be a wider copy."""
    if kept is None or now is None:
        return kept
    return kept.to(now.device, now.dtype if now.is_floating_point() else kept.dtype)


class _Here:
    """A placeholder for a tensor kept elsewhere."""


@dataclass(frozen=True)
class Called:
    """A module call at its start: tensors, further arguments, and state.

    ``wanting``: numbers of tensors that want a gradient. A tensor given in several places counts at the first, and
    ``repeated`` maps the others to it. ``places``: the tensors' devices: they may be kept elsewhere. ``flows``: by
    number, output gradients in its first backward; ``parts``: all of them, each once, by digest; observers fill both.
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
        """Capture a call that begins now; ``copy`` moves a tensor to storage."""
        leaves, form = tree_flatten((tuple(arguments), dict(named)))
        own = {id(one) for one in tensors(leaves)}
        observed = [one for one in leaves if id(one) in own]
        others = tuple(_Here() if id(one) in own else one for one in leaves)
        repeated = repeats(observed)
        wanting = frozenset(k for k, one in enumerate(observed) if one.requires_grad and k not in repeated)
        kept, places = tuple(copy(one.detach()) for one in observed), tuple(one.device for one in observed)
        return Called(kept, places, others, form, State.of(module, generators), wanting, repeated)

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Rebuild the arguments with given tensors: copies, since the module may write to them."""
        there = [one.to(place) for one, place in zip(tensors, self.places, strict=True)]
        own = [one if one.requires_grad else one.clone() for one in there]
        rest = iter([own[self.repeated.get(k, k)] for k in range(len(own))])
        leaves = [next(rest) if isinstance(one, _Here) else one for one in self.others]
        arguments, named = tree_unflatten(leaves, self.form)
        return arguments, named

    def sum_of(self, output: int, digests: Iterable[bytes]) -> Tensor:
        """Sum the parts with given digests."""
        return reduce(torch.add, (self.parts[output][one] for one in digests))

    def __deepcopy__(self, memo: object) -> "Called":
        return self  # copies of a model, or of its inputs, share calls


def repeats(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Map repeated tensors' numbers to the first one's."""
    first: dict[int, int] = {}
    each = [first.setdefault(id(tensor), number) for number, tensor in enumerate(tensors)]
    return {number: one for number, one in enumerate(each) if one != number}


class Again(nn.Module):
    """Repeats a stage's calls: from a call and tensors to the outputs.

    It has the stage's own members, under the same names. ``others``: random generators with unknown states that its
    first call drew from, and those of other code in it. Either raises ``KeptElsewhere`` for a hidden state.
    """

    stage: nn.Module
    drew: bool  # whether any call drew random numbers
    others: dict[str, tuple[Generator, ...]]
    known: list[Generator]

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(stage=stage, drew=False, others={}, known=[])  # the stage is no submodule
        for members in ("_parameters", "_buffers", "_modules"):
            self.__dict__[members] = stage.__dict__[members]

    def __deepcopy__(self, memo: dict[int, object]) -> "Again":
        memo.update((id(one), one) for one in (*hooks_of(self.stage), *self.known))
        made = Again(copy.deepcopy(self.stage, memo))
        made.__dict__.update(others=self.others, known=self.known)
        return made

    def forward(self, called: Called, *tensors: Tensor) -> Any:
        """Call the stage once more."""
        arguments, named = called.arguments(tensors)
        with called.state.resume(self.stage), self.looking(called.state):
            made = self.stage(*arguments, **named)
            self.__dict__["drew"] = self.drew or called.state.drew
            return made

    @contextmanager
    def looking(self, state: State, who: str = "") -> Iterator[None]:
        """Watch the first run for its random generators: the stage's call, or ``who`` computes with it."""
        if who in self.others:
            yield
            return
        known = self.__dict__["known"] = [kept.generator for kept in state.generators]
        with DrawnFrom(known, state.drawn) as drawn:
            yield
        self.others[who] = tuple(drawn.others)

    def list_changed(self, called: Called) -> list[str]:
        """List attributes that changed on the stage since the call."""
        return list_changed(self.stage, called.state.attributes)

    @property
    def drawn_from(self) -> tuple[str, Generator] | None:
        """A generator with an unknown state, and its user."""
        return next(((who, one) for who, those in self.others.items() for one in those), None)


class _Flow(torch.autograd.Function):
    """A number made from tensors; its backward gives each the right gradient, bit for bit."""

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
    """Replace an output's gradient by the step's: ``flow``, everything that came to it, in place of that and more."""
    own = flow.to(came.device, came.dtype)
    if not torch.equal(came, own) and not torch.allclose(came, own, rtol=0, atol=0, equal_nan=True):
        note(came - own)
    return own


def objective_of(
    output: object,
    flows: Mapping[int, Tensor],
    *,
    tensors: Tensors = tree_leaves,
    note: Callable[[int, Tensor], None] = lambda number, more: None,
) -> Tensor:
    """Build the objective for a stage from output gradients: its backward hands them on unchanged.

    Its value is the size of the product of both, element by element: other random numbers would change that, and
    rounding hardly does, for nothing in it cancels. ``note`` receives the part of an output's gradient that came from
    other outputs made from it, not from behind the stage.
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
