"""Runs that are right, in unusual ways: whatever a verdict says against them is an alarm."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import truth_layers as layers
from runtime_plain import Chain, How, Plain, cut, even, exchange, step
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from truth_check import Truth
from truth_faults import STEPS
from truth_layers import blocks, chain, data_of, frozen, ragged, seeded, summed
from truth_models import RANKS, WIDTH, Block, Pairs, build_model, loss_fn, observed
from truth_oddities import variants

from pipeproof import StepResult, watch
from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox

Build = Callable[[], nn.Module]
Step = Callable[..., Any]


build_chain = seeded(lambda: chain(*blocks()))


@dataclass(frozen=True)
class Right:
    """A run without a fault."""

    name: str
    step: Step
    build: Build = build_chain
    data: Pairs = field(default_factory=data_of)
    loss_fn: Any = loss_fn
    ranks: Any = RANKS
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"right: {self.name}"

    @property
    def truth(self) -> Truth:
        return Truth()

    def verdict(self, whitebox: WhiteBox, *, watched: bool) -> Verdict:
        """What is said of it."""
        return whitebox.validate(
            partial(self.step, watched=watched),
            reference=self.build,
            microbatches=self.data,
            ranks=self.ranks,
            loss_fn=self.loss_fn,
            **self.more,
        )


def plain(loss_fn: Any = loss_fn, split: tuple[int, ...] = (), **how: Any) -> Step:
    """The plain runtime in one of its many ways."""
    return partial(step, loss_fn=loss_fn, how=How(**how), split=split)


# Ways to call a stage.


def by_forward(stage: nn.Module, given: tuple[Any, ...]) -> Any:
    return stage.forward(*given)


def recomputed(reentrant: bool) -> Callable[[nn.Module, tuple[Any, ...]], Any]:
    def call(stage: nn.Module, given: tuple[Any, ...]) -> Any:
        given = tuple(x if x.requires_grad or not reentrant else x.detach().requires_grad_() for x in given)
        return checkpoint(stage, *given, use_reentrant=reentrant)

    return call


def in_evaluation(stage: nn.Module, given: tuple[Any, ...]) -> Any:
    if dist.get_rank() == 1:
        stage.eval()
    return stage(*given)


def on_a_clone(stage: nn.Module, given: tuple[Any, ...]) -> Any:
    return stage(*(x.clone() for x in given))


# What else a step does.


@torch.no_grad()
def measured(stage: nn.Module, given: tuple[Any, ...]) -> None:
    stage.eval()
    stage(*given)
    stage.train()


def measured_with_graph(stage: nn.Module, given: tuple[Any, ...]) -> None:
    stage(*(x.detach() for x in given))


def shapes_tried(stage: nn.Module, pairs: Pairs) -> None:
    with torch.no_grad():
        stage(torch.zeros_like(pairs[0][0]))


def warmed_up(stage: nn.Module, pairs: Pairs) -> None:
    stage(torch.ones_like(pairs[0][0])).sum().backward()
    stage.zero_grad()


def zeros_first(stage: nn.Module, pairs: Pairs) -> None:
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)


def flat_gradients(stage: nn.Module, pairs: Pairs) -> None:
    """Gradients are views of one buffer from the start."""
    parameters = list(stage.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view(parameter.shape)


# Steps of their own.


def handed_by_name(model: Any, pairs: Pairs, *, watched: bool) -> Any:
    """A mapping of names to clones, taken before gradients are clipped."""
    stage, losses = step(model, pairs, loss_fn=loss_fn, watched=watched)
    whole = {id(p): name for name, p in model.named_parameters()}
    made = {whole[id(p)]: p.grad.clone() for p in stage.parameters()}
    torch.nn.utils.clip_grad_norm_(stage.parameters(), 1e-3)
    return made, losses


def main_gradients(model: Any, pairs: Pairs, *, watched: bool) -> Any:
    """bf16 parameters; their gradients are added up in fp32, and handed back as what they were computed in."""
    ranks = list(range(dist.get_world_size()))
    stage = cut(model, even(len(model), len(ranks)), dist.get_rank())
    names = {id(p): name for name, p in model.named_parameters()}
    main = {id(p): torch.zeros(p.shape) for p in stage.parameters()}

    def taken(parameter: Tensor) -> None:
        assert parameter.grad is not None, "it was just accumulated"
        main[id(parameter)] += parameter.grad.float()
        parameter.grad = None

    for parameter in stage.parameters():
        parameter.register_post_accumulate_grad_hook(taken)
    losses = Plain(observed(stage, watched), pairs, loss_fn, How(), ranks).step()
    return {names[key]: gradient for key, gradient in main.items()}, losses or None


def whole_loss(model: Any, pairs: Pairs, *, watched: bool) -> Any:
    """Every rank reports the mean of all losses."""
    stage, losses = step(model, pairs, loss_fn=loss_fn, watched=watched)
    mean = torch.stack(losses).mean() if losses else torch.zeros(())
    dist.broadcast(mean, dist.get_world_size() - 1)
    return StepResult(stage, mean)


def watched_inside(reentrant: bool) -> Step:
    """A stage is watched inside the region that is recomputed."""

    def run(model: Any, pairs: Pairs, *, watched: bool) -> Any:
        ranks = list(range(dist.get_world_size()))
        stage = cut(model, even(len(model), len(ranks)), dist.get_rank())
        inner = observed(stage, watched)
        how = How(call=recomputed(reentrant))
        return stage, Plain(inner, pairs, loss_fn, how, ranks).step() or None

    return run


def only_a_block_watched(model: Any, pairs: Pairs, *, watched: bool) -> Any:
    """Of each stage its first layer is watched."""
    first = dist.get_rank() * 2
    if watched:
        watch(model[first])
    return step(model, pairs, loss_fn=loss_fn, watched=False)


def tied_build() -> nn.Module:
    model = chain(*blocks())
    model[7].linear.weight = model[0].linear.weight
    return model


def tied_copies(model: Any, pairs: Pairs, *, watched: bool) -> Any:
    """The first and the last stage have a copy of one weight each, and add both gradients."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == last:
        model[7].linear.weight = nn.Parameter(model[0].linear.weight.detach().clone())
    stage, losses = step(model, pairs, loss_fn=loss_fn, watched=watched)
    if rank in (0, last):
        weight = model[0 if rank == 0 else 7].linear.weight
        weight.grad = exchange(weight.grad, last - rank)
    return stage, losses


def shared_build() -> nn.Module:
    one = Block()
    return chain(*(one for _ in range(8)))


def shared_by_all(model: Any, pairs: Pairs, *, watched: bool) -> Any:
    """One block is every layer of every stage; all ranks add their gradients."""
    stage, losses = step(model, pairs, loss_fn=loss_fn, watched=watched)
    for parameter in stage.parameters():
        dist.all_reduce(parameter.grad)
    return stage, losses


def replicated(model: Any, pairs: Pairs, *, watched: bool, ddp: bool = False) -> Any:
    """Two pipelines of two stages: ranks 0 and 2, and 1 and 3; replicas are ranks 0 and 1, 2 and 3."""
    rank = dist.get_rank()
    pipeline, place = [rank % 2, rank % 2 + 2], rank // 2
    stage = cut(model, (4, 4), place)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    module: nn.Module = observed(stage, watched)
    if ddp:
        module = DistributedDataParallel(module, process_group=groups[place])
        return stage, _last_synchronised(module, pairs, pipeline)
    losses = Plain(module, pairs, loss_fn, How(), pipeline).step()
    for parameter in stage.parameters():
        dist.all_reduce(parameter.grad, group=groups[place])
        assert parameter.grad is not None, "just reduced"
        parameter.grad /= 2
    return stage, losses or None


def _last_synchronised(module: DistributedDataParallel, pairs: Pairs, pipeline: list[int]) -> Any:
    """DDP, with a reduction in the last backward alone."""
    calls = iter(range(len(pairs)))

    def call(stage: nn.Module, given: tuple[Any, ...]) -> Any:
        if next(calls) < len(pairs) - 1:
            with module.no_sync():
                return stage(*given)
        return stage(*given)

    return Plain(module, pairs, loss_fn, How(order="naive", call=call), pipeline).step() or None


def own(name: str, **options: Any) -> Step:
    """A foreign runtime of the faults, without a fault."""
    return partial(STEPS[name], **options)


def rights() -> Iterator[Right]:
    """Every variant."""
    yield from _runtimes()
    yield from _orders()
    yield from _models()
    yield from _around()
    for name, step_, more in variants(plain):
        yield Right(name, step_, **more)


def _runtimes() -> Iterator[Right]:
    for name, options in (
        ("iterators", {}),
        ("instructions", {}),
        ("instructions", {"recompute": True}),
        ("two-way", {}),
        ("classes", {}),
        ("classes", {"afab": False}),
        ("chunks", {}),
    ):
        yield Right(f"{name} {options or ''}".strip(), own(name, **options), build_model)


def _orders() -> Iterator[Right]:
    for order in ("1f1b", "fifo", "lifo", "shuffled"):
        yield Right(f"backwards {order}", plain(order=order))
    yield Right("input gradients first, weights later", plain(halves=True))
    yield Right("shares added last to first", plain(summed="kept", order="lifo"))
    yield Right("buffers used again, copied out of", plain(buffers="copied"))
    yield Right("loss scaled and back", plain(scale=1024.0))
    yield Right("loss scaled by 1000 and back", plain(scale=1000.0))
    yield Right("divided in the end", plain(late=True))
    yield Right("called by .forward", plain(call=by_forward))
    yield Right("recomputed around the stage", plain(call=recomputed(False)))
    yield Right("recomputed around the stage, reentrant", plain(call=recomputed(True)))
    yield Right("watched inside what is recomputed", watched_inside(False))
    yield Right("watched inside what is recomputed, reentrant", watched_inside(True))
    yield Right("evaluation mode without dropout", plain(call=in_evaluation))
    yield Right("called with a clone", plain(call=on_a_clone))
    yield Right("a call for a metric", plain(between=measured))
    yield Right("a call for a metric, with a graph", plain(between=measured_with_graph))
    yield Right("shapes tried out first", plain(before=shapes_tried))
    yield Right("warmed up and cleared", plain(before=warmed_up))
    yield Right("gradients begin as zeros", plain(before=zeros_first))
    yield Right("gradients are views of one buffer", plain(before=flat_gradients))
    for split in ((3, 1, 2, 2), (1, 4, 1, 2), (5, 1, 1, 1)):
        yield Right(f"split {split}", plain(split=split))
    yield Right("one rank", plain(), ranks=1)
    yield Right("two ranks", plain(), ranks=2)
    yield Right("three ranks", plain(), ranks=3)
    yield Right("one microbatch", plain(), data=data_of(count=1))
    yield Right("fewer microbatches than ranks", plain(order="lifo"), data=data_of(count=3))
    yield Right("unequal microbatches", plain(), data=ragged())
    elements = float(sum(target.numel() for _, target in ragged()))
    yield Right(
        "unequal microbatches, divided by all elements",
        plain(loss_fn=summed, divisor=elements),
        data=ragged(),
        loss_fn=summed,
        more={"contract": Contract(loss_divisor=elements)},
    )


def _models() -> Iterator[Right]:
    table: Mapping[str, Build] = {
        "frozen first stage": frozen(0, 1),
        "frozen first two stages": frozen(0, 1, 2, 3),
        "frozen middle stage": frozen(4, 5),
        "frozen last stage": frozen(6, 7),
        "no bias is trained": frozen(biases=True),
        "a parameter that nothing uses": lambda: chain(*blocks(layers.Unused)),
        "weights write their gradients": lambda: chain(*blocks(layers.Writes)),
        "two streams": lambda: chain(*blocks(layers.Carry, 7), layers.Joined()),
        "nested tuples and a number": lambda: chain(*blocks(layers.Nested, 7), layers.Unnested()),
        "a dictionary": lambda: chain(*blocks(layers.Named, 7), layers.Unnamed()),
        "a mask and positions go along": lambda: chain(*blocks(layers.Masked, 7), layers.Unmasked()),
        "views, not contiguous": lambda: chain(*blocks(layers.Transposed, 7), layers.Straight()),
        "in place": lambda: chain(*blocks(layers.InPlace)),
        "a block applied twice": lambda: chain(*blocks(layers.Twice)),
        "buffers of bools and bytes": lambda: chain(*blocks(layers.WithBuffers)),
        "recomputes itself": lambda: chain(*blocks(layers.Recomputed)),
        "recomputes itself, reentrant": lambda: chain(*blocks(layers.RecomputedReentrant)),
        "casts by name": lambda: chain(*blocks(layers.CastsByName)),
        "batch norms": lambda: chain(*(nn.Sequential(Block(), nn.BatchNorm1d(WIDTH)) for _ in range(8))),
        "attention": lambda: chain(*blocks(layers.Attention)),
        "tied within a stage": lambda: _tied_within(),
    }
    for name, build in table.items():
        yield Right(name, plain(), seeded(build))
    for name in ("two streams", "nested tuples and a number", "a dictionary", "a mask and positions go along"):
        yield Right(f"{name}, last in first out", plain(order="lifo"), seeded(table[name]))
    for name, dtype in {"bf16": torch.bfloat16, "fp64": torch.float64, "fp16": torch.float16}.items():
        yield Right(name, plain(), seeded(layers.of_dtype(dtype)), data_of(dtype=dtype))
    yield Right(
        "bf16, last in first out",
        plain(order="lifo"),
        seeded(layers.of_dtype(torch.bfloat16)),
        data_of(dtype=torch.bfloat16),
    )
    yield Right("two inputs", plain(), seeded(lambda: chain(*blocks(layers.Sideways))), data_of(sides=True))
    yield Right("pictures", plain(), seeded(lambda: chain(*blocks(layers.Picture))), data_of((2, 3, 6, 6)))
    yield Right(
        "a loss of the model's own",
        plain(None),
        seeded(lambda: chain(*blocks(layers.Targeted, 7), layers.WithLoss())),
        loss_fn=None,
    )


def _tied_within() -> Chain:
    model = chain(*blocks())
    model[3].linear.weight = model[2].linear.weight
    return model


def _around() -> Iterator[Right]:
    yield Right("handed back by name, then clipped", handed_by_name)
    yield Right(
        "bf16, gradients added in fp32",
        main_gradients,
        seeded(layers.of_dtype(torch.bfloat16)),
        data_of(dtype=torch.bfloat16),
    )
    yield Right("the whole step's loss on every rank", whole_loss)
    yield Right("only a block of each stage watched", only_a_block_watched)
    yield Right("tied copies in two stages", tied_copies, seeded(tied_build))
    yield Right("one block is every layer", shared_by_all, seeded(shared_build))
    yield Right("replicas, reduced by hand", replicated, ranks=[0, 1, 0, 1])
    yield Right("replicas in DDP", partial(replicated, ddp=True), ranks=[0, 1, 0, 1])
