"""What follows from what all ranks bring to a check."""

from validation.records.arrivals import Arrival, Run, disagreement, places_of, run_of, told


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


def test_ranks_that_hold_the_same_are_replicas_with_microbatches_of_their_own() -> None:
    first, last = {"a": 0}, {"b": 1}
    arrivals = [Arrival(held, given, "") for held in (first, last) for given in (("x", "y"), ("z", "w"))]
    run, problems = run_of(arrivals)
    assert problems == {}
    assert run == Run((0, 1, 0, 1), ("x", "y", "z", "w"), ((0, 1), (2, 3), (0, 1), (2, 3)))
    assert run.as_in(("x", "z", "y", "w")).shares == ((0, 2), (1, 3), (0, 2), (1, 3))
    assert run.as_in(("x", "z", "y", "v")) == run, "other microbatches than those keep their numbers"
    assert run.together([["X", "Y"], None, None, ["Z", "W"]]) == ["X", "Y", "Z", "W"]


def test_replicas_that_say_all_microbatches_leave_open_which_are_theirs() -> None:
    run, problems = run_of([Arrival({"a": 0}, ("x", "y"), ""), Arrival({"a": 0}, None, "")])
    assert (run, problems) == (Run((0, 1), ("x", "y"), (None, None)), {})


def test_a_stage_alone_in_replicas_makes_none_of_the_model() -> None:
    arrivals = [Arrival({"a": 0}, ("x",), ""), Arrival({"a": 0}, ("x",), ""), Arrival({"b": 1}, ("x",), "")]
    run, problems = run_of(arrivals)
    assert (run.count, run.shares, problems) == (1, ((0,), (0,), (0,)), {})


def test_a_replica_s_ranks_must_agree() -> None:
    arrivals = [Arrival({"a": 0}, ("x",), ""), Arrival({"a": 0}, ("y",), "")] + [Arrival({"b": 1}, ("x",), "")] * 2
    assert list(run_of(arrivals)[1]) == [3]
