"""The file of a long campaign: how far it has come, so that the next call goes on from there."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeproof.cases.fuzz import Tally
from pipeproof.commands.option_parser import UsageError
from pipeproof.pipeline.files import cannot_read
from pipeproof.pipeline.sizes import some
from pipeproof.worlds.output_file import OutputFile

PART = 500  # cases that are drawn together: what an interruption loses at most
_WHAT = "pipeproof fuzz --resume"


@dataclass(frozen=True)
class DrawnCases:
    """Cases that are drawn together: so many, from a seed."""

    seed: int
    cases: int


@dataclass
class CampaignFile:
    """Parts of a campaign that have passed, and what they counted. ``asked`` is what decides what is drawn.

    ``undecided``: lines that replay the cases which rounding left open. ``seconds``: what it all took.
    """

    path: str
    asked: Mapping[str, Any]
    parts: int = 0
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    undecided: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @staticmethod
    def opened(path: str, asked: Mapping[str, Any]) -> "CampaignFile":
        """The file as it is, or a new one. Raises ``UsageError`` for one that is another campaign's, or none."""
        if not Path(path).exists():
            return CampaignFile(path, asked)
        data = _read(path)
        for name, value in asked.items():
            if (there := data["asked"].get(name)) != value:
                raise UsageError(
                    f"--resume {path} is of a campaign with {name} {_word(there)}, and this one has {_word(value)}: "
                    "give what it has, or name a new file"
                )
        kept = {name: data[name] for name in ("parts", "counts", "undecided", "seconds")}
        return CampaignFile(path, asked, **kept)

    @property
    def cases(self) -> int:
        """How many cases have passed, or were left open."""
        return sum(self.counts.get("verdicts", {}).values())

    def left(self, budget: int) -> Iterator[DrawnCases]:
        """The parts that are still to run, so that there are ``budget`` cases in the end."""
        while self.cases < budget:
            yield DrawnCases(self.asked["seed"] + (self.parts << 32), min(PART, budget - self.cases))

    def resumed(self, tally: Tally) -> None:
        """Let ``tally`` begin with what is known."""
        for name, counter in tally.counts.items():
            counter.update(self.counts.get(name, {}))
        tally.began -= self.seconds

    def keep(self, tally: Tally, undecided: list[str], *, seconds: float) -> None:
        """Write that one more part has run, after which the campaign stands as ``tally``."""
        self.parts += 1
        self.counts = {name: dict(counter) for name, counter in tally.counts.items()}
        self.undecided += undecided
        self.seconds = seconds
        told = {"asked": self.asked, "parts": self.parts, "counts": self.counts}
        with OutputFile(self.path) as file:
            file.write_json({"file": _WHAT, **told, "undecided": self.undecided, "seconds": seconds})

    @property
    def open(self) -> str:
        """What earlier parts left open, in words; nothing where they did not."""
        if not self.undecided:
            return ""
        return f"rounding was too coarse to decide {some(len(self.undecided), 'case')}, such as:\n{self.undecided[0]}"


def _read(path: str) -> dict[str, Any]:
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"--resume: {cannot_read(path, error)}") from error
    except ValueError as error:
        raise UsageError(f"--resume {path} is no campaign's file: {error}; name a new file") from error
    if not isinstance(data, dict) or data.get("file") != _WHAT:
        raise UsageError(f"--resume {path} is no campaign's file: it was not written by {_WHAT}; name a new file")
    return data


def _word(value: Any) -> str:
    return ",".join(str(one) for one in value) if isinstance(value, list) else str(value)
