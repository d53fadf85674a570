"""A weight that several stages hold under one name of the reference: right where it is shared and summed, else told."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import watch
from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.steps import backward, loss_fn

WIDTH, STAGES = 5, 3
Use = Callable[[Any, Tensor], Tensor]  # of what is shared, or made of it once, and what comes in
Sum = Callable[[int, Sequence[Tensor]], Tensor]  # what a stage's copy gets, of each stage's share


class Chain(nn.Module):
    """Layers, each behind its use of what they share under ``name``."""

    def __init__(
        self, shared: nn.Module, layers: Mapping[str, nn.Module], uses: Sequence[Use | None], name: str
    ) -> None:
        super().__init__()
        self.layers, self.uses, self.name = nn.ModuleDict(layers), uses, name
        if any(uses):
            self.add_module(name, shared)

    def forward(self, x: Tensor) -> Tensor:
        shared: Any = self.get_submodule(self.name) if any(self.uses) else None
        if isinstance(shared, nn.Embedding):  # a bias is made once, from a weight, and goes to every layer, as T5's
            shared = shared(torch.tensor([1, 2])).sum(dim=0)
        for layer, use in zip(self.layers.values(), self.uses, strict=True):
            x = torch.tanh(layer(x if use is None else use(shared, x)))
        return x

    def stage(self, k: int, name: str) -> "Chain":
        """A layer alone, with a copy of what it shares under this name."""
        return copy.deepcopy(
            Chain(self.get_submodule(self.name), {str(k): self.layers[str(k)]}, self.uses[k : k + 1], name)
        )


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def into(shared: Any, x: Tensor) -> Tensor:
    return shared(x)


def out(shared: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, shared.weight.t())


def again(shared: Any, x: Tensor) -> Tensor:
    """As in ALBERT."""
    return x + shared(x)


def added(shared: Any, x: Tensor) -> Tensor:
    return x + shared


# What is shared, its uses, the name of its last copy, and whether it is trained.
KINDS: dict[str, tuple[Callable[[], nn.Module], Sequence[Use | None], str, bool]] = {
    "one block": (block, (again, again, again), "embed", True),
    "tied": (linear, (into, None, out), "embed", True),
    "three ways": (linear, (into, into, out), "embed", True),
    "frozen": (linear, (into, None, out), "embed", False),
    "another name": (linear, (into, None, out), "output", True),
    "one bias": (lambda: nn.Embedding(3, WIDTH), (added, added, added), "embed", True),
    "both ends": (lambda: nn.Linear(WIDTH, WIDTH), (into, None, into), "embed", True),
}


def data() -> list[tuple[Tensor, Tensor]]:
    """Microbatches of unequal size."""
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(n, WIDTH, generator=draw), torch.randn(n, WIDTH, generator=draw)) for n in (6, 4, 6, 7)]


def right(stage: int, shares: Sequence[Tensor]) -> Tensor:
    return torch.stack([*shares]).sum(dim=0)


def judged(
    whitebox: WhiteBox,
    kind: str,
    each: Sum = right,
    *,
    watched: bool = False,
    before: Callable[[list[Chain]], None] = lambda stages: None,
    ranks: int = 1,
    **more: Any,
) -> Verdict:
    """A step of three stages; each copy gets what ``each`` makes of all shares.

    Of several ranks each runs all of it, and hands back its own stage's gradients by name.
    """
    shared, uses, last, trained = KINDS[kind]

    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = {str(k): nn.Linear(WIDTH, WIDTH) for k in range(STAGES)}
        return Chain(shared().requires_grad_(trained), layers, uses, "embed")

    def step(model: Chain, microbatches: list[Any]) -> Any:
        stages = [model.stage(k, last if k == STAGES - 1 else "embed") for k in range(STAGES)]
        before(stages)
        losses = backward(nn.Sequential(*(watch(one) if watched else one for one in stages)), microbatches)
        copies = {k: [*one.get_submodule(one.name).parameters()] for k, one in enumerate(stages) if any(one.uses)}
        for number in range(len(copies[0]) if trained else 0):
            shares = [own[number].grad for own in copies.values()]
            for k, own in copies.items():
                own[number].grad = each(k, shares)  # type: ignore[arg-type]  # all have one
        if ranks == 1:
            return stages, losses
        handed = stages[dist.get_rank()].named_parameters()
        return {name: one.grad for name, one in handed}, losses if dist.get_rank() == ranks - 1 else []

    return whitebox.validate(step, reference=build, microbatches=data(), ranks=ranks, loss_fn=loss_fn, **more)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_that_are_summed_are_right(whitebox_here: WhiteBox, kind: str, watched: bool) -> None:
    verdict = judged(whitebox_here, kind, watched=watched)
    assert verdict.outcome == "pass", str(verdict)
    assert verdict.law("tied-copies").checked


@pytest.mark.parametrize(("kind", "names"), [*((kind, {}) for kind in KINDS), ("another name", {"output": "embed"})])
def test_gradients_by_name_are_enough_to_know_a_copy(whitebox: WhiteBox, kind: str, names: dict[str, str]) -> None:
    verdict = judged(whitebox, kind, ranks=STAGES, contract=Contract(names=names))
    assert verdict.outcome == "pass", str(verdict)
    assert verdict.law("tied-copies").checked


def times(factor: float, *stages: int) -> Sum:
    """The sum so many times, in all copies or those of ``stages``."""
    return lambda stage, shares: right(stage, shares) * (factor if stage in (stages or (stage,)) else 1.0)


def ends(first: float, last: float, other: float = 1.0) -> Sum:
    """So often the first and the last share; the last stage's copy has the first's ``other`` times."""
    return lambda stage, shares: first * (other if stage else 1.0) * shares[0] + last * shares[-1]


FAULTS: dict[str, tuple[str, Sum, set[tuple[str, int | None]]]] = {
    **{
        f"{kind}, not summed": (
            kind,
            lambda stage, shares: shares[min(stage, len(shares) - 1)],
            {("tied-not-summed", None)},
        )
        for kind in ("one block", "tied", "three ways", "one bias")
    },
    "a third": ("tied", times(1 / 3), {("scale", None)}),
    "a third in the last": ("tied", times(1 / 3, 2), {("scale", 2)}),
    "twice": ("tied", times(2), {("tied-doubled", None)}),
    "twice in the last": ("tied", times(2, 2), {("tied-doubled", 2)}),
    "zero": ("tied", times(0), {("zero", None)}),
    "zero in the last": ("tied", times(0, 2), {("zero", 2)}),
    "the first share lost": ("both ends", ends(0, 1), {("tied-not-summed", None)}),
    "the last share twice": ("both ends", ends(1, 2), {("tied-doubled", None)}),  # or it was multiplied
    "the first share negative": ("both ends", ends(-1, 1), {("sign", 0)}),
    "the last share halved": ("both ends", ends(1, 0.5), {("scale", 2)}),
    "the last share negative": ("both ends", ends(1, -1), {("sign", 2)}),
    "both negative": ("both ends", ends(-1, -1), {("scale", None)}),
    "the first share negative in the last copy": ("both ends", ends(1, 1, -1), {("sign", 0)}),
}


@pytest.mark.parametrize("title", FAULTS)
def test_faults_of_copies_are_named(whitebox_here: WhiteBox, title: str) -> None:
    kind, each, expected = FAULTS[title]
    verdict = judged(whitebox_here, kind, each, watched=True)
    assert verdict.outcome == "fail"
    assert {(cause.kind, cause.stage) for cause in verdict.causes} == expected, str(verdict)
    assert not verdict.undecided
    others = [f"or {cause.kind} {cause}" for one in verdict.alternatives for cause in one]
    golden("\n".join([*map(str, verdict.causes), *others]))


def doubled(stages: list[Chain]) -> None:
    for parameter in stages[0].layers.parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)


def test_a_tied_weight_that_is_right_is_not_blamed_for_the_rest_of_its_stage(whitebox_here: WhiteBox) -> None:
    (cause,) = judged(whitebox_here, "tied", before=doubled).causes
    assert (cause.kind, cause.stage, cause.parameter, cause.factor) == ("scale", 0, None, 2.0)


def other_weights(stages: list[Chain]) -> None:
    with torch.no_grad():
        stages[1].get_parameter("embed.0.weight").mul_(1.5)


def twice_held(stages: list[Chain]) -> None:
    stages[2].add_module("more", nn.ModuleDict({"layers": nn.ModuleDict({"0": copy.deepcopy(stages[0].layers["0"])})}))


@pytest.mark.sweep
def test_a_copy_that_began_with_other_weights(whitebox_here: WhiteBox) -> None:
    verdict = judged(whitebox_here, "one block", before=other_weights)
    assert verdict.law("initial-weights").outcome == "fail"
    assert (verdict.causes[0].stage, verdict.causes[0].parameter) == (1, "embed.0.weight")


@pytest.mark.sweep
def test_what_the_reference_uses_once_has_no_copies(whitebox_here: WhiteBox) -> None:
    verdict = judged(whitebox_here, "tied", before=twice_held)
    assert verdict.law("parameters-once").wrong == 2
    assert [cause.kind for cause in verdict.causes] == ["partition"]
