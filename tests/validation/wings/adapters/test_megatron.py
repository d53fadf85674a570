"""What pipeproof.megatron knows of Megatron, on models that are like its: names, losses, gradients, versions."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.whitebox import FlatShard
from pipeproof.wings.adapters import megatron
from pipeproof.wings.adapters.megatron import MegatronError, gradients_of
from pipeproof.wings.adapters.megatron_whole import bare, whole_loss
from tests.support.like_megatron import installed


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.linear = nn.Linear(2, 2)
        self.attention = nn.Module()
        self.attention.layer_number = number  # type: ignore[assignment]  # a number, as Megatron's has
        self.attention.proj = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(self.attention.proj(x))  # type: ignore[operator]  # a module
        return made


class Chunk(nn.Module):
    """A chunk that holds layers ``first``, ``first + 1`` and so on of the whole model, from 1."""

    def __init__(self, first: int, layers: int, *, last: bool = False, tied: bool = False) -> None:
        super().__init__()
        covered = {"tensor_model_parallel_size": 1, "num_moe_experts": None, "fp16": False, "bf16": False}
        self.config = SimpleNamespace(calculate_per_token_loss=False, **covered)
        self.share_embeddings_and_output_weights = tied
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(Layer(first + number) for number in range(layers))
        self.decoder.final_layernorm = nn.LayerNorm(2)
        self.input_tensor: Tensor | None = None
        if last:
            self.output_layer = nn.Linear(2, 2, bias=False)

    def set_input_tensor(self, tensor: Tensor) -> None:
        self.input_tensor = tensor

    def forward(self, x: Tensor | None = None) -> Tensor:
        made = x if self.input_tensor is None else self.input_tensor
        assert made is not None
        for layer in self.decoder.layers:  # type: ignore[union-attr]  # a list of modules
            made = layer(made)
        return made


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def whole(chunk: Chunk) -> nn.Module:
    made = nn.Module()
    made.model = chunk
    return made


def test_a_chunk_is_taken_out_of_all_its_wrappers() -> None:
    chunk = Chunk(1, 1)
    assert bare(Wrapped(Wrapped(chunk))) is chunk
    assert bare(chunk) is chunk


def test_layers_have_their_numbers_in_the_whole_model() -> None:
    names = megatron.global_names(Chunk(5, 2))
    assert names["decoder.layers.0.linear.weight"] == "decoder.layers.4.linear.weight"
    assert names["decoder.layers.1.attention.proj.weight"] == "decoder.layers.5.attention.proj.weight"
    assert names["decoder.final_layernorm.bias"] == "decoder.final_layernorm.bias"


def test_a_tenth_layer_is_no_first() -> None:
    names = megatron.global_names(Chunk(1, 12))
    assert all(name == own for name, own in names.items())
    assert len(set(names.values())) == len(names)


@pytest.mark.parametrize(("tied", "name"), [(True, "embedding.word_embeddings.weight"), (False, "output_layer.weight")])
def test_a_shared_output_layer_is_a_copy_of_the_embedding(tied: bool, name: str) -> None:
    assert megatron.global_names(Chunk(1, 1, last=True, tied=tied))["output_layer.weight"] == name


@pytest.mark.usefixtures("_megatron")
def test_a_chunk_gets_the_weights_of_its_own_layers() -> None:
    reference, chunk = Chunk(1, 4), Chunk(3, 2)
    with megatron.observe(Wrapped(chunk), forward_step, [], whole(reference)):
        pass
    for local in range(2):
        own = chunk.get_parameter(f"decoder.layers.{local}.linear.weight")
        assert own.equal(reference.get_parameter(f"decoder.layers.{local + 2}.linear.weight"))
        assert not own.equal(reference.get_parameter(f"decoder.layers.{local}.linear.weight"))


@pytest.mark.usefixtures("_megatron")
def test_a_reference_that_lacks_a_parameter_is_said() -> None:
    form = r"model\.decoder\.layers\.2\.linear\.weight of shape \[2, 2\] in float32"
    sentence = rf"^a stage has a parameter {form}, the reference has none: build"
    with (
        pytest.raises(MegatronError, match=sentence),
        megatron.observe([Chunk(3, 1)], forward_step, [], whole(Chunk(1, 2))),
    ):
        pass


def test_gradients_are_main_grad() -> None:
    chunk = Chunk(1, 1)
    for parameter in chunk.parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.main_grad = torch.ones_like(parameter)  # type: ignore[attr-defined]  # Megatron's
    found = gradients_of(Wrapped(chunk))
    assert len(found) == len([*chunk.parameters()])
    for parameter, gradient in found.items():
        assert gradient is parameter.main_grad  # type: ignore[attr-defined]  # Megatron's


def buffer_of(parameters: list[nn.Parameter], *, rank: int, ranks: int, distributed: bool = True) -> SimpleNamespace:
    """A buffer as Megatron's DDP has it: one bucket with all gradients behind each other."""
    places, start = {}, 0
    for parameter in parameters:
        places[parameter] = (start, start + parameter.numel(), 0)
        start += parameter.numel()
    whole = torch.arange(float(start + -start % ranks))
    for parameter, (first, end, _) in places.items():
        parameter.main_grad = whole[first:end].view_as(parameter)  # type: ignore[attr-defined]  # Megatron's
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
    settings = SimpleNamespace(use_distributed_optimizer=distributed)
    bucket = SimpleNamespace(offset=0, grad_data=whole)
    return SimpleNamespace(
        data_parallel_group=group, ddp_config=settings, param_index_map=places, buckets=[bucket], whole=whole
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_shards_of_a_distributed_optimizer_make_up_every_gradient(ranks: int) -> None:
    chunk = Chunk(1, 2)
    ddp, parameters = Wrapped(chunk), [*chunk.parameters()]
    wholes: dict[nn.Parameter, list[float]] = {one: [] for one in parameters}
    for rank in range(ranks):
        ddp.buffers = [buffer_of(parameters, rank=rank, ranks=ranks)]  # type: ignore[assignment,method-assign]  # as Megatron
        for parameter, shard in gradients_of(ddp).items():
            assert isinstance(shard, FlatShard)
            if shard.part is not None:
                assert shard.start == len(wholes[parameter])
                wholes[parameter] += shard.part.tolist()
    for parameter, found in wholes.items():
        assert found == parameter.main_grad.flatten().tolist()  # type: ignore[attr-defined]  # Megatron's


@pytest.mark.parametrize(("ranks", "distributed"), [(1, True), (2, False)])
def test_without_a_distributed_optimizer_or_replicas_gradients_are_whole(ranks: int, distributed: bool) -> None:
    chunk = Chunk(1, 1)
    ddp = Wrapped(chunk)
    own = buffer_of([*chunk.parameters()], rank=0, ranks=ranks, distributed=distributed)
    ddp.buffers = [own]  # type: ignore[assignment,method-assign]  # as Megatron
    assert all(isinstance(one, Tensor) for one in gradients_of(ddp).values())


@pytest.mark.parametrize(
    ("results", "per_token", "loss"),
    [((6.0, {}), False, 6), ((6.0, 3, {}), False, 2), ((6.0, 0, {}), False, 6), ((6.0, 3, {}), True, 6)],
)
def test_a_loss_is_what_its_function_means_by_its_results(
    results: tuple[Any, ...], per_token: bool, loss: float
) -> None:
    given = tuple(torch.tensor(one) if not isinstance(one, dict) else one for one in results)
    assert whole_loss(given, SimpleNamespace(calculate_per_token_loss=per_token)).item() == loss


@pytest.fixture
def _megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)


class Optimizer:
    """As Megatron's: it tells whether it stepped, the norm, and how many zeros there were."""

    def __init__(self) -> None:
        self.reloaded = 0

    def reload_model_params(self) -> None:
        self.reloaded += 1

    def step(self) -> tuple[bool, float, None]:
        return True, 1.5, None


def forward_step(data: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    return bare(model)(next(data)), lambda output: (output.sum(), {})


@pytest.mark.usefixtures("_megatron")
def test_a_step_is_observed_and_left_as_it_was() -> None:
    chunk, optimizer = Chunk(1, 1), Optimizer()
    with megatron.observe([chunk], forward_step, [torch.ones(1, 2)], whole(Chunk(1, 1)), optimizer) as observed:
        output, loss_function = observed.forward_step(observed.data_iterator, chunk)
        schedules = sys.modules["megatron.core.pipeline_parallel.schedules"]
        loss = schedules.forward_step_calc_loss(chunk, output, loss_function, chunk.config, 4)  # divides in place
        kept = loss.item() * 4
        assert optimizer.step() == (True, 1.5, None)
    handed = observed.result()
    assert [one.item() for one in handed.losses] == [kept]
    assert handed.grad_norm == 1.5
    assert optimizer.reloaded == 1
    assert handed.modules == [chunk]
    assert handed.names("decoder.layers.0.linear.bias", 0, 0) == "model.decoder.layers.0.linear.bias"
    assert not {"set_input_tensor", "forward"} & vars(chunk).keys()
    assert not chunk._forward_pre_hooks
    assert "step" not in vars(optimizer)


@pytest.mark.usefixtures("_megatron")
def test_a_step_that_the_optimizer_did_not_take_is_said() -> None:
    with megatron.observe(Chunk(1, 1), forward_step, [], whole(Chunk(1, 1)), Optimizer()) as observed:
        pass
    with pytest.raises(MegatronError, match=r"^optimizer\.step was not called in the block: pass"):
        observed.result()


@pytest.mark.usefixtures("_megatron")
def test_what_a_stage_before_sent_passes_through_the_call() -> None:
    chunk, came, given = Chunk(1, 1), torch.ones(1, 2), []
    with megatron.observe(chunk, forward_step, [], whole(Chunk(1, 1))):
        chunk.register_forward_pre_hook(lambda _, __, named: given.append(named["stage_input"]), with_kwargs=True)
        chunk.set_input_tensor(came)
        chunk()
    assert given == [came]


@pytest.mark.usefixtures("_megatron")
def test_gradients_are_those_that_the_optimizer_was_given() -> None:
    chunk, optimizer = Chunk(1, 1), Optimizer()
    with megatron.observe(chunk, forward_step, [], whole(Chunk(1, 1)), optimizer) as observed:
        for parameter in chunk.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for parameter in chunk.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.1)  # clipped
    assert all(one is not None and bool(one.eq(1).all()) for one in observed.result().gradients.values())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_model_parallel_size", 2),
        ("num_moe_experts", 4),
        ("fp16", True),
        ("fp8", "hybrid"),
        ("hidden_dropout", 0.1),
        ("attention_dropout", 0.1),
    ],
)
def test_what_is_not_covered_is_said(name: str, value: object) -> None:
    chunk = Chunk(1, 1)
    setattr(chunk.config, name, value)
    with (
        pytest.raises(MegatronError, match=f"^{name} is {value}: pipeproof.megatron covers"),
        megatron.observe(chunk, forward_step, [], whole(chunk)),
    ):
        pass
