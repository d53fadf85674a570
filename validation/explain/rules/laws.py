"""Laws whose mismatches say by themselves what is wrong: who holds what, and what an operation left changed."""

from collections.abc import Sequence

from pipeproof.core.cause import Cause
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.rules.place import cause_of, compared, found_of


def partition(evidence: Evidence) -> list[Cause]:
    """Parameters that no stage holds, or several; none where they may only have other names."""
    found = found_of("parameters-once", evidence)
    if not found or evidence.strange:
        return []
    return [Cause("partition", stage=found[0].stage, parameter=found[0].parameter, detail=compared(found))]


def nameless(evidence: Evidence) -> Sequence[str]:
    """That parameters have names that the reference does not have; empty where all are known."""
    told = f"parameters of the step and of the reference do not go together: {evidence.renamed_by} says which is which"
    return (told,) if evidence.strange else ()


def no_update(evidence: Evidence) -> list[Cause]:
    """What an operation without an update changed: weights, or where it is an evaluation, gradients."""
    kinds = {} if evidence.operation == "train" else {"updated-parameters": "update"}
    if evidence.operation == "eval":
        kinds["presence"] = "unexpected"
    return [cause_of(kind, found, evidence) for law, kind in kinds.items() if (found := found_of(law, evidence))]


def buffers(evidence: Evidence) -> list[Cause]:
    """State that forwards leave behind."""
    found = found_of("buffers", evidence)
    return [cause_of("buffers", found, evidence)] if found else []
