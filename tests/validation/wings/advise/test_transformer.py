"""The sizes of public models are those that their authors publish."""

from typing import Any

import pytest

from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.wings.advise.transformer import MODELS, Transformer, model_named, model_of_config

# Billions of parameters, all and those that a token uses: Narayanan et al., 2021, table 1; BLOOM, 2022; model cards.
PUBLISHED = {
    "gpt-1.7b": 1.7,
    "gpt-3.6b": 3.6,
    "gpt-7.5b": 7.5,
    "gpt-18b": 18.4,
    "gpt-39b": 39.1,
    "gpt-76b": 76.1,
    "gpt-145b": 145.6,
    "gpt-310b": 310.1,
    "gpt-530b": 529.6,
    "gpt-1t": 1008.0,
    "bloom-176b": 176.25,
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.02,
    "llama-2-70b": 68.98,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.55,
    "llama-3-405b": 405.85,
    "qwen-2.5-72b": 72.7,
    "nemotron-4-340b": 340.0,
    "mistral-7b": 7.24,
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 140.6,
    "deepseek-v3": 671.0,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_public_model_has_its_parameters(name: str) -> None:
    assert model_named(name).parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.004, abs=0.05)


@pytest.mark.parametrize(("name", "active"), [("mixtral-8x7b", 12.9), ("deepseek-v3", 37.0), ("llama-3-8b", 8.03)])
def test_a_token_uses_its_experts_alone(name: str, active: float) -> None:
    assert model_named(name).active_parameters / 1e9 == pytest.approx(active, rel=0.02)


def test_operations_are_six_a_parameter_and_token_where_sequences_are_short() -> None:
    model = MODELS["llama-3-8b"]
    forward = sum(model.operations(layer, 1) for layer in range(model.layers))
    assert forward == pytest.approx(2 * (model.parameters - model.embedding - model.output), rel=1e-3)
    assert model.operations(0, 8192) - model.operations(0, 0) == 2 * 8192 * model.hidden


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "intermediate_size": 14336,
}


def test_a_config_is_the_model_of_the_table() -> None:
    assert model_of_config(LLAMA, name="mine").parameters == MODELS["llama-3-8b"].parameters
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    assert model_of_config(gpt2, name="gpt2").parameters == 124_439_808, "as its authors count them"
    experts = {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1}
    latent = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    sizes = {"num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "vocab_size": 129280}
    deepseek = {**sizes, "intermediate_size": 18432, "first_k_dense_replace": 3, "head_dim": 128, **experts, **latent}
    assert model_of_config(deepseek, name="deepseek").parameters == MODELS["deepseek-v3"].parameters
    lite = {"num_hidden_layers": 27, "hidden_size": 2048, "num_attention_heads": 16, "vocab_size": 102400}
    lite |= {"intermediate_size": 10944, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2}
    lite |= {"moe_intermediate_size": 1408, "first_k_dense_replace": 1, **latent, "q_lora_rank": None}
    assert model_of_config(lite, name="lite").parameters / 1e9 == pytest.approx(15.7, abs=0.05), "its model card"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": None}, "no num_hidden_layers; expected the config.json of a decoder"),
        ({"hidden_size": "4096"}, "hidden_size is '4096': expected a whole number"),
        ({"vocab_size": True}, "vocab_size is True: expected a whole number"),
        ({"num_attention_heads": 0}, "heads is 0: expected at least 1"),
        ({"num_attention_heads": 31}, "heads 31 are no multiple of the 8 of keys and values, which serve as many each"),
        ({"num_attention_heads": 24}, "hidden 4096 is no multiple of heads 24"),
        ({"num_key_value_heads": 7}, "heads 32 are no multiple of the 7 of keys and values"),
        ({"num_key_value_heads": -8}, "kv_heads is -8: expected at least 0"),
        ({"head_dim": -2}, "head_size is -2: expected at least 0"),
        ({"model_type": "gpt2", "n_positions": -5}, "positions is -5: expected at least 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no': expected true or false"),
        ({"num_experts": -4}, "experts is -4: expected at least 1"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "a token visits 9 of 8 experts: expected 1 to 8"),
        ({"num_experts": 8, "moe_intermediate_size": -5}, "the width of an expert is -5: expected at least 1"),
        ({"num_experts": 8, "n_shared_experts": -5}, "shared experts is -5: expected at least 0"),
        ({"num_experts": 8, "first_k_dense_replace": -1}, "layers without experts is -1: expected at least 0"),
        (
            {"kv_lora_rank": -1, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0},
            "kv_rank of latent attention is -1: expected at least 0",
        ),
    ],
)
def test_a_config_that_is_none_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        model_of_config(LLAMA | change, name="mine")


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ScheduleError, match="unknown model 'llama-3-80b': did you mean 'llama-3-8"):
        model_named("llama-3-80b")
    assert isinstance(model_named("Llama_3_8B"), Transformer)
