"""Causes from final gradients alone: a correct update names nothing, a wrong one its fault, whatever the precision."""

from collections.abc import Callable, Sequence
from functools import cache

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


def rows_of(model: nn.Module) -> Rows:
    """What each microbatch gives on one device."""
    found: Rows = []
    for batch in batches():
        model.zero_grad()
        (loss_fn(model(*batch.inputs), batch.target) / COUNT).backward()
        found.append({site_of(name): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return found


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
    model = build(dtype)
    rows = rows_of(model)
    losses = [loss_fn(model(*batch.inputs), batch.target).item() for batch in batches()]
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


NARROW = [torch.bfloat16, torch.float16]
EVERY = [torch.float32, torch.float64, *NARROW]


@pytest.mark.parametrize("dtype", EVERY)
def test_a_right_step_names_nothing_in_any_precision(dtype: torch.dtype) -> None:
    """Added in another order, so that not all bits are those of the reference."""
    assert attributed(lambda rows: rows.reverse(), dtype=dtype).right


@pytest.mark.parametrize("dtype", EVERY)
def test_a_dropped_microbatch_is_named_in_any_precision(dtype: torch.dtype) -> None:
    cause = only(attributed(of_stage(1, 2, 0.0), dtype=dtype))
    assert (cause.kind, cause.rank, cause.stage, cause.microbatches) == ("dropped", 1, 1, (2,))


@pytest.mark.parametrize("dtype", EVERY)
def test_a_doubled_microbatch_is_named_in_any_precision(dtype: torch.dtype) -> None:
    cause = only(attributed(of_stage(2, 1, 2.0), dtype=dtype))
    assert (cause.kind, cause.stage, cause.microbatches) == ("doubled", 2, (1,))


def everything(factor: float) -> Change:
    return lambda rows: [row.update({site: g * factor for site, g in row.items()}) for row in rows] and None


@pytest.mark.parametrize("dtype", EVERY)
def test_a_factor_of_all_gradients_is_one_factor_however_coarse_the_type(dtype: torch.dtype) -> None:
    """As of a loss that counts padding. Each coefficient alone comes out a little different."""
    cause = only(attributed(everything(0.8), dtype=dtype))
    assert (cause.kind, cause.stage, cause.microbatches) == ("scale", None, ())
    assert cause.factor == pytest.approx(0.8, rel=1e-2 if dtype == torch.bfloat16 else 1e-3)
    assert cause.detail == "0.8 times"


def test_what_is_all_zero_is_zero_and_in_no_proportion() -> None:
    """Microbatches differ in their tokens: zero is in proportion to these as well."""

    def cleared(gradients: dict[Site, Gradient]) -> None:
        gradients.update({site: torch.zeros(g.shape) for site, g in gradients.items() if g is not None and site[0] < 2})

    cause = only(attributed(after=cleared))
    assert (cause.kind, cause.stage) == ("zero", 1)


def by_tokens(rows: Rows) -> None:
    mean = sum(batch.tokens for batch in batches()) / COUNT
    for batch, row in zip(batches(), rows, strict=True):
        row.update({site: gradient * (batch.tokens / mean) for site, gradient in row.items()})


@pytest.mark.parametrize("dtype", EVERY)
def test_weights_by_tokens_are_told_in_any_precision(dtype: torch.dtype) -> None:
    cause = only(attributed(by_tokens, dtype=dtype))
    assert cause.kind == "unequal-weights"
    golden(cause.detail)


def test_an_output_gradient_that_was_added_to_another_is_no_exchange() -> None:
    """As in a receive buffer whose gradient nobody cleared."""

    def change(rows: Rows) -> None:
        rows.append(met(2, 0))

    found = attributed(change)
    cause = only(found)
    assert (cause.kind, cause.stage, cause.microbatches) == ("extra-term", 0, (2,))
    golden(cause.detail)
    assert not {"doubled", "swapped-activations", "swapped-gradients"} & {
        k for one in found.ruled_out for k in one.kinds
    }


def test_an_output_gradient_in_place_of_another_is_an_exchange() -> None:
    def change(rows: Rows) -> None:
        of_stage(0, 2, 0.0)(rows)
        rows.append(met(2, 0))

    found = attributed(change)
    assert [cause.kind for cause in found.causes] == ["swapped-gradients"]
    assert not found.unknown


def test_what_is_not_finite_is_named_at_the_stage_from_which_it_flowed_back() -> None:
    def change(gradients: dict[Site, Gradient]) -> None:
        for site in (max(gradients), *(site for site in gradients if site[0] < 2)):
            gradients[site] = torch.full_like(gradients[site], float("nan"))  # type: ignore[arg-type]

    assert (only(attributed(after=change)).kind, only(attributed(after=change)).stage) == ("not-finite", 2)


def test_a_factor_that_several_numbers_explain_names_them_all() -> None:
    golden(only(attributed(after=times(2, 3.0))).detail)


def times(stage: int, factor: float) -> Callable[[dict[Site, Gradient]], None]:
    def change(gradients: dict[Site, Gradient]) -> None:
        gradients.update({site: g * factor for site, g in gradients.items() if g is not None and site[0] == stage})

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


@pytest.mark.parametrize("dtype", EVERY)
def test_one_parameter_that_counts_a_microbatch_twice(dtype: torch.dtype) -> None:
    cause = only(attributed(loses(UP, 3, times=2.0), dtype=dtype))
    assert (cause.kind, cause.microbatches, cause.parameter) == ("doubled", (3,), UP[1])


@pytest.mark.parametrize("dtype", EVERY)
def test_one_parameter_that_is_assigned_and_not_added_up(dtype: torch.dtype) -> None:
    cause = only(attributed(loses(UP, 0, 1, 2), dtype=dtype))
    assert (cause.kind, cause.microbatches, cause.parameter) == ("dropped", (0, 1, 2), UP[1])


def test_parameters_that_lost_the_same_are_named_together() -> None:
    def change(rows: Rows) -> None:
        loses(UP, 1)(rows)
        loses(BIAS, 1)(rows)

    cause = only(attributed(change))
    assert (cause.kind, cause.parameter, cause.detail) == ("dropped", BIAS[1], f"also: {UP[1]}")


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
