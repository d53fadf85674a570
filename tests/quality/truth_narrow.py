"""Steps in bf16 and fp16, on ranks whose kernels are the reference's or others, right and with a fault."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from runtime_plain import How, Plain
from runtime_plain import step as plain_step
from torch import Tensor, nn
from truth_check import RIGHT, Run, Truth
from truth_models import RANKS, WIDTH, Pairs, data_of

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
        return x + nn.functional.gelu(product_of(self, nn.functional.layer_norm(x, (WIDTH,))))


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


class Faulty(Plain):
    """A pipeline of which rank 1 has the ``fault``."""

    def __init__(self, fault: str, *given: Any) -> None:
        super().__init__(*given)
        self.fault, self.done = fault if self.place == 1 else "", 0

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
    for layer in model:
        layer.kernel = kernel
    return plain_step(model, pairs, how=How(loss_fn=loss_fn), watched=watched, part=partial(Faulty, fault))


def truth_of(fault: str) -> Truth:
    """What is true of a step with this fault."""
    if not fault:
        return RIGHT
    one = fault in ("dropped", "doubled")
    kinds, places = (fault, "scale") if fault == "sign" else (fault,), {"ranks": (1,), "stages": (1,)}
    concerned = (MICROBATCH,) if one else ()
    return Truth(kinds, frozenset({"sums", "gradients"}), **places, microbatches=concerned, faint=one)


def of(layer: str, dtype: str, kernel: str, seed: int = 0, *, fault: str = "") -> Run:
    """One step and its truth."""
    title = f"{dtype}, {layer}, kernel {kernel}, seed {seed}: {fault or 'right'}"
    pairs = data_of(dtype=TYPES[dtype], seed=100 + seed)
    given = {"reference": partial(build, layer, dtype, seed), "microbatches": pairs, "ranks": RANKS}
    return Run(title, partial(step, kernel=kernel, fault=fault), truth_of(fault), {**given, "loss_fn": loss_fn})


def narrow() -> Iterator[Run]:
    """Every row."""
    kernels = ("same", "halves", "wide", "rows")
    for layer, dtype, kernel, seed in product(LAYER, TYPES, kernels, range(3)):
        yield of(layer, dtype, kernel, seed)
    for layer, dtype, kernel, fault in product(LAYER, TYPES, kernels, FAULTS):
        yield of(layer, dtype, kernel, fault=fault)
