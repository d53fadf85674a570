"""All that is known here of devices: which there are, how ranks share them, what carries their messages.

Everything elsewhere goes by a device's type, such as ``cpu`` or ``cuda``, or by its place, such as ``cuda:0``. torch is
imported where it is asked: a command line names devices before it needs torch.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_OLDEST = "2.13"  # of simulated ranks: before it, DTensor ends a process whose ranks are threads
CPU = "cpu"
AUTO = "auto"  # what a command line says for the machine's accelerator, or its processor
COMMON = (CPU, "cuda", "xpu", "mps", "mtia", "hpu")  # those that need no torch to be known
HOST = "gloo"  # carries what lies in the host's memory, for any number of ranks

# To be asked whether there is a device may start its driver, and a process that is forked after that has none.
FORKED_LATER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class DeviceError(ValueError):
    """A device that there is not, or text that names none."""


def refusal(kind: str) -> str:
    """Why ``kind`` is no type of device that ranks could compute on; empty if it is one."""
    if kind in COMMON or _named_by_torch(kind):
        return ""
    if ":" in kind and not refusal(kind.partition(":")[0]):
        return f"device {kind!r} has a number: expected a type alone, such as {kind.partition(':')[0]}"
    return f"unknown device {kind!r}: torch names {', '.join(COMMON)}, and those of its extensions"


def parsed(text: str) -> str:
    """What an option says: a type, or ``auto``. Raises what argparse tells users of."""
    if text != AUTO and (why := refusal(text)):
        raise argparse.ArgumentTypeError(why)
    return text


def _named_by_torch(kind: str) -> bool:
    """Whether it is torch's own accelerator, or that of an extension which has given torch a name for it."""
    import torch

    current = torch.accelerator.current_accelerator()
    return kind == torch._C._get_privateuse1_backend_name() or (current is not None and kind == current.type)


def split(device: str) -> tuple[str, int | None]:
    """The type of ``device``, and its number if it has one. Raises ``DeviceError`` for what is no number."""
    kind, colon, number = device.partition(":")
    if colon and not (number.isascii() and number.isdecimal()):
        raise DeviceError(f"device {device!r}: expected a type, such as cuda, or a type and a number, such as cuda:0")
    return kind, int(number) if colon else None


def found() -> str:
    """The type of this machine's accelerator, or ``cpu``."""
    import torch

    current = torch.accelerator.current_accelerator(check_available=True)
    return CPU if current is None else current.type


def absence(kind: str) -> str:
    """Why nothing can be computed on ``kind`` here; empty if it can."""
    if kind in (CPU, found()):
        return ""
    return f"torch finds no {kind} device here"


def count(kind: str) -> int:
    """How many devices of it there are; the host is one."""
    import torch

    if kind == CPU:
        return 1
    return torch.accelerator.device_count() if kind == found() else 0


def title(kind: str) -> str:
    """How many there are, and what their makers call them, where torch knows it."""
    import torch

    if kind == CPU:
        return CPU
    named = getattr(torch.get_device_module(kind), "get_device_name", lambda number: kind)
    return f"{count(kind)} x {named(0)}"


def first_of(kind: str) -> str:
    """The device that has the reference, which is on one."""
    return CPU if kind == CPU else f"{kind}:0"


def place_of(device: str, local_rank: int) -> str:
    """Where a rank of this host computes: on ``device`` if that has a number, else ranks share all in turn.

    Raises ``DeviceError`` where there is none.
    """
    kind, number = split(device)
    if why := absence(kind):
        raise DeviceError(f"ranks cannot compute on {kind}: {why}")
    if kind == CPU:
        return CPU
    if number is not None and number >= count(kind):
        raise DeviceError(f"ranks cannot compute on {device}: this host has {count(kind)} of them, from 0 on")
    return f"{kind}:{local_rank % count(kind) if number is None else number}"


def backend_of(device: str, local_ranks: int) -> str:
    """What carries messages between ranks, so many of them on each host.

    Ranks with a device each use what torch has for it (NCCL for CUDA). Several on one go through the host: NCCL refuses
    two ranks on a device. So does a device that torch has nothing for.
    """
    import torch.distributed as dist

    kind, number = split(device)
    if kind == CPU or number is not None or count(kind) < local_ranks:
        return HOST
    try:
        return dist.get_default_backend_for_device(kind)
    except ValueError:
        return HOST


def use(place: str) -> None:
    """Make ``place`` this process's own device."""
    import torch

    kind, number = split(place)
    if kind != CPU and number is not None:
        torch.accelerator.set_device_index(number)


def synchronize(place: str) -> None:
    """Wait until the device has done what it was given; the host does nothing later."""
    import torch

    if split(place)[0] != CPU:
        torch.accelerator.synchronize()


def begin_peak() -> None:
    """From here on ``peak`` counts, on this process's own device."""
    import torch

    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()


def held() -> int:
    """Bytes that tensors take up on this process's own device, once it has done what it was given."""
    import torch

    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()


def peak() -> int:
    """The most that they took up at once since ``begin_peak``."""
    import torch

    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated()


def drawing() -> list[int]:
    """The devices whose random numbers this process may have drawn: none before the accelerator is in use."""
    import torch

    current = torch.accelerator.current_accelerator()
    if current is None:
        return []
    started = getattr(
        torch.get_device_module(current), "is_initialized", lambda: False
    )  # mps has no generators by number
    return [torch.accelerator.current_device_index()] if started() else []


@dataclass(frozen=True)
class Arithmetic:
    """How a device computes where it has a choice.

    deterministic: the same bits on every run. tf32: products of fp32 matrices from 10 bits of each number.
    short_sums: products of bf16 matrices may be added up in bf16. None of them means anything on a CPU.
    """

    deterministic: bool = True
    tf32: bool = False
    short_sums: bool = False


_PLAIN = Arithmetic()
_arithmetic: ContextVar[Arithmetic] = ContextVar("arithmetic", default=_PLAIN)


@contextmanager
def computing(arithmetic: Arithmetic) -> Iterator[None]:
    """While this is open, this process computes so; what was set before comes back."""
    import torch

    products = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision(), products.allow_bf16_reduced_precision_reduction
    exact, token = torch.are_deterministic_algorithms_enabled(), _arithmetic.set(arithmetic)
    try:
        torch.set_float32_matmul_precision("high" if arithmetic.tf32 else "highest")
        products.allow_bf16_reduced_precision_reduction = arithmetic.short_sums
        torch.use_deterministic_algorithms(exact and arithmetic.deterministic)
        yield
    finally:
        _arithmetic.reset(token)
        torch.set_float32_matmul_precision(before[0])
        products.allow_bf16_reduced_precision_reduction = before[1]
        torch.use_deterministic_algorithms(exact)


def deterministic(device: str) -> None:
    """Make a device give the same bits twice, unless ``computing`` says otherwise; a CPU with one thread does so."""
    import torch

    if split(device)[0] != CPU and _arithmetic.get().deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def too_old(version: str = "") -> str:
    """Why there are no simulated ranks with this torch; empty where there are."""
    from torch.torch_version import TorchVersion, __version__

    if (own := TorchVersion(version or __version__)) >= _OLDEST:
        return ""
    return f"torch is {own}: simulated ranks want {_OLDEST} or newer; use real ranks, in World()"
