"""Steps in bf16 and fp16, on ranks whose kernels are the reference's or others, right and with a fault."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from runtime_plain import How, Plain, cut, even
from torch import Tensor, nn
from truth_check import Counts, Truth
from truth_models import COUNT, RANKS, ROWS, WIDTH, Pairs, observed

from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LAYERS, MICROBATCH = 8, 3  # of which it is dropped or doubled
FAULTS = ("dropped", "doubled", "scale", "zero", "sign")


class Relu(nn.Linear):
    """relu(linear(x)); ``kernel`` says how the product is made."""

    kernel = "same"

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(product_of(self, x))


class Gelu(Relu):
    """x + gelu(linear(norm(x))), without weights in the norm."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + nn.functional.gelu(product_of(self, nn.functional.layer_norm(x, (WIDTH,))))
        return y


def product_of(layer: Relu, x: Tensor) -> Tensor:
    """``x`` times the weight, in one of the ways that libraries make it."""
    half, w, b = WIDTH // 2, layer.weight, layer.bias
    if layer.kernel == "halves":  # as split along the sum
        return x[:, :half] @ w[:, :half].T + x[:, half:] @ w[:, half:].T + b
    if layer.kernel == "wide":  # as one that adds in fp32 and rounds once
        return nn.functional.linear(x.float(), w.float(), b.float()).to(x.dtype)
    if layer.kernel == "rows":  # as one that works on parts of a batch
        return torch.cat([nn.functional.linear(part, w, b) for part in x.chunk(2)])
    return nn.functional.linear(x, w, b)


LAYER: dict[str, type[Relu]] = {"relu": Relu, "gelu": Gelu}


def build(layer: str, dtype: str, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(LAYER[layer]() for _ in range(LAYERS))).to(TYPES[dtype])


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target.float())


def data(dtype: str, seed: int) -> Pairs:
    draw = torch.Generator().manual_seed(100 + seed)
    made = [(torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw)) for _ in range(COUNT)]
    return [(x.to(TYPES[dtype]), y.to(TYPES[dtype])) for x, y in made]


class Faulty(Plain):
    """A pipeline of which rank 1 has the ``fault``."""

    fault = ""
    done = 0

    def differentiate(self, outputs: list[Tensor], gradients: list[Any], wanted: list[Tensor]) -> None:
        before = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        super().differentiate(outputs, gradients, wanted)
        times = {"dropped": 0, "doubled": 2}.get(self.fault, 1) if self.done == MICROBATCH else 1
        for parameter, begun in zip(self.parameters, before, strict=True) if times != 1 else ():
            parameter.grad = begun + times * (parameter.grad - begun)
        self.done += 1

    def finish(self) -> None:
        super().finish()
        for parameter in self.parameters[:1] if self.fault == "zero" else self.parameters:
            parameter.grad *= {"zero": 0, "sign": -1, "scale": 0.5}.get(self.fault, 1)


def step(model: Any, pairs: Pairs, *, kernel: str, fault: str, watched: bool) -> Any:
    """The pipeline, whose layers have this kernel."""
    ranks = list(range(dist.get_world_size()))
    for layer in model:
        layer.kernel = kernel
    stage = cut(model, even(len(model), len(ranks)), dist.get_rank())
    pipeline = Faulty(observed(stage, watched), pairs, loss_fn, How(), ranks)
    pipeline.fault = fault if dist.get_rank() == 1 else ""
    return stage, pipeline.step() or None


def truth_of(fault: str) -> Truth:
    """What is true of a step with this fault."""
    if not fault:
        return Truth()
    one = fault in ("dropped", "doubled")
    return Truth(
        (fault, "scale") if fault == "sign" else (fault,),
        frozenset({"sums", "gradients"}),
        ranks=(1,),
        stages=(1,),
        microbatches=(MICROBATCH,) if one else (),
        faint=one,
    )


@dataclass(frozen=True)
class Narrow:
    """One step and its truth."""

    layer: str
    dtype: str
    kernel: str
    seed: int
    fault: str = ""

    @property
    def title(self) -> str:
        return f"{self.dtype}, {self.layer}, kernel {self.kernel}, seed {self.seed}: {self.fault or 'right'}"

    @property
    def truth(self) -> Truth:
        return truth_of(self.fault)

    @property
    def counts(self) -> Counts:
        return Counts(RANKS, RANKS, COUNT)

    def verdict(self, whitebox: WhiteBox, *, watched: bool) -> Verdict:
        """What is said of it."""
        return whitebox.validate(
            partial(step, kernel=self.kernel, fault=self.fault, watched=watched),
            reference=partial(build, self.layer, self.dtype, self.seed),
            microbatches=data(self.dtype, self.seed),
            ranks=RANKS,
            loss_fn=loss_fn,
        )


def narrow() -> Iterator[Narrow]:
    """Every row."""
    kernels = ("same", "halves", "wide", "rows")
    for layer, dtype, kernel, seed in product(LAYER, TYPES, kernels, range(3)):
        yield Narrow(layer, dtype, kernel, seed)
    for layer, dtype, kernel, fault in product(LAYER, TYPES, kernels, FAULTS):
        yield Narrow(layer, dtype, kernel, 0, fault)
