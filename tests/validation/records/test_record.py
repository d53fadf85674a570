"""Records as values."""

import torch

from validation.records.against import Recorded
from validation.records.record import Record, RecordedOperation, config_differences, microbatch_digests


def test_what_two_configs_say_differently() -> None:
    one, other = (Record("expected", config, ()) for config in ({"seed": 0, "ranks": 2}, {"seed": 0, "virtual": 2}))
    assert list(config_differences(one, other)) == [("ranks", 2, None), ("virtual", None, 2)]
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
