import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import AutoModelForCausalLM, LlamaConfig

from pipeproof import transformers


def build_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, num_hidden_layers=4, pad_token_id=0, **sizes))


def setup(model, batches):
    tokens = sum(int((one["labels"][:, 1:] != -100).sum()) for one in batches)

    def loss_fn(logits, labels):
        return model.loss_function(logits=logits, labels=labels, vocab_size=64, num_items_in_batch=tokens)

    rank, ranks = dist.get_rank(), dist.get_world_size()
    stage = transformers.Stage(model, rank, ranks)
    place = PipelineStage(stage, rank, ranks, torch.device("cpu"))
    return stage, Schedule1F1B(place, len(batches), loss_fn=loss_fn, scale_grads=False)


def train_step(schedule, batches):
    first, last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
    schedule.step(
        arg_mbs=[(one["input_ids"],) for one in batches] if first else [()] * len(batches),
        kwarg_mbs=[{"attention_mask": one["attention_mask"]} for one in batches],
        target_mbs=[one["labels"] for one in batches] if last else None,
        return_outputs=False,
    )
