"""Every specimen, in its smallest case, held against itself: caught, but for what a chain of links cannot show."""

import pytest

from pipeproof.cases.specimens import SPECIMENS
from pipeproof.cases.specimens.specimen import unchanged
from pipeproof.cases.trial import smallest_of
from pipeproof.judging.cause import Cause
from pipeproof.records.composed_case import validate_composed
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.world import World

_CODE = "the stage's own code is at fault, and runs again as it ran"
_START = "its weights, or its random numbers, are others from the start"
_EVALUATION = "evaluation is not compared"
_BUFFERS = "buffers are not compared"
OUT_OF_REACH = {
    "evaluation-in-training-mode": _EVALUATION,
    "evaluation-mode-stays": "its module gives the same in either mode",
    "evaluation-moves-statistics": _BUFFERS,
    "evaluation-divided-again": _EVALUATION,
    "statistics-counted-twice": _BUFFERS,
    "shared-weight-doubled": _CODE,
    "outputs-summed": _CODE,
    "recomputed-with-fresh-mask": _CODE,
    "mask-missing": _CODE,
    "other-epsilon": _CODE,
    "stage-in-bf16": _CODE,
    "layers-in-other-order": _CODE,
    "layer-skipped": _CODE,
    "layer-repeated": _CODE,
    "layers-counted-from-zero": _START,
    "dropout-other-seed": _START,
    "weights-of-other-seed": _START,
}
# Kinds that say less of what was planted, or say it as the tensors show it that crossed: by name, what is said.
SEEN_AS = {
    "auxiliary-loss": "altered",  # more flows to an output than was sent
    "evaluation-differentiates": "altered",  # an input that is no microbatch's
    "backward-of-another": "mispaired",
    "activation-repeated": "mispaired",
    "gradient-repeated": "mispaired",
    "gradients-crossed": "mispaired",
    "activations-crossed": "swapped-data",
    "activation-partly-old": "altered",
    "activation-of-step-before": "altered",
    "side-input-missing": "uninitialised",
    "weight-halves-after-whole": "scale",
}
HANGS = {"message-lost"}


def told(causes: tuple[Cause, ...], others: tuple[tuple[Cause, ...], ...]) -> set[str]:
    """The kinds of the first cause, and of what else would explain it."""
    first = causes[:1]
    return {one.kind for cause in (*first, *(other[0] for other in others)) for one in (cause, *cause.instead)}


@pytest.mark.parametrize("name", SPECIMENS)
def test_a_planted_fault_breaks_a_link(name: str, simulated: World) -> None:
    specimen = SPECIMENS[name]
    case = smallest_of(specimen)
    if name in HANGS:
        with pytest.raises(RankFailed):
            validate_composed(case, simulated)
        return
    verdict = validate_composed(case, simulated)
    if name in OUT_OF_REACH:
        assert verdict.verdict == "pass", f"{OUT_OF_REACH[name]}: {verdict}"
        return
    assert verdict.verdict == "fail", str(verdict)
    planted = specimen.cause(case)
    kinds = {planted.kind, *specimen.fault.alike, SEEN_AS.get(name, planted.kind)}
    if verdict.cause and specimen.reorder is unchanged:
        assert kinds & told(verdict.cause, verdict.alternatives), str(verdict)
    else:
        assert verdict.cause or verdict.undecided, str(verdict)


def test_what_is_out_of_reach_is_a_specimen() -> None:
    assert {*OUT_OF_REACH, *SEEN_AS, *HANGS} <= SPECIMENS.keys()
