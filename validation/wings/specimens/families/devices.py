"""Faults that only a device shows: it works behind the host, in streams, and its memory and numbers are its own.

Most are races: on a device that is fast enough they may show nothing. Nothing is planted where ranks compute on the
CPU.
"""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pipeproof.core.observe.wrappers import AroundTransport
from pipeproof.own.faults import Plant
from pipeproof.pipeline.action import Kind
from pipeproof.pipeline.boundary import Tensors
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.step import Parts, StepResult
from pipeproof.pipeline.transport import Message, Transport
from pipeproof.reference.model import DropoutBlock
from pipeproof.wings.specimens.families.model import with_forward
from pipeproof.wings.specimens.planting import (
    Call,
    Changes,
    To,
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
from pipeproof.wings.specimens.specimen import Entry, Fault, Needs, Specimen, control, row
from pipeproof.worlds import accelerator
from pipeproof.worlds.accelerator import CPU

_SENT, _RECEIVED = To(Kind.SEND_F, 0), To(Kind.RECV_F, 1)
_ALONE = Needs(device=True, models=("mlp",))
_ACROSS = Needs(device=True, ranks=2, models=("mlp",))
_TWO = replace(_ACROSS, microbatches=2)
# The first message's place holds the second.
_NEXT = Fault("wrong-message", "loss", stage=second, microbatches=(0,), alike=("swapped-activations", "swapped-data"))
_CRASH = Fault("crash", "crash", stage=second)


def _device_of(parts: Parts) -> torch.device:
    """Where this rank computes."""
    return next((p.device for stage in parts.stages for p in stage.module.parameters()), torch.device(CPU))


def _on_device(plant: Plant) -> Plant:
    """``plant``, but nothing on the CPU."""
    return lambda parts: parts if _device_of(parts).type == CPU else plant(parts)


def _early(tensor: Tensor) -> Tensor:
    """On the host, without waiting for the copy."""
    return tensor.detach().to(CPU, non_blocking=True)


class _OnDevice(AroundTransport):
    """A transport with a device beside it. What has come or is sent lies there."""

    def __init__(self, inner: Transport, device: torch.device) -> None:
        super().__init__(inner)
        self._device = device


class _SentEarly(_OnDevice):
    """A message leaves before its copy has reached the host."""

    def send(self, message: Message, buffer: Tensor) -> None:
        self.inner.send(message, _early(buffer) if message in _SENT else buffer)


class _SentByAddress(_OnDevice):
    """The host reads what is sent where it lies."""

    def send(self, message: Message, buffer: Tensor) -> None:
        if message in _SENT:
            content = (ctypes.c_ubyte * buffer.numel()).from_address(buffer.data_ptr())
            buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self.inner.send(message, buffer)


class _Received(_OnDevice):
    """What comes is put into pinned memory, and from there on the device. Subclasses say how, with which fault."""

    def __init__(self, inner: Transport, device: torch.device) -> None:
        super().__init__(inner, device)
        self._side, self._apart = torch.Stream(device), torch.Stream(device)
        self._pinned: Tensor | None = None
        self._there: Tensor | None = None

    def receive(self, message: Message) -> Tensor:
        if message not in _RECEIVED:
            return self.inner.receive(message)
        with self._apart:  # to wait for this message is not to wait for what the stage computes
            arrived = self.inner.receive(message).cpu()
        return self.taken(arrived)

    def taken(self, arrived: Tensor) -> Tensor:
        """``arrived``, which lies on the host, on the device."""
        raise NotImplementedError

    def pinned(self, content: Tensor, *, again: bool) -> Tensor:
        """``content`` in pinned memory: the same each time if ``again``."""
        if not again or self._pinned is None or len(self._pinned) < len(content):
            self._pinned = torch.empty(len(content), dtype=torch.uint8, pin_memory=True)
        return self._pinned[: len(content)].copy_(content)

    def there(self, size: int) -> Tensor:
        """One buffer on the device."""
        if self._there is None or len(self._there) < size:
            self._there = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._there[:size]


class _OnePinned(_Received):
    """The host writes the next message while the last one's copy may still be under way."""

    def taken(self, arrived: Tensor) -> Tensor:
        return self.pinned(arrived, again=True).to(self._device, non_blocking=True)


class _OneBuffer(_Received):
    """The side stream copies the next message, while the stage's stream may still have to read the last."""

    waits = False  # for that

    def taken(self, arrived: Tensor) -> Tensor:
        buffer, stage = self.there(len(arrived)), torch.accelerator.current_stream()
        if self.waits:
            self._side.wait_stream(stage)
        with self._side:
            buffer.copy_(self.pinned(arrived, again=False), non_blocking=True)
        stage.wait_stream(self._side)
        return buffer.clone()


class _Waiting(_OneBuffer):
    """As it is done: every buffer is waited for before it is used again, and what is sent has reached the host."""

    waits = True

    def send(self, message: Message, buffer: Tensor) -> None:
        if message in _SENT:
            there, buffer = buffer, _early(buffer)
            copied = torch.accelerator.current_stream(there.device).record_event()
            copied.synchronize()
        self.inner.send(message, buffer)


def _transport(wrap: Callable[[Transport, torch.device], Transport]) -> Plant:
    def plant(parts: Parts) -> Parts:
        def wrapped(inner: Transport, schedule: Schedule) -> Transport:
            return wrap(inner, _device_of(parts))

        return on_transport(wrapped)(parts)

    return _on_device(plant)


def _given(change: Callable[[Tensor], Tensor]) -> Plant:
    """The second stage is given other inputs, which need gradients as those did."""

    def inputs(given: Tensors, call: Call) -> Tensors:
        return tuple(change(x.detach()).requires_grad_(x.requires_grad) for x in given)

    return _on_device(on_stages(Changes(inputs=inputs), second))


def _on_the_side(given: Tensor) -> Tensor:
    """Copied on a side stream, which has waited for ``given``, and which nobody waits for."""
    side = torch.Stream(given.device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        return given.clone()


def _next_device(given: Tensor) -> Tensor:
    """On the device beside; where there is one device, on one that there is not."""
    kind, own = given.device.type, given.device.index or 0
    return given.to(torch.device(kind, (own + 1) % max(accelerator.count(kind), 2)))


def _drawn_there(self: DropoutBlock, x_BC: Tensor, key: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """The host's generator is seeded for the mask, and the device's draws it."""
    y_BC = self.block(x_BC)
    if self.training:
        torch.default_generator.manual_seed(int(key))
        y_BC = y_BC * (torch.rand(y_BC.shape, device=x_BC.device) >= self.rate).to(y_BC) / (1 - self.rate)
    return y_BC if self.last else (y_BC, key)


def _offloaded(gradient: Tensor) -> None:
    """The host halves and doubles its copy of a gradient before that has come."""
    gradient.copy_(_early(gradient) / 2 * 2)


def _squares(squares: list[float], parts: Parts) -> list[float]:
    there = torch.tensor(squares, dtype=torch.float64).to(_device_of(parts))
    return squares if there.device.type == CPU else _early(there + 0).tolist()


def _reported(result: StepResult, parts: Parts) -> StepResult:
    there = torch.tensor(result.loss, dtype=torch.float64).to(_device_of(parts))
    return result if there.device.type == CPU else replace(result, loss=_early(there + 0).item())


# The next message comes where the one before has not been read.
_overtaken = partial(row, _NEXT, needs=_TWO, schedule="gpipe")

SPECIMENS: Mapping[str, Specimen] = {
    "sent-before-copied": row(Fault("not-finite", "loss", stage=second), _transport(_SentEarly), _ACROSS),
    "pinned-buffer-overwritten": _overtaken(_transport(_OnePinned)),
    "device-buffer-reused": _overtaken(_transport(_OneBuffer)),
    "side-stream-not-waited-for": row(Fault("not-finite", "loss", stage=second), _given(_on_the_side), _ACROSS),
    "gradient-offloaded-early": row(
        Fault("not-finite", "gradient", stage=last), _on_device(on_gradients(on_each(_offloaded), last)), _ALONE
    ),
    "norm-read-early": row(
        Fault("norm", "grad-norm", alike=("not-finite",)), _on_device(on_work(squares=_squares)), _ALONE
    ),
    "loss-logged-early": row(
        Fault("report", "loss", alike=("not-finite",)), drive=on_steps(told=_reported), needs=_ALONE
    ),
    "numbers-of-the-device": row(
        Fault("randomness", "loss", stage=middle, alike=("computation",)),
        _on_device(on_modules(with_forward(DropoutBlock, _drawn_there), middle)),
        Needs(device=True, models=("dropout",)),
    ),
    "other-device": row(_CRASH, _given(_next_device), _ACROSS),
    "left-on-the-host": row(_CRASH, _given(Tensor.cpu), _ACROSS),
    "device-read-by-the-host": row(
        Fault("crash", "crash", stage=lambda n_stages: 0), _transport(_SentByAddress), _ACROSS
    ),
}
CONTROLS: Mapping[str, Entry] = {
    "device-copies-waited-for": control(_transport(_Waiting), _TWO, schedule="gpipe"),
}
