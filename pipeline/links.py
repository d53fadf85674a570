"""Links between neighbouring stages on different ranks: activations one way, gradients the other.

A receiver must know shapes before it can make room. They follow from the shapes of the microbatch's inputs, which
every rank knows, so the first message of each shape over a link is preceded by a header and later ones are not.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.boundary import (
    HEADER_BYTES,
    BoundaryError,
    Gradients,
    Layout,
    Specs,
    Tensors,
    TensorSpec,
    activations,
    decode_specs,
    encode_specs,
    gradients,
)
from pipeproof.pipeline.mailbox import Mailbox
from pipeproof.pipeline.transport import Message, Transport

Link = int  # the number of the stage before it: link s joins stages s and s + 1
_Key = tuple[Link, int]  # a link, and a number for the microbatch's signature
_FORWARD = frozenset({Kind.SEND_F, Kind.RECV_F})
_WITH_LATER = frozenset({Kind.SEND_F, Kind.RECV_B})  # exchanged with the stage after; the others with the one before


class _Letter(NamedTuple):
    """A message with known shapes: the layout of its tensors in the buffer."""

    message: Message
    layout: Layout


class Links:
    """Turns a program's messages into tensors. One per rank, kept over steps: it remembers shapes."""

    def __init__(self, transport: Transport, placement: Sequence[int]) -> None:
        self._transport = transport
        self._placement = placement
        self._numbers: dict[Hashable, int] = {}
        self._signatures: list[int] = []
        self._specs: dict[_Key, Specs] = {}
        self._letters: dict[Action, _Letter] = {}  # of microbatches with the present signatures
        self._mailbox = Mailbox(transport)

    def begin(self, signatures: Sequence[Hashable]) -> None:
        """Start a step with these ``signatures`` of microbatches, equal on every rank."""
        # Without gradients nothing requires one, so evaluation has boundaries of its own.
        modes = [(signature, torch.is_grad_enabled()) for signature in signatures]
        numbers = [self._numbers.setdefault(mode, len(self._numbers)) for mode in modes]
        if numbers != self._signatures:
            self._signatures = numbers
            self._letters.clear()
        self._mailbox.clear()

    def send_activation(self, action: Action, outputs: Tensors) -> None:
        specs = tuple(map(TensorSpec.of, outputs))
        letter = self._letters.get(action) or self._letter(action)
        if letter is None:  # the first message of its kind: its shapes go before it
            self._specs[self._key(action)] = specs
            self._transport.send(self._header(action), encode_specs(specs))
            letter = self._lookup(action)
        if specs != letter.layout.specs:
            raise BoundaryError(
                f"stage {action.stage} handed on {_text(specs)} for microbatch {action.microbatch}, but "
                f"{_text(letter.layout.specs)} for an earlier one with inputs of the same shapes. What a stage hands "
                "on may depend on the shapes of the inputs, not on their values; after freezing or unfreezing "
                "parameters build the schedule anew"
            )
        self._transport.send(letter.message, letter.layout.pack(outputs))

    def receive_activation(self, action: Action) -> Tensors:
        """Receive a stage's inputs, as leaves that require a gradient as the sender's tensors did."""
        letter = self._letters.get(action) or self._letter(action) or self._get_to_know(action)
        return letter.layout.leaves(self._mailbox.take(letter.message, letter.layout.nbytes))

    def send_gradient(self, action: Action, values: Gradients) -> None:
        letter = self._letters.get(action) or self._lookup(action)
        if letter.layout.nbytes:
            self._transport.send(letter.message, letter.layout.pack(values))

    def receive_gradient(self, action: Action) -> Gradients:
        """Receive a gradient, or None, per output of a stage."""
        letter = self._letters.get(action) or self._lookup(action)
        if not letter.layout.nbytes:
            return (None,) * len(letter.layout.specs)
        return letter.layout.unpack(self._mailbox.take(letter.message, letter.layout.nbytes))

    def post(self, action: Action) -> None:
        """Start receiving, unless shapes are still unknown: then the receiving action does, after the header.

        A transport that runs messages in posting order must meet the header here, where its sender has put it.
        """
        letter = self._letters.get(action) or self._letter(action)
        if letter is None and self._transport.in_order and action.kind is Kind.RECV_F:
            letter = self._get_to_know(action)
        if letter is not None and letter.layout.nbytes:
            self._mailbox.expect(letter.message, letter.layout.nbytes)

    def _letter(self, action: Action) -> _Letter | None:
        """Make the letter on first use in a run of equal steps; None while shapes are unknown."""
        specs = self._specs.get(self._key(action))
        if specs is None:
            return None
        layout = activations(specs) if action.kind in _FORWARD else gradients(specs)
        self._letters[action] = letter = _Letter(self._message(action), layout)
        return letter

    def _lookup(self, action: Action) -> _Letter:
        letter = self._letter(action)
        assert letter is not None, f"{action} answers an activation, whose shapes are known by now"
        return letter

    def _get_to_know(self, action: Action) -> _Letter:
        header = self._header(action)
        self._transport.post(header, HEADER_BYTES)
        self._specs[self._key(action)] = decode_specs(self._transport.receive(header))
        return self._lookup(action)

    def _key(self, action: Action) -> _Key:
        return _link(action), self._signatures[action.microbatch]

    def _message(self, action: Action) -> Message:
        backward = action.kind not in _FORWARD
        return Message(
            action, self._peer(action), 3 * (action.microbatch * len(self._placement) + _link(action)) + backward
        )

    def _header(self, action: Action) -> Message:
        link, number = self._key(action)
        tag = 3 * (number * len(self._placement) + link) + 2
        return Message(f"shapes that stage {link} hands on", self._peer(action), tag)

    def _peer(self, action: Action) -> int:
        return self._placement[action.stage + (1 if action.kind in _WITH_LATER else -1)]


def _link(action: Action) -> Link:
    """The link for a message: after its stage, or before it."""
    return action.stage if action.kind in _WITH_LATER else action.stage - 1


def _text(specs: Specs) -> str:
    return ", ".join(
        f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)} of strides {list(spec.stride)} "
        f"with{'' if spec.requires_grad else 'out'} gradient"
        for spec in specs
    )
