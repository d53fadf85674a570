"""A user's step in which a fault is planted, and what its verdict makes of each."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from pipeproof.core.verdict import Verdict
from pipeproof.wings.mutate.mutants import MUTANTS
from pipeproof.wings.mutate.mutation import Outcome, Tried, choose
from pipeproof.wings.mutate.planting import Planting


@dataclass(frozen=True)
class PlantedStep:
    """``step``, with a fault on one ``rank``, or on all (None). Ranks that it changed leave a file in ``folder``."""

    step: Callable[..., Any]
    name: str
    rank: int | None
    folder: str

    def __call__(self, model: Any, microbatches: Any) -> Any:
        own = dist.get_rank()
        if self.rank not in (None, own):
            return self.step(model, microbatches)
        fault = Planting()
        try:
            with MUTANTS[self.name].plant(fault):
                return self.step(model, microbatches)
        finally:
            if fault.hits:
                Path(self.folder, str(own)).touch()


Judge = Callable[[Callable[..., Any]], Verdict]


def mutate_step(step: Callable[..., Any], judge: Judge, *, ranks: int, only: Collection[str] = ()) -> Iterator[Tried]:
    """What ``judge``, which gives the verdict on a step, makes of each fault in this one, one after the other.

    A fault is planted where ``mutate`` plants it, and is gone with the model of its run. Raises ``WhiteBoxError`` for
    an unknown name of a fault. Whoever calls this has seen that the step passes without one.
    """
    return (_try(name, step, judge, ranks) for name in choose(only))


def _try(name: str, step: Callable[..., Any], judge: Judge, ranks: int) -> Tried:
    mutant = MUTANTS[name]
    for rank in [None] if mutant.everywhere else reversed(range(ranks)):
        with TemporaryDirectory() as folder:
            verdict = judge(PlantedStep(step, name, rank, folder))
            changed = any(Path(folder).iterdir())
        if changed:
            outcome, how = _outcome(verdict)
            return Tried(name, mutant.summary, outcome, rank, how)
    return Tried(name, mutant.summary, "not planted")


def _outcome(verdict: Verdict) -> tuple[Outcome, str]:
    """What the verdict says of a fault that changed something: a crash or a hang has caught it, a doubt has not."""
    if verdict.outcome == "fail" or verdict.ended:
        return "caught", verdict.summary
    return ("let pass", "") if verdict.outcome == "pass" else ("not judged", verdict.summary)
