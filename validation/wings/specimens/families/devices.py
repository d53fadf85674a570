"""Faults that only a device shows: it runs behind the host, in streams, with its own memory and numbers.

Most are races: a fast device may hide them. Nothing is planted on CPU ranks.
"""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pipeproof.core.observe.wrappers import AroundTransport
from pipeproof.own.faults import Plant
from pipeproof.pipeline.action import Kind
from pipeproof.pipeline.boundary import Tensors
from pipeproof.pipeline.step import Parts
from pipeproof.pipeline.transport import Message, Transport
from pipeproof.reference.model import DropoutBlock
from pipeproof.wings.specimens.families.model import with_forward
from pipeproof.wings.specimens.planting import (
    Call,
    Changes,
    To,
    both,
    last,
    middle,
    on_each,
    on_gradients,
    on_modules,
    on_stages,
    on_steps,
    on_transport,
    on_work,
    second,
)
from pipeproof.wings.specimens.specimen import Entry
from pipeproof.worlds import accelerator
from pipeproof.worlds.accelerator import CPU

_SENT, _RECEIVED = To(Kind.SEND_F, 0), To(Kind.RECV_F, 1)


def _device_of(parts: Parts) -> torch.device:
    """Return this rank's device."""
    return next((p.device for stage in parts.stages for p in stage.module.parameters()), torch.device(CPU))


def _on_device(plant: Plant) -> Plant:
    """``plant``, but nothing on the CPU."""
    return lambda parts: parts if _device_of(parts).type == CPU else plant(parts)


def _early(tensor: Tensor) -> Tensor:
    """On the host, without waiting for the copy."""
    return tensor.detach().to(CPU, non_blocking=True)


def _send(change: Callable[[Tensor], Tensor]) -> Plant:
    """Change the first stage's sent tensors."""

    class Sending(AroundTransport):
        def send(self, message: Message, buffer: Tensor) -> None:
            self.inner.send(message, change(buffer) if message in _SENT else buffer)

    return _on_device(on_transport(lambda inner, schedule: Sending(inner)))


def _read_by_address(buffer: Tensor) -> Tensor:
    """Read a tensor from the host at its device address."""
    content = (ctypes.c_ubyte * buffer.numel()).from_address(buffer.data_ptr())
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _copy(buffer: Tensor) -> Tensor:
    """Return a copy that has reached the host."""
    copy = _early(buffer)
    torch.accelerator.current_stream(buffer.device).record_event().synchronize()
    return copy


class _Received(AroundTransport):
    """Receive into pinned memory, then copy to the device. Subclasses add a fault."""

    def __init__(self, inner: Transport, device: torch.device) -> None:
        super().__init__(inner)
        self._device = device
        self._side, self._apart = torch.Stream(device), torch.Stream(device)
        self._pinned: Tensor | None = None
        self._there: Tensor | None = None

    def receive(self, message: Message) -> Tensor:
        if message not in _RECEIVED:
            return self.inner.receive(message)
        with self._apart:  # to wait for this message is not to wait for what the stage computes
            arrived = self.inner.receive(message).cpu()
        return self.take(arrived)

    def take(self, arrived: Tensor) -> Tensor:
        """``arrived``, which lies on the host, on the device."""
        raise NotImplementedError

    def pin(self, content: Tensor, *, again: bool) -> Tensor:
        """``content`` in pinned memory: the same each time if ``again``."""
        if not again or self._pinned is None or len(self._pinned) < len(content):
            self._pinned = torch.empty(len(content), dtype=torch.uint8, pin_memory=True)
        return self._pinned[: len(content)].copy_(content)

    def there(self, size: int) -> Tensor:
        """Return one buffer on the device."""
        if self._there is None or len(self._there) < size:
            self._there = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._there[:size]


class _OnePinned(_Received):
    """The host writes the next message while the last one's copy may still be under way."""

    def take(self, arrived: Tensor) -> Tensor:
        return self.pin(arrived, again=True).to(self._device, non_blocking=True)


class _OneBuffer(_Received):
    """The side stream copies the next message, while the stage's stream may still have to read the last."""

    waits = False  # for that

    def take(self, arrived: Tensor) -> Tensor:
        buffer, stage = self.there(len(arrived)), torch.accelerator.current_stream()
        if self.waits:
            self._side.wait_stream(stage)
        with self._side:
            buffer.copy_(self.pin(arrived, again=False), non_blocking=True)
        stage.wait_stream(self._side)
        return buffer.clone()


class _Waiting(_OneBuffer):
    """Correct version: every buffer is waited for before reuse."""

    waits = True


def _transport(wrap: type[_Received]) -> Plant:
    return _on_device(lambda parts: on_transport(lambda inner, schedule: wrap(inner, _device_of(parts)))(parts))


def _change_input(change: Callable[[Tensor], Tensor]) -> Plant:
    """Change the second stage's inputs, keeping their need for gradients."""

    def inputs(given: Tensors, call: Call) -> Tensors:
        return tuple(change(x.detach()).requires_grad_(x.requires_grad) for x in given)

    return _on_device(on_stages(Changes(inputs=inputs), second))


def _on_the_side(given: Tensor) -> Tensor:
    """Copy on a side stream that waits for ``given``, without a wait for the copy."""
    side = torch.Stream(given.device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        return given.clone()


def _next_device(given: Tensor) -> Tensor:
    """Use the next device; on a machine with one, a missing device."""
    kind, own = given.device.type, given.device.index or 0
    return given.to(torch.device(kind, (own + 1) % max(accelerator.count(kind), 2)))


def _draw_on_device(self: DropoutBlock, x_BC: Tensor, key: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """Seed the host's generator for the mask, but draw with the device's."""
    y_BC = self.block(x_BC)
    if self.training:
        torch.default_generator.manual_seed(int(key))
        y_BC = y_BC * (torch.rand(y_BC.shape, device=x_BC.device) >= self.rate).to(y_BC) / (1 - self.rate)
    return y_BC if self.last else (y_BC, key)


def _read_early(numbers: list[float], parts: Parts) -> list[float]:
    """Return numbers by way of this rank's device, before they are back."""
    there = torch.tensor(numbers, dtype=torch.float64).to(_device_of(parts))
    return numbers if there.device.type == CPU else _early(there + 0).tolist()


PLANTS: Mapping[str, Plant | Entry] = {
    "sent-before-copied": _send(_early),
    "pinned-buffer-overwritten": _transport(_OnePinned),
    "device-buffer-reused": _transport(_OneBuffer),
    "side-stream-not-waited-for": _change_input(_on_the_side),
    "gradient-offloaded-early": _on_device(
        on_gradients(on_each(lambda gradient: gradient.copy_(_early(gradient) / 2 * 2)), last)
    ),
    "norm-read-early": _on_device(on_work(squares=_read_early)),
    "loss-logged-early": Entry(
        drive=on_steps(reported=lambda result, parts: replace(result, loss=_read_early([result.loss], parts)[0]))
    ),
    "numbers-of-the-device": _on_device(on_modules(with_forward(DropoutBlock, _draw_on_device), middle)),
    "other-device": _change_input(_next_device),
    "left-on-the-host": _change_input(Tensor.cpu),
    "device-read-by-the-host": _send(_read_by_address),
    "device-copies-waited-for": both(_transport(_Waiting), _send(_copy)),
}
