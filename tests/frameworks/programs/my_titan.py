import torch
import torch.distributed as dist
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention

parallel_dims.device_type = "cpu"
WORDS, WIDTH, MICROBATCHES = 64, 16, 4
loss_fn = CrossEntropyLoss(CrossEntropyLoss.Config())


def model_config():
    rope = ComplexRoPE.Config(dim=8, max_seq_len=32, theta=10000.0, scaling="none")
    layers = llama3._build_llama3_layers(
        n_layers=4, dim=WIDTH, n_heads=2, hidden_dim=32, rope=rope, attn_backend="flex"
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    words = Embedding.Config(num_embeddings=WORDS, embedding_dim=WIDTH, param_init=llama3._EMBEDDING_INIT)
    norm = RMSNorm.Config(normalized_shape=WIDTH, param_init=llama3._NORM_INIT)
    head = Linear.Config(in_features=WIDTH, out_features=WORDS, param_init=llama3._output_linear_init(WIDTH))
    return llama3.Llama3Model.Config(
        dim=WIDTH, vocab_size=WORDS, tok_embeddings=words, norm=norm, lm_head=head, layers=layers
    )


def build_model():
    torch.manual_seed(0)
    model = model_config().build()
    model.init_states()
    return model


def setup(model):
    options = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B", "spmd_backend": "partial_dtensor"}
    parallelism = ParallelismConfig(pipeline_parallel_microbatch_size=2, **options)
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    made = pipeline_llm(
        model,
        parallel_dims=dims,
        training=TrainingConfig(local_batch_size=2 * MICROBATCHES, seq_len=8, mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=model_config(),
        parallelize_fn=llama3.parallelize_llama,
        loss_fn=loss_fn,
    )
    return dims, *made


def train_step(dims, pp_schedule, model_parts, first, last, microbatches):
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
