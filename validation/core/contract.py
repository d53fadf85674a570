"""Contracts: a step's claims beyond the defaults."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from pipeproof.pipeline.sizes import some
from pipeproof.reference.accumulation import Accumulation

OPERATIONS = ("train", "accumulate", "eval")
Names = Mapping[str, str] | Callable[..., str]
Outputs = Callable[[Any, Tensor], Mapping[str, Tensor]]  # of output and target: named tensors to compare


class ContractError(ValueError):
    """Raised for an invalid contract word, or one that the check does not read."""


@dataclass(frozen=True)
class Contract:
    """A step's claims. Each word has a default; state what differs.

    The contract is checked against observations, and never chosen to fit them.

    loss_divisor: a number above 0. Each microbatch's loss is divided by it before its backward. The default is the
    operation's microbatch count, over all replicas. loss_scale: a number above 0, such as 1024. Losses are multiplied
    by it before their backwards, and gradients divided by it before the step returns them. The default is the step's
    ``StepResult.loss_scale``, or else 1. accumulation: an ``Accumulation``, the type and place for summing gradients.
    The default comes from the step, or else is the gradients' own type, one microbatch after another. max_norm: a
    number above 0. Gradients are clipped to this norm before the update. The default comes from the step, or else is no
    clipping. operations: the step's plan, such as ``["train", "accumulate", "train", "eval"]``, with equally many
    microbatches each; or with counts, as in ``[("train", 4), ("eval", 2)]``, over all replicas. ``step`` is then called
    once, with the model and an iterator over ``(operation, microbatches)``, and yields a result for each, before it
    clears gradients. The default is one training step. outputs: a function that maps output and target to named
    tensors, such as ``{"logits": output}``, to be compared for each microbatch as well; integers exactly. The step
    returns its own as ``StepResult.outputs``. routers: modules that choose experts, by name, by name ending, or by
    pattern, such as ``"mlp.gate"``; several if step and reference use different names. Their choices by ``topk``,
    ``argmax`` or ``max`` in forward are compared token by token, and the reference follows the step where rounding
    explains a difference. names: maps the step's parameter names to the reference's: prefixes with replacements, or a
    function of the name, or of name, rank and module number. warmup: an integer. Each watched module's first calls, up
    to this number, belong to no microbatch, such as a shape probe. The default is 0. ties: weights shared by several
    stages, as lists of model names; ``[]``: none. They are read if the step itself is the reference; the default comes
    from ``build=``, or else weights that start equal in several stages are unknown. stages: stage numbers per pipeline
    rank, in returned order, such as ``[[0, 3], [1, 2]]``. They are read if the step itself is the reference; the
    default comes from names in ``build=``, or a trace, or else is one stage per rank, in rank order.

    Raises ``ContractError`` for an invalid value.
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
        routers: Any = (self.routers,) if isinstance(self.routers, str) else self.routers
        holds = {word: _is_positive(getattr(self, word)) for word in ("loss_divisor", "loss_scale", "max_norm")} | {
            "accumulation": self.accumulation is None or isinstance(self.accumulation, Accumulation),
            "operations": isinstance(self.operations, Sequence) and not isinstance(self.operations, str),
            "outputs": self.outputs is None or callable(self.outputs),
            "routers": isinstance(routers, Sequence) and all(isinstance(one, str) and one for one in routers),
            "names": self.names is None or callable(self.names) or _are_prefixes(self.names),
            "ties": self.ties is None or _are_ties(self.ties),
            "stages": _are_stages(self.stages),
            "warmup": type(self.warmup) is int and self.warmup >= 0,
        }
        for word, right in holds.items():
            if not right:
                raise ContractError(f"{word} is {getattr(self, word)!r}: expected {_EXPECTED[word]}")
        object.__setattr__(self, "operations", _operations(self.operations))
        object.__setattr__(self, "routers", tuple(routers))
        object.__setattr__(self, "stages", tuple(map(tuple, self.stages)))

    def with_words(self, words: Mapping[str, Any]) -> "Contract":
        """Copy with ``words`` given beside the contract, such as ``loss_divisor=8``; ``steps`` means operations."""
        every = {"operations" if word == "steps" else word: value for word, value in words.items()}
        if unknown := every.keys() - {one.name for one in fields(self)}:
            raise TypeError(f"there is an unexpected keyword argument {min(unknown)!r}")
        return replace(self, **{word: value for word, value in every.items() if value is not None})

    @property
    def plan(self) -> tuple[str, ...]:
        """The operations' names."""
        return tuple(one if isinstance(one, str) else one[0] for one in self.operations) or ("train",)

    def parts(self, microbatches: int) -> list[range]:
        """Split ``microbatches`` into ranges, one per operation.

        Raises ``ContractError`` if they cannot be split so.
        """
        plan = self.plan
        counts = [one[1] for one in self.operations if not isinstance(one, str)]
        if counts and sum(counts) != microbatches:
            raise ContractError(
                f"operations want {' + '.join(map(str, counts))} microbatches, and there are {microbatches}: "
                "make the two numbers equal"
            )
        if not counts and microbatches % len(plan):
            raise ContractError(
                f"{some(microbatches, 'microbatch')} for {some(len(plan), 'operation')}: expected a multiple, for each "
                'has as many; say otherwise how many each has, as in [("train", 4), ("eval", 2)]'
            )
        ends = [*accumulate(counts or [microbatches // len(plan)] * len(plan), initial=0)]
        return [range(*pair) for pair in pairwise(ends)]

    def reads(self, words: Collection[str], where: str, cure: str = "leave it out") -> None:
        """Raise ``ContractError`` for a stated word outside ``words``, the words read ``where``."""
        for one in fields(self):
            if one.name not in words and getattr(self, one.name) != one.default:
                raise ContractError(f"{one.name} of the contract is not read {where}: {cure}")


_EXPECTED: Mapping[str, str] = {
    **dict.fromkeys(("loss_divisor", "loss_scale", "max_norm"), "a number above 0"),
    "accumulation": "an Accumulation, of pipeproof.reference.accumulation",
    "operations": 'a list, such as ["train", "eval"]',
    "outputs": "a function of output and target",
    "routers": "the name of the modules that choose experts, or several",
    "names": "prefixes and what replaces them, or a function of a name",
    "ties": 'lists of names, such as [["embed.weight", "head.weight"]]',
    "stages": "the numbers of each rank's stages, all from 0, such as [[0, 3], [1, 2]]",
    "warmup": "how many first calls are no microbatch's, from 0",
}


def _is_positive(given: Any) -> bool:
    return given is None or (isinstance(given, int | float) and not isinstance(given, bool) and given > 0)


def _are_prefixes(given: Any) -> bool:
    return isinstance(given, Mapping) and all(isinstance(one, str) for pair in given.items() for one in pair)


def _are_ties(given: Any) -> bool:
    lists = isinstance(given, list | tuple) and all(isinstance(one, list | tuple) and len(one) > 1 for one in given)
    return lists and all(isinstance(name, str) for group in given for name in group)


def _are_stages(given: Any) -> bool:
    ranks = given if isinstance(given, list | tuple) else [given]
    if not all(isinstance(rank, list | tuple) and len({*rank}) == len(rank) for rank in ranks):
        return False
    every = [number for rank in ranks for number in rank]
    return all(type(one) is int for one in every) and {*every} == {*range(len({*every}))}


def _operations(given: Sequence[Any]) -> tuple[Any, ...]:
    """Check a plan. Raises ``ContractError`` for an invalid one."""
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


DEFAULTS = Contract()
