"""Records as values."""

import pytest
import torch

from pipeproof.records.record import (
    ContentError,
    Record,
    Recorded,
    RecordedOperation,
    config_differences,
    digest,
    microbatch_digests,
)


def test_what_two_configs_say_differently() -> None:
    one, other = (Record("expected", config, ()) for config in ({"seed": 0, "ranks": 2}, {"seed": 0, "virtual": 2}))
    assert list(config_differences(one, other)) == [("pp", 2, None), ("virtual", None, 2)]
    assert list(config_differences(one, one)) == []


def test_microbatches_are_told_apart_by_inputs_and_by_target() -> None:
    x, y = torch.zeros(2), torch.ones(2)
    same, tuple_of_one, other_input, other_target = microbatch_digests([(x, y), ((x,), y), (y, y), (x, x)])
    assert same == tuple_of_one
    assert len({same, other_input, other_target}) == 3


def test_without_a_measured_floor_little_is_rounding_much_is_wrong_and_the_rest_unknown() -> None:
    gradients = {"w": torch.zeros(1), "b": torch.zeros(1, dtype=torch.bfloat16)}
    floors = Recorded(RecordedOperation("train", (), (), gradients=gradients))
    assert [floors.gradient("w").outcome(error) for error in (1e-7, 1e-5, 1e-3)] == ["pass", "unknown", "fail"]
    assert [floors.total().outcome(error) for error in (1e-7, 1e-5, 1e-3)] == ["pass", "unknown", "fail"]
    assert floors.gradient("b").outcome(3e-2) == "unknown"


def test_a_record_says_what_it_is_of() -> None:
    assert Record("expected", {"case": "x", "model": "y"}, ()).name == "x"
    assert Record("observed", {"model": "y"}, (RecordedOperation("train", (), ()),)).name == "y"


def test_equal_bits_have_one_digest_however_they_lie_in_memory() -> None:
    table = torch.arange(6.0).reshape(2, 3)
    assert digest(table) == digest(table.clone()) == digest(table.t().contiguous().t())
    assert len(digest(table)) == 64


def test_whatever_differs_has_another_digest() -> None:
    """In bits, shape, type or structure; parts do not run into each other."""
    table, signed = torch.arange(6.0).reshape(2, 3), torch.tensor([[-0.0, 1, 2], [3, 4, 5]])
    tables = [table, torch.arange(6.0), table.reshape(3, 2), table.double(), table * (1 + 1e-7), signed]
    tensors = [torch.tensor(1.0), torch.ones(3, dtype=torch.bfloat16), torch.empty(0), torch.tensor([True])]
    values = [*tables, *tensors, (table,), {"x": table}, None, 3, ("ab", "c"), ("a", "bc"), [[1], 2], [[1, 2]]]
    assert len({digest(value) for value in values}) == len(values)


def test_what_a_digest_is_of_can_still_be_resized_by_its_job() -> None:
    given = torch.ones(4)
    digest(given)
    assert given.untyped_storage().resizable()


def test_what_has_no_digest_is_named() -> None:
    with pytest.raises(ContentError, match="a object has no digest: expected tensors"):
        digest([object()])
