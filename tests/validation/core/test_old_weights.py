"""What proves that a step had a step before's weights: all of it, bit for bit."""

import torch

from pipeproof.core.old_weights import Given, _ObservedStep


def test_it_is_what_was_given_where_every_gradient_and_every_loss_is() -> None:
    one, due = torch.tensor([2.0]), torch.tensor([1.0])
    seen = _ObservedStep({0: (3.0, 1.0), None: (4.0, 1.0)}, {"a": (one, due), "b": (one, due)})
    assert seen.is_that(Given((3.0,), 4.0, {"a": one, "b": one}))
    assert not seen.is_that(Given((3.0,), 4.0, {"a": one, "b": due})), "one gradient of two"
    assert not seen.is_that(Given((3.0,), 4.0, {"a": one})), "one is not there"
    assert not seen.is_that(Given((3.0,), 5.0, {"a": one, "b": one})), "another loss of the whole step"
