"""Watched modules: their calls, and each call's arguments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.elements import version
from pipeproof.core.observe.fence import Fence
from pipeproof.core.observe.posted_messages import Came, find_received
from pipeproof.core.observe.sketch import Sketch, sketch
from pipeproof.core.observe.stack import Stack, own_stack
from pipeproof.core.observe.tensors_in import InAttribute
from pipeproof.pipeline.action import Kind
from pipeproof.reference.again import Called


@dataclass
class Watched:
    """A module with its calls, calls that a backward may still repeat, and its DDP wrapper."""

    module: nn.Module
    when: Callable[[], bool]
    fence: Fence
    calls: list[Call] = field(default_factory=list)
    waiting: list[Call] = field(default_factory=list)
    replicas: DistributedDataParallel | None = None

    def note_replicas(self) -> None:
        """Note the DDP wrapper around the current call, if any."""
        calling = DistributedDataParallel._active_ddp_module
        if calling is not None and any(part is self.module for part in calling.modules()):
            self.replicas = calling

    def note_cleared(self, stack: Stack) -> None:
        """Note that the module's added gradients were cleared at ``stack``."""
        for call in self.calls:
            call.cleared = call.cleared or (stack if call.ran else ())

    def original(self, again: Call) -> Call | None:
        """Return the repeated call for ``again``, and link its gradients.

        Prefers the first with equal inputs over the first waiting one. None without a waiting call. With several
        candidates and unequal inputs, gradients stay unlinked.
        """
        content = [one.digest for one in again.inputs]
        equal = [call for call in self.waiting if [one.digest for one in call.inputs] == content]
        found = next(iter(equal or self.waiting), None)
        if found is None:
            return None
        if equal or len(self.waiting) == 1:
            again.output_gradients, again.input_gradients = found.output_gradients, found.input_gradients
            again.parts = found.parts
        self.waiting = [call for call in self.waiting if call is not found]
        found.kept.update(enumerate(again.inputs))
        again.backwards, again.flowed, again.stacks, again.came = (
            found.backwards, found.flowed, found.stacks, found.came
        )  # fmt: skip
        found.needing, found.giving = again.needing, again.giving
        again.again = found.again
        return found


@dataclass(frozen=True)
class CallEntry:
    """A module call's arguments, versions and line at entry; ``again``: as in ``Call``.

    kept: tensor attributes.
    """

    given: list[Tensor]
    taken: list[Sketch]
    versions: list[int | None]
    stack: Stack
    came: dict[tuple[Kind, int], Came]
    again: Called | None
    kept: list[InAttribute]

    @staticmethod
    def of(inputs: Sequence[Tensor], again: Called | None, kept: list[InAttribute]) -> "CallEntry":
        came = {(Kind.FORWARD, k): one for k, tensor in enumerate(inputs) if (one := find_received(tensor)) is not None}
        versions = [version(tensor) for tensor in inputs]
        return CallEntry(list(inputs), list(map(sketch, inputs)), versions, own_stack(), came, again, kept)
