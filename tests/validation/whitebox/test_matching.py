"""Which parameter is which: by identity, by name, by a mapping, by content, and when nothing can tell."""

from typing import Any

import pytest

from pipeproof.whitebox.matching import Local, match, rename
from tests.support.golden import golden

# Two blocks of a norm, whose weights are all alike, and a linear layer.
KNOWN = {"a.norm": b"ones", "a.linear": b"a", "b.norm": b"ones", "b.linear": b"b"}
OTHERS = {"a.x": b"1", "a.y": b"2", "a.z": b"3", "b.x": b"4", "c.y": b"5"}
ONES, A, B, STRANGE = b"ones", b"a", b"b", b"other"


def locals_of(**contents: bytes) -> list[Local]:
    """Parameters of these names (``_`` for a dot) and contents."""
    return [Local(name.replace("_", "."), content=content) for name, content in contents.items()]


# Parts, and the reference's name of every parameter (None: it has none).
CASES: dict[str, tuple[list[list[Local]], list[str | None]]] = {
    "names with their contents": ([locals_of(b_norm=ONES, b_linear=B)], ["b.norm", "b.linear"]),
    "identity before the name": ([[Local("a.linear", identical="b.linear", content=B)]], ["b.linear"]),
    "content before a name of other content": ([locals_of(a_norm=ONES, a_linear=B)], ["b.norm", "b.linear"]),
    "alike contents by their neighbours": (
        [[Local("0", content=ONES), Local("1", content=one)] for one in (A, B)],
        ["a.norm", "a.linear", "b.norm", "b.linear"],
    ),
    # The norm comes after its layer here: the neighbours point one block too far, and off the end.
    "neighbours where something does not fit": (
        [[Local(str(k), content=one) for k, one in enumerate((A, ONES, B, ONES))]],
        ["a.linear", None, "b.linear", None],
    ),
    "other weights under a known name": ([locals_of(a_norm=ONES, a_linear=STRANGE)], [None, "a.linear"]),
    **{
        f"what lies beside it, {content}": (
            [[Local("a.norm", identical="b.norm"), Local("a.linear", content=content)]],
            ["b.norm", "b.linear"],
        )
        for content in (None, STRANGE)
    },
    "nowhere": ([[Local("extra", content=b"x")], [Local("y", said="z")]], [None, None]),
    "copies whose names say nothing": (
        [locals_of(a_norm=ONES, a_linear=A), locals_of(x=A)],
        ["a.norm", "a.linear", "a.linear"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_parameter_has_its_name(name: str) -> None:
    parts, names = CASES[name]
    found = match(parts, KNOWN)
    assert [found.names.get((i, k)) for i, part in enumerate(parts) for k in range(len(part))] == names
    assert len(found.unmatched) == names.count(None)
    if None in names:
        golden("\n".join(found.unmatched.values()))


def test_where_mates_differ_its_name_counts() -> None:
    part = [Local("a.x", identical="b.x"), Local("a.y", identical="c.y"), Local("a.z")]
    assert match([part], OTHERS).names[0, 2] == "a.z"


def of_three(name: str, rank: int, chunk: int) -> str:
    return f"{rank + 2 * chunk}.{name}"


def of_one(name: str, width: int = 3, depth: int = 4) -> str:
    """What has a default is its own."""
    return f"{name}{width}"


PREFIXES = {"stage.": "", "stage.1.": "b.", "x": "y"}


@pytest.mark.parametrize(
    ("names", "name", "made"),
    [
        (PREFIXES, "stage.1.norm", "b.norm"),
        (PREFIXES, "stage.a.norm", "a.norm"),
        (PREFIXES, "other", "other"),
        (str.upper, "a", "A"),
        (None, "a", None),
        (of_three, "weight", "7.weight"),
        (of_one, "a", "a3"),
    ],
)
def test_names_are_made_by_prefix_or_function(names: Any, name: str, made: str | None) -> None:
    assert rename(names, name, rank=1, chunk=3) == made
