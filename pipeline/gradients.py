"""A rank's gradients after the last backward: sum over tied copies, norm, clipping."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pipeproof.pipeline.boundary import HEADER_BYTES, TensorSpec, decode_specs, encode_specs, gradients
from pipeproof.pipeline.stage import Stage
from pipeproof.pipeline.transport import Message, Transport

# Tags of tied gradients lie above those that links use (see links.py): gloo admits up to 2**31 - 1.
_TIED_TAGS = 2**30

Tied = Mapping[int, str]  # one logical parameter: the name of its copy in each stage that has one


class TiedError(ValueError):
    """A declaration about tied parameters that contradicts the stages."""


@runtime_checkable
class InShards(Protocol):
    """A DTensor: importing its class takes seconds."""

    @property
    def device_mesh(self) -> object: ...

    def full_tensor(self) -> Tensor: ...


class GradientWork(Protocol):
    """Work on gradients between the last backward and the optimizer. A wrapper observes or damages it."""

    def reduce_tied(self) -> None:
        """Give every copy of a tied parameter the sum of all copies' gradients."""
        ...

    def squares(self) -> list[float]:
        """Squared gradient norms by logical parameter that this rank answers for, fp64."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply every gradient on this rank by ``factor``."""
        ...


class StageGradients:
    """Gradients on this rank.

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
        self._agreed = set[tuple[int, int]]()  # tied parameters that were compared with a rank's copy, and the rank
        for copies in self._tied:
            self._check(copies)

    def reduce_tied(self) -> None:
        for number, copies in enumerate(self._tied):
            if any(stage in self._modules for stage in copies):
                self._reduce(number, copies)

    def squares(self) -> list[float]:
        gradients = [parameter.grad for parameter in self._logical() if parameter.grad is not None]
        real = (torch.view_as_real(g.resolve_conj()) if g.is_complex() else g for g in gradients)
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in real]
        return [norm**2 for norm in torch.stack(_whole(norms)).tolist()] if norms else []

    def scale(self, factor: float) -> None:
        for parameter in {p for module in self._modules.values() for p in module.parameters()}:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _logical(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, without copies that another stage answers for, each tensor once."""
        copies = {(stage, name) for tied in self._tied for stage, name in list(tied.items())[1:]}
        visited: set[nn.Parameter] = set()
        for stage, module in self._modules.items():
            for name, parameter in module.named_parameters():
                if (stage, name) not in copies and parameter not in visited:
                    visited.add(parameter)
                    yield parameter

    def _reduce(self, number: int, copies: Tied) -> None:
        """Exchange shares between every two ranks with copies; then each adds all, in stage order."""
        here = {
            stage: dict(self._modules[stage].named_parameters(remove_duplicate=False))[name]
            for stage, name in copies.items()
            if stage in self._modules
        }
        copy = next(iter(here.values()))
        # Gradients travel in row-major order, whatever a copy's strides.
        plain = torch.empty(copy.shape, dtype=copy.dtype, device="meta")
        spec = TensorSpec.of(plain.requires_grad_(copy.requires_grad))
        shares = {stage: None if p.grad is None else p.grad.contiguous().clone() for stage, p in here.items()}
        own, rank = tuple(shares), self._transport.rank
        for pair in combinations(sorted({self._placement[stage] for stage in copies}), 2):
            if rank not in pair:
                continue
            peer = pair[1] if rank == pair[0] else pair[0]
            theirs = [stage for stage in copies if self._placement[stage] == peer]
            # One order of pairs for all ranks, and in each the lower rank sends first: no cycle on any transport.
            if rank < peer:
                self._send(number, peer, spec, {stage: shares[stage] for stage in own})
                shares |= self._receive(number, theirs, spec)
            else:
                shares |= self._receive(number, theirs, spec)
                self._send(number, peer, spec, {stage: shares[stage] for stage in own})
            self._agreed.add((number, peer))
        self._transport.flush()
        total = _sum([share for _, share in sorted(shares.items()) if share is not None])
        for parameter in here.values():
            parameter.grad = None if total is None else total.clone()

    def _send(self, number: int, peer: int, spec: TensorSpec, shares: Mapping[int, Tensor | None]) -> None:
        for stage, share in shares.items():
            if (number, peer) not in self._agreed:
                self._transport.send(self._message(number, stage, peer), encode_specs((spec,)))
            self._transport.send(self._message(number, stage, peer), gradients((spec,)).pack((share,)))

    def _receive(self, number: int, stages: Sequence[int], spec: TensorSpec) -> dict[int, Tensor | None]:
        shares: dict[int, Tensor | None] = {}
        for stage in stages:
            message = self._message(number, stage, self._placement[stage])
            if (number, message.peer) not in self._agreed:
                (other,) = decode_specs(self._receive_sum(message, HEADER_BYTES))
                if spec != other:
                    raise TiedError(
                        f"tied {dict(self._tied[number])}: {self._tied[number][stage]} of stage {stage} is "
                        f"{_text(other)}, this rank's copy {_text(spec)}: copies of one parameter must be alike"
                    )
            (shares[stage],) = gradients((spec,)).unpack(self._receive_sum(message, gradients((spec,)).nbytes))
        return shares

    def _receive_sum(self, message: Message, nbytes: int) -> Tensor:
        self._transport.post(message, nbytes)
        return self._transport.receive(message)

    def _message(self, number: int, stage: int, peer: int) -> Message:
        name = f"gradient of tied {self._tied[number][stage]} of stage {stage}"
        return Message(name, peer, _TIED_TAGS + number * len(self._placement) + stage)

    def _check(self, copies: Tied) -> None:
        here = []
        for stage, name in copies.items():
            if not 0 <= stage < len(self._placement):
                raise TiedError(f"tied {name}: there is no stage {stage}, stages are 0..{len(self._placement) - 1}")
            if stage not in self._modules:
                continue
            parameter = dict(self._modules[stage].named_parameters(remove_duplicate=False)).get(name)
            if parameter is None:
                raise TiedError(f"tied {name}: stage {stage} has no parameter of that name")
            if isinstance(parameter, InShards):
                raise TiedError(f"tied {name}: stage {stage} has it in shards: leave tied ones out of fully_shard")
            here.append(parameter)
        if len({id(parameter) for parameter in here}) < len(here):
            raise TiedError(
                f"tied {dict(copies)}: one tensor serves several stages of this rank, so their gradients are summed "
                "already; leave it undeclared, or give each stage a copy"
            )


def norm_of(squares: Sequence[float]) -> float:
    """The 2-norm from sums of squares; exactly rounded addition makes it independent of the split into stages."""
    return math.sqrt(math.fsum(squares))


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor that limits a gradient norm to ``max_norm``, as in ``clip_grad_norm_``.

    A norm that is not a number gives a factor that is none: silence would let unclipped gradients through.
    """
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor


def _whole(norms: Sequence[Tensor]) -> list[Tensor]:
    """``norms`` over all shards of each tensor: one sum for each mesh."""
    by_mesh: dict[object, list[int]] = {}
    for k, norm in enumerate(norms):
        by_mesh.setdefault(norm.device_mesh if isinstance(norm, InShards) else None, []).append(k)
    found = dict[int, Tensor]()
    for those in by_mesh.values():
        together = torch.stack([norms[k] for k in those])
        found |= zip(those, together.full_tensor() if isinstance(together, InShards) else together, strict=True)
    return [found[k] for k in range(len(norms))]


def _text(spec: TensorSpec) -> str:
    frozen = "" if spec.requires_grad else ", frozen"
    return f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}{frozen}"


def _sum(shares: Sequence[Tensor]) -> Tensor | None:
    if not shares:
        return None
    total = shares[0].clone()
    for share in shares[1:]:
        total += share
    return total
