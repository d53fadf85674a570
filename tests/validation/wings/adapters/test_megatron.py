"""What pipeproof.megatron knows of Megatron, on models that are like its; a job's step: judged, or refused."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import FlatShard
from pipeproof.wings.adapters import megatron
from pipeproof.wings.adapters.megatron import MegatronError, gradients_of
from pipeproof.wings.adapters.megatron_whole import bare, whole_loss
from tests.support.golden import golden
from tests.support.like_megatron import DATA, Chunk, forward_step_calc_loss, installed
from tests.support.like_megatron import forward_step_of_user as forward_step


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)


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
    names = megatron.global_names(Chunk(5, 2, last=True))
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


def test_a_chunk_gets_the_weights_of_its_own_layers() -> None:
    reference, chunk = Chunk(1, 4), Chunk(3, 2)
    with megatron.observe(Wrapped(chunk), forward_step, [], whole(reference)):
        pass
    for local in range(2):
        own = chunk.get_parameter(f"decoder.layers.{local}.linear.weight")
        assert own.equal(reference.get_parameter(f"decoder.layers.{local + 2}.linear.weight"))
        assert not own.equal(reference.get_parameter(f"decoder.layers.{local}.linear.weight"))


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


class Optimizer:
    """As Megatron's: it tells whether it stepped, the norm, and how many zeros there were."""

    def __init__(self) -> None:
        self.reloaded = 0

    def reload_model_params(self) -> None:
        self.reloaded += 1

    def step(self) -> tuple[bool, float, None]:
        return True, 1.5, None


def test_a_step_is_observed_and_left_as_it_was() -> None:
    chunk, optimizer = Chunk(1, 1), Optimizer()
    with megatron.observe([chunk], forward_step, DATA[:1], whole(Chunk(1, 1)), optimizer) as observed:
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


def test_a_step_that_the_optimizer_did_not_take_is_said() -> None:
    with megatron.observe(Chunk(1, 1), forward_step, [], whole(Chunk(1, 1)), Optimizer()) as observed:
        pass
    with pytest.raises(MegatronError, match=r"^optimizer\.step was not called in the block: pass"):
        observed.result()


def test_what_a_stage_before_sent_passes_through_the_call() -> None:
    chunk, came, given = Chunk(1, 1), torch.ones(1, 2), []
    with megatron.observe(chunk, forward_step, [], whole(Chunk(1, 1))):
        chunk.register_forward_pre_hook(lambda _, __, named: given.append(named["stage_input"]), with_kwargs=True)
        chunk.set_input_tensor(came)
        chunk()
    assert given == [came]


def test_gradients_are_those_that_the_optimizer_was_given() -> None:
    chunk, optimizer = Chunk(1, 1), Optimizer()
    with megatron.observe(chunk, forward_step, [], whole(Chunk(1, 1)), optimizer) as observed:
        for parameter in chunk.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for parameter in chunk.parameters():
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


class Clipping:
    """As Megatron's: it clips, and tells whether it stepped, the norm, and how many zeros there were."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [*model.parameters()]

    def step(self) -> tuple[bool, float, None]:
        norm = nn.utils.get_total_norm([one.main_grad for one in self.parameters])  # type: ignore[attr-defined]  # Megatron's
        for one in self.parameters:
            one.main_grad.zero_()  # type: ignore[attr-defined]  # Megatron's
        return True, norm.item(), None


def train(model: Chunk, optimizer: Any, factor: float = 1.0, drawn: Any = DATA) -> None:
    """As Megatron's schedule and its finalizing do."""
    schedules = sys.modules["megatron.core.pipeline_parallel.schedules"]
    model.zero_grad()
    data = iter(drawn)
    for _ in drawn:
        loss = schedules.forward_step(forward_step, data, model, len(drawn))
        (loss * factor).backward()
    tokens = 4.0 if model.config.calculate_per_token_loss else 1.0
    for one in model.parameters():
        assert one.grad is not None
        one.main_grad, one.grad = one.grad / tokens, None  # type: ignore[attr-defined]  # Megatron's
    if optimizer is not None:
        optimizer.step()


def judged(
    model: Any,
    *,
    optimizer: Any = None,
    microbatches: Any = DATA,
    drawn: Any = DATA,
    factor: float = 1.0,
    **config: Any,
) -> Verdict:
    def reference() -> Chunk:
        tracker = sys.modules["megatron.core.tensor_parallel.random"]._CUDA_RNG_STATE_TRACKER
        tracker.states_["model"] = 0
        return Chunk(**config)

    with megatron.check_step(model, optimizer, forward_step, microbatches, reference=reference, timeout_s=5) as check:
        if isinstance(model, Chunk):
            train(model, optimizer, factor, drawn)
    assert sys.modules["megatron.core.pipeline_parallel.schedules"].forward_step_calc_loss is forward_step_calc_loss
    assert sys.modules["megatron.core.tensor_parallel.random"]._CUDA_RNG_STATE_TRACKER.states_ == {"model": 3}
    assert sys.modules["megatron.core.parallel_state"]._DATA_PARALLEL_GROUP == "the job's"
    assert optimizer is None or "step" not in vars(optimizer)
    assert not dist.is_initialized()
    return check.verdict


@pytest.mark.parametrize("per_token", [False, True])
def test_a_right_step_passes_in_names_of_the_whole_model(per_token: bool) -> None:
    model = Chunk(calculate_per_token_loss=per_token)
    with torch.no_grad():
        model.get_parameter("decoder.layers.0.linear.weight").fill_(0.25)  # the job has trained
    verdict = judged(model, optimizer=Clipping(model), calculate_per_token_loss=per_token)
    assert verdict.outcome == "pass", str(verdict)
    assert {name: verdict.law(name).checked for name in ("loss", "gradient", "grad-norm")} == {
        "loss": 2,
        "gradient": 6,
        "grad-norm": 1,
    }


def test_a_step_of_other_microbatches_than_were_given_is_no_wrong_step() -> None:
    verdict = judged(Chunk(), drawn=[DATA[0], (torch.full((1, 2), 5.0), torch.tensor(3.0))])
    assert verdict.outcome == "unknown"
    golden(verdict.details.splitlines()[0])
    assert judged(Chunk(), drawn=DATA[:1] * 2).outcome == "fail"  # it is given, and run twice


def test_without_an_optimizer_gradients_are_those_at_the_end() -> None:
    verdict = judged(Chunk())
    assert (verdict.outcome, verdict.law("gradient").checked) == ("pass", 6), str(verdict)


def test_a_wrong_step_is_named() -> None:
    verdict = judged(Chunk(), factor=2.0)
    assert verdict.outcome == "fail"
    assert verdict.law("gradient").outcome == "fail"
    assert str(verdict.mismatches[0].parameter).startswith("model.decoder.layers.1.")


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (Chunk(hidden_dropout=0.1), {}),
        (nn.Linear(2, 2), {}),
        (Chunk(), {"pipeline_model_parallel_size": 2}),
        (Chunk(), {"microbatches": None}),
    ],
)
def test_what_is_not_covered_is_refused_and_the_job_goes_on(model: Any, more: Any) -> None:
    verdict = judged(model, **more)
    assert verdict.outcome == "unknown"
    golden(verdict.details.splitlines()[0])


def test_a_step_in_which_every_token_is_masked_is_said() -> None:
    masked = [(inputs, torch.tensor(0.0)) for inputs, _ in DATA]
    told = "the loss function counts 0 tokens in all microbatches: give some of which a label is not masked"
    verdict = judged(
        Chunk(calculate_per_token_loss=True), microbatches=masked, drawn=masked, calculate_per_token_loss=True
    )
    assert (verdict.outcome, told in verdict.details) == ("unknown", True), str(verdict)
    with pytest.raises(MegatronError, match=told):
        megatron.validate(
            len,
            reference=lambda: Chunk(calculate_per_token_loss=True),
            forward_step=forward_step,
            microbatches=masked,
            ranks=1,
        )
