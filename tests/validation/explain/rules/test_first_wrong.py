"""Where a watched pipeline of tuples first went wrong, and where a tensor that nobody knows forbids to say so."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import watch
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden

WIDTH, ROWS, COUNT, RANKS = 8, 4, 4, 3
EVERY = tuple(range(COUNT))
loss_fn = nn.functional.mse_loss


class Layer(nn.Module):
    """Two tensors flow through it, and a mask comes in beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act: Callable[[Tensor], Tensor] = nn.functional.silu
        self.cuts = False

    def forward(self, a: Tensor, b: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        made = self.two(a.detach() if self.cuts else a)
        return a + torch.tanh(self.one(b)) * (mask + 0.5), b + self.act(made)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
        return self.out(a * mask + b)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Last()])

    def forward(self, a: Tensor, b: Tensor, mask: Tensor) -> Any:
        for layer in list(self.layers)[:-1]:
            a, b = layer(a, b, mask)
        return self.layers[-1](a, b, mask)


def build() -> Chain:
    torch.manual_seed(4)
    return Chain()


def data() -> list[Any]:
    draw = partial(torch.randn, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return [((draw(), draw(), (draw() > -0.5).float()), draw()) for _ in range(COUNT)]


Change = Callable[[int, int, list[Any]], list[Any]]  # of what comes in: the rank, the microbatch, what it is


def unchanged(rank: int, m: int, tensors: list[Any]) -> list[Any]:
    return tensors


@dataclass(frozen=True)
class Faults:
    """What a run does otherwise."""

    received: Change = unchanged
    gradients: Change = unchanged
    kept: Callable[[int, list[Tensor]], None] = lambda rank, inputs: None
    model: Callable[[Chain], None] = lambda model: None
    after: Callable[[int, int, nn.Module], None] = lambda rank, m, stage: None
    loss: Callable[[Tensor, Tensor], Tensor] = loss_fn
    cut: tuple[int, int] | None = None  # the rank, and the number of its input that wants no gradient


def run(model: Chain, microbatches: list[Any], *, faults: Faults) -> Any:
    """Every rank runs all layers, a microbatch at a time, and watches and hands back its own."""
    own, losses = dist.get_rank(), []
    faults.model(model)
    stages = [watch(layer) if rank == own else layer for rank, layer in enumerate(model.layers)]
    for m, (given, target) in enumerate(microbatches):
        inputs, outputs = list[list[Any]](), list[Any]()
        for rank, stage in enumerate(stages):
            came = [*(tensor.detach().clone() for tensor in (outputs[-1] if rank else ())), *given[2 * bool(rank) :]]
            inputs.append([tensor.clone() for tensor in (faults.received(rank, m, came) if rank else came)])
            for k in range(2 if rank else 0):
                inputs[-1][k].requires_grad_((rank, k) != faults.cut)
            outputs.append(stage(*inputs[-1]))
            faults.kept(rank, inputs[-1])
        losses.append(faults.loss(outputs[-1], target))
        (losses[-1] / COUNT).backward()
        for rank in reversed(range(RANKS - 1)):
            handed = [torch.zeros_like(one) if one.grad is None else one.grad for one in inputs[rank + 1][:2]]
            gradients = faults.gradients(rank, m, handed)
            pairs = [pair for pair in zip(outputs[rank], gradients, strict=True) if pair[1] is not None]
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        for rank, stage in enumerate(stages):
            faults.after(rank, m, stage)
    return stages[own], [loss.item() for loss in losses] if own == RANKS - 1 else None


def judged(whitebox: WhiteBox, **faults: Any) -> Verdict:
    step = partial(run, faults=Faults(**faults))
    return whitebox.validate(step, reference=build, microbatches=data(), ranks=RANKS, loss_fn=loss_fn)


def at(rank: int, change: Callable[[int, list[Any]], list[Any]]) -> Change:
    return lambda observed, m, tensors: change(m, tensors) if observed == rank else tensors


@pytest.mark.sweep
def test_a_right_run_passes_with_every_boundary_watched(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox)
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), verdict
    assert verdict.law("boundaries").exact == verdict.law("boundaries").checked > 0


def in_the_middle(**changes: Any) -> Callable[[Chain], None]:
    """Changes attributes of the middle layer."""
    return lambda model: vars(model.layers[1]).update(changes)


def freed(rank: int, inputs: list[Tensor]) -> None:
    if rank == 1:
        inputs[0].data.zero_()  # only its weights' gradients need it, so what it hands on is right


def half_arrived(m: int, gradients: list[Tensor]) -> list[Tensor]:
    return [gradients[0], torch.cat([gradients[1][:2], gradients[1][2:] * 0])]


OTHER_MASKS = [given[2] for given, _ in data()][1:]
SENT: list[Tensor] = []  # the last gradient to rank 1


def as_sent(rank: int, m: int, tensors: list[Any]) -> list[Any]:
    SENT[:] = [tensors[0].clone()] if rank == 1 else SENT
    return tensors


def sweep(*values: Any, id: str) -> Any:
    return pytest.param(*values, id=id, marks=pytest.mark.sweep)


@pytest.mark.parametrize(
    ("faults", "kind", "stage", "microbatches"),
    [
        pytest.param(
            {"received": at(1, lambda m, x: [*x[:2], OTHER_MASKS[m] if m < len(OTHER_MASKS) else x[2]])},
            *("swapped-data", 1, (0, 1, 2)),
            id="a side input of another microbatch",
        ),
        pytest.param(
            {"received": at(1, lambda m, x: [*x[:2], x[2] * 0])}, "altered", 1, EVERY, id="a side input is missing"
        ),
        pytest.param(
            {"gradients": as_sent, "received": at(1, lambda m, x: [SENT[0] if m == 2 else x[0], *x[1:]])},
            *("wrong-message", 1, (2,)),
            id="an activation came in as a gradient",
        ),
        # The gradients of a tuple.
        pytest.param({"gradients": at(1, lambda m, g: g[::-1])}, "wrong-message", 1, EVERY, id="exchanged"),
        pytest.param({"gradients": at(1, lambda m, g: [g[0], g[0]])}, "wrong-message", 1, EVERY, id="one twice"),
        pytest.param({"gradients": at(1, lambda m, g: [g[0], None])}, "altered", 1, EVERY, id="one dropped"),
        pytest.param({"gradients": at(1, half_arrived)}, "altered", 1, EVERY, id="half arrived"),
        pytest.param({"loss": nn.functional.l1_loss}, "computation", 2, EVERY, id="another loss"),
        pytest.param({"loss": lambda y, t: loss_fn(y, t * 1.01)}, "computation", 2, EVERY, id="another target"),
        pytest.param({"cut": (1, 1)}, "dropped", 1, EVERY, id="an input without its graph"),
        sweep({"received": at(1, lambda m, x: [x[0], x[1] - x[0], x[2]])}, "altered", 1, EVERY, id="wrong on its way"),
        sweep(
            {"received": at(2, lambda m, x: [x[0], x[0] * 1.0, x[2]])}, "wrong-message", 2, EVERY, id="one came twice"
        ),
        sweep({"model": in_the_middle(act=nn.functional.gelu)}, "computation", 1, EVERY, id="another function"),
        sweep({"model": in_the_middle(cuts=True)}, "computation", 1, EVERY, id="a backward that loses a path"),
        sweep({"kept": freed}, "overwritten", 1, EVERY, id="an input freed before its backward"),
    ],
)
def test_the_first_wrong_tensor_names_the_fault(
    whitebox: WhiteBox, faults: dict[str, Any], kind: str, stage: int, microbatches: tuple[int, ...]
) -> None:
    verdict = judged(whitebox, **faults)
    assert verdict.outcome == "fail", str(verdict)
    cause = verdict.causes[0]
    assert (cause.kind, cause.rank, cause.stage, cause.microbatches) == (kind, stage, stage, microbatches)
    assert "model" not in faults or not any("wrong-message" in one.kinds for one in verdict.ruled_out)
    golden(f"{cause.action}: {cause.detail}", numbers=False)


@pytest.mark.sweep
def test_a_fault_nearer_to_the_loss_than_the_first_is_a_second_cause(whitebox: WhiteBox) -> None:
    def clear(rank: int, m: int, stage: nn.Module) -> None:
        if (rank, m) == (2, 0):
            stage.zero_grad()

    def rounded(m: int, tensors: list[Tensor]) -> list[Tensor]:
        return [one.bfloat16().float() for one in tensors]

    verdict = judged(whitebox, gradients=at(0, rounded), after=clear)
    assert [(c.kind, c.stage, c.microbatches) for c in verdict.causes] == [("dropped", 2, (0,)), ("rounded", 0, EVERY)]


@pytest.mark.parametrize(("more", "outcome"), [(4e-4, "pass"), (8e-4, "fail")])
def test_what_is_wrong_too_little_for_its_place_is_told_by_its_bits(
    whitebox: WhiteBox, more: float, outcome: str
) -> None:
    """Half of the digits are right where the fault is, and fewer where later stages magnify it."""

    slightly = in_the_middle(act=lambda made: nn.functional.silu(made) * (1 + more))
    verdict = judged(whitebox, model=slightly)
    assert verdict.law("boundaries").outcome == outcome, str(verdict)
    assert not verdict.causes, str(verdict)
    golden(verdict.undecided[0], numbers=False)
