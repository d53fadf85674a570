"""What a device holds at its worst moment, in bytes.

Weights, gradients and the optimizer's state: Rajbhandari et al., ZeRO, 2020. Activations: Korthikanti et al., Reducing
activation recomputation in large transformer models, 2022, counted tensor by tensor; where attention keeps its scores
and dropout its masks, these sums are that paper's s b h (34 + 5 a s / h). Gated activations are fused. How many
microbatches are held at once is read from the schedule.

Tensors are counted in bytes for each token, in bf16: h hidden, f the inner width, d a head.
"""

from dataclasses import dataclass
from functools import cache

from pipeproof.pipeline.layouts.layout import Job, Layout, Recompute
from pipeproof.pipeline.layouts.pipelined import pipelined, stages_of
from pipeproof.pipeline.layouts.transformer import Transformer

_BF16 = 2
_FP32 = 4


@dataclass(frozen=True)
class Footprint:
    """Bytes of the device that holds most."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Kept:
    """What a layer's forward leaves for its backward, in bytes a token.

    ``sharded`` is divided by tp wherever there is tensor parallelism, ``whole`` only with sequence parallelism.
    """

    whole: float
    sharded: float

    def on(self, tp: int, *, sequence_parallel: bool = True) -> float:
        """On each of ``tp`` ranks."""
        return self.sharded / tp + self.whole / (tp if sequence_parallel else 1)


def kept(model: Transformer, layer: int, recompute: Recompute, *, scores: int = 0, dropout: bool = False) -> Kept:
    """What ``layer`` keeps. ``scores``: the sequence's length where attention keeps its matrix, 0 where it does not."""
    hidden = _BF16 * model.hidden
    if recompute is Recompute.FULL:
        return Kept(hidden, 0)
    inner, keys = _BF16 * model.heads * model.head, _BF16 * model.keys * model.head
    again = recompute is Recompute.SELECTIVE
    copies, width = _visits(model, layer)
    # Both inputs of the norms and, unless they are computed again, what the norms give.
    whole = 2 * hidden + (0 if again else (1 + copies) * hidden) + dropout * hidden
    # Queries, keys, values, what attention gives; one or two inner tensors, and what the activation makes of them.
    sharded = 2 * inner + 2 * keys + (1 + model.gated + (not again)) * _BF16 * width
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
    """Of one device: ``dense`` ones that all tokens use, with norms and embeddings, and those of its ``experts``.

    ``layer`` is its largest layer, both together.
    """

    dense: float
    experts: float
    layer: float


def parameters(model: Transformer, layout: Layout, rank: int) -> Parameters:
    """What pipeline rank ``rank`` holds before any sharding over data-parallel ranks."""
    return _parameters(model, layout.tp, layout.ep, stages_of(layout, model.layers), rank)


@cache
def _parameters(model: Transformer, tp: int, ep: int, stages: tuple[tuple[range, int], ...], rank: int) -> Parameters:
    layers = [layer for stage, at in stages if at == rank for layer in stage]
    dense = sum(map(model.shared, layers)) / tp
    experts = [model.routed(layer) / (tp * ep) for layer in layers]
    first_of, last_of = stages[0][1], stages[-1][1]
    ends = (rank == first_of) * model.embedding + (rank == last_of) * model.output
    if model.tied and first_of != last_of:  # the last stage has a copy
        ends += (rank == last_of) * model.vocabulary * model.hidden
    largest = max(model.shared(layer) / tp + own for layer, own in zip(layers, experts, strict=True))
    return Parameters(dense + ends / tp, sum(experts), largest)


def footprint(job: Job, layout: Layout) -> Footprint:
    """The device that holds most: the first of the pipeline, with the embedding, or the last, with the output."""
    return max((_of_rank(job, layout, rank) for rank in {0, layout.pp - 1}), key=lambda one: one.total)


def _of_rank(job: Job, layout: Layout, rank: int) -> Footprint:
    own = parameters(job.model, layout, rank)
    return Footprint(
        # With ZeRO-3 one layer is in use while the next is gathered; with ZeRO-2 one layer's gradient is whole.
        weights=_held(_BF16, 3, own, layout) + (2 * _BF16 * own.layer if layout.zero >= 3 else 0),
        gradients=_held(job.gradient_bytes, 2, own, layout)
        + (job.gradient_bytes * own.layer if layout.zero >= 2 else 0),
        optimizer=_held(job.optimizer_bytes, 1, own, layout),
        activations=_activations(job, layout, rank),
    )


def _held(each: int, stage: int, own: Parameters, layout: Layout) -> float:
    """Bytes of what is sharded from this stage of ZeRO on, ``each`` for a parameter."""
    if layout.zero < stage:
        return each * (own.dense + own.experts)
    return each * (own.dense / layout.shards + own.experts / layout.expert_shards)


def least_held(job: Job, layout: Layout) -> float:
    """Bytes of the first rank before any activation: no schedule holds less."""
    own = parameters(job.model, layout, 0)
    sizes = {3: _BF16, 2: job.gradient_bytes, 1: job.optimizer_bytes}
    return sum(_held(each, stage, own, layout) for stage, each in sizes.items())


def _activations(job: Job, layout: Layout, rank: int) -> float:
    model, last = job.model, job.model.layers - 1
    bytes_a_token = pipelined(job, layout).held[rank] * kept(model, last, layout.recompute).on(layout.tp)
    if layout.recompute is Recompute.FULL:  # the layer whose turn it is
        bytes_a_token += kept(model, last, Recompute.NONE).on(layout.tp)
    if rank == stages_of(layout, model.layers)[-1][1]:
        bytes_a_token += (2 * _BF16 * model.hidden + _FP32 * model.vocabulary) / layout.tp
    return bytes_a_token * tokens(job, layout)


def tokens(job: Job, layout: Layout) -> float:
    """Tokens of a microbatch on one rank."""
    return layout.micro * job.sequence / layout.cp
