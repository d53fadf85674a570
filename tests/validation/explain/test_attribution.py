"""Causes from final gradients alone: a correct update names nothing, a wrong one its faults, whatever the precision."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.cause import Cell
from pipeproof.explain.atoms import Update
from pipeproof.explain.attribution import Attribution, attribute, attribute_coarsely
from pipeproof.reference.data import IGNORED, Batch
from pipeproof.reference.step import Loss, Site
from pipeproof.reference.traced import Traced
from tests.support.golden import golden

COUNT, WIDTH, CLASSES, VOCABULARY = 4, 12, 5, 11
Rows = list[dict[Site, Tensor]]  # what each microbatch gives
Sums = dict[Site, Tensor]
Change = Callable[[Rows], Any]  # and what it returns is done to the sums


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


def gradients_of(model: nn.Module) -> dict[Site, Tensor]:
    return {(OWNER[name[0]], name): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def summed(rows: Sequence[dict[Site, Tensor]]) -> Sums:
    """Added up as a step does, in the type of the gradients."""
    total = {site: torch.zeros_like(gradient) for site, gradient in rows[0].items()}
    for row in rows:
        for site, gradient in row.items():
            total[site] += gradient
    return total


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
        rows.append(gradients_of(model))
    loss = Loss(loss_fn, COUNT)
    return rows, Traced(model, held=rows[0].keys(), batches=batches(), loss=loss, losses=losses, ends={})


def nothing(found: Any) -> None:
    """Is right."""


def attributed(change: Change = nothing, dtype: torch.dtype = torch.float32) -> Attribution:
    """The attribution of a step that gets ``change`` done to what each microbatch gives, or to the sums."""
    right, traced = known(dtype)
    rows = [{site: gradient.clone() for site, gradient in row.items()} for row in right]
    after = change(rows)
    observed = summed(rows)
    for one in after or ():
        one(observed)
    return attribute(Update(observed, summed(right), traced, placement=(0, 1, 2)))


# What is done to each microbatch's part.


def factors(stages: Iterable[int], *each: float) -> Change:
    """How often each microbatch is in the sums of ``stages``."""

    def change(rows: Rows) -> None:
        for row, factor in zip(rows, each, strict=True):
            row.update({site: gradient * factor for site, gradient in row.items() if site[0] in stages})

    return change


def loses(site: Site, *microbatches: int, times: float = 0.0) -> Change:
    def change(rows: Rows) -> None:
        for microbatch in microbatches:
            rows[microbatch][site] = rows[microbatch][site] * times

    return change


def all_of(*changes: Change) -> Change:
    return lambda rows: [after for one in changes for after in one(rows) or ()]


def met(i: int, j: int) -> dict[Site, Tensor]:
    """What stage 0 gets where microbatch i's activation meets the output gradient of microbatch j."""
    model = build(torch.float32)
    first, rest = model[:2], model[2:]
    leaf = first(*batches()[j].inputs).detach().requires_grad_()
    (loss_fn(rest(leaf), batches()[j].target) / COUNT).backward()
    assert leaf.grad is not None
    model.zero_grad()
    first(*batches()[i].inputs).backward(leaf.grad)
    return gradients_of(first)


def met_beside(rows: Rows) -> None:
    """As in a receive buffer whose gradient is never cleared."""
    rows.append(met(2, 0))


def one_late(rows: Rows) -> None:
    """Output gradients came one late: the first activations met none, and the last one is of no loss."""
    for m, row in enumerate(rows):
        row |= met(m, m - 1) if m else {site: torch.zeros_like(g) for site, g in row.items() if site[0] == 0}


def targets_late(rows: Rows) -> None:
    model = build(torch.float32)
    for m in range(1, COUNT):
        model.zero_grad()
        (loss_fn(model(*batches()[m].inputs), batches()[m - 1].target) / COUNT).backward()
        rows[m] = gradients_of(model)


def but_for_norm(rows: Rows) -> None:
    """As where weight gradients that were put off were never made, and a norm's was not put off."""
    rows[3].update({site: g * 0 for site, g in rows[3].items() if site[0] == 1 and "norm" not in site[1]})


# What is done to sums.


def of_sums(after: Callable[[Any], object]) -> Change:
    return lambda rows: [after]


def altered(site: Site, change: Callable[[Tensor], object]) -> Change:
    return of_sums(lambda sums: change(sums[site]))


def times(factor: float, *stages: int, name: str = "") -> Change:
    """So many times the gradients of ``stages``, or of the parameter ``name``."""
    return of_sums(lambda sums: [g.mul_(factor) for (s, own), g in sums.items() if s in stages and name in ("", own)])


def noise(size: float, lines: int = WIDTH) -> Callable[[Tensor], object]:
    """Noise of this size, in some lines."""
    draw = torch.Generator().manual_seed(2)
    return lambda g: g[:lines].add_(size * g.std() * torch.randn(g[:lines].shape, generator=draw))


def exchanged(part: str) -> Change:
    def after(sums: Sums) -> None:
        for name in [name for stage, name in sums if stage == 1 and part in name]:
            other = 2, name.replace("2.", "3.", 1)
            sums[1, name], sums[other] = sums[other], sums[1, name]

    return of_sums(after)


# They flow back from the last stage.
nans = of_sums(lambda sums: [sums[site].fill_(torch.nan) for site in sums if site[0] < 2 or site == max(sums)])
noisy = [of_sums(lambda sums, k=k: [noise(9.0)(g) for (stage, _), g in sums.items() if stage == k]) for k in range(3)]
none = of_sums(lambda sums: sums.update(dict.fromkeys(sums)))

TOKENS = [1.6, 1.2, 0.8, 0.4]  # of a batch, for each of the mean
UP, BIAS, DOWN, TABLE = (1, "2.up.weight"), (1, "2.up.bias"), (1, "2.down.weight"), (0, "0.weight")
FINE, COARSE, BF16 = [torch.float32], [torch.float32, torch.bfloat16], [torch.bfloat16]
EVERY = [*COARSE, torch.float64, torch.float16]
Told = tuple[str, int | None, tuple[int, ...], str | None, Any]  # kind, stage, microbatches, parameter and factor


def one(kind: str, stage: int | None, *microbatches: int, of: str | None = None, factor: float | None = None) -> Told:
    return kind, stage, microbatches, of, factor if factor is None else pytest.approx(factor, rel=FACTOR)


FACTOR = 2e-3  # as in bf16; digits of others are in the texts
FAULTS: dict[str, tuple[list[torch.dtype], Change, list[Told]]] = {
    "dropped": (EVERY, factors([1], 1, 1, 0, 1), [one("dropped", 1, 2)]),
    "doubled": (EVERY, factors([2], 1, 2, 1, 1), [one("doubled", 2, 1, factor=2)]),
    "by tokens": (EVERY, factors(range(3), *TOKENS), [one("unequal-weights", None)]),
    "twice in one parameter": (EVERY, loses(UP, 3, times=2.0), [one("doubled", 1, 3, of=UP[1], factor=2)]),
    "assigned and not added up": (EVERY, loses(UP, 0, 1, 2), [one("dropped", 1, 0, 1, 2, of=UP[1])]),
    **{
        f"{site[1]} lost one": (EVERY, loses(site, 1), [one("dropped", site[0], 1, of=site[1])])
        for site in (UP, BIAS, TABLE, (1, "2.norm.weight"))
    },
    # As of a loss that counts padding. Each coefficient alone comes out a little different.
    "a factor": (EVERY, factors(range(3), *[0.8] * COUNT), [one("scale", None, factor=0.8)]),
    "zero": (FINE, times(0, 0, 1), [one("zero", 1)]),  # in proportion to tokens as well
    "not finite": (FINE, nans, [one("not-finite", 2, of="4.weight")]),
    "several numbers explain it": (FINE, times(3, 2), [one("scale", 2, factor=3)]),
    "another output gradient beside": (FINE, met_beside, [one("extra-term", 0, 2)]),
    "two parameters": (FINE, all_of(loses(UP, 1), loses(BIAS, 1)), [one("dropped", 1, 1, of=BIAS[1])]),
    "several factors": (FINE, factors([1], 0.1, 0.7, 1.3, 1.0), [one("scale", 1, 0, 1, 2)]),
    "all but one": (FINE, factors([1], 2, 2, 2, 1), [one("scale", 1, factor=2)]),
    # As where gradients are not cleared after each was added to a sum.
    "more and more often": (FINE, factors([1], 1, 2, 3, 4), [one("doubled", 1, 1, 2, 3)]),
    "a whole number among factors": (FINE, factors([1], 0.7, 0.8, 1.3, 2), [one("scale", 1, 0, 1, 2, 3)]),
    "several stages": (FINE, factors([0, 2], 1, 0, 1, 1), [one("dropped", None, 1)]),
    "one parameter": (FINE, times(1 / 3, 1, name=BIAS[1]), [one("scale", 1, of=BIAS[1], factor=1 / 3)]),
    **{
        f"a little off, {factor}": (FINE, factors([1], *[factor] * COUNT), [one("scale", 1, factor=factor)])
        for factor in (1.0001, 1.001, 1.01, 1.1, 0.999)
    },
    **{  # what came in with the output gradient is named there
        f"down from stage 1, {factor}": (FINE, factors([0, 1], *[factor] * COUNT), [one("scale", 1, factor=factor)])
        for factor in (0.999, 0.5)
    },
    "rows are zero": (COARSE, altered(UP, lambda g: g[4:8].zero_()), [one("zero", 1, of=UP[1])]),
    "columns are zero": (COARSE, altered(UP, lambda g: g[:, :3].zero_()), [one("zero", 1, of=UP[1])]),
    "rows of a table are zero": (COARSE, altered(TABLE, lambda g: g[2:4].zero_()), [one("zero", 0, of=TABLE[1])]),
    "rows are doubled": (COARSE, altered(UP, lambda g: g[4:8].mul_(2)), [one("scale", 1, of=UP[1], factor=2)]),
    "rows are negative": (COARSE, altered(UP, lambda g: g[4:8].neg_()), [one("sign", 1, of=UP[1], factor=-1)]),
    "rows in another order": (FINE, altered(UP, lambda g: g.copy_(g.roll(6, 0))), [one("altered", 1, of=UP[1])]),
    "rows are of others": (FINE, altered(UP, lambda g: g[:4].copy_(g[4:8].clone())), [one("misplaced", 1, of=UP[1])]),
    **{f"noise, {size}": (COARSE, altered(UP, noise(size)), []) for size in (0.03, 0.1, 0.3, 1.0)},
    "noise in some rows": (FINE, altered(UP, noise(1.0, 3)), []),
    # As where one output gradient came in place of others: a bias shows that as counts, a weight as nothing known.
    "counted beside noise": (FINE, all_of(loses(BIAS, 1), altered(UP, noise(1.0))), []),
    "a multiple beside noise": (
        FINE,
        all_of(altered(UP, noise(9.0)), altered(DOWN, noise(9.0)), times(0.25, 1, name=BIAS[1])),
        [],
    ),
    **{
        f"exchanged {what or 'stages'}": (
            COARSE,
            exchanged(what),
            [one("misplaced", k, of=f"{k + 1}.{name}") for k in (2, 1)],
        )
        for what, name in (("norm.weight", "norm.weight"), ("", "down.bias"))
    },
    "an output gradient in place of another": (
        FINE,
        all_of(factors([0], 1, 1, 0, 1), met_beside),
        [one("swapped-gradients", 0, 2)],
    ),
    "output gradients one late": (FINE, one_late, [one("swapped-gradients", 0, 1, 2, 3), one("dropped", 0, 0)]),
    "targets one late in a halved stage": (
        FINE,
        all_of(targets_late, factors([2], *[0.5] * COUNT)),
        [one("swapped-data", None, 1, 2, 3), one("scale", 2, factor=0.5)],
    ),
    "all but a norm lost one": (FINE, but_for_norm, [one("dropped", 1, 3)]),
    "a parameter lost more than its stage": (
        FINE,
        all_of(factors([1], 1, 1, 1, 0), loses(UP, 1)),
        [one("dropped", 1, 3), one("dropped", 1, 1, 3, of=UP[1])],
    ),
    "dropped and doubled": (FINE, factors([1], 1, 0, 1, 2), [one("dropped", 1, 1), one("doubled", 1, 3, factor=2)]),
    "from the loss down": (
        FINE,
        all_of(*(factors([stage], *(m != stage for m in range(COUNT))) for stage in range(3))),
        [one("dropped", stage, stage) for stage in (2, 1, 0)],
    ),
    # Also where rounding hides each microbatch.
    "about 0.97": (BF16, times(0.97, 0, 1, 2), [one("scale", None, factor=0.97)]),
    # As where each stage is clipped by its own norm: near a simple factor, and not taken for it.
    "near a half in bf16": (BF16, times(0.4936, 1), [one("scale", 1, factor=0.4936)]),
    "a half in bf16": (BF16, times(0.5, 1), [one("scale", 1, factor=0.5)]),
    **{
        f"about {factor}": (BF16, factors(range(3), *[factor] * COUNT), [one("scale", None, factor=factor)])
        for factor in (1.05, 1.25, 4.0)
    },
}
CASES = {f"{title}, {str(dtype)[6:]}": (title, dtype) for title, (some, *_) in FAULTS.items() for dtype in some}


@pytest.mark.parametrize("case", CASES)
def test_faults_are_named_with_their_places(case: str) -> None:
    title, dtype = CASES[case]
    _, change, expected = FAULTS[title]
    found = attributed(change, dtype)
    assert [(c.kind, c.stage, c.microbatches, c.parameter, c.factor) for c in found.causes] == expected, found.unknown
    assert bool(found.unknown) == (not expected)
    assert all(cause.rank == cause.stage for cause in found.causes)
    if texts := [one for one in (*(cause.detail for cause in found.causes), *found.unknown) if one]:
        golden("\n".join(texts), numbers=not title.startswith("about"))


@pytest.mark.parametrize("dtype", EVERY)
def test_a_right_step_names_nothing_in_any_precision(dtype: torch.dtype) -> None:
    """Added in another order, so that not all bits are those of the reference."""
    assert attributed(lambda rows: rows.reverse(), dtype=dtype).right


def test_what_some_stages_show_is_not_everywhere_where_the_last_is_unknown() -> None:
    found = attributed(all_of(times(3, 0, 1), noisy[2]))
    assert [(one.kind, one.stages, one.factor, bool(found.unknown)) for one in found.causes] == [
        ("scale", (0, 1), 3, True)
    ]


def test_what_passes_beside_what_is_wrong_is_right() -> None:
    right, traced = known(torch.bfloat16)
    expected, observed = summed(right), summed(right)
    noise(0.1)(observed[UP])
    observed[BIAS].zero_()
    update = Update(observed, expected, traced, placement=(0, 1, 2))
    assert any(UP[1] in line for line in attribute(update).unknown)
    found = attribute(replace(update, passing={UP}))
    assert ([(cause.kind, cause.parameter) for cause in found.causes], found.unknown) == ([("zero", BIAS[1])], ())


def test_a_cell_has_digits_enough_to_be_the_same_number_in_every_stage() -> None:
    assert (str(Cell(0.5625001)), str(Cell(0.5624999)), str(Cell(1.125))) == ("0.5625", "0.5625", "1.125")


def cells(*each: float) -> tuple[Cell, ...]:
    return tuple(map(Cell, each))


RIGHT = cells(*[1.0] * COUNT)
ROWS: dict[str, tuple[Change, Any]] = {
    "two of one stage": (factors([1], 1, 0, 1, 2), (RIGHT, cells(1, 0, 1, 2), RIGHT)),
    "zero is known": (factors(range(3), *[0] * COUNT), (cells(0, 0, 0, 0),) * 3),
    "a stage that nothing explains": (noisy[1], (RIGHT, (Cell(None),) * COUNT, RIGHT)),
    "no backward ran": (none, None),
    "lost in one stage": (factors([1], 1, 0, 1, 1), (RIGHT, cells(1, 0, 1, 1), RIGHT)),
    "lost everywhere": (factors(range(3), 1, 0, 1, 1), (cells(1, 0, 1, 1),) * 3),
    "all but a norm": (but_for_norm, (RIGHT, cells(1, 1, 1, 0), RIGHT)),
    "one activation met two": (met_beside, ((*RIGHT[:2], Cell(1.0, ((0, 1.0),)), RIGHT[3]), RIGHT, RIGHT)),
}


@pytest.mark.parametrize("title", ROWS)
def test_known_coefficients_rule_out_what_they_leave_no_room_for(title: str) -> None:
    """What is not known of every stage rules nothing out; of a lost microbatch neither partner nor data is known."""
    change, rows = ROWS[title]
    found = attributed(change)
    assert (None if found.cells is None else found.cells.rows) == rows
    golden("\n".join(map(str, found.ruled_out)) or "nothing")


@pytest.mark.parametrize("factor", [-3.0, 0.25])
def test_gradients_that_the_microbatches_do_not_add_up_to_are_not_taken_apart(factor: float) -> None:
    right, traced = known(torch.float32)
    other = {site: factor * gradient if site[0] == 1 else gradient for site, gradient in summed(right).items()}
    found = attribute(Update(other, other, traced, placement=(0, 1, 2)))
    assert not found.causes
    golden("\n".join(found.unknown))


@pytest.mark.parametrize(
    ("factor", "flipped", "kinds"), [(3.0, False, ["scale"]), (1.0, False, None), (3.0, True, None)]
)
def test_gradients_computed_in_a_narrower_type_are_taken_apart_as_coarsely(
    factor: float, flipped: bool, kinds: list[str] | None
) -> None:
    """Where that explains all: not if one stage's elements are in another order."""
    right, traced = known(torch.float32)
    expected = summed(right)
    observed = {site: (factor * g).bfloat16().float() * (1 + 2**-9) for site, g in expected.items()}
    observed = {site: g.flip(0) if flipped and not site[0] else g for site, g in observed.items()}
    update = Update(observed, expected, traced, placement=(0, 1, 2))
    assert attribute(update).unknown
    assert attribute_coarsely(update) is None  # in no type that anyone knows of
    found = attribute_coarsely(replace(update, computed_in=lambda: torch.bfloat16))
    assert (None if found is None else [cause.kind for cause in found.causes]) == kinds
