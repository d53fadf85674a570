"""Which atoms a tensor is made of, and when no combination of them will do."""

import torch
from torch import Tensor

from pipeproof.explain.atoms import Term
from pipeproof.explain.solver import fit, of_noise, select

COUNT, SIZE, LIMIT = 12, 60, 1e-6


def atoms(size: int = SIZE) -> Tensor:
    return torch.randn(COUNT, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def plain_selection(observed: Tensor, rows: Tensor, *, goal: float, most: int) -> list[int]:
    """Of all atoms, the one with which least squares leaves the least, again and again."""
    picked: list[int] = []
    left = observed
    while len(picked) < most and left.norm() > goal:
        rests: dict[int, Tensor] = {}
        for k in sorted(set(range(len(rows))) - set(picked)):
            chosen = rows[[*picked, k]].T
            rests[k] = observed - chosen @ torch.linalg.lstsq(chosen, observed[:, None]).solution[:, 0]
        best = min(rests, key=lambda k: rests[k].norm().item())
        picked, left = [*picked, best], rests[best]
    return picked


def test_each_step_picks_the_atom_that_leaves_the_least() -> None:
    rows = atoms()
    rows[5] = rows[4] + 1e-3 * rows[5]  # hardly told apart
    draw = torch.Generator().manual_seed(1)
    for _ in range(5):
        observed = torch.randn(SIZE, generator=draw, dtype=torch.float64) + 3 * rows[4] - rows[9]
        picked = select(observed, rows, goal=0.0, most=8)
        assert picked == plain_selection(observed, rows, goal=0.0, most=8)


def test_selection_ends_where_nothing_is_left() -> None:
    rows = atoms()
    observed = 2 * rows[3] - rows[7] + 0.5 * rows[11]
    assert sorted(select(observed, rows, goal=1e-9, most=COUNT)) == [3, 7, 11]
    assert select(torch.zeros(SIZE, dtype=torch.float64), rows, goal=0.0, most=COUNT) == []


def test_atoms_that_are_not_new_are_not_picked() -> None:
    rows = atoms()[:2].repeat(3, 1)
    picked = select(torch.ones(SIZE, dtype=torch.float64), rows, goal=0.0, most=6)
    assert {k % 2 for k in picked} == {0, 1}
    assert len(picked) == 2


def test_what_atoms_do_not_make_is_hopeless_and_rounding_is_not() -> None:
    rows, noise = atoms(), torch.randn(SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    made = rows.sum(dim=0)
    assert not fit(made, rows, LIMIT).hopeless(LIMIT)
    assert not fit(made + LIMIT / 2 * noise, rows, LIMIT).hopeless(LIMIT)
    assert fit(made + 0.1 * noise, rows, LIMIT).hopeless(LIMIT)
    assert fit(made, rows[1:], LIMIT).hopeless(LIMIT)


def test_of_no_atoms_at_all_what_is_there_is_left() -> None:
    nothing, some = torch.zeros(SIZE, dtype=torch.float64), torch.ones(SIZE, dtype=torch.float64)
    assert not fit(nothing, atoms()[:0], LIMIT, size=1.0).hopeless(LIMIT)
    assert fit(some, atoms()[:0], LIMIT, size=1.0).hopeless(LIMIT)


def test_coefficients_that_rounding_may_have_made_are_noise() -> None:
    own, other, wrong = Term("pair", 0, 0), Term("pair", 1, 1), Term("pair", 0, 1)
    bounds = dict.fromkeys((own, other, wrong), 0.04)
    assert not of_noise({own: 1.0, other: 1.0, wrong: 0.0}, bounds)
    assert of_noise({own: 1.036, other: 0.986}, bounds)
    assert not of_noise({own: 1.036, other: 0.74}, bounds)  # something is less: the other may be more
    assert of_noise({own: 0.5, other: 1.0, wrong: -0.03}, bounds)
    assert not of_noise({own: 0.5, other: 1.0, wrong: 0.5}, bounds)
    assert not of_noise({own: 1.0, wrong: 0.02}, {wrong: float("inf")})  # undecided: that is said
