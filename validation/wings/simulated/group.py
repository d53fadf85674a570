"""Process group of the simulated world: torch's calls become calls into its network."""

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
    exchange,
    gather,
    gather_into_one,
    gather_to,
    nothing,
    of_root,
    operation_name,
    reduce_and_cut,
    reduce_scatter,
    reduce_to,
    scatter_from,
)
from pipeproof.wings.simulated.engine.scheduler import AnotherRanks, NotSimulated
from pipeproof.wings.simulated.network import Network
from pipeproof.wings.simulated.store import Communicators
from pipeproof.wings.simulated.torch_inside import wait_for
from pipeproof.wings.simulated.work import SimulatedWork

_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


class Net:
    """Shared state of the current run's ranks. A process has one run at a time."""

    current: ClassVar["Net | None"] = None

    def __init__(self, network: Network) -> None:
        self.network = network
        self.collectives = Collectives(network)
        self.communicators = Communicators(len(network.scheduler.seats))

    @staticmethod
    def now() -> "Net":
        """Return the current run's state."""
        assert Net.current is not None, "a simulated group lives as long as its run"
        return Net.current


class Bare:
    """Messages between a store's ranks, for code that builds a gloo group without torch.distributed.

    ``on_host``: like gloo, programs wait, not devices.
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
        """The run's state. Raises ``AnotherRanks`` unless the running rank made this group."""
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
        """Raise the race unless exactly these world ranks have come."""
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
        self, name: str, brought: Sequence[Tensor], expected: Sequence[Tensor], meaning: Meaning, terms: object = ""
    ) -> SimulatedWork:
        """Enter this rank's part of the collective ``name``."""
        one = CollectiveCall(name, str(terms), brought, expected, meaning)
        return self._net.collectives.call(self._communicator, self._rank, one)


class _Options:
    """torch's backend options: accept anything, ignore it."""

    def __init__(self) -> None:
        self.is_high_priority_stream = False
        self._timeout = timedelta(0)


class _Backend:
    """The backend object behind a group, for torch's capability queries: only messages and calls."""

    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False


_ProcessGroup: Any = dist.ProcessGroup  # torch's stubs have overloads, and it calls one each


class SimulatedGroup(_ProcessGroup):  # type: ignore[misc]
    """Replaces every backend's group. Messages come through functions in place of ProcessGroup's own."""

    Options = _Options
    on_host: ClassVar[bool] = False

    def __init__(self, store: Store, rank: int, size: int, options: object = None, **given: object) -> None:
        del given  # a timeout, which virtual ranks have no use for, and since torch 2.14 whether it may be made anew
        super().__init__(rank, size)
        self._store, self._name = store, ""
        self.bare = Bare(store, rank, size, on_host=self.on_host or _blocking())
        self.options = SimpleNamespace()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name}>"  # torch shows it to users, and runs should be equal

    def require_agreement(self) -> "SimulatedGroup":
        """Return this group. Raises the race if another rank made it from different ranks."""
        with suppress(KeyError):  # still under construction
            self.bare.agree(dist.get_process_group_ranks(self))
        return self

    def _call(self, *given: Any) -> SimulatedWork:
        return self.require_agreement().bare.call(*given)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property
    def group_name(self) -> str:
        """The group's name in torch.distributed."""
        return self._name

    def _get_backend(self, device: torch.device) -> _Backend:
        return _Backend()

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def get_group_store(self) -> Store:
        """Return the store of its ranks' rendezvous."""
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        return None

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        """Reduce each tensor in place."""
        operation = _operation(opts)
        terms = f"{operation_name(operation)}, {_sizes(tensors)}"
        return self._call("all_reduce", tensors, tensors, all_reduced(operation), terms)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> SimulatedWork:
        """Reduce each tensor in place, on one rank."""
        meaning = reduce_to(opts.reduceOp, opts.rootRank)
        terms = f"{operation_name(opts.reduceOp)}, to {opts.rootRank}, {_sizes(tensors)}"
        return self._call("reduce", tensors, tensors if self.rank() == opts.rootRank else [], meaning, terms)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        """Give all ranks one rank's tensors."""
        root = 0 if opts is None else opts.rootRank
        owns = self.rank() == root
        given, expected = (tensors, []) if owns else ([], tensors)
        return self._call("broadcast", given, expected, of_root(root), f"from {root}, {_sizes(tensors)}")

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        """Give all ranks a list with every rank's tensors."""
        expected = [tensor for tensors in outputs for tensor in tensors]
        return self._call("all_gather", inputs, expected, gather, _sizes(expected))

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> SimulatedWork:
        """Give all ranks every rank's tensors, joined into one."""
        return self.all_gather_single_coalesced([output], [given], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> SimulatedWork:
        """Gather several this way."""
        return self._call("all_gather_into_tensor", inputs, outputs, gather_into_one, _sizes(inputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> SimulatedWork:
        """Give one rank a list with every rank's tensors."""
        expected = [tensor for tensors in outputs for tensor in tensors]
        terms = f"to {opts.rootRank}"  # sizes may differ, and the one rank alone knows them
        return self._call("gather", inputs, expected, gather_to(opts.rootRank), terms)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> SimulatedWork:
        """Give each rank one of the root's tensors."""
        given = [tensor for tensors in inputs for tensor in tensors]
        terms = f"from {opts.rootRank}"
        return self._call("scatter", given, outputs, scatter_from(opts.rootRank), terms)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SimulatedWork:
        """Give each rank its part of the reduction over all ranks."""
        given, operation = [tensor for tensors in inputs for tensor in tensors], _operation(opts)
        terms = f"{operation_name(operation)}, {_sizes(given)}"
        return self._call("reduce_scatter", given, outputs, reduce_scatter(operation), terms)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> SimulatedWork:
        """Reduce and scatter with all parts in one tensor."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> SimulatedWork:
        """Reduce and scatter several this way."""
        operation = _operation(opts)
        terms = f"{operation_name(operation)}, {_sizes(inputs)}"
        return self._call("reduce_scatter_tensor", inputs, outputs, reduce_and_cut(operation), terms)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        """Give each rank one tensor from every rank."""
        terms = f"{len(inputs)} tensors"
        return self._call("all_to_all", inputs, outputs, exchange, terms)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> SimulatedWork:
        """Exchange parts of one tensor, with these lengths along the first dimension; without any, equal lengths."""
        expected, gives = _parts(output, output_sizes, self.size()), _parts(given, input_sizes, self.size())
        return self._call("all_to_all_single", gives, expected, exchange)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> SimulatedWork:
        """Wait for all ranks."""
        return self._call(BARRIER, [], [], nothing)


class SimulatedGloo(SimulatedGroup):
    """A gloo group, possibly beside others."""

    on_host = True


GROUPS = MappingProxyType({"ProcessGroupGloo": SimulatedGloo, "ProcessGroupNCCL": SimulatedGroup})  # torch's names


def messages() -> dict[str, Any]:
    """Return replacements for a process group's functions; for other groups they call the originals."""
    return {name: _instead(name, vars(dist.ProcessGroup)[name]) for name in ("send", "recv", "recv_anysource")}


def _instead(name: str, original: Any) -> Any:
    def post(group: dist.ProcessGroup, tensors: list[Tensor], *arguments: Any) -> Any:
        if isinstance(group, SimulatedGroup):
            return getattr(group.require_agreement().bare, name)(list(map(wait_for, tensors)), *arguments)
        return original(group, tensors, *arguments)

    return post


def _blocking() -> bool:
    """Whether programs wait for NCCL, too: it asks for that when a group is made."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in _BLOCKING)


def _dense(tensors: list[Tensor]) -> list[Tensor]:
    """Return dense tensors. Raises gloo's errors."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise RuntimeError("input tensor has to be contiguous")
    return tensors


def _operation(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _sizes(tensors: Sequence[Tensor]) -> str:
    """Describe types and numbers of elements; a transport ignores shapes."""
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}[{tensor.numel()}]" for tensor in tensors)


def _parts(tensor: Tensor, sizes: Sequence[int], count: int) -> list[Tensor]:
    return list(torch.split(tensor, list(sizes)) if sizes else tensor.chunk(count))


def _refuse(kind: type, known: set[str]) -> None:
    """Replace methods missing in the simulated world with ones that raise a clear error."""
    for name in known:

        def refuse(self: object, *arguments: object, _name: str = name, **named: object) -> None:
            raise NotSimulated(f"ProcessGroup.{_name}")

        setattr(kind, name, refuse)


_refuse(
    SimulatedGroup,
    {"allgather_coalesced", "split_group", "merge_remote_group", "monitored_barrier", "_start_coalescing"},
)
