"""The numbers of the literature, family by family: makespans, bubbles, peaks, messages, warm-ups, and torch's orders.

Unless said otherwise T_F = T_I = T_W = 1 and T_B = T_I + T_W = 2 per stage, without latency. G is the global bubble, L
the local one. Peaks count activations of one stage (one chunk of its rank).
"""

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from pipeproof.pipeline.action import SENDS, Action
from pipeproof.pipeline.program import lower
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules import LOOPED, VEE, build
from pipeproof.pipeline.timeline import Times, simulate
from tests.pipeline.test_schedules import warm_ups


class Known(NamedTuple):
    """A row of the table; None where the source has no number."""

    name: str
    ranks: int
    microbatches: int
    virtual: int | None
    makespan: float | None
    global_bubble: float
    local_bubble: float | None
    peaks: list[float] | None
    messages: int
    warm_ups: list[int] | None


KNOWN = [
    Known("naive", 4, 8, None, 96, 72, None, [1] * 4, 48, [1] * 4),
    Known("gpipe", 4, 8, None, 33, 9, 9, [8] * 4, 48, [8] * 4),
    Known("1f1b", 4, 8, None, 33, 9, 9, [4, 3, 2, 1], 48, [4, 3, 2, 1]),
    Known("1f1b", 8, 16, None, 69, 21, 21, [8, 7, 6, 5, 4, 3, 2, 1], 224, None),
    Known("1f1b", 4, 2, None, 15, 9, 9, [2, 2, 2, 1], 12, [2, 2, 2, 1]),
    Known("looped-bfs", 4, 8, 2, 57, 9, 9, [16] * 4, 112, [16] * 4),
    Known("interleaved", 4, 8, 2, 57, 9, 9, [11, 9, 7, 5], 112, [11, 9, 7, 5]),
    Known("interleaved", 4, 8, 4, 105, 9, None, [19, 17, 15, 13], 240, [19, 17, 15, 13]),
    Known("zb-h1", 4, 8, None, 27, 3, 3, [4] * 4, 48, [4, 3, 2, 1]),
    Known("zb-h1", 4, 8, 2, 51, 3, 3, [8] * 4, 112, [8, 7, 6, 5]),
    Known("zb-h2", 4, 16, None, 51, 3, 0, [7] * 4, 96, [7, 5, 3, 1]),
    Known("zb-v", 4, 8, None, 51, 3, 0, [8] * 4, 96, [8] * 4),
    Known("dualpipev", 4, 8, None, 54, 6, 6, [9] * 4, 96, [8, 8, 8, 9]),
    Known("dualpipev", 4, 16, None, 102, 6, 6, [9] * 4, 192, None),
    Known("v-min", 4, 16, None, None, 11, 11, [4] * 4, 192, None),
    Known("v-min", 8, 32, None, None, 27, 27, [8] * 8, 896, None),
    Known("v-half", 4, 16, None, None, 5, 5, [6] * 4, 192, None),
    Known("v-half", 8, 32, None, None, 17, 17, [10] * 8, 896, None),
]


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: f"{known.name} P{known.ranks} M{known.microbatches}")
def test_known_numbers(known: Known) -> None:
    schedule = build(known.name, ranks=known.ranks, microbatches=known.microbatches, virtual=known.virtual)
    timeline = simulate(schedule)
    assert timeline.global_bubble == known.global_bubble
    assert known.makespan in (None, timeline.makespan)
    assert known.local_bubble in (None, timeline.local_bubble)
    assert known.peaks in (None, list(timeline.peaks))
    assert timeline.bubble_fraction == known.global_bubble / timeline.makespan
    sends = sum(action.kind in SENDS for row in lower(schedule).ranks for action in row)
    assert timeline.messages == sends == known.messages
    assert known.warm_ups in (None, warm_ups(schedule))


@pytest.mark.long
def test_messages_in_closed_form() -> None:
    """2 M (S - 1) for stages placed in a loop; 2 M (2P - 2) over a V, whose two middle stages share a rank."""
    for ranks, virtual, microbatches in product(range(1, 9), range(1, 5), (1, 5, 16)):
        for name in LOOPED if ranks > 1 else ():
            timeline = simulate(build(name, ranks=ranks, microbatches=microbatches, virtual=virtual))
            assert timeline.messages == 2 * microbatches * (ranks * virtual - 1)
        for name in VEE - {"dualpipev"} if virtual == 2 else ():
            assert simulate(build(name, ranks=ranks, microbatches=microbatches)).messages == 4 * microbatches * (
                ranks - 1
            )


UNEQUAL = [(1, 1.25, 0.75), (1, 2, 1), (1, 1, 0.5), (1, 1, 1), (2, 1.5, 1.25)]


@pytest.mark.parametrize("times", UNEQUAL)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_zero_bubble_s_handmade_schedules_have_their_paper_s_bubbles(
    ranks: int, times: tuple[float, float, float]
) -> None:
    """Where T_W <= T_I; ZB-H2 for M >= 2P - 1, and none below zero."""
    forward, of_input, of_weight = times
    one = simulate(build("zb-h1", ranks=ranks, microbatches=2 * ranks), Times(*times))
    assert one.local_bubble == (ranks - 1) * (forward + of_input - of_weight)
    two = simulate(build("zb-h2", ranks=ranks, microbatches=4 * ranks), Times(*times))
    assert two.local_bubble == (ranks - 1) * (forward + of_input - 2 * of_weight)


def test_the_formula_of_zb_h1_ends_where_weights_take_longer_than_inputs() -> None:
    timeline = simulate(build("zb-h1", ranks=4, microbatches=16), Times(1, 0.75, 1.25))
    assert timeline.local_bubble == 2.25 > 3 * (1 + 0.75 - 1.25)


@pytest.mark.long
def test_zb_h1_over_all_sizes() -> None:
    for ranks, microbatches in product(range(1, 9), range(1, 33)):
        timeline = simulate(build("zb-h1", ranks=ranks, microbatches=microbatches))
        if microbatches >= ranks:
            assert timeline.local_bubble == timeline.global_bubble == ranks - 1
            assert timeline.peaks == (ranks,) * ranks


def test_memory_between_input_and_weight_backward() -> None:
    """ZB-H1 holds (P-r) M_B and r M_W; ZB-H2 (2P-1-2r) M_B and 2r M_W."""
    for ranks, kept in product(range(1, 9), (0.0, 0.5, 1.0)):
        one, two, whole = (
            simulate(build(name, ranks=ranks, microbatches=32), weight_memory=kept).peaks
            for name in ("zb-h1", "zb-h2", "1f1b")
        )
        assert one == tuple(ranks - rank + kept * rank for rank in range(ranks))
        assert two == tuple(2 * ranks - 1 - 2 * rank + kept * 2 * rank for rank in range(ranks))
        assert whole == tuple(ranks - rank for rank in range(ranks)), "its backwards leave nothing for later"


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_too_few_microbatches_for_zero_bubble(ranks: int) -> None:
    """L = 2P-1-M units for ZB-H2 with P <= M <= 2P-1, and 2 max(0, 2P-1-M) for ZB-V."""
    for microbatches in range(ranks, 2 * ranks + 3):
        short = max(0, 2 * ranks - 1 - microbatches)
        assert simulate(build("zb-h2", ranks=ranks, microbatches=microbatches)).local_bubble == short
        assert simulate(build("zb-v", ranks=ranks, microbatches=microbatches)).local_bubble == 2 * short


def test_zero_bubble_has_no_local_bubble_and_the_least_global_one() -> None:
    for ranks in range(1, 9):
        for name, microbatches in product(("zb-h2", "zb-v"), (2 * ranks - 1, 2 * ranks, 32)):
            timeline = simulate(build(name, ranks=ranks, microbatches=microbatches))
            assert (timeline.local_bubble, timeline.global_bubble) == (0, ranks - 1)
            assert set(timeline.peaks) == {2 * ranks if name == "zb-v" else 2 * ranks - 1}


@pytest.mark.parametrize(("name", "peak"), [("v-min", lambda p: (p + 4) // 3), ("v-half", lambda p: (p + 2) // 2)])
def test_peaks_of_the_building_blocks(name: str, peak: Callable[[int], int]) -> None:
    """In activations of a whole rank, two chunks: floor((P+4)/3) and floor((P+2)/2)."""
    for ranks in range(2, 9):
        assert max(simulate(build(name, ranks=ranks, microbatches=4 * ranks)).peaks) == 2 * peak(ranks)


@pytest.mark.parametrize(("microbatches", "local"), [(8, 23), (16, 35), (32, 59)])
def test_v_min_grows_with_the_microbatches_where_times_differ(microbatches: int, local: int) -> None:
    """The table has whole numbers; V-Half stays where it is (8.5 there; 8.75 with our way to fill its ends)."""
    times = Times(1, 1.25, 0.75)
    assert int(simulate(build("v-min", ranks=4, microbatches=microbatches), times).local_bubble) == local
    assert simulate(build("v-half", ranks=4, microbatches=microbatches), times).local_bubble == 8.75


@pytest.mark.parametrize(("times", "bubble"), [((1, 1.25, 0.75), 7.5), ((1, 1, 1), 6)])
def test_dualpipev_with_unequal_times(times: tuple[float, float, float], bubble: float) -> None:
    assert simulate(build("dualpipev", ranks=4, microbatches=8), Times(*times)).global_bubble == bubble


def test_dualpipev_s_bubble_is_constant_and_smaller_where_results_leave_at_once() -> None:
    """2 (P-1) if F and B are one action; (P-1) if each hands on its own result."""
    for ranks in range(1, 9):
        for microbatches in range(2 * ranks, 4 * ranks + 1, ranks):
            schedule = build("dualpipev", ranks=ranks, microbatches=microbatches)
            assert simulate(schedule).global_bubble == 2 * (ranks - 1)
            assert simulate(schedule).peaks == (2 * ranks + (ranks > 0),) * ranks
    apart = build("dualpipev", ranks=4, microbatches=8)
    assert simulate(Schedule(apart.name, 8, apart.placement, apart.ranks)).global_bubble == 3


def test_looped_bfs_is_as_fast_as_interleaved_and_holds_everything() -> None:
    for ranks, virtual, rounds in product(range(1, 9), range(1, 5), (1, 2, 3)):
        timeline = simulate(build("looped-bfs", ranks=ranks, virtual=virtual, microbatches=rounds * ranks))
        assert timeline.bubble_fraction == (ranks - 1) / (virtual * rounds * ranks + ranks - 1)
        assert timeline.peaks == (virtual * rounds * ranks,) * ranks


TORCH = {
    "interleaved": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "virtual"),
    [
        # Of other numbers of microbatches torch makes none: its groups are all of one size.
        *(("interleaved", *size) for size in ((2, 4, 2), (3, 6, 4), *((4, m, 2) for m in (3, 4, 8, 10)), (4, 5, 3))),
        *(("looped-bfs", 4, m, v) for m in (3, 8) for v in (1, 2)),
        *(("zb-h1", 4, m, v) for m in (2, 4, 8, 10) for v in (1, 2, 3)),
        *(("zb-v", p, m, 2) for p in (1, 2, 4) for m in (1, 3, 7, 9)),
        *(("dualpipev", p, m, 2) for p in (1, 2, 3, 4) for m in (8, 11)),
    ],
)
def test_the_order_is_torch_s_where_torch_has_one(name: str, ranks: int, microbatches: int, virtual: int) -> None:
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    ours = build(name, ranks=ranks, microbatches=microbatches, virtual=virtual)
    shared = {
        "num_stages": ours.n_stages, "group_size": ranks, "group_rank": 0, "submod": None, "has_backward": True,
        "stage_index_to_group_rank": dict(enumerate(ours.placement)),
    }  # fmt: skip
    stages = [
        SimpleNamespace(stage_index=stage, is_first=stage == 0, is_last=stage == ours.n_stages - 1, **shared)
        for stage in ours.stages_of(0)
    ]
    theirs = getattr(torch, TORCH[name])(stages, microbatches, loss_fn=lambda: None).pipeline_order
    assert [simple(theirs[rank]) for rank in range(ranks)] == [list(row) for row in ours.ranks]


def simple(actions: "list[SimpleNamespace | None]") -> list[Action]:
    """Torch's actions without idle slots, and with the two parts of an overlapped pair one after the other."""
    parts = [part for one in actions if one is not None for part in getattr(one, "sub_actions", None) or [one]]
    return [Action.parse(str(part)) for part in parts]
