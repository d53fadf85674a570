"""A device's peak memory, in bytes.

Weights, gradients and the optimizer's state: Rajbhandari et al., ZeRO, 2020. Activations: Korthikanti et al., Reducing
activation recomputation in large transformer models, 2022, counted tensor by tensor; where attention keeps its scores
and dropout its masks, these sums are that paper's s b h (34 + 5 a s / h). Gated activations are fused. How many
microbatches are held at once is read from the schedule, and every stage counts the layers that it has.

Tensors are counted in bytes for each token, in bf16: h hidden, f the inner width, d a head.
"""

from dataclasses import dataclass
from functools import cache

from pipeproof.wings.advise.layout import Job, Layout, Pipeline, Recompute
from pipeproof.wings.advise.pipelined import Stages, peaks, stages_of
from pipeproof.wings.advise.transformer import Transformer

BF16 = 2


@dataclass(frozen=True)
class Footprint:
    """Bytes on the fullest device."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """Total bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Kept:
    """Tensors that a layer's forward keeps for its backward, in bytes a token.

    ``sharded``: divided by tp under tensor parallelism; ``whole``: only with sequence parallelism.
    """

    whole: float
    sharded: float

    def on(self, tp: int, *, sequence_parallel: bool = True) -> float:
        """Return the bytes on each of ``tp`` ranks."""
        return self.sharded / tp + self.whole / (tp if sequence_parallel else 1)


def activation_memory(
    model: Transformer, layer: int, recompute: Recompute, *, scores: int = 0, dropout: bool = False
) -> Kept:
    """Tensors kept by ``layer``. ``scores``: the sequence's length if attention keeps its matrix, else 0."""
    hidden = BF16 * model.hidden
    if recompute is Recompute.FULL:
        return Kept(hidden, 0)
    again = recompute is Recompute.SELECTIVE
    copies, width = _visits(model, layer)
    # Both inputs of the norms and, unless they are computed again, what the norms give.
    whole = 2 * hidden + (0 if again else (1 + copies) * hidden) + dropout * hidden
    # What latent attention is made of, before and, unless that is computed again, behind its norms.
    whole += (2 - again) * BF16 * model.compressed_width
    # One or two inner tensors, and what the activation makes of them.
    sharded = BF16 * model.attended_width + (1 + model.gated + (not again)) * BF16 * width
    return Kept(whole, sharded + 5 * model.heads * scores)


def _visits(model: Transformer, layer: int) -> tuple[int, int]:
    """How many feed-forward parts a token's hidden state is copied to, and their width together."""
    experts = model.experts
    if experts is None or model.is_dense(layer):
        return 1, model.feed_forward
    visited = experts.per_token + experts.shared
    return visited, visited * experts.size


@dataclass(frozen=True)
class Parameters:
    """Parameters on one device: ``dense`` ones for all tokens, with norms and embeddings, and its ``experts``.

    ``layer`` is its largest layer, both together.
    """

    dense: float
    experts: float
    layer: float


def parameters(model: Transformer, layout: Layout, rank: int) -> Parameters:
    """Return the parameters on pipeline rank ``rank``, before sharding over data-parallel ranks."""
    return every_rank(model, layout)[rank]


def every_rank(model: Transformer, layout: Layout) -> tuple[Parameters, ...]:
    """Return the parameters on all pipeline ranks."""
    return _parameters(model, layout.tp, layout.ep, layout.pipeline)


def most_meets(model: Transformer, layout: Layout, *, experts: bool) -> float:
    """Return the largest rank's parameters shared by its replicas; ``experts``: include replicas of experts."""
    return _most(model, layout.tp, layout.ep, layout.pipeline, experts)


@cache
def _most(model: Transformer, tp: int, ep: int, pipeline: Pipeline, experts: bool) -> float:
    return max(own.dense + own.experts * experts for own in _parameters(model, tp, ep, pipeline))


@cache
def _parameters(model: Transformer, tp: int, ep: int, pipeline: Pipeline) -> tuple[Parameters, ...]:
    stages = stages_of(pipeline, model.layers)
    layers = [[layer for stage, at in stages if at == rank for layer in stage] for rank in range(pipeline.ranks)]
    return tuple(_of_layers(model, tp, ep, own, _ends(model, stages, rank)) for rank, own in enumerate(layers))


def _of_layers(model: Transformer, tp: int, ep: int, layers: list[int], ends: int) -> Parameters:
    dense = [model.shared_parameters(layer) / tp for layer in layers]
    experts = [model.routed_parameters(layer) / (tp * ep) for layer in layers]
    return Parameters(sum(dense) + ends / tp, sum(experts), max(map(sum, zip(dense, experts, strict=True))))


def _ends(model: Transformer, stages: Stages, rank: int) -> int:
    """Parameters of ``rank`` before the first layer and after the last."""
    first_of, last_of = stages[0][1], stages[-1][1]
    ends = (rank == first_of) * model.embedding + (rank == last_of) * model.output
    if model.tied and first_of != last_of:  # the last stage has a copy
        ends += (rank == last_of) * model.vocabulary * model.hidden
    return ends


def footprint(job: Job, layout: Layout) -> Footprint:
    """Return the bytes on the fullest device."""
    model, count = job.model, tokens(job, layout)
    sizes, besides = _of_stages(model, layout.pipeline, layout.recompute, layout.tp)
    held = zip(every_rank(model, layout), peaks(job, layout, sizes), besides, strict=True)
    return max((_of_rank(job, layout, own, count * (at_once + more)) for own, at_once, more in held), key=_total)


def _total(held: Footprint) -> float:
    return held.total


def _of_rank(job: Job, layout: Layout, own: Parameters, activations: float) -> Footprint:
    return Footprint(*_state(job, layout, own), activations)


def _state(job: Job, layout: Layout, own: Parameters) -> tuple[float, float, float]:
    """Return the bytes for weights, gradients and optimizer."""
    # With ZeRO-3 one layer is in use while the next is gathered; with ZeRO-2 one layer's gradient is whole.
    gathered = 2 * BF16 * own.layer if layout.zero >= 3 else 0
    unsharded = job.gradient_bytes * own.layer if layout.zero >= 2 else 0
    return (
        _sharded_bytes(BF16, 3, own, layout) + gathered,
        _sharded_bytes(job.gradient_bytes, 2, own, layout) + unsharded,
        _sharded_bytes(job.optimizer_bytes, 1, own, layout),
    )


def _sharded_bytes(each: int, stage: int, own: Parameters, layout: Layout) -> float:
    """Return the bytes for state sharded from this ZeRO stage on, with ``each`` for a parameter."""
    if layout.zero < stage:
        return each * (own.dense + own.experts)
    return each * (own.dense / layout.shards + own.experts / layout.expert_shards)


def least_held(job: Job, layout: Layout) -> float:
    """Return the fullest device's bytes with one microbatch's activations: a lower bound over schedules."""
    count = tokens(job, layout)
    kinds = _kinds_of_rank(job.model, layout.pipeline, layout.recompute, layout.tp, layout.ep)
    return max(sum(_state(job, layout, own)) + count * once for own, once in kinds)


@cache
def _kinds_of_rank(
    model: Transformer, pipeline: Pipeline, recompute: Recompute, tp: int, ep: int
) -> tuple[tuple[Parameters, float], ...]:
    """Return distinct ranks' parameters, and bytes for each token in one microbatch."""
    sizes, besides = _of_stages(model, pipeline, recompute, tp)
    once = list(besides)
    for size, (_, rank) in zip(sizes, stages_of(pipeline, model.layers), strict=True):
        once[rank] += size
    return tuple(dict.fromkeys(zip(_parameters(model, tp, ep, pipeline), once, strict=True)))


@cache
def _of_stages(
    model: Transformer, pipeline: Pipeline, recompute: Recompute, tp: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the bytes kept for a token in each stage, and further bytes on each rank, for one microbatch at a time.

    The latter are the layer being recomputed, and the loss on the last stage's rank.
    """
    stages, each = stages_of(pipeline, model.layers), _activation_bytes(model, recompute, tp)
    sizes = [sum(each[layer] for layer in layers) for layers, _ in stages]
    besides = [0.0] * pipeline.ranks
    if recompute is Recompute.FULL:
        whole = _activation_bytes(model, Recompute.NONE, tp)
        for layers, rank in stages:
            besides[rank] = max([besides[rank], *(whole[layer] for layer in layers)])
    besides[stages[-1][1]] += 2 * BF16 * (model.hidden + model.vocabulary) / tp  # logits are in fp32
    return tuple(sizes), tuple(besides)


@cache
def _activation_bytes(model: Transformer, recompute: Recompute, tp: int) -> tuple[float, ...]:
    return tuple(activation_memory(model, layer, recompute).on(tp) for layer in range(model.layers))


def tokens(job: Job, layout: Layout) -> float:
    """Return the tokens of a microbatch on one rank."""
    return layout.micro * job.sequence / layout.cp
