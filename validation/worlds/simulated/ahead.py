"""Programs that go on where their devices wait, as after NCCL's ``wait()``: with what will come, where that is known.

What is not known is zeros. A run is a true one where all that programs went on with has then come, bit for bit. So it
is had again with what came, until that is so: whoever read what, and by whatever way, has read what was right.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pipeproof.worlds.simulated.event import Message
from pipeproof.worlds.simulated.races import fit, unchanged
from pipeproof.worlds.simulated.torch_inside import Storages, in_backward

Contents = Mapping[Message, Sequence[Tensor]]  # by the name of the work that brings it


@dataclass
class Ahead:
    """Of one run. ``foreseen``: what is taken to come; ``came``: what did; ``missing``: what has not, or not yet.

    ``on_device``: what is known to lie there: what a program went on without, and what it has made of that. ``doubt``:
    a program waited where it may have gone on, for nobody knew whether it asks its device for a number.
    ``hosts_wait``: where it hangs, some program waits for what another could bring without its device. ``raced``: one
    was told of a race.
    """

    foreseen: Contents
    came: dict[Message, Sequence[Tensor]] = field(default_factory=dict)
    missing: set[Message] = field(default_factory=set)
    inside: Counter[int] = field(default_factory=Counter)  # functions of torch that each rank is in
    on_device: Storages = field(default_factory=Storages)
    doubt: bool = False
    hosts_wait: bool = False
    raced: bool = False

    @property
    def may_end(self) -> bool:
        """Of a run that hangs, whether another way of going on may end it.

        What a program would post moves after all that its device waits for. So it helps only who waits for no device.
        """
        return self.doubt and self.hosts_wait

    @property
    def settled(self) -> bool:
        """Whether what came is what was foreseen, bit for bit: the next run would be this one."""
        return self.came.keys() == self.foreseen.keys() and all(
            fit(one, self.foreseen[name]) and unchanged(one, self.foreseen[name]) for name, one in self.came.items()
        )

    def goes_on(self, rank: int) -> bool:
        """Whether a program does where its device waits: inside a function of torch what it asks for is not seen."""
        hidden = bool(self.inside[rank]) or in_backward()
        self.doubt |= hidden
        return not hidden

    def leaves(self, message: Message) -> Sequence[Tensor]:
        """A program goes on without this. What it goes on with; nothing where that is not known."""
        self.missing.add(message)
        return self.foreseen.get(message, ())

    def comes(self, message: Message, contents: Sequence[Tensor]) -> None:
        """What a program went on without is there."""
        self.missing.discard(message)
        if contents:
            self.came[message] = contents
