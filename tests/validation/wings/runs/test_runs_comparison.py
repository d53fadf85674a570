"""Two runs of many steps: where they part, by what, and whether that is rounding. Every law is shown failing."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Verdict
from pipeproof.records.record import RecordError
from pipeproof.wings.runs import compare_runs
from pipeproof.wings.runs.growth import Quantity, differences
from pipeproof.wings.runs.run import WholeRun
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.long_runs import RATE, Fault, Loop, faster, in_replicas, in_stages, model_of

pytestmark = pytest.mark.long
STEPS, LONG = 12, 50
REVERSED, SHUFFLED = [3, 2, 1, 0], [2, 0, 3, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    Loop().train(made / "good", range(LONG))
    Loop(SHUFFLED).train(made / "third", range(LONG))
    return made


@pytest.fixture(scope="module")
def judged(folder: Path) -> Callable[..., Verdict]:
    """The verdict on a run in the folder, up to a step, with or without the third one."""

    def judge(observed: str, *, good: str = "good", also: bool = False, until: int | None = STEPS - 1) -> Verdict:
        third = folder / "third" if also else None
        return compare_runs(folder / good, folder / observed, third=third, until=until)

    return judge


def first(verdict: Verdict) -> tuple[str, int | None, str, str | None]:
    one = verdict.mismatches[0]
    return verdict.outcome, one.step, one.law, one.parameter


def test_equal_runs_are_equal_bit_for_bit(folder: Path, judged: Callable[..., Verdict]) -> None:
    Loop().train(folder / "same", range(STEPS))
    verdict = judged("same")
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), str(verdict)
    assert verdict.law("gradient").checked == verdict.law("updated-parameters").checked == STEPS * 10
    assert verdict.law("microbatches").exact == verdict.law("grad-norm").exact == STEPS
    assert verdict.replay == f"pipeproof compare {folder / 'good'} {folder / 'same'} --until {STEPS - 1}"


def test_a_run_that_went_on_from_a_checkpoint_is_equal(folder: Path, judged: Callable[..., Verdict]) -> None:
    stopped = Loop().train(folder / "resumed", range(5))
    state = stopped.model.state_dict(), stopped.optimizer.state_dict()
    Loop(start=state).train(folder / "resumed", range(5, STEPS), resume=True)
    assert judged("resumed").tier == "bitwise"
    forgot = Loop(start=(state[0], torch.optim.SGD(stopped.model.parameters(), lr=RATE, momentum=0.9).state_dict()))
    forgot.train(folder / "forgot", range(5, STEPS))
    assert first(judged("forgot")) == ("unknown", 5, "updated-parameters", "2.bias")


def test_another_order_of_sums_passes_by_the_measure_of_a_third_run(
    folder: Path, judged: Callable[..., Verdict]
) -> None:
    Loop(REVERSED).train(folder / "reversed", range(LONG))
    verdict = judged("reversed", also=True, until=None)
    assert (verdict.outcome, verdict.tier) == ("pass", "fp32"), str(verdict)
    assert 0 < verdict.law("gradient").worst < 1e-4
    golden(verdict.law("gradient").note, numbers=False)
    Loop(SHUFFLED).train(folder / "short third", range(2))
    file = folder / "reversed" / "rank-0.jsonl"
    file.write_text(file.read_text().replace('"torch":"', '"torch":"1+', 1))
    short = compare_runs(folder / "good", folder / "reversed", third=folder / "short third")
    assert first(short)[:2] == ("unknown", 2)
    golden(short.headline)
    golden(short.law("steps").note)
    alone = judged("reversed")
    assert first(alone) == ("unknown", 0, "gradient", "2.bias")
    golden(alone.headline, numbers=False)


def without_the_last_microbatch(loop: Loop, number: int) -> None:
    loop.optimizer.zero_grad()
    for inputs, target in (loop.microbatches(number)[k] for k in loop.order if k < 3):
        (nn.functional.mse_loss(loop.model(inputs), target) / 4).backward()


def scaled(loop: Loop, number: int, *, by: float = 1.001) -> None:
    loop.model[1][0].weight.grad.mul_(by)


def decayed(loop: Loop, number: int) -> None:
    with torch.no_grad():
        loop.model[0][0].bias.mul_(1 - 1e-3)


FAULTS = {
    "rate": (faster, 7, "updated-parameters", "2.bias"),
    "dropped": (without_the_last_microbatch, 5, "gradient", "2.bias"),
    "scaled": (scaled, 3, "gradient", "1.0.weight"),
    "decayed": (decayed, 6, "updated-parameters", "0.0.bias"),
}


@pytest.mark.parametrize("order", [range(4), REVERSED], ids=["in order", "reversed"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_at_the_step_it_begins_and_by_its_law(
    name: str, order: list[int], folder: Path, judged: Callable[..., Verdict]
) -> None:
    fault: Fault
    fault, begins, law, parameter = FAULTS[name]
    run = f"{name} {order[0]}"
    Loop(order, fault, begins).train(folder / run, range(begins + 1))
    verdict = judged(run, also=True)
    assert first(verdict) == ("fail", begins, law, parameter), str(verdict)
    if order != REVERSED:
        assert first(judged(run)) == ("unknown", begins, law, parameter)
    if name == "rate":
        golden(verdict.law(law).note)


def test_a_fault_smaller_than_what_rounding_grows_to_is_found_where_it_begins(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a rate of 10 the runs of right code are soon farther apart than the fault was."""
    monkeypatch.setattr("tests.support.long_runs.RATE", 10.0)
    for name, loop in (("wild", Loop()), ("wild third", Loop(SHUFFLED))):
        loop.train(folder / name, range(23))
    Loop(REVERSED, partial(scaled, by=1 + 2e-4), 1).train(folder / "wild fault", range(3))
    good, third, observed = (folder / name for name in ("wild", "wild third", "wild fault"))
    assert first(compare_runs(good, observed, third=third)) == ("fail", 1, "gradient", "1.0.weight")
    apart = differences(*(WholeRun(run).step(22) for run in (good, third)))
    assert apart[Quantity("gradient", "1.0.weight")].relative > 2e-4


def overflowing(loop: Loop, number: int) -> None:
    loop.model[1][0].weight.grad[0, 0] = float("inf")


def without_a_gradient(loop: Loop, number: int) -> None:
    loop.model[1][0].weight.grad = None


def in_three_orders(folder: Path, loop: Callable[[Sequence[int]], Loop], *, steps: int) -> Verdict:
    """The verdict on a run in reversed order, by one in order; one that is shuffled measures rounding."""
    runs = []
    for order in (range(4), REVERSED, SHUFFLED):
        loop(order).train(folder / f"{order[0]}", range(steps))
        runs.append(folder / f"{order[0]}")
    return compare_runs(*runs[:2], third=runs[2])


@pytest.mark.parametrize("what", [overflowing, without_a_gradient])
def test_steps_that_overflow_and_weights_that_are_frozen_are_no_fault(what: Fault, tmp_path: Path) -> None:
    verdict = in_three_orders(tmp_path, lambda order: Loop(order, what, 2), steps=4)
    assert verdict.outcome == "pass", str(verdict)
    assert bool(verdict.law("grad-norm").note) == (what is overflowing)


def test_which_gradients_overflow_is_no_fault_in_a_step_in_which_both_runs_do(folder: Path) -> None:
    def wider(loop: Loop, number: int) -> None:
        overflowing(loop, number)
        loop.model[2].weight.grad.fill_(float("nan"))

    Loop(fault=overflowing, begins=2).train(folder / "narrow", range(3))
    Loop(fault=wider, begins=2).train(folder / "wide", range(3))
    verdict = compare_runs(folder / "narrow", folder / "wide")
    golden(verdict.law("gradient").note, numbers=False)
    assert verdict.law("gradient").outcome == "pass"
    alone = compare_runs(folder / "good", folder / "wide", third=folder / "third")
    assert first(alone) == ("fail", 2, "gradient", "2.weight")


def test_where_the_good_run_alone_is_not_finite_there_is_nothing_to_compare_with(folder: Path) -> None:
    (folder / "endless loss").mkdir()
    text = re.sub(r'"losses":\[[^,]*', '"losses":["inf"', (folder / "good" / "rank-0.jsonl").read_text())
    (folder / "endless loss" / "rank-0.jsonl").write_text(text)
    runs = folder / "good", folder / "endless loss"
    by_it, of_it = (compare_runs(*pair, third=folder / "third") for pair in (runs[::-1], runs))
    assert (by_it.law("loss").outcome, by_it.law("loss").reasons) == ("unknown", (Reason.NOT_FINITE,))
    assert first(of_it)[:3] == ("fail", 0, "loss")


def on_two_ranks(to: Path, *runs: Path) -> Path:
    """The run of two ranks that have the same, whose files are those of these runs of one."""
    to.mkdir()
    for rank, run in enumerate(runs):
        text = (run / "rank-0.jsonl").read_text()
        (to / f"rank-{rank}.jsonl").write_text(text.replace('"rank":0,"ranks":1', f'"rank":{rank},"ranks":2', 1))
    return to


def test_what_one_of_two_ranks_has_otherwise_is_told_of_that_rank(folder: Path) -> None:
    started = Loop()
    with torch.no_grad():
        started.model[0][0].weight.mul_(1.1)
    started.train(folder / "started", range(3))
    Loop(fault=faster, begins=1).train(folder / "fast", range(3))
    Loop(fault=overflowing).train(folder / "endless", range(3))
    good, third = folder / "good", folder / "third"
    observed = on_two_ranks(folder / "one started", folder / "good", folder / "started")
    verdict = compare_runs(good, observed, third=third)
    assert first(verdict) == ("fail", 0, "replicas", "0.0.weight"), "not the loss that follows"
    assert (verdict.mismatches[0].rank, verdict.law("loss").outcome) == (1, "not observed")
    with pytest.raises(RecordError, match="no DTensor, give each a name of its own"):
        compare_runs(observed, good)
    verdict = compare_runs(good, on_two_ranks(folder / "one fast", folder / "good", folder / "fast"), third=third)
    assert first(verdict)[:3] == ("fail", 1, "replicas")
    golden(verdict.law("updated-parameters").note)
    both = on_two_ranks(folder / "both endless", folder / "endless", folder / "endless")
    golden(compare_runs(folder / "endless", both).law("grad-norm").note)


class Keys(nn.Module):
    """Adds twice its bias, of which a normalisation leaves half out, as attention does with the bias of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x + self.bias[:1], [8]) + self.bias[1:]


@pytest.mark.parametrize("fault", [None, faster])
def test_an_update_that_optimizers_make_of_rounding_hides_no_other(fault: Fault | None, tmp_path: Path) -> None:
    def with_keys(order: Sequence[int]) -> Loop:
        model = model_of()
        model[1].append(Keys())
        loop = Loop(order, fault if order is REVERSED else None, 5, model=model)
        loop.optimizer = torch.optim.RMSprop(loop.model.parameters(), lr=RATE / 20)
        return loop

    verdict = in_three_orders(tmp_path, with_keys, steps=8)
    golden(verdict.law("updated-parameters").note, numbers=False)
    if fault is None:
        assert verdict.outcome == "pass", str(verdict)
    else:
        assert first(verdict) == ("fail", 5, "updated-parameters", "2.bias")


def test_a_jump_of_a_gradient_is_no_fault_where_modules_compute_in_a_narrower_type(folder: Path) -> None:
    Loop(REVERSED, scaled, 1).train(folder / "jump", range(3))
    third, observed = folder / "third", folder / "jump"
    for computed, outcome in (("float32", "fail"), ("bfloat16", "unknown")):
        run = folder / f"computed in {computed}"
        run.mkdir()
        text = (folder / "good" / "rank-0.jsonl").read_text()
        (run / "rank-0.jsonl").write_text(text.replace('"computed":"float32"', f'"computed":"{computed}"'))
        assert first(compare_runs(run, observed, third=third)) == (outcome, 1, "gradient", "1.0.weight")


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_all_of_a_gradient_that_is_as_small_as_rounding_may_jump(weights: str, folder: Path) -> None:
    for name, order, by in (("tiny", range(4), 1e-3), ("tiny third", SHUFFLED, 1e-3), ("tiny other", REVERSED, 2e-3)):
        Loop(order, partial(scaled, by=by), 1).train(folder / f"{name} {weights}", range(2))
        for file in (folder / f"{name} {weights}").iterdir():
            text = file.read_text().replace('"computed":"float32"', '"computed":"bfloat16"')
            file.write_text(text.replace('"dtype":"float32"', f'"dtype":"{weights}"'))
    good, third, observed = (folder / f"{name} {weights}" for name in ("tiny", "tiny third", "tiny other"))
    assert first(compare_runs(good, observed, third=third)) == ("unknown", 1, "gradient", "1.0.weight")


def test_other_data_are_told_as_data(folder: Path, judged: Callable[..., Verdict]) -> None:
    class OtherData(Loop):
        def microbatches(self, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
            return super().microbatches(number if number < 4 else 99)

    OtherData().train(folder / "data", range(STEPS))
    verdict = judged("data")
    assert first(verdict) == ("fail", 4, "microbatches", None)
    golden(verdict.mismatches[0].observed_text)
    assert verdict.law("gradient").outcome == "pass"


def test_weights_that_change_between_steps_are_told_as_such(folder: Path, judged: Callable[..., Verdict]) -> None:
    loop = Loop().train(folder / "between", range(3))
    with torch.no_grad():
        loop.model[2].weight.mul_(1.1)
    loop.train(folder / "between", range(3, STEPS), resume=True)
    assert first(judged("between", also=True)) == ("fail", 3, "initial-weights", "2.weight")
    Loop(fault=scaled, begins=3).train(folder / "seldom", range(9), every=4)  # steps 0, 4, 8
    assert first(judged("seldom", also=True)) == ("fail", 4, "initial-weights", "1.0.weight")


@pytest.mark.pipeproof_ranks
def test_other_layouts_are_matched_by_name_and_by_microbatch(
    world: World, folder: Path, judged: Callable[..., Verdict]
) -> None:
    for name, job in (("stages", in_stages), ("replicas", in_replicas)):
        world.run(lambda context, job=job, name=name: job(folder / name, range(STEPS)), ranks=2)
        verdict = judged(name, also=True)
        assert verdict.outcome == "pass", str(verdict)
        assert verdict.law("loss").checked >= 4 * STEPS
        assert verdict.law("gradient").checked == 10 * STEPS
    names = [name for name, _ in model_of().named_parameters()]
    assert list(WholeRun(folder / "stages").parameters) == list(WholeRun(folder / "good").parameters) == names
    world.run(lambda context: in_replicas(folder / "apart", range(2), apart=True), ranks=2)
    assert first(judged("apart", also=True))[:3] == ("fail", 0, "replicas")
    with pytest.raises(RecordError, match=r"rank 1 of .*apart has another gradient of 2\.bias than rank 0"):
        judged("good", good="apart")
    (folder / "stages" / "rank-1.jsonl").unlink()
    with pytest.raises(RecordError, match="is of 2 ranks and lacks rank 1"):
        judged("stages")


def test_a_killed_job_is_compared_up_to_its_last_whole_step(folder: Path, judged: Callable[..., Verdict]) -> None:
    Loop().train(folder / "killed", range(STEPS))
    file = folder / "killed" / "rank-0.jsonl"
    file.write_bytes(file.read_bytes()[:-100])
    verdict = judged("killed")
    assert verdict.outcome == "unknown"
    assert verdict.law("steps").reasons == (Reason.UNCOMPARED,)
    golden(verdict.law("steps").note)
    assert judged("killed", until=STEPS - 2).tier == "bitwise"
    Loop().train(folder / "killed", range(3), resume=True)  # from the beginning: what came later is another run's
    assert WholeRun(folder / "killed").numbers == [0, 1, 2]


def test_gradients_that_were_not_kept_alike_are_refused(
    folder: Path, judged: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeproof.wings.runs.recorder.RunStep.gradients", lambda step: None)
    Loop().train(folder / "clipped", range(1))
    with pytest.raises(RecordError, match="in step 0 one run kept gradients before clipping and the other after it"):
        judged("clipped")


def test_a_third_run_that_does_not_measure_rounding_is_refused(folder: Path) -> None:
    good, observed = folder / "good", folder / "third"
    Loop().train(folder / "equal", range(2))
    for name, fault, words in (
        ("equal", None, "measures no rounding: it is .* bit for bit"),
        ("wrong rate", faster, "has another optimizer: lr 0.2, not 0.1"),
        ("wrong sums", without_the_last_microbatch, "gradients differ by .*e-01"),
    ):
        if fault is not None:
            Loop(fault=fault).train(folder / name, range(2))
        with pytest.raises(RecordError, match=words):
            compare_runs(good, observed, third=folder / name)
