"""Long steps are extrapolated: beside whole simulations. Stages are as long as what they have to do."""

import pytest

from pipeproof.wings.advise import pipelined
from pipeproof.wings.advise.layout import Job, Layout, Recompute
from pipeproof.wings.advise.pipelined import least_stretch, peaks, stretch, work
from pipeproof.wings.advise.transformer import MODELS, Transformer
from tests.support.sweeps import each_once


def model(layers: int, vocabulary: int = 1) -> Transformer:
    return Transformer("model", layers, 64, 1, vocabulary, 128)


SCHEDULES = [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zb-v", 2), ("v-half", 2)]


@pytest.mark.parametrize(*each_once(schedule=SCHEDULES, ranks=[5, 8, 2], vocabulary=[1, 1000]))
def test_a_long_step_is_what_its_simulation_says(
    schedule: tuple[str, int], ranks: int, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, virtual = schedule
    for microbatches in (4 * ranks, 7 * ranks, *((6 * ranks + 1,) if name != "interleaved" else ())):
        for layers in (ranks * virtual, 2 * ranks * virtual + ranks - 1):
            job = Job(model(layers, vocabulary), microbatches, 1)
            layout = Layout(pp=ranks, schedule=name, virtual=virtual)
            works = work(job, layout)
            short = stretch(job, layout), peaks(job, layout, works)
            with monkeypatch.context() as patch:
                patch.setattr(pipelined, "_FULL", 1000)
                patch.setattr(pipelined, "_HOLDS", 1000)
                pipelined._stretch.cache_clear()
                whole = stretch(job, layout), peaks(job, layout, works)
            pipelined._stretch.cache_clear()
            assert short[1] == pytest.approx(whole[1])
            assert short[0] == pytest.approx(whole[0], rel=0.01)
            assert least_stretch(job, layout) <= whole[0] * (1 + 1e-9)


def test_1f1b_in_closed_form() -> None:
    """(M + P - 1) / M, its bubble; and no schedule is faster than the bound, which is that."""
    for ranks, microbatches in ((4, 8), (8, 64), (16, 16)):
        job, layout = Job(model(ranks * 2), microbatches, 1), Layout(pp=ranks)
        assert stretch(job, layout) == pytest.approx((microbatches + ranks - 1) / microbatches, rel=1e-3)
        assert stretch(job, layout) == pytest.approx(least_stretch(job, layout), rel=1e-3)


def test_the_last_stage_has_the_output_to_compute() -> None:
    """As many operations as its two layers: every other rank waits for it, half of the time."""
    one = model(8)
    vocabulary = round(2 * one.operations(0, 1) / (2 * one.hidden))
    job, layout = Job(model(8, vocabulary), 400, 1), Layout(pp=4)
    assert work(job, layout) == pytest.approx((0.8, 0.8, 0.8, 1.6), rel=1e-3)
    assert stretch(job, layout) == pytest.approx(1.6, rel=0.02)
    assert stretch(job, Layout()) == 1, "alone it waits for nobody"


def test_each_layer_counts_as_itself() -> None:
    """The first three layers of DeepSeek-V3 have no experts, and less to do than others."""
    deepseek = MODELS["deepseek-v3"]
    job, layout = Job(deepseek, 64, 4096), Layout(pp=61)
    found = work(job, layout)
    each = [deepseek.operations(layer, 4096) for layer in range(61)]
    assert found[3] / found[0] == pytest.approx(each[3] / each[0])
    assert found[60] / found[3] == pytest.approx(1 + deepseek.output_operations / each[3])


def test_what_is_computed_again_makes_backwards_longer() -> None:
    job = Job(model(8), 8, 1)
    once, again = (
        stretch(job, Layout(pp=4, schedule="zb-h1", recompute=one)) for one in Recompute if one != "selective"
    )
    assert once != again
