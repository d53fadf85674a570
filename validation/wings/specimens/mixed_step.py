"""A mixed-precision step written by hand: GPipe, one stage on each rank, and all operations on gradients.

Our own runtime has none of this. A subclass with one change is a fault.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

WIDTH, ROWS, COUNT, LAYERS = 16, 8, 4, 2  # of every layer, of a microbatch, of microbatches, of a stage's layers
_RATE, _MOMENTUM = 0.5, 0.9
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

Pairs = Sequence[tuple[Tensor, Tensor]]
Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class MixedPrecision:
    """Conventions of a step, each a value.

    weights: type of weights, and of stage inputs. autocast: the computing type, if different. main_grad: microbatches'
    gradients are added in fp32, beside ``.grad``. masters: the optimizer moves fp32 copies of weights, copied back
    later. scale: factor on losses; 0: none. max_norm: clipping norm of gradients.
    """

    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    main_grad: bool = False
    masters: bool = False
    scale: float = 0.0
    max_norm: float = math.inf

    def __str__(self) -> str:
        words = [f"weights={_NAMES[self.weights]}"]
        words += [] if self.autocast is None else [f"autocast={_NAMES[self.autocast]}"]
        words += [word for word, there in (("main_grad", self.main_grad), ("masters", self.masters)) if there]
        words += [f"scale={self.scale:g}"] if self.scale else []
        words += [f"max_norm={self.max_norm:g}"] if math.isfinite(self.max_norm) else []
        return " ".join(words)


class MixedStep:
    """One step on one rank's stage."""

    def __init__(self, way: MixedPrecision, rank: int, ranks: int) -> None:
        self.way, self.rank, self.last = way, rank, ranks - 1
        self.stage = self.build().to(way.weights)
        self.named = {f"{rank}.{name}": one for name, one in self.stage.named_parameters()}  # as in the whole model
        self.sums = {name: self.empty_sum(one) for name, one in self.named.items()} if way.main_grad else {}
        self.masters = {name: self.master_of(one) for name, one in self.named.items()} if way.masters else {}
        self.held = {**self.named, **self.masters}  # what the optimizer moves
        self.optimizer = torch.optim.SGD(self.held.values(), lr=_RATE, momentum=_MOMENTUM)
        self.scaler = GradScaler("cpu", init_scale=self.first_scale(), enabled=way.scale > 0)
        self.scaler.scale(torch.zeros(()))  # on ranks without a loss, too
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.losses: list[float] = []
        self.norm = 0.0
        for parameter in self.named.values() if way.main_grad else ():
            parameter.register_post_accumulate_grad_hook(self.add_up)  # type: ignore[no-untyped-call]  # in torch

    def run(self, microbatches: Pairs, look: Callable[[Gradients], None]) -> None:
        """Run the whole step; ``look`` at complete gradients before clipping."""
        self.forwards(microbatches)
        self.backwards()
        self.give_to_optimizer()
        self.unscale()
        look(self.gradients)
        self.norm = self.norm_of_all()
        self.clip()
        self.update()

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients for the optimizer."""
        return {name: one.grad for name, one in self.held.items() if one.grad is not None}

    def build(self) -> nn.Sequential:
        """The stage, in fp32."""
        with torch.random.fork_rng():
            torch.manual_seed(self.rank)
            layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
            return nn.Sequential(*layers)

    def first_scale(self) -> float:
        """Return this rank's initial loss scale."""
        return self.way.scale or 1.0

    def empty_sum(self, parameter: Tensor) -> Tensor:
        """Return an empty sum for microbatches' gradients."""
        return torch.zeros_like(parameter, dtype=torch.float32)

    def master_of(self, parameter: Tensor) -> Tensor:
        """Return the optimizer's copy of a weight."""
        return parameter.detach().float().clone().requires_grad_()

    def add_up(self, parameter: Tensor) -> None:
        """Add a backward's gradient to the sum."""
        name = next(name for name, one in self.named.items() if one is parameter)
        assert parameter.grad is not None, "a hook is called when there is one"
        self.sums[name] += parameter.grad
        parameter.grad = None

    def forwards(self, microbatches: Pairs) -> None:
        """All forwards, with the losses of the last stage."""
        computing = self.way.autocast or self.way.weights  # and the type of a stage's output
        for inputs, target in microbatches:
            taken = self.receive(self.rank - 1, computing).requires_grad_() if self.rank else inputs
            with torch.autocast("cpu", computing, enabled=self.way.autocast is not None):
                made = self.stage(taken)
            if self.rank == self.last:
                loss = loss_fn(made, target)
                self.losses.append(loss.item())
                made = self.scale(loss / len(microbatches))
            else:
                self.send(made.detach(), self.rank + 1)
            self.kept.append((taken, made))

    def backwards(self) -> None:
        """Run all backwards, in the order of forwards."""
        for taken, made in self.kept:
            flow = None if self.rank == self.last else self.receive(self.rank + 1, made.dtype)
            torch.autograd.backward(made, flow)
            if self.rank:
                assert taken.grad is not None, "a stage has layers"
                self.send(taken.grad, self.rank - 1)

    def send(self, tensor: Tensor, peer: int) -> None:
        """Send a stage's output, or a gradient."""
        dist.send(tensor, peer)

    def receive(self, peer: int, dtype: torch.dtype) -> Tensor:
        """Receive a tensor."""
        message = torch.empty(ROWS, WIDTH, dtype=dtype)
        dist.recv(message, peer)
        return message

    def scale(self, loss: Tensor) -> Tensor:
        """Scale the loss for differentiation."""
        found: Tensor = self.scaler.scale(loss)
        return found

    def give_to_optimizer(self) -> None:
        """Move summed gradients to the optimizer's place."""
        for name, one in self.held.items():
            gradient = self.sums.get(name, self.named[name].grad)
            one.grad = None if gradient is None else gradient.to(one.dtype)

    def unscale(self) -> None:
        """Divide gradients by the loss scale."""
        if self.way.scale:
            self.scaler.unscale_(self.optimizer)

    def norm_of_all(self) -> float:
        """The norm over all ranks."""
        square = torch.stack([one.double().square().sum() for one in self.gradients.values()]).sum()
        dist.all_reduce(square)
        return float(square.sqrt())

    def clip(self) -> None:
        """Clip gradients by the norm."""
        factor = self.way.max_norm / (self.norm + 1e-6)
        for one in self.gradients.values() if factor < 1 else ():
            one.mul_(factor)

    def overflows(self) -> bool:
        """True if all ranks' gradients require a skipped step."""
        return not math.isfinite(self.norm)

    def update(self) -> None:
        """Step the optimizer, and copy its weights back."""
        if not self.overflows():
            self.optimizer.step()
            self.copy_back()

    @torch.no_grad()
    def copy_back(self) -> None:
        """Copy master weights into weights."""
        for name, master in self.masters.items():
            self.named[name].copy_(master)


def microbatches_of(way: MixedPrecision) -> Pairs:
    """Inputs (ROWS, WIDTH) in the weights' type and targets (ROWS, WIDTH) in fp32, of every microbatch."""
    draw = torch.Generator().manual_seed(7)
    pairs = [torch.randn(2, ROWS, WIDTH, generator=draw) for _ in range(COUNT)]
    return [(inputs.to(way.weights), target) for inputs, target in pairs]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """A microbatch's loss, in fp32."""
    return nn.functional.mse_loss(output.float(), target)
