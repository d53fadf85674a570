"""A weight that several stages hold under one name of the reference: right where it is shared and summed, else told."""

import copy
from collections.abc import Callable
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
from tests.support.steps import loss_fn
from tests.support.sweeps import each_once

COUNT, ROWS, WIDTH, RANKS = 4, 6, 5, 3
Stages = Callable[[Any], list[nn.Module]]


def data() -> list[tuple[Tensor, Tensor]]:
    """Microbatches of unequal size."""
    draw = torch.Generator().manual_seed(1)
    sizes = [ROWS, ROWS - 2, ROWS, ROWS + 1]
    return [(torch.randn(n, WIDTH, generator=draw), torch.randn(n, WIDTH, generator=draw)) for n in sizes]


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()


class Cross(nn.Module):
    """One block, applied over and over, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(RANKS):
            x = x + self.block(x)
        return self.head(x)


class Tied(nn.Module):
    """A weight under one name that comes in, between and out again."""

    def __init__(self, uses: int = 2, trained: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.embed.weight.requires_grad_(trained)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(RANKS))
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number and self.uses > 2 and number < RANKS - 1:
                x = nn.functional.linear(x, self.embed.weight)
        return nn.functional.linear(x, self.embed.weight.t())


class Biased(nn.Module):
    """A bias that is made once, from a weight, and goes to every layer, as T5's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(RANKS))

    def bias(self) -> Tensor:
        made: Tensor = self.table(torch.tensor([1, 2]))
        return made.sum(dim=0)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias()
        for layer in self.layers:
            x = torch.tanh(layer(x) + bias)
        return x


class Stage(nn.Module):
    """Parts of a model, as deep copies under names of the model, or of the stage's own."""

    def __init__(self, parts: dict[str, nn.Module], run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, copy.deepcopy(part))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def cross(model: Cross) -> list[nn.Module]:
    first, last = {"embed": model.embed}, {"head": model.head}
    block = {"block": model.block}
    return [
        Stage(block | first, lambda own, x: (h := own.embed(x)) + own.block(h)),
        Stage(block, lambda own, x: x + own.block(x)),
        Stage(block | last, lambda own, x: own.head(x + own.block(x))),
    ]


def tied(model: Tied, name: str = "embed") -> list[nn.Module]:
    """``name``: what the last stage calls its copy."""
    middle = {"embed": model.embed} if model.uses > 2 else {}
    layers = [nn.ModuleDict({str(k): layer}) for k, layer in enumerate(model.layers)]

    def between(own: Any, x: Tensor) -> Tensor:
        x = torch.tanh(own.layers["1"](x))
        return nn.functional.linear(x, own.embed.weight) if middle else x

    def last(own: Any, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(own.layers["2"](x)), own.get_submodule(name).weight.t())

    return [
        Stage({"embed": model.embed, "layers": layers[0]}, lambda own, x: torch.tanh(own.layers["0"](own.embed(x)))),
        Stage({"layers": layers[1], **middle}, between),
        Stage({"layers": layers[2], name: model.embed}, last),
    ]


def biased(model: Biased) -> list[nn.Module]:
    def run(number: int) -> Callable[[Any, Tensor], Tensor]:
        return lambda own, x: torch.tanh(own.layers[str(number)](x) + Biased.bias(own))

    layers = [nn.ModuleDict({str(k): layer}) for k, layer in enumerate(model.layers)]
    return [Stage({"table": model.table, "layers": layer}, run(k)) for k, layer in enumerate(layers)]


def train(stage: nn.Module, microbatches: list[Any]) -> list[float]:
    """A microbatch at a time through all ranks; the losses on the last."""
    rank, ranks, losses = dist.get_rank(), dist.get_world_size(), []
    for x, target in microbatches:
        if rank:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        if rank < ranks - 1:
            dist.send(y.detach(), rank + 1)
            gradient = torch.empty_like(y)
            dist.recv(gradient, rank + 1)
            y.backward(gradient)
        else:
            loss = loss_fn(y, target)
            (loss / len(microbatches)).backward()
            losses.append(loss.item())
        if rank:
            dist.send(x.grad, rank - 1)
    return losses


def summed(stage: nn.Module, shared: tuple[str, ...]) -> None:
    """Sum the gradients of what is shared over all ranks that have it."""
    named = {name.replace("output.", "embed."): p.grad for name, p in stage.named_parameters()}
    own = {name: gradient for name, gradient in named.items() if name.split(".")[0] in shared and gradient is not None}
    every: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, {name: gradient.shape for name, gradient in own.items()})
    for name, shape in sorted({name: shape for one in every for name, shape in one.items()}.items()):
        total = own[name].clone() if name in own else torch.zeros(shape)
        dist.all_reduce(total)
        if name in own:
            own[name].copy_(total)


def judged(
    whitebox: WhiteBox,
    build: Callable[[], nn.Module],
    stages: Stages,
    shared: tuple[str, ...],
    *,
    watched: bool = False,
    after: Callable[[nn.Module], None] = lambda stage: None,
    back: Callable[[nn.Module], Any] = lambda stage: stage,
    **more: Any,
) -> Verdict:
    def step(model: Any, microbatches: list[Any]) -> Any:
        stage = stages(model)[dist.get_rank()]
        losses = train(watch(stage) if watched else stage, microbatches)
        summed(stage, shared)
        after(stage)
        return back(stage), losses

    return whitebox.validate(
        step, reference=lambda: seeded(build), microbatches=data(), ranks=RANKS, loss_fn=loss_fn, **more
    )


def by_name(stage: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in stage.named_parameters()}


def three_ways() -> nn.Module:
    return Tied(uses=3)


def frozen() -> nn.Module:
    return Tied(trained=False)


def another_name(model: Any) -> list[nn.Module]:
    return tied(model, "output")


RIGHT = {
    "one block": (Cross, cross, ("block",)),
    "tied": (Tied, tied, ("embed",)),
    "three ways": (three_ways, tied, ("embed",)),
    "frozen": (frozen, tied, ()),
    "another name": (Tied, another_name, ("embed",)),
    "one bias": (Biased, biased, ("table",)),
}


@pytest.mark.parametrize(
    ("kind", "watched"), [(k, w) for k in RIGHT for w in (False, True) if (k, w) != ("one block", True)]
)
def test_copies_that_are_summed_are_right(whitebox: WhiteBox, kind: str, watched: bool) -> None:
    verdict = judged(whitebox, *RIGHT[kind], watched=watched)
    assert verdict.outcome == "pass", str(verdict)
    assert verdict.law("tied-copies").checked


@pytest.mark.parametrize("kind", RIGHT)
def test_gradients_by_name_are_enough_to_know_a_copy(whitebox: WhiteBox, kind: str) -> None:
    verdict = judged(whitebox, *RIGHT[kind], back=by_name)
    assert verdict.outcome == "pass", str(verdict)
    if kind == "another name":
        verdict = judged(whitebox, *RIGHT[kind], back=by_name, contract=Contract(names={"output": "embed"}))
        assert verdict.outcome == "pass", str(verdict)


# What is wrong with copies.


def faulty(number: int, fault: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    """A fault in the shared weight's gradient on one rank, or on all (-1)."""

    def apply(stage: nn.Module) -> None:
        if number in (-1, dist.get_rank()):
            for name, parameter in stage.named_parameters():
                if name.split(".")[0] in ("embed", "table", "block") and parameter.grad is not None:
                    parameter.grad = fault(parameter.grad)

    return apply


@pytest.mark.parametrize("kind", ["one block", "tied", "three ways", "one bias"])
def test_copies_that_nobody_summed(whitebox: WhiteBox, kind: str) -> None:
    verdict = judged(whitebox, *RIGHT[kind][:2], ())
    assert verdict.outcome == "fail"
    assert {cause.kind for cause in verdict.causes} == {"tied-not-summed"}, str(verdict)
    golden(verdict.causes[0].detail, numbers=False)
    assert not verdict.undecided


FAULTS = {"scale": lambda g: g / 3, "tied-doubled": lambda g: 2 * g, "zero": torch.zeros_like}


@pytest.mark.parametrize(*each_once(kind=FAULTS, number=[-1, 2]))
def test_copies_of_which_each_or_one_is_wrong(whitebox: WhiteBox, kind: str, number: int) -> None:
    verdict = judged(whitebox, *RIGHT["tied"], after=faulty(number, FAULTS[kind]))
    assert verdict.outcome == "fail"
    assert {cause.kind for cause in verdict.causes} == {kind}, str(verdict)
    assert {cause.parameter for cause in verdict.causes} == {"embed.weight"}
    assert "has ;" not in verdict.details
    assert not verdict.causes[0].detail.endswith("has ")
    if number > 0:
        assert {cause.stage for cause in verdict.causes} == {number}


@pytest.mark.sweep
def test_a_copy_that_began_with_other_weights(whitebox: WhiteBox) -> None:
    def stages(model: Any) -> list[nn.Module]:
        made = cross(model)
        with torch.no_grad():
            made[1].get_parameter("block.0.weight").mul_(1.5)
        return made

    verdict = judged(whitebox, Cross, stages, ("block",))
    assert verdict.law("initial-weights").outcome == "fail"
    assert (verdict.causes[0].stage, verdict.causes[0].parameter) == (1, "block.0.weight")


@pytest.mark.sweep
def test_what_the_reference_uses_once_has_no_copies(whitebox: WhiteBox) -> None:
    def stages(model: Any) -> list[nn.Module]:
        made = tied(model)
        made[2].add_module("again", nn.ModuleDict({"layers": nn.ModuleDict({"0": copy.deepcopy(model.layers[0])})}))
        return made

    verdict = judged(whitebox, Tied, stages, ("embed",))
    assert verdict.law("parameters-once").wrong == 2
    assert [cause.kind for cause in verdict.causes] == ["partition"]
