"""Known faults in foreign runtimes, each with its smallest case.

FINDINGS.md explains causes. A campaign first runs each line here: faults present on this torch are excluded from random
cases, absent ones are not. So no excuse outlives its fault.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeproof.own.case import Case
from pipeproof.own.fuzz import judge_case
from pipeproof.own.runtimes import OWN, UNUSED
from pipeproof.pipeline.action import GIVES_WEIGHT_GRADIENT, Kind
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.world import World


@dataclass(frozen=True)
class Finding:
    """A known fault: ``line`` replays its smallest case; ``shows`` selects affected cases on its runtime.

    csv: the schedule, if no family has it: ``own.csv`` in the line. tries: attempts until the fault shows; several if
    it depends on uninitialised memory, and shows in most runs.
    """

    name: str
    line: str
    shows: Callable[[Case], bool]
    csv: str = ""
    tries: int = 1

    def verdict(self, world: World) -> str:
        """Run the smallest case: ``pass``, ``fail``, ``unknown``, or ``raised``."""
        with TemporaryDirectory() as folder:
            file = Path(folder, "own.csv")
            file.write_text(self.csv)
            case = Case.parse(self.line.replace("own.csv", str(file)))
            for _ in range(self.tries):
                try:
                    outcome: str = judge_case(case, world).outcome
                except RankFailed:
                    outcome = "raised"
                if outcome != "pass":
                    break
        return outcome


def _is_scaled(case: Case) -> bool:
    return case.microbatches > 1 and "unscaled" not in case.options


def _split_stages(case: Case) -> set[int]:
    """Return stages whose backward torch splits; stage 0 is deferred as a whole."""
    kinds = {(action.stage, action.kind) for row in case.built.ranks for action in row}
    return {stage for stage, kind in kinds if kind is Kind.BACKWARD_INPUT and stage > 0}


def _inner_splits(case: Case) -> bool:
    return bool(_split_stages(case) - {case.stages - 1})


def _neighbours(case: Case) -> bool:
    return any(one == two for one, two in pairwise(case.built.placement))


def _losses_out_of_order(case: Case) -> bool:
    last = case.stages - 1
    row = case.built.ranks[case.built.placement[last]]
    order = [action.microbatch for action in row if action.stage == last and action.kind is Kind.FORWARD]
    return case.microbatches > 1 and ("descending" in case.options or order != sorted(order))


def _one_phase(case: Case) -> bool:
    """True if some stage has no forward between its first and last backward."""
    for stage in range(case.stages):
        row = case.built.ranks[case.built.placement[stage]]
        kinds = [action.kind for action in row if action.stage == stage]
        backs = [slot for slot, kind in enumerate(kinds) if kind in GIVES_WEIGHT_GRADIENT]
        if len(backs) > 1 and Kind.FORWARD not in kinds[backs[0] : backs[-1]]:
            return True
    return False


FINDINGS: tuple[Finding, ...] = (
    Finding(
        "scaled-again",
        "gpipe r1 s1 m2 split=1 model=mlp plan=accumulate+train runtime=torch",
        lambda case: "accumulate" in case.plan and _is_scaled(case),
    ),
    Finding(
        "tied-scaled-twice",
        "looped-bfs r1 s2 m2 split=1,1 model=gpt-tied plan=train runtime=torch",
        lambda case: case.model == "gpt-tied" and case.stages > 1 and _is_scaled(case),
    ),
    Finding(
        "eval-of-neighbours",
        "looped-bfs r1 s2 m1 split=1,1 model=mlp plan=eval+train options=unscaled runtime=torch",
        lambda case: "eval" in case.plan and _neighbours(case),
    ),
    Finding(
        "trial-run-trains-buffers",
        "gpipe r1 s1 m1 split=1 model=batchnorm plan=train options=unscaled runtime=torch",
        lambda case: case.model == "batchnorm",
    ),
    Finding(
        "view-cannot-be-split",
        "zb-h1 r1 s3 m1 split=1,1,1 model=view plan=train options=unscaled runtime=torch",
        lambda case: case.model == "view" and _inner_splits(case),
    ),
    Finding(
        "parameters-alone-lost",
        "zb-h1 r1 s3 m1 split=1,1,1 model=fresh plan=train options=unscaled runtime=torch",
        lambda case: case.model == "fresh" and _inner_splits(case),
    ),
    Finding(
        "losses-by-order",
        "looped-bfs r1 s2 m2 split=1,1 model=mlp plan=train options=unscaled+descending runtime=torch-csv",
        _losses_out_of_order,
    ),
    Finding(
        "split-without-ddp",
        "zb-h1 r1 s2 m1 split=1,1 model=mlp plan=train options=unscaled replicas=2 runtime=torch",
        lambda case: case.replicas > 1 and bool(_split_stages(case)),
    ),
    Finding(
        "trial-run-reduces",
        "gpipe r1 s1 m2 split=1 model=mlp plan=train+train options=unscaled replicas=2 runtime=torch",
        lambda case: (
            sum(operation != "eval" for operation in case.plan) > 1
            and case.replicas > 1
            and case.model not in UNUSED
            and _one_phase(case)
        ),
    ),
    Finding(
        "trial-run-marks-unused",
        "gpipe r2 s2 m2 split=1,2 model=sometimes plan=train seed=1 replicas=2 runtime=torch",
        lambda case: case.replicas > 1 and case.model == "sometimes" and case.microbatches > 1 and max(case.split) > 1,
        tries=6,
    ),
    Finding(
        "messages-to-oneself",
        "looped-bfs r1 s2 m1 split=1,1 model=mlp plan=train options=unscaled runtime=torch",
        _neighbours,
    ),
    Finding(
        "integers-between-stages",
        "gpipe r2 s2 m1 split=1,1 model=dropout plan=train options=unscaled runtime=torch",
        lambda case: case.model in ("dropout", "sometimes") and case.stages > 1,
    ),
    Finding(
        "no-deferred-receives",  # an option absent in older versions
        "looped-bfs r1 s1 m1 split=1 model=mlp plan=train options=defer-recv runtime=torch",
        lambda case: "defer-recv" in case.options,
    ),
    Finding(
        "deferred-receives-swapped",
        "zb-v r2 s4 m3 split=1,1,1,1 model=mlp plan=train options=unscaled+defer-recv runtime=torch",
        lambda case: "defer-recv" in case.options and case.ranks > 1 and case.virtual > 1,
    ),
    Finding(
        "deferred-receives-wait",  # where messages between two ranks run one by one
        "interleaved r2 s2 m2 split=1,1 model=mlp plan=train options=unscaled+defer-recv runtime=torch",
        lambda case: "defer-recv" in case.options and case.ranks > 1,
    ),
    Finding(
        "shared-gradient",
        "own.csv r1 s3 m2 split=1,1,1 model=prompt plan=train options=unscaled runtime=torch-csv",
        lambda case: case.model == "prompt" and bool(_split_stages(case)),
        csv="0F0,0F1,1F0,1F1,2F0,2F1,2I0,2W0,2I1,2W1,1I0,1W0,1I1,1W1,0B0,0B1\n",
    ),
)


def is_known(case: Case, findings: Sequence[Finding]) -> bool:
    """True if any of ``findings`` affects ``case``."""
    return case.runtime != OWN and any(finding.shows(case) for finding in findings)
