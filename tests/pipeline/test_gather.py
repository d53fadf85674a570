"""Every rank's numbers on every rank."""

from pipeproof.pipeline.gather import gather
from pipeproof.pipeline.transport import Alone, DistributedTransport
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World


def uneven(context: RankContext) -> tuple[list[list[float]], list[list[float]]]:
    transport = DistributedTransport(context.group)
    return gather(transport, [context.rank + 0.1] * context.rank), gather(transport, [])


def test_rows_of_any_length_by_rank(world: World) -> None:
    expected = [[], [1.1], [2.1, 2.1]]
    assert world.run(uneven, ranks=3) == [(expected, [[], [], []])] * 3


def test_alone() -> None:
    assert gather(Alone(), [1.5, 2.5]) == [[1.5, 2.5]]
