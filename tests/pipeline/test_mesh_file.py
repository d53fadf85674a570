"""What a job's file may say of its mesh, and what is refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeproof.pipeline.mesh import Mesh, Sum, Tied
from pipeproof.pipeline.mesh_file import mesh_of, read_axes, read_mesh
from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import build

PIPELINE = build("1f1b", ranks=2, microbatches=2)
AXES = {"dp": 2, "pp": 2}


def read(path: Path, data: dict[str, Any]) -> Mesh:
    (path / "x.json").write_text(json.dumps({"format": "pipeproof/mesh", "version": 1, "axes": AXES} | data))
    return read_mesh(path / "x.json").mesh(PIPELINE)


def test_what_is_left_out_is_as_the_axes_have_it(tmp_path: Path) -> None:
    found, made = read(tmp_path, {}), Mesh.of(AXES, PIPELINE)
    assert (found.groups, found.sums, found.divisor) == (made.groups, made.sums, made.divisor)
    assert [one.tolist() for one in found.shares] == [one.tolist() for one in made.shares]


def test_groups_that_are_known_are_taken_where_nothing_else_is_said(tmp_path: Path) -> None:
    known = {"dp": ((0, 3), (1, 2)), "pp": ((0, 1), (3, 2)), "mesh": ((0, 1, 2, 3),)}
    assert mesh_of(AXES).mesh(PIPELINE, known=known).groups == {"dp": known["dp"], "pp": known["pp"]}
    said = {"format": "pipeproof/mesh", "version": 1, "axes": AXES, "groups": {"dp": [[0, 2], [1, 3]]}}
    (tmp_path / "x.json").write_text(json.dumps(said))
    found = read_mesh(tmp_path / "x.json").mesh(PIPELINE, known=known).groups
    assert found == {"dp": ((0, 2), (1, 3)), "pp": known["pp"]}


def test_all_that_is_said(tmp_path: Path) -> None:
    said: dict[str, Any] = {
        "axes": {"fsdp": 2, "pp": 2},
        "groups": {"fsdp": [[0, 2], [3, 1]]},
        "microbatches": [[0, 1], [0, 1], [2, 3], [2, 3]],
        "sums": [{"over": "fsdp", "divisor": 2, "keeps": [[0, 3], [3, 5]]}],
        "divisor": 3,
        "tied": [[0, 1], {"stages": [0, 1], "groups": [[0, 1]]}],
        "rows": 5,
        "holds": [[0, 3], [0, 3], [3, 5], [3, 5]],
    }
    found = read(tmp_path, said)
    assert found.groups == {"fsdp": ((0, 2), (3, 1)), "pp": ((0, 1), (2, 3))}
    assert [one.tolist() for one in found.shares] == said["microbatches"]
    assert found.shares[0] is found.shares[1]
    assert found.sums == (Sum("fsdp", 2, ((0, 3), (3, 5))),)
    assert found.tied == (Tied((0, 1)), Tied((0, 1), ((0, 1),)))
    assert (found.divisor, found.rows, found.holds[2]) == (3, 5, (3, 5))


def test_pipelines_are_as_they_are_said(tmp_path: Path) -> None:
    data = {"format": "pipeproof/mesh", "version": 1, "axes": AXES}
    for more, pipelines in (({}, ((0, 1), (2, 3))), ({"groups": {"pp": [[0, 3], [2, 1]]}}, ((0, 3), (2, 1)))):
        (tmp_path / "x.json").write_text(json.dumps(data | more))
        assert read_mesh(tmp_path / "x.json").pipelines == pipelines


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"version": 2}, 'is no mesh: expected "format": "pipeproof/mesh", "version": 1; add them'),
        ({"version": True}, "is no mesh: expected"),
        ({"": {}}, "has '': expected some of axes, groups, microbatches"),
        ({"axes": {"": 2, "pp": 2}}, "the mesh has an axis ''; expected some of pp"),
        ({"groups": {"": [[0]]}}, "has groups along '': expected some of dp, pp"),
        ({"axis": {}}, "has 'axis': expected some of axes, groups, microbatches"),
        ({"axes": {}}, ': axes is {}: expected axes and their sizes, e.g. {"dp": 2, "pp": 4}'),
        ({"axes": {"pp": "2"}}, ': axes: pp is "2": expected a whole number, at least 0'),
        ({"groups": []}, ": groups is []: expected an object"),
        ({"groups": {"tp": [[0]]}}, "has groups along 'tp': expected some of dp, pp"),
        ({"groups": {"dp": [0, 1]}}, ": groups: dp is 0: expected a list of whole numbers"),
        ({"groups": {"dp": 3}}, ": groups: dp is 3: expected lists of ranks, e.g. [[0, 1], [2, 3]]"),
        ({"microbatches": [[0, 1]]}, "has microbatches of 1 ranks: expected 4, all of the mesh"),
        ({"microbatches": [[0]] * 4}, "gives rank 0 1 microbatches, but 1f1b has 2: give each rank as many"),
        ({"microbatches": [[0, -1]] * 4}, ": microbatches of rank 0 is -1: expected a whole number, at least 0"),
        ({"sums": [{"over": "tp"}]}, ': sums is {"over": "tp"}: expected {"over": AXIS, "divisor": N}'),
        ({"sums": [{"over": "dp", "divisor": 0}]}, ": divisor is 0: expected a whole number, at least 1"),
        ({"sums": [{"over": "dp", "keeps": [[0, 1]]}]}, "has 1 parts to keep over dp, which has 2 ranks"),
        ({"sums": [{"over": ["dp"]}]}, ': sums is {"over": ["dp"]}: expected {"over": AXIS, "divisor": N}'),
        ({"sums": [{"over": {}}]}, ': sums is {"over": {}}: expected {"over": AXIS, "divisor": N}'),
        ({"sums": [{"over": "dp", "keeps": 5}]}, ": keeps is 5: expected of each of a group its rows, e.g. [[0, 2]"),
        (
            {"sums": [{"over": "dp", "keeps": [1, 1]}]},
            ": keeps is [1, 1]: expected of each of a group its rows, e.g. [[",
        ),
        ({"sums": [{"over": "dp", "keeps": None}]}, ": keeps is null: expected of each of a group its rows"),
        ({"sums": [{"over": "dp", "keeps": []}]}, "has 0 parts to keep over dp, which has 2 ranks: give one for each"),
        ({"sums": [{"over": "dp"}] * 54}, "has 54 sums, which together add up or divide by more than 9007199254740992"),
        ({"microbatches": [[0, 10**30]] * 4}, f"is {10**30}: expected a whole number, at most 1099511627776"),
        ({"sums": 1}, ": sums is 1: expected a list"),
        ({"tied": [[0, 7]]}, "tied: there is no stage 7, stages are 0..1"),
        ({"tied": [0, 1]}, ": tied is [0, 1]: expected a list of stages for each parameter, e.g. [[0, 3]]"),
        ({"holds": [[1, 0]] * 4}, ": holds is [1, 0]: expected the first row and the one after the last"),
    ],
)
def test_what_is_no_mesh_is_refused(data: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ScheduleError) as caught:
        read(tmp_path, data)
    assert said in str(caught.value)


def test_axes_in_words() -> None:
    assert list(read_axes("dp=2, pp=4").items()) == [("dp", 2), ("pp", 4)]
    for text, said in (("dp", "has 'dp'"), ("dp=x", "has 'dp=x'"), ("dp=2,dp=2", "has dp twice"), ("", "has ''")):
        with pytest.raises(ScheduleError, match=said):
            read_axes(text)
