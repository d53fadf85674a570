"""What a step claims, where that differs from the defaults."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from pipeproof.pipeline.sizes import some
from pipeproof.reference.accumulation import Accumulation

OPERATIONS = ("train", "accumulate", "eval")
Names = Mapping[str, str] | Callable[..., str]
Outputs = Callable[[Any, Tensor], Mapping[str, Tensor]]  # of output and target, what is compared by its name


class ContractError(ValueError):
    """A word of a contract has a value that it cannot have, or nothing reads it there."""


@dataclass(frozen=True)
class Contract:
    """What a step claims. Every word has a default; say what differs from it.

    The contract is checked against what is observed, and never chosen to fit it.

    loss_divisor: a number above 0. Each microbatch's loss is divided by it before its backward. The default is the
    number of the operation's microbatches, in all replicas together. loss_scale: a number above 0, such as 1024. Losses
    are multiplied by it before their backwards, and gradients divided by it before they are handed back. The default is
    what the step hands back as ``HandedBack.loss_scale``, or else 1. accumulation: an ``Accumulation``, the type and
    the place in which gradients are added up. The default is what the step hands back, or else their own type, one
    microbatch after another. max_norm: a number above 0. Gradients are clipped to this norm before the update. The
    default is what the step hands back, or else no clipping. operations: what the step goes through, such as
    ``["train", "accumulate", "train", "eval"]``, each with as many microbatches; or with the number of its own, as in
    ``[("train", 4), ("eval", 2)]``, in all replicas together. ``step`` is then called once, with the model and an
    iterator of ``(operation, microbatches)``, and yields for each what a step hands back, before it clears gradients.
    The default is one training step. outputs: a function of output and target. It gives a mapping of names to tensors
    that are compared for each microbatch, too, such as ``{"logits": output}``; whole numbers exactly. A step hands back
    what it has of these as ``HandedBack.outputs``. routers: the modules that choose experts, by name, by how it ends,
    or by a pattern, such as ``"mlp.gate"``; several where step and reference call them otherwise. What these choose, by
    ``topk``, ``argmax`` or ``max`` in their forward, is compared token by token, and the reference follows the step
    where the two differ by rounding. names: what the step's parameters are called in the reference: prefixes and what
    replaces them, or a function of the name, or of name, rank and number of the module there. warmup: a whole number.
    So many first calls of each watched module are no microbatch's, such as one that tells shapes. The default is 0.
    ties: the weights that are one in several stages, as lists of their names in the model; ``[]``: none are. They are
    read where a step is held against itself; the default is what ``build=`` tells, or else weights that begin equal in
    several stages are unknown. stages: the numbers of the stages that each rank of a pipeline hands back, such as
    ``[[0, 3], [1, 2]]``. They are read where a step is held against itself; the default is what the names of ``build=``
    tell, or a trace, or else each rank has one, as ranks are numbered.

    Raises ``ContractError`` for a value that a word cannot have.
    """

    loss_divisor: float | None = None
    loss_scale: float | None = None
    accumulation: Accumulation | None = None
    max_norm: float | None = None
    operations: Sequence[str | tuple[str, int]] = ()
    outputs: Outputs | None = None
    routers: str | Sequence[str] = ()
    names: Names | None = None
    warmup: int = 0
    ties: Sequence[Sequence[str]] | None = None
    stages: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        for word in ("loss_divisor", "loss_scale", "max_norm"):
            _check_positive(word, getattr(self, word))
        if self.accumulation is not None and not isinstance(self.accumulation, Accumulation):
            raise ContractError(
                f"accumulation is {self.accumulation!r}: expected an Accumulation, of pipeproof.reference.accumulation"
            )
        object.__setattr__(self, "operations", _operations(self.operations))
        if self.outputs is not None and not callable(self.outputs):
            raise ContractError(f"outputs is {self.outputs!r}: expected a function of output and target")
        object.__setattr__(self, "routers", _routers(self.routers))
        _check_names(self.names)
        _check_ties(self.ties)
        object.__setattr__(self, "stages", _stages(self.stages))
        if type(self.warmup) is not int or self.warmup < 0:
            raise ContractError(f"warmup is {self.warmup!r}: expected how many first calls are no microbatch's, from 0")

    def with_words(self, words: Mapping[str, Any]) -> "Contract":
        """The same with ``words`` that were given beside it, as ``loss_divisor=8``; ``steps`` are its operations."""
        every = {"operations" if word == "steps" else word: value for word, value in words.items()}
        if unknown := every.keys() - {one.name for one in fields(self)}:
            raise TypeError(f"there is an unexpected keyword argument {min(unknown)!r}")
        return replace(self, **{word: value for word, value in every.items() if value is not None})

    @property
    def plan(self) -> tuple[str, ...]:
        """The operations by their names."""
        return tuple(one if isinstance(one, str) else one[0] for one in self.operations) or ("train",)

    def parts(self, microbatches: int) -> list[range]:
        """The numbers of every operation's microbatches, of so many in all.

        Raises ``ContractError`` where they cannot be dealt so.
        """
        plan = self.plan
        counts = [one[1] for one in self.operations if not isinstance(one, str)]
        if counts and sum(counts) != microbatches:
            raise ContractError(
                f"operations want {' + '.join(map(str, counts))} microbatches, and there are {microbatches}: "
                "give as many as they want, or let them want as many as there are"
            )
        if not counts and microbatches % len(plan):
            raise ContractError(
                f"{some(microbatches, 'microbatch')} for {some(len(plan), 'operation')}: expected a multiple, for each "
                'has as many; say otherwise how many each has, as in [("train", 4), ("eval", 2)]'
            )
        ends = [*accumulate(counts or [microbatches // len(plan)] * len(plan), initial=0)]
        return [range(*pair) for pair in pairwise(ends)]

    def reads(self, words: Collection[str], where: str, cure: str = "leave it out") -> None:
        """Raise ``ContractError`` for a word that is said and is none of these ``words``, which are read ``where``."""
        for one in fields(self):
            if one.name not in words and getattr(self, one.name) != one.default:
                raise ContractError(f"{one.name} of the contract is not read {where}: {cure}")


def _check_positive(word: str, given: Any) -> None:
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if given is not None and not (number and given > 0):
        raise ContractError(f"{word} is {given!r}: expected a number above 0")


def _operations(given: object) -> tuple[Any, ...]:
    """The operations as they are given. Raises ``ContractError`` for what is no plan."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ContractError(f'operations is {given!r}: expected a list, such as ["train", "eval"]')
    every = tuple(tuple(one) if isinstance(one, list) else one for one in given)
    pairs = [one for one in every if isinstance(one, tuple)]
    if pairs and len(pairs) < len(every):
        raise ContractError(f"operations is {list(given)}: expected how many microbatches each of them has, or none")
    for one in every:
        name, count = one if isinstance(one, tuple) and len(one) == 2 else (one, 1)
        if name not in OPERATIONS:
            known = ", ".join(map(repr, OPERATIONS))
            raise ContractError(f"operations has {name!r} in it: expected some of {known}")
        if type(count) is not int or count < 1:
            raise ContractError(f"operations has {count!r} microbatches for {name!r}: expected a number from 1")
    plan = [one[0] if isinstance(one, tuple) else one for one in every]
    if plan and "train" not in plan:
        raise ContractError(f"operations is {list(given)}: expected at least one 'train', whose gradients are compared")
    if "accumulate" in plan[::-1][: plan[::-1].index("train") if plan else 0]:
        raise ContractError(
            f"operations is {list(given)}: expected 'train' after each 'accumulate', for it has the gradients of both"
        )
    return every


def _routers(given: object) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not all(isinstance(one, str) and one for one in names):
        raise ContractError(f"routers is {given!r}: expected the name of the modules that choose experts, or several")
    return tuple(names)


def _check_names(given: object) -> None:
    pairs = isinstance(given, Mapping) and all(isinstance(one, str) for pair in given.items() for one in pair)
    if not (given is None or pairs or callable(given)):
        raise ContractError(f"names is {given!r}: expected prefixes and what replaces them, or a function of a name")


def _check_ties(given: Any) -> None:
    groups = given if isinstance(given, list | tuple) else [given]
    lists = [isinstance(group, list | tuple) and len(group) > 1 for group in groups]
    if given is not None and not (all(lists) and all(isinstance(name, str) for group in groups for name in group)):
        raise ContractError(f'ties is {given!r}: expected lists of names, such as [["embed.weight", "head.weight"]]')


def _stages(given: Any) -> tuple[tuple[int, ...], ...]:
    ranks = given if isinstance(given, list | tuple) else [given]
    lists = all(isinstance(rank, list | tuple) and len({*rank}) == len(rank) for rank in ranks)
    every = [number for rank in ranks for number in rank] if lists else []
    if not lists or any(type(one) is not int for one in every) or {*every} != {*range(len({*every}))}:
        raise ContractError(
            f"stages is {given!r}: expected the numbers of each rank's stages, all from 0, such as [[0, 3], [1, 2]]"
        )
    return tuple(map(tuple, ranks))


DEFAULTS = Contract()
