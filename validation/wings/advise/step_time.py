"""How long a step takes: computing, what ranks say to each other, and waiting in the pipeline.

A model of the kind that Narayanan et al. (Efficient large-scale language model training, 2021, section 3) reason with:
operations over speed, bytes over bandwidth, and the schedule's bubble. Its assumptions are the constants below; times
are good for an order among layouts, not for a promise.
"""

from dataclasses import dataclass
from functools import cache

from pipeproof.wings.advise.cluster import Cluster
from pipeproof.wings.advise.footprint import BF16, most_meets, tokens
from pipeproof.wings.advise.layout import Job, Layout, Recompute
from pipeproof.wings.advise.pipelined import least_stretch, stretch

_LARGE_MATMUL = 0.65  # fraction of a device's speed on large matrices
_NARROW = 128  # a matrix this wide on a rank runs at half of that
_FEW_TOKENS = 256  # this many tokens halve it too
_WIRE = 0.8  # of a link's bandwidth


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. ``tp``, ``cp``, ``ep``, ``dp`` and ``pp``: communication without overlap."""

    compute: float
    tp: float
    cp: float
    ep: float
    dp: float
    pp: float
    bubble: float
    operations: float  # of the whole step on all devices, without what is computed again

    @property
    def communication(self) -> float:
        """Total communication."""
        return self.tp + self.cp + self.ep + self.dp + self.pp

    @property
    def total(self) -> float:
        """Total seconds."""
        return self.compute + self.communication + self.bubble

    def utilization(self, cluster: Cluster) -> float:
        """Model FLOPs utilization: the step's own operations, of what the devices could have done."""
        return self.operations / (self.total * cluster.devices * cluster.device.flops)


@dataclass(frozen=True)
class _Passes:
    """Passes of one microbatch on a rank with 1/P of the layers: times per forward, and their number."""

    compute: float
    tp: float
    cp: float
    ep: float
    pp: float

    @property
    def said(self) -> float:
        return self.tp + self.cp + self.ep + self.pp


def unhindered_time(job: Job, cluster: Cluster, layout: Layout) -> float:
    """Return the seconds of a step without waits or communication between replicas."""
    one = _of_microbatch(job, cluster, layout)
    return (one.compute + one.said) * layout.microbatches(job)


def least_time(job: Job, cluster: Cluster, layout: Layout) -> float:
    """Return a lower bound in seconds for a step: no schedule is faster."""
    one = _of_microbatch(job, cluster, layout)
    work = (one.compute + one.said) * layout.microbatches(job)
    return work * least_stretch(job, layout) + _exposed_time(job, cluster, layout, one)


def step_time(job: Job, cluster: Cluster, layout: Layout) -> StepTime:
    """Return a step's time, part by part."""
    count = layout.microbatches(job)
    one = _of_microbatch(job, cluster, layout)
    work = (one.compute + one.said) * count
    operations = 3 * job.batch * job.sequence * sum(_forward_operations(job))
    return StepTime(
        compute=one.compute * count,
        tp=one.tp * count,
        cp=one.cp * count,
        ep=one.ep * count,
        pp=one.pp * count,
        dp=_exposed_time(job, cluster, layout, one),
        bubble=work * (stretch(job, layout) - 1),
        operations=operations,
    )


@cache
def _forward_operations(job: Job) -> tuple[float, float]:
    """Of one token: by experts, and by all else, the projection to the vocabulary included."""
    model, layers = job.model, range(job.model.layers)
    experts = 2.0 * sum(model.active(layer) - model.shared_parameters(layer) for layer in layers)
    total = sum(model.operations(layer, job.sequence) for layer in layers) + model.output_operations
    return experts, total - experts


def _of_microbatch(job: Job, cluster: Cluster, layout: Layout) -> _Passes:
    model, count = job.model, tokens(job, layout)
    passes = 4 if layout.recompute is Recompute.FULL else 3  # a backward is two forwards
    layers = model.layers / layout.pp
    routed, common = (passes * count * each / (layout.tp * layout.pp) for each in _forward_operations(job))
    compute = common / (cluster.device.flops * _efficiency(layout, model.hidden, count))
    experts = model.experts
    if experts is not None:  # an expert gets its share of the tokens of the ranks that share the experts
        share = count * experts.per_token * layout.ep / experts.count
        compute += routed / (cluster.device.flops * _efficiency(layout, model.hidden, share))
    rounds = passes - 1  # what is said, is said once a forward and once a backward
    hidden = count * model.hidden * BF16

    def wire(size: float, group: int) -> float:
        return size / (cluster.between(group) * _WIRE)

    # Two all-gathers and two reduce-scatters a layer, of the hidden state (Korthikanti et al., 2022).
    tp = rounds * layers * wire(4 * hidden * (layout.tp - 1) / layout.tp, layout.tp)
    # Dispatch and combine, each to another rank but for one in ep.
    visits = experts.per_token * hidden / layout.tp if experts else 0.0
    ep = (
        rounds * model.routed_layers / layout.pp * wire(2 * visits * (layout.ep - 1) / layout.ep, layout.tp * layout.ep)
    )
    # Keys and values go round the ring while attention computes on what is there.
    keys = 2 * count * model.keys * model.head * BF16 / layout.tp
    ring = rounds * layers * wire(keys * (layout.cp - 1), layout.tp * layout.cp)
    attention = passes * layers * count * model.attention_operations(job.sequence) / layout.tp / cluster.device.flops
    # Each stage's output goes to the next, and its gradient comes back.
    hops = layout.virtual * (2 if layout.pp > 1 else 0)
    pp = hops * wire(hidden / layout.tp, layout.tp * layout.cp * layout.dp * layout.pp)
    return _Passes(compute, tp, max(0.0, ring - attention), ep, pp)


def _efficiency(layout: Layout, hidden: int, count: float) -> float:
    """Return the fraction of a device's speed: less for narrow matrices from tensor parallelism, or few tokens."""
    width = hidden / layout.tp
    return _LARGE_MATMUL * width / (width + _NARROW) * count / (count + _FEW_TOKENS)


def _exposed_time(job: Job, cluster: Cluster, layout: Layout, one: _Passes) -> float:
    """Return the data-parallel communication outside computation.

    Without ZeRO gradients are all-reduced, which is twice their size, during the last backward. With ZeRO-1 they go out
    once then, and weights come in during the next forward; with ZeRO-2 gradients go out in every microbatch, with
    ZeRO-3 weights come in twice in each, too.
    """
    if layout.shards == 1:
        return 0.0
    group = layout.tp * layout.shards
    share = (layout.shards - 1) / layout.shards
    speed = cluster.between(group) * _WIRE
    held = most_meets(job.model, layout, experts=layout.expert_shards > 1)
    gradients, weights = (each * held * share / speed for each in (job.gradient_bytes, BF16))
    count = layout.microbatches(job)
    backward, forward = one.compute * 2 / 3, one.compute / 3
    if layout.zero == 0:
        return max(0.0, 2 * gradients - backward)
    if layout.zero == 1:
        return max(0.0, gradients - backward) + max(0.0, weights - forward)
    if layout.zero == 2:
        return count * max(0.0, gradients - backward) + max(0.0, weights - forward)
    return count * (max(0.0, gradients + weights - backward) + max(0.0, weights - forward))
