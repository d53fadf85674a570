"""Layers that real models have, on one rank that holds every stage: what is said of them is true."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof import watch
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden

WIDTH, COUNT = 8, 4
Change = Callable[[nn.Module], None]


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output[1] if isinstance(output, tuple) else output, target)


def data() -> list[tuple[Any, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(4, WIDTH, generator=draw), torch.randn(4, WIDTH, generator=draw)) for _ in range(COUNT)]


class Attention(nn.Module):
    """A softmax takes no notice of the bias of its keys, whose gradient is rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + (self.query(x) @ self.key(x).T).softmax(-1) @ self.value(x)
        return made


class Beside(nn.Module):
    """One of two streams goes on as it came: the second through an encoder, the first through a decoder."""

    def __init__(self, *, decodes: bool) -> None:
        super().__init__()
        self.linear, self.decodes = nn.Linear(WIDTH, WIDTH), decodes

    def forward(self, given: Any) -> Any:
        x, y = given
        if self.decodes:
            return x, y + torch.tanh(self.linear(y) + x)
        return x + torch.tanh(self.linear(x)), y


class Translator(nn.Sequential):
    def forward(self, *given: Tensor) -> Any:
        return super().forward(given)


def translator() -> nn.Module:
    torch.manual_seed(0)
    return Translator(*(Beside(decodes=number > 1) for number in range(4)))


def model_of(layer: Callable[[], nn.Module], count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(count)))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


def step(
    model: nn.Sequential,
    microbatches: list[Any],
    *,
    before: Change = lambda model: None,
    after: Change = lambda model: None,
    into: Callable[[int, Any], Any] = lambda stage, x: x,
) -> Any:
    """``into`` changes what a stage is called with, ``before`` and ``after`` the model."""
    before(model)
    losses = []
    for x, target in microbatches:
        for number, stage in enumerate(model):
            x = watch(stage)(into(number, x))
        loss = loss_fn(x, target)
        (loss / len(microbatches)).backward()
        losses.append(loss.item())
    after(model)
    return list(model), losses


def judged(whitebox_here: WhiteBox, build: Callable[[], nn.Module], *, streams: int = 1, **changes: Any) -> Verdict:
    one = partial(step, **changes)
    given = [(x if streams == 1 else (x, x.flip(1)), target) for x, target in data()]
    return whitebox_here.validate(one, reference=build, microbatches=given, ranks=1, loss_fn=loss_fn)


def test_a_gradient_that_is_rounding_alone_tells_nothing_beside_another_that_is_wrong(whitebox_here: WhiteBox) -> None:
    def tripled(model: Any) -> None:
        model[1].query.weight.grad *= 3

    build = partial(model_of, Attention, 2)
    assert judged(whitebox_here, build).outcome == "pass"
    verdict = judged(whitebox_here, build, after=tripled)
    (cause,) = verdict.causes
    assert (cause.kind, cause.parameter, cause.factor) == ("scale", "1.query.weight", 3.0)
    assert not verdict.undecided


def test_a_stage_one_of_whose_inputs_nobody_knows_was_not_called_after_another(whitebox_here: WhiteBox) -> None:
    def exchanged(stage: int, given: Any) -> Any:
        return given[::-1] if stage == 1 else given

    verdict = judged(whitebox_here, translator, streams=2, into=exchanged)
    assert verdict.outcome == "fail"
    assert "partition" not in {cause.kind for cause in verdict.causes}, str(verdict)


def test_a_part_in_evaluation_mode_is_not_said_to_be_in_the_right_one(whitebox_here: WhiteBox) -> None:
    def evaluated(model: Any) -> None:
        model[0][1].eval()

    verdict = judged(whitebox_here, partial(model_of, normed, 2), before=evaluated)
    assert verdict.outcome == "fail"
    assert "mode" not in {kind for one in verdict.ruled_out for kind in one.kinds}, str(verdict)


def test_a_gradient_whose_elements_stand_elsewhere_says_so(whitebox_here: WhiteBox) -> None:
    def exchanged(model: Any) -> None:
        gradient = model[1][0].weight.grad
        gradient.copy_(torch.cat([gradient[WIDTH // 2 :], gradient[: WIDTH // 2]]))

    (cause,) = judged(whitebox_here, partial(model_of, normed, 2), after=exchanged).causes
    assert (cause.kind, cause.parameter) == ("altered", "1.0.weight")
    golden(cause.detail)


def test_what_some_stages_show_is_not_everywhere_where_nobody_knows_of_the_last(whitebox_here: WhiteBox) -> None:
    def spoilt(model: Any) -> None:
        draw = torch.Generator().manual_seed(2)
        for number, stage in enumerate(model):
            for one in stage.parameters():
                one.grad = one.grad * 3 if number < 2 else torch.randn(one.shape, generator=draw)

    build = partial(model_of, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), 4)
    (cause,) = judged(whitebox_here, build, after=spoilt).causes
    assert (cause.kind, cause.factor, cause.stage, cause.stages) == ("scale", 3.0, None, (0, 1))
    golden(cause.detail, numbers=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.norm, self.last.weight = nn.LayerNorm(WIDTH), self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.norm(self.middle(torch.tanh(self.first(x)))))
        return made


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


def test_a_tied_weight_that_is_right_is_not_blamed_for_the_rest_of_its_stage(whitebox_here: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        last = nn.Linear(WIDTH, WIDTH, bias=False)
        last.weight.data.copy_(model.last.weight.data)
        first, second = nn.Sequential(model.first, nn.Tanh(), model.middle), nn.Sequential(model.norm, last)
        for x, target in microbatches:
            (loss_fn(second(first(x)), target) / len(microbatches)).backward()
        one, other = model.first.weight, last.weight
        assert one.grad is not None
        assert other.grad is not None
        one.grad = other.grad = one.grad + other.grad
        model.middle.weight.grad *= 2
        return [first, second]

    verdict = whitebox_here.validate(step, reference=tied, microbatches=data(), ranks=1, loss_fn=loss_fn)
    (cause,) = verdict.causes
    assert (cause.kind, cause.stage, cause.factor) == ("scale", 0, 2.0), str(verdict)


def test_gradients_alone_do_not_tell_whether_an_output_gradient_was_so(whitebox_here: WhiteBox) -> None:
    def tripled(model: Any) -> None:  # after the backwards, in which every output gradient was right
        for parameter in model[:2].parameters():
            parameter.grad *= 3

    build = partial(model_of, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), 3)
    (cause,) = judged(whitebox_here, build, after=tripled).causes
    assert (cause.kind, cause.factor, cause.stage) == ("scale", 3.0, 1)
    golden(cause.detail, numbers=False)


class Loop(nn.Module):
    """One layer at both ends, beside one in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.ends, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.ends(torch.tanh(self.middle(torch.tanh(self.ends(x)))))
        return made


def build_loop() -> nn.Module:
    torch.manual_seed(0)
    return Loop()


class Ends(nn.Module):
    """A stage with a copy of the layer at both ends."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.ends = copy.deepcopy(model.ends)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.ends(x)
        return made


def shared_at_both_ends(whitebox_here: WhiteBox, first: float, last: float, *, other: float = 1.0) -> Verdict:
    """A step whose copies have each stage's share so often; the last stage's copy has the first's ``other`` times."""

    def step(model: Any, microbatches: list[Any]) -> Any:
        begin, middle, end = map(watch, (Ends(model), model.middle, Ends(model)))
        losses = []
        for x, target in microbatches:
            losses.append(loss_fn(end(torch.tanh(middle(torch.tanh(begin(x))))), target))
            (losses[-1] / len(microbatches)).backward()
        for one, its in zip(begin.parameters(), end.parameters(), strict=True):
            shares = one.grad, its.grad
            one.grad = first * shares[0] + last * shares[1]  # type: ignore[operator]  # both have one
            its.grad = other * first * shares[0] + last * shares[1]  # type: ignore[operator]
        return [begin, middle, end], [loss.detach() for loss in losses]

    return whitebox_here.validate(step, reference=build_loop, microbatches=data(), ranks=1, loss_fn=loss_fn)


@pytest.mark.parametrize(
    ("first", "last", "kind"), [(0.0, 1.0, "tied-not-summed"), (1.0, 2.0, "tied-doubled")], ids=["lost", "twice"]
)
def test_shares_of_a_layer_at_both_ends_are_told_apart(
    whitebox_here: WhiteBox, first: float, last: float, kind: str
) -> None:
    verdict = shared_at_both_ends(whitebox_here, first, last)
    assert {cause.kind for cause in verdict.causes} == {kind}, str(verdict)
    shares = f"the share of stage 0 {first:g} times, the share of stage 2 {last:g} times"
    assert all(shares in cause.detail for cause in verdict.causes), str(verdict)


@pytest.mark.parametrize(
    ("first", "last", "kind", "stage"),
    [(-1.0, 1.0, "sign", 0), (1.0, 0.5, "scale", 2), (1.0, -1.0, "sign", 2), (-1.0, -1.0, None, 0)],
)
def test_a_share_that_was_multiplied_is_not_called_unsummed(
    whitebox_here: WhiteBox, first: float, last: float, kind: str | None, stage: int
) -> None:
    verdict = shared_at_both_ends(whitebox_here, first, last)
    if kind is None:
        assert "others once" not in verdict.details, str(verdict)
        return
    assert {(cause.kind, cause.stage) for cause in verdict.causes} == {(kind, stage)}, str(verdict)
    wrong = f"its share is there {first if stage == 0 else last:g} times, the others once, in every copy"
    assert all(cause.detail.startswith(wrong) for cause in verdict.causes), str(verdict)


def test_a_share_that_one_copy_has_otherwise_is_told_of_this_copy(whitebox_here: WhiteBox) -> None:
    verdict = shared_at_both_ends(whitebox_here, 1.0, 1.0, other=-1.0)
    assert {(cause.kind, cause.stage) for cause in verdict.causes} == {("sign", 0)}, str(verdict)
    golden("\n".join(sorted(cause.detail for cause in verdict.causes)), numbers=False)
    assert all(" of stage 2" in cause.detail for cause in verdict.causes), str(verdict)


def test_a_share_that_is_there_twice_may_have_been_multiplied(whitebox_here: WhiteBox) -> None:
    verdict = shared_at_both_ends(whitebox_here, 1.0, 2.0)
    found = {(cause.kind, cause.stage, cause.factor) for one in verdict.alternatives for cause in one}
    assert ("scale", 2, 2.0) in found, str(verdict)
