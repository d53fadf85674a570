"""What routers choose by their scores: observed in whatever form they ask for it, and made otherwise where told so."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeproof.reference.choices import Choice, Choosing, Routers, choosing, of_experts

Choose = Callable[[Tensor], tuple[Tensor, Tensor]]  # the chosen scores, and the indices, one for each token
SCORES = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]])
CHOOSE: dict[str, Choose] = {
    "topk": lambda scores: tuple(one[:, 0] for one in torch.topk(scores, 1)),  # type: ignore[dict-item]
    "a method": lambda scores: tuple(one[0] for one in scores.T.topk(k=1, dim=0)),  # type: ignore[dict-item]
    "max": lambda scores: tuple(scores.max(dim=-1)),  # type: ignore[dict-item]
    "argmax": lambda scores: (scores.amax(-1), scores.argmax(dim=1)),
}


class Router(nn.Module):
    """Chooses, and may compute that again in its backward."""

    def __init__(self, choose: Choose, *, again: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(SCORES.clone())
        self._choose, self._again = choose, again

    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(self._scored, inputs, use_reentrant=False) if self._again else self._scored(inputs)

    def _scored(self, inputs: Tensor) -> Tensor:
        values, indices = self._choose(self.weight * inputs)
        return values * (1.0 + indices)


def in_model(router: nn.Module) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"router": router})])})


@pytest.mark.parametrize("form", CHOOSE)
def test_a_choice_is_seen_in_each_of_its_forms(form: str) -> None:
    router = Router(CHOOSE[form])
    plain = router(torch.ones(()))
    with choosing(in_model(router), Routers(("router",))) as found:
        assert torch.equal(router(torch.ones(())), plain), "nobody told it to choose otherwise"
    (choice,) = found["layers.0.router"]
    assert torch.equal(choice.scores_TE, SCORES)
    assert choice.own_TK.tolist() == choice.chosen_TK.tolist() == [[1], [0]]
    assert choice.of_tokens


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("form", ["topk", "a method", "max"])
def test_a_router_that_is_told_chooses_otherwise_and_its_gradient_goes_there(form: str, again: bool) -> None:
    router = Router(CHOOSE[form], again=again)
    told = Routers(("layers.*.router",), {"layers.0.router": [torch.tensor([[2], [0]])]})
    with choosing(in_model(router), told) as found:
        made = router(torch.ones(()))
        made.sum().backward()
    assert made.tolist() == [pytest.approx(0.2 * 3), pytest.approx(0.5)]
    assert router.weight.grad.tolist() == [[0, 0, 3], [1, 0, 0]], "what a backward computes again follows, too"
    assert [one.own_TK.tolist() for one in found["layers.0.router"]] == [[[1], [0]]]


def test_other_modules_are_left_alone() -> None:
    router = Router(CHOOSE["max"])
    told = Routers(("gate",), {"layers.0.router": [torch.tensor([[2], [0]])]})
    with choosing(in_model(router), told) as found:
        assert router(torch.ones(())).tolist() == [pytest.approx(1.4), pytest.approx(0.5)]
    assert not found
    names = ("router", "0.router", "outer", "l*.router", "0")
    assert [name for name in names if Routers((name,)).has("layers.0.router")] == ["router", "0.router", "l*.router"]


def test_by_how_much_scores_would_be_off() -> None:
    masked = torch.tensor([[1.0, 0.75, 0.5, -torch.inf]])
    choice = Choice(masked, torch.tensor([[0, 1]]), torch.tensor([[0, 1]]))
    short = {
        observed: choice.short_T(torch.tensor([observed])).item()
        for observed in ((0, 1), (1, 0), (0, 2), (2, 1), (0, 3))
    }
    assert short == {(0, 1): 0.0, (1, 0): 0.0, (0, 2): 0.25, (2, 1): 0.5, (0, 3): torch.inf}
    tied = Choice(torch.ones(1, 3), torch.tensor([[0]]), torch.tensor([[0]]))
    assert tied.short_T(torch.tensor([[2]])).item() == 0.0, "among equal scores any is right"


def test_which_choices_are_those_of_experts() -> None:
    def made(count: int, *, whole: bool = False, **more: bool) -> Choice:
        scores = torch.zeros(3, count, dtype=torch.int64 if whole else torch.float32)
        return Choice(scores, scores[:, :1].long(), scores[:, :1].long(), **more)

    place, largest, tokens = made(4, whole=True), made(4, of_values=True), made(3, of_tokens=False)
    assert of_experts([largest, made(2), made(4), made(4), place, tokens]) == [2, 3]
    assert of_experts([largest, place]) == [0], "where nothing else is there max chooses"
    assert of_experts([tokens]) == []


def test_scores_that_are_transposed_are_those_of_experts_for_tokens() -> None:
    observed: list[Choice] = []

    def look(_: object, choice: Choice) -> Tensor:
        observed.append(choice)
        return choice.own_TK

    with Choosing(look):
        SCORES.T.topk(1)
        SCORES.topk(1)
    assert [one.of_tokens for one in observed] == [False, True]


def test_how_many_tokens_come_in_tells_what_is_chosen_for_what() -> None:
    class Transposed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.T.contiguous().topk(2, -1).values

    router = Transposed()
    with choosing(in_model(router), Routers(("router",))) as found:
        router(torch.rand(6, 4))
    assert not found["layers.0.router"][0].of_tokens, "four experts choose among six tokens"
    assert not router._forward_pre_hooks, "nothing is left behind"
    scores = Choice(torch.zeros(8, 6), torch.zeros(8, 2).long(), torch.zeros(8, 2).long())
    assert [tokens for tokens in (8, 4, 6, 3, 5, 0) if scores.for_tokens(tokens).of_tokens] == [8, 4, 5, 0]
