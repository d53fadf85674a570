from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig


def build_model(pp: int = 1, first: bool = True, last: bool = True) -> GPTModel:
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
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=8, **ends)


def forward_step(data_iterator: Iterator, model: torch.nn.Module) -> tuple:
    tokens, labels = next(data_iterator)
    positions = torch.arange(8, device=tokens.device).expand_as(tokens)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool, device=tokens.device).triu(1)
    output = model(tokens, positions, mask, labels=labels)
    return output, lambda losses: (losses.mean(), {"lm loss": losses.detach().mean()})


def setup(pp: int) -> tuple:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pp)
    ends = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = build_model(pp, *ends)
    model = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    model.config.finalize_model_grads_func = finalize_model_grads
    return model, get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0), [model])


def train_step(forward_step_func, data_iterator: Iterator, model: torch.nn.Module, optimizer, count: int) -> tuple:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=count,
        seq_length=8,
        micro_batch_size=2,
    )
    return optimizer.step()
