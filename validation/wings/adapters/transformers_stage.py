"""A stage of a transformers causal language model: embedding, some layers, norm and head, under their own names.

The model's own forward runs in every stage, and makes masks and rotary embeddings, without layers of other stages.
Legend: B rows, T tokens, C width, N words.
"""

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipeproof.wings.adapters.framework import AdapterError
from pipeproof.wings.adapters.transformers_whole import TRANSFORMERS

# Those in which nothing but embeddings comes before the layers, and nothing but a norm after them, in the order in
# which they were made. Others have a plan in their config, in which order.
_IN_ORDER = ("gpt2", "gpt_bigcode", "nemotron", "stablelm")


class Stage(nn.Module):
    """Stage ``number`` of ``of``, with modules of ``model`` and so its parameters, under the same names.

    model: a causal language model. layers: first and last layer, the latter excluded; None: an even cut, with one more
    for the first stages if needed. inputs: names of the model's further inputs. Stages pass these on, so a runtime that
    sends only tensors works. Keyword inputs are not passed on.

    Call it with input_ids [B, T] or the previous stage's output [B, T, C]; it returns [B, T, C], the last stage logits
    [B, T, N]. Raises ``AdapterError`` for a model that it cannot cut.
    """

    def __init__(
        self,
        model: Any,
        number: int,
        of: int,
        *,
        layers: tuple[int, int] | None = None,
        inputs: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if not 0 <= number < of:
            raise AdapterError(f"stage {number} of {of}: expected a number from 0 to {of - 1}")
        body = _body_of(model)
        count = model.config.num_hidden_layers
        lists = ((name, one) for name, one in body.named_children() if isinstance(one, nn.ModuleList))
        name, every = next(((name, one) for name, one in lists if len(one) == count), ("", nn.ModuleList()))
        if not name:
            raise AdapterError(
                f"{type(body).__name__} has no list of its {count} layers: give validate your own stages"
            )
        first, last = _even(len(every), number, of) if layers is None else layers
        if not 0 <= first <= last <= len(every):
            raise AdapterError(f"layers is {layers}: expected from and to, within 0 and {len(every)}")
        if number and not first:
            raise AdapterError(
                f"stage {number} begins with layer 0: let stage 0 have a layer too, for models may scale an embedding"
            )
        self.is_first, self.is_last = number == 0, number == of - 1
        self._inputs = tuple(inputs)
        self._received: Tensor | None = None
        own = _shallow(body)
        others = [_LeftOut(self) if k < first else _AsItIs() for k in range(len(every))]
        own._modules[name] = nn.ModuleList([*others[:first], *every[first:last], *others[last:]])
        before, after = _around(model, body, name)
        own._modules |= {} if self.is_first else {one: _NoEmbedding() for one in before}
        own._modules |= {} if self.is_last else {one: _AsItIs() for one in after}
        whole = _with(model, body, own)
        if not self.is_last:  # it has no head, unless that is part of the body
            head = model.get_output_embeddings()
            whole._modules = {name: one for name, one in whole._modules.items() if one is not head}
        self._modules = whole._modules
        self._whole, self._body = [whole], [own]  # in lists, to keep them from becoming submodules

    def forward(self, given: Tensor, *others: Tensor, **named: Any) -> Any:
        named |= dict(zip(self._inputs, others, strict=True))
        run = self._whole[0] if self.is_last else self._body[0]
        self._received = None if self.is_first else given
        try:
            made = run(**{"input_ids" if self.is_first else "inputs_embeds": given}, **named, use_cache=False)
        finally:
            self._received = None
        output = made.logits if self.is_last else made.last_hidden_state
        return (output, *others) if others and not self.is_last else output

    def train(self, mode: bool = True) -> Self:
        """Set the mode, also for parts of the model outside its modules."""
        for part in (*self._whole, *self._body):
            part.training = mode
        return super().train(mode)


class _LeftOut(nn.Module):
    """Replaces a layer before this stage's: returns the stage's input.

    The model may have scaled what it took for an embedding, or added to it: that is not handed on.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = [stage]

    def forward(self, *_: Any, **__: Any) -> Tensor | None:
        return self._stage[0]._received


class _NoEmbedding(nn.Module):
    """Replaces an embedding computed by another stage."""

    def forward(self, places: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(*places.shape, 1, device=places.device)


class _AsItIs(nn.Module):
    """Replaces a layer or norm behind this stage's layers with the identity."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


def _body_of(model: Any) -> Any:
    """Return the model without its head."""
    if not isinstance(model, TRANSFORMERS.module().PreTrainedModel):
        raise AdapterError(f"model is a {type(model).__name__}: expected a causal language model of transformers'")
    kind, config = model.config.model_type, model.config
    plan = getattr(config, "base_model_pp_plan", None)
    if (not plan and kind not in _IN_ORDER) or config.is_encoder_decoder or model.get_output_embeddings() is None:
        raise AdapterError(
            f"{type(model).__name__} is no causal language model with a base_model_pp_plan: Stage cannot cut it, so "
            "give validate stages of your own"
        )
    return model.get_decoder()


def _even(layers: int, number: int, of: int) -> tuple[int, int]:
    """Return the range of layers in an even cut, end excluded; the first stages get the rest."""
    if of > layers:
        raise AdapterError(f"{of} stages of {layers} layers: expected at most as many stages as layers")
    each, more = divmod(layers, of)
    first = number * each + min(number, more)
    return first, first + each + (number < more)


def _around(model: Any, body: nn.Module, layers: str) -> tuple[list[str], list[str]]:
    """Return the modules before the layers, and the modules after them."""
    plan = getattr(model.config, "base_model_pp_plan", None)
    names = list(plan) if plan else [name for name, one in body.named_children() if any(True for _ in one.parameters())]
    at = names.index(layers)
    return names[:at], names[at + 1 :]


def _shallow(module: Any) -> Any:
    """Return a shallow copy of a module, with a separate table of the same modules."""
    made = copy.copy(module)
    made.__dict__["_modules"] = dict(module._modules)
    return made


def _with(whole: Any, part: nn.Module, by: nn.Module) -> Any:
    """Return ``whole`` with ``by`` in place of ``part``, sharing everything else."""
    if whole is part:
        return by
    made = _shallow(whole)
    for name, module in whole.named_children():
        if any(one is part for one in module.modules()):
            made._modules[name] = _with(module, part, by)
    return made
