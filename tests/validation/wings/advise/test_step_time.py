"""How long a step takes: what is said between ranks, by the volumes that their authors state."""

from dataclasses import replace

import pytest

from pipeproof.wings.advise.cluster import ACCELERATORS, Cluster
from pipeproof.wings.advise.layout import Job, Layout
from pipeproof.wings.advise.step_time import step_time
from pipeproof.wings.advise.transformer import MODELS


@pytest.mark.parametrize(("zero", "bytes_a_parameter"), [(0, 4 + 4), (1, 4 + 2), (2, 4 + 2), (3, 4 + 2 + 2)])
def test_what_replicas_say_is_what_zero_states(zero: int, bytes_a_parameter: int) -> None:
    """Rajbhandari et al., ZeRO, 2020, section 7: an all-reduce is twice the gradients, which are fp32 here."""
    slow = Cluster(replace(ACCELERATORS["h100"], network=1e6), 2, per_node=1)  # so that nothing hides behind computing
    model = MODELS["gpt-1.7b"]
    time = step_time(Job(model, 2, 2048), slow, Layout(dp=2, zero=zero))
    said = time.dp * 0.8 * 1e6 / (1 / 2)
    assert said == pytest.approx(bytes_a_parameter * model.parameters, rel=0.001)
