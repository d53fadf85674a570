"""The layouts of public training runs are among the first three that are found."""

import pytest

from pipeproof.wings.advise.cluster import ACCELERATORS, Cluster
from pipeproof.wings.advise.layout import Job, Layout, Recompute, problems
from pipeproof.wings.advise.search import LONG, Allowed, Choice, Kind, find_layouts, weigh
from pipeproof.wings.advise.step_time import least_time
from pipeproof.wings.advise.transformer import MODELS
from tests.support.sweeps import sampled
from tests.validation.wings.advise import every_layout
from tests.validation.wings.advise.public_runs import NOT_FOUND, RUNS, Run


def advised(run: Run, allowed: Allowed, *, most: int = 3) -> list[Choice]:
    cluster = Cluster(ACCELERATORS[run.device], run.devices, run.per_node)
    return list(find_layouts(Job(run.model, run.batch, run.sequence), cluster, allowed, most=most).best)


@pytest.mark.long
@pytest.mark.parametrize("name", sampled(RUNS, 8))
def test_a_public_run_is_among_the_first_three_or_known_not_to_be(name: str) -> None:
    run = RUNS[name]
    found = advised(run, Allowed(zero=tuple(range(run.zero + 1))))
    assert (run.sizes in [choice.sizes for choice in found]) == (name not in NOT_FOUND)


def test_most_public_runs_are_found() -> None:
    assert len(RUNS) == 43
    assert len(RUNS) - len(NOT_FOUND) == 30
    for run in RUNS.values():
        tp, cp, pp, dp, ep = run.sizes
        assert tp * cp * pp * dp == run.devices
        assert not list(problems(Layout(tp, cp, pp, dp, ep), Job(run.model, run.batch, run.sequence)))


@pytest.mark.long
@pytest.mark.parametrize(("name", "published"), [("llama 3 on 8,192", 0.43), ("llama 3 on 16,384", 0.41)])
def test_the_utilization_is_near_the_published_one(name: str, published: float) -> None:
    """Table 4 of the same paper. No constant is fitted to it."""
    run = RUNS[name]
    (choice,) = [one for one in advised(run, Allowed(zero=(1,))) if one.sizes == run.sizes]
    assert choice.time.utilization(Cluster(ACCELERATORS[run.device], run.devices)) == pytest.approx(published, rel=0.1)


SMALL = Job(MODELS["llama-3-8b"], 64, 8192)
EIGHT = Cluster(ACCELERATORS["h100"], 8)


@pytest.mark.long
def test_the_search_misses_no_faster_layout() -> None:
    """Against every legal layout, weighed one by one."""
    allowed = Allowed(micro=(1, 2))
    room = allowed.room * EIGHT.device.memory
    assert every_layout.LONG == LONG
    legal = every_layout.every_layout(SMALL, EIGHT, micro=allowed.micro)
    every = [one for layout in legal if (one := weigh(SMALL, EIGHT, layout)) is not None]
    fitting = sorted((one for one in every if one.footprint.total <= room), key=lambda one: one.time.total)
    found = find_layouts(SMALL, EIGHT, allowed)
    assert found.best[0].time.total == fitting[0].time.total
    assert all(one.time.total >= least_time(SMALL, EIGHT, one.layout) * (1 - 1e-9) for one in every)
    kinds = list(dict.fromkeys(one.sizes for one in fitting))
    assert [one.sizes for one in found.best] == kinds[:3]


def test_what_does_not_fit_says_how_near_it_comes() -> None:
    tight = Allowed(kinds=frozenset(), zero=(0,), recompute=(Recompute.NONE,))
    found = find_layouts(SMALL, EIGHT, tight)
    assert not found.best
    assert found.least.footprint.total > 18 * SMALL.model.parameters
    assert find_layouts(Job(SMALL.model, 3, 8192), EIGHT, tight).least is None


def test_only_what_is_allowed_is_used() -> None:
    found = find_layouts(SMALL, EIGHT, Allowed(kinds=frozenset({Kind.PIPELINE}), zero=(0,), schedules=("1f1b",)))
    assert found.best
    for choice in found.best:
        assert (choice.layout.tp, choice.layout.zero, choice.layout.schedule) == (1, 0, "1f1b")
