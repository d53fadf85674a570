"""Where in the reference what passes: each stage's own part of a gradient, and what the reference never computes.

A tensor that flows to several places has a gradient of several parts; at each boundary its own part is expected.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof import watch
from pipeproof.core.observe.sketch import sketch
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from pipeproof.whitebox.tensor_index import Computed, Places
from tests.support.sweeps import SWEEP

WIDTH, COUNT = 8, 4
loss_fn = nn.functional.mse_loss
Gradients = dict[int, Tensor]


@pytest.fixture
def whitebox(whitebox_here: WhiteBox) -> WhiteBox:
    """One rank is enough."""
    return whitebox_here


class Summing(nn.Module):
    """The second stream collects what the first one has been."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.tanh(self.linear(x))
        return made, total + made


class Skipping(Summing):
    """The second stream is handed on as it came."""

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x) * memory), memory


class Begin(Summing):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.tanh(self.linear(x))
        return made, made * 2


class Joined(Summing):
    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + 0.5 * total


class Past(Summing):
    """Needs one stream only: the other one goes past it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Chain(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Any:
        given: Any = (x,)
        for layer in self.layers:
            given = given[1:] if isinstance(layer, Past) else given
            made = layer(*given)
            given = (made, *given) if isinstance(layer, Past) else made
        return given


def built(*kinds: type[nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Chain(*(kind() for kind in kinds))

    return build


def step(change: Callable[[int, int, Gradients], Gradients] = lambda stage, m, gradients: gradients) -> Any:
    """Every layer is a stage with leaves of its own; ``change`` is made to what comes back to a stage's outputs."""

    def run(model: Any, microbatches: list[Any]) -> Any:
        stages = [watch(layer) for layer in model.layers]
        losses = [trained(stages, x, target, m, change) for m, (x, target) in enumerate(microbatches)]
        return stages, losses

    return run


def trained(stages: list[Any], x: Tensor, target: Tensor, m: int, change: Any) -> Tensor:
    """One microbatch. What goes past a stage is taken from the one before, by its number there."""
    calls: list[tuple[list[Tensor], list[Tensor], list[tuple[int, int]]]] = []  # given, made, and where from
    flowing: list[tuple[Tensor, tuple[int, int]]] = [(x, (-1, 0))]
    for k, stage in enumerate(stages):
        taken = flowing[1:] if isinstance(stage, Past) else flowing
        leaves = [tensor.detach().requires_grad_(k > 0) for tensor, _ in taken]
        result = stage(*leaves)
        made = list(result) if isinstance(result, tuple) else [result]
        calls.append((leaves, made, [source for _, source in taken]))
        own = [(tensor, (k, number)) for number, tensor in enumerate(made)]
        flowing = own + taken if isinstance(stage, Past) else own
    loss = loss_fn(calls[-1][1][0], target)
    (loss / COUNT).backward()  # type: ignore[no-untyped-call]
    came: dict[tuple[int, int], Tensor] = {}
    for k in reversed(range(len(stages))):
        leaves, made, sources = calls[k]
        if k < len(stages) - 1:
            own = change(k, m, {number: came[k, number] for number in range(len(made)) if (k, number) in came})
            torch.autograd.backward([made[number] for number in own], list(own.values()))
        for one, source in zip(leaves, sources, strict=True):
            if one.grad is not None:
                came[source] = came[source] + one.grad if source in came else one.grad
    return loss.detach()


def judged(whitebox: WhiteBox, reference: Callable[[], nn.Module], run: Any) -> Verdict:
    draw = torch.Generator().manual_seed(1)
    data = [tuple(torch.randn(3, WIDTH, generator=draw) for _ in range(2)) for _ in range(COUNT)]
    return whitebox.validate(run, reference=reference, microbatches=data, ranks=1, loss_fn=loss_fn)


MODELS = {
    "summed": built(Begin, Summing, Summing, Joined),
    "handed on": built(Begin, Skipping, Skipping, Joined),
    "past a stage": built(Begin, Past, Joined),
}


CHANGES: dict[str, tuple[Any, set[str]]] = {
    "a quarter": (lambda stage, m, g: {k: one * (0.25 if stage == 1 else 1.0) for k, one in g.items()}, {"scale"}),
    "exchanged": (lambda stage, m, g: {0: g[1], 1: g[0]} if stage == 1 else g, {"wrong-message"}),
    "one zero": (lambda stage, m, g: {0: g[0], 1: g[1] * 0} if stage == 1 else g, {"altered", "uninitialised"}),
}
BETWEEN = [*((model, "") for model in MODELS), *(("handed on", change) for change in CHANGES)]
SUMMED = [pytest.param("summed", change, marks=SWEEP) for change in CHANGES]


@pytest.mark.parametrize(("model", "change"), [*BETWEEN, *SUMMED])
def test_every_boundary_is_compared(whitebox: WhiteBox, model: str, change: str) -> None:
    """What is wrong between two stages is no computation of the sender."""
    made, kinds = CHANGES.get(change, (lambda stage, m, gradients: gradients, set()))
    verdict = judged(whitebox, MODELS[model], step(made))
    law = verdict.law("boundaries")
    if not change:
        assert (verdict.outcome, law.outcome, law.note) == ("pass", "pass", ""), verdict
        assert law.exact == law.checked > 0
    assert bool(verdict.causes) == bool(change), verdict
    assert all(cause.kind in kinds and cause.stage == 1 for cause in verdict.causes), verdict


@pytest.mark.parametrize(
    ("error", "said"), [(RuntimeError("it cannot be cut"), ""), (KeyError("gone"), "KeyError: 'gone'")]
)
def test_what_cannot_be_cut_is_left_out(
    whitebox: WhiteBox, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def crash(*_: object) -> None:
        raise error

    monkeypatch.setattr("pipeproof.whitebox.tensor_index.TensorIndex.look_again", crash)
    verdict = judged(
        whitebox, MODELS["summed"], step(lambda stage, m, g: {k: one * (2 - stage) for k, one in g.items()})
    )
    assert verdict.outcome == "fail"
    assert (verdict.unsought.partition(" (")[0], bool(verdict.causes)) == (said, not said), verdict
    assert judged(whitebox, MODELS["summed"], step()).outcome == "pass"


GIVEN = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def computed(function: Callable[[Tensor], Tensor]) -> Computed:
    with Computed() as found:
        function(GIVEN)
    return found


@pytest.mark.parametrize(
    ("observed", "lacks"),
    [
        (GIVEN.exp(), False),
        (GIVEN.exp() * (1 + 1e-6), False),
        (GIVEN.exp() * 3, False),
        (GIVEN.exp().bfloat16().float(), False),
        (GIVEN.exp().flip(0), False),
        (GIVEN.exp()[:2], False),
        (GIVEN.exp().double(), False),
        (GIVEN.sin(), True),
        (GIVEN.exp() + 0.1, True),
    ],
)
def test_what_a_computation_lacks(observed: Tensor, lacks: bool) -> None:
    assert computed(lambda x: (x.exp() + 1).log()).lacks(sketch(observed)) == lacks


def test_where_random_numbers_are_drawn_nothing_is_known() -> None:
    assert not computed(lambda x: nn.functional.dropout(x.exp())).lacks(sketch(GIVEN.sin()))


def test_likeness_in_a_coarse_type_is_no_place() -> None:
    places, made = Places(), torch.Generator().manual_seed(0)
    known = [0.05 * torch.randn(32, generator=made).bfloat16() for _ in range(2)] + [torch.randn(32).bfloat16()]
    for number, one in enumerate(known):
        places.note("layer", number, one)
    assert places.usual([sketch(torch.tanh(one)) for one in known]) == ()  # the tangent of the small ones is themselves
    assert places.usual([sketch(torch.tanh(one)) for one in known[:2]]) == ("layer",)
    assert places.usual([sketch(one) for one in (known[0], *map(torch.tanh, known[1:]))]) == ("layer",)


def test_of_two_alike_places_the_nearer_comes_first() -> None:
    places, made = Places(), torch.Generator().manual_seed(0)
    known = [0.2 * torch.randn(32, generator=made).bfloat16() for _ in range(3)]
    for number, one in enumerate(known):
        places.note("linear", number, one)
        places.note("tanh", number, torch.tanh(one))
    otherwise = [sketch(torch.tanh(one.float()).mul(1 + 2**-8).bfloat16()) for one in known]
    assert places.usual(otherwise) == ("tanh", "linear")
