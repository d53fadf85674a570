"""The layouts of public training runs are among the first three that are found."""

from collections.abc import Mapping
from typing import NamedTuple

import pytest

from pipeproof.pipeline.layouts.cluster import ACCELERATORS, Cluster
from pipeproof.pipeline.layouts.layout import Job, Recompute
from pipeproof.pipeline.layouts.search import Allowed, Kind, layouts, search, weighed
from pipeproof.pipeline.layouts.step_time import least_time
from pipeproof.pipeline.layouts.transformer import MODELS


class Run(NamedTuple):
    """A public run: what it trained on what, what ZeRO its framework had then, and tp, cp, pp, dp."""

    model: str
    batch: int
    sequence: int
    device: str
    devices: int
    zero: int
    sizes: tuple[int, int, int, int]


RUNS: Mapping[str, Run] = {
    # Grattafiori et al., The Llama 3 herd of models, 2024, table 4; sequences of 8,192 tokens
    "llama 3 on 8,192": Run("llama-3-405b", 2048, 8192, "h100", 8192, 1, (8, 1, 16, 64)),
    "llama 3 on 16,384": Run("llama-3-405b", 2048, 8192, "h100", 16384, 1, (8, 1, 16, 128)),
    # BigScience, BLOOM, 2022, section 3.4
    "bloom": Run("bloom-176b", 2048, 2048, "a100", 384, 1, (4, 1, 12, 8)),
    # Narayanan et al., Efficient large-scale language model training on GPU clusters, 2021, table 1
    "megatron 1.7 B": Run("gpt-1.7b", 512, 2048, "a100", 32, 0, (1, 1, 1, 32)),
    "megatron 3.6 B": Run("gpt-3.6b", 512, 2048, "a100", 64, 0, (2, 1, 1, 32)),
    "megatron 7.5 B": Run("gpt-7.5b", 512, 2048, "a100", 128, 0, (4, 1, 1, 32)),
    "megatron 76 B": Run("gpt-76b", 1792, 2048, "a100", 1024, 0, (8, 1, 4, 32)),
    # Korthikanti et al., Reducing activation recomputation in large transformer models, 2022, table 3
    "22 B": Run("gpt-22b", 4, 2048, "a100", 8, 0, (8, 1, 1, 1)),
    "175 B": Run("gpt-3-175b", 64, 2048, "a100", 64, 0, (8, 1, 8, 1)),
    "530 B": Run("gpt-530b", 280, 2048, "a100", 280, 0, (8, 1, 35, 1)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_a_public_run_is_among_the_first_three(name: str) -> None:
    run = RUNS[name]
    cluster = Cluster(ACCELERATORS[run.device], run.devices)
    allowed = Allowed(zero=tuple(range(run.zero + 1)))
    found = search(Job(MODELS[run.model], run.batch, run.sequence), cluster, allowed)
    assert run.sizes in [choice.sizes[:4] for choice in found.best]


@pytest.mark.long
@pytest.mark.parametrize(("name", "published"), [("llama 3 on 8,192", 0.43), ("llama 3 on 16,384", 0.41)])
def test_the_utilization_is_near_the_published_one(name: str, published: float) -> None:
    """Table 4 of the same paper. No constant is fitted to it."""
    run = RUNS[name]
    cluster = Cluster(ACCELERATORS[run.device], run.devices)
    job = Job(MODELS[run.model], run.batch, run.sequence)
    (choice,) = [one for one in search(job, cluster, Allowed(zero=(1,))).best if one.sizes[:4] == run.sizes]
    assert choice.time.utilization(cluster) == pytest.approx(published, rel=0.1)


SMALL = Job(MODELS["llama-3-8b"], 64, 8192)
EIGHT = Cluster(ACCELERATORS["h100"], 8)


@pytest.mark.long
def test_the_search_misses_no_faster_layout() -> None:
    """Against every legal layout, weighed one by one."""
    allowed = Allowed(micro=(1, 2))
    room = allowed.room * EIGHT.device.memory
    every = [one for layout in layouts(SMALL, EIGHT, allowed) if (one := weighed(SMALL, EIGHT, layout)) is not None]
    fitting = sorted((one for one in every if one.footprint.total <= room), key=lambda one: one.time.total)
    found = search(SMALL, EIGHT, allowed)
    assert found.best[0].time.total == fitting[0].time.total
    assert all(one.time.total >= least_time(SMALL, EIGHT, one.layout) for one in every)
    kinds = list(dict.fromkeys(one.sizes for one in fitting))
    assert [one.sizes for one in found.best] == kinds[:3]


def test_what_does_not_fit_says_how_near_it_comes() -> None:
    tight = Allowed(kinds=frozenset(), zero=(0,), recompute=(Recompute.NONE,))
    found = search(SMALL, EIGHT, tight)
    assert not found.best
    assert found.least is not None
    assert found.least.footprint.total > 18 * SMALL.model.parameters
    assert search(Job(SMALL.model, 3, 8192), EIGHT, tight).least is None


def test_only_what_is_allowed_is_used() -> None:
    found = search(SMALL, EIGHT, Allowed(kinds=frozenset({Kind.PIPELINE}), zero=(0,), schedules=("1f1b",)))
    assert found.best
    for choice in found.best:
        assert (choice.layout.tp, choice.layout.zero, choice.layout.schedule) == (1, 0, "1f1b")
