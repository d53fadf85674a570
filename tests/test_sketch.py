"""Looking at a tensor recognises it again, and leaves it as it was."""

import torch

from validation.whitebox.sketch import digest, sketch


def test_equal_bits_have_equal_digests_and_others_have_not() -> None:
    one = torch.arange(6.0)
    assert digest(one) == digest(one.clone())
    assert len({digest(one), digest(one.view(2, 3)), digest(one.double()), digest(-one)}) == 4


def test_a_tensor_that_was_looked_at_can_still_be_freed() -> None:
    tensor = torch.ones(4)
    digest(tensor)
    sketch(tensor)
    tensor.untyped_storage().resize_(0)  # as fully_shard does after a forward
    assert tensor.untyped_storage().nbytes() == 0
