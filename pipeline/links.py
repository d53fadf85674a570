"""The links between neighbouring stages on different ranks: activations one way, gradients the other.

A receiver must know shapes before it can make room. They follow from the shapes of the microbatch's inputs, which
every rank knows, so the first message of each shape over a link is preceded by a header and later ones are not.
"""

from collections.abc import Hashable, Sequence

import torch

from pipeline.action import Action, Kind
from pipeline.boundary import (
    HEADER_BYTES,
    BoundaryError,
    Gradients,
    Specs,
    Tensors,
    TensorSpec,
    activations,
    decode_specs,
    encode_specs,
    gradients,
)
from pipeline.transport import Message, Transport

Link = int  # the number of the stage before it: link s joins stages s and s + 1
_Key = tuple[Link, int]  # a link, and a number for the microbatch's signature


class Links:
    """Turns the messages of a program into tensors. One per rank, kept over steps: it remembers shapes."""

    def __init__(self, transport: Transport, placement: Sequence[int]) -> None:
        self._transport = transport
        self._placement = placement
        self._numbers: dict[Hashable, int] = {}
        self._signatures: list[int] = []
        self._specs: dict[_Key, Specs] = {}
        self._posted: set[Message] = set()

    def begin(self, signatures: Sequence[Hashable]) -> None:
        """Start a step whose microbatches have these ``signatures``, the same on every rank."""
        self._signatures = [self._numbers.setdefault(signature, len(self._numbers)) for signature in signatures]
        self._posted.clear()

    def send_activation(self, action: Action, outputs: Tensors) -> None:
        key, specs = self._key(action.stage, action.microbatch), tuple(map(TensorSpec.of, outputs))
        message = self._message(action, action.stage, action.stage + 1)
        if key not in self._specs:
            self._specs[key] = specs
            self._transport.send(self._header(key, message.peer), encode_specs(specs))
        if specs != self._specs[key]:
            raise BoundaryError(
                f"stage {action.stage} handed on {_text(specs)} for microbatch {action.microbatch}, but "
                f"{_text(self._specs[key])} for another with inputs of the same shapes: what a stage hands on may "
                "depend on the shapes of the inputs, not on their values"
            )
        self._transport.send(message, activations(specs).pack(outputs))

    def post_activation(self, action: Action) -> None:
        self._post(self._message(action, action.stage - 1, action.stage - 1), forward=True)

    def receive_activation(self, action: Action) -> Tensors:
        """The inputs of a stage, as leaves that require a gradient where the sender's tensors did."""
        link = action.stage - 1
        key, message = self._key(link, action.microbatch), self._message(action, link, link)
        if key not in self._specs:
            header = self._header(key, message.peer)
            self._transport.post(header, HEADER_BYTES)
            self._specs[key] = decode_specs(self._transport.receive(header))
        specs = self._specs[key]
        if message not in self._posted:
            self._post(message, forward=True)
        members = activations(specs).unpack(self._transport.receive(message))
        return tuple(
            member.requires_grad_(spec.requires_grad)
            for member, spec in zip(members, specs, strict=True)
            if member is not None
        )

    def send_gradient(self, action: Action, values: Gradients) -> None:
        link = action.stage - 1
        layout = gradients(self._specs[self._key(link, action.microbatch)])
        if layout.nbytes:
            self._transport.send(self._message(action, link, link), layout.pack(values))

    def post_gradient(self, action: Action) -> None:
        self._post(self._message(action, action.stage, action.stage + 1), forward=False)

    def receive_gradient(self, action: Action) -> Gradients:
        """A gradient, or None, per output of a stage."""
        specs = self._specs[self._key(action.stage, action.microbatch)]
        layout = gradients(specs)
        if not layout.nbytes:
            return (None,) * len(specs)
        message = self._message(action, action.stage, action.stage + 1)
        if message not in self._posted:
            self._post(message, forward=False)
        return layout.unpack(self._transport.receive(message))

    def _post(self, message: Message, *, forward: bool) -> None:
        """Start receiving, unless the shapes are not known yet: then the receiving action does, after the header."""
        action = message.name
        assert isinstance(action, Action), f"{action!r} names no action"
        link = action.stage - 1 if forward else action.stage
        specs = self._specs.get(self._key(link, action.microbatch))
        if specs is None:
            return
        layout = activations(specs) if forward else gradients(specs)
        if layout.nbytes:
            self._posted.add(message)
            self._transport.post(message, layout.nbytes)

    def _key(self, link: Link, microbatch: int) -> _Key:
        # Without gradients nothing requires one, so evaluation has boundaries of its own.
        return link, 2 * self._signatures[microbatch] + torch.is_grad_enabled()

    def _message(self, action: Action, link: Link, peer_stage: int) -> Message:
        forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
        tag = 3 * (action.microbatch * len(self._placement) + link) + (0 if forward else 1)
        return Message(action, self._placement[peer_stage], tag)

    def _header(self, key: _Key, peer: int) -> Message:
        link, number = key
        return Message(f"shapes that stage {link} hands on", peer, 3 * (number * len(self._placement) + link) + 2)


def _text(specs: Specs) -> str:
    return ", ".join(f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}" for spec in specs)
