"""What the command ``tolerance`` does: measure floors and the smallest faults, and write the page and its picture."""

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from validation.cases.case import Case, CaseError
from validation.reports.gap_page import page
from validation.reports.gap_picture import gap_picture
from validation.reports.gaps import Row, measured
from validation.reports.picture import check_drawable
from validation.reports.terminal import Terminal
from validation.worlds.output_file import OutputFile


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
    """Measure ``survey`` and say it; ``arguments`` are what the user typed after ``pipeproof``."""
    survey.checked()
    if svg is not None:
        check_drawable(0)
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
        text = page(rows, command=shlex.join(["pipeproof", *arguments]), picture=picture)
        if svg is not None:
            svg_file.write(gap_picture(rows))
        page_file.write(text.encode())
    if markdown is None:
        terminal.say(text)
    return 0
