"""Observers at a module's boundary that change no bit: what came in, what went out, and what flowed back."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from validation.observers.flows import Flows, Note
from validation.observers.sketch import Sketch, sketch

Module = TypeVar("Module", bound=nn.Module)


@dataclass
class Call:
    """One call of a watched module. Gradients are by the number of the tensor that they belong to.

    ``backwards`` has an entry, a count over all calls of this rank, for each time that gradients came out of the call.
    ``rank`` is the one that it was on, where several hold its stage.
    """

    training: bool
    inputs: list[Sketch] = field(default_factory=list)
    outputs: list[Sketch] = field(default_factory=list)
    output_gradients: dict[int, Sketch] = field(default_factory=dict)
    input_gradients: dict[int, Sketch] = field(default_factory=dict)
    kept: dict[int, Sketch] = field(default_factory=dict)  # the inputs once more, when the backward begins
    backwards: list[int] = field(default_factory=list)
    rank: int | None = None


class Watcher:
    """Notes the calls of watched modules."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[nn.Module, list[Call]]] = {}
        self._when: dict[int, Callable[[], bool]] = {}
        self._entering: list[tuple[list[Sketch], list[int]]] = []
        self._backwards = 0

    def watch(self, module: nn.Module, when: Callable[[], bool] | None = None) -> None:
        """Hook ``module``, once; calls count while ``when`` holds."""
        if id(module) not in self._calls:
            self._calls[id(module)] = module, []
            self._when[id(module)] = when or (lambda: True)
            module.register_forward_pre_hook(self._entered, with_kwargs=True)
            module.register_forward_hook(self._called, with_kwargs=True)

    def calls(self, module: nn.Module) -> list[Call] | None:
        """The calls of ``module``, or of the one watched module inside it or around it; None if there is none."""
        own = {id(part) for part in module.modules()}
        for watched, calls in self._calls.values():
            if id(watched) in own or module in watched.modules():
                return calls
        return None

    def _entered(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._counts(module):
            inputs = _tensors((arguments, named))  # looked at now: the module may change them in place
            self._entering.append((list(map(sketch, inputs)), [tensor._version for tensor in inputs]))

    def _called(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        if not self._counts(module):
            return
        inputs, outputs = _tensors((arguments, named)), _tensors(result)
        training = any(part.training for part in module.modules())
        taken, versions = self._entering.pop()
        call = Call(training, taken, list(map(sketch, outputs)))
        self._calls[id(module)][1].append(call)
        wanting = [number for number, tensor in enumerate(inputs) if tensor.requires_grad]
        giving = [number for number, tensor in enumerate(outputs) if tensor.requires_grad]
        if giving:
            unchanged = [k for k, tensor in enumerate(inputs) if tensor._version == versions[k]]
            given = {id(tensor) for tensor in inputs}
            own = next((k for k in giving if id(outputs[k]) not in given), giving[0])
            self._look_again(outputs[own], call, {k: weakref.ref(inputs[k]) for k in unchanged})
        self._follow(call, {k: inputs[k] for k in wanting}, {k: outputs[k] for k in giving})

    def _counts(self, module: nn.Module) -> bool:
        return _trains() and self._when[id(module)]()

    def _look_again(self, output: Tensor, call: Call, inputs: Mapping[int, weakref.ref[Tensor]]) -> None:
        def begins(gradient: Tensor) -> None:
            alive = {number: tensor for number, reference in inputs.items() if (tensor := reference()) is not None}
            call.kept.update({number: sketch(tensor, known=call.inputs[number]) for number, tensor in alive.items()})

        output.register_hook(begins)  # type: ignore[no-untyped-call]  # in torch

    def _follow(self, call: Call, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor]) -> None:
        """Note the gradients of these, by their numbers, and count the backwards of ``call``.

        A backward is counted where it ends: at an input, or if no input wants a gradient, where it begins.
        """
        flows = Flows()
        given = {id(tensor) for tensor in inputs.values()}
        own = {k for k, tensor in outputs.items() if id(tensor) not in given} or set(outputs)
        last = min(inputs) if inputs else min(outputs, default=None)
        for number, tensor in outputs.items():
            note = self._noting(call, call.output_gradients, number, counts=not inputs and number == last)
            if number in own:
                flows.made(tensor, note)
            else:
                flows.borrowed(tensor, note, handed_on=True)
        handed_on = {id(tensor) for tensor in outputs.values()}
        for number, tensor in inputs.items():
            note = self._noting(call, call.input_gradients, number, counts=number == last)
            flows.borrowed(tensor, note, handed_on=id(tensor) in handed_on)

    def _noting(self, call: Call, into: dict[int, Sketch], number: int, *, counts: bool) -> Note:
        def note(gradient: Tensor) -> Callable[[], None]:
            seen = sketch(gradient)

            def write() -> None:
                into[number] = seen
                if counts:
                    call.backwards.append(self._backwards)
                    self._backwards += 1

            return write

        return note


_watcher: Watcher | None = None


@contextmanager
def watching() -> Iterator[Watcher]:
    """While this is open, ``watch`` has somebody to tell."""
    global _watcher
    outer, _watcher = _watcher, Watcher()
    try:
        yield _watcher
    finally:
        _watcher = outer


def watch(module: Module, *, when: Callable[[], bool] | None = None) -> Module:
    """Watch ``module``, a stage of a pipeline, from now on: its calls and the gradients that pass through it.

    ``when`` is asked at every call whether it counts; None: all do. Returns the module itself. Outside a validation
    this does nothing, so it may stay in the code that is validated.
    """
    if _watcher is not None:
        _watcher.watch(module, when)
    return module


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and not leaf.is_meta]


def _trains() -> bool:
    """Whether a call is a forward of a training step: no trial without gradients, no recompute inside a backward."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
