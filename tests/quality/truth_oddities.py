"""More models and steps that are right: what public models and runtimes do that a suite may never have observed."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from runtime_plain import Chain, How, Plain, cut, even, step
from torch import Tensor, nn
from truth_layers import Before, Ends, Plainly, Writes, blocks, chain, data_of, of_dtype, seeded
from truth_models import COUNT, ROWS, WIDTH, Block, Pairs, loss_fn, observed

from pipeproof import watch
from pipeproof.core.contract import Contract

TOKENS = 11


class Tokens(nn.Module):
    """An embedding."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH, sparse=sparse)

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.table(ids)
        return made


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The mean over the targets that count."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=0)


def tokens() -> Pairs:
    """Numbers of tokens, and those that come next."""
    draw = torch.Generator().manual_seed(2)
    ids = [torch.randint(TOKENS, (ROWS, 7), generator=draw) for _ in range(COUNT)]
    return [(each[:, :-1], each[:, 1:]) for each in ids]


class Scaled(Block):
    """Has parameters of one number, of no number, and a complex buffer that turns what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.empty = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.zeros(0))
        self.register_buffer("turns", torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2) / 5))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_real(torch.view_as_complex(x.reshape(-1, WIDTH // 2, 2)) * self.turns)
        made: Tensor = super().forward(turned.reshape(x.shape) * self.gamma) + self.empty.sum()
        return made


class StraightThrough(torch.autograd.Function):
    """Rounds, and lets gradients through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Quantised(Block):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = StraightThrough.apply(super().forward(x))
        return made


class Autocast(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Offloads(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


class Mixed(Block):
    """Its linear layer is in bf16, its norm in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + nn.functional.gelu(self.linear(self.norm(x).bfloat16()).float())
        return made


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.cell(x)[0]
        return made


class Beside(Block):
    """A second stream goes through as it is, and the first is handed on twice."""

    def forward(self, given: Any) -> Any:
        x, same, side = given if isinstance(given, tuple) else (given, given, given.detach() * 2)
        y = super().forward(0.5 * (x + same))
        return y, y, side


class Ended(nn.Module):
    def forward(self, given: Any) -> Tensor:
        made: Tensor = given[0] + 0.1 * given[2]
        return made


class Observed(Block):
    """A second output that only people look at, though a gradient could reach it."""

    def forward(self, given: Any) -> Any:
        x = given[0] if isinstance(given, tuple) else given
        return super().forward(x), self.linear.weight.square().sum()


class First(nn.Module):
    def forward(self, given: Any) -> Tensor:
        made: Tensor = given[0]
        return made


class AddsInPlace(Block):
    """Changes what it made itself, in place, and its input's clone."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x.clone().add_(0.25))
        return y.mul_(0.5)


class SharedRelu(nn.Module):
    """Ends with a relu that other layers end with too."""

    def __init__(self, relu: nn.Module) -> None:
        super().__init__()
        self.linear, self.end = nn.Linear(WIDTH, WIDTH), relu

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.end(self.linear(x))
        return made


def one_relu() -> nn.Module:
    relu = nn.ReLU()
    return chain(*(SharedRelu(relu) for _ in range(8)))


def normed() -> nn.Module:
    model = chain(*blocks())
    for layer in model:
        nn.utils.parametrizations.weight_norm(layer.linear)
    return model


def mean_of_all(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def hair_off(stage: nn.Module, given: tuple[Any, ...]) -> Any:
    """Rounds otherwise, in a forward and in what comes of it."""
    return stage(*(x * (1 + 2**-23) for x in given))


def language(sparse: bool = False) -> Callable[[], nn.Module]:
    return lambda: chain(Tokens(sparse), *blocks(count=6), nn.Linear(WIDTH, TOKENS))


# Steps.


def with_hooks(stage: nn.Module, pairs: Pairs) -> None:
    for parameter in stage.parameters():
        parameter.register_hook(lambda gradient: gradient.clone())
    stage.register_forward_hook(lambda module, given, made: None)


def watched_twice(model: Any, pairs: Pairs, *, watched: bool) -> Any:
    """A stage is watched, and a layer inside it as well."""
    if watched:
        watch(model[2 * dist.get_rank()])
    return step(model, pairs, loss_fn=loss_fn, watched=watched)


def second_step(model: Any, pairs: Pairs, *, watched: bool) -> Any:
    """The step that is judged is the second one; the first has moved nothing."""
    ranks = list(range(dist.get_world_size()))
    stage = cut(model, even(len(model), len(ranks)), dist.get_rank())
    Plain(stage, pairs, loss_fn, How(), ranks).step()
    stage.zero_grad()
    losses = Plain(observed(stage, watched), pairs, loss_fn, How(), ranks).step()
    return stage, losses or None


def with_an_empty_stage(model: Any, pairs: Pairs, *, watched: bool) -> Any:
    """Rank 1 has no layer and hands on what it receives."""
    return step(model, pairs, loss_fn=loss_fn, split=(3, 0, 3, 2), watched=watched)


class Renamed(nn.Module):
    """A stage whose layers have names of their own."""

    def __init__(self, stage: nn.Sequential) -> None:
        super().__init__()
        self.first, self.rest = stage[0], stage[1:]

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.rest(self.first(x))
        return made


def renamed(model: Any, pairs: Pairs, *, watched: bool) -> Any:
    ranks = list(range(dist.get_world_size()))
    stage = Renamed(cut(model, even(len(model), len(ranks)), dist.get_rank()))
    return stage, Plain(observed(stage, watched), pairs, loss_fn, How(), ranks).step() or None


def copied_weights(model: Any, pairs: Pairs, *, watched: bool) -> Any:
    """A stage made anew, into which the weights are loaded, under other names."""
    ranks = list(range(dist.get_world_size()))
    part = cut(model, even(len(model), len(ranks)), dist.get_rank())
    own = Renamed(Chain(*(Block() for _ in part)))
    for new, old in zip((own.first, *own.rest), part, strict=True):
        new.load_state_dict(old.state_dict())
    return own, Plain(observed(own, watched), pairs, loss_fn, How(), ranks).step() or None


def weights_stored(model: Any, pairs: Pairs, *, watched: bool) -> Any:
    """The reference's layers, with backwards that write the weights' gradients themselves."""
    for number, layer in enumerate(model):
        model[number] = Writes()
        model[number].linear = layer.linear
    return step(model, pairs, loss_fn=loss_fn, watched=watched)


class Head(nn.Module):
    """The last block, with a copy of the first one's weight that has a name of its own."""

    def __init__(self, block: Block, copy: nn.Parameter) -> None:
        super().__init__()
        self.norm, self.shared_weight, self.bias = block.norm, copy, block.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + nn.functional.gelu(nn.functional.linear(self.norm(x), self.shared_weight, self.bias))
        return made


def tied_model() -> nn.Module:
    model = chain(*blocks())
    model[7].linear.weight = model[0].linear.weight
    return model


def tied_by_another_name(model: Any, pairs: Pairs, *, watched: bool) -> Any:
    """The last stage has its own copy of the first weight; both gradients are added, by whoever holds one."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    weight = model[0].linear.weight
    if rank == last:
        weight = nn.Parameter(weight.detach().clone())
        model[7] = Head(model[7], weight)
    stage, losses = step(model, pairs, loss_fn=loss_fn, watched=watched)
    if rank in (0, last):
        other = torch.empty_like(weight)
        assert weight.grad is not None, "after the last backward"
        own = weight.grad.clone()
        work = dist.isend(own, last - rank, tag=77)
        dist.recv(other, last - rank, tag=77)
        work.wait()
        weight.grad = own + other if rank == 0 else other + own
    return stage, losses


def in_the_reference(name: str) -> str:
    """What the names of ``Head`` are in the reference."""
    return {"7.shared_weight": "7.linear.weight", "7.bias": "7.linear.bias"}.get(name, name)


def sharded_sums(model: Any, pairs: Pairs, *, watched: bool) -> Any:
    """Two replicas; each keeps one half of the rows of every gradient, as a reduce-scatter leaves it."""
    rank = dist.get_rank()
    pipeline, place = [rank % 2, rank % 2 + 2], rank // 2
    stage = cut(model, (4, 4), place)
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][place]
    losses = Plain(observed(stage, watched), pairs, loss_fn, How(), pipeline).step()
    names = {id(p): name for name, p in model.named_parameters()}
    made = {}
    for parameter in stage.parameters():
        gradient = parameter.grad
        assert gradient is not None, "after the last backward"
        dist.all_reduce(gradient, group=group)
        half = gradient.shape[0] // 2
        rows = slice(half * (rank % 2), half * (rank % 2 + 1))
        made[names[id(parameter)]] = (gradient[rows] / 2, rows)
    return made, losses or None


Variant = tuple[str, Callable[..., Any], Mapping[str, Any]]


def variants(plain: Callable[..., Any]) -> Iterator[Variant]:
    """Name, step, and what differs from the plainest run: build, data, loss_fn, ranks."""
    models: Mapping[str, Callable[[], nn.Module]] = {
        "numbers, nothing and complex buffers": lambda: chain(*blocks(Scaled)),
        "straight-through rounding": lambda: chain(*blocks(Quantised)),
        "autocast": lambda: chain(*blocks(Autocast)),
        "saved tensors offloaded": lambda: chain(*blocks(Offloads)),
        "norms in fp32, the rest in bf16": lambda: chain(*blocks(Mixed)),
        "a stream beside, one handed on twice": lambda: chain(*blocks(Beside, 7), Ended()),
        "an output that nothing reads": lambda: chain(*blocks(Observed, 7), First()),
        "in place on its own output": lambda: chain(*blocks(AddsInPlace)),
        "one relu ends every layer": one_relu,
        "weight norm": normed,
        "dropout of nothing": lambda: chain(*(nn.Sequential(Block(), nn.Dropout(0.0)) for _ in range(8))),
    }
    for name, build in models.items():
        yield name, plain(), {"build": seeded(build)}
        yield f"{name}, last in first out", plain(order="lifo"), {"build": seeded(build)}
    behind = {"build": seeded(lambda: chain(*blocks(count=7), Ends())), "loss_fn": mean_of_all}
    yield "a sum behind a norm, a hair off", plain(loss_fn=mean_of_all, call=hair_off), behind
    before = {"build": seeded(lambda: chain(*blocks(Before)))}
    yield "linear layers before batch norms, a hair off", plain(call=hair_off), before
    yield "recurrent", plain(), {"build": seeded(lambda: chain(*blocks(Recurrent))), "data": data_of((2, 5, WIDTH))}
    for sparse in (False, True):
        name = f"tokens{', sparse gradients' if sparse else ''}"
        more = {"build": seeded(language(sparse)), "data": tokens(), "loss_fn": cross_entropy}
        yield name, plain(loss_fn=cross_entropy), more
    yield "hooks on parameters and stages", plain(before=with_hooks), {}
    yield "inputs that are views", plain(), {"data": [(x.t().contiguous().t(), y) for x, y in data_of()]}
    yield "inputs that are expanded", plain(), {"data": [(x[:1].expand(ROWS, WIDTH), y) for x, y in data_of()]}
    yield "inputs that want gradients", plain(), {"data": [(x.requires_grad_(), y) for x, y in data_of()]}
    yield "two equal microbatches", plain(), {"data": [*data_of()[:4], *data_of()[:4]]}
    yield "weights stored, as the plain reference", weights_stored, {"build": seeded(lambda: chain(*blocks(Plainly)))}
    tied = {"build": seeded(tied_model)}
    yield "a tied copy by another name", tied_by_another_name, tied
    yield (
        "a tied copy by another name, told",
        tied_by_another_name,
        {**tied, "more": {"contract": Contract(names=in_the_reference)}},
    )
    yield "watched twice", watched_twice, {}
    yield "the second step", second_step, {}
    yield "an empty stage", with_an_empty_stage, {}
    yield "other names", renamed, {}
    yield "weights copied, other names", copied_weights, {}
    yield "rows in shards over replicas", sharded_sums, {"ranks": [0, 1, 0, 1]}
    yield (
        "bf16, shuffled",
        plain(order="shuffled"),
        {
            "build": seeded(of_dtype(torch.bfloat16)),
            "data": data_of(dtype=torch.bfloat16),
        },
    )
    yield "forty microbatches", plain(), {"data": data_of(count=40)}
    yield (
        "halves in bf16",
        partial(step, loss_fn=loss_fn, how=How(halves=True)),
        {
            "build": seeded(of_dtype(torch.bfloat16)),
            "data": data_of(dtype=torch.bfloat16),
        },
    )
