"""Causes from final gradients alone: a correct update names nothing, a wrong one its fault, whatever the precision."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.cause import Cause
from pipeproof.explain.atoms import Update
from pipeproof.explain.attribution import Attribution, attribute
from pipeproof.reference.data import IGNORED, Batch
from pipeproof.reference.step import Gradient, Loss, Site
from pipeproof.reference.traced import Traced
from tests.support.golden import golden
from tests.support.sweeps import each_once

COUNT, WIDTH, CLASSES, VOCABULARY = 4, 12, 5, 11
Rows = list[dict[Site, Tensor]]  # what each microbatch gives
Change = Callable[[Rows], None]


class Block(nn.Module):
    """Two parameters of one shape, a norm and what it adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), Block(), nn.Linear(WIDTH, CLASSES)]
    return nn.Sequential(*layers).to(dtype)


OWNER = {"0": 0, "1": 0, "2": 1, "3": 2, "4": 2}


@cache
def batches() -> tuple[Batch, ...]:
    made = torch.Generator().manual_seed(1)
    return tuple(
        Batch(
            (torch.randint(VOCABULARY, (6, 4), generator=made),),
            torch.randint(CLASSES, (6, 4), generator=made).masked_fill(torch.arange(4) < m, IGNORED),
            6 * (4 - m),
        )
        for m in range(COUNT)
    )


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.float().flatten(0, 1), target.flatten())


def site_of(name: str) -> Site:
    return OWNER[name[0]], name


def summed(rows: Sequence[dict[Site, Tensor]]) -> dict[Site, Gradient]:
    """Added up as a step does, in the type of the gradients."""
    total = {site: torch.zeros_like(gradient) for site, gradient in rows[0].items()}
    for row in rows:
        for site, gradient in row.items():
            total[site] += gradient
    return dict(total)


def attributed(
    change: Change = lambda rows: None,
    *,
    after: Callable[[dict[Site, Gradient]], None] = lambda gradients: None,
    dtype: torch.dtype = torch.float32,
) -> Attribution:
    """The attribution of a step that gets ``change`` done to what each microbatch gives, and ``after`` to the sums."""
    right, traced = known(dtype)
    rows = [{site: gradient.clone() for site, gradient in row.items()} for row in right]
    change(rows)
    observed = summed(rows)
    after(observed)
    return attribute(Update(observed, summed(right), traced, placement=(0, 1, 2)))


@cache
def known(dtype: torch.dtype) -> tuple[Rows, Traced]:
    """What a right step's microbatches give, and the reference."""
    model, losses = build(dtype), []
    rows: Rows = []
    for batch in batches():
        model.zero_grad()
        loss_here = loss_fn(model(*batch.inputs), batch.target)
        (loss_here / COUNT).backward()  # type: ignore[no-untyped-call]
        losses.append(loss_here.item())
        rows.append({site_of(name): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    loss = Loss(loss_fn, COUNT)
    return rows, Traced(model, held=rows[0].keys(), batches=batches(), loss=loss, losses=losses, ends={})


def of_stage(stage: int, microbatch: int, factor: float) -> Change:
    def change(rows: Rows) -> None:
        for site in rows[microbatch]:
            if site[0] == stage:
                rows[microbatch][site] *= factor

    return change


def only(found: Attribution) -> Cause:
    assert len(found.causes) == 1, found
    assert not found.unknown, found.unknown
    return found.causes[0]


def met(i: int, j: int) -> dict[Site, Tensor]:
    """What stage 0 gets where microbatch i's activation meets the output gradient of microbatch j."""
    model = build(torch.float32)
    first, rest = model[:2], model[2:]
    leaf = first(*batches()[j].inputs).detach().requires_grad_()
    (loss_fn(rest(leaf), batches()[j].target) / COUNT).backward()
    assert leaf.grad is not None
    model.zero_grad()
    first(*batches()[i].inputs).backward(leaf.grad)
    return {site_of(name): p.grad for name, p in first.named_parameters() if p.grad is not None}


EVERY = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", EVERY)
def test_a_right_step_names_nothing_in_any_precision(dtype: torch.dtype) -> None:
    """Added in another order, so that not all bits are those of the reference."""
    assert attributed(lambda rows: rows.reverse(), dtype=dtype).right


def everything(factor: float) -> Change:
    return lambda rows: [row.update({site: g * factor for site, g in row.items()}) for row in rows] and None


@pytest.mark.parametrize("dtype", EVERY)
def test_a_factor_of_all_gradients_is_one_factor_however_coarse_the_type(dtype: torch.dtype) -> None:
    """As of a loss that counts padding. Each coefficient alone comes out a little different."""
    cause = only(attributed(everything(0.8), dtype=dtype))
    assert (cause.kind, cause.stage, cause.microbatches) == ("scale", None, ())
    assert cause.factor == pytest.approx(0.8, rel=1e-2 if dtype == torch.bfloat16 else 1e-3)
    assert cause.detail == "0.8 times"


def by_tokens(rows: Rows) -> None:
    mean = sum(batch.tokens for batch in batches()) / COUNT
    for batch, row in zip(batches(), rows, strict=True):
        row.update({site: gradient * (batch.tokens / mean) for site, gradient in row.items()})


def test_an_output_gradient_in_place_of_another_is_an_exchange() -> None:
    def change(rows: Rows) -> None:
        of_stage(0, 2, 0.0)(rows)
        rows.append(met(2, 0))

    found = attributed(change)
    assert [cause.kind for cause in found.causes] == ["swapped-gradients"]
    assert not found.unknown


def times(stage: int, factor: float, name: str = "") -> Callable[[dict[Site, Gradient]], None]:
    """So many times the gradients of ``stage``, or of one parameter in it."""

    def change(gradients: dict[Site, Gradient]) -> None:
        some = {site: g for site, g in gradients.items() if site[0] == stage and site[1] in (name or site[1], name)}
        gradients.update({site: g * factor for site, g in some.items() if g is not None})

    return change


def factors(stages: tuple[int, ...], *each: float) -> Change:
    """How often each microbatch is in the sums of ``stages``."""

    def change(rows: Rows) -> None:
        for stage in stages:
            for m, factor in enumerate(each):
                of_stage(stage, m, factor)(rows)

    return change


def loses(site: Site, *microbatches: int, times: float = 0.0) -> Change:
    def change(rows: Rows) -> None:
        for microbatch in microbatches:
            rows[microbatch][site] = rows[microbatch][site] * times

    return change


UP, BIAS, CLASS_BIAS = (1, "2.up.weight"), (1, "2.up.bias"), (2, "4.bias")


@pytest.mark.parametrize(*each_once(site=[UP, BIAS, (0, "0.weight"), (1, "2.norm.weight")], dtype=EVERY))
def test_one_parameter_that_lost_a_microbatch(site: Site, dtype: torch.dtype) -> None:
    cause = only(attributed(loses(site, 1), dtype=dtype))
    assert (cause.kind, cause.stage, cause.microbatches, cause.parameter) == ("dropped", site[0], (1,), site[1])


NAMED: dict[str, tuple[Change, tuple[str, int | None, tuple[int, ...], str | None]]] = {
    "dropped": (of_stage(1, 2, 0.0), ("dropped", 1, (2,), None)),
    "doubled": (of_stage(2, 1, 2.0), ("doubled", 2, (1,), None)),
    "by tokens": (by_tokens, ("unequal-weights", None, (), None)),
    "twice in one parameter": (loses(UP, 3, times=2.0), ("doubled", 1, (3,), UP[1])),
    "assigned and not added up": (loses(UP, 0, 1, 2), ("dropped", 1, (0, 1, 2), UP[1])),
}


@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize("title", NAMED)
def test_what_microbatches_gave_is_named_in_any_precision(title: str, dtype: torch.dtype) -> None:
    change, expected = NAMED[title]
    cause = only(attributed(change, dtype=dtype))
    assert (cause.kind, cause.stage, cause.microbatches, cause.parameter) == expected
    assert cause.rank == cause.stage
    if cause.detail:
        golden(cause.detail)


def loses_both(rows: Rows) -> None:
    loses(UP, 1)(rows)
    loses(BIAS, 1)(rows)


def zeros(gradients: dict[Site, Gradient]) -> None:
    """Microbatches differ in their tokens: zero is in proportion to these as well."""
    gradients.update({site: torch.zeros(g.shape) for site, g in gradients.items() if g is not None and site[0] < 2})


def nans(gradients: dict[Site, Gradient]) -> None:
    """They flow back from the last stage."""
    for site in (max(gradients), *(site for site in gradients if site[0] < 2)):
        gradients[site] = torch.full_like(gradients[site], float("nan"))  # type: ignore[arg-type]


def nothing(found: Any) -> None:
    pass


# How rows and their sums are changed, and the kind, stage, microbatches, parameter and factor of the only cause.
ONLY: dict[str, tuple[Change, Callable[[dict[Site, Gradient]], None], tuple[Any, ...]]] = {
    "zero": (nothing, zeros, ("zero", 1, (), None, None)),
    "not finite": (nothing, nans, ("not-finite", 2, (), "4.weight", None)),
    "several numbers explain it": (nothing, times(2, 3.0), ("scale", 2, (), None, 3.0)),
    # As in a receive buffer whose gradient is never cleared.
    "another output gradient beside": (
        lambda rows: rows.append(met(2, 0)),
        nothing,
        ("extra-term", 0, (2,), None, None),
    ),
    "two parameters": (loses_both, nothing, ("dropped", 1, (1,), BIAS[1], None)),
    "several factors": (factors((1,), 0.1, 0.7, 1.3, 1.0), nothing, ("scale", 1, (0, 1, 2), None, None)),
    "all but one": (factors((1,), 2.0, 2.0, 2.0, 1.0), nothing, ("scale", 1, (), None, 2.0)),
    # As where gradients are not cleared after each was added to a sum.
    "more and more often": (factors((1,), 1.0, 2.0, 3.0, 4.0), nothing, ("doubled", 1, (1, 2, 3), None, None)),
    "a whole number among factors": (
        factors((1,), 0.7, 0.8, 1.3, 2.0),
        nothing,
        ("scale", 1, (0, 1, 2, 3), None, None),
    ),
    "several stages": (factors((0, 2), 1.0, 0.0, 1.0, 1.0), nothing, ("dropped", None, (1,), None, None)),
    "one parameter": (nothing, times(1, 1 / 3, "2.up.bias"), ("scale", 1, (), "2.up.bias", 1 / 3)),
    **{  # what came in with the output gradient is named there
        f"{words}, {factor}": (factors(stages, *[factor] * COUNT), nothing, ("scale", 1, (), None, factor))
        for words, stages, each in (
            ("a little off", (1,), (1.0001, 1.001, 1.01, 1.1, 0.999)),
            ("down from stage 1", (0, 1), (0.999, 0.5)),
        )
        for factor in each
    },
}


@pytest.mark.parametrize("title", ONLY)
def test_one_fault_is_one_cause(title: str) -> None:
    change, after, (*expected, factor) = ONLY[title]
    found = attributed(change, after=after)
    cause = only(found)
    assert [cause.kind, cause.stage, cause.microbatches, cause.parameter] == expected
    assert cause.factor == (None if factor is None else pytest.approx(factor, rel=1e-5))
    golden(str(cause))
    exchanged = {"doubled", "swapped-activations", "swapped-gradients"}
    assert cause.kind != "extra-term" or exchanged.isdisjoint(kind for one in found.ruled_out for kind in one.kinds)


def altered(site: Site, change: Callable[[Tensor], None]) -> Callable[[dict[Site, Gradient]], None]:
    def after(gradients: dict[Site, Gradient]) -> None:
        gradient = gradients[site]
        assert gradient is not None
        change(gradient)

    return after


def noise(gradient: Tensor) -> None:
    gradient[:3] += 1e-2 * torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("site", "change", "kind"),
    [
        (UP, lambda g: g[4:8].zero_(), "zero"),
        (UP, lambda g: g[:, :3].zero_(), "zero"),
        ((0, "0.weight"), lambda g: g[2:4].zero_(), "zero"),
        (UP, lambda g: g[4:8].mul_(2), "scale"),
        (UP, lambda g: g[4:8].neg_(), "sign"),
    ],
)
def test_some_elements_that_are_wrong(
    site: Site, change: Callable[[Tensor], None], kind: str, dtype: torch.dtype
) -> None:
    cause = only(attributed(after=altered(site, change), dtype=dtype))
    assert (cause.kind, cause.parameter) == (kind, site[1])
    golden(cause.detail)


def test_rows_that_belong_elsewhere() -> None:
    cause = only(attributed(after=altered(UP, lambda g: g[0:4].copy_(g[4:8].clone()))))
    assert (cause.kind, cause.parameter) == ("misplaced", UP[1])
    golden(cause.detail)


@pytest.mark.parametrize(*each_once(size=[0.03, 0.1, 0.3, 1.0], dtype=[torch.float32, torch.bfloat16]))
def test_noise_all_over_a_gradient_is_unknown_however_small(size: float, dtype: torch.dtype) -> None:
    """Some of its elements are right by chance in a coarse type, and some factor or order may nearly fit."""
    generator = torch.Generator().manual_seed(1)

    def noisy(gradient: Tensor) -> None:
        gradient += size * gradient.std() * torch.randn(gradient.shape, generator=generator)

    assert not attributed(after=altered(UP, noisy), dtype=dtype).causes


def test_elements_that_tell_nothing_are_located_and_not_named() -> None:
    found = attributed(after=altered(UP, noise))
    assert not found.causes
    golden("".join(found.unknown), numbers=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", ["norm.weight", ""])
def test_exchanged_gradients_are_misplaced_and_have_nothing_of_their_own(dtype: torch.dtype, part: str) -> None:
    def exchanged(gradients: dict[Site, Gradient]) -> None:
        for name in [name for stage, name in gradients if stage == 1 and part in name]:
            other = 2, name.replace("2.", "3.", 1)
            gradients[1, name], gradients[other] = gradients[other], gradients[1, name]

    found = attributed(after=exchanged, dtype=dtype)
    assert [(one.kind, one.stage) for one in found.causes] == [("misplaced", 2), ("misplaced", 1)], found.unknown


def test_parameters_that_are_right_where_the_rest_of_their_stage_is_not_are_told_apart() -> None:
    """As where weight gradients that were put off were never made, and a norm's was not put off."""

    def change(rows: Rows) -> None:
        norm = {name: rows[3][1, name].clone() for name in ("2.norm.weight", "2.norm.bias")}
        of_stage(1, 3, 0.0)(rows)
        rows[3].update({(1, name): gradient for name, gradient in norm.items()})

    found = attributed(change)
    cause = only(found)
    assert (cause.kind, cause.stage, cause.microbatches) == ("dropped", 1, (3,))
    golden("\n".join(map(str, found.ruled_out)))


def test_a_parameter_that_lost_more_than_its_stage() -> None:
    def change(rows: Rows) -> None:
        of_stage(1, 3, 0.0)(rows)
        loses(UP, 1)(rows)

    found = attributed(change)
    assert not found.unknown
    stage, parameter = found.causes
    assert (stage.kind, stage.microbatches, stage.parameter) == ("dropped", (3,), None)
    assert (parameter.kind, parameter.microbatches, parameter.parameter) == ("dropped", (1, 3), UP[1])


def test_what_one_parameter_counts_names_nothing_where_another_is_wrong_like_nothing_known() -> None:
    """As where one output gradient came in place of others: a bias shows that as counts, a weight as nothing known."""

    def noisy(gradient: Tensor) -> None:
        gradient += 1e-2 * torch.randn(gradient.shape, generator=torch.Generator().manual_seed(2))

    found = attributed(loses(BIAS, 1), after=altered(UP, noisy))
    assert not found.causes
    assert any(UP[1] in told for told in found.unknown)
