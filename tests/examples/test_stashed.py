"""A runtime that is not ours pairs right tensors wrongly: no message is blamed for it, watched or not."""

from functools import partial
from typing import Any

import pytest
import stashed
import torch.distributed as dist
from torch import nn

from pipeproof import watch
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.steps import blocks, pairs
from tests.support.sweeps import each_once

RANKS, COUNT = 3, 5
loss_fn = nn.functional.mse_loss


build_model, data = partial(blocks, 2 * RANKS), partial(pairs, COUNT, rows=6, seed=1)


def step(model: nn.Sequential, microbatches: list[Any], *, fault: str, watched: bool) -> Any:
    stage = model[2 * dist.get_rank() : 2 * dist.get_rank() + 2]
    return (watch(stage) if watched else stage), stashed.step(stage, microbatches, loss_fn, fault=fault)


def judged(whitebox: WhiteBox, fault: str, *, watched: bool) -> Verdict:
    one = partial(step, fault=fault, watched=watched)
    return whitebox.validate(one, reference=build_model, microbatches=data(), ranks=RANKS, loss_fn=loss_fn)


# What is said where the stage is watched, and where it is not; and at which microbatches. Of tensors that were not used
# in the order in which they were made nobody knows, from the modules alone, in which order they came.
PLANTED: dict[str, tuple[tuple[str, ...], str, tuple[int, ...]]] = {
    "last-in-first-out": (("mispaired",), "swapped-activations", (0, 1, 3, 4)),
    "gradients-turned": (("mispaired", "wrong-message"), "swapped-gradients", (1, 2, 3)),
    "all-gradients-turned": (("mispaired", "wrong-message"), "swapped-gradients", (0, 1, 2, 3, 4)),
    "unpopped-gradient": (("mispaired", "wrong-message"), "swapped-gradients", (2,)),
    "unpopped-stash": (("swapped-activations",), "swapped-activations", (2,)),
    "inputs-turned": (("mispaired", "wrong-message"), "swapped-activations", (1, 2)),
    "unpopped-input": (("mispaired", "wrong-message"), "swapped-activations", (2,)),
}


def test_every_fault_of_the_runtime_is_tried() -> None:
    assert {*PLANTED, "targets-turned"} == set(stashed.FAULTS)


@pytest.mark.sweep
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "unwatched"])
def test_as_it_is_the_runtime_passes(whitebox: WhiteBox, watched: bool) -> None:
    verdict = judged(whitebox, "", watched=watched)
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), str(verdict)


@pytest.mark.parametrize(*each_once(fault=PLANTED, watched=[True, False]))
def test_right_tensors_that_were_paired_wrongly_are_no_wrong_message(
    whitebox: WhiteBox, fault: str, watched: bool
) -> None:
    kinds, unwatched, microbatches = PLANTED[fault]
    verdict = judged(whitebox, fault, watched=watched)
    explanations = (verdict.causes, *verdict.alternatives)
    assert [[cause.kind for cause in one] for one in explanations] == [
        [k] for k in (kinds if watched else (unwatched,))
    ]
    cause = verdict.causes[0]
    assert (cause.rank, cause.stage, cause.microbatches) == (1, 1, microbatches), str(verdict)
    assert verdict.mismatches[0].stage in (1, None), "where it was observed is where it happened"


@pytest.mark.sweep
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "unwatched"])
def test_targets_that_were_exchanged_are_a_matter_of_the_data(whitebox: WhiteBox, watched: bool) -> None:
    verdict = judged(whitebox, "targets-turned", watched=watched)
    assert [(cause.kind, cause.microbatches) for cause in verdict.causes] == [("swapped-data", (1, 2))]
    assert not verdict.alternatives


@pytest.mark.sweep
def test_both_orders_are_told(whitebox: WhiteBox) -> None:
    golden(judged(whitebox, "last-in-first-out", watched=True).causes[0].detail)


@pytest.mark.sweep
def test_a_table_shows_which_activations_met_which_gradients(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, "gradients-turned", watched=False)
    assert verdict.outcome == "fail"
    assert [str(cell) for cell in verdict.cells.rows[1]] == ["1", "2's", "3's", "1's", "1"]
    assert [str(cell) for cell in verdict.cells.rows[0]] == ["1", "1*", "1*", "1*", "1"]
    assert all(cell.right for cell in verdict.cells.rows[2])


@pytest.mark.sweep
def test_nothing_is_ruled_out_that_was_not_compared(whitebox: WhiteBox) -> None:
    for watched in (True, False):
        verdict = judged(whitebox, "unpopped-gradient", watched=watched)
        assert verdict.outcome == "fail"
        cleared = {kind for one in verdict.ruled_out for kind in one.kinds}
        assert not cleared & {"wrong-message", "mispaired", "swapped-gradients", "swapped-activations"}
        assert ("order" in cleared) == watched, "only who looked knows what ran"
        assert all(one.compared > 0 for one in verdict.ruled_out)
