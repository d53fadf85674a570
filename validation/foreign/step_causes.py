"""What is wrong with a foreign step, explained: the one door to the diagnosis, which loads where there is something."""

from dataclasses import replace

from pipeproof.core.execution import flow
from pipeproof.core.old_weights import hold_to_old_weights
from pipeproof.core.verdict import Verdict
from pipeproof.explain.evidence import Line
from pipeproof.explain.explain import explained, sought
from pipeproof.foreign.evidence import Beside, evidence_of
from pipeproof.foreign.operation_run import OperationRun
from pipeproof.observers.observed import Crossing

__all__ = ["Beside", "explain"]
_BY_DESIGN = ("zero", "missing", "shape")  # one rank of a line may have the loss, or hand on a part, for all


def explain(verdict: Verdict, one: OperationRun, beside: Beside) -> Verdict:
    """``verdict`` with its cause, sought in the operation that disagrees first."""
    known = one.passages(undivided=True)
    if one.run.crash is not None:
        return verdict.without_cause(one.run.crash)
    observed = one.found.observed(known)
    lines = [Line(observed.along(number), flows) for number, flows in enumerate(known)]
    along = sorted(lines, key=lambda line: _first_wrong(line, told=line is lines[0]))
    evidence = evidence_of(verdict, along, one.found, beside)
    verdict = hold_to_old_weights(verdict, lambda: evidence)
    evidence = replace(evidence, verdict=verdict)
    return sought(verdict, lambda: explained(evidence))


def _first_wrong(line: Line, *, told: bool) -> tuple[float, ...]:
    """Where in the flow a tensor is first wrong. Not ``told``: what no law judges may be meant so on this line."""
    wrong = [one for one in line.seen.crossings(0) if not one.same and (told or one.judged or not _meant(one))]
    return min((flow(one, line.seen.schedule.n_stages) for one in wrong), default=(float("inf"),))


def _meant(one: Crossing) -> bool:
    return one.really is None or one.really.kind in _BY_DESIGN
