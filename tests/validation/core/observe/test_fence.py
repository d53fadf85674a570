"""What goes wrong in an observer stays within its fence, whatever it looks at; what a user's code raises does not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from pipeproof import StepResult, watch
from pipeproof.core.observe.computed_in import ComputedIn
from pipeproof.core.observe.digest import digest
from pipeproof.core.observe.fence import Fence
from pipeproof.core.observe.routes import RouteObserver
from pipeproof.core.verdict import Verdict
from pipeproof.records.record import RecordError
from pipeproof.whitebox import WhiteBox
from pipeproof.wings.composed import StageByStage
from pipeproof.wings.composed.collect import EarlyStep
from tests.support.golden import golden
from tests.support.steps import backward, blocks, pairs

COUNT, WIDTH = 4, 4
PLANTED = "looking at it raised RuntimeError: planted"
mse = nn.functional.mse_loss
WATCHED, UNSEEN = ("microbatches", "boundaries"), "it runs inside torch.func, whose tensors have no storage"


def fails() -> None:
    raise RuntimeError("planted\nand more")


def test_what_raises_once_is_asked_no_more() -> None:
    fence, looked = Fence(), list[int]()
    look = fence.around(looked.append)
    look(1)
    assert fence.around(fails)() is None
    look(2)
    assert (looked, fence.broken) == ([1], PLANTED)


def test_what_ends_a_program_passes() -> None:
    def ends() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Fence().around(ends)()


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # in torch
    """Counts what is computed."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, *given: Any) -> Any:
        self.count += 1
        return func(*given[0], **given[1])


def test_a_users_mode_does_not_see_what_an_observer_computes() -> None:
    tensor, look = torch.ones(3), Fence().around(digest)
    with Counting() as counting:
        assert look(tensor) == digest_of(tensor)
    assert counting.count == 0


def digest_of(tensor: Tensor) -> bytes:
    with torch.utils._python_dispatch._disable_current_modes():
        return digest(tensor)


def test_where_torch_compiles_nothing_is_looked_at() -> None:
    fence = Fence()
    module = nn.Linear(2, 2)
    module.register_forward_hook(fence.around(lambda *_: fails()))
    torch.compile(module, backend="eager", fullgraph=True)(torch.ones(1, 2))
    assert (fence.compiled, fence.broken) == (True, "")


build, data = partial(blocks, 2, width=WIDTH), partial(pairs, COUNT, rows=2, width=WIDTH, seed=1)
Step = Callable[[nn.Module, list[Any]], Any]


def plain(model: nn.Module, microbatches: list[Any]) -> Any:
    """All in one stage, with what a step may do between calls."""
    stage = watch(model)
    model.zero_grad()
    return stage, backward(stage, [(x.requires_grad_(), target) for x, target in microbatches], by=mse)


@contextmanager
def planted(place: str) -> Iterator[None]:
    with mock.patch(f"pipeproof.{place}", side_effect=RuntimeError("planted")):
        yield


def with_planted(model: nn.Module | None, microbatches: list[Any], *, place: str) -> Any:
    """The plain step, where it fails to look; without a model on one that the step makes."""
    with planted(place):
        return plain(build() if model is None else model, microbatches)


def validated(whitebox: WhiteBox, step: Step, **options: Any) -> Verdict:
    return whitebox.validate(
        step, **{"reference": build, "microbatches": data(), "ranks": 1, "loss_fn": mse, **options}
    )


def unseen(verdict: Verdict) -> dict[str, str]:
    """Why laws were not observed although something looked, by law; losses and gradients are right to the bit."""
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), str(verdict)
    assert [verdict.law(one).outcome for one in ("loss", "gradient")] == ["pass"] * 2
    return {law.name: law.note for law in verdict.laws if law.outcome == "not observed" and "no rank" not in law.note}


@pytest.mark.parametrize(
    ("place", "laws"),
    [
        ("core.observe.watching.sketch", WATCHED),
        ("core.observe.watching.own_stack", WATCHED),
        ("core.observe.watching.is_inside_a_backward", WATCHED),
        ("core.observe.watching.Flows.note_made", WATCHED),
        ("core.observe.watching.whole_here", WATCHED),
        ("core.observe.watching.backward_stack", WATCHED),
        ("core.observe.watching.trains", WATCHED),
        ("core.observe.calls._read_behind", WATCHED),
        ("core.observe.watching._has_gradient", ()),
        ("core.observe.initial_weights.digest", ("initial-weights",)),
        ("core.observe.posted_messages._message", ()),
    ],
)
def test_an_exception_in_an_observer_leaves_the_step_as_it_is(
    whitebox_here: WhiteBox, place: str, laws: tuple[str, ...]
) -> None:
    found = unseen(validated(whitebox_here, partial(with_planted, place=place)))
    assert {*found} == {*laws}
    assert all(PLANTED in note for note in found.values()), found


def test_where_it_is_not_known_what_gradients_are_added_to_nothing_is_judged(whitebox_here: WhiteBox) -> None:
    verdict = validated(
        whitebox_here, partial(with_planted, place="core.observe.initial_weights.FirstUse._look_at_sum")
    )
    assert verdict.outcome == "unknown"
    golden(verdict.headline)


@pytest.mark.parametrize(
    "place",
    ["core.observe.watching.sketch", "core.observe.watching.whole_here", "core.observe.own_losses._edges"],
)
def test_a_stage_that_was_not_seen_is_not_run_again(whitebox_here: WhiteBox, place: str) -> None:
    step = partial(with_planted, place=place)
    verdict = validated(whitebox_here, step, reference=StageByStage(mse), loss_fn=None)
    assert verdict.outcome == "unknown", str(verdict)
    assert PLANTED in verdict.details


def test_routes_that_were_not_all_seen_are_none() -> None:
    router = nn.Linear(2, 4)
    with RouteObserver(("",), router) as observer, planted("core.observe.routes.Pick.of"):
        assert torch.ones(3).topk(1).indices.numel() == 1
    assert (observer.of(router), observer.fence.broken) == ({}, PLANTED)


def test_a_type_that_was_not_seen_everywhere_is_not_told() -> None:
    module = nn.Linear(2, 2)
    with ComputedIn([module]) as computed, planted("core.observe.computed_in.types_between"):
        module(torch.ones(1, 2))
    assert (computed.narrowest, computed.fence.broken) == ("", PLANTED)


def test_steps_of_optimizers_that_were_not_seen_are_told_of() -> None:
    early, module = EarlyStep(), nn.Linear(2, 2)
    early.open(module.parameters())
    with planted("wings.composed.collect.is_inside_a_backward"):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    early.close()
    with pytest.raises(RecordError, match=PLANTED):
        early.check()


def summed(model: nn.Module, microbatches: list[Any], differentiate: Callable[..., Any]) -> Any:
    """A functional step: gradients of a function of the weights."""
    stage, losses, total = watch(model), [], dict[str, Tensor]()
    weights = {name: one.detach() for name, one in model.named_parameters()}
    for x, target in microbatches:

        def objective(weights: dict[str, Tensor], x: Tensor = x, target: Tensor = target) -> Tensor:
            return mse(functional_call(stage, weights, (x,)), target)

        loss, gradients = differentiate(objective, weights)
        losses.append(loss)
        total = {name: one / COUNT + total.get(name, 0.0) for name, one in gradients.items()}
    return StepResult([stage], losses, gradients=total)


def beside(model: nn.Module, microbatches: list[Any], *, trial: Callable[[nn.Module, Tensor], object]) -> Any:
    """The plain step, after the stage was called otherwise."""
    stage = watch(model)
    for x, _ in microbatches:
        trial(stage, x)
    return plain(stage, microbatches)


def of_fakes(stage: nn.Module, x: Tensor) -> object:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return stage(x)


def over_models(stage: nn.Module, x: Tensor) -> object:
    several = {name: torch.stack([one, one]) for name, one in stage.named_parameters()}
    return vmap(lambda weights: functional_call(stage, weights, (x,)))(several)


TRIALS: dict[str, Callable[[Any, Tensor], object]] = {
    "in inference": lambda stage, x: torch.inference_mode()(stage)(x),
    "over rows": lambda stage, x: vmap(stage)(x),
    "over models": over_models,
    "of fakes": of_fakes,
    "compiled": lambda stage, x: torch.no_grad()(torch.compile(stage, backend="eager"))(x),
}


def by_vjp(function: Callable[[Any], Tensor], weights: Any) -> tuple[Any, ...]:
    loss, back = vjp(function, weights)
    return loss, *back(torch.ones(()))


@pytest.mark.parametrize("differentiate", [by_vjp, lambda f, weights: (f(weights), grad(f)(weights))])
def test_a_functional_step_is_judged_by_its_results(whitebox_here: WhiteBox, differentiate: Any) -> None:
    verdict = validated(whitebox_here, partial(summed, differentiate=differentiate))
    found = unseen(verdict)
    assert [law for law in found if law in WATCHED] == [*WATCHED]
    assert all(UNSEEN in found[law] for law in WATCHED)
    assert verdict.law("initial-weights").outcome == "pass"


@pytest.mark.parametrize("trial", TRIALS.values(), ids=TRIALS)
def test_a_stage_may_be_called_with_any_tensors(
    whitebox: WhiteBox, trial: Callable[[nn.Module, Tensor], object]
) -> None:
    unseen(validated(whitebox, partial(beside, trial=trial)))
