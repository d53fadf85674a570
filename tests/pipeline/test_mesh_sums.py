"""Sums over a mesh, in symbols: what is right is proven, each law can be broken alone, and numbers agree."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.pipeline.mesh import Groups, Mesh, Sum, Tied
from pipeproof.pipeline.mesh_file import read_axes
from pipeproof.pipeline.mesh_sums import LAWS, Sums, violations
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules import build
from tests.support.golden import golden
from tests.support.mesh_numbers import agrees, rows_kept

PLAIN, TWO_STAGES, ONE = (build(name, ranks=2, microbatches=2) for name in ("1f1b", "zb-v", "1f1b"))
AXES = (
    {"pp": 2},
    {"dp": 2, "pp": 2},
    {"pp": 2, "dp": 3},
    {"pp": 2, "tp": 2},
    {"dp": 2, "pp": 2, "tp": 2},
    {"pp": 2, "cp": 2, "fsdp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "pp": 2, "tp": 2},
)


def mesh(schedule: Schedule = PLAIN, /, *, rows: int = 0, tied: Sequence[Tied] = (), **axes: int) -> Mesh:
    return Mesh.of(axes, schedule, rows=rows).with_tied(tied, schedule)


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("schedule", [PLAIN, TWO_STAGES], ids=["1f1b", "zb-v"])
def test_what_axes_make_of_it_is_right(axes: dict[str, int], schedule: Schedule) -> None:
    right = mesh(schedule, tied=[Tied((0, schedule.n_stages - 1))], **axes)
    assert violations(right, schedule) == ()
    assert agrees(right, schedule)


def test_a_mean_of_equal_means_changes_nothing() -> None:
    twice = replace(DATA, sums=(Sum("dp", 2), Sum("dp", 2)))
    assert violations(twice, PLAIN) == ()
    assert agrees(twice, PLAIN)


def test_each_rank_of_a_large_job_is_proven() -> None:
    large = build("interleaved", ranks=8, virtual=4, microbatches=32)
    assert violations(mesh(large, dp=16, pp=8, tp=4, tied=[Tied((0, 31))]), large) == ()


@pytest.mark.parametrize("axes", ["tp=2,cp=2,dp=2,pp=2", "pp=2,dp_replicate=2,dp_shard=2,cp=2,tp=2"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_axes_in_the_order_of_frameworks_are_right(axes: str, name: str) -> None:
    """As Megatron and as torchtitan number ranks, with stages of any placement."""
    schedule = build(name, ranks=2, microbatches=4)
    assert violations(mesh(schedule, **read_axes(axes)), schedule) == ()


def test_optimizers_may_each_hold_a_part_of_a_gradient_that_all_have() -> None:
    right = replace(mesh(dp=2, pp=2, rows=4), holds=((0, 2), (0, 2), (2, 4), (2, 4)))
    assert violations(right, PLAIN) == ()


def test_rows_that_are_kept_of_rows_that_are_kept() -> None:
    nested = replace(
        mesh(dp=2, fsdp=2, pp=2, rows=4),
        sums=(Sum("fsdp", 2, ((0, 2), (2, 4))), Sum("dp", 2, ((0, 1), (1, 2)))),
        holds=((0, 1), (0, 1), (2, 3), (2, 3), (1, 2), (1, 2), (3, 4), (3, 4)),
    )
    assert violations(nested, PLAIN) == ()
    assert agrees(nested, PLAIN)


def test_who_keeps_no_rows_may_hold_none_anywhere() -> None:
    one = build("gpipe", ranks=1, microbatches=2)
    right = mesh(one, fsdp=4, pp=1, rows=3)
    assert violations(replace(right, holds=((0, 1), (1, 2), (2, 3), (0, 0))), one) == ()
    assert violations(replace(right, holds=((0, 1), (1, 2), (0, 0), (2, 3))), one) != ()


def test_sums_of_the_same_are_one_sum() -> None:
    """So that two axes which sum take no longer than one."""
    axes = {"fsdp": 32, "cp": 4, "pp": 2}
    found = Sums(mesh(PLAIN, **axes), PLAIN)
    assert len(found.totals) == 256 + 8 + 2  # of each rank its own; of each group of fsdp; of each stage
    assert sum(map(len, found.totals)) == 3 * 256


def test_no_sum_at_all_on_a_large_mesh_is_told_soon() -> None:
    large = replace(mesh(PLAIN, dp=4096, pp=2), sums=(), divisor=1)
    golden(str(violations(large, PLAIN)[-1]))


def grouped(right: Mesh, **groups: Groups) -> Mesh:
    return replace(right, groups={**right.groups, **groups})


def given_to(right: Mesh, *shares: Sequence[int]) -> Mesh:
    return replace(right, shares=[np.array(one) for one in shares])


DATA, PARTS, SHARDS = mesh(dp=2, pp=2), mesh(pp=2, tp=2), mesh(fsdp=2, pp=2, rows=5)
SPECIMENS = {  # a mesh that breaks one law
    "a rank in two groups, and one in none": grouped(DATA, dp=((0, 2), (0, 3))),
    "a rank that is not there": grouped(mesh(pp=2), pp=((0, 1, 7),)),
    "replicas in groups of one": grouped(mesh(dp=2, pp=2), dp=((0,), (2,), (1, 3))),
    "stages of one pipeline with the data of two replicas": given_to(DATA, (0, 2), (1, 3), (1, 3), (0, 2)),
    "parts of a stage that take microbatches in another order": given_to(PARTS, (0, 1), (1, 0), (0, 1), (1, 0)),
    "parts of two stages, each of which has all its parts": grouped(PARTS, tp=((0, 3), (2, 1))),
    "pieces that take microbatches in another order": given_to(mesh(pp=2, cp=2), (0, 1), (1, 0), (0, 1), (1, 0)),
    "pieces of two replicas": grouped(mesh(dp=2, pp=2, cp=2), cp=((0, 5), (4, 1), (2, 7), (6, 3))),
    "a replica that gets another's microbatches": given_to(DATA, *[(0, 2)] * 4),
    "a microbatch that is none": given_to(mesh(pp=2), (0, 9), (0, 9)),
    "a sum that divides by too much": replace(DATA, sums=(Sum("dp", 4),)),
    "a sum twice": replace(DATA, sums=(Sum("dp", 2), Sum("dp", 1))),
    "no sum over pieces": replace(mesh(pp=2, cp=2), sums=(), divisor=1),
    "groups of replicas that mix stages": grouped(DATA, dp=((0, 3), (1, 2))),
    "groups of replicas that mix parts": grouped(mesh(dp=2, pp=2, tp=2), dp=((0, 5), (1, 4), (2, 6), (3, 7))),
    "rows that nobody keeps, and rows that two keep": replace(SHARDS, sums=(Sum("fsdp", 2, ((0, 2), (3, 5))),)),
    "rows that two keep": replace(SHARDS, sums=(Sum("fsdp", 2, ((0, 3), (2, 5))),)),
    "all rows twice": replace(SHARDS, sums=(Sum("fsdp", 2, ((0, 5), (0, 5))),)),
    "rows that are none": replace(SHARDS, sums=(Sum("fsdp", 2, ((0, 3), (3, 7))),)),
    "rows of a parameter that only half is left of": replace(
        mesh(dp=2, fsdp=2, pp=2, rows=4), sums=(Sum("fsdp", 2, ((0, 2), (2, 4))), Sum("dp", 2, ((0, 2), (2, 4))))
    ),
    "a shard that goes to another than its owner": replace(SHARDS, holds=((3, 5), (0, 3), (0, 3), (3, 5))),
    "rows of a whole gradient that no optimizer holds": replace(
        mesh(dp=2, pp=2, rows=4), holds=((0, 2), (0, 2), (1, 3), (2, 4))
    ),
    "parts of two stages in one group": grouped(PARTS, tp=((0, 2), (1, 3))),
    "copies that nobody sums": mesh(pp=2, tied=[Tied((0, 1), ())]),
    "copies that are summed over replicas in place of stages": mesh(dp=2, pp=2, tied=[Tied((0, 1), ((0, 2), (1, 3)))]),
    "copies that are summed with another part": mesh(pp=2, tp=2, tied=[Tied((0, 1), ((0, 3), (1, 2)))]),
}


@pytest.mark.parametrize("name", SPECIMENS)
def test_a_wrong_mesh_is_told(name: str) -> None:
    golden("\n".join(map(str, violations(SPECIMENS[name], PLAIN))))
    if not name.startswith(("a rank", "replicas in groups")):  # which no sum of numbers could run with
        assert not agrees(SPECIMENS[name], PLAIN)


def test_every_law_is_broken_alone() -> None:
    laws = {law.__name__ for law in LAWS} | {"groups"}
    broken = [{one.law for one in violations(specimen, PLAIN)} for specimen in SPECIMENS.values()]
    assert all({law} in broken for law in laws)


def test_a_rank_without_a_copy_is_in_no_sum_of_copies() -> None:
    four = build("1f1b", ranks=4, microbatches=4)
    wrong = mesh(four, pp=4, tied=[Tied((0, 3), ((0, 1, 3),))])
    golden("\n".join(map(str, violations(wrong, four))))


def test_of_many_the_first_are_told_and_the_rest_counted() -> None:
    found = violations(replace(mesh(dp=8, pp=2), sums=(), divisor=1), PLAIN)
    golden("\n".join(map(str, found)))


@st.composite
def meshes(draw: st.DrawFn) -> tuple[Mesh, Schedule]:
    """Meshes, most with a fault or two that one could make by hand."""
    schedule = draw(st.sampled_from([PLAIN, TWO_STAGES]))
    axes = draw(st.sampled_from(AXES))
    found = mesh(schedule, rows=draw(st.sampled_from([0, 3])), **axes)
    for _ in range(draw(st.integers(0, 2))):
        found = draw(st.sampled_from(CHANGES))(found, schedule, draw)
    return found, schedule


def swapped(found: Mesh, schedule: Schedule, draw: st.DrawFn) -> Mesh:
    axis = draw(st.sampled_from([*found.groups]))
    one, other = (draw(st.integers(0, found.ranks - 1)) for _ in range(2))
    swap = {one: other, other: one}
    return grouped(found, **{axis: tuple(tuple(swap.get(r, r) for r in group) for group in found.groups[axis])})


def other_share(found: Mesh, schedule: Schedule, draw: st.DrawFn) -> Mesh:
    one, other = (draw(st.integers(0, found.ranks - 1)) for _ in range(2))
    shares = list(found.shares)
    shares[one], shares[other] = shares[other], shares[one] if draw(st.booleans()) else shares[other]
    return replace(found, shares=shares)


def other_sums(found: Mesh, schedule: Schedule, draw: st.DrawFn) -> Mesh:
    if not found.sums:
        return found
    k = draw(st.integers(0, len(found.sums) - 1))
    one = found.sums[k]
    instead = draw(st.sampled_from([(), (one, one._replace(divisor=1, keeps=())), (one._replace(divisor=3),)]))
    return replace(found, sums=(*found.sums[:k], *instead, *found.sums[k + 1 :]))


def copies(found: Mesh, schedule: Schedule, draw: st.DrawFn) -> Mesh:
    groups = draw(st.sampled_from([None, *found.groups.values()]))
    return found.with_tied([Tied((0, schedule.n_stages - 1), groups)], schedule)


def holders(found: Mesh, schedule: Schedule, draw: st.DrawFn) -> Mesh:
    kept = rows_kept(found)
    return replace(found, holds=tuple(kept if draw(st.booleans()) else kept[::-1]))


CHANGES = (swapped, other_share, other_sums, copies, holders)


@pytest.mark.long
@given(meshes())
def test_symbols_and_numbers_agree(found: tuple[Mesh, Schedule]) -> None:
    assert (not violations(*found)) == agrees(*found)
