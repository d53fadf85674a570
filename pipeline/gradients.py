"""What happens to a rank's gradients after the last backward: tied copies are summed, the norm taken, clipping done."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from pipeline.boundary import TensorSpec, gradients
from pipeline.stage import Stage
from pipeline.transport import Message, Transport

# Tags of tied gradients lie above those that links use (see links.py): gloo admits up to 2**31 - 1.
_TIED_TAGS = 2**30

Tied = Mapping[int, str]  # one logical parameter: the name of its copy in each stage that has one


class TiedError(ValueError):
    """A declaration of tied parameters that the stages do not bear out."""


class GradientWork(Protocol):
    """What the step needs done between the last backward and the optimizer. A wrapper observes or damages it."""

    def reduce_tied(self) -> None:
        """Give every copy of a tied parameter the sum of all copies' gradients."""
        ...

    def squares(self) -> list[float]:
        """The sum of squares of each logical parameter's gradient that this rank answers for, fp64."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply every gradient on this rank by ``factor``."""
        ...


class StageGradients:
    """The gradients of this rank's stages.

    ``tied`` lists logical parameters that several stages hold copies of, e.g. ``{0: "embed.weight", 3:
    "head.weight"}``. Copies' gradients are added in the order of stages, on every rank alike, so all copies get the
    same bits; the copy on the lowest stage answers for the parameter in the norm.
    """

    def __init__(
        self, stages: Sequence[Stage], transport: Transport, placement: Sequence[int], tied: Sequence[Tied]
    ) -> None:
        self._modules = {stage.index: stage.module for stage in stages}
        self._transport = transport
        self._placement = placement
        self._tied = [dict(sorted(copies.items())) for copies in tied]
        for copies in self._tied:
            self._check(copies)

    def reduce_tied(self) -> None:
        for number, copies in enumerate(self._tied):
            if any(stage in self._modules for stage in copies):
                self._reduce(number, copies)

    def squares(self) -> list[float]:
        norms = [
            torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)
            for parameter in self._logical()
            if parameter.grad is not None
        ]
        return [norm**2 for norm in torch.stack(norms).tolist()] if norms else []

    def scale(self, factor: float) -> None:
        for parameter in {p for module in self._modules.values() for p in module.parameters()}:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _logical(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, without the copies that another stage answers for, each tensor once."""
        copies = {(stage, name) for tied in self._tied for stage, name in list(tied.items())[1:]}
        seen: set[nn.Parameter] = set()
        for stage, module in self._modules.items():
            for name, parameter in module.named_parameters():
                if (stage, name) not in copies and parameter not in seen:
                    seen.add(parameter)
                    yield parameter

    def _reduce(self, number: int, copies: Tied) -> None:
        """Every rank with a copy sends its shares to every other such rank; then each adds all, in order of stages."""
        shares: dict[int, Tensor | None] = {}
        here = {stage: self._parameter(stage, name) for stage, name in copies.items() if stage in self._modules}
        away = [stage for stage in copies if stage not in here]
        specs = (TensorSpec.of(next(iter(here.values()))),)
        for stage in away:
            self._transport.post(self._message(number, stage, self._placement[stage]), gradients(specs).nbytes)
        for stage, parameter in here.items():
            shares[stage] = None if parameter.grad is None else parameter.grad.clone()
            for peer in sorted({self._placement[other] for other in away}):
                message = self._message(number, stage, peer)
                self._transport.send(message, gradients(specs).pack((shares[stage],)))
        for stage in away:
            buffer = self._transport.receive(self._message(number, stage, self._placement[stage]))
            (shares[stage],) = gradients(specs).unpack(buffer)
        self._transport.flush()
        total = _sum([share for _, share in sorted(shares.items()) if share is not None])
        for parameter in here.values():
            parameter.grad = None if total is None else total.clone()

    def _message(self, number: int, stage: int, peer: int) -> Message:
        name = f"gradient of tied {self._tied[number][stage]} of stage {stage}"
        return Message(name, peer, _TIED_TAGS + number * len(self._placement) + stage)

    def _parameter(self, stage: int, name: str) -> nn.Parameter:
        return dict(self._modules[stage].named_parameters(remove_duplicate=False))[name]

    def _check(self, copies: Tied) -> None:
        for stage, name in copies.items():
            if not 0 <= stage < len(self._placement):
                raise TiedError(f"tied {name}: there is no stage {stage}, stages are 0..{len(self._placement) - 1}")
            if stage in self._modules and name not in dict(
                self._modules[stage].named_parameters(remove_duplicate=False)
            ):
                raise TiedError(f"tied {name}: stage {stage} has no parameter of that name")
        here = [self._parameter(stage, name) for stage, name in copies.items() if stage in self._modules]
        if len({id(parameter) for parameter in here}) < len(here):
            raise TiedError(
                f"tied {dict(copies)}: one tensor serves several stages of this rank, so their gradients are summed "
                "already; leave it undeclared, or give each stage a copy"
            )


def norm_of(squares: Sequence[float]) -> float:
    """The 2-norm from sums of squares; exactly rounded addition makes it independent of how stages are split."""
    return math.sqrt(math.fsum(squares))


def clip_factor(norm: float, max_norm: float) -> float:
    """What to multiply gradients by so that their norm is at most ``max_norm``; as ``clip_grad_norm_`` forms it."""
    return min(1.0, max_norm / (norm + 1e-6))


def _sum(shares: Sequence[Tensor]) -> Tensor | None:
    if not shares:
        return None
    total = shares[0].clone()
    for share in shares[1:]:
        total += share
    return total
