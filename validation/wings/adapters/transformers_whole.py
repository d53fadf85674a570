"""The reference for a transformers causal language model's step: the model on one rank, and its own loss."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipeproof.core.contract import Contract
from pipeproof.reference.data import IGNORED
from pipeproof.whitebox.task import LossOfAll
from pipeproof.wings.adapters.framework import AdapterError, Framework
from pipeproof.wings.adapters.whole import Packed, Whole, by_name
from pipeproof.worlds.settings import drawing_apart

HfBatch = Mapping[str, Any]  # as a data collator gives it: input_ids, labels, attention_mask, position_ids
_NO_TEXT = ("pixel_values", "input_features", "input_values", "inputs_embeds")
_LOSSES = ("tokens", "mean")


TRANSFORMERS = Framework(
    "transformers",
    "transformers",
    ("5",),
    "pip install transformers==5.23.0 accelerate==1.15.0",
    axes=(),
    own=(),  # its models keep nothing of a rank's
    wrappers=("module", "_checkpoint_wrapped_module", "_orig_mod"),  # of DDP, recomputation and torch.compile
)


def whole_of(reference: Callable[..., Any], microbatches: Sequence[HfBatch], loss: str, model: Any = None) -> Whole:
    """Return the whole model with its own loss, or the loss of ``model``. Raises for data without labels."""
    by = divisor(loss)
    for number, one in enumerate(microbatches):
        _check(number, one)
    inputs = [
        by_name({name: one for name, one in given.items() if name != "labels" and one is not None}, "input_ids")
        for given in microbatches
    ]
    packed = Packed.of(inputs)
    build = partial(WholeTransformers, reference, packed)

    def of_all(every: Sequence[tuple[Any, Tensor]]) -> CausalLoss:
        return CausalLoss.of(build().itself if model is None else model, [labels for _, labels in every], loss)

    def given(one: tuple[Any, Tensor]) -> dict[str, Any]:
        return {**packed.unpack(one[0]), "labels": one[1]}

    pairs = [(packed.pack(own), one["labels"]) for own, one in zip(inputs, microbatches, strict=True)]
    return Whole(reference, build, pairs, LossOfAll(of_all), Contract(loss_divisor=by), given, attrgetter("itself"))


def _check(number: int, microbatch: Any) -> None:
    if not isinstance(microbatch, Mapping) or not {"input_ids", "labels"} <= set(microbatch):
        found = f"has {', '.join(map(str, microbatch))}" if isinstance(microbatch, Mapping) else ""
        raise AdapterError(
            f"microbatch {number} {found or 'is a ' + type(microbatch).__name__}: expected a mapping with input_ids "
            "and labels, as a data collator gives it"
        )
    for name, value in microbatch.items():
        if name in _NO_TEXT:
            raise AdapterError(f"microbatch {number} has {name}: {TRANSFORMERS.adapter} covers text only")
        if value is not None and not isinstance(value, Tensor):
            raise AdapterError(f"microbatch {number} has a {type(value).__name__} as {name}: expected a tensor")
    for name, why in (
        ("past_key_values", "a cache serves generation, so leave it out"),
        ("shift_labels", "the model shifts labels itself, so give labels alone"),
    ):
        if microbatch.get(name) is not None:
            raise AdapterError(f"microbatch {number} has {name}: {why}")


def tokens_in(labels: Iterable[Any]) -> int:
    """How many labels count: the model shifts them, so the first of each row does not. Raises if none does."""
    if not (tokens := sum(int((one[..., 1:] != IGNORED).sum()) for one in labels)):
        raise AdapterError(f"no label counts: each is {IGNORED} or the first of its row; expected one that counts")
    return tokens


@dataclass(frozen=True)
class CausalLoss:
    """The model's own loss: a sum over tokens, divided by ``tokens``, or the microbatch's mean."""

    function: Callable[..., Tensor]
    vocabulary: int
    tokens: int | None

    @classmethod
    def of(cls, model: Any, labels: Iterable[Any], loss: str) -> "CausalLoss":
        """Return the loss of ``model`` for a step with all these labels."""
        tokens = tokens_in(labels)
        return cls(model.loss_function, model.config.vocab_size, tokens if loss == "tokens" else None)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        named = {} if self.tokens is None else {"num_items_in_batch": self.tokens}
        return self.function(logits=logits, labels=labels, vocab_size=self.vocabulary, **named)


def divisor(loss: str) -> float | None:
    """Return the divisor of each microbatch's ``CausalLoss``; None: their number."""
    if loss not in _LOSSES:
        raise AdapterError(
            f"loss is {loss!r}: expected 'tokens', the mean over all tokens of the step, or 'mean', the mean over "
            "microbatches of each one's mean"
        )
    return 1.0 if loss == "tokens" else None


class WholeTransformers(nn.Module):
    """The whole model, with its own names; maps inputs of a packed microbatch to logits."""

    def __init__(self, build: Callable[[], Any], packed: Packed) -> None:
        super().__init__()
        model = TRANSFORMERS.build(build)
        check_model(model)
        _check_loss(model)
        self._modules = model._modules
        self._itself = [model]  # in a list, to keep it from becoming a submodule
        self._packed = packed

    @property
    def itself(self) -> Any:
        """The model that owns these modules."""
        return self._itself[0]

    def train(self, mode: bool = True) -> Self:
        """Set the mode, also for the model."""
        self.itself.training = mode
        return super().train(mode)

    def forward(self, *tensors: Tensor) -> Tensor:
        logits: Tensor = self.itself(**self._packed.unpack(tensors), use_cache=False).logits
        return logits


def check_model(model: Any) -> None:
    """Raise ``AdapterError`` for an unsupported model."""
    known = TRANSFORMERS.module().PreTrainedModel
    TRANSFORMERS.expect("the reference", model, known, "a model of transformers'")
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder:
        raise AdapterError(f"{name} has an encoder and a decoder: {TRANSFORMERS.adapter} covers causal models")
    causal = TRANSFORMERS.module("loss.loss_utils").ForCausalLMLoss
    if model.loss_function is not causal or getattr(config, "vision_config", None):
        raise AdapterError(
            f"{name} has another loss than that of a causal language model: {TRANSFORMERS.adapter} covers that alone"
        )
    for where, module in model.named_modules():
        for attribute, rate in vars(module).items():
            of_dropout = attribute == "p" and isinstance(module, nn.modules.dropout._DropoutNd)
            if (of_dropout or "drop" in attribute) and isinstance(rate, float) and rate > 0:
                raise AdapterError(f"{where}.{attribute} is {rate}: set it to 0 for the check, in the config")


def _check_loss(model: Any) -> None:
    """Raise ``AdapterError`` if the model adds terms to its loss, as routers do."""
    words = torch.zeros(1, 4, dtype=torch.long, device=next(model.parameters()).device)
    with torch.no_grad(), drawing_apart():
        output = model(input_ids=words, attention_mask=torch.ones_like(words), labels=words, use_cache=False)
        own = CausalLoss(model.loss_function, model.config.vocab_size, None)(output.logits, words)
    if not torch.equal(output.loss, own) and not (output.loss.isnan() and own.isnan()):
        raise AdapterError(
            f"{type(model).__name__} gives a loss of {float(output.loss):.6g}, its loss function {float(own):.6g} of "
            "the same logits: switch off what it adds, as output_router_logits=False in the config does"
        )
