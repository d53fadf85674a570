"""What a device holds, beside published formulas and beside what torch really keeps."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from pipeproof.wings.advise.footprint import activation_memory, footprint, least_held, parameters
from pipeproof.wings.advise.layout import Job, Layout, Recompute
from pipeproof.wings.advise.pipelined import OFFERED
from pipeproof.wings.advise.transformer import MODELS, Transformer
from tests.support.sweeps import each_once

GPT = MODELS["gpt-3-175b"]
NONE, SELECTIVE, FULL = Recompute


@pytest.mark.parametrize("tp", [1, 8])
def test_activations_are_those_of_the_published_formulas(tp: int) -> None:
    """Korthikanti et al., 2022, table 2: bytes of a layer with s = sequence, h = hidden, a = heads, a token each."""
    s, h, a = 2048, GPT.hidden, GPT.heads
    stored = activation_memory(GPT, 0, NONE, scores=s, dropout=True)
    assert stored.on(tp, sequence_parallel=False) == h * (10 + 24 / tp + 5 * a * s / h / tp)
    assert stored.on(tp) == h / tp * (34 + 5 * a * s / h)
    assert activation_memory(GPT, 0, NONE, dropout=True).on(tp) == h / tp * 34
    assert activation_memory(GPT, 0, FULL).on(tp) == 2 * h / tp


@pytest.mark.parametrize(
    ("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)], ids=["none", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
)
def test_states_are_those_of_the_published_figure(zero: int, gigabytes: float) -> None:
    """Rajbhandari et al., ZeRO, 2020, figure 1: 7.5 B parameters on 64 devices, gradients in bf16."""
    model = MODELS["gpt-7.5b"]
    job = Job(model, 64, 1, gradient_bytes=2)
    layout = Layout(dp=64, zero=zero)
    held = footprint(job, layout)
    layer = parameters(model, layout, 0).layer  # what is whole while it is used is not in the figure
    used = (zero >= 3) * 2 * 2 * layer + (zero >= 2) * 2 * layer
    states = (held.total - held.activations - used) * 7.5 / model.parameters
    assert states == pytest.approx(gigabytes, abs=0.05)


SEQUENCE, BATCH = 512, 2
SMALL = Transformer("small", 1, 512, 8, 1000, 2048, gated=False)
GATED = Transformer("gated", 1, 512, 8, 1000, 1536, kv_heads=2)


class _Gate(torch.autograd.Function):
    """silu(gate) * up, which keeps its two inputs, as fused kernels do."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate) * up

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient  # how much is kept is asked, not what comes of it


class Layer(nn.Module):
    """A decoder layer as eager torch runs it, in bf16."""

    def __init__(self, model: Transformer, *, again: bool) -> None:
        super().__init__()
        h, f = model.hidden, model.feed_forward
        self.model, self.again = model, again
        self.norms = nn.ModuleList(nn.LayerNorm(h) for _ in range(2))
        self.queries, self.output = nn.Linear(h, h, bias=False), nn.Linear(h, h, bias=False)
        self.keys = nn.Linear(h, 2 * model.keys * model.head, bias=False)
        self.up, self.down = nn.Linear(h, f * (1 + model.gated), bias=False), nn.Linear(f, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.output(self.attention(x))
        return x + self.inner(x)

    def attention(self, x: Tensor) -> Tensor:
        queries, keys = self.run(lambda x: self.split(self.norms[0](x)), x)
        shape = (BATCH, SEQUENCE, -1, self.model.head)
        query, key, value = (each.view(shape).transpose(1, 2) for each in (queries, *keys.chunk(2, -1)))
        enable_gqa = self.model.keys != self.model.heads
        found = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=enable_gqa)
        return found.transpose(1, 2).reshape(x.shape)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.queries(x), self.keys(x)

    def inner(self, x: Tensor) -> Tensor:
        wide = self.run(lambda x: self.up(self.norms[1](x)), x)
        act = (lambda x: _Gate.apply(*x.chunk(2, -1))) if self.model.gated else gelu
        return self.run(lambda x: self.down(act(x)), wide)

    def run(self, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """With selective recompute, a cheap part and the matrix behind it are computed again from its input."""
        return checkpoint(part, x, use_reentrant=False) if self.again else part(x)


def kept_by_torch(model: Transformer, recompute: Recompute) -> int:
    """Bytes of all storages that autograd holds after a forward, without the parameters'."""
    layer = Layer(model, again=recompute is SELECTIVE).bfloat16()
    own = {each.untyped_storage().data_ptr() for each in layer.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(BATCH, SEQUENCE, model.hidden, dtype=torch.bfloat16, requires_grad=True)
    run = partial(checkpoint, layer, use_reentrant=False) if recompute is FULL else layer
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run(x * 1)
    assert output.grad_fn is not None
    return sum(found.values())


@pytest.mark.parametrize(*each_once(model=[SMALL, GATED], recompute=[*Recompute]))
def test_torch_keeps_what_is_counted(model: Transformer, recompute: Recompute) -> None:
    counted = activation_memory(model, 0, recompute).on(1) * BATCH * SEQUENCE
    assert kept_by_torch(model, recompute) == pytest.approx(counted, rel=0.03)


def test_what_torch_keeps_can_differ() -> None:
    assert kept_by_torch(SMALL, SELECTIVE) < 0.7 * kept_by_torch(SMALL, NONE)


def test_the_first_rank_holds_as_many_microbatches_as_its_schedule_says() -> None:
    job = Job(GPT, 64, 2048)
    one = activation_memory(GPT, 0, NONE).on(8) * 2048 * 96 / 8  # of a stage and a microbatch
    first = Layout(tp=8, pp=8, schedule="1f1b")
    assert footprint(job, first).activations == pytest.approx(8 * one)
    interleaved = Layout(tp=8, pp=8, schedule="interleaved", virtual=4)
    # Korthikanti et al., 2022: 1 + (p - 1) / (p m) as much, with m stages a rank
    assert footprint(job, interleaved).activations == pytest.approx(8 * one * (1 + 7 / (8 * 4)), rel=0.03)


def test_the_last_rank_has_the_logits() -> None:
    job = Job(MODELS["llama-3-8b"], 8, 8192)
    whole = footprint(job, Layout(recompute=FULL))
    layers = (32 * activation_memory(job.model, 0, FULL).on(1) + activation_memory(job.model, 0, NONE).on(1)) * 8192
    assert whole.activations - layers == 8192 * (4 * 128256 + 4 * 4096)


def test_experts_are_spread_and_the_rest_is_not() -> None:
    model = MODELS["mixtral-8x7b"]
    alone, spread = (parameters(model, Layout(dp=8, ep=ep), 0) for ep in (1, 8))
    assert spread.dense == alone.dense
    assert spread.experts == alone.experts / 8
    assert alone.dense + alone.experts == model.parameters


def test_every_layer_of_a_stage_counts_as_itself() -> None:
    """Mixtral with two dense layers: half of these sizes, and on the first rank."""
    mixtral = MODELS["mixtral-8x7b"]
    assert mixtral.experts is not None
    model = replace(mixtral, experts=replace(mixtral.experts, dense_layers=8))
    dense, routed = (activation_memory(model, layer, NONE).on(1) for layer in (0, 8))
    assert routed > dense
    job = Job(model, 4, 1024)
    assert footprint(job, Layout(pp=1)).activations == 1024 * (8 * dense + 24 * routed + 4 * 32_000 + 4 * 4096)
    # The first rank holds four microbatches of dense layers; the second three of layers with experts, and those.
    fullest = footprint(job, Layout(pp=4))
    assert fullest.activations == pytest.approx(1024 * 3 * 8 * routed)
    assert (
        fullest.weights == 2 * parameters(model, Layout(pp=4), 1).experts + 2 * parameters(model, Layout(pp=4), 1).dense
    )


def test_latent_attention_keeps_what_it_makes_of_what_was_compressed() -> None:
    """DeepSeek-V3, 2024: 128 heads whose queries and keys have 128 + 64 numbers, and values 128."""
    model = MODELS["deepseek-v3"]
    assert model.attended_width == 128 * (192 + 192 + 128 + 128)
    assert model.compressed_width == 1536 + 512 + 64
    assert MODELS["llama-3-8b"].attended_width == 2 * 4096 + 2 * 1024


@pytest.mark.parametrize("schedule", OFFERED)
def test_no_schedule_holds_less_than_the_least(schedule: str) -> None:
    for model in (MODELS["mixtral-8x7b"], MODELS["deepseek-v3"]):
        for recompute in Recompute:
            layout = Layout(
                pp=4, dp=2, zero=1, schedule=schedule, virtual=1 + (schedule[-1] in "vdf"), recompute=recompute
            )
            job = Job(model, 16, 1024)
            assert least_held(job, layout) <= footprint(job, layout).total
