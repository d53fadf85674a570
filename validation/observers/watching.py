"""Observers at a module's boundary that change no bit: what came in, what went out, and what flowed back."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import wraps
from itertools import count
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeproof.observers.shards import InShards, held_whole
from pipeproof.observers.sketch import Sketch, sketch
from pipeproof.pipeline.action import Kind
from pipeproof.pipeline.split import needs
from pipeproof.worlds.belongings import belongs_to_rank
from pipeproof.worlds.posted_messages import Came, received_at
from pipeproof.worlds.stack import Stack, own_stack

Note = Callable[[Tensor], Callable[[], None]]  # looks at a gradient; what it returns writes down what was seen


@dataclass
class Flows:
    """The backwards through one call: those that bring a gradient to what the call made.

    A tensor that a runtime receives into may come into many calls, and a hook at it is told of the gradients of all.
    What a call itself made is no other's, so the backwards that reach that are its own.
    """

    _own: set[int] = field(default_factory=set)
    _early: list[tuple[int, Callable[[], None]]] = field(default_factory=list)

    def made(self, tensor: Tensor, note: Note) -> None:
        """``tensor`` is the call's own: note the gradients that flow to it."""

        def flowed(gradient: Tensor) -> None:
            backward = torch._C._current_graph_task_id()
            self._own.add(backward)
            note(gradient)()
            for other, write in self._early:
                if other == backward:
                    write()
            self._early = [one for one in self._early if one[0] != backward]

        tensor.register_hook(flowed)  # type: ignore[no-untyped-call]  # in torch

    def borrowed(self, tensor: Tensor, note: Note, *, handed_on: bool) -> None:
        """``tensor`` may belong to other calls as well: note what flows to it in this one's backwards.

        One that is ``handed_on`` as it is may have its gradient before anything that the call made.
        """

        def flowed(gradient: Tensor) -> None:
            backward = torch._C._current_graph_task_id()
            if backward in self._own:
                note(gradient)()
            elif handed_on:
                self._early.append((backward, note(gradient)))

        tensor.register_hook(flowed)  # type: ignore[no-untyped-call]  # in torch


Module = TypeVar("Module", bound=nn.Module)


class Mode(Enum):
    """What a call of a module is to a training step."""

    FORWARD = "forward"
    SILENT = "without gradients"  # a trial, a metric, or a forward that a backward will run again
    AGAIN = "recompute"  # inside a backward


@dataclass
class Call:
    """One call of a watched module. Gradients are by the number of the tensor that they belong to.

    ``backwards`` has an entry, a count over all that this rank's calls do, for each time that gradients came out of it.
    ``mixed``: parts of the module were in training mode, and others were not. ``needing`` are the inputs that want a
    gradient, ``giving`` the outputs that bring one; ``unread``: those are DTensors, which nobody reads.
    A ``silent`` one ran without gradients: it is a forward only if a backward ran it again, and then has what that had.
    ``rank`` is the one that it was on, where several hold its stage. ``stacks`` are where the user's code called for
    its forward and its backward, ``came`` the messages that these were given, by the tensor that each was. ``cleared``:
    where the gradients were cleared that its backward had added to. ``began``: when, by the count of ``backwards``.
    ``flowed``: by backward, when one ran through the end of the call, by that count; it may not have come to an input.
    """

    training: bool
    inputs: list[Sketch] = field(default_factory=list)
    outputs: list[Sketch] = field(default_factory=list)
    output_gradients: dict[int, Sketch] = field(default_factory=dict)
    input_gradients: dict[int, Sketch] = field(default_factory=dict)
    kept: dict[int, Sketch] = field(default_factory=dict)  # the inputs that it needs, when the backward begins
    backwards: list[int] = field(default_factory=list)
    rank: int | None = None
    silent: bool = False
    mixed: bool = False
    stacks: dict[Kind, Stack] = field(default_factory=dict)
    came: dict[tuple[Kind, int], Came] = field(default_factory=dict)
    cleared: Stack = ()
    needing: frozenset[int] = frozenset()
    giving: frozenset[int] = frozenset()
    unread: bool = False
    began: int | None = None
    flowed: dict[int, int] = field(default_factory=dict)

    @property
    def ran(self) -> list[int]:
        """When its backwards were over. Of those that came to no input the first alone: halves may be several."""
        return self.backwards or [*self.flowed.values()][:1]

    def later(self, time: int, *, rank: int) -> "Call":
        """The same on ``rank``, by so much later."""
        began = None if self.began is None else self.began + time
        flowed = {backward: time + end for backward, end in self.flowed.items()}
        return replace(self, backwards=[time + end for end in self.backwards], flowed=flowed, began=began, rank=rank)


@dataclass
class _Watched:
    """A module, its calls so far, and those of them that a backward may still run again."""

    module: nn.Module
    when: Callable[[], bool]
    calls: list[Call] = field(default_factory=list)
    waiting: list[Call] = field(default_factory=list)

    def cleared(self, stack: Stack) -> None:
        """What its calls had added to its gradients so far was cleared there."""
        for call in self.calls:
            call.cleared = call.cleared or (stack if call.ran else ())

    def original(self, again: Call) -> Call | None:
        """The call that is run ``again``, which now has its gradients: the first with its inputs, else the first that
        waits; None if none does. Where several others wait, nobody knows whose gradients those are."""
        content = [one.digest for one in again.inputs]
        equal = [call for call in self.waiting if [one.digest for one in call.inputs] == content]
        found = next(iter(equal or self.waiting), None)
        if found is None:
            return None
        if equal or len(self.waiting) == 1:
            again.output_gradients, again.input_gradients = found.output_gradients, found.input_gradients
        self.waiting = [call for call in self.waiting if call is not found]
        found.kept.update(enumerate(again.inputs))
        again.backwards, again.flowed, again.stacks, again.came = (
            found.backwards, found.flowed, found.stacks, found.came
        )  # fmt: skip
        found.needing, found.giving = again.needing, again.giving
        return found


@dataclass(frozen=True)
class _Entry:
    """What a module was called with, as it was then, and from where."""

    taken: list[Sketch]
    versions: list[int]
    stack: Stack
    came: dict[tuple[Kind, int], Came]

    @staticmethod
    def of(inputs: Sequence[Tensor]) -> "_Entry":
        came = {(Kind.FORWARD, k): one for k, tensor in enumerate(inputs) if (one := received_at(tensor)) is not None}
        return _Entry(list(map(sketch, inputs)), [tensor._version for tensor in inputs], own_stack(), came)


class Watcher:
    """Notes the calls of watched modules. ``compiled``: ``torch.compile`` took some in, whose calls it cannot see."""

    def __init__(self) -> None:
        self.compiled = False
        self._watched: dict[int, _Watched] = {}
        self._entering: dict[int, list[_Entry]] = defaultdict(list)  # by thread
        self._times = count()

    def watch(self, module: nn.Module, when: Callable[[], bool] | None = None) -> None:
        """Hook ``module``, once; calls count while ``when`` holds."""
        if id(module) not in self._watched:
            self._watched[id(module)] = _Watched(module, when or (lambda: True))
            module.register_forward_pre_hook(self._entered, with_kwargs=True)
            module.register_forward_hook(self._called, with_kwargs=True)

    def calls(self, module: nn.Module) -> list[Call] | None:
        """The forwards of ``module``, or of the one watched module inside it or around it; None if there is none.

        Those without gradients are forwards where backwards ran any of them again.
        """
        own = {id(part) for part in module.modules()}
        for one in self._watched.values():
            if id(one.module) in own or module in one.module.modules():
                again = any(call.silent and call.ran for call in one.calls)
                return [call for call in one.calls if again or not call.silent]
        return None

    def clearing(self, clear: Callable[..., None]) -> Callable[..., None]:
        """``clear``, a method that clears gradients, noting of which calls it cleared what they had added."""

        @wraps(clear)
        def noted(*arguments: Any, **named: Any) -> None:
            had = [one for one in self._watched.values() if any(p.grad is not None for p in one.module.parameters())]
            clear(*arguments, **named)
            for one in had:
                if not any(map(_has_gradient, one.module.parameters())):
                    one.cleared(own_stack())

        return noted

    def doubts(self) -> Iterator[str]:
        """Why no gradient may come to what the last calls were given, for a step that failed."""
        for one in self._watched.values():
            call = one.calls[-1] if one.calls else None
            if call is None or not call.stacks[Kind.FORWARD]:
                continue
            place = f"the stage was last called at {call.stacks[Kind.FORWARD][0]}"
            came = [one for (kind, k), one in call.came.items() if kind is Kind.FORWARD and k not in call.needing]
            if call.silent or not (call.giving or call.unread):
                yield f"{place}\n  {'without gradients' if call.silent else 'what it gave back wants no gradient'}"
            elif came and not call.needing:
                yield "\n  ".join(
                    [place, "with a message that wants no gradient, received at", *map(str, came[0].received)]
                )

    def _entered(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            self.compiled = True
        elif self._watched[id(module)].when():
            inputs = _tensors((arguments, named))  # looked at now: the module may change them in place
            self._entering[get_ident()].append(_Entry.of(inputs))

    def _called(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        if torch.compiler.is_compiling():
            return
        watched, mode = self._watched[id(module)], _mode()
        if not watched.when():
            return
        inputs, outputs = _tensors((arguments, named)), _tensors(result)
        modes = {part.training for part in module.modules()}
        entry = self._entering[get_ident()].pop()
        needing, giving = map(_differentiable, (inputs, outputs))
        silent, mixed = mode is Mode.SILENT, len(modes) > 1
        made, began = list(map(sketch, outputs)), next(self._times)
        stacks = {Kind.FORWARD: entry.stack}
        call = Call(True in modes, entry.taken, made, silent=silent, mixed=mixed, stacks=stacks, began=began)
        call.came = entry.came
        call.needing, call.giving = frozenset(needing), frozenset(giving)
        if mode is Mode.SILENT:
            watched.calls.append(call)
            watched.waiting.append(call)
            return
        if mode is Mode.AGAIN:
            if watched.original(call) is None:
                return  # of a checkpoint whose forward had gradients: they flow through that
        else:
            watched.calls.append(call)
            unchanged = [k for k, tensor in enumerate(inputs) if tensor._version == entry.versions[k]]
            self._look_again(call, {k: inputs[k] for k in unchanged}, giving)
        parts = [one for one in _leaves(result, InShards) if one.requires_grad]
        call.unread = bool(parts)
        self._follow(call, needing, giving, parts)

    def _look_again(self, call: Call, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor]) -> None:
        """Note the inputs that the backward needs once more when it begins; no others can be overwritten."""
        given = {id(tensor) for tensor in inputs.values()}
        made = [tensor for tensor in outputs.values() if id(tensor) not in given] or list(outputs.values())
        needed = {k: weakref.ref(tensor) for k, tensor in inputs.items() if needs(made, tensor)}
        if not needed:
            return

        def begins(gradient: Tensor) -> None:
            alive = {number: tensor for number, reference in needed.items() if (tensor := reference()) is not None}
            call.kept.update({number: sketch(tensor, known=call.inputs[number]) for number, tensor in alive.items()})

        made[0].register_hook(begins)  # type: ignore[no-untyped-call]  # in torch

    def _follow(
        self, call: Call, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor], parts: Sequence[Tensor]
    ) -> None:
        """Note the gradients of these, by their numbers, and count the backwards of ``call``.

        A backward is counted where it ends: at an input, or if no input wants a gradient, where it begins. ``parts``
        are outputs of which this rank has a part each: through them, too, its own backwards come.
        """
        flows = Flows()
        for number, tensor in enumerate(parts):
            flows.made(tensor, self._counting(call, counts=not inputs and not outputs and not number))
        given = {id(tensor) for tensor in inputs.values()}
        own = {k for k, tensor in outputs.items() if id(tensor) not in given} or set(outputs)
        last = min(inputs) if inputs else min(outputs, default=None)
        ends = {outputs[k].grad_fn for k in own if id(outputs[k]) not in given}
        for node in filter(None, ends):
            node.register_prehook(lambda _: self._flowed(call))
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

    def _flowed(self, call: Call) -> None:
        """A backward runs through the end of ``call``: one that is only asked for the gradient there runs nothing."""
        call.flowed.setdefault(torch._C._current_graph_task_id(), next(self._times))

    def _noting(self, call: Call, into: dict[int, Sketch], number: int, *, counts: bool) -> Note:
        def note(gradient: Tensor) -> Callable[[], None]:
            seen = None if (held := held_whole(gradient)) is None else sketch(held)
            if Kind.BACKWARD not in call.stacks:
                call.stacks[Kind.BACKWARD] = own_stack()
            if into is call.output_gradients and (came := received_at(gradient)) is not None:
                call.came.setdefault((Kind.BACKWARD, number), came)

            def write() -> None:
                if seen is not None:
                    into[number] = seen
                if counts:
                    call.backwards.append(next(self._times))

            return write

        return note

    def _counting(self, call: Call, *, counts: bool) -> Note:
        """Of a gradient of which this rank has a part, only that it came."""

        def write() -> None:
            call.stacks.setdefault(Kind.BACKWARD, own_stack())
            if counts:
                call.backwards.append(next(self._times))

        return lambda gradient: write


_watcher: Watcher | None = None
belongs_to_rank(__name__, "_watcher", fresh=lambda _: None)


@contextmanager
def watching() -> Iterator[Watcher]:
    """While this is open, ``watch`` has somebody to tell."""
    global _watcher
    outer, _watcher = _watcher, Watcher()
    clearing: Callable[[Any], Any] = _watcher.clearing
    kept = nn.Module.zero_grad, torch.optim.Optimizer.zero_grad
    nn.Module.zero_grad, torch.optim.Optimizer.zero_grad = map(clearing, kept)  # type: ignore[method-assign]
    try:
        yield _watcher
    except Exception as error:
        for doubt in _watcher.doubts():
            error.add_note(doubt)
        raise
    finally:
        _watcher = outer
        nn.Module.zero_grad, torch.optim.Optimizer.zero_grad = kept  # type: ignore[method-assign]


def watch(module: Module, *, when: Callable[[], bool] | None = None) -> Module:
    """Watch ``module``, a stage of a pipeline, from now on: its calls and the gradients that pass through it.

    ``when`` is asked at every call whether it counts; None: all do. Returns the module itself. Outside a validation
    this does nothing, so it may stay in the code that is validated.
    """
    if _watcher is not None:
        _watcher.watch(module, when)
    return module


def _tensors(values: object) -> list[Tensor]:
    """Those that this rank has whole: what is asked of a DTensor, all of its ranks must ask."""
    return [leaf for leaf in _leaves(values, Tensor) if not leaf.is_meta and not isinstance(leaf, InShards)]


def _leaves(values: object, kind: type) -> list[Any]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, kind)]


def _has_gradient(parameter: nn.Parameter) -> bool:
    """Whether a gradient other than zero is there, as far as this rank has it."""
    gradient = parameter.grad.to_local() if isinstance(parameter.grad, InShards) else parameter.grad
    return gradient is not None and not gradient.is_meta and bool(gradient.any())


def _differentiable(tensors: list[Tensor]) -> dict[int, Tensor]:
    return {number: tensor for number, tensor in enumerate(tensors) if tensor.requires_grad}


def _mode() -> Mode:
    if not torch.is_grad_enabled():
        return Mode.SILENT
    return Mode.FORWARD if torch._C._current_graph_task_id() == -1 else Mode.AGAIN
