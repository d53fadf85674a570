"""Fuzzing a step of one's own: what a campaign finds, how small, how it ends, and that it can fail."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import Contract, StepResult
from pipeproof.core.verdict import ValidationFailed, Verdict
from pipeproof.whitebox import Campaign, FlatShard, FuzzResult, StepCase, WhiteBox, fuzz, fuzzing
from pipeproof.whitebox.fixture import FixtureBox
from pipeproof.whitebox.fuzzing import ScaledGradients, Subject, run_campaign
from pipeproof.wings.mutate import PlantedStep
from pipeproof.wings.simulated import SimulatedWorld, Simulation
from pipeproof.worlds.world import World
from tests.support.doubles import InThisProcess
from tests.support.fuzzed_pipelines import PIPELINES, build, draw, loss_fn
from tests.support.golden import golden
from tests.support.steps import backward
from tests.support.warm_start import Ended

Launch = Callable[..., Ended]
Pairs = list[tuple[Tensor, Tensor]]
ONE_RANK = pytest.mark.pipeproof_one_rank


def one_device(
    model: nn.Module, microbatches: Pairs, *, wrong: Callable[[Pairs], bool] = lambda _: False
) -> tuple[nn.Module, list[float]]:
    """A right step on one rank, whose gradients are doubled where it is ``wrong``."""
    losses = backward(model, microbatches, by=loss_fn)
    for one in model.parameters() if wrong(microbatches) else ():
        one.grad.mul_(2)
    return model, losses


def campaign(step: Any = one_device, *, world: World | None = None, **words: Any) -> FuzzResult:
    given = {"reference": build, "data": draw, "loss_fn": loss_fn, "ranks": 1, "cases": 8}
    return WhiteBox(world or InThisProcess()).fuzz(step, **given | words)


@ONE_RANK
def test_a_campaign_in_the_simulated_world_draws_what_decides_and_leaves_the_world_as_it_was(
    simulated: SimulatedWorld,
) -> None:
    simulated.seed, decided = 3, list[Any]()
    words = {"reference": build, "data": draw, "loss_fn": loss_fn, "ranks": 2, "microbatches": 2, "cases": 4}

    run = simulated.run

    def note(*given: Any, **named: Any) -> Any:
        decided.append(simulated.decision.first)
        return run(*given, **named)

    simulated.run = note  # type: ignore[method-assign]
    try:
        result = fuzz(PIPELINES[2].step, world=simulated, **words)
    finally:
        del simulated.run
    assert result, str(result)
    assert len({*decided}) > 2
    assert simulated.decision == Simulation(first=3)


def racing(model: nn.Module, microbatches: Pairs) -> Any:
    """Rank 0 takes what comes first of two messages, and is wrong where that is rank 2's."""
    if dist.get_rank():
        dist.send(torch.tensor([float(dist.get_rank())]), 0)
        return [], None
    first, second = torch.empty(1), torch.empty(1)
    dist.recv(first)
    dist.recv(second)
    return one_device(model, microbatches, wrong=lambda _: first.item() == 2)


@ONE_RANK
def test_a_race_is_found_by_its_interleaving_which_the_replay_names(
    simulated: SimulatedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "test_it.py::test_a (call)")
    words = {"reference": build, "data": draw, "loss_fn": loss_fn, "ranks": 3, "microbatches": 1, "splits": False}
    found = fuzz(racing, world=simulated, **words)
    (seed,) = re.findall(r"--pipeproof-interleaving=(\d+) --pipeproof-case='ranks=3 ", found.replay)
    simulated.seed = int(seed)
    assert not fuzz(racing, world=simulated, case=str(found.smallest), **words)
    simulated.seed = 0
    outcomes = [bool(fuzz(racing, world=simulated, case=str(found.smallest), **words)) for simulated.seed in range(8)]
    assert {*outcomes} == {True, False}, "another interleaving is right"


@ONE_RANK
@pytest.mark.parametrize(
    ("wrong", "smallest"),
    [
        (lambda given: len(given) == 5, "ranks=1 microbatches=5 rows=1 seed=0"),
        (lambda given: sum(len(x) for x, _ in given) > 12, "ranks=1 microbatches=4 rows=4 seed=0"),
        (lambda given: len(given[-1][0]) < len(given[0][0]), "ranks=1 microbatches=2 rows=2,1 seed=0"),
    ],
)
def test_what_shrinks(wrong: Callable[[Pairs], bool], smallest: str) -> None:
    found = campaign(partial(one_device, wrong=wrong), cases=60)
    assert str(found.smallest) == smallest
    assert [cause.kind for cause in found.verdict.causes] == ["scale"]


# When a case is wrong, of ranks, microbatches and split; where it can be; and the smallest.
WRONG: dict[str, tuple[Callable[..., bool], Callable[[StepCase], bool], str]] = {
    "on fewer ranks at another split": (
        lambda ranks, _, split: ranks == 4 or split == (2, 6),
        lambda case: True,
        "ranks=2 microbatches=1 rows=1 split=2,6 seed=0",
    ),
    "on fewer ranks with more microbatches": (
        lambda ranks, count, _: count > 1 + 4 * (ranks == 2),
        lambda case: True,
        "ranks=2 microbatches=6 rows=1 split=4,4 seed=0",
    ),
    "where fewer cannot be": (
        lambda ranks, *_: True,
        lambda case: case.ranks == 4,
        "ranks=4 microbatches=1 rows=1 split=2,2,2,2 seed=0",
    ),
    "of replicas": (
        lambda ranks, *_: isinstance(ranks, dict),
        lambda case: True,
        "ranks=pp2,dp2 microbatches=2 rows=1 split=4,4 seed=0",
    ),
}


@ONE_RANK
@pytest.mark.parametrize(("wrong", "where", "smallest"), WRONG.values(), ids=WRONG)
def test_the_smallest_of_ranks_that_are_not_there(
    wrong: Callable[..., bool], where: Callable[[StepCase], bool], smallest: str
) -> None:
    def validate(step: Any, *, ranks: Any, microbatches: Pairs, **_: Any) -> Verdict:
        fails = wrong(ranks, len(microbatches), step.keywords["split"])
        return Verdict("step", "fail" if fails else "pass", "none", ())

    subject = Subject(PIPELINES[0].step, build, draw, Contract(), validate, str)
    drawn = Campaign(ranks=(2, 4, {"pp": 2, "dp": 2}), where=where)
    with World() as world:
        found = run_campaign(subject, drawn, world)
    assert (str(found.smallest), found.replay) == (smallest, smallest)


@ONE_RANK
def test_the_texts_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "test_it.py::test_a (call)")
    passed, failed = campaign(), campaign(partial(one_device, wrong=lambda given: len(given) > 2))
    for result in (passed, failed):
        golden(str(result))
    golden(repr(passed))
    with pytest.raises(ValidationFailed) as error:
        failed.raise_if_failed()
    assert error.value.__notes__ == [failed.summary]
    passed.raise_if_failed()


@ONE_RANK
def test_who_runs_a_program_is_told_the_case_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr("sys.argv", ["my.py"])
    found = campaign(partial(one_device, wrong=lambda _: True))
    assert found.replay == "python my.py  # with case='ranks=1 microbatches=1 rows=1 seed=0'"


@ONE_RANK
def test_a_step_is_given_options_and_its_dtype_and_reference_and_data_are_of_it() -> None:
    given_ = list[tuple[Any, ...]]()

    def step(model: nn.Module, microbatches: Pairs, *, v: int, dtype: torch.dtype, seed: int) -> Any:
        given_.append((v, dtype, seed, {one.dtype for one in model.parameters()}, microbatches[0][0].dtype))
        return one_device(model, microbatches)

    seeds = list[int]()

    def seeded(seed: int) -> nn.Module:
        seeds.append(seed)
        torch.manual_seed(seed)
        return build() if seed % 2 else nn.Sequential(nn.Linear(6, 6))

    types = (torch.float32, torch.float64)
    result = campaign(step, reference=seeded, options={"v": (1, 2)}, dtypes=types, splits=False, cases=20)
    assert result, str(result)
    assert {v for v, *_ in given_} == {1, 2}
    assert {dtype for _, dtype, *_ in given_} == {*types}
    assert all({dtype} == of_weights == {of_data} for _, dtype, _, of_weights, of_data in given_)
    assert {seed for _, _, seed, *_ in given_} == {*seeds}
    assert len({*seeds}) > 8
    assert result.drawn.keys() == {"ranks", "microbatches", "dtype", "v"}


@ONE_RANK
def test_a_contract_may_follow_from_the_microbatches() -> None:
    def summed(model: nn.Module, microbatches: Pairs) -> Any:
        losses = [loss_fn(model(x), target) for x, target in microbatches]
        (torch.stack(losses).sum() / sum(len(x) for x, _ in microbatches)).backward()
        return model, [one.item() for one in losses]

    by_rows = lambda given: Contract(loss_divisor=sum(len(x) for x, _ in given))  # noqa: E731
    assert campaign(summed, contract=by_rows)
    assert not campaign(summed)


@ONE_RANK
def test_data_follows_from_the_seed_and_the_number_alone() -> None:
    made = list[tuple[int, int, float]]()

    def noted(m: int, rows: int, generator: torch.Generator) -> Any:
        pair = draw(m, rows, generator)
        made.append((m, rows, pair[0][0, 0].item()))
        return pair

    for rows in (1, "1,4"):
        campaign(data=noted, case=f"ranks=1 microbatches=2 rows={rows} seed=5")
    first, *_ = made
    assert {one for one in made if one[0] == 0} == {first}
    assert len({content for m, _, content in made if m == 1}) == 2 or made[1][2] != first[2]


@ONE_RANK
def test_unknown_is_counted_and_is_no_pass() -> None:
    def vague(model: nn.Module, microbatches: Pairs) -> Any:
        return one_device(model, microbatches) if len(microbatches) < 5 else None

    result = campaign(vague, cases=20)
    assert (result.outcomes.keys(), bool(result), result.smallest) == ({"pass", "unknown"}, False, None)
    assert result.planted, "what passed can fail"
    golden(str(result), lines="^(campaign|UNKNOWN)")


@ONE_RANK
def test_a_rank_that_raises_is_a_failure_and_shrinks() -> None:
    def raises(model: nn.Module, microbatches: Pairs) -> Any:
        assert len(microbatches) < 3, "no room"
        return one_device(model, microbatches)

    with World(silent=True) as world:
        found = campaign(raises, world=world)
    assert str(found.smallest) == "ranks=1 microbatches=3 rows=1 seed=0"
    assert (found.verdict.ended, bool(found)) == ("error", False)


@ONE_RANK
def test_a_failure_that_comes_once_is_kept_and_said_not_to_repeat() -> None:
    failed = list[int]()

    def once(given: Pairs) -> bool:
        if len(given) < 4 or failed:
            return False
        failed.append(len(given))
        return True

    found = campaign(partial(one_device, wrong=once), cases=20)
    assert (bool(found), found.repeats, found.outcomes["fail"]) == (False, False, 1)
    golden(str(found), lines="^smallest")


class Hurried(InThisProcess):
    """Each look at its clock is ten seconds later."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def clock(self) -> float:
        self.now += 10
        return self.now


@ONE_RANK
@pytest.mark.parametrize(("wrong", "outcomes"), [(9, {"pass": 3}), (2, {"pass": 1, "fail": 1})])
def test_time_ends_a_campaign_which_says_what_ran(wrong: int, outcomes: dict[str, int]) -> None:
    with pytest.warns(UserWarning, match=r"campaign of one_device ended after 40 s, as seconds=35 says: "):
        result = campaign(partial(one_device, wrong=lambda given: len(given) > wrong), world=Hurried(), seconds=35)
    assert (result.outcomes, bool(result)) == (outcomes, "fail" not in outcomes)
    golden(result.ended)


@ONE_RANK
def test_a_campaign_without_time_is_no_pass() -> None:
    with pytest.warns(UserWarning, match="0 of 8 cases ran"):
        result = campaign(world=Hurried(), seconds=5)
    assert (result.cases, bool(result)) == (0, False)


@ONE_RANK
def test_a_campaign_of_no_case_is_no_pass() -> None:
    result = campaign(where=lambda case: False)
    assert (result.cases, result.verdict.outcome) == (0, "unknown")


@ONE_RANK
def test_a_campaign_that_cannot_fail_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzing, "extensions", lambda point: {})
    monkeypatch.setattr(ScaledGradients, "_double", lambda self, result: result)
    result = campaign()
    assert (result.outcomes, bool(result), result.planted) == ({"pass": 8}, False, "")
    golden(str(result))


@ONE_RANK
def test_without_the_wing_gradients_are_scaled_that_the_step_hands_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzing, "extensions", lambda point: {})
    assert campaign().planted == ScaledGradients.summary
    monkeypatch.undo()
    assert campaign().planted == PlantedStep.summary


def by_name(model: nn.Module, microbatches: Pairs) -> Any:
    _, losses = one_device(model, microbatches)
    return {name: one.grad for name, one in model.named_parameters()}, losses


def in_shards(model: nn.Module, microbatches: Pairs) -> StepResult:
    _, losses = one_device(model, microbatches)
    gradients = {name: FlatShard(_gradient(one).flatten()) for name, one in model.named_parameters()}
    return StepResult(model, losses, gradients=gradients)


def with_places(model: nn.Module, microbatches: Pairs) -> StepResult:
    _, losses = one_device(model, microbatches)
    gradients = {name: (_gradient(one), slice(0, 6)) for name, one in model.named_parameters()}
    return StepResult(model, losses, gradients=gradients)


def in_turn(model: nn.Module, operations: Iterator[tuple[str, Pairs]]) -> Iterator[Any]:
    for _, microbatches in operations:
        yield one_device(model, microbatches)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@ONE_RANK
@pytest.mark.parametrize("step", [one_device, by_name, in_shards, with_places, in_turn])
def test_a_fault_is_planted_in_whatever_form_gradients_are(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzing, "extensions", lambda point: {})
    contract = Contract(operations=["train"]) if step is in_turn else Contract()
    result = campaign(step, contract=contract, cases=2)
    assert (bool(result), result.planted) == (True, ScaledGradients.summary), str(result)


@ONE_RANK
def test_what_data_raises_is_raised() -> None:
    def broken(m: int, rows: int, generator: torch.Generator) -> Any:
        raise OSError("no file")

    with pytest.raises(OSError, match=r"^no file$"):
        campaign(data=broken)


@ONE_RANK
def test_words_and_campaign_say_the_same_and_words_come_first() -> None:
    cases = list[str]()

    def noted(case: StepCase) -> bool:
        cases.append(str(case))
        return True

    chosen = Campaign(ranks=1, cases=3, seed=5, where=noted)
    whitebox = WhiteBox(InThisProcess())
    words: dict[str, Any] = {"reference": build, "data": draw, "loss_fn": loss_fn}
    whitebox.fuzz(one_device, campaign=chosen, **words)
    first, cases[:] = [*cases], []
    whitebox.fuzz(one_device, campaign=replace(chosen, seed=6), seed=5, **words)
    assert cases == first
    assert len(first) == 3


@ONE_RANK
@pytest.mark.parametrize(("look", "unread"), [(id, 1), (bool, 0), (str, 0), (lambda one: one.verdict.outcome, 0)])
def test_the_fixture_wants_a_result_looked_at(look: Callable[[FuzzResult], object], unread: int) -> None:
    box = FixtureBox(InThisProcess(), mutate=cast(Any, None))
    words: dict[str, Any] = {"reference": build, "data": draw, "loss_fn": loss_fn, "ranks": 1, "cases": 3}
    look(box.fuzz(partial(one_device, wrong=lambda _: True), **words))
    assert len(box.unread()) == unread
    box.fuzz(one_device, **words)
    assert box.unread() == [], "a pass alone need not be read"
