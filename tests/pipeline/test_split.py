"""The split backward against the full one: same bits, same work, hooks as often, for every kind of stage."""

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from pipeproof.pipeline import Action, PipelineSchedule, Schedule
from pipeproof.pipeline.split import NamedUses, SplitBackward
from tests.support.golden import golden
from tests.support.sweeps import each_once

W = 8


class Twice(nn.Module):
    """One weight twice on a path, fetched once: only its uses tell them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(W, W), nn.LayerNorm(W)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        return x + F.gelu(F.gelu(self.norm(x) @ weight) @ weight)


class Outputs(nn.Module):
    """Several outputs: views, one from parameters alone, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.linear, self.bias = nn.Linear(W, 2 * W), nn.Linear(W, W), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        one, two = self.wide(x).chunk(2, dim=-1)
        return self.linear(one).t(), two.sin() * one, self.bias.exp(), torch.arange(3)


class ParametersAlone(nn.Module):
    """A subexpression of parameters alone, used at two places on the path."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.linear = nn.Parameter(torch.randn(W, W)), nn.Parameter(torch.randn(W, W)), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        both = F.gelu(self.a @ self.b)
        return self.linear(F.gelu(x @ both) @ both)


class Product(torch.autograd.Function):
    """A matrix product that counts its backwards."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        Product.backwards += 1
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Custom(nn.Module):
    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.shared = nn.Linear(W, W), nn.Linear(W, W), shared

    def forward(self, x: Tensor) -> Tensor:
        y = Product.apply(F.gelu(self.one(x)), self.two.weight)
        return (self.two if self.shared else self.one)(y)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(W, W), nn.Sequential(nn.Linear(W, W), nn.GELU(), nn.Linear(W, W))
        self.reentrant, self.runs = reentrant, 0

    def _run(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.inner(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(checkpoint(self._run, self.linear(x), use_reentrant=self.reentrant))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(W, 2, 2 * W, 0.0, batch_first=True, norm_first=True)
        self.embed = nn.Embedding(5, W)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[None])[0] + self.embed.weight[:4] * self.embed(torch.tensor([1, 1, 2, 3]))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(W, W)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


def stack() -> nn.Module:
    return nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(W, W), nn.GELU(), nn.LayerNorm(W))))


def frozen() -> nn.Module:
    made = nn.Sequential(nn.Linear(W, W), nn.GELU(), nn.Linear(W, W))
    made[0].weight.requires_grad_(False)
    return made


STAGES: dict[str, Callable[[], nn.Module]] = {
    "stack": stack,
    "twice": Twice,
    "outputs": Outputs,
    "parameters alone": ParametersAlone,
    "frozen": frozen,
    "custom": Custom,
    "custom shared": lambda: Custom(shared=True),
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "checkpointed reentrantly": lambda: Checkpointed(reentrant=True),
    "transformer": Transformer,
    "recurrent": Recurrent,
}
# What cannot be deferred, and the words that say so; everything else is.
UNDEFERRED = {
    "parameters alone": "made of parameters",
    "custom": "autograd.Function computes all",
    "custom shared": "both in torch calls and inside an autograd.Function",
    "checkpointed": "recomputed",
    "checkpointed reentrantly": "reentrant checkpointing",
}
WHOLE = {"custom shared", "checkpointed reentrantly"}


def forward(module: nn.Module, x: Tensor) -> tuple[tuple[Tensor, ...], NamedUses]:
    with NamedUses() as uses:
        outputs = module(x)
    return outputs if isinstance(outputs, tuple) else (outputs,), uses


def upstream(outputs: Sequence[Tensor], seed: int) -> tuple[Tensor | None, ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(o.shape, generator=draw) if o.requires_grad else None for o in outputs)


def full(module: nn.Module, x: Tensor, seed: int) -> tuple[Tensor | None, int]:
    """A full backward: the input's gradient, and the floating-point operations that it took."""
    outputs = module(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    given = [(o, g) for o, g in zip(outputs, upstream(outputs, seed), strict=True) if g is not None]
    with FlopCounterMode(display=False) as count:
        torch.autograd.backward([o for o, _ in given], [g for _, g in given])
    return x.grad, count.get_total_flops()


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def same(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(one, other, strict=True))  # type: ignore[arg-type]


def counted(module: nn.Module) -> dict[str, int]:
    """How often each parameter's gradient was accumulated, from now on."""
    counts = dict.fromkeys((name for name, p in module.named_parameters() if p.requires_grad), 0)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: counts.__setitem__(name, counts[name] + 1)  # type: ignore[misc]
            )
    return counts


@pytest.mark.parametrize(*each_once(name=STAGES, first=[False, True]))
def test_a_split_backward_is_the_full_one_cut_in_two(name: str, first: bool) -> None:
    """Three microbatches, all inputs' gradients before any weight's: bits, work, hooks, and nothing touched early."""
    torch.manual_seed(0)
    whole = STAGES[name]()
    split = copy.deepcopy(whole)
    hooks, split_hooks = counted(whole), counted(split)
    flops = split_flops = 0
    waiting = []
    Product.backwards = 0
    for microbatch in range(3):
        x = torch.randn(4, W, generator=torch.Generator().manual_seed(microbatch))
        x_whole, x_split = (x.clone().requires_grad_(not first) for _ in range(2))
        expected, spent = full(whole, x_whole, microbatch)
        flops += spent
        outputs, uses = forward(split, x_split)
        backward = SplitBackward((x_split,), outputs, uses.views)
        before = gradients(split)
        with FlopCounterMode(display=False) as count:
            (grad,) = backward.input(upstream(outputs, microbatch))
        split_flops += count.get_total_flops()
        assert (grad is None) == (expected is None)
        assert grad is None or expected is None or torch.equal(grad, expected)
        if name not in WHOLE:
            assert same(gradients(split), before), "the parameters are touched by weight() alone"
        if not first:
            assert (UNDEFERRED.get(name, "") in " ".join(backward.undeferred)) == (
                bool(backward.undeferred) or name not in UNDEFERRED
            )
            assert bool(backward.undeferred) == (name in UNDEFERRED)
        waiting.append(backward)
    for backward in waiting:
        with FlopCounterMode(display=False) as count:
            backward.weight()
        split_flops += count.get_total_flops()
    assert same(gradients(split), gradients(whole))
    assert split_flops == flops
    assert split_hooks == hooks
    assert set(hooks.values()) <= {0, 3}  # 0 for what the stage does not use
    if name.startswith("custom"):
        assert Product.backwards == 2 * 3
    if isinstance(whole, Checkpointed) and isinstance(split, Checkpointed):
        assert split.runs == whole.runs == 2 * 3


def test_work_is_really_deferred() -> None:
    """A check that could not fail if ``weight`` did nothing: half of a linear stage's work is the weights'."""
    module, x = stack(), torch.randn(4, W, requires_grad=True)
    outputs, uses = forward(module, x)
    backward = SplitBackward((x,), outputs, uses.views)
    with FlopCounterMode(display=False) as count:
        backward.input(upstream(outputs, 0))
    inputs = count.get_total_flops()
    with FlopCounterMode(display=False) as count:
        backward.weight()
    assert inputs == count.get_total_flops() > 0


@pytest.mark.long
def test_activations_that_only_the_inputs_needed_are_let_go_before_the_weights() -> None:
    """GELU's input, the first linear's output, is needed for the way to the input, and not for any weight."""
    one, two = nn.Linear(W, W), nn.Linear(W, W)
    kept: list[weakref.ref[Tensor]] = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = one(x)
            kept.append(weakref.ref(y.untyped_storage()))  # type: ignore[arg-type]
            return two(F.gelu(y))  # type: ignore[no-any-return]

    x = torch.randn(4, W, requires_grad=True)
    outputs, uses = forward(Watched(), x)
    held = torch.autograd.graph.get_gradient_edge(outputs[0])
    backward = SplitBackward((x,), outputs, uses.views)
    gelu = next(n for n, _ in held.node.next_functions if n is not None and n.name().startswith("Gelu"))
    backward.input((torch.ones(4, W),))
    gc.collect()
    with pytest.raises(AssertionError, match="let go"):
        _ = gelu._saved_self  # type: ignore[attr-defined]
    backward.weight()
    assert one.weight.grad.any()


def test_every_use_of_a_parameter_has_a_view_of_its_own_and_nothing_else_has() -> None:
    module, x = Twice(), torch.randn(4, W)
    _, uses = forward(module, x)
    assert len(uses.views) == 4  # norm weight and bias, and the matrix twice
    with NamedUses() as none, torch.no_grad():
        module(x)
    assert none.views == set()


def test_missing_output_gradients_leave_what_is_behind_them_alone() -> None:
    module = Outputs()
    x = torch.randn(4, W, requires_grad=True)
    outputs, uses = forward(module, x)
    backward = SplitBackward((x,), outputs, uses.views)
    assert backward.input((None, None, torch.ones(3), None)) == (None,)
    backward.weight()
    assert module.bias.grad is not None
    assert module.wide.weight.grad is None
    nothing = SplitBackward((x,), outputs, uses.views)
    assert nothing.input((None, None, None, None)) == (None,)
    nothing.weight()


def test_a_schedule_says_what_it_could_not_put_off() -> None:
    plan = Schedule("split", 1, (0, 0), (tuple(map(Action.parse, "0F0 1F0 1I0 0I0 1W0 0W0".split())),))
    stages = [nn.Linear(W, W), Custom()]
    schedule = PipelineSchedule(kind=plan, n_microbatches=1, stages=stages, loss_fn=F.mse_loss)
    assert schedule.undeferred == {}
    schedule.train_step([(torch.randn(4, W), torch.randn(4, W))])
    assert list(schedule.undeferred) == [1]
    golden(schedule.undeferred[1][0])


def test_what_flows_on_is_not_what_later_shares_are_added_to() -> None:
    """``x + w`` gives both one gradient: x's must stay as it is when w's grows, until somebody reads it."""
    weight = nn.Parameter(torch.randn(W))

    def backward() -> Tensor:
        x = torch.randn(W, requires_grad=True)
        outputs, uses = forward(lambda x: x + weight, x)  # type: ignore[arg-type]
        half = SplitBackward((x,), outputs, uses.views)
        (flows_on,) = half.input((torch.ones(W),))
        half.weight()
        return flows_on

    first = backward()
    backward()
    assert torch.equal(weight.grad, torch.full((W,), 2.0))
    assert torch.equal(first, torch.ones(W))
