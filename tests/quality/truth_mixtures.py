"""Faults in the plain runtime, each in several surroundings: more streams, other types, other orders, a scaled loss."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from runtime_plain import How, Plain, cut, even, exchange
from torch import Tensor
from truth_check import Truth
from truth_faults import ALL, PAIRED, TAKEN, backward, forward, sums
from truth_layers import (
    Aside,
    Carry,
    Joined,
    Masked,
    Nested,
    Residual,
    Unmasked,
    Unnested,
    blocks,
    chain,
    data_of,
    of_dtype,
    seeded,
)
from truth_models import COUNT, RANKS, Block, Pairs, loss_fn, observed
from truth_oddities import tied_model

from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox


class Spoilt(Plain):
    """The plain runtime with ``fault`` at its place."""

    faults: tuple[str, ...] = ()

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.early: list[Tensor] = []

    def forward(self, m: int) -> None:
        self.sending_forward, self.now = True, m
        given = self.microbatches
        if self.last and m == 1 and "another's target" in self.faults:
            self.microbatches = [*given[:1], (given[1][0], given[2][1]), *given[2:]]
        super().forward(m)
        self.microbatches = given
        if self.last and "last loss counts four times" in self.faults and m == 7:
            given, made = self.live[m]
            self.live[m] = given, made * 4

    def backward(self, m: int) -> None:
        self.sending_forward, self.now = False, m
        before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        other = {2: 3, 3: 2}.get(m)
        if "graphs exchanged" in self.faults and self.place == 1 and other in self.live:
            self.live[m], self.live[other] = self.live[other], self.live[m]
        super().backward(m)
        for parameter, old in zip(self.parameters, before, strict=True):
            self._counted(parameter, old, m)

    def _counted(self, parameter: Any, old: Tensor | None, m: int) -> None:
        if "one lost" in self.faults and (self.place, m) == (2, 3):
            parameter.grad = old
        if "one twice" in self.faults and (self.place, m) == (1, 5):
            parameter.grad = 2 * parameter.grad if old is None else 2 * parameter.grad - old

    def send(self, tree: Any, peer: int) -> None:
        leaves = list(tree) if isinstance(tree, tuple) and len(tree) == 2 and self.two_streams else None
        if self.place == 1 and self.sending_forward and leaves is not None:
            if "second stream in bf16" in self.faults:
                tree = (leaves[0], leaves[1].bfloat16().float())
            if "second stream is zero" in self.faults:
                tree = (leaves[0], 0.0 * leaves[1])
            if "first stream in bf16" in self.faults:
                tree = (leaves[0].bfloat16().float(), leaves[1])
            if "second stream is the first" in self.faults:
                tree = (leaves[0], leaves[0] * 1.0)
            if "streams exchanged" in self.faults:
                tree = (leaves[1], leaves[0])
        if self.place == 2 and not self.sending_forward and len(tree) == 2 and self.two_streams:
            if "second stream's gradient lost" in self.faults:
                tree = [tree[0], torch.zeros_like(tree[1])]
            if "gradients of streams exchanged" in self.faults:
                tree = [tree[1], tree[0]]
        if self.place == 2 and not self.sending_forward and "sent back in bf16" in self.faults:
            tree = [None if one is None else one.bfloat16().to(one.dtype) for one in tree]
        if self.place == 2 and not self.sending_forward and "a quarter sent back" in self.faults:
            tree = [None if one is None else one * 0.25 for one in tree]
        if self.place == 1 and self.sending_forward and "sent in bf16" in self.faults:
            tree = tree.bfloat16().to(tree.dtype) if isinstance(tree, Tensor) else tree
        if self.place == 1 and self.sending_forward and "sent too late" in self.faults and self.now in (4, 5):
            self.early.append(tree)
            if self.now == 4:
                return
            super().send(tree, peer)
            tree = self.early[0]
        if self.place == 1 and self.sending_forward and "sent with noise" in self.faults and self.now == 4:
            tree = tree + 0.1 * torch.randn(tree.shape, generator=torch.Generator().manual_seed(4))
        if self.place == 1 and self.sending_forward and "sent in fp32" in self.faults:
            tree = tree.float().to(tree.dtype) if isinstance(tree, Tensor) else tree
        super().send(tree, peer)

    @property
    def two_streams(self) -> bool:
        return isinstance(self.stage[0], Aside | Carry | Joined | Residual)

    def finish(self) -> None:
        super().finish()
        for number, parameter in enumerate(self.parameters):
            if self.place == 2 and "stage four times" in self.faults:
                parameter.grad.mul_(4)
            if self.place == 1 and "one parameter negated" in self.faults and number == 2:
                parameter.grad.neg_()
            if self.place == 0 and "first stage halved" in self.faults:
                parameter.grad.mul_(0.5)
        if self.place == 1 and "two layers exchanged" in self.faults:
            self.exchanged(self.parameters)
        if self.place == 1 and "two weights exchanged" in self.faults:
            self.exchanged([one for one in self.parameters if one.dim() == 2])

    def exchanged(self, parameters: list[Any]) -> None:
        """The first half and the second, which are alike, have each other's gradients."""
        half = len(parameters) // 2
        for one, other in zip(parameters[:half], parameters[half:], strict=True):
            one.grad, other.grad = other.grad, one.grad


def step(model: Any, pairs: Pairs, *, fault: str, how: How, watched: bool) -> Any:
    """One step with ``fault``; copies of a weight that the first and the last stage share are summed in the end."""
    ranks, rank = list(range(dist.get_world_size())), dist.get_rank()
    tied = model[0].linear.weight is model[-1].linear.weight if isinstance(model[-1], Block) else False
    if tied and rank == ranks[-1]:
        model[-1].linear.weight = torch.nn.Parameter(model[0].linear.weight.detach().clone())
    stage = cut(model, even(len(model), len(ranks)), rank)
    part = Spoilt(observed(stage, watched), pairs, loss_fn, how, ranks)
    part.faults = tuple(fault.split(" + "))
    losses = part.step() or None
    if tied and rank in (0, ranks[-1]):
        weight = model[0 if rank == 0 else -1].linear.weight
        weight.grad = exchange(weight.grad, ranks[-1] - rank)
        if "first stage halved late" in part.faults and rank == 0:
            for parameter in part.parameters:
                parameter.grad.mul_(0.5)
    return stage, losses


SETTINGS: Mapping[str, tuple[Any, How, torch.dtype]] = {
    "plain": (seeded(lambda: chain(*blocks())), How(), torch.float32),
    "two streams": (seeded(lambda: chain(*blocks(Carry, 7), Joined())), How(), torch.float32),
    "two streams, lifo": (seeded(lambda: chain(*blocks(Carry, 7), Joined())), How(order="lifo"), torch.float32),
    "residual stream": (seeded(lambda: chain(*blocks(Residual, 7), Joined())), How(), torch.float32),
    "a number aside": (seeded(lambda: chain(*blocks(Aside, 7), Joined())), How(), torch.float32),
    "nested": (seeded(lambda: chain(*blocks(Nested, 7), Unnested())), How(), torch.float32),
    "tied": (seeded(tied_model), How(), torch.float32),
    "masks": (seeded(lambda: chain(*blocks(Masked, 7), Unmasked())), How(), torch.float32),
    "scaled loss": (seeded(lambda: chain(*blocks())), How(scale=1024.0), torch.float32),
    "divided late": (seeded(lambda: chain(*blocks())), How(late=True), torch.float32),
    "shuffled": (seeded(lambda: chain(*blocks())), How(order="shuffled"), torch.float32),
    "halves": (seeded(lambda: chain(*blocks())), How(halves=True), torch.float32),
    "fp64": (seeded(of_dtype(torch.float64)), How(), torch.float64),
    "bf16": (seeded(of_dtype(torch.bfloat16)), How(), torch.bfloat16),
}

EVERYWHERE: Mapping[str, Truth] = {
    "one lost": sums("dropped", 2, microbatches=(3,)),
    "one twice": sums("doubled", 1, microbatches=(5,)),
    "stage four times": sums("scale", 2, wrong="reduction", factors=(4.0,)),
    "one parameter negated": sums("sign", 1, wrong="reduction", parameter=r"^2\.linear\.weight$", factors=(-1.0,)),
    "two layers exchanged": sums("misplaced", 1, wrong="reduction"),
    "two weights exchanged": sums("misplaced", 1, wrong="reduction", parameter=r"^[23]\.linear\.weight$"),
    "a quarter sent back": backward("scale", 1, 2, wrong="scale", factors=(0.25,), affected=(0, 1)),
    "last loss counts four times": backward(
        "scale", 3, wrong="scale", microbatches=(7,), factors=(4.0,), alike=("doubled",), somewhere=True
    ),
    "graphs exchanged": backward(PAIRED, 1, wrong="swapped", microbatches=(2, 3)),
    "another's target": forward("swapped-data", 0, 3, wrong="swapped", microbatches=(1,), somewhere=True),
}
OF_STREAMS: Mapping[str, Truth] = {
    "second stream in bf16": forward("rounded", 1, 2, microbatches=ALL, alike=("computation",)),
    "first stream in bf16": forward("rounded", 1, 2, microbatches=ALL, alike=("computation",)),
    "second stream is zero": forward(("uninitialised", "altered"), 1, 2, microbatches=ALL, alike=("computation",)),
    "second stream is the first": forward(("altered", "misplaced", "wrong-message"), 1, 2, alike=("computation",)),
    "streams exchanged": forward("wrong-message", 1, 2),
    "second stream's gradient lost": backward(
        ("altered", "uninitialised", "zero", "dropped"), 1, 2, alike=("computation",), affected=(0, 1)
    ),
    "gradients of streams exchanged": backward(
        ("altered", "misplaced", "wrong-message"), 1, 2, alike=("computation",), affected=(0, 1)
    ),
}
OF_TIED: Mapping[str, Truth] = {
    "first stage halved": sums("scale", 0, wrong="reduction tied", factors=(0.5,)),
    "first stage halved late": sums("scale", 0, wrong="reduction tied", factors=(0.5,)),
}
IN_FORWARDS: Mapping[str, Truth] = {
    "sent in bf16": forward("rounded", 1, 2, microbatches=ALL, alike=("computation",)),
    "sent too late": forward(TAKEN, 1, 2, wrong="swapped", microbatches=(4, 5), alike=("swapped-data",)),
    "sent with noise": forward("altered", 1, 2, microbatches=(4,), alike=("computation",)),
}
_BESIDE = ("another's target", "one lost", "one twice", "stage four times", "one parameter negated", "graphs exchanged")
_HIDDEN = {("another's target", "bf16")}  # where rounding may make of one loss another
_UNFIT = {("graphs exchanged", "shuffled"), ("one lost", "halves"), ("one twice", "halves")}


@dataclass(frozen=True)
class Mixture:
    """A fault in a setting."""

    name: str
    setting: str
    truth: Truth

    @property
    def title(self) -> str:
        return f"{self.setting}: {self.name}"

    def verdict(self, whitebox: WhiteBox, *, watched: bool) -> Verdict:
        """What is said of a step with this fault."""
        build, how, dtype = SETTINGS[self.setting]
        return whitebox.validate(
            partial(step, fault=self.name, how=how, watched=watched),
            reference=build,
            microbatches=data_of(count=COUNT, dtype=dtype),
            ranks=RANKS,
            loss_fn=loss_fn,
        )


def mixtures() -> Iterator[Mixture]:
    """Every fault in every setting in which it is the same fault."""
    for setting in SETTINGS:
        for name, truth in EVERYWHERE.items():
            if (name, setting) not in _UNFIT:
                hidden = {"loss"} if (name, setting) in _HIDDEN else set[str]()
                yield Mixture(name, setting, replace(truth, wrong=truth.wrong - hidden))
    for setting in ("two streams", "two streams, lifo", "residual stream"):
        for name, truth in OF_STREAMS.items():
            if not (setting == "residual stream" and name.endswith("exchanged")):  # they are added in any order
                yield Mixture(name, setting, truth)
    for name in ("first stream in bf16", "second stream is zero"):
        yield Mixture(name, "a number aside", OF_STREAMS[name])
    for name, truth in OF_TIED.items():
        yield Mixture(name, "tied", truth)
    back = backward("rounded", 1, 2, alike=("computation",), affected=(0, 1))
    yield Mixture("sent back in bf16", "plain", back)
    target = EVERYWHERE["another's target"]
    yield Mixture("sent back in bf16 + another's target", "plain", replace(target, also=(back,)))
    for (name, truth), other in product(IN_FORWARDS.items(), _BESIDE):
        both = replace(truth, also=(EVERYWHERE[other],), wrong=truth.wrong | EVERYWHERE[other].wrong)
        yield Mixture(f"{name} + {other}", "plain", both)
    for name, truth in IN_FORWARDS.items():
        yield Mixture(name, "plain", truth)
    yield Mixture("sent in fp32", "fp64", forward("rounded", 1, 2, alike=("computation",)))
    yield Mixture("sent in bf16", "fp64", forward("rounded", 1, 2, alike=("computation",)))
    yield Mixture("sent in bf16", "scaled loss", forward("rounded", 1, 2, alike=("computation",)))
