"""Observers at a module's boundary that change no bit: what came in, what went out, and what flowed back."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import count
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from pipeproof.core.observe.as_they_came import AsTheyCame
from pipeproof.core.observe.backward_lines import backward_stack, is_inside_a_backward
from pipeproof.core.observe.belongings import belongs_to_rank
from pipeproof.core.observe.calls import Call, Flows, Mode, Note
from pipeproof.core.observe.elements import version
from pipeproof.core.observe.fence import Fence
from pipeproof.core.observe.hook import Hook
from pipeproof.core.observe.own_losses import OwnLosses, trains
from pipeproof.core.observe.posted_messages import did, received_at
from pipeproof.core.observe.shards import InShards, held_whole
from pipeproof.core.observe.sketch import Sketch, sketch
from pipeproof.core.observe.stack import own_stack
from pipeproof.core.observe.tensors_in import hidden_in, hidden_inputs, inputs_kept, leaves_in, tensors_in
from pipeproof.core.observe.watched import CallEntry, Watched
from pipeproof.pipeline.action import Kind
from pipeproof.pipeline.split import needs
from pipeproof.reference.again import Called, repeats
from pipeproof.reference.generators import Generator, generators_in

Module = TypeVar("Module", bound=nn.Module)
Keep = Callable[[Tensor], Tensor]


class Watcher:
    """Notes the calls of watched modules.

    keep: copies a tensor to where it is kept, so that calls can be run again; None: none is kept. generators: of random
    numbers, those that calls may draw from besides torch's, Python's, numpy's and the modules' own. linked: calls are
    held against their neighbours', as where they are kept.
    """

    def __init__(self, *, keep: Keep | None = None, generators: Sequence[Generator] = (), linked: bool = False) -> None:
        self._keep, self._generators, self._linked = keep, generators, linked or keep is not None
        self._drawing: dict[int, list[Generator]] = {}  # by module, those that its calls may draw from
        self._hooks: list[RemovableHandle] = []
        self._came, self._losses = AsTheyCame(), OwnLosses(self._flows)
        self._watched: dict[int, Watched] = {}
        self._entering: dict[int, list[CallEntry]] = defaultdict(list)  # by thread
        self._times = count()
        self._clearing = Fence()

    def watch(self, module: nn.Module, when: Callable[[], bool] | None = None) -> None:
        """Hook ``module``, once; calls count while ``when`` holds."""
        if id(module) not in self._watched:
            fence = Fence(in_func=False)
            self._watched[id(module)] = Watched(module, fence.of_user(when or (lambda: True)), fence)
            first = self._linked  # or a call that is run again has what other hooks made of its inputs twice
            entered, called = (Hook(module, fence.around(one)) for one in (self._entered, self._called))
            self._hooks.append(module.register_forward_pre_hook(entered, prepend=first, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(called, with_kwargs=True))
            self._hooks += self._came.before_hooks_of(module, fence)
            if self._linked:
                self._losses.watch(module)

    def close(self) -> None:
        """From now on note no more calls; of those that were noted, gradients still are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._losses.close()

    def anew(self) -> None:
        """Another operation begins: calls so far were of those before."""
        self._losses.anew()
        for one in self._watched.values():
            one.calls, one.waiting = [], []

    def calls(self, module: nn.Module, *, warmup: int = 0) -> list[Call] | None:
        """The forwards of ``module``, or of the one watched module inside it or around it; None if there is none.

        The first ``warmup`` ones are left out. Those without gradients are forwards where backwards ran any of them
        again, and where there are no others.
        Where not all was seen there are none.
        """
        if (one := self._found(module)) is None or one.fence.broken:
            return None if one is None else []
        for call in one.calls:
            call.settle()
        calls = one.calls[warmup:]
        again = any(call.silent and call.ran for call in calls)
        return [call for call in calls if again or not call.silent] or calls

    def unseen(self, module: nn.Module) -> str:
        """Why not all was seen of ``module`` and of its losses; empty where it was, and where nobody watched."""
        one = self._found(module)
        return "" if one is None else one.fence.broken or self._losses.fence.broken

    @property
    def compiled(self) -> bool:
        """Whether ``torch.compile`` took watched modules in, whose calls it cannot see."""
        return any(one.fence.compiled for one in self._watched.values())

    def watched(self, module: nn.Module) -> nn.Module | None:
        """``module``, or the one watched module inside it or around it; None if there is none."""
        return None if (one := self._found(module)) is None else one.module

    def _found(self, module: nn.Module) -> Watched | None:
        own = {id(part) for part in module.modules()}
        return next((w for w in self._watched.values() if id(w.module) in own or module in w.module.modules()), None)

    def replicas(self, module: nn.Module) -> DistributedDataParallel | None:
        """The DDP in which ``module`` was called, if it was."""
        return self._watched[id(module)].replicas

    @property
    def losses(self) -> OwnLosses:
        """Those that modules have besides, whose calls are kept."""
        return self._losses

    def clearing(self, clear: Callable[..., None]) -> Callable[..., None]:
        """``clear``, a method that clears gradients, noting of which calls it cleared what they had added."""

        def have() -> list[Watched]:
            return [one for one in self._watched.values() if any(p.grad is not None for p in one.module.parameters())]

        def cleared(had: Sequence[Watched]) -> None:
            for one in had:
                if not any(map(_has_gradient, one.module.parameters())):
                    one.cleared(own_stack())

        before, after = self._clearing.around(have), self._clearing.around(cleared)

        @wraps(clear)
        def noted(*arguments: Any, **named: Any) -> None:
            had = before()
            clear(*arguments, **named)
            after(had or ())

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
        if self._watched[id(module)].when():
            self._watched[id(module)].note_replicas()
            inputs = tensors_in((arguments, named))  # looked at now: the module may change them in place
            keep = self._keep and partial(Called.of, tensors=tensors_in, copy=self._keep)
            again = keep(module, arguments, named, generators=self._generators_of(module)) if keep else None
            self._entering[get_ident()].append(CallEntry.of(inputs, again, inputs_kept(module) if keep else []))

    def _generators_of(self, module: nn.Module) -> list[Generator]:
        """Those that calls of ``module`` may draw from, each once, as they are in its first call."""
        if id(module) not in self._drawing:
            every = [*self._generators, *generators_in(module)]
            self._drawing[id(module)] = list({id(one): one for one in every}.values())
        return self._drawing[id(module)]

    def _called(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        watched, mode = self._watched[id(module)], _mode()
        if not watched.when():
            return
        entry = self._entering[get_ident()].pop()
        inputs = tensors_in((arguments, named)) if entry.again is None else entry.given
        outputs = tensors_in(result)
        modes = {part.training for part in module.modules()}
        needing, giving = map(_differentiable, (inputs, outputs))
        silent, mixed = mode is Mode.SILENT, len(modes) > 1
        made, began = list(map(sketch, outputs)), next(self._times)
        stacks = {Kind.FORWARD: entry.stack}
        call = Call(True in modes, entry.taken, made, silent=silent, mixed=mixed, stacks=stacks, began=began)
        call.came, call.again = entry.came, entry.again
        if entry.again is not None:  # of one tensor, what flows to it is told once
            call.repeated, call.given_again = repeats(outputs), frozenset(entry.again.repeated)
            call.hidden = hidden_in((arguments, named, result))
            call.attribute = hidden_inputs(entry.kept, entry.given)
            needing = {number: tensor for number, tensor in needing.items() if number not in call.given_again}
            giving = {number: tensor for number, tensor in giving.items() if number not in call.repeated}
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
            self._did("forward", watched, sum(not one.silent for one in watched.calls))
            unchanged = [k for k, tensor in enumerate(inputs) if version(tensor) == entry.versions[k]]
            self._look_again(watched.fence, call, {k: inputs[k] for k in unchanged}, giving)
        parts = [one for one in leaves_in(result, InShards) if one.requires_grad]
        if mode is Mode.FORWARD:
            self._losses.called(module, needing.values(), [*giving.values(), *parts])
        call.unread = bool(parts)
        self._follow(watched, call, needing, giving, parts)

    def _look_again(
        self, fence: Fence, call: Call, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor]
    ) -> None:
        """Note the inputs that the backward needs once more when it begins; no others can be overwritten."""
        given = {id(tensor) for tensor in inputs.values()}
        made = [tensor for tensor in outputs.values() if id(tensor) not in given] or list(outputs.values())
        needed = {k: weakref.ref(tensor) for k, tensor in inputs.items() if needs(made, tensor)}
        if not needed:
            return

        def begins(gradient: Tensor) -> None:
            alive = {number: tensor for number, reference in needed.items() if (tensor := reference()) is not None}
            call.kept.update({number: sketch(tensor, known=call.inputs[number]) for number, tensor in alive.items()})

        made[0].register_hook(fence.around(begins))  # type: ignore[no-untyped-call]  # in torch

    def _follow(
        self,
        watched: Watched,
        call: Call,
        inputs: Mapping[int, Tensor],
        outputs: Mapping[int, Tensor],
        parts: Sequence[Tensor],
    ) -> None:
        """Note the gradients of these, by their numbers, and count the backwards of ``call``.

        A backward is counted where it ends: at an input, or if no input wants a gradient, where it begins. ``parts``
        are outputs of which this rank has a part each: through them, too, its own backwards come.
        """
        flows, count = Flows(watched.fence.around, first=self._linked), partial(self._count, watched.module, call)
        for number, tensor in enumerate(parts):
            flows.made(tensor, self._counting(call, count if not inputs and not outputs and not number else None))
        given = {id(tensor) for tensor in inputs.values()}
        own = {k for k, tensor in outputs.items() if id(tensor) not in given} or set(outputs)
        last = min(inputs) if inputs else min(outputs, default=None)
        ends = {outputs[k].grad_fn for k in own if id(outputs[k]) not in given}
        for node in filter(None, ends):
            node.register_prehook(watched.fence.around(partial(self._flowed, call)))
        for number, tensor in outputs.items():
            note = self._noting(call, call.output_gradients, number, count if not inputs and number == last else None)
            if number in own:
                flows.made(tensor, _of(self._came.to(tensor), note), partial(self._flowed, call))
            else:
                flows.borrowed(tensor, note, handed_on=True)
        handed_on = {id(tensor) for tensor in outputs.values()}
        for number, tensor in inputs.items():
            note = self._noting(call, call.input_gradients, number, count if number == last else None)
            flows.borrowed(tensor, note, handed_on=id(tensor) in handed_on)

    def _flowed(self, call: Call, *_: object) -> None:
        """A backward runs through the end of ``call``: one that is only asked for the gradient there runs nothing."""
        call.flowed.setdefault(torch._C._current_graph_task_id(), next(self._times))

    def _flows(self, module: nn.Module) -> int:
        return sum(len(call.flowed) for call in self._watched[id(module)].calls)

    def _count(self, module: nn.Module, call: Call) -> None:
        call.count(next(self._times), trains=trains(module))
        watched = self._watched[id(module)]
        self._did("backward", watched, sum(bool(one.backwards) for one in watched.calls))

    def _did(self, kind: str, watched: Watched, number: int) -> None:
        which = [*self._watched].index(id(watched.module)) + 1
        did(kind, number, "its stage" if len(self._watched) == 1 else f"watched module {which}")

    def _noting(self, call: Call, into: dict[int, Sketch], number: int, count: Callable[[], None] | None) -> Note:
        keep = self._keep if into is call.output_gradients else None

        def note(gradient: Tensor) -> Callable[[], None]:
            seen = None if (held := held_whole(gradient)) is None else sketch(held)
            if Kind.BACKWARD not in call.stacks:
                call.stacks[Kind.BACKWARD] = backward_stack()
            if into is call.output_gradients and (came := received_at(gradient)) is not None:
                call.came.setdefault((Kind.BACKWARD, number), came)
            kept = None if keep is None or held is None else keep(held)
            if seen is not None and into is call.output_gradients:
                call.asked.setdefault(number, (seen, kept))

            def write() -> None:
                if seen is not None and self._linked:
                    call.note_part((into is call.output_gradients, number), seen, kept, counts=count is not None)
                if seen is not None and (not self._linked or number not in into):  # of halves, the first has it all
                    into[number] = seen
                if kept is not None and call.again is not None:
                    call.again.flows.setdefault(number, kept)
                if count is not None:
                    count()

            return write

        return note

    def _counting(self, call: Call, count: Callable[[], None] | None) -> Note:
        """Of a gradient of which this rank has a part, only that it came."""

        def write() -> None:
            call.stacks.setdefault(Kind.BACKWARD, backward_stack())
            if count is not None:
                count()

        return lambda gradient: write


def _of(came: Callable[[Tensor], Tensor], note: Note) -> Note:
    return lambda gradient: note(came(gradient))


_watcher: Watcher | None = None
belongs_to_rank(__name__, "_watcher", fresh=lambda _: None)


@contextmanager
def watching(watcher: Watcher | None = None) -> Iterator[Watcher]:
    """While this is open, ``watch`` has somebody to tell: ``watcher``, or one that keeps nothing."""
    global _watcher
    outer, _watcher = _watcher, (own := watcher or Watcher())
    clearing: Callable[[Any], Any] = own.clearing
    kept = nn.Module.zero_grad, torch.optim.Optimizer.zero_grad
    nn.Module.zero_grad, torch.optim.Optimizer.zero_grad = map(clearing, kept)  # type: ignore[method-assign]
    try:
        yield own
    except Exception as error:
        for doubt in Fence().around(lambda: [*own.doubts()])() or ():
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


def _has_gradient(parameter: nn.Parameter) -> bool:
    """Whether a gradient other than zero is there, as far as this rank has it."""
    gradient = parameter.grad.to_local() if isinstance(parameter.grad, InShards) else parameter.grad
    return gradient is not None and not gradient.is_meta and bool(gradient.any())


def _differentiable(tensors: list[Tensor]) -> dict[int, Tensor]:
    return {number: tensor for number, tensor in enumerate(tensors) if tensor.requires_grad}


def _mode() -> Mode:
    if not torch.is_grad_enabled():
        return Mode.SILENT
    return Mode.AGAIN if is_inside_a_backward() else Mode.FORWARD
