"""The causes that a checked step and two records are told: planted faults are named, what does not show is unknown."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

from pipeproof.core.cause import Cause
from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.own.case import Case
from pipeproof.records.case_record import record_expected
from pipeproof.records.compare import compare
from pipeproof.records.record import Record
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_check import check_step
from pipeproof.records.step_record import record_step
from tests.support.golden import golden
from tests.support.steps import backward, loss_fn, pairs

M, WIDTH = 4, 8
Pairs = list[tuple[object, object]]
Change = Callable[[nn.Module], object]


def build() -> nn.Sequential:
    """Stage 0 is the first two blocks, stage 1 the others."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(4))
        return nn.Sequential(*blocks)


def data(seed: int = 0) -> Pairs:
    return pairs(M, rows=6, seed=seed)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def recorded() -> Record:
    model = build()
    return record_step(model, data(), loss_fn=loss_fn, optimizer=sgd(model), contract=Contract(max_norm=0.3))


def nothing(model: nn.Module) -> None:
    """The step is right."""


def step(
    against: Any,
    *,
    divisor: float = M,
    skipped: Sequence[int] = (),
    before: Change = nothing,
    fault: Change = nothing,
    clip_first: bool = False,
    clip_to: float = 0.3,
) -> Verdict:
    """A user's step with a fault in it, of two stages on one rank."""
    model = build()
    before(model)
    with check_step({0: model[:2], 1: model[2:]}, data(), against=against) as check:
        losses = backward(model, data(), divisor=divisor, skipped=skipped)
        fault(model)
        if not clip_first:
            check.gradients()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_to).item()
        if clip_first:
            check.gradients()
        sgd(model).step()
        check.report(losses=losses, norm=norm)
    return check.verdict


def of_stage(model: nn.Module, stage: int) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if int(name[0]) // 2 == stage]


def zero(model: nn.Module) -> None:
    for parameter in of_stage(model, 1):
        parameter.grad.zero_()


def drop(model: nn.Module) -> None:
    """Take microbatch 2 out of stage 1's sums."""
    alone = build()
    backward(alone, data()[2:3], divisor=M)
    for parameter, its in zip(of_stage(model, 1), of_stage(alone, 1), strict=True):
        assert parameter.grad is not None
        assert its.grad is not None
        parameter.grad -= its.grad


def swap(model: nn.Module) -> None:
    one, other = model.get_parameter("0.0.weight"), model.get_parameter("3.0.weight")
    one.grad, other.grad = other.grad, one.grad


def lose(model: nn.Module) -> None:
    model.get_parameter("2.0.bias").grad = None


def spoil(model: nn.Module) -> None:
    for parameter in of_stage(model, 1):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))


BESIDE = SingleDevice(build, loss_fn)
RECORD = recorded()
EITHER = pytest.mark.parametrize("against", [BESIDE, RECORD], ids=["beside", "record"])
left_over = partial(backward, microbatches=data(seed=9))  # of the step before: nobody cleared them

FAULTS: dict[str, tuple[dict[str, Any], Cause]] = {
    "undivided": ({"divisor": 1}, Cause("scale", factor=M, detail="4 = the number of microbatches")),
    "divided twice": ({"divisor": M * M}, Cause("scale", factor=1 / M, detail="1/4 = 1 / the number of microb")),
    "not cleared": (
        {"before": left_over},
        Cause("stale-gradient", factor=1, detail="the gradient from before the step"),
    ),
    "one stage zero": ({"fault": zero}, Cause("zero", rank=0, stage=1)),
    "one lost": ({"fault": lose}, Cause("missing", rank=0, stage=1, parameter="2.0.bias")),
}


def agrees(found: Cause, planted: Cause) -> bool:
    same = [getattr(found, name) == getattr(planted, name) for name in ("kind", "rank", "stage", "microbatches")]
    near = planted.factor is None or (found.factor is not None and abs(found.factor / planted.factor - 1) < 1e-5)
    return all(same) and near and planted.detail in found.detail and planted.parameter == found.parameter


@EITHER
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_beside_the_model_and_from_a_record_alone(name: str, against: Any) -> None:
    options, planted = FAULTS[name]
    verdict = step(against, **options)
    assert verdict.outcome == "fail"
    assert agrees(verdict.causes[0], planted), str(verdict)
    held = "every parameter is held once"  # which leaves layers in another order open
    assert [one.kinds for one in verdict.ruled_out if one.evidence == held] == [()]


class Cast(nn.Sequential):
    """Computes in bf16, with weights in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: torch.Tensor = super().forward(x)
        return found.float()


def test_a_factor_that_autocast_rounds_otherwise_is_named() -> None:
    model = Cast(*build())
    with check_step(model, data(), against=SingleDevice(lambda: Cast(*build()), loss_fn)) as check:
        backward(model, data(), divisor=3)
        check.gradients()
    (cause,) = check.verdict.causes
    assert (cause.kind, cause.parameter, cause.factor) == ("scale", None, pytest.approx(4 / 3, rel=1e-2))


def test_what_explains_all_coarsely_says_more_than_what_gives_a_part() -> None:
    """Microbatches in halves are rounded otherwise; one is lost, and one gradient is zero."""
    model = Cast(*build())
    with check_step(
        {0: model[:2], 1: model[2:]}, data(), against=SingleDevice(lambda: Cast(*build()), loss_fn)
    ) as check:
        for m, (x, target) in enumerate(data()):
            loss = loss_fn(torch.cat([model(part) for part in x.chunk(2)]), target)
            (loss / M * (m != 2)).backward()
        model.get_parameter("3.0.weight").grad.zero_()  # type: ignore[union-attr]
        check.gradients()
    found = {(one.kind, one.microbatches, one.parameter) for one in check.verdict.causes}
    assert found == {("dropped", (2,), None), ("zero", (), "3.0.weight")}, str(check.verdict)


class Layer(nn.LSTM):
    """An LSTM that gives its outputs alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]


def words() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Embedding(23, 16), *(Layer(16, 16, batch_first=True) for _ in range(2)), nn.Linear(16, 23)
        return nn.Sequential(*layers).bfloat16()


def test_what_only_one_weight_of_the_last_stage_shows_in_a_coarse_type_is_that_of_the_stage() -> None:
    """Exchanged targets change no bias by more than rounding."""
    draw = torch.Generator().manual_seed(1)
    given = [tuple(torch.randint(23, (4, 6), generator=draw) for _ in range(2)) for _ in range(M)]
    model, entropy = words(), lambda y, target: nn.functional.cross_entropy(y.float().flatten(0, 1), target.flatten())
    with check_step({0: model[:1], 1: model[1:3], 2: model[3:]}, given, against=SingleDevice(words, entropy)) as check:
        for m, of in enumerate((0, 2, 1, 3)):
            (entropy(model(given[m][0]), given[of][1]) / M).backward()
        check.gradients()
    assert {one.kind for one in check.verdict.causes} == {"swapped-data"}, str(check.verdict)


@EITHER
def test_gradients_that_were_exchanged_are_named_each_with_the_other(against: Any) -> None:
    second, first = step(against, fault=swap).causes
    assert (first.kind, first.stage, first.parameter) == ("misplaced", 0, "0.0.weight")
    golden(first.detail)
    assert (second.kind, second.stage, second.parameter) == ("misplaced", 1, "3.0.weight")


@pytest.mark.parametrize(
    ("options", "planted"),
    [
        ({"skipped": (1,)}, Cause("dropped", microbatches=(1,))),
        ({"fault": drop}, Cause("dropped", rank=0, stage=1, microbatches=(2,))),
    ],
)
def test_a_lost_microbatch_is_named_beside_the_model_and_unknown_from_sums(
    options: dict[str, Any], planted: Cause
) -> None:
    assert agrees(step(BESIDE, **options).causes[0], planted)
    alone = step(RECORD, **options)
    assert (alone.outcome, alone.causes) == ("fail", ())
    golden(" ".join(alone.undecided), numbers=False)


@EITHER
def test_clipped_gradients_are_told_from_badly_divided_ones(against: Any) -> None:
    verdict = step(against, clip_first=True)
    if verdict.law("updated-parameters").outcome == "pass":  # the record knows the update, which is right
        assert verdict.undecided
        golden("\n".join(verdict.undecided), numbers=False)
        assert not verdict.causes
    else:
        (cause,) = verdict.causes
        assert (cause.kind, cause.stage) == ("scale", None)
        golden(cause.detail.partition("; ")[2])
        assert "1/" not in cause.detail
    (other,) = step(against, divisor=3 * M).causes
    assert "clipping" not in other.detail


@EITHER
def test_a_right_step_is_told_nothing_whatever_it_began_with(against: Any) -> None:
    def cleared(model: nn.Module) -> None:
        """A step that clears what it began with."""
        model.zero_grad()
        backward(model, data())

    for verdict in (step(against), step(against, before=left_over, divisor=-1e30, fault=cleared)):
        assert (verdict.outcome, verdict.causes, verdict.undecided) == ("pass", (), ()), str(verdict)


@EITHER
def test_noise_is_unknown(against: Any) -> None:
    verdict = step(against, fault=spoil)
    assert (verdict.outcome, verdict.causes) == ("fail", ())
    golden(verdict.undecided[0], numbers=False)


def test_what_was_there_before_and_is_all_there_is_tells_nothing() -> None:
    """A backward that was over when the check began is no step before, however wrong it is."""
    model = build()
    backward(model, data(), skipped=(1,))
    with check_step({0: model[:2], 1: model[2:]}, data(), against=RECORD) as check:
        check.gradients()
    assert check.verdict.outcome == "fail"
    assert check.verdict.causes == ()


@pytest.mark.parametrize("against", [BESIDE, None], ids=["beside", "record"])
@pytest.mark.parametrize(("skipped", "divisor"), [((1, 3), M), ((1,), M), ((), 1)])
def test_equal_microbatches_do_not_tell_which_are_in_a_sum(
    skipped: tuple[int, ...], divisor: int, against: Any
) -> None:
    same, model = [data()[0]] * M, build()
    source = against or record_step(model, same, loss_fn=loss_fn)
    with check_step({0: model[:2], 1: model[2:]}, same, against=source) as check:
        backward(model, same, skipped=skipped, divisor=divisor)
        check.gradients()
    assert (check.verdict.outcome, check.verdict.causes) == ("fail", ()), str(check.verdict)
    words = "are not decided by so few, or so similar, numbers" if against else "all microbatches are the same"
    assert words in check.verdict.undecided[0]


@pytest.mark.parametrize(
    ("options", "kinds", "words"),
    [
        ({"clip_to": 1e9}, ["clip"], "expected 0.1976: not clipped"),
        ({"clip_to": 0.6}, ["update", "clip"], "2 times expected"),
    ],
)
def test_a_wrong_update_of_right_gradients_is_clippings_only_where_that_comes_to_it(
    options: dict[str, Any], kinds: list[str], words: str
) -> None:
    verdict = step(RECORD, **options)
    assert [law.name for law in verdict.laws if law.outcome == "fail"] == ["updated-parameters"]
    assert [causes[0].kind for causes in (verdict.causes, *verdict.alternatives)] == kinds, str(verdict)
    assert words in verdict.causes[0].detail


def test_too_much_to_keep_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeproof.records.step_check.MOST", 1000)
    verdict = step(BESIDE, divisor=1)
    assert verdict.causes[0].factor == pytest.approx(M)
    golden(verdict.undecided[0], numbers=False)
    monkeypatch.setattr("pipeproof.records.step_check.MOST", 0)
    verdict = step(BESIDE, divisor=1)
    assert verdict.causes == ()


def test_a_model_that_fails_while_the_cause_is_looked_for_leaves_the_verdict() -> None:
    calls = count()  # a check cannot put it back, as it does a list

    def fragile(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if next(calls) > 3 * M:  # three passes, and one microbatch for its products, make what is expected
            raise KeyError("gone")
        return loss_fn(output, target)

    verdict = step(SingleDevice(build, fragile), divisor=1)
    assert (verdict.outcome, verdict.causes) == ("fail", ())
    assert verdict.unsought.startswith("KeyError: 'gone' (")
    assert "in fragile" in verdict.as_dict()["traceback"]  # type: ignore[operator]


CASE = "1f1b r2 s2 m3 split=1,1 model=mlp plan=train+train seed=3"
EXPECTED = record_expected(Case.parse(CASE))


def changed(record: Record, number: int, **fields: Any) -> Record:
    operations = list(record.operations)
    operations[number] = replace(operations[number], **fields)
    return replace(record, kind="observed", operations=tuple(operations))


def test_two_records_that_disagree_are_told_the_cause() -> None:
    tripled = {name: None if g is None else 3 * g for name, g in EXPECTED.operations[1].gradients.items()}
    for config in (EXPECTED.config, {}):
        verdict = compare(EXPECTED, replace(changed(EXPECTED, 1, gradients=tripled), config=config))
        assert (verdict.causes[0].kind, verdict.causes[0].stage) == ("scale", None)
        golden(verdict.causes[0].detail)


def test_a_recorded_step_that_has_the_one_before_in_it_is_named() -> None:
    first, second = (one.gradients for one in EXPECTED.operations)
    both = {name: one + other for name, one in first.items() if one is not None and (other := second[name]) is not None}
    verdict = compare(EXPECTED, replace(changed(EXPECTED, 1, gradients=both), config={}))
    assert (verdict.causes[0].kind, verdict.causes[0].factor) == ("stale-gradient", 1)


def test_a_record_that_names_its_case_shows_microbatches_and_one_that_does_not_is_unknown() -> None:
    fewer = record_expected(Case.parse(CASE.replace("m3", "m2"))).operations[0]
    lacking = {name: None if g is None else g * 2 / 3 for name, g in fewer.gradients.items()}
    observed = changed(EXPECTED, 0, gradients=lacking)
    named, unnamed = compare(EXPECTED, observed), compare(EXPECTED, replace(observed, config={}))
    assert (named.causes[0].kind, named.causes[0].microbatches) == ("dropped", (2,)), str(named)
    assert unnamed.causes == ()
    other = replace(observed, config={**observed.config, "case": CASE.replace("seed=3", "seed=4")})
    assert compare(EXPECTED, other).causes == (), "the case that it names is not the one that was recorded"


def test_names_that_do_not_go_together_are_no_partition() -> None:
    renamed = {name.replace("blocks", "layers"): one for name, one in EXPECTED.operations[0].gradients.items()}
    before = {name.replace("blocks", "layers"): one for name, one in EXPECTED.operations[0].before.items()}
    observed = replace(changed(EXPECTED, 0, gradients=renamed, before=before), places={}, config={})
    verdict = compare(EXPECTED, observed)
    assert verdict.causes == ()
    golden(verdict.undecided[0])
