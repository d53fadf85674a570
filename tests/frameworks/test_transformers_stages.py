"""Models of transformers' in stages under pipeproof: right layouts pass, planted faults are caught, named and located.

``ci/frameworks`` runs this in an environment that has transformers; elsewhere it is skipped.
"""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: ci/frameworks installs it")

from functools import partial
from typing import Any

from pipeproof.whitebox import WhiteBox
from tests.frameworks import shared
from tests.frameworks.tiny_hf import Layout, judged
from tests.frameworks.transformers_faults import FAULTS as FAULTS
from tests.frameworks.transformers_faults import UNNAMED, step

pytestmark = pytest.mark.pipeproof_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "bitwise": {
        "llama": Layout(),
        "llama-four-ranks-tied": Layout(pp=4, tied=True),
        "llama-masked": Layout(rows="masked"),
        "llama-packed": Layout(rows="packed"),
        "llama-mean": Layout(loss="mean"),
        "llama-recompute": Layout(recompute=True),
        "llama-interleaved": Layout(schedule="Interleaved1F1B", virtual=2),
        "llama-zb-v": Layout(schedule="ZBVZeroBubble", virtual=2),
        "gpt2-tied": Layout(model="gpt2", tied=True),
        "qwen2": Layout(model="qwen2"),
        "gemma2-tied": Layout(model="gemma2", tied=True, attention="eager"),
        "granite": Layout(model="granite"),
        "mixtral": Layout(model="mixtral"),
        "own-tied": Layout(own=True, tied=True),
        "own-clipped": Layout(own=True, clipped=True),
        "own-interleaved-masked": Layout(own=True, schedule="interleaved", virtual=2, rows="masked"),
        "own-zb-h1-mean": Layout(own=True, schedule="zb-h1", loss="mean"),
        "bf16-tied": Layout(dtype="bfloat16", tied=True),
    },
    # Not to the bit: norms are of other partial sums; replicas add in another order.
    "fp32": {"clipped": Layout(clipped=True), "replicas": Layout(dp=2)},
}


LAWS = {
    **dict.fromkeys(("initial-weights", "microbatches"), lambda _: True),
    "grad-norm": lambda layout: layout.clipped or layout.own,
    "tied-copies": lambda layout: layout.tied,
}
test_a_right_layout_passes, test_a_fault_is_named = shared.OF_ENGINES


@pytest.mark.parametrize("name", UNNAMED)
def test_a_stage_whose_output_is_like_nothing_is_caught_and_located_without_a_name(
    name: str, whitebox: WhiteBox
) -> None:
    _, layout = UNNAMED[name]
    verdict = judged(layout, own_step=partial(step, name), whitebox=whitebox)
    assert (verdict.outcome, verdict.law("loss").outcome) == ("fail", "fail"), str(verdict)
    assert "rank 1, stage 1" in verdict.details


def test_tokens_of_one_replica_alone_are_caught_at_every_microbatch(whitebox: WhiteBox) -> None:
    own_step = partial(step, "own-tokens")
    verdict = judged(Layout(dp=2), own_step=own_step, whitebox=whitebox)
    assert verdict.outcome == "fail", str(verdict)
    assert {cause.kind for cause in verdict.causes} <= {"scale", "unequal-weights"}
    assert verdict.causes
