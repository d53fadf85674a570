"""The reference of a step of torchtitan's: the whole model on one rank, and torchtitan's own loss of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.foreign.frameworks.framework import Framework, Packed
from pipeproof.foreign.task import WhiteBoxError

CHILD = "model"  # what the reference calls the whole model
TitanBatch = tuple[Mapping[str, Tensor], Tensor]  # as a dataloader of torchtitan's gives it: input_dict, labels
LossFunction = Callable[..., Any]


class TorchtitanError(WhiteBoxError):
    """Torchtitan is missing, of a version that is not known, or used in a way that is not covered."""


TORCHTITAN = Framework(
    "torchtitan",
    "torchtitan",
    "pipeproof.torchtitan",
    ("0.3",),
    "pip install torchtitan==0.3.0 triton",
    TorchtitanError,
    child=CHILD,
)


def packed(microbatches: Sequence[TitanBatch]) -> Packed:
    """How to pack their inputs. Raises ``TorchtitanError`` for what no dataloader of torchtitan's gives."""
    for number, one in enumerate(microbatches):
        _check(number, one)
    return Packed.of([given for given, _ in microbatches], first="input", error=TorchtitanError)


def tokens_in(labels: Iterable[Any]) -> int:
    """How many labels count. Raises ``TorchtitanError`` if none does."""
    ignored = TORCHTITAN.module("components.loss").IGNORE_INDEX
    if not (tokens := sum(int((one != ignored).sum()) for one in labels)):
        raise TorchtitanError(f"every label is {ignored}, which the loss ignores: expected one that counts")
    return tokens


def _check(number: int, microbatch: Any) -> None:
    pair = isinstance(microbatch, tuple | list) and len(microbatch) == 2
    if not pair or not isinstance(microbatch[0], Mapping) or "input" not in microbatch[0]:
        raise TorchtitanError(
            f"microbatch {number} is a {type(microbatch).__name__}: expected a pair of input_dict, which has an "
            "input, and labels, as torchtitan's dataloader gives it"
        )


@dataclass(frozen=True)
class UnitLoss:
    """The loss that torchtitan differentiates: a sum over tokens, divided by those that count in all of the step."""

    loss_fn: LossFunction
    tokens: int

    def __call__(self, output: Any, labels: Tensor) -> Tensor:
        result = self.loss_fn(output, labels, torch.tensor(self.tokens, device=labels.device))
        if not isinstance(result, tuple) or len(result) != 2:
            raise TorchtitanError(
                f"loss_fn returned a {type(result).__name__}: expected (loss, metrics), as torchtitan's losses return"
            )
        loss: Tensor = result[0]
        return loss


class WholeTorchTitan(nn.Module):
    """The whole model; called with the inputs of a packed microbatch."""

    def __init__(self, build: Callable[[], nn.Module], names: Sequence[str]) -> None:
        super().__init__()
        model = TORCHTITAN.built(build)
        if not isinstance(model, nn.Module):
            raise TorchtitanError(f"the reference is a {type(model).__name__}: expected the whole model, as built")
        check_model(model)
        self.model = model
        self._names = names

    def forward(self, first: Tensor, *others: Tensor) -> Any:
        named = dict(zip(self._names, others, strict=True))
        return self.model(first, **named, **self._masks(named))

    def _masks(self, named: Mapping[str, Tensor]) -> dict[str, Any]:
        """Those that the trainer makes of positions for this kind of attention."""
        attention = getattr(getattr(self.model, "config", None), "first_attention", None)
        inner = getattr(attention, "inner_attention", None)
        if inner is None or "positions" not in named:
            return {}
        place = TORCHTITAN.module("models.common.attention")
        if not isinstance(inner, place.FlexAttention.Config | place.VarlenAttention.Config):
            return {}
        model: Any = self.model
        return {"attention_masks": model.get_attention_masks(positions=named["positions"])}


def check_loss(loss_fn: Any) -> None:
    """Raise ``TorchtitanError`` for a loss function that is not covered."""
    if not callable(loss_fn):
        raise TorchtitanError(f"loss_fn is a {type(loss_fn).__name__}: expected what pipeline_llm is given")
    if isinstance(loss_fn, TORCHTITAN.module("components.loss").ChunkedLossWrapper):
        raise TorchtitanError("loss_fn is a ChunkedLossWrapper: use the loss in it for the check, CrossEntropyLoss say")


def check_model(model: nn.Module) -> None:
    """Raise ``TorchtitanError`` for a model that would be judged wrongly."""
    experts = TORCHTITAN.module("models.common.moe").MoE
    for name, module in model.named_modules():
        if isinstance(module, experts):
            raise TorchtitanError(f"{name} has experts: {TORCHTITAN.adapter} covers dense models only")
    TORCHTITAN.check_dropout(model)
