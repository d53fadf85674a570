"""Module observers that change no bit: inputs, outputs, gradients."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from itertools import count
from threading import get_ident
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from pipeproof.core.observe.as_they_came import AsTheyCame
from pipeproof.core.observe.backward_lines import backward_stack
from pipeproof.core.observe.calls import Call, Flows, Note
from pipeproof.core.observe.elements import version
from pipeproof.core.observe.fence import Fence
from pipeproof.core.observe.hook import Hook
from pipeproof.core.observe.own_losses import OwnLosses, trains
from pipeproof.core.observe.per_rank_globals import belongs_to_rank
from pipeproof.core.observe.posted_messages import did, find_received
from pipeproof.core.observe.shards import InShards, whole_here
from pipeproof.core.observe.sketch import Sketch, sketch
from pipeproof.core.observe.stack import own_stack
from pipeproof.core.observe.tensors_in import InAttribute, hidden_in, hidden_inputs, inputs_kept, leaves_in, tensors_in
from pipeproof.pipeline.action import Kind
from pipeproof.pipeline.split import needs
from pipeproof.reference.again import Called, repeats
from pipeproof.reference.generators import Generator, generators_in
from pipeproof.reference.graph import hook_at, is_inside_a_backward

Module = TypeVar("Module", bound=nn.Module)
Keep = Callable[[Tensor], Tensor]


@dataclass
class Watched:
    """A module with its calls, calls that a backward may still repeat, and its DDP wrapper."""

    module: nn.Module
    fence: Fence
    calls: list[Call] = field(default_factory=list)
    waiting: list[Call] = field(default_factory=list)
    replicas: DistributedDataParallel | None = None

    def original(self, again: Call) -> Call | None:
        """Return the repeated call for ``again``, which takes the gradients.

        Prefers the first with equal inputs over the first waiting one. None without a waiting call. With several
        candidates and unequal inputs, gradients stay unlinked.
        """
        content = [one.digest for one in again.inputs]
        equal = [call for call in self.waiting if [one.digest for one in call.inputs] == content]
        found, linked = next(iter(equal or self.waiting), None), bool(equal) or len(self.waiting) == 1
        if found is None:
            return None
        self.waiting = [call for call in self.waiting if call is not found]
        found.kept.update(enumerate(again.inputs))
        found.needing, found.giving = again.needing, again.giving
        return found if linked else replace(found, output_gradients={}, input_gradients={}, parts={}, asked={})


class CallEntry(NamedTuple):
    """A call that has begun, its arguments with their versions, and tensor attributes ``kept`` by the module."""

    call: Call
    given: list[Tensor]
    versions: list[int | None]
    kept: list[InAttribute]


class Watcher:
    """Notes calls of watched modules.

    keep: copies tensors, so that calls can be repeated; None: keeps none. generators: random generators for calls,
    beyond those in torch, Python, numpy and the modules. linked: neighbouring calls get compared, as with ``keep``;
    ``losses`` then has their modules' own ones.
    """

    def __init__(self, *, keep: Keep | None = None, generators: Sequence[Generator] = (), linked: bool = False) -> None:
        self._keep, self._generators, self._linked = keep, generators, linked or keep is not None
        self._drawing: dict[int, list[Generator]] = {}  # by module, its random generators
        self._hooks: list[RemovableHandle] = []
        self._came = AsTheyCame()
        self.losses = OwnLosses(lambda module: sum(len(call.flowed) for call in self._watched[id(module)].calls))
        self._watched: dict[int, Watched] = {}
        self._entering: dict[int, list[CallEntry]] = defaultdict(list)  # by thread
        self._times = count()
        self._clearing = Fence()

    def watch(self, module: nn.Module, when: Callable[[], bool] | None = None) -> None:
        """Hook ``module`` once. Calls count while ``when`` holds."""
        if id(module) not in self._watched:
            fence = Fence(in_func=False)
            self._watched[id(module)] = Watched(module, fence)
            first = self._linked  # else a repeated call would apply other hooks to its inputs twice
            entered, called = (Hook(module, fence.around(one), when) for one in (self._on_enter, self._on_call))
            self._hooks.append(module.register_forward_pre_hook(entered, prepend=first, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(called, with_kwargs=True))
            self._hooks += self._came.before_hooks_of(module, fence)
            if self._linked:
                self.losses.watch(module)

    def close(self) -> None:
        """Note no more calls. Gradients of noted calls still arrive."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.losses.close()

    def anew(self) -> None:
        """Start another operation: forget earlier calls."""
        self.losses.anew()
        for one in self._watched.values():
            one.calls, one.waiting = [], []

    def calls(self, module: nn.Module, *, warmup: int = 0) -> list[Call] | None:
        """Return forwards of ``module``, or of the one watched module inside or around it. None if unwatched.

        Skips the first ``warmup`` calls. Calls without gradients count if backwards repeated any, or if there are no
        others. Empty after an observer's failure.
        """
        if (one := self._find(module)) is None or one.fence.broken:
            return None if one is None else []
        for call in one.calls:
            call.settle()
        calls = one.calls[warmup:]
        again = any(call.silent and call.ran for call in calls)
        return [call for call in calls if again or not call.silent] or calls

    def unseen(self, module: nn.Module) -> str:
        """Return why ``module``'s observation is incomplete; empty if complete or unwatched."""
        one = self._find(module)
        return "" if one is None else one.fence.broken or self.losses.fence.broken

    @property
    def compiled(self) -> bool:
        """True if ``torch.compile`` captured watched modules, hiding their calls."""
        return any(one.fence.compiled for one in self._watched.values())

    def find_watched(self, module: nn.Module) -> nn.Module | None:
        """Return ``module``, or the one watched module inside or around it, or None."""
        return None if (one := self._find(module)) is None else one.module

    def _find(self, module: nn.Module) -> Watched | None:
        own = {id(part) for part in module.modules()}
        return next((w for w in self._watched.values() if id(w.module) in own or module in w.module.modules()), None)

    def replicas(self, module: nn.Module) -> DistributedDataParallel | None:
        """Return ``module``'s DDP wrapper, if any."""
        return self._watched[id(module)].replicas

    def clearing(self, clear: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``clear``, a method that clears gradients, to note affected calls."""

        def have() -> list[Watched]:
            return [one for one in self._watched.values() if any(p.grad is not None for p in one.module.parameters())]

        def note_cleared(had: Sequence[Watched]) -> None:
            for one in had:
                if not any(map(_has_gradient, one.module.parameters())):
                    for call in one.calls:
                        call.cleared = call.cleared or (own_stack() if call.ran else ())

        before, after = self._clearing.around(have), self._clearing.around(note_cleared)

        @wraps(clear)
        def note(*arguments: Any, **named: Any) -> None:
            had = before()
            clear(*arguments, **named)
            after(had or ())

        return note

    def doubts(self) -> Iterator[str]:
        """Yield reasons for missing input gradients, for a failed step."""
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

    def _on_enter(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        watched, calling = self._watched[id(module)], DistributedDataParallel._active_ddp_module
        if calling is not None and any(part is module for part in calling.modules()):
            watched.replicas = calling
        inputs = tensors_in((arguments, named))  # read now: the module may change them in place
        again = None
        if self._keep is not None:
            if id(module) not in self._drawing:
                every = [*self._generators, *generators_in(module)]
                self._drawing[id(module)] = list({id(one): one for one in every}.values())
            drawing = self._drawing[id(module)]
            again = Called.of(module, arguments, named, tensors=tensors_in, copy=self._keep, generators=drawing)
        call = Call(False, list(map(sketch, inputs)), stacks={Kind.FORWARD: own_stack()}, again=again)
        came = {(Kind.FORWARD, k): find_received(tensor) for k, tensor in enumerate(inputs)}
        call.came = {at: one for at, one in came.items() if one is not None}
        kept = [] if again is None else inputs_kept(module)
        self._entering[get_ident()].append(CallEntry(call, inputs, [version(tensor) for tensor in inputs], kept))

    def _on_call(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        watched, silent = self._watched[id(module)], not torch.is_grad_enabled()
        repeats_one = is_inside_a_backward() and not silent
        call, given, versions, kept = self._entering[get_ident()].pop()
        inputs = tensors_in((arguments, named)) if call.again is None else given
        outputs = tensors_in(result)
        modes = {part.training for part in module.modules()}
        call.training, call.mixed, call.silent = True in modes, len(modes) > 1, silent
        call.outputs, call.began = list(map(sketch, outputs)), next(self._times)
        if call.again is not None:  # note the flow into one tensor once
            call.repeated, call.given_again = repeats(outputs), frozenset(call.again.repeated)
            call.hidden, call.attribute = hidden_in((arguments, named, result)), hidden_inputs(kept, given)
        needing = {k: one for k, one in enumerate(inputs) if one.requires_grad and k not in call.given_again}
        giving = {k: one for k, one in enumerate(outputs) if one.requires_grad and k not in call.repeated}
        call.needing, call.giving = frozenset(needing), frozenset(giving)
        if repeats_one:
            if (original := watched.original(call)) is None:
                return  # a checkpoint whose forward carried gradients: they pass through that call
            call = original
        else:
            watched.calls.append(call)
        if silent:  # a probe, a metric, or a forward that a backward repeats
            watched.waiting.append(call)
            return
        parts = [one for one in leaves_in(result, InShards) if one.requires_grad]
        if not repeats_one:
            self._did("forward", watched, sum(not one.silent for one in watched.calls))
            unchanged = {k: tensor for k, tensor in enumerate(inputs) if version(tensor) == versions[k]}
            self._look_again(watched.fence, call, unchanged, giving)
            self.losses.note_call(module, needing.values(), [*giving.values(), *parts])
            call.unread = bool(parts)
        self._follow(watched, call, needing, giving, parts)

    def _look_again(
        self, fence: Fence, call: Call, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor]
    ) -> None:
        """Note needed inputs once more at the backward's start; only those can be overwritten."""
        given = {id(tensor) for tensor in inputs.values()}
        made = [tensor for tensor in outputs.values() if id(tensor) not in given] or list(outputs.values())
        needed = {k: weakref.ref(tensor) for k, tensor in inputs.items() if needs(made, tensor)}
        if not needed:
            return

        def begins(gradient: Tensor) -> None:
            alive = {number: tensor for number, reference in needed.items() if (tensor := reference()) is not None}
            call.kept.update({number: sketch(tensor, known=call.inputs[number]) for number, tensor in alive.items()})

        hook_at(made[0], fence.around(begins))

    def _follow(
        self,
        watched: Watched,
        call: Call,
        inputs: Mapping[int, Tensor],
        outputs: Mapping[int, Tensor],
        parts: Sequence[Tensor],
    ) -> None:
        """Note gradients by tensor number, and count backwards of ``call``.

        A backward counts where it ends: at an input, or, if no input requires a gradient, at an output. parts: local
        DTensor outputs, which also carry the call's backwards.
        """
        flows, count = Flows(watched.fence.around, first=self._linked), partial(self._count, watched.module, call)
        for number, tensor in enumerate(parts):
            flows.note_made(tensor, self._noting(call, None, number, None if inputs or outputs or number else count))
        given = {id(tensor) for tensor in inputs.values()}
        own = {k for k, tensor in outputs.items() if id(tensor) not in given} or set(outputs)
        last = min(inputs) if inputs else min(outputs, default=None)
        ends = {outputs[k].grad_fn for k in own if id(outputs[k]) not in given}
        for node in filter(None, ends):
            node.register_prehook(watched.fence.around(partial(self._on_flow, call)))
        for number, tensor in outputs.items():
            note = self._noting(call, call.output_gradients, number, count if not inputs and number == last else None)
            if number in own:
                flows.note_made(tensor, _of(self._came.to(tensor), note), partial(self._on_flow, call))
            else:
                flows.note_borrowed(tensor, note, handed_on=True)
        handed_on = {id(tensor) for tensor in outputs.values()}
        for number, tensor in inputs.items():
            note = self._noting(call, call.input_gradients, number, count if number == last else None)
            flows.note_borrowed(tensor, note, handed_on=id(tensor) in handed_on)

    def _on_flow(self, call: Call, *_: object) -> None:
        """Note a backward at the call's outputs. One that asks for gradients there runs nothing."""
        call.flowed.setdefault(torch._C._current_graph_task_id(), next(self._times))

    def _count(self, module: nn.Module, call: Call) -> None:
        call.count(next(self._times), trains=trains(module))
        watched = self._watched[id(module)]
        self._did("backward", watched, sum(bool(one.backwards) for one in watched.calls))

    def _did(self, kind: str, watched: Watched, number: int) -> None:
        which = [*self._watched].index(id(watched.module)) + 1
        did(kind, number, "its stage" if len(self._watched) == 1 else f"watched module {which}")

    def _noting(
        self, call: Call, into: dict[int, Sketch] | None, number: int, count: Callable[[], None] | None
    ) -> Note:
        """Note gradients of a tensor ``into`` the call's; without that their arrival alone, as of sharded ones."""
        is_output = into is call.output_gradients
        keep = self._keep if is_output else None

        def note(gradient: Tensor) -> Callable[[], None]:
            held = None if into is None else whole_here(gradient)
            observed, kept = (None, None) if held is None else (sketch(held), keep(held) if keep else None)
            if Kind.BACKWARD not in call.stacks:
                call.stacks[Kind.BACKWARD] = backward_stack()
            if is_output and (came := find_received(gradient)) is not None:
                call.came.setdefault((Kind.BACKWARD, number), came)
            if observed is not None and is_output:
                call.asked.setdefault(number, (observed, kept))

            def write() -> None:
                if observed is not None and into is not None:
                    if self._linked:
                        call.note_part((is_output, number), observed, kept, counts=count is not None)
                    if not self._linked or number not in into:  # the first half has it all
                        into[number] = observed
                if kept is not None and call.again is not None:
                    call.again.flows.setdefault(number, kept)
                if count is not None:
                    count()

            return write

        return note


def _of(came: Callable[[Tensor], Tensor], note: Note) -> Note:
    return lambda gradient: note(came(gradient))


_watcher: Watcher | None = None
belongs_to_rank(__name__, "_watcher", fresh=lambda _: None)


@contextmanager
def watching(watcher: Watcher | None = None) -> Iterator[Watcher]:
    """Activate ``watcher``, or one without copies, for ``watch`` inside the context."""
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
    """Watch ``module``, a pipeline stage: its calls, and gradients through it.

    ``when`` decides at every call whether it counts; None: all do. Returns the module itself. Outside a validation this
    does nothing, so it may stay in the validated code.
    """
    if _watcher is not None:
        _watcher.watch(module, when)
    return module


def _has_gradient(parameter: nn.Parameter) -> bool:
    """True for a nonzero local gradient."""
    gradient = parameter.grad.to_local() if isinstance(parameter.grad, InShards) else parameter.grad
    return gradient is not None and not gradient.is_meta and bool(gradient.any())
