"""A process group of the simulated world: torch's calls become calls into its network."""

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # not in __all__

from pipeproof.wings.simulated.buffers import race
from pipeproof.wings.simulated.collectives import (
    BARRIER,
    CollectiveCall,
    Collectives,
    Meaning,
    all_reduced,
    exchanged,
    gathered,
    gathered_by,
    gathered_into_one,
    nothing,
    of_root,
    operation_name,
    reduced_and_cut,
    reduced_and_scattered,
    reduced_to,
    scattered_by,
)
from pipeproof.wings.simulated.engine.scheduler import AnotherRanks, NotSimulated
from pipeproof.wings.simulated.network import Network
from pipeproof.wings.simulated.store import Communicators
from pipeproof.wings.simulated.torch_inside import arrived
from pipeproof.wings.simulated.work import SimulatedWork

_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


class Net:
    """What the ranks of the run in progress share. There is one run at a time in a process."""

    current: ClassVar["Net | None"] = None

    def __init__(self, network: Network) -> None:
        self.network = network
        self.collectives = Collectives(network)
        self.communicators = Communicators(len(network.scheduler.seats))

    @staticmethod
    def now() -> "Net":
        """That of the run in progress."""
        assert Net.current is not None, "a simulated group lives as long as its run"
        return Net.current


class Bare:
    """Messages between the ranks of a store, for who makes a gloo group without torch.distributed.

    ``on_host``: as gloo's, for which programs wait, and no device for them.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta | None = None, *, on_host: bool = True
    ) -> None:
        del timeout
        self._own_net, self._rank = Net.now(), rank
        self._owner = self._own_net.network.scheduler.running
        self._communicator = self._own_net.communicators.join(
            store, rank, size, world_rank=self._owner, on_host=on_host
        )

    @property
    def _net(self) -> Net:
        """That of the run. Raises ``AnotherRanks`` where the rank that has the turn is not the one that made this."""
        running = Net.now().network.scheduler.running
        if self._own_net is not Net.current:
            raise AnotherRanks("process group", running, "an earlier run's rank")
        if running != self._owner:
            raise AnotherRanks("process group", running, f"rank {self._owner}")
        return self._own_net

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> SimulatedWork:
        """Post a send to ``peer``, a number in the group."""
        return self._net.network.send(self._communicator, self._rank, peer, tag, _dense(tensors))

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> SimulatedWork:
        """Post a receive from ``peer``, a number in the group."""
        return self._net.network.receive(self._communicator, self._rank, peer, tag, _dense(tensors))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> SimulatedWork:
        """Post a receive from whoever comes first."""
        if not self._net.network.rules.by_name:
            raise NotSimulated("receive from any rank where messages have no tags, as NCCL has none")
        return self._net.network.receive(self._communicator, self._rank, None, tag, _dense(tensors))

    def agree(self, ranks: Sequence[int]) -> None:
        """Raises the race where others have come than these ranks of the world."""
        own, communicator = self._owner, self._communicator
        for number, rank in communicator.members.items():
            if rank != ranks[number]:
                said = (
                    f"rank {own} made a group of ranks {', '.join(map(str, ranks))} where rank {rank} made another one"
                )
                lines = {f"rank_{one}_made_its": communicator.made.get(one, ()) for one in (own, rank)}
                found = race("desynchronised", own, f"{said}: all ranks must make groups in one order", **lines)
                self._net.network.scheduler.tell(found)

    def call(
        self, name: str, brought: Sequence[Tensor], due: Sequence[Tensor], meaning: Meaning, told: object = ""
    ) -> SimulatedWork:
        """This rank's part of the collective ``name``."""
        one = CollectiveCall(name, str(told), brought, due, meaning)
        return self._net.collectives.call(self._communicator, self._rank, one)


class _Options:
    """What torch asks of a backend's options: anything, and it is forgotten."""

    def __init__(self) -> None:
        self.is_high_priority_stream = False
        self._timeout = timedelta(0)


class _Backend:
    """What torch finds behind a group where it asks what its backend can do: nothing beyond messages and calls."""

    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False


_ProcessGroup: Any = dist.ProcessGroup  # torch's stubs have overloads for each, of which it calls one


class SimulatedGroup(_ProcessGroup):  # type: ignore[misc]
    """Takes the place of every backend's group. Messages come through functions in place of ProcessGroup's own."""

    Options = _Options
    on_host: ClassVar[bool] = False

    def __init__(self, store: Store, rank: int, size: int, options: object = None, **given: object) -> None:
        del given  # a timeout, which virtual ranks have no use for, and since torch 2.14 whether it may be made anew
        super().__init__(rank, size)
        self._store, self._name = store, ""
        self.bare = Bare(store, rank, size, on_host=self.on_host or _blocking())
        self.options = SimpleNamespace()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name}>"  # torch tells it to users, and one run is to be as another

    def agreed(self) -> "SimulatedGroup":
        """The same. Raises the race where one who has come to it made it of other ranks."""
        with suppress(KeyError):  # it is still being made
            self.bare.agree(dist.get_process_group_ranks(self))
        return self

    def _call(self, *given: Any) -> SimulatedWork:
        return self.agreed().bare.call(*given)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property
    def group_name(self) -> str:
        """What torch.distributed calls it."""
        return self._name

    def _get_backend(self, device: torch.device) -> _Backend:
        return _Backend()

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def get_group_store(self) -> Store:
        """Where its ranks met."""
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        return None

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        """Reduce each tensor in place."""
        operation = _operation(opts)
        told = f"{operation_name(operation)}, {_sizes(tensors)}"
        return self._call("all_reduce", tensors, tensors, all_reduced(operation), told)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> SimulatedWork:
        """Reduce each tensor in place, on one rank."""
        meaning = reduced_to(opts.reduceOp, opts.rootRank)
        told = f"{operation_name(opts.reduceOp)}, to {opts.rootRank}, {_sizes(tensors)}"
        return self._call("reduce", tensors, tensors if self.rank() == opts.rootRank else [], meaning, told)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        """Everybody gets the tensors of one rank."""
        root = 0 if opts is None else opts.rootRank
        owns = self.rank() == root
        given, due = (tensors, []) if owns else ([], tensors)
        return self._call("broadcast", given, due, of_root(root), f"from {root}, {_sizes(tensors)}")

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        """Everybody gets a list of everybody's tensors."""
        due = [tensor for tensors in outputs for tensor in tensors]
        return self._call("all_gather", inputs, due, gathered, _sizes(due))

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> SimulatedWork:
        """Everybody gets everybody's tensors, one after the other in one tensor."""
        return self.all_gather_single_coalesced([output], [given], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> SimulatedWork:
        """So for several."""
        return self._call("all_gather_into_tensor", inputs, outputs, gathered_into_one, _sizes(inputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> SimulatedWork:
        """One rank gets a list of everybody's tensors."""
        due = [tensor for tensors in outputs for tensor in tensors]
        told = f"to {opts.rootRank}"  # sizes may differ, and the one rank alone knows them
        return self._call("gather", inputs, due, gathered_by(opts.rootRank), told)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> SimulatedWork:
        """Everybody gets one of the tensors of one rank."""
        given = [tensor for tensors in inputs for tensor in tensors]
        told = f"from {opts.rootRank}"
        return self._call("scatter", given, outputs, scattered_by(opts.rootRank), told)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SimulatedWork:
        """Everybody gets its part of what everybody's tensors make together."""
        given, operation = [tensor for tensors in inputs for tensor in tensors], _operation(opts)
        told = f"{operation_name(operation)}, {_sizes(given)}"
        return self._call("reduce_scatter", given, outputs, reduced_and_scattered(operation), told)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> SimulatedWork:
        """So where all parts lie in one tensor."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> SimulatedWork:
        """So for several."""
        operation = _operation(opts)
        told = f"{operation_name(operation)}, {_sizes(inputs)}"
        return self._call("reduce_scatter_tensor", inputs, outputs, reduced_and_cut(operation), told)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        """Everybody gets a tensor of each rank."""
        told = f"{len(inputs)} tensors"
        return self._call("all_to_all", inputs, outputs, exchanged, told)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> SimulatedWork:
        """So where all lie in one tensor, of these lengths along the first dimension; none: of equal lengths."""
        due, gives = _parts(output, output_sizes, self.size()), _parts(given, input_sizes, self.size())
        return self._call("all_to_all_single", gives, due, exchanged)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> SimulatedWork:
        """All have come."""
        return self._call(BARRIER, [], [], nothing)


class SimulatedGloo(SimulatedGroup):
    """One of gloo's, also beside others."""

    on_host = True


GROUPS = MappingProxyType({"ProcessGroupGloo": SimulatedGloo, "ProcessGroupNCCL": SimulatedGroup})  # as torch has them


def messages() -> dict[str, Any]:
    """The functions in place of a process group's own: of every other group they do what those did."""
    return {name: _instead(name, vars(dist.ProcessGroup)[name]) for name in ("send", "recv", "recv_anysource")}


def _instead(name: str, original: Any) -> Any:
    def posted(group: dist.ProcessGroup, tensors: list[Tensor], *arguments: Any) -> Any:
        if isinstance(group, SimulatedGroup):
            return getattr(group.agreed().bare, name)(list(map(arrived, tensors)), *arguments)
        return original(group, tensors, *arguments)

    return posted


def _blocking() -> bool:
    """Whether programs wait for NCCL, too: it asks for that when a group is made."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in _BLOCKING)


def _dense(tensors: list[Tensor]) -> list[Tensor]:
    """The same, where they can be sent. Raises what gloo raises."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise RuntimeError("input tensor has to be contiguous")
    return tensors


def _operation(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _sizes(tensors: Sequence[Tensor]) -> str:
    """Types and numbers of elements: shapes are nothing to a transport."""
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}[{tensor.numel()}]" for tensor in tensors)


def _parts(tensor: Tensor, sizes: Sequence[int], count: int) -> list[Tensor]:
    return list(torch.split(tensor, list(sizes)) if sizes else tensor.chunk(count))


def _refuse(kind: type, known: set[str]) -> None:
    """What a group has and the simulated world does not raises a sentence that names it."""
    for name in known:

        def refused(self: object, *arguments: object, _name: str = name, **named: object) -> None:
            raise NotSimulated(f"ProcessGroup.{_name}")

        setattr(kind, name, refused)


_refuse(
    SimulatedGroup,
    {"allgather_coalesced", "split_group", "merge_remote_group", "monitored_barrier", "_start_coalescing"},
)
