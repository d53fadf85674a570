"""What routers chose on a rank, by the names that its modules have there or in the model that it was given."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeproof.core.observe.routes import RouteObserver


class Block(nn.Module):
    """Chooses one of two for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        values, _ = self.gate(x).topk(1)
        return x * values


def run(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        model(x)  # what is not computed again counts
    y: Tensor = checkpoint(model, x.requires_grad_(), use_reentrant=False)
    y.sum().backward()
    return y


def test_routers_are_named_and_what_is_computed_again_counts_once() -> None:
    model, x = nn.Sequential(Block(), Block()), torch.randn(3, 2)
    plain, routing = run(model, x), RouteObserver(("[01]",), model)
    with routing.open():
        assert torch.equal(run(model, x), plain), "nothing is another for it"
    routes = routing.of(model)
    assert {name: len(every) for name, every in routes.items()} == {"0": 2, "1": 2}
    assert routes["0"][0].chosen_TK.tolist() == model[0].gate(x).argmax(-1, keepdim=True).tolist()
    assert routes["0"][0].dtype == torch.float32
    assert {name: len(every) for name, every in routing.of(model[1:]).items()} == {"1": 2}, "those that it has"
    routing.anew()
    assert not routing.of(model)


def test_a_router_may_have_its_name_in_the_model_alone_or_be_the_whole_stage() -> None:
    model = nn.ModuleDict({"moe": Block()})
    for given in (model, None):
        routing = RouteObserver(("moe",), given)
        with routing.open():
            model["moe"](torch.randn(3, 2))
        assert {name: len(every) for name, every in routing.of(model["moe"]).items()} == {"": 1}
    routing = RouteObserver((), model)
    with routing.open():
        model["moe"](torch.randn(3, 2))
    assert not routing.of(model), "nobody asked"
