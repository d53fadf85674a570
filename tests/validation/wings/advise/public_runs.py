"""Public training runs: what was trained on what, and how its ranks were laid out, each with its source."""

from collections.abc import Mapping
from typing import NamedTuple

from pipeproof.wings.advise.transformer import MODELS, Transformer


class Run(NamedTuple):
    """``zero``: the stage that its framework had then. ``sizes``: tp, cp, pp, dp, ep."""

    model: Transformer
    batch: int
    sequence: int
    device: str
    devices: int
    zero: int
    sizes: tuple[int, int, int, int, int]
    per_node: int = 8


def _gpt(layers: int, hidden: int, heads: int, vocabulary: int = 51_200) -> Transformer:
    return Transformer("gpt", layers, hidden, heads, vocabulary, 4 * hidden, gated=False, tied=True, biased=True)


def _run(model: str, devices: int, batch: int, sizes: tuple[int, ...], *, device: str = "a100", zero: int = 0,
         sequence: int = 2048) -> Run:  # fmt: skip
    """Of a model of the table."""
    tp, pp = sizes
    return Run(MODELS[model], batch, sequence, device, devices, zero, (tp, 1, pp, devices // (tp * pp), 1))


RUNS: Mapping[str, Run] = {
    # Shoeybi et al., Megatron-LM, 2019, table 1 and section 5: V100 in DGX-2H, 8 sequences of 1,024 tokens a replica
    "megatron 2019, 1.2 B": Run(_gpt(40, 1536, 16), 512, 1024, "v100", 64, 0, (1, 1, 1, 64, 1), 16),
    "megatron 2019, 2.5 B": Run(_gpt(54, 1920, 20), 512, 1024, "v100", 128, 0, (2, 1, 1, 64, 1), 16),
    "megatron 2019, 4.2 B": Run(_gpt(64, 2304, 24), 512, 1024, "v100", 256, 0, (4, 1, 1, 64, 1), 16),
    "megatron 2019, 8.3 B": Run(_gpt(72, 3072, 32), 512, 1024, "v100", 512, 0, (8, 1, 1, 64, 1), 16),
    # Microsoft, Turing-NLG, 2020: 17 B on 256 V100 in DGX-2, tensor parallelism of 4 with ZeRO
    "turing-nlg": Run(_gpt(78, 4256, 28), 512, 1024, "v100", 256, 1, (4, 1, 1, 64, 1), 16),
    # Narayanan et al., Efficient large-scale language model training on GPU clusters, 2021, table 1
    "megatron 1.7 B": _run("gpt-1.7b", 32, 512, (1, 1)),
    "megatron 3.6 B": _run("gpt-3.6b", 64, 512, (2, 1)),
    "megatron 7.5 B": _run("gpt-7.5b", 128, 512, (4, 1)),
    "megatron 18.4 B": _run("gpt-18b", 256, 1024, (8, 1)),
    "megatron 39.1 B": _run("gpt-39b", 512, 1536, (8, 2)),
    "megatron 76.1 B": _run("gpt-76b", 1024, 1792, (8, 4)),
    "megatron 145.6 B": _run("gpt-145b", 1536, 2304, (8, 8)),
    "megatron 310.1 B": _run("gpt-310b", 1920, 2160, (8, 16)),
    "megatron 529.6 B": _run("gpt-530b", 2520, 2520, (8, 35)),
    "megatron 1 T": _run("gpt-1t", 3072, 3072, (8, 64)),
    # Smith et al., Using DeepSpeed and Megatron to train Megatron-Turing NLG 530B, 2022, section 2.3
    "mt-nlg on 2,240": _run("gpt-530b", 2240, 1920, (8, 35)),
    "mt-nlg on 2,800": _run("gpt-530b", 2800, 1920, (8, 35)),
    "mt-nlg on 3,360": _run("gpt-530b", 3360, 1920, (8, 35)),
    # Black et al., GPT-NeoX-20B, 2022, section 3.3: 96 A100 of 40 GB, with ZeRO-1
    "gpt-neox": Run(_gpt(44, 6144, 64, 50_432), 1536, 2048, "a100-40", 96, 1, (2, 1, 4, 12, 1)),
    # Korthikanti et al., Reducing activation recomputation in large transformer models, 2022, table 3
    "22 B": _run("gpt-22b", 8, 4, (8, 1)),
    "175 B": _run("gpt-3-175b", 64, 64, (8, 8)),
    "530 B": _run("gpt-530b", 280, 280, (8, 35)),
    "1 T": _run("gpt-1t", 512, 512, (8, 64)),
    # BigScience, BLOOM, 2022, section 3.4
    "bloom": _run("bloom-176b", 384, 2048, (4, 12), zero=1),
    # Zhang et al., OPT, 2022, section 2.4: FSDP with Megatron's tensor parallelism on 992 A100, 2 M tokens a batch
    "opt": _run("gpt-3-175b", 992, 992, (8, 1), zero=3),
    # Zeng et al., GLM-130B, 2022, section 2.3: 96 nodes of 8 A100 of 40 GB, batch 4,224, ZeRO-1
    "glm-130b": Run(
        Transformer("glm", 70, 12288, 96, 150_528, 32768, biased=True), 4224, 2048, "a100-40", 768, 1, (4, 1, 8, 24, 1)
    ),
    # Almazrouei et al., The Falcon series of open language models, 2023, table 16, and the model cards: A100 of 40 GB
    "falcon 40 B": Run(
        Transformer("falcon", 60, 8192, 128, 65_024, 32768, kv_heads=8, gated=False, tied=True),
        *(1152, 2048, "a100-40", 384, 1, (8, 1, 4, 12, 1)),
    ),
    "falcon 180 B": Run(
        Transformer("falcon", 80, 14848, 232, 65_024, 59392, kv_heads=8, gated=False, tied=True),
        *(2048, 2048, "a100-40", 4096, 1, (8, 1, 8, 64, 1)),
    ),
    # MosaicML, MPT-7B and MPT-30B, 2023, model cards: FSDP
    "mpt 7 B": Run(
        Transformer("mpt", 32, 4096, 32, 50_432, 16384, gated=False, tied=True),
        *(1760, 2048, "a100-40", 440, 3, (1, 1, 1, 440, 1)),
    ),
    "mpt 30 B": Run(
        Transformer("mpt", 48, 7168, 64, 50_432, 28672, gated=False, tied=True),
        *(512, 8192, "h100", 256, 3, (1, 1, 1, 256, 1)),
    ),
    # Groeneveld et al., OLMo, 2024, section 3: FSDP, 4 M tokens a batch, 27 nodes of 8 A100 of 40 GB
    "olmo 7 B": Run(
        Transformer("olmo", 32, 4096, 32, 50_304, 11008, tied=True),
        *(2160, 2048, "a100-40", 216, 3, (1, 1, 1, 216, 1)),
    ),
    # Jiang et al., MegaScale, 2024, section 6: Megatron's layout of 175 B, batch 6,144 on up to 12,288 Ampere GPUs
    "megascale on 3,072": _run("gpt-3-175b", 3072, 6144, (8, 8), zero=1),
    "megascale on 12,288": _run("gpt-3-175b", 12288, 6144, (8, 8), zero=1),
    # Parmar et al., Nemotron-4 15B, 2024, table 2
    **{
        f"nemotron-4 15 B, dp {dp}": Run(
            Transformer("nemotron", 32, 6144, 48, 256_000, 24576, kv_heads=8, gated=False),
            *(batch, 4096, "h100", 8 * dp, 1, (8, 1, 1, dp, 1)),
        )
        for dp, batch in ((96, 384), (192, 768), (288, 1152))
    },
    # Adler et al., Nemotron-4 340B, 2024, table 2
    **{
        f"nemotron-4 340 B, dp {dp}": _run(
            "nemotron-4-340b", 96 * dp, batch, (8, 12), device="h100", zero=1, sequence=4096
        )
        for dp, batch in ((16, 768), (32, 1536), (64, 2304))
    },
    # Grattafiori et al., The Llama 3 herd of models, 2024, table 4
    "llama 3 on 8,192": _run("llama-3-405b", 8192, 2048, (8, 16), device="h100", zero=1, sequence=8192),
    "llama 3 on 16,384": _run("llama-3-405b", 16384, 2048, (8, 16), device="h100", zero=1, sequence=8192),
    "llama 3, long": Run(MODELS["llama-3-405b"], 128, 131_072, "h100", 16384, 1, (8, 16, 16, 8, 1)),
    # DeepSeek-AI, DeepSeek-V3, 2024, sections 3.2 and 4.2, which has FP8 and DualPipe as well
    "deepseek-v3": Run(MODELS["deepseek-v3"], 15360, 4096, "h800", 2048, 1, (1, 1, 16, 128, 64)),
}

# Which of them advice has not among its first three, and why, as far as we know. No constant is fitted to any run.
NOT_FOUND: Mapping[str, str] = {
    "megatron 2019, 1.2 B": "there was no pipeline in Megatron yet; one that is zero-bubble saves recompute here",
    "megatron 2019, 2.5 B": "as 1.2 B",
    "turing-nlg": "two stages save full recompute of all",
    "megatron 18.4 B": "two ranks of a zero-bubble pipeline, unknown then, cost less than tp 8 instead of 4",
    "megatron 39.1 B": "as 18.4 B",
    "glm-130b": "its eight stages fit with full recompute alone; deeper pipelines need none",
    "falcon 40 B": "tp 4 fits, with sequence parallelism, which its framework had not, and says half as much",
    "mpt 30 B": "FSDP alone had neither tensor parallelism nor a pipeline, and so full recompute",
    "olmo 7 B": "a network of 25 GB/s is assumed for A100; with it ZeRO over 216 devices waits in every microbatch",
    "megascale on 3,072": "tp 4 with 12 stages fits, and says half as much",
    "megascale on 12,288": "fewer stages fit, for batches are the same size",
    "llama 3, long": "longer pipelines with cp 32 are faster; the run kept those of its shorter sequences",
    "deepseek-v3": "experts over 8 nodes cost little where DualPipe computes meanwhile; here ranks wait for them",
}
