"""``ci/tolerance``: measures rounding, and how far the smallest faults lie above it; writes a page and its picture."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from gap_page import page
from gap_picture import gap_picture
from gaps import Row, measured

from pipeproof.commands.ending import run_command
from pipeproof.commands.option_parser import OptionParser
from pipeproof.commands.selection import dtype_names
from pipeproof.own.case import DTYPES, MODELS, Case, CaseError
from pipeproof.reports.canvas import check_drawable
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.output_file import OutputFile


class Survey(NamedTuple):
    """What is measured: every model in every dtype with every number of microbatches."""

    models: Sequence[str]
    dtypes: Sequence[str]
    microbatches: Sequence[int]
    seed: int = 0

    def checked(self) -> "Survey":
        """This survey. Raises ``CaseError`` for what cannot be measured."""
        for count in self.microbatches:
            if count < 2:
                raise CaseError(f"--microbatches {count}: expected at least 2, for a fault here is to lose one of them")
        for model in self.models:
            Case("naive", 1, 1, 1, (1,), model=model)
        return self


def show_tolerance(survey: Survey, *, markdown: str | None, svg: str | None, arguments: Sequence[str]) -> int:
    """Measure ``survey`` and say it; ``arguments`` are what the user typed after ``ci/tolerance``."""
    survey.checked()
    if svg is not None:
        check_drawable()
    terminal, rows = Terminal(), list[Row]()
    with ExitStack() as files:
        page_file, svg_file = (files.enter_context(OutputFile(path)) for path in (markdown, svg))
        with terminal.progress("measuring") as show:
            for dtype in survey.dtypes:
                for model in survey.models:
                    for count in survey.microbatches:
                        show(f"{model} in {dtype}, {count} microbatches")
                        rows.append(measured(model, dtype=dtype, count=count, seed=survey.seed))
        picture = Path(svg).name if svg is not None else None
        text = page(rows, command=shlex.join(["ci/tolerance", *arguments]), picture=picture)
        if svg is not None:
            svg_file.write(gap_picture(rows))
        page_file.write(text.encode())
    if markdown is None:
        terminal.say(text)
    return 0


def main(arguments: Sequence[str]) -> int:
    """Measure what ``arguments`` ask for. Exit status 2 for what cannot be measured."""
    options = _options(arguments)
    models = [name.strip() for name in options.model.split(",")]
    survey = Survey(models, dtype_names(options.dtype), options.microbatches, options.seed)
    return show_tolerance(survey, markdown=options.markdown, svg=options.svg, arguments=arguments)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = OptionParser(
        prog="ci/tolerance", description=__doc__, epilog="Exit status: 0 measured; 2 what cannot be measured."
    )
    parser.add_argument("--model", default=",".join(MODELS), metavar="NAME,...", help="(default: all)")
    parser.add_argument("--dtype", default=",".join(DTYPES), metavar="NAME,...", help="(default: all)")
    parser.add_argument(
        "--microbatches", type=counts, default=(2, 4, 8, 16, 32), metavar="M,...", help="(default 2..32)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", metavar="FILE", help="write the page there, rather than to the terminal")
    parser.add_argument("--svg", metavar="FILE", help="draw it (needs the extra 'plot')")
    return parser.parse_args(arguments)


def counts(text: str) -> tuple[int, ...]:
    """``2,8`` as numbers; argparse names this function where it fails."""
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
