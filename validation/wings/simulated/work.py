"""Works, returned by calls into the simulated network and finished by it; and uses of their buffers meanwhile."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pipeproof.core.observe.stack import Stack, own_stack
from pipeproof.wings.simulated.buffers import NOTHING_HELD, HeldTensors, is_within, overlap, poison, race, versions
from pipeproof.wings.simulated.engine.scheduler import Scheduler, Wait
from pipeproof.wings.simulated.store import Communicator
from pipeproof.wings.simulated.torch_inside import has_memory, places_of, unwatch
from pipeproof.worlds.rank_report import Race

if TYPE_CHECKING:
    from torch.futures import Future

_NO_TIMEOUT = timedelta(0)
_ONLY_ASK = frozenset(("__get__", "broadcast_tensors"))  # for a shape or a type
_LIKE_FIRST = ("new_", "empty", "zeros", "ones", "full", "rand")  # of their first argument they do; names begin so
_READ = frozenset(
    "item tolist numpy backward isend send equal allclose __bool__ __float__ __int__ __repr__ __index__ __array__ "
    "__format__ __setitem__".split()
)
_GIVE_NOTHING = ("_fused_", "_amp_foreach_")  # prefixes of names; these read their inputs
_NESTS = (tuple, list)


class SimulatedWork(Work):
    """A message's end, or a rank's part of a collective, from its call to its wait.

    Meanwhile ``given`` and ``expected`` must stay unwritten and allocated. ``expected`` holds poison, unless also
    given: results are written at the wait, as late as a transport may. ``posted_as``: its call, in a word. ``wrote``:
    lines known to have written or freed its buffers. ``on_stream``: a device waits for it instead of its program,
    unless it ``holds_program``. ``rewritten``: a function wrote to ``expected``, perhaps the same bits, for example by
    adding to NaN.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        wait: Callable[[], Wait],
        stack: Stack,
        given: Sequence[Tensor],
        expected: Sequence[Tensor],
        *,
        posted_as: str,
        on_stream: bool = False,
    ) -> None:
        super().__init__()
        self.rank = scheduler.running
        self.name = scheduler.call()
        self.posted = self.moved = scheduler.history.now
        self.posted_s = self.done_s = scheduler.clock.now_s
        self.stack = stack
        self.posted_as = posted_as
        self.wrote: Stack = ()
        self.expected = expected
        self.source = -1
        self.communicator: Communicator | None = None  # of a collective
        self.together: Sequence[SimulatedWork] = (self,)  # works of one call that end together
        self.over = False  # on the network
        self.met = False  # by its rank
        self.holds_program = self.rewritten = self._rewritten_given = False
        self.error: Race | None = None
        self._scheduler = scheduler
        self._wait = wait
        self._came: Sequence[Tensor] = ()
        self._waiting = False
        self._on_stream = on_stream
        poison([one for one in expected if not any(overlap(one, other) for other in given)])
        self.given, self.awaited = HeldTensors(given), HeldTensors(expected)
        self.places = frozenset(place for tensor in (*given, *expected) for place in places_of(tensor))
        if given:
            scheduler.history.gives(self.name, self.given.was_written)

    @property
    def text(self) -> str:
        """Description of the work for a waiting rank."""
        return self._wait().text

    def end(self, came: Sequence[Tensor] = (), *, at_s: float = 0.0) -> None:
        """Finish it at ``at_s`` on the ranks' clocks: ``came`` fills its buffers.

        Only now can early changes to ``given`` be found: after an answer to a message, the sender may change it even
        before the wait.
        """
        self._look_into(self.given)
        self.given = NOTHING_HELD
        self._came, self.over = came, True
        self.moved, self.done_s = self._scheduler.history.now, max(at_s, self.posted_s)
        self._scheduler.touch(("work", self.name), changes=True)
        if self._waiting:
            self._scheduler.wake(self.rank)

    def hold(self, *, for_device: bool = False) -> None:
        """Continue after its end; this is no wait by the user."""
        if not self.over:
            self._waiting = True
            self._scheduler.block(self._wait, for_device=for_device, by_device=self._on_stream)
            self._waiting = False
        self._scheduler.history.note_need(self.moved)
        self._scheduler.clock.reach(self.done_s)

    @unwatch
    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for its end, with all works that end together.

        Time is simulated, so timeouts never expire: what never comes is a deadlock.
        """
        if self.met:
            return True
        if self.over:
            self._scheduler.pause()
        for_device = self._on_stream and not self.holds_program and timeout == _NO_TIMEOUT
        for work in self.together:
            work.hold(for_device=for_device)
            work._meet()
        return True

    @unwatch
    def is_completed(self) -> bool:
        """True at its end; the caller may then use the buffers."""
        self._scheduler.pause()
        if self._scheduler.ask(("work", self.name), lambda: self.over):
            for work in [one for one in self.together if one.over]:
                work._meet()
        return self.over

    def is_success(self) -> bool:
        """True at its end: works never fail on the way. This query is no wait."""
        return self.over

    is_done = is_success

    def synchronize(self) -> None:
        """Wait, see ``wait``."""
        self.wait()

    def _source_rank(self) -> int:
        return self.source

    source_rank = _source_rank

    def result(self) -> list[Tensor]:
        """Return its filled buffers."""
        return list(self.expected)

    def get_future(self) -> "Future[list[Tensor]]":
        """Return a finished future, after waiting: nothing here runs beside the ranks."""
        from torch.futures import Future

        self.wait()
        future: Future[list[Tensor]] = Future()
        future.set_result(list(self.expected))
        return future

    def _meet(self) -> None:
        if not self.met:
            self.met = True
            self._scheduler.clock.reach(self.done_s)
            self._scheduler.history.note_need(self.moved)
            self._scheduler.history.takes_back(self.name)
            self._look_into(self.awaited)
            self.check()
            self.awaited.fill(self._came)
            self._came, self.awaited = (), NOTHING_HELD

    @property
    def disturbed(self) -> bool:
        """True if its buffers were written or freed."""
        return self.rewritten or any(held.freed or held.changed for held in (self.given, self.awaited))

    def refuse_read(self, stack: Stack) -> NoReturn:
        """Raise the race for reading its receive buffer here."""
        said = f"rank {self.rank} used a buffer before {self.text} had been waited for"
        self._scheduler.tell(race("read-before-wait", self.rank, said, used=stack, **{self.posted_as: self.stack}))

    def note_write(self, stack: Stack) -> None:
        """Note a write or free by its rank just now, which may be undone too late."""
        self.wrote = stack
        self._rewritten_given |= not self.over and self.given.changed

    def _look_into(self, held: HeldTensors) -> None:
        """Record the race caused by its rank, unless one exists."""
        changed = held.changed or (self.rewritten if held is self.awaited else self._rewritten_given)
        if self.error is not None or (not (freed := held.freed) and not changed):
            return
        kind, did, line = "overwritten-in-flight", "wrote into", "written"
        if freed:
            kind, did, line = "freed-in-flight", "freed or resized", "freed"
        said = f"rank {self.rank} {did} a buffer while {self.text} was on its way"
        self.error = race(kind, self.rank, said, **{line: self.wrote, self.posted_as: self.stack})

    def check(self) -> None:
        """Raise the recorded race."""
        if self.error is not None:
            self._scheduler.tell(self.error)


class Works:
    """Works of all ranks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._all: defaultdict[int, list[SimulatedWork]] = defaultdict(list)
        self._unmet: defaultdict[int, list[SimulatedWork]] = defaultdict(list)

    def add(self, work: SimulatedWork) -> None:
        """Remember ``work`` until its rank returns, and as pending until its wait."""
        self._all[work.rank].append(work)
        self._unmet[work.rank].append(work)

    def pop(self, rank: int) -> Sequence[SimulatedWork]:
        """Remove and return a returned rank's works."""
        return self._all.pop(rank, ())

    def unmet(self, rank: int) -> list[SimulatedWork]:
        """Return works without a wait, except sends that have left."""
        unmet = self._unmet[rank]
        if unmet:
            self._unmet[rank] = unmet = [one for one in unmet if not (one.met or (one.over and not one.expected))]
        return unmet

    def pending_in(self, tensors: Sequence[Tensor]) -> SimulatedWork | None:
        """Return the running rank's pending work on this memory."""
        unmet = self.unmet(self._scheduler.running)
        return next(
            (work for work in unmet for one in tensors for expected in work.expected if overlap(one, expected)), None
        )

    def claims(self, tensors: Sequence[Tensor], stack: Stack) -> None:
        """Claim buffers for the current call to fill. Raises the race with transfers in flight."""
        if (work := self.pending_in(tensors)) is not None:
            rank = work.rank
            said = f"rank {rank} posted two receives into one buffer"
            if work.posted_as != "received":
                said = f"rank {rank} wanted two things in one buffer, of which one was {work.text}"
            self._scheduler.tell(race("received-twice", rank, said, first_posted=work.stack, second_posted=stack))

    def uses(self, tensors: Sequence[Tensor], stack: Stack) -> None:
        """Use buffers in the current call. Raises the race with incomplete receives."""
        if (work := self.pending_in(tensors)) is not None:
            work.refuse_read(stack)


class Uses(TorchFunctionMode):
    """Forbid functions in one rank's thread to use buffers in flight, while open: by their inputs and outputs.

    It watches functions and not operators, because a mode on operators changes autograd's saved tensors.
    A read makes another tensor or a number from the buffer; a view, or a query of its shape, is none. Writes to a
    buffer in flight, and frees, are recorded for the later race.
    """

    def __init__(self, works: Works, rank: int) -> None:
        super().__init__()
        self._works = works
        self._rank = rank

    def __torch_function__(  # type: ignore[override]  # torch always gives both, and the second may be None
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, named = getattr(func, "__name__", ""), kwargs or {}
        # Most calls concern no unfinished work on arguments' memory, so this check comes first.
        if name == "__get__" or not (unmet := self._works.unmet(self._rank)):
            return func(*args, **named)
        taken = tensors_in(args, named)
        places = {place for tensor in taken for place in places_of(tensor)}
        concerned = [work for work in unmet if not places.isdisjoint(work.places)]
        if not concerned:
            return func(*args, **named)
        used = _used(name, args, named)
        before = [(work, versions(work.expected), work.disturbed) for work in concerned]
        result = func(*args, **named)
        left = [one for one in before if not one[0].met]
        reads, made = name in _READ or name.startswith(_GIVE_NOTHING), tensors_in((result,))
        for work in [one for one, *_ in left if one.expected]:
            for tensor in [one for one in used if any(overlap(one, other) for other in work.expected)]:
                if reads or any(not overlap(one, tensor) for one in made):
                    work.refuse_read(own_stack())
        for work, then, disturbed in left:
            # A new shape alone is no write, and a write to a larger tensor may concern another part.
            pairs = zip(work.expected, then, versions(work.expected), strict=True)
            changed = [one for one, was, now in pairs if now[0] != was[0] and now[1:] == was[1:]]
            work.rewritten |= any(is_within(other, one) for one in changed for other in taken)
            if not disturbed and work.disturbed:
                work.note_write(own_stack())
        return result


def _used(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a function may read: for some arguments it needs only shape or type."""
    if name in _ONLY_ASK:
        return []
    if name.rstrip("_").endswith("_as"):
        args, named = args[:1], {}
    elif name.startswith(_LIKE_FIRST):
        args, named = args[1:], {key: value for key, value in named.items() if key != "input"}
    elif name == "__setitem__":
        args = args[1:]
    return tensors_in(args, named)


def tensors_in(values: Sequence[object], named: Mapping[str, object] | None = None) -> list[Tensor]:
    """Return tensors with memory in nested tuples and lists; for DTensors and the like, their parts."""
    found: list[Tensor] = []
    for value in (*values, *named.values()) if named else values:
        if is_traceable_wrapper_subclass(value):
            found += tensors_in([getattr(value, name) for name in value.__tensor_flatten__()[0]])
        elif isinstance(value, Tensor):
            if value.layout is torch.strided and has_memory(value):
                found.append(value)
        elif isinstance(value, _NESTS):
            found += tensors_in(value)
    return found
