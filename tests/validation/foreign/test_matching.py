"""Which parameter is which: by identity, by name, by a mapping, by content, and when nothing can tell."""

import pytest

from pipeproof.foreign.matching import Local, match, renamed
from tests.support.golden import golden

# Two blocks of a norm, whose weights are all alike, and a linear layer.
KNOWN = {
    "a.norm": b"ones",
    "a.linear": b"a",
    "b.norm": b"ones",
    "b.linear": b"b",
}


def named(*parts: list[Local]) -> list[str | None]:
    found = match(parts, KNOWN).names
    return [found.get((i, k)) for i, part in enumerate(parts) for k in range(len(part))]


def test_names_with_their_contents_are_taken_as_they_are() -> None:
    part = [Local("b.norm", content=b"ones"), Local("b.linear", content=b"b")]
    assert named(part) == ["b.norm", "b.linear"]


def test_identity_comes_before_the_name() -> None:
    assert named([Local("a.linear", identical="b.linear", content=b"b")]) == ["b.linear"]


def test_content_comes_before_a_name_that_has_another_content() -> None:
    part = [Local("a.norm", content=b"ones"), Local("a.linear", content=b"b")]
    assert named(part) == ["b.norm", "b.linear"], "a slice that counts from the beginning again"


def test_alike_contents_are_told_by_their_neighbours() -> None:
    first, second = ([Local("0", content=b"ones"), Local("1", content=content)] for content in (b"a", b"b"))
    assert named(first, second) == ["a.norm", "a.linear", "b.norm", "b.linear"]


def test_what_only_neighbours_tell_is_dropped_where_something_does_not_fit() -> None:
    """The norm comes after its layer here: the neighbours point one block too far, and off the end."""
    parts = [
        Local("0", content=b"a"),
        Local("1", content=b"ones"),
        Local("2", content=b"b"),
        Local("3", content=b"ones"),
    ]
    assert named(parts) == ["a.linear", None, "b.linear", None]
    why = match([parts], KNOWN).unmatched
    golden("\n".join(why.values()))


def test_other_weights_under_a_known_name_are_still_that_parameter() -> None:
    assert named([Local("a.norm", content=b"ones"), Local("a.linear", content=b"other")])[1] == "a.linear"


@pytest.mark.parametrize("content", [None, b"other"], ids=["not seen", "other weights"])
def test_what_its_weights_do_not_tell_is_called_as_what_lies_beside_it(content: bytes | None) -> None:
    part = [Local("a.norm", identical="b.norm"), Local("a.linear", content=content)]
    assert named(part) == ["b.norm", "b.linear"], "a layer that counts from the beginning again"


def test_where_those_beside_it_differ_its_name_counts() -> None:
    known = {"a.x": b"1", "a.y": b"2", "a.z": b"3", "b.x": b"4", "c.y": b"5"}
    part = [Local("a.x", identical="b.x"), Local("a.y", identical="c.y"), Local("a.z")]
    assert match([part], known).names[0, 2] == "a.z"


def test_what_is_nowhere_is_said_so() -> None:
    found = match([[Local("extra", content=b"x")], [Local("y", said="z")]], KNOWN)
    assert found.unmatched.keys() == {(0, 0), (1, 0)}
    golden("\n".join(found.unmatched.values()))


def test_the_longest_prefix_is_replaced() -> None:
    names = {"stage.": "", "stage.1.": "b.", "x": "y"}
    assert renamed(names, "stage.1.norm") == "b.norm"
    assert renamed(names, "stage.a.norm") == "a.norm"
    assert renamed(names, "other") == "other"
    assert renamed(str.upper, "a") == "A"
    assert renamed(None, "a") is None


def test_a_function_of_three_is_given_rank_and_chunk() -> None:
    def of_three(name: str, rank: int, chunk: int) -> str:
        return f"{rank + 2 * chunk}.{name}"

    assert renamed(of_three, "weight", rank=1, chunk=3) == "7.weight"
    assert renamed(lambda name, width=3, depth=4: f"{name}{width}", "a", rank=1) == "a3", (
        "what has a default is its own"
    )
