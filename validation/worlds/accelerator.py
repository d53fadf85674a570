"""Devices: types, sharing between ranks, and message backends.

Other rooms name a device by type, such as ``cpu`` or ``cuda``, or by place, such as ``cuda:0``. torch is imported
within functions: the command line names devices before it needs torch.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_OLDEST = "2.13"  # for simulated ranks: earlier DTensor ends processes whose ranks are threads
CPU = "cpu"
AUTO = "auto"  # command line word for the accelerator, or else the CPU
COMMON = (CPU, "cuda", "xpu", "mps", "mtia", "hpu")  # known without torch
HOST = "gloo"  # carries host memory, for any number of ranks

# Device queries may start a driver, and processes forked later then have none.
FORKED_LATER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class DeviceError(ValueError):
    """Raised for absent devices, and for text without a device."""


def refusal(kind: str) -> str:
    """Return why ``kind`` cannot be a ranks' device type; empty if it can."""
    if kind in COMMON:
        return ""
    if ":" in kind and not refusal(kind.partition(":")[0]):
        return f"device {kind!r} has a number: expected a type alone, such as {kind.partition(':')[0]}"
    import torch

    current = torch.accelerator.current_accelerator()
    if kind in (torch._C._get_privateuse1_backend_name(), current and current.type):
        return ""
    return f"unknown device {kind!r}: torch names {', '.join(COMMON)}, and those of its extensions"


def parse_device(text: str) -> str:
    """Parse a device option: a type, or ``auto``. Raises argparse's error for users."""
    if text != AUTO and (why := refusal(text)):
        raise argparse.ArgumentTypeError(why)
    return text


def split(device: str) -> tuple[str, int | None]:
    """Split ``device`` into type and optional number. Raises ``DeviceError`` for a malformed number."""
    kind, colon, number = device.partition(":")
    if colon and not (number.isascii() and number.isdecimal()):
        raise DeviceError(f"device {device!r}: expected a type, such as cuda, or a type and a number, such as cuda:0")
    return kind, int(number) if colon else None


def detect() -> str:
    """Return the machine's accelerator type, or ``cpu``."""
    import torch

    current = torch.accelerator.current_accelerator(check_available=True)
    return CPU if current is None else current.type


def absence(kind: str) -> str:
    """Return why nothing can run on ``kind`` here; empty if something can."""
    if kind in (CPU, detect()):
        return ""
    return f"torch finds no {kind} device here"


def count(kind: str) -> int:
    """Count devices; the host counts as one."""
    import torch

    if kind == CPU:
        return 1
    return torch.accelerator.device_count() if kind == detect() else 0


def title(kind: str) -> str:
    """Describe devices: number, and product name if torch knows it."""
    import torch

    if kind == CPU:
        return CPU
    named = getattr(torch.get_device_module(kind), "get_device_name", lambda number: kind)
    return f"{count(kind)} x {named(0)}"


def first_of(kind: str) -> str:
    """Return the reference's device."""
    return CPU if kind == CPU else f"{kind}:0"


def place_of(device: str, local_rank: int) -> str:
    """Return a local rank's device: a numbered ``device`` itself, otherwise all in turn.

    Raises ``DeviceError`` without a device.
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
    """Return the message backend for ``local_ranks`` ranks per host.

    Ranks with separate devices use torch's backend for them (NCCL for CUDA). Ranks on a shared device go through the
    host: NCCL refuses two ranks per device. So do devices without a backend.
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
    """Select this process's device."""
    import torch

    kind, number = split(place)
    if kind != CPU and number is not None:
        torch.accelerator.set_device_index(number)


def synchronize(place: str) -> None:
    """Wait for the device's pending work; the host has none."""
    import torch

    if split(place)[0] != CPU:
        torch.accelerator.synchronize()


def begin_peak() -> None:
    """Reset the memory peak on this process's device."""
    import torch

    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()


def memory_in_use() -> int:
    """Return tensor bytes on this process's device, after pending work."""
    import torch

    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()


def peak() -> int:
    """Return peak tensor bytes since ``begin_peak``."""
    import torch

    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated()


def drawing() -> list[int]:
    """Return devices that may have drawn random numbers: none before the accelerator starts."""
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
    """Arithmetic options for a device.

    deterministic: equal bits on every run. tf32: fp32 matrix products with 10 bits per number. short_sums: bf16 matrix
    products may sum in bf16. CPUs ignore all three.
    """

    deterministic: bool = True
    tf32: bool = False
    short_sums: bool = False


_PLAIN = Arithmetic()
_arithmetic: ContextVar[Arithmetic] = ContextVar("arithmetic", default=_PLAIN)


@contextmanager
def computing(arithmetic: Arithmetic) -> Iterator[None]:
    """Apply ``arithmetic`` in this process, inside the context."""
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
    """Make a device reproducible, unless ``computing`` overrides it; single-threaded CPUs are already."""
    import torch

    if split(device)[0] != CPU and _arithmetic.get().deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def too_old(version: str = "") -> str:
    """Return why this torch lacks simulated ranks; empty if it has them."""
    from torch.torch_version import TorchVersion, __version__

    if (own := TorchVersion(version or __version__)) >= _OLDEST:
        return ""
    return f"torch is {own}: simulated ranks want {_OLDEST} or newer; use real ranks, in World()"
