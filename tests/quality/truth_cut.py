"""Faults of stages that are cut inside, by tensor parallelism, held against themselves; what is right beside them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from axis_shards import Unreduced
from torch import Tensor
from truth_check import RIGHT, Counts, Truth
from truth_faults import backward, forward, other, sums

from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.sharded_chain import COUNT, NORM, Pairs, Plant, Sharded, multiplied, sharded_steps

RANKS = 4  # of two stages, each cut among two
TP, SEQUENCE = Sharded(tensor=2), Sharded(tensor=2, sequence=True)


@dataclass(frozen=True)
class Cut:
    """A step whose stages are cut; ``second``: what is planted shows in the second step alone."""

    title: str
    way: Sharded
    truth: Truth = RIGHT
    second: bool = False

    counts, ways = Counts(RANKS, 2, COUNT), (True,)

    def verdict(self, whitebox: WhiteBox, *, watched: bool) -> Verdict:
        """What is said of it."""
        first, second = whitebox.world.run(sharded_steps, self.way, ranks=RANKS)[0]
        return second if self.second or not self.truth.kinds else first


def on(ranks: tuple[int, ...], microbatch: int, change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """``change`` of a message of these ``ranks`` and this ``microbatch``."""
    return lambda rank, m, message: change(message) if rank in ranks and m == microbatch else message


def with_targets_exchanged(rank: int, every: Pairs) -> Pairs:
    """The last stage has the targets of microbatches 0 and 1 in the other order."""
    (x, target), (y, wanted), *rest = every
    return [(x, wanted), (y, target), *rest] if rank >= 2 else every


def twice(rank: int, microbatch: int) -> float:
    return 2.0


SOUND: Mapping[str, Sharded] = {
    "whole tensors between layers": TP,
    "parts of a sequence between layers": SEQUENCE,
    "two layers with one weight": replace(TP, tied=True),
}
FAULTS: Mapping[str, Cut] = {
    one.title: one
    for one in (
        Cut(
            "a part of a weight's gradient, three times",
            replace(TP, plant=Plant(done=multiplied(3, "0.weight", 3.0))),
            sums("scale", 1, wrong="scale replicas", ranks=(3,), parameter=r"^1\.0\.weight$", factors=(3.0,)),
        ),
        Cut(
            "a whole gradient of one rank, twice",
            replace(TP, plant=Plant(done=multiplied(1, "2.bias", 2.0))),
            sums("scale", 0, wrong="scale replicas", ranks=(1,), parameter=r"^0\.2\.bias$", factors=(2.0,)),
        ),
        Cut(
            "sums of norms not formed",
            replace(SEQUENCE, plant=NORM),
            sums("not-reduced", wrong="reduction replicas", parameter=r"^\d\.3\."),
        ),
        Cut(
            "losses times tp",
            replace(TP, plant=Plant(times=twice)),
            sums("scale", wrong="boundary scale", factors=(2.0,)),
        ),
        Cut(
            "the loss of one rank, twice",
            replace(TP, plant=Plant(times=lambda rank, microbatch: 2.0 if rank == 3 else 1.0)),
            backward("scale", 1, wrong="scale replicas", ranks=(3,), factors=(2.0,)),
        ),
        Cut(
            "a message of one rank altered",
            replace(TP, plant=Plant(sent=on((1,), 1, lambda message: message + 0.5))),
            forward(("altered", "wrong-message"), 0, 1, wrong="messages replicas", ranks=(1, 3), microbatches=(1,)),
        ),
        Cut(
            "nothing comes back from one rank",
            replace(TP, plant=Plant(back=on((2,), 1, lambda message: message * 0))),
            backward(
                ("zero", "uninitialised", "dropped", "wrong-message"),
                *(0, 1),
                wrong="messages dropped sums replicas",
                ranks=(0, 2),
                microbatches=(1,),
                affected=(0,),
            ),
        ),
        Cut(
            "targets exchanged",
            replace(TP, plant=Plant(given=with_targets_exchanged)),
            backward(("swapped-data", "computation"), 1, wrong="loss messages", ranks=(2, 3), microbatches=(0, 1)),
        ),
        Cut(
            "gradients of the step before",
            replace(TP, plant=Plant(kept=lambda rank: rank >= 2)),
            sums("stale-gradient", 1, wrong="stale", ranks=(2, 3)),
            second=True,
        ),
        Cut(
            "a norm of one rank",
            replace(TP, plant=Plant(norm=lambda rank: 1.5 if rank == 3 else 1.0)),
            other(("norm", "clip"), "norm clip update", 3),
        ),
        Cut(
            "an update of one rank",
            replace(TP, plant=Plant(updated=multiplied(3, "0.weight", 1.1, weight=True))),
            other(("update", "clip"), "update", 3, parameter=r"^1\.0\.weight$"),
        ),
        Cut(
            "gradients of inputs not summed",
            replace(TP, plant=Plant(plan={"0": Unreduced()})),
            backward(("not-reduced", "computation"), 1, wrong="reduction replicas computation", ranks=(2, 3)),
        ),
    )
}


def cuts() -> Iterator[Cut]:
    """What is right, and then every fault."""
    yield from (Cut(f"right, {title}", way) for title, way in SOUND.items())
    yield from FAULTS.values()
