"""A pipeline that torchtitan's pipeline_llm makes, beside the whole model on one device.

It needs torchtitan: pip install torchtitan==0.3.0 triton

It runs as it is: a toy Llama, and 1F1B on two ranks. Change what is marked CHANGE; the rest may stay.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import torchtitan
from pipeproof.whitebox import WhiteBox

with torchtitan.imports():  # your own modules that import torchtitan belong here, too
    from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.distributed.utils import clip_grad_norm_
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

RANKS, WORDS, WIDTH, SEQUENCE, ROWS, MICROBATCHES = 2, 64, 16, 8, 2, 4
loss_fn = CrossEntropyLoss(CrossEntropyLoss.Config())


def model_config() -> Any:
    """CHANGE 1: your model's config."""
    rope = ComplexRoPE.Config(dim=8, max_seq_len=32, theta=10000.0, scaling="none")
    layers = llama3._build_llama3_layers(
        n_layers=4, dim=WIDTH, n_heads=2, hidden_dim=32, rope=rope, attn_backend="flex"
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # which a CPU has
    return llama3.Llama3Model.Config(
        dim=WIDTH,
        vocab_size=WORDS,
        tok_embeddings=Embedding.Config(num_embeddings=WORDS, embedding_dim=WIDTH, param_init=llama3._EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=WIDTH, out_features=WORDS, param_init=llama3._output_linear_init(WIDTH)),
        layers=layers,
    )


def build_model() -> Any:
    """The whole model. Two calls must give the same weights."""
    torch.manual_seed(0)
    model = model_config().build()
    model.init_states()
    return model


def microbatches() -> list[tuple[dict[str, Tensor], Tensor]]:
    """CHANGE 2: the data, as torchtitan's dataloader gives it: input_dict and labels."""
    torch.manual_seed(1)
    words = [torch.randint(0, WORDS, (ROWS, SEQUENCE + 1)) for _ in range(MICROBATCHES)]
    positions = torch.arange(SEQUENCE).repeat(ROWS, 1)
    return [({"input": one[:, :-1], "positions": positions}, one[:, 1:]) for one in words]


def setup(model: nn.Module) -> tuple[Any, ...]:
    """CHANGE 3: your parallelism and, below, your step."""
    device = next(model.parameters()).device
    parallel_dims.device_type = device.type
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=RANKS,
        pipeline_parallel_schedule="1F1B",
        pipeline_parallel_microbatch_size=ROWS,
        spmd_backend="partial_dtensor",
    )
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    made = pipeline_llm(
        model,
        parallel_dims=dims,
        training=TrainingConfig(
            local_batch_size=ROWS * MICROBATCHES, seq_len=SEQUENCE, mixed_precision_param="float32"
        ),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
        device=device,
        model_config=model_config(),
        parallelize_fn=llama3.parallelize_llama,
        loss_fn=loss_fn,
    )
    return dims, *made


def train_step(dims: Any, pp_schedule: Any, model_parts: Any, first: bool, last: bool, microbatches: list[Any]) -> None:
    """Your own, as your job takes it."""
    words, positions = (torch.cat([given[name] for given, _ in microbatches]) for name in ("input", "positions"))
    labels = torch.cat([labels for _, labels in microbatches])
    pp_schedule.step(
        *([words] if first else []),
        positions=positions,
        target=labels if last else None,
        losses=[] if last else None,
        loss_kwargs={"global_valid_tokens": (labels != IGNORE_INDEX).sum()},
        return_outputs=False,
    )
    clip_grad_norm_([one for part in model_parts for one in part.parameters()], 1.0, pp_mesh=dims.get_mesh("pp"))


def my_step(model: nn.Module, microbatches: list[Any]) -> Any:
    """The step that is judged, on every rank."""
    dims, pp_schedule, model_parts, first, last = setup(model)
    with torchtitan.observe(pp_schedule, model_parts, model) as observed:
        train_step(dims, pp_schedule, model_parts, first, last, microbatches)
    return observed.result()


def test_my_pipeline(whitebox: WhiteBox) -> None:
    """Fails, with the cause, where a loss or a gradient is not the whole model's."""
    verdict = torchtitan.validate(
        my_step,
        reference=build_model,
        loss_fn=loss_fn,
        microbatches=microbatches(),
        ranks=RANKS,
        whitebox=whitebox,
    )
    verdict.raise_if_failed()
