"""The file of a long campaign, from which the next call goes on."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from pipeproof.own.case import CaseError
from pipeproof.own.fuzz import Tally
from pipeproof.pipeline.files import cannot_read
from pipeproof.worlds.output_file import OutputFile

PART = 500  # cases that are drawn together: what an interruption loses at most


_WHAT = "pipeproof fuzz --resume"


@dataclass
class Progress:
    """Parts of a campaign that have passed, and what they counted; kept in the file at ``path``, if there is one.

    ``asked`` is what decides what is drawn. ``undecided``: lines that replay the cases which rounding left open.
    ``seconds``: what it all took.
    """

    path: str | None
    asked: Mapping[str, Any]
    parts: int = 0
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    undecided: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @staticmethod
    def of(path: str | None, asked: Mapping[str, Any]) -> "Progress":
        """As the file has it, or none yet. Raises ``CaseError`` for a file of another campaign, or of none."""
        if path is None or not Path(path).exists():
            return Progress(path, asked)
        data = _read_json(path)
        for name, value in asked.items():
            if (there := data["asked"].get(name)) != value:
                raise CaseError(
                    f"--resume {path} is of a campaign with {name} {_word(there)}, and this one has {_word(value)}: "
                    "give what it has, or name a new file"
                )
        return Progress(path, asked, **{name: data[name] for name in ("parts", "counts", "undecided", "seconds")})

    def remaining_parts(self, budget: int) -> Iterator[tuple[int, int]]:
        """The parts that are still to run, so that there are ``budget`` cases in the end: how many, from which seed."""
        if self.path is None:
            yield budget, self.asked["seed"]
            return
        while (done := sum(self.counts.get("verdicts", {}).values())) < budget:
            yield min(PART, budget - done), self.asked["seed"] + (self.parts << 32)

    def resume(self, tally: Tally) -> None:
        """Let ``tally`` begin with what is known."""
        for name, counter in tally.counts.items():
            counter.update(self.counts.get(name, {}))
        tally.began -= self.seconds

    def keep(self, tally: Tally, undecided: Sequence[str]) -> None:
        """Write that one more part has run, after which all stands as ``tally``; lines that replay what is open."""
        if self.path is None:
            return
        self.parts += 1
        self.counts = {name: dict(counter) for name, counter in tally.counts.items()}
        self.undecided += undecided
        self.seconds = perf_counter() - tally.began
        data = {name: value for name, value in vars(self).items() if name != "path"}
        with OutputFile(self.path) as file:
            file.write_json({"file": _WHAT, **data})


def _read_json(path: str) -> dict[str, Any]:
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise CaseError(f"--resume: {cannot_read(path, error)}") from error
    except ValueError as error:
        raise CaseError(f"--resume {path} is no campaign's file: {error}; name a new file") from error
    if not isinstance(data, dict) or data.get("file") != _WHAT:
        raise CaseError(f"--resume {path} is no campaign's file: it was not written by {_WHAT}; name a new file")
    return data


def _word(value: Any) -> str:
    return ",".join(str(one) for one in value) if isinstance(value, list) else str(value)
