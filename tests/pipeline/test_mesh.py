"""Ranks along axes: how they are numbered, their groups, and what each is given."""

import pytest

from pipeproof.core.replicas import Replicas
from pipeproof.pipeline.mesh import Mesh, Sum, Tied, along, chunks, groups_along, pipelines_of
from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import build
from tests.support.golden import golden

PIPELINE = build("1f1b", ranks=2, microbatches=3)


def test_ranks_are_numbered_as_torch_numbers_a_mesh() -> None:
    torch = pytest.importorskip("torch")
    axes = {"dp": 2, "pp": 3, "tp": 2}
    numbered = torch.arange(12).reshape(2, 3, 2)
    for k, axis in enumerate(axes):
        lines = numbered.movedim(k, -1).reshape(-1, axes[axis]).tolist()
        assert [*map(list, groups_along(axes, axis))] == lines
        assert [along(axes, [axis])[rank] for rank in lines[0]] == [*range(axes[axis])]
    assert along(axes, ["dp", "tp"]) == (0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3)


def test_replicas_share_microbatches_and_sums_divide() -> None:
    mesh = Mesh.of({"dp": 2, "pp": 2, "tp": 2}, PIPELINE)
    assert [one.tolist() for one in mesh.shares] == [[0, 2, 4]] * 4 + [[1, 3, 5]] * 4
    assert (mesh.ranks, mesh.replicas, mesh.pieces, mesh.divisor) == (8, 2, 1, 2)
    assert mesh.sums == (Sum("dp", 2),)
    golden(mesh.sizes)
    assert mesh.places("tp").tolist() == [0, 1] * 4
    assert mesh.places("cp").tolist() == [0] * 8


@pytest.mark.parametrize(
    "axes",
    [{"dp": 2, "pp": 2, "tp": 2}, {"pp": 2, "fsdp": 3}, {"dp_replicate": 2, "pp": 2, "dp_shard": 2, "cp": 2}],
    ids=str,
)
def test_ranks_are_given_what_validate_gives_them(axes: dict[str, int]) -> None:
    mesh = Mesh.of(axes, PIPELINE)
    given = Replicas.along(axes, PIPELINE.microbatches * mesh.replicas)
    assert [one.tolist() for one in mesh.shares] == [[*given.share(rank)] for rank in range(mesh.ranks)]


def test_shards_are_kept_before_replicas_are_summed() -> None:
    mesh = Mesh.of({"dp_replicate": 2, "dp_shard": 3, "cp": 2, "pp": 2}, PIPELINE, rows=7)
    assert mesh.sums == (Sum("dp_shard", 3, ((0, 3), (3, 6), (6, 7))), Sum("dp_replicate", 2), Sum("cp", 2))
    assert (mesh.replicas, mesh.pieces, mesh.divisor, mesh.rows) == (6, 2, 12, 7)


def test_rows_are_cut_as_torch_cuts_them() -> None:
    torch = pytest.importorskip("torch")
    for rows in range(1, 12):
        for count in range(1, 6):
            sizes = [len(one) for one in torch.arange(rows).chunk(count)]
            assert [end - begin for begin, end in chunks(rows, count) if end > begin] == sizes


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"pp": 2, "xp": 2}, "the mesh has an axis 'xp'; expected some of pp, dp, ddp, dp_replicate"),
        ({"pp": 2, "ep": 2}, "the mesh has an axis 'ep': what is summed along it depends on the parameter; expected"),
        ({"pp": 2, "sp": 2}, "the mesh has an axis 'sp': what is summed along it depends on the parameter; expected"),
        ({"pp": 2, "dp": 0}, "the mesh has 0 ranks along dp: expected at least 1"),
        ({"pp": 2, "fsdp": 2, "dp_shard": 2}, "the mesh has fsdp and dp_shard, which are two names of one"),
        ({"pp": 2, "dp": 1 << 20}, "the mesh has 2097152 ranks: expected at most 1048576"),
        ({"pp": 4}, "the mesh has pp 4, but 1f1b is for 2 ranks: give it pp=2"),
        ({"dp": 4}, "the mesh has pp 1, but 1f1b is for 2 ranks: give it pp=2"),
    ],
)
def test_axes_that_cannot_be_are_refused(axes: dict[str, int], said: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Mesh.of(axes, PIPELINE)
    assert str(caught.value).startswith(said)


def test_pipelines_are_ranks_along_pp() -> None:
    assert pipelines_of({"pp": 2, "tp": 2}) == ((0, 2), (1, 3))
    assert pipelines_of({"tp": 2}) == pipelines_of({"pp": 2, "dp": 0}) == ()


def test_copies_are_in_two_stages_that_are_there() -> None:
    mesh = Mesh.of({"pp": 2}, PIPELINE)
    assert mesh.with_tied([Tied((0, 1))], PIPELINE).tied == (Tied((0, 1)),)
    for stages, said in (((0, 2), "there is no stage 2"), ((0,), "names no two stages"), ((0, 0), "names no two")):
        with pytest.raises(ScheduleError, match=said):
            mesh.with_tied([Tied(stages)], PIPELINE)
