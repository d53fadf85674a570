"""The table of primitives: its formulas give what ``advise`` computes, and every primitive has a part and figures."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from pipeproof.wings.advise.cluster import Cluster, accelerator_named
from pipeproof.wings.advise.footprint import footprint, parameters, tokens
from pipeproof.wings.advise.layout import Job, Layout, Recompute
from pipeproof.wings.advise.pipelined import stretch
from pipeproof.wings.advise.step_time import _WIRE, step_time
from pipeproof.wings.advise.transformer import Experts, Transformer
from pipeproof.wings.primitives.primitive import PRIMITIVES, SYMBOLS, VARIANTS, figures, primitive_of
from pipeproof.wings.primitives.stacked import PARTS
from pipeproof.wings.primitives.stacks import PIPELINE

RANKS, MICROBATCHES = 4, 8
MODEL = Transformer("model", 8, 512, 8, 1, 2048, kv_heads=4, experts=Experts(8, 2, 1024))
ALONE = {
    "recompute": Layout(recompute=Recompute.FULL),
    "ddp": Layout(dp=RANKS),
    "zero-1": Layout(dp=RANKS, zero=1),
    "zero-2": Layout(dp=RANKS, zero=2),
    "zero-3": Layout(dp=RANKS, zero=3),
    "hsdp": Layout(dp=RANKS, zero=3),
    "tp": Layout(tp=RANKS),
    "sp": Layout(tp=RANKS),
    "pp": Layout(pp=RANKS),
    "ep": Layout(dp=RANKS, ep=RANKS),
    "cp": Layout(cp=RANKS),
}
# Nothing takes time but what is sent; one link for all.
CLUSTER = Cluster(replace(accelerator_named("h100"), flops=1e15 * 1e12, link=1e9, network=1e9), RANKS)


def job(layout: Layout) -> Job:
    return Job(MODEL, MICROBATCHES * layout.dp, 1024)


def value(formula: str, layout: Layout) -> float:
    """Of ``formula``, in which a space between two operands multiplies them."""
    product = re.sub(r"(?<=[\w)])\s+(?=[\w(])", " * ", formula)
    own, alone = parameters(MODEL, replace(layout, tp=1, pp=1, ep=1), 0), Layout(dp=layout.dp)
    symbols = {
        "n": layout.ranks,
        "P": own.dense + own.experts,
        "E": own.experts,
        "p": own.layer,
        "A": footprint(job(layout), alone).activations,
        "L": MODEL.layers,
        "k": tokens(job(layout), layout),
        "h": MODEL.hidden,
        "g": MODEL.keys * MODEL.head,
        "e": 2,
        "m": layout.microbatches(job(layout)),
        "v": layout.virtual,
    }
    assert symbols.keys() == SYMBOLS.keys()
    return float(eval(product, {"__builtins__": {}}, symbols))


def saved(layout: Layout, *parts: str) -> float:
    """What ``advise`` says that it saves of ``parts``, against the same ranks without it."""
    without = replace(layout, tp=1, cp=1, pp=1, ep=1, zero=0, recompute=Recompute.NONE)
    before, after = (footprint(job(layout), one) for one in (without, layout))
    return sum(float(getattr(before, part) - getattr(after, part)) for part in parts)


STATE = ("weights", "gradients", "optimizer")


@pytest.mark.parametrize(
    ("name", "parts", "within"),
    [
        ("recompute", ("activations",), 2e-2),  # the loss is formed in either case
        ("ddp", STATE, 1e-9),
        ("zero-1", STATE, 1e-9),
        ("zero-2", STATE, 1e-9),
        ("zero-3", STATE, 1e-9),
        ("hsdp", STATE, 1e-9),
        ("tp", STATE, 1e-9),
        ("sp", (*STATE, "activations"), 1e-3),  # the loss is formed on every rank
        ("pp", STATE, 1e-3),  # the embedding is on one rank
        ("ep", STATE, 1e-9),
        ("cp", ("activations",), 1e-9),
    ],
)
def test_what_is_saved_is_what_advise_computes(name: str, parts: tuple[str, ...], within: float) -> None:
    formula, _ = PRIMITIVES[name].saves
    assert value(formula, ALONE[name]) == pytest.approx(saved(ALONE[name], *parts), rel=within, abs=1e-6)


def sent(axis: str, each: float) -> Callable[[Layout], float]:
    """Bytes along ``axis`` in a step, over ``each``."""
    return lambda layout: getattr(step_time(job(layout), CLUSTER, layout), axis) * 1e9 * _WIRE / each


def computed_again(layout: Layout) -> float:
    """How much more is computed, as a share."""
    real = Cluster(accelerator_named("h100"), 1)
    again, once = (
        step_time(job(layout), real, one).compute for one in (layout, replace(layout, recompute=Recompute.NONE))
    )
    return again / once - 1


@pytest.mark.parametrize(
    ("name", "computed"),
    [
        ("ddp", sent("dp", 1)),
        ("zero-1", sent("dp", 1)),
        ("zero-2", sent("dp", 1)),
        ("zero-3", sent("dp", 1)),
        ("hsdp", sent("dp", 1)),
        ("tp", sent("tp", MODEL.layers * MICROBATCHES)),
        ("sp", sent("tp", MODEL.layers * MICROBATCHES)),
        ("ep", sent("ep", MODEL.layers * MICROBATCHES)),
        ("cp", sent("cp", MODEL.layers * MICROBATCHES)),
        ("recompute", computed_again),
        ("pp", lambda layout: stretch(job(layout), layout) - 1),
    ],
)
def test_what_it_costs_is_what_advise_computes(name: str, computed: Callable[[Layout], float]) -> None:
    formula, _ = PRIMITIVES[name].costs
    within = 1e-3 if name == "pp" else 1e-6  # the last rank computes the output, too
    assert value(formula, ALONE[name]) == pytest.approx(computed(ALONE[name]), rel=within)


def test_every_primitive_has_a_part_and_figures() -> None:
    assert {*PARTS, PIPELINE} == {*PRIMITIVES, *VARIANTS}
    assert all(primitive_of(name) in PRIMITIVES.values() for name in PARTS)
    assert figures().keys() == PRIMITIVES.keys()
    for name, one in figures().items():
        assert one.passed == one.seeds >= 20, name
        assert one.parameters > 0
        assert one.worst <= 20 * one.floor or one.worst == 0
