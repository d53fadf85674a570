"""The smallest faults of a training step: what each would do to the gradients.

They are made from the reference alone, without ranks: a fault is the right sum of contributions with something wrong.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from pipeproof.reference.data import IGNORED, Batch
from pipeproof.reference.model import LossFn, Model
from pipeproof.reference.step import Contribution, Recipe, Reference, Site, objective

Total = Mapping[Site, Tensor | None]
NARROW = torch.bfloat16
_WRONG = 1 / 4096  # by which part of itself one token's loss weighs too much


@dataclass(frozen=True)
class Step:
    """One training step of ``reference`` on ``batches``; ``owner`` maps every parameter name to its stage."""

    reference: Reference
    owner: Mapping[str, int]
    batches: Sequence[Batch]
    recipe: Recipe

    @cached_property
    def contributions(self) -> tuple[Contribution, ...]:
        return tuple(self.contribution(microbatch) for microbatch in range(len(self.batches)))

    @cached_property
    def right(self) -> Total:
        """The gradients that this step must give."""
        return self.total(self.contributions)

    @property
    def model(self) -> Model:
        assert isinstance(self.reference.model, Model), "faults are made in models of ours, whose layers are known"
        return self.reference.model

    @property
    def stages(self) -> range:
        return range(max(self.owner.values()) + 1)

    def total(self, contributions: Sequence[Contribution], *, without: int | None = None) -> Total:
        """The sum of ``contributions`` in order, those of microbatch ``without`` left out."""
        order = [microbatch for microbatch in range(len(contributions)) if microbatch != without]
        return self.reference.total(self.reference.accumulate(contributions, orders=dict.fromkeys(self.stages, order)))

    def contribution(
        self, microbatch: int, *, loss: Callable[[LossFn], LossFn] = lambda loss: loss, tokens: int = 0
    ) -> Contribution:
        """A microbatch's contribution, with another ``loss`` or with ``tokens`` more in what it is divided by."""
        loss_fn, divisor = objective(self.reference.model, self.batches, self.recipe)
        return self.reference.contribution(self.batches[microbatch], loss(loss_fn), divisor + tokens)


@dataclass(frozen=True)
class LeastFault:
    """A fault in several variants; ``totals`` gives what each leaves in place of the right gradients, in one order.

    ``rounds``: it is a rounding to bf16, and no fault where everything is bf16.
    """

    name: str
    summary: str
    totals: Callable[[Step], Iterator[Total]]
    rounds: bool = False


def _ends(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1})


def _token_weight(step: Step) -> Iterator[Total]:
    for microbatch in _ends(len(step.batches)):
        target = step.batches[microbatch].target
        counting = (target != IGNORED).nonzero().tolist() if not target.is_floating_point() else [[0], [-1]]
        for token in (counting[0], counting[-1]):
            where = tuple(slice(index, index + 1 or None) for index in token)
            yield step.total(_with(step, microbatch, step.contribution(microbatch, loss=_heavier(where))))


def _heavier(where: tuple[slice, ...]) -> Callable[[LossFn], LossFn]:
    def change(loss: LossFn) -> LossFn:
        def weighed(output: Tensor, target: Tensor) -> Tensor:
            full = output.to(torch.promote_types(output.dtype, torch.float32))  # losses are weighed in fp32 at least
            return loss(full, target) + _WRONG * loss(full[where], target[where])

        return weighed

    return change


def _divisor(step: Step) -> Iterator[Total]:
    yield step.total([step.contribution(microbatch, tokens=1) for microbatch in range(len(step.batches))])


def _norm_drops(step: Step) -> Iterator[Total]:
    norms = [name for name, module in step.reference.model.named_modules() if isinstance(module, nn.LayerNorm)]
    for norm in norms:
        own = {(step.owner[name], name) for name in (f"{norm}.weight", f"{norm}.bias")}
        parts = [replace(one, gradients={site: one.gradients[site] for site in own}) for one in step.contributions]
        for microbatch in range(len(parts)):
            kept = [part for number, part in enumerate(parts) if number != microbatch]
            yield {**step.right, **step.reference.accumulate(kept, orders=dict.fromkeys(step.stages, range(len(kept))))}


def _drops(step: Step) -> Iterator[Total]:
    for microbatch in range(len(step.batches)):
        yield step.total(step.contributions, without=microbatch)


def _narrow_boundary(step: Step) -> Iterator[Total]:
    model = step.model
    lasts = [max(layer for layer in range(len(model.layers)) if _stage(step, layer) == s) for s in step.stages[:-1]]
    for layer in lasts:
        for microbatch in _ends(len(step.batches)):
            with model.get_submodule(model.layers[layer][-1]).register_forward_hook(_round):
                wrong = step.contribution(microbatch)
            yield step.total(_with(step, microbatch, wrong))


def _stage(step: Step, layer: int) -> int:
    piece = step.model.layers[layer][-1]
    return next(stage for name, stage in step.owner.items() if name.startswith(f"{piece}."))


def _round(module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """Through bf16 and back, as is the gradient on its way down."""
    if isinstance(output, tuple):
        return tuple(_narrowed(tensor) for tensor in output)
    return _narrowed(output)


def _narrowed(tensor: Tensor) -> Tensor:
    return tensor.to(NARROW).to(tensor.dtype) if tensor.is_floating_point() else tensor


def _narrow_sum(step: Step) -> Iterator[Total]:
    orders = dict.fromkeys(step.stages, range(len(step.batches)))
    right = step.reference.accumulate(step.contributions, orders=orders)
    narrow = step.reference.accumulate([_narrow(one) for one in step.contributions], orders=orders)
    for stage in step.stages:
        own = {site: _like(narrow[site], gradient) for site, gradient in right.items() if site[0] == stage}
        yield step.reference.total({**right, **own})


def _narrow(one: Contribution) -> Contribution:
    return replace(one, gradients={site: g if g is None else g.to(NARROW) for site, g in one.gradients.items()})


def _like(gradient: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if gradient is None or other is None else gradient.to(other.dtype)


def _with(step: Step, microbatch: int, wrong: Contribution) -> list[Contribution]:
    return [wrong if number == microbatch else one for number, one in enumerate(step.contributions)]


FAULTS = (
    LeastFault("token weight", "one token's loss weighs 1/4096 too much", _token_weight),
    LeastFault("divisor", "the loss is divided by one token too many", _divisor),
    LeastFault("boundary bf16", "one microbatch crosses one boundary in bf16", _narrow_boundary, rounds=True),
    LeastFault("sum bf16", "one stage adds its gradients up in bf16", _narrow_sum, rounds=True),
    LeastFault("LayerNorm drop", "one LayerNorm misses one microbatch", _norm_drops),
    LeastFault("drop", "every parameter misses one microbatch", _drops),
)
