"""Choices by scores, like a router's experts: observed, and replaced on request.

Routers differ in all but this: they call ``topk``, ``argmax`` or ``max`` on scores, and go by the indices. So these
calls are watched, wherever they happen during a router's forward.

Legend: T tokens, or other choosers; E options; K chosen ones.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeproof.reference.graph import is_inside_a_backward

# Arguments of choosing operations, with their defaults.
_ARGUMENTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "topk": {"input": None, "k": None, "dim": -1, "largest": True},
        "argmax": {"input": None, "dim": None},
        "max": {"input": None, "dim": None},
    }
)
Chosen = Sequence[Tensor]  # a router's choices, call by call: (T, K)


@dataclass(frozen=True)
class Choice:
    """One choice: ``scores_TE``, and the indices ``chosen_TK``; ``own_TK`` follow from the scores.

    of_tokens: made along the innermost dimension, as of experts. Along another one, experts choose tokens. of_values:
    perhaps made for the largest score alone, as ``max`` before a softmax.
    """

    scores_TE: Tensor
    chosen_TK: Tensor
    own_TK: Tensor
    of_tokens: bool = True
    of_values: bool = False

    def short_T(self, observed_TK: Tensor) -> Tensor:
        """Measure how far ``observed_TK`` falls below the largest score outside it; else 0."""
        scores_TE = self.scores_TE.double()
        least_T = scores_TE.gather(-1, observed_TK).amin(-1)
        left_T = scores_TE.scatter(-1, observed_TK, -torch.inf).amax(-1)
        return torch.where(left_T > least_T, left_T - least_T, 0.0)

    def for_tokens(self, tokens: int) -> "Choice":
        """Decide by the number of tokens whether tokens chose, or experts; 0: unknown."""
        fits = [bool(tokens) and size % tokens == 0 for size in self.scores_TE.shape]
        return self if fits[0] == fits[1] else replace(self, of_tokens=fits[0])


def same_T(one_TK: Tensor, other_TK: Tensor) -> Tensor:
    """Mask tokens with equal choices, in any order."""
    return (one_TK.sort(dim=-1).values == other_TK.sort(dim=-1).values).all(dim=-1)


def of_experts(choices: Sequence[Choice]) -> list[int]:
    """Number a router's choices that give tokens their experts, in order; empty if experts choose.

    They use scores, among the most options. Others choose groups of experts, or places in an expert's capacity.
    """
    own = [number for number, one in enumerate(choices) if one.of_tokens and one.scores_TE.is_floating_point()]
    own = [number for number in own if not choices[number].of_values] or own
    largest = max((choices[number].scores_TE.shape[-1] for number in own), default=0)
    own = [number for number in own if choices[number].scores_TE.shape[-1] == largest]
    return [number for number in own if len(choices[number].own_TK) == len(choices[own[-1]].own_TK)]


Choices = Mapping[str, Sequence[Choice]]  # by the name of the router, in the order in which it made them


@dataclass(frozen=True)
class Routers:
    """Modules that choose, by ``names``: whole, as endings, or as patterns, like ``layers.*.router``.

    ``imposed``: choices to impose in place of the scores', by whole name.
    """

    names: tuple[str, ...] = ()
    imposed: Mapping[str, Chosen] = field(default_factory=dict)

    def following(self, choices: Choices) -> "Routers":
        """Make routers repeat ``choices``."""
        return replace(self, imposed={name: [one.chosen_TK for one in every] for name, every in choices.items()})

    def among(self, model: nn.Module) -> dict[nn.Module, str]:
        """Routers in ``model``, with their names."""
        return {module: name for name, module in model.named_modules() if self.has(name)}

    def has(self, name: str) -> bool:
        """True if ``name`` matches a router."""
        return any(fnmatchcase(f".{name}", f"*.{ending}") for ending in self.names)


class Choosing(TorchDispatchMode):  # type: ignore[no-untyped-call]  # in torch
    """Call ``look`` for each choice, and use its answer instead.

    It stands below autograd, so that the choice is the operation's own result, whose backward goes by it, and so that
    recomputation in a backward is observed, too.
    """

    supports_higher_order_operators = True

    def __init__(self, look: Callable[[Sequence[nn.Module], Choice], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # in torch
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, *given: Any) -> Any:
        args, kwargs = (*given, {})[:2]  # by name there may be none
        made = func(*args, **(kwargs or {}))
        call = Pick.of(func, made, args, kwargs or {})
        if call is None:
            return made
        chosen_TK = self._look(running(), call.choice)
        return made if torch.equal(chosen_TK, call.choice.own_TK) else call.giving(chosen_TK)


@dataclass(frozen=True)
class Pick:
    """A choosing call: ``indices`` among ``scores`` along ``dim``, with that dimension.

    single: the result lacks it. values: it has the chosen scores, too. name: the operation's.
    """

    scores: Tensor
    dim: int
    indices: Tensor
    single: bool
    values: bool
    name: str

    @classmethod
    def of(cls, func: Any, made: Any, given: Sequence[Any], named: Mapping[str, Any]) -> "Pick | None":
        """Recognise a choosing call from ``func`` and its result; None for anything else, like the overall maximum."""
        name = getattr(func, "__name__", "").partition(".")[0]
        if name not in _ARGUMENTS:
            return None
        arguments = {**_ARGUMENTS[name], **dict(zip(_ARGUMENTS[name], given, strict=False)), **named}
        scores, dim, values = arguments["input"], arguments.get("axis", arguments["dim"]), isinstance(made, tuple)
        least = arguments.get("largest") is False
        if least or not isinstance(scores, Tensor) or not isinstance(dim, int) or not scores.dim():
            return None
        indices = made[1] if values else made
        single = indices.dim() < scores.dim()
        return cls(scores, dim % scores.dim(), indices.unsqueeze(dim) if single else indices, single, values, name)

    @property
    def choice(self) -> Choice:
        """The choice by its scores."""
        own_TK, strides = self.rows(self.indices), zip(self.scores.stride(), self.scores.shape, strict=True)
        # Scores may have been transposed.
        innermost = all(self.scores.stride(self.dim) <= stride for stride, size in strides if size > 1 and stride)
        return Choice(self.rows(self.scores), own_TK, own_TK, innermost, self.name == "max")

    def rows(self, tensor: Tensor) -> Tensor:
        """Move options to the last dimension, and flatten the rest before it. Detached."""
        moved = tensor.detach().movedim(self.dim, -1)
        return moved.reshape(-1, moved.shape[-1])

    def giving(self, chosen_TK: Tensor) -> Any:
        """The call's result for these choices."""
        indices = chosen_TK.reshape(self.indices.movedim(self.dim, -1).shape).movedim(-1, self.dim).contiguous()
        both = [self.scores.gather(self.dim, indices), indices]
        values, indices = [one.squeeze(self.dim) for one in both] if self.single else both
        return (values, indices) if self.values else indices


def running() -> list[nn.Module]:
    """Modules with a running method, outermost first: the caller's stack, as far as hooks could show it."""
    found: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        of = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(of, nn.Module) and not (found and found[-1] is of):
            found.append(of)
        frame = frame.f_back
    return found[::-1]


@contextmanager
def choosing(model: nn.Module, routers: Routers | None) -> Iterator[dict[str, list[Choice]]]:
    """Make a model's routers choose as requested; yield all choices in a forward.

    Recomputation in a backward repeats the forward's choices. Without routers nothing is watched.
    """
    found: dict[str, list[Choice]] = {}
    if routers is None:
        yield found
        return
    named, tokens = routers.among(model), dict[nn.Module, int]()

    def enters(router: nn.Module, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        given = next((one for one in (*args, *named.values()) if isinstance(one, Tensor) and one.dim() > 1), None)
        tokens[router] = 0 if given is None else given.shape[:-1].numel()

    def look(running: Sequence[nn.Module], own: Choice) -> Tensor:
        if is_inside_a_backward():
            again = (one for every in found.values() for one in every if torch.equal(one.scores_TE, own.scores_TE))
            return next(again, own).chosen_TK
        router = next((one for one in running if one in named), None)
        if router is None:
            return own.own_TK
        name = named[router]
        made, imposed = found.setdefault(name, []), routers.imposed.get(name, ())
        wanted = imposed[len(made)].to(own.own_TK) if len(made) < len(imposed) else own.own_TK
        kept = replace(own, scores_TE=own.scores_TE.clone(), chosen_TK=wanted)
        made.append(kept.for_tokens(tokens.get(router, 0)))
        return wanted

    with ExitStack() as hooks:
        for one in named:
            hooks.enter_context(one.register_forward_pre_hook(enters, with_kwargs=True))
        hooks.enter_context(Choosing(look))
        yield found
