"""Long steps are extrapolated: beside whole simulations."""

import pytest

from pipeproof.pipeline.layouts import pipelined
from pipeproof.pipeline.layouts.layout import Job, Layout
from pipeproof.pipeline.layouts.transformer import Transformer


def model(layers: int) -> Transformer:
    return Transformer("model", layers, 64, 1, 100, 128)


@pytest.mark.parametrize(
    ("name", "virtual"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zb-v", 2), ("v-half", 2)]
)
@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_a_long_step_is_what_its_simulation_says(
    name: str, virtual: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for microbatches in (4 * ranks, 7 * ranks, *((6 * ranks + 1,) if name != "interleaved" else ())):
        for layers in (ranks * virtual, 2 * ranks * virtual + ranks - 1):
            job = Job(model(layers), microbatches, 1)
            layout = Layout(pp=ranks, schedule=name, virtual=virtual)
            short = pipelined.pipelined(job, layout)
            with monkeypatch.context() as patch:
                patch.setattr(pipelined, "_FULL", 1000)
                pipelined._simulated.cache_clear()
                whole = pipelined.pipelined(job, layout)
            pipelined._simulated.cache_clear()
            assert short.held == whole.held
            assert short.stretch == pytest.approx(whole.stretch, rel=0.01)


def test_1f1b_in_closed_form() -> None:
    """(M + P - 1) / M, its bubble."""
    for ranks, microbatches in ((4, 8), (8, 64), (16, 16)):
        job = Job(model(ranks * 2), microbatches, 1)
        found = pipelined.pipelined(job, Layout(pp=ranks))
        assert found.stretch == pytest.approx((microbatches + ranks - 1) / microbatches)
        assert found.held[0] == 2 * min(ranks, microbatches)
