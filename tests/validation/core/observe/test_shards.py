"""Parts of parameters: where they lie, what makes up a whole, and what does not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import StepResult, watch
from pipeproof.core.observe.shards import Shard, ShardError, find_untiled, join_shards, shard_at, shard_of
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import FlatShard, WhiteBox
from tests.support.golden import golden
from tests.support.steps import loss_fn, pairs


@dataclass(frozen=True)
class Placement:
    """As much of a DTensor's placement as is looked at."""

    dim: int | None = None
    split_factor: int = 1
    partial: bool = False
    reduce_op: str = "sum"

    def is_partial(self) -> bool:
        return self.partial


Split, Replicate, Strided = (type(name, (Placement,), {}) for name in ("Shard", "Replicate", "_StridedShard"))


@dataclass(frozen=True)
class Mesh:
    """As much of a device mesh as is looked at."""

    mesh: Tensor
    coordinate: tuple[int, ...]

    def size(self, dim: int) -> int:
        return self.mesh.shape[dim]

    def get_coordinate(self) -> tuple[int, ...]:
        return self.coordinate


@dataclass(frozen=True)
class Distributed:
    """As much of a DTensor as is looked at."""

    shape: tuple[int, ...]
    placements: tuple[Any, ...]
    device_mesh: Mesh

    def to_local(self) -> Tensor:
        return torch.zeros(0)


def placed(shape: tuple[int, ...], placements: tuple[Any, ...], coordinate: tuple[int, ...]) -> Shard:
    size = (2,) * len(placements)
    mesh = Mesh(torch.arange(2 ** len(placements)).view(size), coordinate)
    found = shard_of(Distributed(shape, placements, mesh))  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("shape", "placements", "coordinate", "bounds"),
    [
        ((4, 3), (Split(0),), (1,), ((2, 4), (0, 3))),
        ((5, 3), (Split(0),), (0,), ((0, 3), (0, 3))),
        ((5, 3), (Split(0),), (1,), ((3, 5), (0, 3))),
        ((1, 3), (Split(0),), (1,), ((1, 1), (0, 3))),
        ((4, 6), (Replicate(), Split(1)), (0, 1), ((0, 4), (3, 6))),
        ((8,), (Split(0), Split(0)), (1, 0), ((4, 6),)),
        ((8,), (Strided(0, 2), Split(0)), (1, 0), ((2, 4),)),
        ((8,), (Strided(0, 2), Split(0)), (0, 1), ((4, 6),)),
        ((8, 4), (Replicate(), Strided(0, 2), Split(0)), (1, 1, 1), ((6, 8), (0, 4))),
        ((8, 4), (Strided(0, 1), Split(1)), (1, 0), ((4, 8), (0, 2))),
    ],
)
def test_where_a_dtensor_s_part_lies(
    shape: tuple[int, ...], placements: tuple[Any, ...], coordinate: tuple[int, ...], bounds: Any
) -> None:
    found = placed(shape, placements, coordinate)
    assert (found.bounds, found.shape, found.peers) == (bounds, shape, tuple(range(2 ** len(placements))))


def test_a_plain_tensor_is_no_part() -> None:
    assert shard_of(torch.ones(3)) is None


def joined(parts: Sequence[tuple[Shard, Tensor | None]]) -> Any:
    """The numbers of the whole."""
    made = join_shards(parts)
    return None if made is None else made.tolist()


def test_a_sum_that_was_not_formed_is_put_together() -> None:
    parts = [placed((2,), (Replicate(), Placement(partial=True)), (copy, own)) for copy in (0, 1) for own in (0, 1)]
    assert [part.addend for part in parts] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    whole = joined([(part, torch.tensor([1.0, 10.0]) * (1 + part.addend[0])) for part in parts])
    assert whole == [3.0, 30.0], "each addend once, whoever has copies of it"
    assert find_untiled(parts) == ""
    golden(find_untiled(parts[:1]))


def test_parts_of_two_replicas_are_one_part() -> None:
    one, two = (Shard(((0, 2),), (4,), peers=peers) for peers in ((0, 1), (2, 3)))
    assert one == two
    assert find_untiled([one, two, Shard(((2, 4),), (4,), peers=(0, 1))]) == ""


MAX = Placement(partial=True, reduce_op="max")
CUTS = r"cuts \d parts, and later axes of its mesh make \d"


@pytest.mark.parametrize(
    ("placements", "sentence"),
    [
        ((MAX,), r"expected Partial\(sum\), or reduce it over its mesh first"),
        ((Placement(0),), "expected Shard or Replicate"),
        *(((one, other), CUTS) for one, other in [(Strided(0, 4), Split(0)), (Split(0), Strided(0, 2))]),
        ((Strided(0, 2), Strided(0, 2)), CUTS),
    ],
)
def test_a_placement_that_is_not_covered_is_refused(placements: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(ShardError, match=sentence):
        placed((8,), placements, (0,) * len(placements))


@pytest.mark.parametrize(
    ("index", "told"),
    [
        (slice(None), "[0:2, 0:3]"),
        (slice(2, 4), "[2:4, 0:3]"),
        ((slice(0, 2), slice(1, 4)), "[0:2, 1:4]"),
        (slice(4, None), "[4:6, 0:3]"),
        (slice(None, 2), "[0:2, 0:3]"),
        ((slice(None), slice(3, None)), "[0:2, 3:6]"),
        ([slice(0, 1), slice(4, 5)], "[0:1, 0:3] and [4:5, 0:3]"),
        ([(slice(0, 1), slice(3, 6)), (slice(4, 5), slice(3, 6))], "[0:1, 3:6] and [4:5, 3:6]"),
    ],
)
def test_an_index_says_where_a_part_lies(index: Any, told: str) -> None:
    shard, whole = shard_at(index, torch.zeros(2, 3)), torch.arange(36.0).view(6, 6)
    assert str(shard) == told
    assert (shard.lengths, shard.count, shard.of(whole).shape) == ((2, 3), 6, (2, 3))
    assert str(shard_at((slice(0, 2), slice(1, 2)), None)) == "[0:2, 1:2]"


def test_pieces_are_put_together_with_those_of_others() -> None:
    whole = torch.arange(24.0).view(6, 4)
    ranks = [[slice(0, 1), slice(2, 3), slice(4, 5)], [slice(1, 2), slice(3, 4), slice(5, 6)]]
    parts = [torch.cat([whole[one] for one in rows]) for rows in ranks]
    lying = [(shard_at(rows, part), part) for rows, part in zip(ranks, parts, strict=True)]
    assert find_untiled([shard for shard, _ in lying]) == ""
    assert joined(lying) == whole.tolist()
    golden(find_untiled([lying[0][0]]))
    golden(find_untiled([lying[0][0], shard_at(slice(0, 3), whole[:3])]))


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        (slice(0, 3), r"its index is slice\(0, 3, None\), but its shape \[2, 3\]"),
        (slice(-4, -2), "expected slices that say from where to where"),
        ([slice(0, 1), slice(0, 1)], r"whose pieces overlap: expected each row once"),
        ([slice(0, 1), (slice(1, 2), slice(0, 3))], r"but its shape \[2, 3\]"),
        ([], r"its index is \[\], but its shape \[2, 3\]"),
        (slice(0, 4, 2), "expected slices that say from where to where"),
        ((0,), "its index has 0: expected slices"),
    ],
)
def test_an_index_that_does_not_fit(index: Any, sentence: str) -> None:
    with pytest.raises(ShardError, match=sentence):
        shard_at(index, torch.ones(2, 3))


def test_parts_put_together() -> None:
    whole = torch.arange(6.0).view(3, 2)
    upper, lower = Shard(((0, 1), (0, 2))), Shard(((1, 3), (0, 2)))
    assert joined([(lower, whole[1:]), (upper, whole[:1])]) == whole.tolist()
    assert joined([(lower, whole[1:]), (upper, whole[:1]), (upper, whole[1:2])]) == whole.tolist(), "the first counts"
    assert joined([(upper, None), (lower, None)]) is None
    assert find_untiled([upper, lower, upper]) == ""


def test_parts_that_are_no_whole() -> None:
    part, other = Shard(((0, 2), (0, 2))), Shard(((1, 3), (0, 2)))
    golden(find_untiled([part, other]))
    golden(find_untiled([Shard(((0, 1), (0, 2)), (3, 2))]))
    golden(find_untiled([part, Shard(((2, 3),))]))


# Flat parts of a bucket, of a real step: each rank has the reduced gradient of its own part alone.

COUNT, WIDTH = 4, 4
Made = dict[Any, FlatShard]


def build_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model[2].bias.requires_grad_(False)
    return model


data = partial(pairs, COUNT, rows=6, width=WIDTH, seed=1)


def train(stage: nn.Module, microbatches: list[Any], before: int | None, after: int | None) -> list[float]:
    """A microbatch at a time through the ranks of one replica; the losses on the last."""
    losses = []
    for x, target in microbatches:
        if before is not None:
            x = torch.empty_like(x)
            dist.recv(x, before)
            x.requires_grad_()
        y = stage(x)
        if after is None:
            loss = loss_fn(y, target)
            losses.append(loss.item())
            (loss / len(microbatches)).backward()
        else:
            dist.send(y.detach(), after)
            gradient = torch.empty_like(y)
            dist.recv(gradient, after)
            y.backward(gradient)
        if before is not None:
            dist.send(x.grad, before)
    return losses


def bucketed(stage: nn.Module, group: Any, *, cut: int, over: int | None) -> Made:
    """This rank's shards of the bucket of all gradients, which is cut in two at an element, wherever that is.

    Its sum is divided by ``over``; None: nothing is summed.
    """
    trained = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    bucket = torch.cat([parameter.grad.flatten() for parameter in trained if parameter.grad is not None])
    if over is not None:
        dist.all_reduce(bucket, group=group)
        bucket /= over
    first, last = (0, cut) if dist.get_rank(group) == 0 else (cut, len(bucket))
    made, at = {}, 0
    for parameter in trained:
        start, stop = (min(max(edge - at, 0), parameter.numel()) for edge in (first, last))
        if start < stop:
            made[parameter] = FlatShard(bucket[at + start : at + stop], start)
        at += parameter.numel()
    return made


def judged(
    whitebox: WhiteBox,
    *,
    stages: int = 1,
    cut: int = 28,
    over: int | None = 2,
    named: bool = False,
    change: Callable[[Made], Made] = lambda made: made,
    begun: Callable[[Any], object] = lambda model: None,
) -> Verdict:
    """A pipeline of so many stages, each with two replicas whose optimizers have a flat shard each."""

    def step(model: Any, microbatches: list[Any]) -> Any:
        rank, own = dist.get_rank(), dist.get_rank() % stages
        groups = [dist.new_group([stage, stage + stages]) for stage in range(stages)]
        stage = watch(model[own * 4 // stages : (own + 1) * 4 // stages])
        begun(model)
        before, after = rank - 1 if own else None, rank + 1 if own < stages - 1 else None
        losses = train(stage, microbatches, before, after)
        made = change(bucketed(stage, groups[own], cut=cut, over=over))
        if named:
            return {name: made.get(p) for name, p in model.named_parameters()}, losses
        return StepResult(stage, losses, gradients=made)

    of = [replica for replica in range(2) for _ in range(stages)]
    return whitebox.validate(step, reference=build_model, microbatches=data(), ranks=of, loss_fn=loss_fn)


@pytest.mark.parametrize("cut", [28, 20, 41, 0])
def test_flat_shards_that_straddle_parameters_or_none_are_right(whitebox: WhiteBox, cut: int) -> None:
    verdict = judged(whitebox, cut=cut)
    assert verdict.outcome == "pass", str(verdict)
    assert verdict.law("shards").checked == 7, "the frozen bias has none"
    assert verdict.law("boundaries").checked, "modules were handed back beside gradients, so they were watched"
    assert verdict.law("initial-weights").checked == 16, "on both ranks"


@pytest.mark.sweep
def test_flat_shards_in_a_pipeline_and_by_name(whitebox: WhiteBox) -> None:
    assert judged(whitebox, stages=2, cut=27).outcome == "pass"
    verdict = judged(whitebox, named=True)
    assert verdict.outcome == "pass", str(verdict)


def shifted(made: Made) -> Made:
    """The part of the straddled parameter lies elsewhere than it is said to on the second rank."""
    return {p: replace(one, start=one.start - 3 if one.start else 0) for p, one in made.items()}


def exchanged(made: Made) -> Made:
    """Each rank has the other's part of the straddled parameter."""
    every: list[Any] = [None, None]
    mine = list(made)[-1 if dist.get_rank() == 0 else 0]
    dist.all_gather_object(every, made[mine].part)
    return made | {mine: replace(made[mine], part=every[1 - dist.get_rank()])}


@pytest.mark.parametrize(("change", "ends"), [(shifted, "overlap"), (lambda made: made if dist.get_rank() else {}, "")])
def test_flat_shards_that_make_no_whole(whitebox: WhiteBox, change: Callable[[Made], Made], ends: str) -> None:
    verdict = judged(whitebox, change=change)
    assert (verdict.outcome, verdict.law("shards").outcome) == ("fail", "fail"), str(verdict)
    assert verdict.mismatches[0].observed_text.endswith(ends), str(verdict)


def begins_otherwise(model: Any) -> None:
    model[0].weight.data.mul_(1.0 + dist.get_rank())


@pytest.mark.parametrize(
    ("fault", "where", "fields", "found"),
    [
        ({"change": exchanged}, "causes", ("kind", "parameter"), ("misplaced", "1.weight")),
        pytest.param({"over": None}, "causes", ("kind", "stage"), ("not-reduced", 0), marks=pytest.mark.sweep),
        pytest.param({"over": 1}, "causes", ("kind", "factor"), ("scale", 2.0), marks=pytest.mark.sweep),
        pytest.param(
            {"begun": begins_otherwise}, "mismatches", ("rank", "parameter"), (1, "0.weight"), marks=pytest.mark.sweep
        ),
    ],
)
def test_flat_shards_with_wrong_content(
    whitebox: WhiteBox, fault: dict[str, Any], where: str, fields: tuple[str, ...], found: tuple[Any, ...]
) -> None:
    verdict = judged(whitebox, **fault)
    assert {tuple(getattr(one, name) for name in fields) for one in getattr(verdict, where)} == {found}, str(verdict)
