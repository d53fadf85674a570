"""Works that torch.distributed returns to ranks of a group, and races in how they are used."""

from collections.abc import Callable, Iterable

import pytest
from torch.distributed import Work

from pipeproof.wings.simulated import SimulatedWorld
from pipeproof.worlds.rank_report import Race, RankFailed


def finish(*works: Work | None) -> None:
    """Wait for all of them."""
    for work in works:
        assert work is not None, "its rank is in the group"
        work.wait()


def race_of(
    world: SimulatedWorld, job: Callable[..., object], *given: object, ranks: int = 2, seeds: Iterable[int] = range(20)
) -> Race:
    """The race that a job has under the first seed of these under which it fails."""

    def search() -> None:
        for world.seed in seeds:
            world.run(job, *given, ranks=ranks)

    with pytest.raises(RankFailed) as failed:
        search()
    race = failed.value.cause
    assert isinstance(race, Race), str(failed.value)
    return race
