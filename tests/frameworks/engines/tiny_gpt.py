"""A tiny GPTModel of Megatron-core's and a training step of it, as a user of Megatron writes them."""

from collections.abc import Iterator
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

from pipeproof import StepResult
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from pipeproof.wings.adapters import megatron
from pipeproof.wings.adapters.megatron_whole import MEGATRON
from tests.frameworks.engines.groups import groups_given_back
from tests.frameworks.engines.megatron_layout import MegatronLayout

MEGATRON.on_cpu()
SEQUENCE, ROWS, WORDS = 8, 2, 32
_SCALE = 512.0  # of a loss, where one is told to have it


def config_of(layout: MegatronLayout) -> TransformerConfig:
    """What Megatron is told of the model and of its pipeline."""
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
        virtual_pipeline_model_parallel_size=chunks_of(layout),
        num_layers_in_first_pipeline_stage=layout.first or None,
        num_layers_in_last_pipeline_stage=layout.last or None,
        account_for_embedding_in_pipeline_split=layout.with_embedding,
        account_for_loss_in_pipeline_split=layout.with_loss,
        microbatch_group_size_per_vp_stage=layout.group or None,
        calculate_per_token_loss=layout.per_token,
        overlap_p2p_comm=layout.p2p_overlap,
        overlap_p2p_comm_warmup_flush=layout.flush,
        batch_p2p_comm=not (layout.p2p_overlap or layout.unbatched),
        deallocate_pipeline_outputs=layout.deallocate,
        **recomputed(layout),
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
    )


def chunks_of(layout: MegatronLayout) -> int | None:
    """How many virtual stages Megatron is told of; None where there is one."""
    return layout.vp if layout.vp > 1 else None


def recomputed(layout: MegatronLayout) -> dict[str, Any]:
    """What of the config asks for recomputation."""
    if layout.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective"} if layout.recompute == "selective" else {}


def provided(layout: MegatronLayout, *, first: bool = True, last: bool = True, chunk: int | None = None) -> nn.Module:
    """The model of one stage, or the whole."""
    torch.manual_seed(layout.seed)
    model: nn.Module = GPTModel(
        config_of(layout),
        get_gpt_layer_local_spec(),
        WORDS,
        SEQUENCE,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=layout.tied,
        vp_stage=chunk,
    )
    return model


def forward_step(data: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
    """With a loss function of two results: the mean over what counts of a microbatch."""
    tokens, labels, weight = next(data)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    output = model(tokens, positions, mask, labels=labels)
    return output, partial(loss_of_two, weight)


def loss_of_two(weight: Tensor, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and what is logged."""
    loss = (output * weight).sum() / weight.sum()
    return loss, {"lm loss": loss.detach().clone()}


def forward_step_of_three(data: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
    """With a loss function of three results: a sum over tokens, and how many count."""
    output, function = forward_step(data, model)
    return output, partial(loss_of_three, *function.args)


def loss_of_three(weight: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The sum, the tokens, and what is logged."""
    loss = (output * weight).sum()
    return loss, weight.sum().int(), {"lm loss": loss.detach().clone()}


def forward_of(layout: MegatronLayout) -> Any:
    """The forward step that goes with it."""
    return forward_step_of_three if layout.three else forward_step


def made(layout: MegatronLayout) -> list[Any]:
    """The chunks of this rank, in Megatron's DDP."""
    vp = chunks_of(layout)
    parallel_state.initialize_model_parallel(
        1, layout.pp, virtual_pipeline_model_parallel_size=vp, create_gloo_process_groups=False
    )
    ddp = DistributedDataParallelConfig(
        overlap_grad_reduce=layout.overlap,
        use_distributed_optimizer=layout.distributed,
        bucket_size=layout.buckets or None,
        average_in_collective=layout.averaged,
        grad_reduce_in_fp32=layout.bf16,
    )
    chunks = []
    for number in range(vp) if vp else [None]:
        model: Any = provided(
            layout,
            first=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
            last=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
            chunk=number,
        )
        model.model_type = ModelType.encoder_or_decoder
        if layout.bf16:
            model = Float16Module(model.config, model)
        chunks.append(DistributedDataParallel(model.config, ddp, model, disable_bucketing=bool(number)))
    _told(layout, chunks)
    return chunks


def _told(layout: MegatronLayout, chunks: list[Any]) -> None:
    """Tell every chunk's config what reduces its gradients and when, as Megatron's training script does."""

    def each(name: str) -> Any:
        found = [getattr(chunk, name) for chunk in chunks]
        return found if len(found) > 1 else found[0]

    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
        if layout.overlap:
            chunk.config.no_sync_func = each("no_sync")
        if layout.aligned:
            chunk.config.grad_sync_func = each("start_grad_sync")


def optimizer_of(layout: MegatronLayout, chunks: list[Any]) -> Any:
    """Megatron's, if there is one."""
    if not layout.optimizer:
        return None
    own = OptimizerConfig(
        optimizer="adam",
        lr=0.1,
        clip_grad=0.0 if layout.unclipped else 1.0,
        use_distributed_optimizer=layout.distributed,
        bf16=layout.bf16,
        loss_scale=_SCALE if layout.scaled else None,
    )
    made: Any = get_megatron_optimizer(own, chunks, use_gloo_process_groups=False)
    if layout.scaled:
        for chunk in chunks:
            chunk.config.grad_scale_func = made.scale_loss
    return made


def step(layout: MegatronLayout, model: nn.Module, microbatches: list[Any]) -> StepResult:
    """The step that is judged, on this rank."""
    with groups_given_back():
        chunks = made(layout)
        optimizer, forward = optimizer_of(layout, chunks), forward_of(layout)
        if layout.second:
            data = [iter(microbatches) for _ in chunks]
            train_step(forward, data if len(chunks) > 1 else data[0], chunks, optimizer, len(microbatches))
        with megatron.observe(chunks, forward, microbatches, model, optimizer) as observed:
            train_step(observed.forward_step, observed.data_iterator, chunks, optimizer, len(microbatches))
        return observed.result()


def train_step(forward: Any, data: Any, chunks: list[Any], optimizer: Any, microbatches: int) -> None:
    """As Megatron's training script takes one."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    if optimizer is not None:
        optimizer.zero_grad()
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


def data_of(microbatches: int, seed: int = 0) -> list[tuple[Tensor, ...]]:
    """Tokens, labels, and how much each counts: some microbatches have less that does."""
    torch.manual_seed(seed + 1)
    made: list[tuple[Tensor, ...]] = []
    for number in range(microbatches):
        tokens, labels = torch.randint(0, WORDS, (2, ROWS, SEQUENCE)).unbind()
        weight = torch.ones(ROWS, SEQUENCE)
        weight[:, SEQUENCE - number % 3 :] = 0
        made.append((tokens, labels, weight))
    return made


def judged(
    layout: MegatronLayout,
    *,
    microbatches: int = 4,
    own_step: Any = step,
    optimizer: Any = None,
    whitebox: WhiteBox | None = None,
) -> Verdict:
    """The verdict on a step of so many microbatches, those of all replicas; ``optimizer`` makes the reference's."""
    return megatron.validate(
        partial(own_step, layout),
        reference=partial(provided, layout.whole),
        forward_step=forward_of(layout),
        microbatches=data_of(microbatches, layout.seed),
        ranks={"pp": layout.pp, "dp": layout.dp},
        optimizer=optimizer,
        whitebox=whitebox,
    )
