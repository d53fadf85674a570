"""What a rank knows of the model that its step was given."""

import gc
import weakref

from torch import nn

from pipeproof.foreign.rank import _Origin


def test_what_a_step_replaces_is_kept_so_that_nothing_else_comes_to_lie_there() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    origin, freed = _Origin(model), weakref.ref(model[1])
    assert origin.name(model[1], "weight", model[1].weight) == "1.weight"
    model[1] = nn.Linear(2, 2)
    gc.collect()
    assert freed() is not None
    assert origin.name(model[1], "weight", model[1].weight) is None
