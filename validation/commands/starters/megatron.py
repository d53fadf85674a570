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
    ends = {"pre_process": first, "post_process": last}
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


def my_step(model: Any, microbatches: list[Any]) -> Any:
    """CHANGE 3: your layout, and your step. This runs on every rank."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    chunk = build_model(RANKS, first=first, last=last)
    wrapped = DistributedDataParallel(chunk.config, DistributedDataParallelConfig(), chunk)
    chunk.config.finalize_model_grads_func = finalize_model_grads
    with megatron.observe(wrapped, forward_step, microbatches, model) as observed:
        wrapped.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=observed.forward_step,
            data_iterator=observed.data_iterator,
            model=wrapped,
            num_microbatches=len(microbatches),
            seq_length=SEQUENCE,
            micro_batch_size=ROWS,
        )
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
