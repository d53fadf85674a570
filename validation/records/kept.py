"""What a rank keeps of a checked step for the case that it is wrong: on the CPU, and no more than was agreed on."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from validation.judging.tolerance import same_bits
from validation.records.record import Gradients

MOST = 1 << 30  # bytes that all ranks together keep


@dataclass(frozen=True)
class Notes:
    """What a rank kept, by the names of parameters: what all ranks learn of it without the tensors.

    ``right``: gradients that are what they should be; ``wrong``: kept; ``absent``: None in place of a gradient;
    ``begun``: kept as they were in ``.grad`` when the step began; ``left_out``: wrong, and too much to keep.
    """

    right: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    begun: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def compared(self) -> tuple[str, ...]:
        """All gradients that the rank was shown."""
        return (*self.right, *self.wrong, *self.absent, *self.left_out)


@dataclass
class Kept:
    """Gradients that a rank keeps: those that are wrong, and those that the step began with. ``room`` is in bytes."""

    room: int
    begun: dict[str, Tensor] = field(default_factory=dict)
    wrong: dict[str, Tensor | None] = field(default_factory=dict)
    right: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)

    def begin(self, gradients: Gradients) -> None:
        """Keep what is in ``.grad`` before anything is added: it may be what is too much in the end."""
        for name, gradient in gradients.items():
            if gradient is not None and _plain(gradient) and gradient.any() and self._fits(gradient):
                self.begun[name] = _copy(gradient)

    def end(self, gradients: Gradients, wrong: Collection[str]) -> None:
        """Keep those of ``gradients`` that are ``wrong``."""
        for name, gradient in gradients.items():
            if name not in wrong:
                self.right.add(name)
            elif gradient is None:
                self.wrong[name] = None
            elif self._fits(gradient):
                self.wrong[name] = _copy(gradient)
            else:
                self.left_out.add(name)
        # Where nothing was added since, the backward was over before the check began: that tells nothing.
        for name in [name for name, one in self.begun.items() if _same(one, gradients.get(name))]:
            del self.begun[name]

    @property
    def notes(self) -> Notes:
        """What was kept, without the tensors."""
        absent = tuple(name for name, gradient in self.wrong.items() if gradient is None)
        wrong = tuple(name for name, gradient in self.wrong.items() if gradient is not None)
        return Notes(tuple(self.right), wrong, absent, tuple(self.begun), tuple(self.left_out))

    def tensors(self, rank: int) -> Iterator[tuple[str, Tensor]]:
        """All that ``rank`` kept, each under a name of its own."""
        for what, found in (("wrong", self.wrong), ("begun", self.begun)):
            yield from ((address(what, name, rank), one) for name, one in found.items() if one is not None)

    def _fits(self, gradient: Tensor) -> bool:
        fits = gradient.nbytes <= self.room
        self.room -= gradient.nbytes * fits
        return fits


def address(what: str, name: str, rank: int) -> str:
    """The name under which ``rank`` hands over the gradient ``name``: of ``Notes``, which field."""
    return f"{what} gradient {name} of rank {rank}"


def _copy(gradient: Tensor) -> Tensor:
    return gradient.detach().to("cpu", copy=True)


def _same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and same_bits(one, other.detach().cpu())


def _plain(gradient: Tensor) -> bool:
    """Whether it can be looked at without other ranks, and added up: no shard, nothing sparse."""
    return type(gradient) is Tensor and gradient.layout == torch.strided
