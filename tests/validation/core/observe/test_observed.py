"""What all ranks produced, put together."""

import math

import torch

from pipeproof.core.observe.observed import Observed, RankOperation
from pipeproof.pipeline import Action, build
from pipeproof.pipeline.trace import Profile


def rank(losses: tuple[float, ...], executed: str, nonfinite: str = "", **more: object) -> RankOperation:
    actions, bad = (tuple(map(Action.parse, text.split())) for text in (executed, nonfinite))
    return RankOperation("train", losses, actions, bad, **more)  # type: ignore[arg-type]


SEEN = Observed(
    build("gpipe", ranks=2, microbatches=2),
    (
        (rank((1.0, 2.0), "0F0 0F1 0B1 0B0", gradients={(0, "a"): torch.ones(1)}, profile=Profile(0, 1, 0, 0, 0)),),
        (
            rank(
                (1.0, math.nan),
                "1F0 1F1 1I1 1B0 1W1",
                "1F1 1F0",
                gradients={(1, "b"): None},
                parameters={(1, "b"): torch.zeros(1)},
                profile=Profile(1, 2, 0, 0, 0),
            ),
        ),
    ),
)


def test_what_was_not_compared_is_counted_over_all_ranks() -> None:
    ranks = tuple((rank((), "0F0", uncompared=count),) for count in (1, 2))
    assert Observed(SEEN.schedule, ranks).count_uncompared(0) == 3


def test_losses_are_those_of_the_last_stage() -> None:
    assert SEEN.losses(0)[0] == 1.0
    assert math.isnan(SEEN.losses(0)[1])


def test_orders_are_those_that_really_ran_and_weights_count() -> None:
    assert SEEN.forwards(0) == {0: [0, 1], 1: [0, 1]}
    assert SEEN.backwards(0) == {0: [1, 0], 1: [0, 1]}


def test_gradients_and_parameters_of_all_ranks() -> None:
    assert SEEN.gradients(0) == {(0, "a"): torch.ones(1), (1, "b"): None}
    assert list(SEEN.parameters(0)) == [(1, "b")]


def test_the_first_that_is_not_finite_is_the_earliest_along_the_data() -> None:
    assert SEEN.first_nonfinite(0) == Action.parse("1F0")


def test_profiles_come_by_rank() -> None:
    assert [profile.step_s for profile in SEEN.profiles] == [1, 2]
