"""What a case is run on: its model, its microbatches, and what its steps clip to."""

from pipeproof.own.case import Case
from pipeproof.reference.data import Batch, Shapes, microbatches
from pipeproof.reference.model import DTYPES, Model, build_model
from pipeproof.reference.step import Recipe

# What a first step is clipped to must be below its norm, or clipping is not seen. Over 13,666 random cases the least
# norm was 0.062 with "frozen", 0.13 with "twice" and 0.29 with the other models, which the recipe's own bound is for.
_CLIPPED = {"frozen": 0.01, "twice": 0.03}
_ROOM = 1e6  # a norm that no step here comes near


def data_for(case: Case, operation: int) -> list[Batch]:
    """The microbatches of operation ``operation`` of the plan; different ones for each, so that stale ones show."""
    shapes = Shapes(ragged=case.ragged, unequal=case.unequal)
    count = case.microbatches * case.replicas
    batches = microbatches(case.model, count=count, shapes=shapes, seed=case.seed * 1000 + operation)
    return [batch.cast(DTYPES[case.dtype]) for batch in batches]


def model_for(case: Case) -> Model:
    """The model that ``case`` is about, whole, on the CPU, with the weights that every rank begins with."""
    return build_model(case.model, layers=case.layers, seed=case.seed, dtype=case.dtype)


def max_norm_of(case: Case, operation: int) -> float:
    """What operation ``operation`` of the plan clips to: its first step is clipped, later ones have room to spare."""
    return _CLIPPED.get(case.model, Recipe().max_norm) if operation == case.plan.index("train") else _ROOM
