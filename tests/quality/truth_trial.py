"""What the functional and the asynchronous pipeline run on, and their rows: runs with a truth each."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from runtime_partial import Wide
from torch import Tensor, nn
from truth_check import Counts, Truth
from truth_layers import blocks, chain, data_of, seeded
from truth_models import WIDTH, Block, Pairs, loss_fn

from pipeproof import Contract, StageByStage
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox

RIGHT = Truth()
LAYERS, COUNT = 6, 6
TWICE = [0, 1, 0, 1]  # two stages, two replicas


class Split(Block):
    """A block under autocast, wholly or in evaluations; ``cut``: its product is made in two parts."""

    cut, always = False, False

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.always or not self.training):
            if not self.cut:
                return super().forward(x).float()
            h, w, half = self.norm(x), self.linear.weight, WIDTH // 2
            made = h[:, :half] @ w[:, :half].T + h[:, half:] @ w[:, half:].T + self.linear.bias
            return (x + nn.functional.gelu(made)).float()


class Cast(Split):
    """A block under autocast, whose product may be made of a copy of the weight that was cast once."""

    always, keeps = True, False

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.keeps:
            return super().forward(x)
        if self.kept is None:
            self.kept = self.linear.weight.detach().clone()
        with torch.autocast("cpu", torch.bfloat16):
            old = self.linear.weight + (self.kept - self.linear.weight).detach()
            made = nn.functional.linear(self.norm(x), old, self.linear.bias)
            return (x + nn.functional.gelu(made)).float()


class Keyed(Block):
    """A block with dropout that is drawn by a key in the last column; ``shift`` changes those of calls with a graph."""

    shift = 0

    def forward(self, given: Tensor) -> Tensor:
        x, key = given[:, :WIDTH], given[:, WIDTH:]
        y = super().forward(x)
        if self.training:
            shift = self.shift if torch.is_grad_enabled() else 0
            draw = torch.Generator().manual_seed(int(key[0, 0]) + shift)
            y = y * (torch.rand(y.shape, generator=draw) > 0.2) / 0.8
        return torch.cat([y, key], dim=1)


class Overwriting(Block):
    """A block whose activation is in place."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.linear(self.norm(x)).add_(0.1))


class Ends(nn.Module):
    """A product with a weight that the first and the last layer share."""

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) if weight is None else weight
        self.back = weight is not None

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.table.T if self.back else self.table)


def _tied() -> nn.Module:
    first = Ends()
    return chain(first, *blocks(count=LAYERS - 2), Ends(first.table))


def _frozen(*numbers: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = chain(*blocks(count=LAYERS))
        for number in numbers:
            model[number].requires_grad_(False)
        return model

    return build


def of(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A builder of a chain of such layers."""
    return seeded(lambda: chain(*(kind() for _ in range(LAYERS))))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "plain": of(Block),
    "four": seeded(lambda: chain(*blocks(count=4))),
    "frozen first": seeded(_frozen(0, 1)),
    "frozen middle": seeded(_frozen(3)),
    "tied": seeded(_tied),
    "norms": of(lambda: nn.Sequential(Block(), nn.BatchNorm1d(WIDTH))),
    "dropout": of(Keyed),
    "eval in bf16": of(Split),
    "autocast": of(Cast),
    "in place": of(Overwriting),
    "wide": seeded(lambda: chain(*(Wide() for _ in range(4)))),
    "bf16": seeded(lambda: chain(*blocks(count=LAYERS)).to(torch.bfloat16)),
    "weight norm": of(lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())),
}


def keyed(count: int = COUNT) -> Pairs:
    """Data whose last column is a key."""
    pairs = data_of(count=count)
    keys = [torch.full((len(x), 1), 100.0 + m) for m, (x, _) in enumerate(pairs)]
    return [(torch.cat([x, key], dim=1), torch.cat([t, key], dim=1)) for (x, t), key in zip(pairs, keys, strict=True)]


def some(*sizes: int) -> Pairs:
    """Microbatches of these numbers of rows."""
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(n, WIDTH, generator=draw), torch.randn(n, WIDTH, generator=draw)) for n in sizes]


def sgd(rate: float = 0.1, momentum: float = 0.0) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """A maker of SGD."""
    return partial(_sgd, rate=rate, momentum=momentum)


def _sgd(model: nn.Module, *, rate: float, momentum: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """As the functional pipeline has it."""
    return torch.optim.Adam(model.parameters(), lr=0.01)


@dataclass(frozen=True)
class Trial:
    """A run of one of the two, and its truth. ``against``: "reference", "itself", or "own": stages that the step builds
    itself, beside the reference."""

    runtime: str
    name: str
    step: Callable[..., Any]
    truth: Truth = RIGHT
    ranks: Any = 3
    model: str = "plain"
    data: Pairs = field(default_factory=partial(data_of, count=COUNT))
    more: Mapping[str, Any] = field(default_factory=dict)
    against: str = "reference"

    @property
    def title(self) -> str:
        added = {"itself": ", against itself", "own": ", of its own build"}.get(self.against, "")
        return f"{self.runtime}: {self.name}{added}"

    @property
    def ways(self) -> tuple[bool, ...]:
        """Watched or not: what is held against itself has to be."""
        return (True,) if self.against == "itself" else (True, False)

    @property
    def counts(self) -> Counts:
        """How many there are of each."""
        each = len(self.more.get("contract", Contract()).parts(len(self.data))[0])
        if isinstance(self.ranks, int):
            return Counts(self.ranks, self.ranks, each)
        return Counts(4, 2, each, 2)

    def verdict(self, whitebox: WhiteBox, *, watched: bool) -> Verdict:
        """What is said of it."""
        build = MODELS[self.model]
        step = partial(self.step, watched=watched)
        given = {"microbatches": self.data, "ranks": self.ranks, "timeout_s": 60.0, **self.more}
        if self.against != "reference":
            step = partial(_of_itself, step=step, build=build)
        if self.against == "itself":
            return whitebox.validate(step, reference=StageByStage(loss_of_rows, build=build), **given)
        return whitebox.validate(step, reference=build, loss_fn=loss_of_rows, **given)


def loss_of_rows(output: Tensor, target: Tensor) -> Tensor:
    """The loss of as many rows as the target has."""
    return loss_fn(output[: len(target)], target)


def _of_itself(model: Any, microbatches: Any, *, step: Callable[..., Any], build: Callable[[], Any]) -> Any:
    """The model of a step that is held against itself is on the meta device: each rank has stages of its own."""
    return step(build(), microbatches)


def every(*tables: Iterator[Trial]) -> tuple[Trial, ...]:
    """All rows, in order."""
    return tuple(one for table in tables for one in table)
