"""Process group of the simulated world: torch's calls become calls into its network."""

import os
from collections.abc import Callable, Sequence
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
    Collective,
    Meaning,
    Net,
    exchanged,
    gathered,
    joined,
    reduced,
    reduced_and_cut,
)
from pipeproof.wings.simulated.engine.scheduler import AnotherRanks, NotSimulated
from pipeproof.wings.simulated.torch_inside import MESSAGES, wait_for
from pipeproof.wings.simulated.work import SimulatedWork

_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")  # if set, programs wait for NCCL, too


class Bare:
    """Messages between a store's ranks, for code that builds a gloo group without torch.distributed.

    ``on_host``: like gloo, programs wait, not devices.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta | None = None, *, on_host: bool = True
    ) -> None:
        del timeout
        assert Net.current is not None, "a simulated group lives as long as its run"
        self._own_net, self._rank = Net.current, rank
        self._owner = self._own_net.scheduler.running
        self._communicator = self._own_net.join(store, rank, size, on_host=on_host)

    @property
    def _net(self) -> Net:
        """The run's network. Raises ``AnotherRanks`` unless the running rank made this group."""
        assert Net.current is not None, "a simulated group lives as long as its run"
        running = Net.current.scheduler.running
        if self._own_net is not Net.current:
            raise AnotherRanks("process group", running, "an earlier run's rank")
        if running != self._owner:
            raise AnotherRanks("process group", running, f"rank {self._owner}")
        return self._own_net

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> SimulatedWork:
        """Post a send to ``peer``, a number in the group."""
        return self._net.post(self._communicator, self._rank, peer, tag, _dense(tensors), sends=True)

    def recv(self, tensors: list[Tensor], peer: int | None, tag: int = 0) -> SimulatedWork:
        """Post a receive from ``peer``, a number in the group."""
        return self._net.post(self._communicator, self._rank, peer, tag, _dense(tensors), sends=False)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> SimulatedWork:
        """Post a receive from whoever comes first."""
        if not self._net.rules.by_name:
            raise NotSimulated("receive from any rank where messages have no tags, as NCCL has none")
        return self.recv(tensors, None, tag)

    def agree(self, ranks: Sequence[int]) -> None:
        """Raise the race unless exactly these world ranks have come."""
        own, communicator = self._owner, self._communicator
        for number, rank in communicator.members.items():
            if rank != ranks[number]:
                names = ", ".join(map(str, ranks))
                said = f"rank {own} made a group of ranks {names} where rank {rank} made another one"
                lines = {f"rank_{one}_made_its": communicator.made.get(one, ()) for one in (own, rank)}
                found = race("desynchronised", own, f"{said}: all ranks must make groups in one order", **lines)
                self._net.scheduler.tell(found)

    def call(self, what: Collective, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> SimulatedWork:
        """Enter this rank's part of a collective."""
        return self._net.call(self._communicator, self._rank, what, outputs, inputs, opts)


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


def _collective(name: str, meaning: Meaning, terms: str = "") -> Callable[..., SimulatedWork]:
    """Return a group's method, with outputs and inputs as torch has them: a tensor, or lists of them, or of lists."""
    what = Collective(name, meaning, terms)

    def call(group: "SimulatedGroup", outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        return group.agreed().call(what, _tensors(outputs), _tensors(inputs), opts)

    return call


def _in_place(name: str, meaning: Meaning, terms: str) -> Callable[..., SimulatedWork]:
    """Return a group's method whose inputs are its outputs."""
    call = _collective(name, meaning, terms)
    return lambda group, tensors, opts=None: call(group, tensors, tensors, opts)


def _refusal(name: str) -> Any:
    """Return a group's method that raises a clear error."""

    def refuse(group: object, *arguments: object, **named: object) -> None:
        raise NotSimulated(f"ProcessGroup.{name}")

    return refuse


def _tensors(nested: Any) -> list[Tensor]:
    """Return the tensors of a list, or of nested lists, in order."""
    return [nested] if isinstance(nested, Tensor) else [tensor for one in nested for tensor in _tensors(one)]


_ProcessGroup: Any = dist.ProcessGroup  # torch's stubs have overloads, and it calls one each


class SimulatedGroup(_ProcessGroup):  # type: ignore[misc]
    """Replaces every backend's group. Messages come through functions in place of ProcessGroup's own."""

    Options = _Options
    on_host: ClassVar[bool] = False

    def __init__(self, store: Store, rank: int, size: int, options: object = None, **given: object) -> None:
        del given  # a timeout, which virtual ranks have no use for, and since torch 2.14 whether it may be made anew
        super().__init__(rank, size)
        self._store, self._name = store, ""
        waits = any(os.environ.get(name, "0") not in ("", "0") for name in _BLOCKING)
        self.bare = Bare(store, rank, size, on_host=self.on_host or waits)
        self.options = SimpleNamespace()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name}>"  # torch shows it to users, and runs should be equal

    def agreed(self) -> Bare:
        """Return its messages. Raises the race if another rank made it from different ranks."""
        with suppress(KeyError):  # still under construction
            self.bare.agree(dist.get_process_group_ranks(self))
        return self.bare

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

    allreduce = allreduce_coalesced = _in_place("all_reduce", reduced, "{reduction}, {inputs}")
    reduce = _in_place("reduce", reduced, "{reduction}, to {root}, {inputs}")
    broadcast = _in_place("broadcast", lambda root, _, brought: [brought[root]] * len(brought), "from {root}, {inputs}")
    allgather = _collective("all_gather", gathered, "{outputs}")
    gather = _collective("gather", gathered, "to {root}")  # sizes may differ, and the one rank alone knows them
    scatter = _collective(
        "scatter", lambda root, _, brought: [[brought[root][rank]] for rank in range(len(brought))], "from {root}"
    )
    reduce_scatter = _collective(
        "reduce_scatter",
        lambda _, combine, brought: [[combine([one[rank] for one in brought])] for rank in range(len(brought))],
        "{reduction}, {inputs}",
    )
    alltoall = _collective("all_to_all", exchanged, "{count} tensors")
    # with all ranks' parts in one tensor, for one or several
    all_gather_single = _allgather_base = _collective("all_gather_into_tensor", joined, "{inputs}")
    all_gather_single_coalesced = allgather_into_tensor_coalesced = all_gather_single
    reduce_scatter_single = _reduce_scatter_base = _collective(
        "reduce_scatter_tensor", reduced_and_cut, "{reduction}, {inputs}"
    )
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = reduce_scatter_single
    _exchange_parts = _collective("all_to_all_single", exchanged)
    _meet = _collective("barrier", lambda _, __, brought: [[]] * len(brought))

    allgather_coalesced, split_group, merge_remote_group, monitored_barrier, _start_coalescing = map(
        _refusal,
        ("allgather_coalesced", "split_group", "merge_remote_group", "monitored_barrier", "_start_coalescing"),
    )

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> SimulatedWork:
        """Exchange parts of one tensor, with these lengths along the first dimension; without any, equal lengths."""
        parts = [
            list(torch.split(tensor, list(sizes)) if sizes else tensor.chunk(self.size()))
            for tensor, sizes in ((output, output_sizes), (given, input_sizes))
        ]
        return self._exchange_parts(*parts, opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> SimulatedWork:
        """Wait for all ranks."""
        return self._meet([], [])


class SimulatedGloo(SimulatedGroup):
    """A gloo group, possibly beside others."""

    on_host = True


GROUPS = MappingProxyType({"ProcessGroupGloo": SimulatedGloo, "ProcessGroupNCCL": SimulatedGroup})  # torch's names


def messages() -> dict[str, Any]:
    """Return replacements for a process group's functions; for other groups they call the originals."""

    def replace(name: str, original: Any) -> Any:
        def post(group: dist.ProcessGroup, tensors: list[Tensor], *arguments: Any) -> Any:
            if isinstance(group, SimulatedGroup):
                return getattr(group.agreed(), name)(list(map(wait_for, tensors)), *arguments)
            return original(group, tensors, *arguments)

        return post

    return {name: replace(name, vars(dist.ProcessGroup)[name]) for name in MESSAGES}


def _dense(tensors: list[Tensor]) -> list[Tensor]:
    """Return dense tensors. Raises gloo's errors."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise RuntimeError("input tensor has to be contiguous")
    return tensors
