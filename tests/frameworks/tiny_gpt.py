"""A tiny GPTModel of Megatron-core's and a training step of it, as a user of Megatron writes them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

import tests.frameworks.on_cpu  # noqa: F401  # first
from pipeproof import megatron
from pipeproof.foreign import HandedBack

SEQUENCE, ROWS, WORDS = 8, 2, 32


@dataclass(frozen=True)
class Layout:
    """How a step is laid out, and what it is told."""

    pp: int = 2
    vp: int | None = None
    dp: int = 1
    layers: int = 4
    tied: bool = False
    per_token: bool = False
    three: bool = False
    optimizer: bool = False
    overlap: bool = False
    p2p_overlap: bool = False
    distributed: bool = False
    bf16: bool = False

    @property
    def whole(self) -> "Layout":
        options = {"per_token": self.per_token, "three": self.three, "bf16": self.bf16}
        return Layout(1, layers=self.layers, tied=self.tied, **options)


def config_of(layout: Layout) -> TransformerConfig:
    return TransformerConfig(
        num_layers=layout.layers,
        hidden_size=16,
        num_attention_heads=2,
        ffn_hidden_size=32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bf16=layout.bf16,
        params_dtype=torch.bfloat16 if layout.bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if layout.bf16 else torch.float32,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vp,
        calculate_per_token_loss=layout.per_token,
        overlap_p2p_comm=layout.p2p_overlap,
        batch_p2p_comm=not layout.p2p_overlap,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
    )


def provided(layout: Layout, *, first: bool = True, last: bool = True, chunk: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    return GPTModel(
        config_of(layout),
        get_gpt_layer_local_spec(),
        WORDS,
        SEQUENCE,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=layout.tied,
        vp_stage=chunk,
    )


def forward_step(data: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
    tokens, labels, weight = next(data)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    output = model(tokens, positions, mask, labels=labels)
    return output, partial(loss_of_two, weight)


def loss_of_two(weight: Tensor, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = (output * weight).sum() / weight.sum()
    return loss, {"lm loss": loss.detach().clone()}


def forward_step_of_three(data: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
    output, function = forward_step(data, model)
    return output, partial(loss_of_three, *function.args)


def loss_of_three(weight: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    loss = (output * weight).sum()
    return loss, weight.sum().int(), {"lm loss": loss.detach().clone()}


def made(layout: Layout) -> list[nn.Module]:
    """The chunks of this rank, in Megatron's DDP."""
    parallel_state.initialize_model_parallel(
        1, layout.pp, virtual_pipeline_model_parallel_size=layout.vp, create_gloo_process_groups=False
    )
    chunks = []
    for chunk in range(layout.vp or 1):
        number = chunk if layout.vp else None
        model = provided(
            layout,
            first=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
            last=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
            chunk=number,
        )
        model.model_type = ModelType.encoder_or_decoder
        if layout.bf16:
            model = Float16Module(model.config, model)
        ddp = DistributedDataParallelConfig(
            overlap_grad_reduce=layout.overlap,
            use_distributed_optimizer=layout.distributed,
            grad_reduce_in_fp32=layout.bf16,
        )
        chunks.append(DistributedDataParallel(model.config, ddp, model))
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
    return chunks


def optimizer_config(layout: Layout) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam", lr=0.1, clip_grad=1.0, use_distributed_optimizer=layout.distributed, bf16=layout.bf16
    )


def step(layout: Layout, model: nn.Module, microbatches: list[Any]) -> HandedBack:
    chunks = made(layout)
    optimizer = None
    if layout.optimizer:
        optimizer = get_megatron_optimizer(optimizer_config(layout), chunks, use_gloo_process_groups=False)
    forward = forward_step_of_three if layout.three else forward_step
    with megatron.observed(chunks, forward, microbatches, model, optimizer) as seen:
        train_step(seen.forward_step, seen.data_iterator, chunks, optimizer, len(microbatches))
    return seen.handed_back()


def train_step(forward: Any, data: Any, chunks: list[Any], optimizer: Any, microbatches: int) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=data,
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=ROWS,
        forward_only=False,
    )
    if optimizer is not None:
        optimizer.step()


def data_of(microbatches: int) -> list[tuple[Tensor, ...]]:
    torch.manual_seed(1)
    made = []
    for number in range(microbatches):
        tokens, labels = torch.randint(0, WORDS, (2, ROWS, SEQUENCE)).unbind()
        weight = torch.ones(ROWS, SEQUENCE)
        weight[:, SEQUENCE - number % 3 :] = 0
        made.append((tokens, labels, weight))
    return made


def judged(layout: Layout, *, microbatches: int = 4, own_step: Any = step, whitebox: Any = None) -> Any:
    return megatron.validate(
        partial(own_step, layout),
        reference=partial(provided, layout.whole),
        forward_step=forward_step_of_three if layout.three else forward_step,
        microbatches=data_of(microbatches),
        ranks={"pp": layout.pp, "dp": layout.dp},
        whitebox=whitebox,
    )
