"""What a layout may be."""

import re
from dataclasses import replace

import pytest

from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.wings.advise.cluster import ACCELERATORS, Cluster, accelerator_named
from pipeproof.wings.advise.layout import Job, Layout, problems
from pipeproof.wings.advise.transformer import MODELS
from tests.support.golden import golden

LLAMA = Job(MODELS["llama-3-8b"], 64, 8192)
MIXTRAL = Job(MODELS["mixtral-8x7b"], 64, 8192)


@pytest.mark.parametrize(
    ("layout", "job", "said"),
    [
        (Layout(tp=3), LLAMA, "tp 3 does not divide heads 32: use a divisor"),
        (Layout(tp=64), LLAMA, "tp 64 does not divide heads 32"),
        (Layout(cp=3), LLAMA, r"2 \* cp 6 does not divide sequence 8192"),
        (Layout(dp=3), LLAMA, r"dp \* micro 3 does not divide batch 64"),
        (Layout(pp=16, virtual=4), LLAMA, "32 layers cannot fill 64 stages"),
        (Layout(dp=8, ep=8), LLAMA, "ep 8: llama-3-8b has no experts"),
        (Layout(dp=8, ep=3), MIXTRAL, "ep 3 does not divide 8 experts"),
        (Layout(dp=4, ep=8), MIXTRAL, r"ep 8 does not divide dp \* cp 4"),
    ],
)
def test_what_cannot_be_says_why(layout: Layout, job: Job, said: str) -> None:
    assert any(re.match(said, problem) for problem in problems(layout, job))


def test_what_can_be_has_no_problem() -> None:
    layout = Layout(tp=8, cp=2, pp=4, dp=16)
    assert not list(problems(layout, LLAMA))
    assert layout.ranks == 1024
    golden(layout.sizes)
    assert layout.microbatches(LLAMA) == 4
    assert Layout().sizes == "one device"


def test_a_cluster_is_devices_in_nodes() -> None:
    cluster = Cluster(ACCELERATORS["h100"], 64)
    assert cluster.between(8) > cluster.between(16)
    with pytest.raises(ScheduleError, match="devices is 0"):
        Cluster(ACCELERATORS["h100"], 0)
    with pytest.raises(ScheduleError, match="unknown device 'h10': did you mean 'h100'"):
        accelerator_named("h10")


@pytest.mark.parametrize("name", ACCELERATORS)
def test_every_device_of_the_table_can_be_had(name: str) -> None:
    assert Cluster(accelerator_named(name), 8).device.name == name


def test_a_figure_that_cannot_be_is_said_as_it_was_typed() -> None:
    with pytest.raises(ScheduleError, match="flops is 1e\\+16: expected a number above 0"):
        Cluster(replace(ACCELERATORS["h100"], flops=1e28), 8)
