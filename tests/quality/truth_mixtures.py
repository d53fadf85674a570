"""Faults in the plain runtime, each in several surroundings: more streams, other types, other orders, a scaled loss."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import truth_layers as layers
from runtime_plain import How, Plain
from runtime_plain import step as plain_step
from torch import Tensor
from truth_check import Run, Truth
from truth_faults import ALL, PAIRED, TAKEN, backward, forward, sums
from truth_models import RANKS, Block, Build, Pairs, data_of, loss_fn, of, seeded, through
from truth_steps import tied_copies

narrow = through(torch.bfloat16)
# What stage 1 sends on, by what it made.
SENT: Mapping[str, Callable[[Any], Any]] = {
    "second stream in bf16": lambda two: (two[0], narrow(two[1])),
    "second stream is zero": lambda two: (two[0], 0.0 * two[1]),
    "first stream in bf16": lambda two: (narrow(two[0]), two[1]),
    "second stream is the first": lambda two: (two[0], two[0] * 1.0),
    "streams exchanged": lambda two: (two[1], two[0]),
    "sent in bf16": narrow,
    "sent in fp32": through(torch.float32),
}
# What stage 2 sends back, by the gradients of what it was given.
SENT_BACK: Mapping[str, Callable[[Any], Any]] = {
    "second stream's gradient lost": lambda two: [two[0], torch.zeros_like(two[1])],
    "gradients of streams exchanged": lambda two: [two[1], two[0]],
    "sent back in bf16": lambda every: [None if one is None else narrow(one) for one in every],
    "a quarter sent back": lambda every: [None if one is None else one * 0.25 for one in every],
}


class Spoilt(Plain):
    """The plain runtime with ``faults``, each at its place."""

    def __init__(self, faults: tuple[str, ...], *given: Any) -> None:
        super().__init__(*given)
        self.faults, self.early = faults, list[Tensor]()

    def bad(self, fault: str, place: int, m: int | None = None) -> bool:
        """Whether ``fault`` is here, and where it is of one microbatch, now."""
        return fault in self.faults and self.place == place and m in (None, self.now)

    def forward(self, m: int) -> None:
        self.sending_forward, self.now = True, m
        given = self.microbatches
        if self.bad("another's target", 3, 1):
            self.microbatches = [*given[:1], (given[1][0], given[2][1]), *given[2:]]
        super().forward(m)
        self.microbatches = given
        if self.bad("last loss counts four times", 3, 7):
            given, made = self.live[m]
            self.live[m] = given, made * 4

    def backward(self, m: int) -> None:
        self.sending_forward, self.now = False, m
        before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        other = {2: 3, 3: 2}.get(m)
        if self.bad("graphs exchanged", 1) and other in self.live:
            self.live[m], self.live[other] = self.live[other], self.live[m]
        super().backward(m)
        for parameter, old in zip(self.parameters, before, strict=True):
            if self.bad("one lost", 2, 3):
                parameter.grad = old
            if self.bad("one twice", 1, 5):
                parameter.grad = 2 * parameter.grad if old is None else 2 * parameter.grad - old

    def send(self, tree: Any, peer: int) -> None:
        changes = SENT if self.sending_forward else SENT_BACK
        for fault in self.faults:
            if fault in changes and self.place == (1 if self.sending_forward else 2):
                tree = changes[fault](tree)
        if self.sending_forward and self.bad("sent too late", 1) and self.now in (4, 5):
            self.early.append(tree)
            if self.now == 4:
                return
            super().send(tree, peer)
            tree = self.early[0]
        if self.sending_forward and self.bad("sent with noise", 1, 4):
            tree = tree + 0.1 * torch.randn(tree.shape, generator=torch.Generator().manual_seed(4))
        super().send(tree, peer)

    def finish(self) -> None:
        super().finish()
        for number, parameter in enumerate(self.parameters):
            if self.bad("stage four times", 2):
                parameter.grad.mul_(4)
            if self.bad("one parameter negated", 1) and number == 2:
                parameter.grad.neg_()
            if self.bad("first stage halved", 0):
                parameter.grad.mul_(0.5)
        if self.bad("two layers exchanged", 1):
            self.exchanged(self.parameters)
        if self.bad("two weights exchanged", 1):
            self.exchanged([one for one in self.parameters if one.dim() == 2])

    def exchanged(self, parameters: list[Any]) -> None:
        """The first half and the second, which are alike, have each other's gradients."""
        half = len(parameters) // 2
        for one, other in zip(parameters[:half], parameters[half:], strict=True):
            one.grad, other.grad = other.grad, one.grad


def step(model: Any, pairs: Pairs, *, fault: str, how: How, watched: bool) -> Any:
    """One step with ``fault``; copies of a weight that the first and the last stage share are summed in the end."""
    tied = isinstance(model[-1], Block) and model[0].linear.weight is model[-1].linear.weight
    run = tied_copies if tied else plain_step
    stage, losses = run(model, pairs, how=how, watched=watched, part=partial(Spoilt, tuple(fault.split(" + "))))
    if fault == "first stage halved late" and dist.get_rank() == 0:
        for parameter in stage.parameters():
            parameter.grad.mul_(0.5)
    return stage, losses


TWO_STREAMS = of(layers.carry, layers.joined)
# Of each setting: the model, how a step is made, and the type.
SETTINGS: Mapping[str, tuple[Build, How, torch.dtype]] = {
    "plain": (of(), How(), torch.float32),
    "two streams": (TWO_STREAMS, How(), torch.float32),
    "two streams, lifo": (TWO_STREAMS, How(order="lifo"), torch.float32),
    "residual stream": (of(layers.residual, layers.joined), How(), torch.float32),
    "a number aside": (of(layers.aside, layers.joined), How(), torch.float32),
    "nested": (of(layers.nested, layers.unnested), How(), torch.float32),
    "tied": (layers.tied(0, 7), How(), torch.float32),
    "masks": (of(layers.masked, layers.first), How(), torch.float32),
    "scaled loss": (of(), How(scale=1024.0), torch.float32),
    "divided late": (of(), How(late=True), torch.float32),
    "shuffled": (of(), How(order="shuffled"), torch.float32),
    "halves": (of(), How(halves=True), torch.float32),
    "fp64": (layers.of_dtype(torch.float64), How(), torch.float64),
    "bf16": (layers.of_dtype(torch.bfloat16), How(), torch.bfloat16),
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


def mixture(name: str, setting: str, truth: Truth) -> Run:
    """A fault in a setting."""
    build, how, dtype = SETTINGS[setting]
    given = {"reference": seeded(build), "microbatches": data_of(dtype=dtype), "ranks": RANKS, "loss_fn": loss_fn}
    return Run(f"{setting}: {name}", partial(step, fault=name, how=how), truth, given)


def mixtures() -> Iterator[Run]:
    """Every fault in every setting in which it is the same fault."""
    for setting in SETTINGS:
        for name, truth in EVERYWHERE.items():
            if (name, setting) not in _UNFIT:
                hidden = {"loss"} if (name, setting) in _HIDDEN else set[str]()
                yield mixture(name, setting, replace(truth, wrong=truth.wrong - hidden))
    for setting in ("two streams", "two streams, lifo", "residual stream"):
        for name, truth in OF_STREAMS.items():
            if not (setting == "residual stream" and name.endswith("exchanged")):  # they are added in any order
                yield mixture(name, setting, truth)
    for name in ("first stream in bf16", "second stream is zero"):
        yield mixture(name, "a number aside", OF_STREAMS[name])
    for name, truth in OF_TIED.items():
        yield mixture(name, "tied", truth)
    back = backward("rounded", 1, 2, alike=("computation",), affected=(0, 1))
    yield mixture("sent back in bf16", "plain", back)
    target = EVERYWHERE["another's target"]
    yield mixture("sent back in bf16 + another's target", "plain", replace(target, also=(back,)))
    for (name, truth), other in product(IN_FORWARDS.items(), _BESIDE):
        both = replace(truth, also=(EVERYWHERE[other],), wrong=truth.wrong | EVERYWHERE[other].wrong)
        yield mixture(f"{name} + {other}", "plain", both)
    for name, truth in IN_FORWARDS.items():
        yield mixture(name, "plain", truth)
    rounded = forward("rounded", 1, 2, alike=("computation",))
    for name, setting in (("sent in fp32", "fp64"), ("sent in bf16", "fp64"), ("sent in bf16", "scaled loss")):
        yield mixture(name, setting, rounded)
