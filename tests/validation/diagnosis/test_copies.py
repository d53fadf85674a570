"""What ranks have of gradients that they hold in common: microbatches of their own, or parts of a sum."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pipeproof.diagnosis.copies import adding_up, unreduced
from pipeproof.diagnosis.members import Members, Replicas
from pipeproof.foreign.matching import Local
from pipeproof.foreign.rank import Part
from pipeproof.foreign.stages_in_order import Stage
from pipeproof.observers.shards import Shard
from pipeproof.reference.step import Contribution, Expected
from tests.support.golden import golden

DRAW = torch.Generator().manual_seed(0)
NAMES = ("a", "b", "c")
EACH = {name: [torch.randn(32, generator=DRAW) for _ in range(4)] for name in NAMES}
DUE = {name: torch.stack(parts).sum(dim=0) for name, parts in EACH.items()}
UPPER, LOWER = Shard(((0, 16),)), Shard(((16, 32),))
TWO, ONE = Replicas((0, 1), 4), Replicas((0, 0), 4)
WRONG = frozenset((0, name) for name in NAMES[:2])
UPDATE: Any = SimpleNamespace(now=SimpleNamespace(batches=[SimpleNamespace(tokens=8)] * 4, microbatches=4), replicas=2)
EXPECTED = Expected("train", (0.0,) * 4, 0.0, gradients={(0, name): due for name, due in DUE.items()})


def members(replicas: Replicas, *ranks: dict[str, Tensor], shards: tuple[Shard, ...] = ()) -> Members:
    """Each rank has gradients of ``NAMES``; with ``shards``, a part of each."""
    locals_ = tuple(Local(name, name) for name in NAMES)
    own = [dict.fromkeys(range(len(NAMES)), shard) for shard in shards] or [{} for _ in ranks]
    parts = [
        Part(locals_, tuple(given.get(name, DUE[name]) for name in NAMES), shards=lying)
        for given, lying in zip(ranks, own, strict=True)
    ]
    merged = Part(locals_, parts[0].gradients, members=tuple(enumerate(parts)))
    contributions = [Contribution(0.0, {(0, name): EACH[name][m] for name in NAMES}) for m in range(4)]
    return Members([Stage(0, 0, merged, dict(enumerate(NAMES)), {})], replicas, contributions, [None] * len(ranks))


def share(name: str, *microbatches: int) -> Tensor:
    return torch.stack([EACH[name][m] for m in microbatches]).sum(dim=0)


def test_one_parameter_of_one_rank_beside_others_that_are_right() -> None:
    found = members(TWO, DUE | {"b": share("b", 0, 2)}, DUE)
    (cause,) = unreduced(found, EXPECTED, UPDATE)
    assert (cause.kind, cause.stage, cause.parameter) == ("not-reduced", 0, "b")
    golden(cause.detail)


def test_one_parameter_beside_others_that_lack_a_microbatch_on_all_ranks() -> None:
    lost = {name: share(name, 0, 1, 2) for name in NAMES}
    found = members(TWO, lost | {"b": share("b", 0, 2)}, lost | {"b": share("b", 1)})
    apart, gone = unreduced(found, EXPECTED, UPDATE)
    assert (apart.kind, apart.parameter) == ("not-reduced", "b")
    golden(apart.detail)
    assert (gone.kind, gone.stage, gone.microbatches, gone.parameter) == ("dropped", 0, (3,), None)
    assert unreduced(members(TWO, lost, lost), EXPECTED, UPDATE) == [], "all ranks have the same"


def test_shards_that_have_the_microbatches_of_some_ranks() -> None:
    replicas = Replicas((0, 1, 2, 3), 4)
    places = [(some, where) for some in ((0, 1), (2, 3)) for where in (UPPER, LOWER)]
    halves = [{name: where.of(share(name, *some)) for name in NAMES} for some, where in places]
    (cause,) = unreduced(members(replicas, *halves, shards=(UPPER, LOWER) * 2), EXPECTED, UPDATE)
    assert cause.parameter is None, "of all parameters"
    golden(cause.detail)


def test_a_rank_that_has_nothing_is_not_called_unreduced() -> None:
    assert unreduced(members(ONE, DUE, {name: torch.zeros(32) for name in NAMES}), EXPECTED, UPDATE) == []
    assert unreduced(members(TWO, DUE, DUE), EXPECTED, UPDATE) == []


def test_parts_of_a_sum() -> None:
    parts = {name: torch.randn(32, generator=DRAW) for name in NAMES}
    rest = {name: DUE[name] - parts[name] for name in NAMES}
    every = {(0, name) for name in NAMES}
    (cause,) = adding_up(members(ONE, parts, rest), EXPECTED, every, {})
    golden(cause.detail)
    assert adding_up(members(ONE, parts, DUE), EXPECTED, every, {}) == [], "one of them has all of it"


def test_parts_of_a_sum_and_what_was_used_before_them() -> None:
    part = torch.randn(32, generator=DRAW)
    found = members(ONE, {"a": DUE["a"] + 1, "b": part}, {"a": DUE["a"] - 2, "b": DUE["b"] - part})
    (cause,) = adding_up(found, EXPECTED, WRONG, {"a": 1, "b": 2})
    assert cause.parameter == "b"
    golden(cause.detail)
    assert adding_up(found, EXPECTED, WRONG, {"a": 2, "b": 1}) == [], "a does not follow from b"
    assert adding_up(found, EXPECTED, WRONG, {}) == [], "nobody knows"


def test_a_copy_under_one_name_whose_share_is_known_at_the_first_stage_alone() -> None:
    """Stage 1 has a copy of each, and what microbatches give to both is known together, at stage 0."""
    first = members(TWO, DUE | {"b": share("b", 0, 2)}, DUE | {"b": share("b", 1, 3)})
    again = Stage(1, 0, first.stages[0].part, dict(enumerate(NAMES)), {})
    both = replace(first, stages=[*first.stages, again])
    gradients = {(stage, name): due for stage in range(2) for name, due in DUE.items()}
    found = unreduced(both, replace(EXPECTED, gradients=gradients), UPDATE)
    assert [(cause.kind, cause.stage, cause.parameter) for cause in found] == [
        ("not-reduced", 0, "b"),
        ("not-reduced", 1, "b"),
    ]
    more = gradients | {(1, "b"): 2 * DUE["b"]}
    (cause,) = unreduced(both, replace(EXPECTED, gradients=more), UPDATE)
    assert cause.stage == 0, "what is known at stage 0 is not all that is due at stage 1"
