"""Faults of several coefficients, stages and parameters: told together, each once, and only as far as is known."""

import pytest
import torch
from test_attribution import COUNT, Rows, attributed, batches, build, factors, loss_fn, met, of_stage, only, site_of

from pipeproof.core.cause import Cell
from pipeproof.reference.step import Gradient, Site
from tests.support.golden import golden


def test_what_was_dropped_and_what_was_doubled_hold_together() -> None:
    found = attributed(factors((1,), 1.0, 0.0, 1.0, 2.0))
    assert [(one.kind, one.microbatches, one.instead) for one in found.causes] == [
        ("dropped", (1,), ()),
        ("doubled", (3,), ()),
    ]


@pytest.mark.parametrize("factor", [1.05, 1.25])
def test_a_factor_of_coarse_gradients_is_told_as_exactly_as_rounding_leaves_it(factor: float) -> None:
    cause = only(attributed(factors((0, 1, 2), *[factor] * COUNT), dtype=torch.bfloat16))
    assert float(cause.detail.removesuffix(" times")) == pytest.approx(factor, rel=0.02)


def test_a_cell_has_digits_enough_to_be_the_same_number_in_every_stage() -> None:
    assert (str(Cell(0.5625001)), str(Cell(0.5624999)), str(Cell(1.125))) == ("0.5625", "0.5625", "1.125")


def test_faults_are_told_from_the_loss_down_as_gradients_flow() -> None:
    def change(rows: Rows) -> None:
        for stage in range(3):
            of_stage(stage, stage, 0.0)(rows)

    found = attributed(change)
    assert [(one.stage, one.microbatches) for one in found.causes] == [(2, (2,)), (1, (1,)), (0, (0,))]


def test_one_wrong_parameter_that_is_a_multiple_names_nothing_where_others_are_like_nothing_known() -> None:
    def spoil(gradients: dict[Site, Gradient]) -> None:
        draw = torch.Generator().manual_seed(0)
        for site in ((1, "2.up.weight"), (1, "2.down.weight")):
            gradient = gradients[site]
            assert gradient is not None
            gradient += torch.randn(gradient.shape, generator=draw)
        alone = gradients[1, "2.up.bias"]
        assert alone is not None
        alone *= 0.25

    found = attributed(after=spoil)
    assert found.causes == ()
    assert any("2.up.weight" in line for line in found.unknown)


def test_the_table_has_a_row_for_each_stage() -> None:
    found = attributed(factors((1,), 1.0, 0.0, 1.0, 2.0))
    assert found.cells is not None
    right = (Cell(1.0),) * COUNT
    assert found.cells.rows == (right, (Cell(1.0), Cell(0.0), Cell(1.0), Cell(2.0)), right)


def test_of_a_stage_that_nothing_explains_the_table_knows_nothing() -> None:
    def spoil(gradients: dict[Site, Gradient]) -> None:
        draw = torch.Generator().manual_seed(0)
        for site, gradient in gradients.items():
            if site[0] == 1 and gradient is not None:
                gradient += torch.randn(gradient.shape, generator=draw)

    found = attributed(after=spoil)
    assert found.cells is not None
    assert found.cells.rows[1] == (Cell(None),) * COUNT
    assert not found.ruled_out, "what is not known of every stage rules nothing out"


def test_where_no_backward_ran_nothing_is_known_of_coefficients() -> None:
    def lose(gradients: dict[Site, Gradient]) -> None:
        gradients.update(dict.fromkeys(gradients))

    found = attributed(after=lose)
    assert [(one.kind, one.stage) for one in found.causes] == [("missing", None)]
    assert (found.cells, found.ruled_out) == (None, ())


def test_zero_is_a_coefficient_that_is_known() -> None:
    found = attributed(factors((0, 1, 2), *[0.0] * COUNT))
    assert only(found).kind == "zero"
    assert found.cells is not None
    assert all(cell == Cell(0.0) for row in found.cells.rows for cell in row)
    assert not {"dropped", "scale"} & {kind for one in found.ruled_out for kind in one.kinds}


def test_coefficients_that_are_known_rule_out_what_they_leave_no_room_for() -> None:
    found = attributed(factors((1,), 1.0, 0.0, 1.0, 1.0))
    cleared = {kind: one.compared for one in found.ruled_out for kind in one.kinds}
    assert {"doubled", "swapped-gradients", "stale-gradient", "scale"} <= cleared.keys()
    assert {
        cleared.pop(kind) for kind in ("swapped-activations", "swapped-gradients", "swapped-data", "mispaired")
    } == {3 * COUNT - 1}, "one has an unknown partner"
    assert set(cleared.values()) == {3 * COUNT}
    assert not {"dropped", "zero"} & cleared.keys()
    found = attributed(factors((0, 1, 2), 1.0, 0.0, 1.0, 1.0))
    assert not [one for one in found.ruled_out if "swapped-data" in one.kinds], "nor of its data"
    golden("\n".join(sorted(one.evidence for one in found.ruled_out)))


def test_of_output_gradients_that_came_one_late_the_first_microbatch_is_dropped() -> None:
    """Its activations met none, and the last output gradient is nobody's loss."""

    def change(rows: Rows) -> None:
        for m, row in enumerate(rows):
            row |= met(m, m - 1) if m else {site: torch.zeros_like(g) for site, g in row.items() if site[0] == 0}

    found = attributed(change)
    assert [(one.kind, one.microbatches) for one in found.causes] == [
        ("swapped-gradients", (1, 2, 3)),
        ("dropped", (0,)),
    ]


def test_targets_that_came_one_late_are_told_of_the_same_microbatches_where_a_stage_is_halved() -> None:
    def change(rows: Rows) -> None:
        model = build(torch.float32)
        for m in range(1, COUNT):
            model.zero_grad()
            (loss_fn(model(*batches()[m].inputs), batches()[m - 1].target) / COUNT).backward()
            rows[m] = {site_of(name): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        for m in range(COUNT):
            of_stage(2, m, 0.5)(rows)

    found = attributed(change)
    assert [(one.kind, one.microbatches) for one in found.causes] == [("swapped-data", (1, 2, 3)), ("scale", ())]
