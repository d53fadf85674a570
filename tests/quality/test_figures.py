"""The house never grows: its figures are held against those that it had at best."""

import figures
from figures import Graph, constants, grown, kept, lines, sentences

from tests.support.golden import golden
from tests.support.sources import OURS, Source, sources


def test_no_figure_grows() -> None:
    now = figures.figures(OURS, sources("tests"))
    assert grown(now, kept()) == [], "make it smaller elsewhere; a figure that fell is kept by figures.py"


def test_a_figure_that_grew_is_told() -> None:
    before = {"lines of validation": 3, "small files": 2, "lines of validation/gone": 5}
    assert grown({"lines of validation": 3, "small files": 1, "lines of validation/new": 9}, before) == []
    golden("\n".join(grown({"lines of validation": 4, "small files": 2}, before)))


def test_lines_are_counted_by_room() -> None:
    found = lines(
        [
            Source("validation/a.py", "1\n2\n"),
            Source("validation/core/b.py", "1\n"),
            Source("validation/core/deep/c.py", "1\n"),
            Source("validation/wings/advise/d.py", "1\n2\n3\n"),
            Source("pipeline/e.py", "1\n"),
        ]
    )
    assert found == {
        "lines of validation": 7,
        "lines of validation/core": 2,
        "lines of validation/wings/advise": 3,
        "lines of pipeline": 1,
    }


def test_what_is_counted_in_a_file() -> None:
    numbers = "A = 3\nB: float = 0.5\nC = 'text'\nD = True\nE = A + 1\n"
    text = numbers + "assert x == 'four words are one'\nassert x == 'a few'\n"
    assert (constants(Source("a.py", text)), sentences(Source("a.py", text))) == (2, 1)


def test_what_a_door_loads() -> None:
    late = "def f():\n    import pipeproof.whitebox.c\n"
    graph = Graph(
        [
            Source("validation/__init__.py", ""),
            Source("validation/whitebox/__init__.py", "from pipeproof.whitebox.a import x\n"),
            Source("validation/whitebox/a.py", "import pipeproof.whitebox.b\n" + late),
            Source("validation/whitebox/b.py", ""),
            Source("validation/whitebox/c.py", "import torch\n"),
        ]
    )
    there = {one.rpartition(".")[2] for one in graph.loads("validation.whitebox")}
    assert there == {"validation", "whitebox", "a", "b"}
    assert graph.longest == 3
