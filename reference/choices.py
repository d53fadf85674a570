"""Which of several are chosen by their scores, as a router's experts are: seen, and chosen otherwise where told so.

Routers differ in all but this: they call ``topk``, ``argmax`` or ``max`` on scores, and go by the indices. So it is
these calls that are looked at, wherever they are made while a router's forward runs.

Legend: T tokens, or whatever else something is chosen for; E that are chosen among; K that are chosen.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# The arguments of operations that choose, with what stands for those that are not given.
_ARGUMENTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "topk": {"input": None, "k": None, "dim": -1, "largest": True},
        "argmax": {"input": None, "dim": None},
        "max": {"input": None, "dim": None},
    }
)
Chosen = Sequence[Tensor]  # what a router chose, call by call: (T, K)


@dataclass(frozen=True)
class Choice:
    """One choice: by which ``scores_TE``, and the indices ``chosen_TK``; ``own_TK`` are those that the scores say.

    of_tokens: it is made along the dimension whose elements lie side by side, as that of experts is. Along another one,
    experts choose tokens.
    of_values: it may have been made for the largest score alone, as ``max`` is before a softmax.
    """

    scores_TE: Tensor
    chosen_TK: Tensor
    own_TK: Tensor
    of_tokens: bool = True
    of_values: bool = False

    def short_T(self, seen_TK: Tensor) -> Tensor:
        """By how much the least of ``seen_TK`` is below the largest that is not among them; 0 where it is not below."""
        scores_TE = self.scores_TE.double()
        least_T = scores_TE.gather(-1, seen_TK).amin(-1)
        left_T = scores_TE.scatter(-1, seen_TK, -torch.inf).amax(-1)
        return torch.where(left_T > least_T, left_T - least_T, 0.0)

    def for_tokens(self, tokens: int) -> "Choice":
        """The same, made for so many tokens, or among them, where their number tells which; 0: nobody knows it."""
        fits = [bool(tokens) and size % tokens == 0 for size in self.scores_TE.shape]
        return self if fits[0] == fits[1] else replace(self, of_tokens=fits[0])


def same_T(one_TK: Tensor, other_TK: Tensor) -> Tensor:
    """For which tokens the same are chosen, in whatever order."""
    return (one_TK.sort(dim=-1).values == other_TK.sort(dim=-1).values).all(dim=-1)


def of_experts(choices: Sequence[Choice]) -> list[int]:
    """The numbers of those of a router by which tokens get their experts, the last of them last; none: experts choose.

    They are made by scores, and among the most. Others choose groups of experts, or places in an expert's capacity.
    """
    own = [number for number, one in enumerate(choices) if one.of_tokens and one.scores_TE.is_floating_point()]
    own = [number for number in own if not choices[number].of_values] or own
    largest = max((choices[number].scores_TE.shape[-1] for number in own), default=0)
    own = [number for number in own if choices[number].scores_TE.shape[-1] == largest]
    return [number for number in own if len(choices[number].own_TK) == len(choices[own[-1]].own_TK)]


Choices = Mapping[str, Sequence[Choice]]  # by the name of the router, in the order in which it made them


@dataclass(frozen=True)
class Routers:
    """Modules that choose, by ``names``: whole ones, their endings, or patterns of either, as ``layers.*.router``.

    ``told``: what they are to choose in place of what their scores say, by the whole name.
    """

    names: tuple[str, ...] = ()
    told: Mapping[str, Chosen] = field(default_factory=dict)

    def following(self, choices: Choices) -> "Routers":
        """The same, where routers are to choose as they did there."""
        return replace(self, told={name: [one.chosen_TK for one in every] for name, every in choices.items()})

    def among(self, model: nn.Module) -> dict[nn.Module, str]:
        """Those that ``model`` has."""
        return {module: name for name, module in model.named_modules() if self.has(name)}

    def has(self, name: str) -> bool:
        """Whether a module of this name is one."""
        return any(fnmatchcase(f".{name}", f"*.{ending}") for ending in self.names)


class Choosing(TorchDispatchMode):  # type: ignore[no-untyped-call]  # in torch
    """While it is open, ``look`` is told of each choice, and gives what is to be chosen in its place.

    It stands below autograd, so that the choice is the operation's own result, whose backward goes by it, and so that
    what a backward computes again is seen, too.
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
    """A call that chooses: among ``scores`` along ``dim``, these ``indices``, which have that dimension.

    single: the result has it not. values: it has the chosen scores, too. name: the operation's.
    """

    scores: Tensor
    dim: int
    indices: Tensor
    single: bool
    values: bool
    name: str

    @classmethod
    def of(cls, func: Any, made: Any, given: Sequence[Any], named: Mapping[str, Any]) -> "Pick | None":
        """The call of ``func``, which ``made`` that; None where it is no choice, such as that of the largest of all."""
        name = getattr(func, "__name__", "").partition(".")[0]
        if name not in _ARGUMENTS:
            return None
        told = {**_ARGUMENTS[name], **dict(zip(_ARGUMENTS[name], given, strict=False)), **named}
        scores, dim, values = told["input"], told.get("axis", told["dim"]), isinstance(made, tuple)
        least = told.get("largest") is False
        if least or not isinstance(scores, Tensor) or not isinstance(dim, int) or not scores.dim():
            return None
        indices = made[1] if values else made
        single = indices.dim() < scores.dim()
        return cls(scores, dim % scores.dim(), indices.unsqueeze(dim) if single else indices, single, values, name)

    @property
    def choice(self) -> Choice:
        """It, as its scores say."""
        own_TK, strides = self.rows(self.indices), zip(self.scores.stride(), self.scores.shape, strict=True)
        # Scores may have been transposed.
        innermost = all(self.scores.stride(self.dim) <= stride for stride, size in strides if size > 1 and stride)
        return Choice(self.rows(self.scores), own_TK, own_TK, innermost, self.name == "max")

    def rows(self, tensor: Tensor) -> Tensor:
        """``tensor`` with what is chosen along its last dimension, and all others together before it. Detached."""
        moved = tensor.detach().movedim(self.dim, -1)
        return moved.reshape(-1, moved.shape[-1])

    def giving(self, chosen_TK: Tensor) -> Any:
        """What the call gives where these are chosen."""
        indices = chosen_TK.reshape(self.indices.movedim(self.dim, -1).shape).movedim(-1, self.dim).contiguous()
        both = [self.scores.gather(self.dim, indices), indices]
        values, indices = [one.squeeze(self.dim) for one in both] if self.single else both
        return (values, indices) if self.values else indices


def running() -> list[nn.Module]:
    """The modules of which a method is running, the outermost first: who called whom is all that a hook would say."""
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
    """While it is open, the routers of ``model`` choose as they are told; gives all choices of one forward.

    What a backward computes again chooses as the forward did. Without routers nothing is looked at.
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
        if in_backward():
            again = (one for every in found.values() for one in every if torch.equal(one.scores_TE, own.scores_TE))
            return next(again, own).chosen_TK
        router = next((one for one in running if one in named), None)
        if router is None:
            return own.own_TK
        name = named[router]
        made, told = found.setdefault(name, []), routers.told.get(name, ())
        wanted = told[len(made)].to(own.own_TK) if len(made) < len(told) else own.own_TK
        kept = replace(own, scores_TE=own.scores_TE.clone(), chosen_TK=wanted)
        made.append(kept.for_tokens(tokens.get(router, 0)))
        return wanted

    hooks = [router.register_forward_pre_hook(enters, with_kwargs=True) for router in named]
    try:
        with Choosing(look):
            yield found
    finally:
        for hook in hooks:
            hook.remove()


def in_backward() -> bool:
    """Whether a backward runs in this thread, which computes a forward again."""
    return torch._C._current_graph_task_id() != -1
