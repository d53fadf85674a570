"""Faults beside a loss scale: losses are multiplied by 1024, gradients divided by it, and something else is wrong."""

from dataclasses import replace

from pipeproof.cases.specimens import SPECIMENS, register
from pipeproof.cases.specimens.planting import both, on_gradients, scaled
from pipeproof.cases.specimens.scale import loss_divided

SCALE = 1024
_SCALED = both(loss_divided(lambda goal, count: goal.divisor / SCALE), on_gradients(scaled(1 / SCALE)))

for name in ("stage-negated", "microbatch-dropped", "gradients-all-zero", "activation-repeated", "loss-undivided"):
    register(replace(SPECIMENS[name], name=f"scaled-{name}", plant=both(_SCALED, SPECIMENS[name].plant)))
