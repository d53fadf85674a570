"""Megatron-core's pipeline, beside the whole model on one device.

It needs megatron: pip install --no-deps megatron-core==0.16.1

It runs as it is: a toy GPTModel, and 1F1B on two ranks. Change what is marked CHANGE; the rest may stay.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof import megatron
from pipeproof.whitebox import WhiteBox

with megatron.imports():  # your own modules that import megatron belong here, too
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

RANKS, WORDS, SEQUENCE, ROWS = 2, 64, 8, 2


def build_model(pp: int = 1, *, first: bool = True, last: bool = True) -> Any:
    """CHANGE 1: the whole model, or a stage of it. Dropout is off, for stages would draw other numbers."""
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    ends = {"pre_process": first, "post_process": last, "share_embeddings_and_output_weights": True}
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=WORDS, max_sequence_length=SEQUENCE, **ends)


def forward_step(data_iterator: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
    """Your own, as Megatron's schedule is given it."""
    tokens, labels = next(data_iterator)
    positions = torch.arange(SEQUENCE, device=tokens.device).expand_as(tokens)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=tokens.device).triu(1)
    output = model(tokens, positions, mask, labels=labels)
    return output, lambda losses: (losses.mean(), {"lm loss": losses.detach().mean()})


def microbatches() -> list[tuple[Tensor, ...]]:
    """CHANGE 2: the data, as the data iterator gives it."""
    torch.manual_seed(1)
    return [tuple(torch.randint(0, WORDS, (2, ROWS, SEQUENCE)).unbind()) for _ in range(4)]


def setup() -> tuple[Any, Any]:
    """CHANGE 3: your layout, your optimizer and, below, your step."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = build_model(RANKS, first=first, last=last)
    chunk = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    model.config.finalize_model_grads_func = finalize_model_grads
    return chunk, get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0), [chunk])


def train_step(forward_step_func: Any, data_iterator: Iterator[Any], chunk: Any, optimizer: Any, count: int) -> None:
    """Your own, as your job takes it."""
    chunk.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=chunk,
        num_microbatches=count,
        seq_length=SEQUENCE,
        micro_batch_size=ROWS,
    )
    optimizer.step()


def my_step(model: Any, microbatches: list[Any]) -> Any:
    """The step that is judged, on every rank."""
    chunk, optimizer = setup()
    with megatron.observe(chunk, forward_step, microbatches, model, optimizer) as observed:
        train_step(observed.forward_step, observed.data_iterator, chunk, optimizer, len(microbatches))
    return observed.result()


def test_my_pipeline(whitebox: WhiteBox) -> None:
    """Fails, with the cause, where a loss or a gradient is not the whole model's."""
    verdict = megatron.validate(
        my_step,
        reference=build_model,
        forward_step=forward_step,
        microbatches=microbatches(),
        ranks=RANKS,
        whitebox=whitebox,
    )
    verdict.raise_if_failed()
