"""Transformers for planning: sizes, parameters and operations, from a table, a config or by hand."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import list_known
from pipeproof.pipeline.sizes import MOST_LAYERS, check_count

_MOST = 1 << 24  # upper bound for every size
_MOST_EXPERTS = 1 << 16


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): ranks of the compressions, sizes of a head's parts.

    ``query_rank`` of 0: queries are not compressed.
    """

    query_rank: int
    kv_rank: int
    plain: int
    rotary: int
    value: int

    def __post_init__(self) -> None:
        for one in fields(self):
            check_count(f"{one.name} of latent attention", getattr(self, one.name), least=0, most=_MOST)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in every layer but the first ``dense_layers``.

    ``count`` routed experts of ``size`` (the width of their feed-forward part); a token visits ``per_token`` of them,
    and ``shared`` more that all tokens visit.
    """

    count: int
    per_token: int
    size: int
    shared: int = 0
    dense_layers: int = 0

    def __post_init__(self) -> None:
        check_count("experts", self.count, most=_MOST_EXPERTS)
        check_count("the width of an expert", self.size, most=_MOST)
        check_count("shared experts", self.shared, least=0, most=_MOST_EXPERTS)
        check_count("layers without experts", self.dense_layers, least=0, most=_MOST)
        if not 1 <= self.per_token <= self.count:
            raise ScheduleError(f"a token visits {self.per_token} of {self.count} experts: expected 1 to {self.count}")


@dataclass(frozen=True)
class Transformer:
    """A decoder. ``feed_forward`` is the inner width; ``gated`` has three matrices there (SwiGLU), else two.

    ``kv_heads`` and ``head_size`` of 0 mean: as many as heads, and hidden / heads. ``positions``: learned ones.
    ``biased``: linear layers and norms have biases, as in GPT-2 and GPT-3.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    feed_forward: int
    kv_heads: int = 0
    head_size: int = 0
    gated: bool = True
    tied: bool = False
    biased: bool = False
    positions: int = 0
    experts: Experts | None = None
    latent: Latent | None = None

    def __post_init__(self) -> None:
        check_count("layers", self.layers, most=MOST_LAYERS)
        for what in ("hidden", "heads", "vocabulary", "feed_forward"):
            check_count(what, getattr(self, what), most=_MOST)
        for what in ("kv_heads", "head_size", "positions"):
            check_count(what, getattr(self, what), least=0, most=_MOST)
        if self.heads % self.keys:
            raise ScheduleError(
                f"heads {self.heads} are no multiple of the {self.keys} of keys and values, which serve as many each"
            )
        if not self.head_size and self.hidden % self.heads:
            raise ScheduleError(
                f"hidden {self.hidden} is no multiple of heads {self.heads}: change one (or say head_dim in a config)"
            )

    @property
    def keys(self) -> int:
        """Number of heads for keys and values."""
        return self.kv_heads or self.heads

    @property
    def head(self) -> int:
        """Size of a head."""
        return self.head_size or self.hidden // self.heads

    @property
    def attention(self) -> int:
        """Parameters in a layer's attention."""
        if self.latent is not None:
            return self._latent_attention(self.latent)
        inner, keys = self.heads * self.head, self.keys * self.head
        return self.hidden * (2 * inner + 2 * keys) + self.biased * (inner + 2 * keys + self.hidden)

    def _latent_attention(self, latent: Latent) -> int:
        queries = self.heads * (latent.plain + latent.rotary)
        query = latent.query_rank * (self.hidden + queries + 1) if latent.query_rank else self.hidden * queries
        keys = self.hidden * (latent.kv_rank + latent.rotary)
        values = latent.kv_rank * (self.heads * (latent.plain + latent.value) + 1)
        return query + keys + values + self.heads * latent.value * self.hidden

    @property
    def norms(self) -> int:
        """Parameters in a layer's two norms."""
        return 2 * self.hidden * (1 + self.biased)

    def inner(self, width: int) -> int:
        """Return the parameters in a feed-forward part with ``width``."""
        return (2 + self.gated) * self.hidden * width + self.biased * (width + self.hidden)

    def is_dense(self, layer: int) -> bool:
        """True if ``layer`` has no experts."""
        return self.experts is None or layer < self.experts.dense_layers

    @property
    def routed_layers(self) -> int:
        """Number of layers with experts."""
        return 0 if self.experts is None else max(0, self.layers - self.experts.dense_layers)

    def shared_parameters(self, layer: int) -> int:
        """Return the parameters in ``layer`` for every token: all but routed experts."""
        common = self.attention + self.norms
        if self.experts is None or self.is_dense(layer):
            return common + self.inner(self.feed_forward)
        return common + self.hidden * self.experts.count + self.experts.shared * self.inner(self.experts.size)

    def routed_parameters(self, layer: int) -> int:
        """Return the parameters in ``layer``'s routed experts."""
        if self.experts is None or self.is_dense(layer):
            return 0
        return self.experts.count * self.inner(self.experts.size)

    def active(self, layer: int) -> int:
        """Return the parameters in ``layer`` for one token."""
        experts = self.experts
        return self.shared_parameters(layer) + (
            self.routed_parameters(layer) * experts.per_token // experts.count if experts else 0
        )

    @property
    def embedding(self) -> int:
        """Parameters before the first layer."""
        return (self.vocabulary + self.positions) * self.hidden

    @property
    def output(self) -> int:
        """Parameters after the last layer: the last norm and, unless tied, the projection to the vocabulary."""
        return self.hidden * (1 + self.biased) + (0 if self.tied else self.vocabulary * self.hidden)

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        layers = range(self.layers)
        return (
            self.embedding
            + self.output
            + sum(self.shared_parameters(layer) + self.routed_parameters(layer) for layer in layers)
        )

    @property
    def active_parameters(self) -> int:
        """Parameters used by one token."""
        return self.embedding + self.output + sum(map(self.active, range(self.layers)))

    def operations(self, layer: int, sequence: int) -> float:
        """Return floating-point operations in ``layer``'s forward for one token: two per parameter, and attention.

        Attention is causal: on average a token sees half the sequence.
        """
        return 2.0 * self.active(layer) + self.attention_operations(sequence)

    def attention_operations(self, sequence: int) -> float:
        """Return a layer's attention operations without parameters."""
        return 2.0 * sequence * self.heads * self._attended

    @property
    def output_operations(self) -> float:
        """Return operations in the projection to the vocabulary, for one token."""
        return 2.0 * self.hidden * self.vocabulary

    @property
    def attended_width(self) -> int:
        """Numbers kept by attention for a token: queries, keys, values, and output."""
        latent = self.latent
        if latent is None:
            return 2 * (self.heads + self.keys) * self.head
        return 2 * self.heads * (latent.plain + latent.rotary + latent.value)

    @property
    def compressed_width(self) -> int:
        """Numbers in latent attention's compressed form for a token; 0 without it."""
        return 0 if self.latent is None else self.latent.query_rank + self.latent.kv_rank + self.latent.rotary

    @property
    def _attended(self) -> float:
        latent = self.latent
        return self.head if latent is None else (latent.plain + latent.rotary + latent.value) / 2


def _gpt(name: str, layers: int, hidden: int, heads: int, vocabulary: int = 51_200) -> Transformer:
    """Return a GPT from Narayanan et al., 2021: biases, tied embeddings, 2,048 learned positions."""
    return Transformer(
        name, layers, hidden, heads, vocabulary, 4 * hidden, gated=False, tied=True, biased=True, positions=2048
    )


def _by_name(*models: Transformer) -> Mapping[str, Transformer]:
    return {model.name: model for model in models}


MODELS = _by_name(
    # Narayanan et al., Efficient large-scale language model training on GPU clusters, 2021, table 1
    _gpt("gpt-1.7b", 24, 2304, 24),
    _gpt("gpt-3.6b", 30, 3072, 32),
    _gpt("gpt-7.5b", 36, 4096, 32),
    _gpt("gpt-18b", 40, 6144, 48),
    _gpt("gpt-39b", 48, 8192, 64),
    _gpt("gpt-76b", 60, 10240, 80),
    _gpt("gpt-145b", 80, 12288, 96),
    _gpt("gpt-310b", 96, 16384, 128),
    _gpt("gpt-530b", 105, 20480, 128),
    _gpt("gpt-1t", 128, 25600, 160),
    # Korthikanti et al., Reducing activation recomputation in large transformer models, 2022, table 3
    _gpt("gpt-22b", 48, 6144, 64),
    _gpt("gpt-3-175b", 96, 12288, 96),
    # BigScience, BLOOM, 2022: ALiBi has no parameters
    replace(_gpt("bloom-176b", 70, 14336, 112, 250_880), positions=0),
    # the configs that their authors published
    Transformer("llama-2-7b", 32, 4096, 32, 32_000, 11008),
    Transformer("llama-2-13b", 40, 5120, 40, 32_000, 13824),
    Transformer("llama-2-70b", 80, 8192, 64, 32_000, 28672, kv_heads=8),
    Transformer("llama-3-8b", 32, 4096, 32, 128_256, 14336, kv_heads=8),
    Transformer("llama-3-70b", 80, 8192, 64, 128_256, 28672, kv_heads=8),
    Transformer("llama-3-405b", 126, 16384, 128, 128_256, 53248, kv_heads=8),
    Transformer("qwen-2.5-72b", 80, 8192, 64, 152_064, 29568, kv_heads=8),
    Transformer("nemotron-4-340b", 96, 18432, 96, 256_000, 73728, kv_heads=8, gated=False),
    Transformer("mistral-7b", 32, 4096, 32, 32_000, 14336, kv_heads=8),
    Transformer("mixtral-8x7b", 32, 4096, 32, 32_000, 14336, kv_heads=8, experts=Experts(8, 2, 14336)),
    Transformer("mixtral-8x22b", 56, 6144, 48, 32_768, 16384, kv_heads=8, experts=Experts(8, 2, 16384)),
    Transformer(
        "deepseek-v3",
        61,
        7168,
        128,
        129_280,
        18432,
        head_size=128,
        experts=Experts(256, 8, 2048, shared=1, dense_layers=3),
        latent=Latent(1536, 512, 128, 64, 128),
    ),
)


def model_named(name: str) -> Transformer:
    """Return a model from the table. Raises ``ScheduleError`` for an unknown name."""
    plain = name.lower().replace("_", "-")
    if plain not in MODELS:
        raise ScheduleError(f"unknown model {name!r}: {list_known(plain, list(MODELS))}")
    return MODELS[plain]


# What Hugging Face's config.json calls a size; GPT-2's and BLOOM's names come second.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
    "feed_forward": ("intermediate_size", "n_inner"),
    "kv_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
}
_BIASED = frozenset({"gpt2", "gpt_neox", "bloom", "opt"})


def model_of_config(config: Mapping[str, Any], *, name: str) -> Transformer:
    """Read a model from a Hugging Face ``config.json``. Raises ``ScheduleError`` for missing or non-numeric fields."""
    found = {ours: value for ours, theirs in _FIELDS.items() if (value := _first(config, theirs)) is not None}
    kind = str(config.get("model_type", ""))
    plain = kind in _BIASED
    if plain and "hidden" in found:
        found.setdefault("feed_forward", 4 * found["hidden"])
    for ours, theirs in list(_FIELDS.items())[:5]:
        if ours not in found:
            raise ScheduleError(f"no {theirs[0]}; expected the config.json of a decoder")
    found["positions"] = (_first(config, ("n_positions",)) or 0) if kind == "gpt2" else 0
    return Transformer(
        name,
        gated=not plain,
        biased=plain,
        tied=_true(config, "tie_word_embeddings", default=plain),
        experts=_experts(config, found["feed_forward"]),
        latent=_latent(config),
        **found,
    )


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int):
                raise ScheduleError(f"{name} is {value!r}: expected a whole number")
            return value
    return None


def _true(config: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise ScheduleError(f"{name} is {value!r}: expected true or false")
    return value


def _experts(config: Mapping[str, Any], width: int) -> Experts | None:
    count = _first(config, ("n_routed_experts", "num_local_experts", "num_experts"))
    if not count:
        return None
    return Experts(
        count,
        _first(config, ("num_experts_per_tok",)) or 1,
        _first(config, ("moe_intermediate_size",)) or width,
        shared=_first(config, ("n_shared_experts",)) or 0,
        dense_layers=_first(config, ("first_k_dense_replace",)) or 0,
    )


def _latent(config: Mapping[str, Any]) -> Latent | None:
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = [_first(config, (name,)) for name in names]
    found = [size for size in sizes if size is not None]
    return Latent(_first(config, ("q_lora_rank",)) or 0, *found) if len(found) == len(names) else None
