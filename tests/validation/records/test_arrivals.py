"""What follows from what all ranks bring to a check."""

from validation.records.arrivals import Arrival, disagreement, places_of, told


def test_ranks_that_run_other_microbatches_are_named() -> None:
    assert disagreement([None, ("a", "b"), ("a", "b")]) == {}
    assert disagreement([("a", "b"), None, ("b", "a")]) == {
        2: "other microbatches than those of rank 0: microbatch 0 first: it has the content of microbatch 1"
    }
    assert disagreement([None, None])[0].startswith("nobody says which microbatches")


def test_a_parameter_has_as_many_places_as_hold_it() -> None:
    arrivals = [Arrival({"a": 0, "b": 2}, None, ""), Arrival({"b": 1}, None, "")]
    assert places_of(arrivals) == {"a": [(0, 0)], "b": [(0, 2), (1, 1)]}


def test_what_is_wrong_is_told_in_one_line() -> None:
    assert told({0: "", 1: "x", 2: "y"}) == "rank 1: x; rank 2: y"
    assert told({0: ""}) == ""
