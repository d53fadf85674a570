"""Models layer by layer: right ones pass, a fault fails where its layer is, and no more than two layers are there."""

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from pipeproof.cases.primitives.layers import Block, Embedding, ExpertBlock, Head, bits, microbatches
from pipeproof.cases.primitives.layers import loss_fn as of_tokens
from pipeproof.cases.primitives.stacked import gradients_of, sharded
from pipeproof.cases.primitives.tensor_by_hand import cut_whole, held, loss_of_parts
from pipeproof.cases.primitives.tensor_parallel import cut
from pipeproof.core.contract import Contract, ContractError
from pipeproof.core.verdict import Verdict
from pipeproof.foreign import HandedBack, WhiteBox, Window, layerwise, watch
from pipeproof.foreign.task import WhiteBoxError
from pipeproof.foreign.windows import Layered, off_target
from tests.support.golden import golden
from tests.support.steps import WIDTH, loss_fn, pairs

Step = Callable[[Window, list[Any]], Any]
Change = Callable[[nn.Module], object]


def seeded(kind: Callable[..., nn.Module], seed: int, *given: Any) -> nn.Module:
    torch.manual_seed(seed)
    return kind(*given)


def decoder(*blocks: type[nn.Module]) -> list[Callable[[], nn.Module]]:
    return [partial(seeded, kind, number) for number, kind in enumerate((Embedding, *blocks, Head))]


DECODER = decoder(Block, Block)
NEIGHBOURS = [f"layers {k} and {k + 1} of 4" for k in range(3)]


def linear(number: int, out: int = WIDTH) -> nn.Module:
    return seeded(nn.Linear, number, WIDTH, out)


def train(model: nn.Module, given: list[Any], loss_of: Callable[..., Tensor], divisor: float = 0) -> list[float]:
    losses = []
    for x, target in given:
        loss = loss_of(model(*x) if isinstance(x, tuple) else model(x), target)
        (loss / (divisor or len(given))).backward()  # type: ignore[no-untyped-call]  # in torch
        losses.append(loss.item())
    return losses


def alone(model: Window, given: list[Any]) -> Any:
    return model, train(model, given, model.loss_fn)


def by_hand(model: Window, given: list[Any], *, layer: str = "", change: Change = id) -> Any:
    """Tensor parallelism as Megatron has it; ``change`` is made to one layer, in the windows that have it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    cut_whole(model, mesh)
    for name, one in model.named_children():
        if name == layer:
            change(one)
    loss_of = partial(loss_of_parts, mesh=mesh) if isinstance(model[-1], Head) else model.loss_fn
    stages = [watch(one) for one in model]
    return HandedBack(stages, train(model, given, loss_of), gradients=gradients_of(stages, held(model, mesh)))


def by_torch(model: Window, given: list[Any]) -> Any:
    cut(model, init_device_mesh("cpu", (2,)))
    with loss_parallel():
        return model, train(model, given, model.loss_fn)


def by_shards(model: Window, given: list[Any]) -> Any:
    sharded(model, init_device_mesh("cpu", (2,)))
    return model, train(model, given, model.loss_fn)


def verdicts(whitebox: WhiteBox, step: Step, ranks: Any, layers: Sequence[Any] = DECODER) -> Iterator[Verdict]:
    given = microbatches(4)
    return whitebox.layerwise(step, layers=layers, microbatches=given, ranks=ranks, loss_fn=of_tokens)


def of(verdict: Verdict) -> str:
    """What was judged."""
    return verdict.config.partition("reference ")[2].partition(",")[0]


def layers_of(verdict: Verdict, law: str) -> set[str]:
    """The layers whose parameters break ``law``."""
    return {str(one.parameter).partition(".")[0] for one in verdict.mismatches if one.law == law}


def failed(whitebox: WhiteBox, step: Step) -> dict[str, Verdict]:
    found = {of(one): one for one in verdicts(whitebox, step, {"tp": 2})}
    assert list(found) == NEIGHBOURS
    assert {one.verdict for one in found.values()} == {"pass", "fail"}, [*map(str, found.values())]
    return {name: one for name, one in found.items() if one.verdict == "fail"}


@pytest.mark.parametrize(("step", "ranks"), [(by_hand, {"tp": 2}), (by_torch, {"tp": 2}), (by_shards, {"fsdp": 2})])
def test_what_is_right_passes_and_all_is_compared(whitebox: WhiteBox, step: Step, ranks: dict[str, int]) -> None:
    found = list(verdicts(whitebox, step, ranks))
    assert list(map(of, found)) == NEIGHBOURS
    for number, verdict in enumerate(found):
        assert verdict.verdict == "pass", verdict
        parameters = [name for build in DECODER[number : number + 2] for name, _ in build().named_parameters()]
        assert verdict.law("gradient").checked == verdict.law("parameters-once").checked == len(parameters)
        assert verdict.law("loss").checked == (8 if "tp" in ranks else 4)
        assert verdict.law("shards").checked > 0


def twice_the_bias(block: nn.Module) -> None:
    down = block.get_submodule("feedforward.down")
    down.register_forward_hook(lambda module, _, out: out + module.bias)


def test_a_fault_in_one_layer_fails_where_it_is_and_is_named(whitebox: WhiteBox) -> None:
    wrong = failed(whitebox, partial(by_hand, layer="2", change=twice_the_bias))
    assert list(wrong) == NEIGHBOURS[1:3]
    cause = wrong[NEIGHBOURS[2]].cause
    assert [(one.kind, one.stage) for one in cause] == [("computation", 0)], "layer 2 is the window's first"


def counts_on_each(block: nn.Module) -> None:
    """The gradient of the bias is summed over ranks that have all of it."""
    block.get_parameter("feedforward.down.bias").register_hook(lambda gradient: 2 * gradient)


def test_a_gradient_of_one_layer_fails_where_it_is_and_is_named(whitebox: WhiteBox) -> None:
    wrong = failed(whitebox, partial(by_hand, layer="2", change=counts_on_each))
    assert list(wrong) == NEIGHBOURS[1:3]
    for verdict in wrong.values():
        assert "2.feedforward.down.bias: 2 times" in str(verdict).partition("  replay")[0], str(verdict)


def not_summed(block: nn.Module) -> None:
    """Megatron's f does nothing in the backward of this block."""
    for name in ("attention.queries", "attention.keys", "attention.values", "feedforward.up"):
        block.get_submodule(name).across = lambda x, group: x  # type: ignore[assignment]


def test_a_missing_reduction_in_one_layer_fails_where_it_is(whitebox: WhiteBox) -> None:
    wrong = failed(whitebox, partial(by_hand, layer="2", change=not_summed))
    assert list(wrong) == NEIGHBOURS[1:3]
    assert layers_of(wrong[NEIGHBOURS[2]], "gradient") == {"2"}
    assert layers_of(wrong[NEIGHBOURS[1]], "gradient") == {"1", "2"}


def sends_half_back(block: nn.Module) -> None:
    """All of its own gradients are right."""

    def halved(_: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
        x = given[0] * 1
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / 2)
        return x

    block.register_forward_pre_hook(halved)


def test_what_a_layer_sends_back_is_seen_by_the_layer_before(whitebox: WhiteBox) -> None:
    wrong = failed(whitebox, partial(by_hand, layer="2", change=sends_half_back))
    assert list(wrong) == NEIGHBOURS[1:2], "where it is the first, it sends nothing back"
    (verdict,) = wrong.values()
    assert layers_of(verdict, "gradient") == {"1"}
    golden("\n".join(cause.detail for cause in verdict.cause))


class Counted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        PEAKS.append(living())


PEAKS: list[int] = []


def living() -> int:
    """How many layers this process has; by their name, for ranks have classes of their own."""
    gc.collect()
    return sum(type(one).__name__ == "Counted" for one in gc.get_objects())


def of_two(model: Window, given: list[Any]) -> Any:
    assert (len(model), living()) == (2, 2), "a rank has its window, and nothing of the ones before"
    return alone(model, given)


def test_no_more_than_a_window_is_there_however_long_the_model(whitebox: WhiteBox) -> None:
    layers, built = [partial(seeded, Counted, number) for number in range(3)], set()
    PEAKS.clear()
    for verdict in whitebox.layerwise(of_two, layers=layers, microbatches=pairs(), ranks=1, loss_fn=loss_fn):
        assert verdict.verdict == "pass", str(verdict)
        built.add(len(PEAKS))
        assert living() == 0, "nothing is kept between two verdicts"
    assert len(built) == 2, "a verdict comes before the next layer is built"
    assert max(PEAKS) == 4, "the window, and the second model that every validation builds"


def test_layers_without_parameters_go_with_their_neighbours() -> None:
    kinds = {"t": nn.Tanh, "L": partial(linear, 0)}
    for model, windows in {
        "L": ["layer 0 of 1"],
        "LL": ["layers 0 and 1 of 2"],
        "LtLt": ["layers 0 to 2 of 4", "layers 2 and 3 of 4"],
        "ttLLL": ["layers 0 to 3 of 5", "layers 3 and 4 of 5"],
        "Ltt": ["layers 0 to 2 of 3"],
    }.items():
        layered = Layered([kinds[one] for one in model], tuple(pairs()), loss_fn, "cpu")
        pieces = list(layered.windows())
        assert [one.window.__name__ for one in pieces] == windows
        assert [one.window.loss_fn is loss_fn for one in pieces] == [False] * (len(pieces) - 1) + [True]
        assert [name for name, _ in pieces[-1].window().named_children()][-1] == str(len(model) - 1)


def test_a_window_is_given_what_the_layers_before_it_make() -> None:
    data = tuple(pairs())
    layered = Layered([partial(linear, number) for number in range(4)], data, loss_fn, "cpu")
    first, second, third = layered.windows()
    for given, into, at, to in zip(data, first.microbatches, second.microbatches, third.microbatches, strict=True):
        assert torch.equal(given[0], into[0])
        assert torch.equal(linear(0)(given[0]), at[0])
        assert torch.equal(linear(1)(at[0]), to[0])
        assert torch.equal(given[1], to[1])
        assert into[1].shape == (4, WIDTH)
    targets = [target for _, target in (*first.microbatches, *second.microbatches)]
    assert len({target.sum().item() for target in targets}) == len(targets), "each is drawn anew"
    again = next(layered.windows()).microbatches
    assert all(torch.equal(one[1], other[1]) for one, other in zip(again, first.microbatches, strict=True))


def test_several_tensors_are_handed_on(whitebox: WhiteBox) -> None:
    found = list(verdicts(whitebox, alone, 1, decoder(ExpertBlock, ExpertBlock)))
    assert [one.verdict for one in found] == ["pass"] * 3, [*map(str, found)]
    assert "is not compared" not in "".join(map(str, found))


class Beside(nn.Linear):
    """One of its tensors passes, as what an encoder made does."""

    def forward(self, x: Tensor, passing: Tensor | None = None) -> Any:
        return super().forward(x), super().forward(x) if passing is None else passing


class Together(nn.Linear):
    def forward(self, x: Tensor, passing: Tensor) -> Tensor:
        return super().forward(x) * passing


def test_what_nobody_would_see_is_said(whitebox: WhiteBox) -> None:
    layers = [partial(seeded, kind, k, WIDTH, WIDTH) for k, kind in enumerate((Beside, Beside, Together))]
    first, second = whitebox.layerwise(alone, layers=layers, microbatches=pairs(), ranks=1, loss_fn=loss_fn)
    assert (first.verdict, second.verdict) == ("pass", "pass"), (str(first), str(second))
    assert "is not compared" not in first.law("gradient").note
    said = "what is sent back for output 1 of layer 1 is not compared: no parameter of its own has a part in it"
    assert said in second.law("gradient").note


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_pass(whitebox: WhiteBox, dtype: torch.dtype) -> None:
    layers = [lambda number=number: linear(number).to(dtype) for number in range(3)]
    data = [(x.to(dtype), target) for x, target in pairs()]
    for verdict in whitebox.layerwise(alone, layers=layers, microbatches=data, ranks=1, loss_fn=loss_fn):
        assert verdict.verdict == "pass", verdict


def by_three(model: Window, given: list[Any]) -> Any:
    own = nn.ModuleDict({f"my{name}": layer for name, layer in model.named_children()})
    losses = train(model, given, model.loss_fn, divisor=3)
    return HandedBack({name: one.grad for name, one in own.named_parameters()}, losses)


def test_what_validate_takes_is_handed_to_it() -> None:
    layers = [partial(linear, number) for number in range(3)]
    more: dict[str, Any] = {"layers": layers, "microbatches": pairs(), "ranks": 1, "loss_fn": loss_fn}
    found = list(layerwise(by_three, **more, contract=Contract(names={"my": ""}, loss_divisor=3)))
    assert [one.verdict for one in found] == ["pass"] * 2, [*map(str, found)]
    assert {one.verdict for one in layerwise(by_three, **more, contract=Contract(names={"my": ""}))} == {"fail"}
    others = Contract(names={"my": "not"}, loss_divisor=3)
    assert {one.verdict for one in layerwise(by_three, **more, contract=others)} == {"fail"}
    with pytest.raises(ValueError, match="timeout_s is 0: expected seconds above 0"):
        list(layerwise(by_three, **more, timeout_s=0))
    with pytest.raises(ContractError, match="max_norm of the contract is not read layer by layer"):
        list(layerwise(by_three, **more, contract=Contract(max_norm=1.0)))


def test_a_loss_that_is_a_module_is_no_layer(whitebox: WhiteBox) -> None:
    layers = [partial(linear, number) for number in range(2)]
    (verdict,) = whitebox.layerwise(alone, layers=layers, microbatches=pairs(), ranks=1, loss_fn=nn.MSELoss())
    assert verdict.verdict == "pass", verdict


def test_dropout_that_is_not_seeded_is_told(whitebox: WhiteBox) -> None:
    layers = [partial(linear, 0), partial(nn.Dropout, 0.5), partial(linear, 1)]
    (verdict,) = whitebox.layerwise(alone, layers=layers, microbatches=pairs(), ranks=1, loss_fn=loss_fn)
    assert verdict.verdict == "unknown"
    golden(verdict.headline)


class Drops(nn.Linear):
    """What it drops follows from what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(bits(x))
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


def test_dropout_that_draws_by_its_input_passes(whitebox: WhiteBox) -> None:
    layers = [partial(seeded, Drops, number, WIDTH, WIDTH) for number in range(3)]
    for verdict in whitebox.layerwise(alone, layers=layers, microbatches=pairs(), ranks=1, loss_fn=loss_fn):
        assert verdict.verdict == "pass", str(verdict)


def change_in_place(number: int) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)), number)


def test_layers_that_change_what_they_are_given_leave_the_data() -> None:
    data, layers = tuple(pairs()), [partial(change_in_place, number) for number in range(3)]
    first, second = Layered(layers, data, loss_fn, "cpu").windows()
    relu = [nn.functional.relu(x) for x, _ in pairs()]
    for (x, _), (given, _), (own, _) in zip(pairs(), data, first.microbatches, strict=True):
        assert torch.equal(x, given)
        assert torch.equal(x, own)
    assert all(torch.equal(layers[0]()[1](x), at) for x, (at, _) in zip(relu, second.microbatches, strict=True))


def test_the_loss_between_layers() -> None:
    output = (torch.tensor([1.0, 2.0]), torch.tensor(7), torch.tensor([[3.0]]))
    assert off_target(output, torch.tensor([0.0, 4.0, 1.0])) == (1 + 4) / 2 + 4
    assert off_target(torch.tensor([1j]), torch.tensor([[1.0, 0.0]])) == 1


def unbuildable() -> nn.Module:
    raise KeyError("no weights")


class Lists(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return [super().forward(x)]


class Nested(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), (x,)


class Numbers(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).argmax(1)


L = partial(linear, 0)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"layers": []}, "layers is empty: expected a function for each layer, which builds it"),
    "a function": ({"layers": L}, "layers is a partial: expected a list of functions, of which each builds a layer"),
    "a model": ({"layers": nn.Sequential(L())}, "layers is a Sequential: expected a list of functions, of which"),
    "a module": ({"layers": [L, L()]}, "layer 1 of 2 is a Linear: expected a function without arguments that"),
    "a number": ({"layers": [L, L, 3]}, "layer 2 of 3 is a int: expected a function without arguments that builds"),
    "no module": ({"layers": [L, list]}, "layer 1 of 2 is a list, by list: expected a torch.nn.Module"),
    "raises": ({"layers": [L, unbuildable]}, "layer 1 of 2 cannot be built: unbuildable raised KeyError: 'no weights'"),
    "other widths": (
        {"layers": [partial(linear, 0, 5), L]},
        r"layer 1 of 2, a Linear, cannot take what layer 0 gave for microbatch 0, \(4, 5\): it raised RuntimeErr",
    ),
    "two for one": (
        {"layers": [partial(Beside, WIDTH, WIDTH), L]},
        r"layer 1 of 2, a Linear, cannot take what layer 0 gave for microbatch 0, \(4, 8\) and \(4, 8\): it raised T",
    ),
    "other data": (
        {"microbatches": pairs(width=3)},
        r"layer 0 of 2, a Linear, cannot take what it is given for microbatch 0, \(4, 3\): it raised RuntimeError",
    ),
    "a list": ({"layers": [partial(Lists, WIDTH, 2), L]}, "layer 0 of 2, a Lists, gave a list: expected a tensor, or"),
    "nested": ({"layers": [partial(Nested, 8, 8), L]}, "layer 0 of 2, a Nested, gave a tuple with a tuple in it: exp"),
    "classes": ({"layers": [L, partial(Numbers, 8, 8)]}, "layer 1 of 2 gave no floating-point tensor: nothing could"),
    "a loss": ({"loss_fn": 3}, "loss_fn is 3: expected a function of output and target"),
    "a step": ({"step": 3}, r"step is 3: expected a function step\(model, microbatches\)"),
    "no data": ({"microbatches": []}, "microbatches is empty: expected at least one"),
    "no pairs": ({"microbatches": [torch.ones(2, WIDTH)]}, "microbatch 0 is a Tensor: expected a pair of inputs and"),
    "frozen": ({"layers": [nn.Tanh, nn.Tanh]}, "layers 0 and 1 of 2 has no parameter to train: nothing could be com"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused_in_a_sentence(name: str) -> None:
    change, told = BAD[name]
    given = {"step": alone, "layers": [L, L], "microbatches": pairs(), "ranks": 1, "loss_fn": loss_fn} | change
    with pytest.raises(WhiteBoxError, match=told):
        list(layerwise(given.pop("step"), **given))
