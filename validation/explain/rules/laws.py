"""Laws whose mismatches name the fault: parameters' owners, and state changed by an operation."""

from collections.abc import Sequence

from pipeproof.core.cause import Cause
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.rules.place import cause_of, describe_mismatches, mismatches_of


def partition(evidence: Evidence) -> list[Cause]:
    """Find parameters in no stage or several; skip if only names may differ."""
    found = mismatches_of("parameters-once", evidence)
    if not found or evidence.strange:
        return []
    return [Cause("partition", stage=found[0].stage, parameter=found[0].parameter, detail=describe_mismatches(found))]


def nameless(evidence: Evidence) -> Sequence[str]:
    """Say that the reference lacks some parameter names; empty if it knows all."""
    text = f"parameters of the step and of the reference do not go together: {evidence.renamed_by} says which is which"
    return (text,) if evidence.strange else ()


def no_update(evidence: Evidence) -> list[Cause]:
    """State that an operation without an update changed: weights, or in an evaluation gradients."""
    kinds = {} if evidence.operation == "train" else {"updated-parameters": "update"}
    if evidence.operation == "eval":
        kinds["presence"] = "unexpected"
    return [cause_of(kind, found, evidence) for law, kind in kinds.items() if (found := mismatches_of(law, evidence))]


def buffers(evidence: Evidence) -> list[Cause]:
    """State left behind by forwards."""
    found = mismatches_of("buffers", evidence)
    return [cause_of("buffers", found, evidence)] if found else []
