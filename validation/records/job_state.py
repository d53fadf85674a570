"""What a job has as its stages are run again, which comes back as it was."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from pipeproof.foreign.composed import AgainstItself
from pipeproof.observers.digest import digest
from pipeproof.observers.shards import held_here
from pipeproof.records.rank_part import RankStages
from pipeproof.reference.snapshot import Snapshot, unchanged

_LOST = (
    "stages were run again, and what this changed in the job cannot be put back: {}; keep it where neither they nor "
    "the loss lead to, or check against a SingleDevice"
)


def job_state(
    own: RankStages,
    by: AgainstItself,
    given: Any,
    begun: Mapping[int, Mapping[str, bytes]],
    refuse: Callable[[str], None],
) -> AbstractContextManager[Snapshot]:
    """What this rank's stages, its loss and the optimizers of ``by`` lead to; all that, when it closes, is as it was.

    given: its microbatches. begun: digests of the weights that the step began with, by stage and name. ``refuse`` is
    told what cannot be put back.
    """
    every = {stage: module.named_parameters(remove_duplicate=False) for stage, module in own.modules.items()}
    known = {id(one): begun[k][name] for k, named in every.items() if k in begun for name, one in named}
    return unchanged(
        *(own.modules, by.loss_fn, by.generators, given),
        lean=[by.optimizers, by.masters, by.scaler],
        host=by.host,
        digest=lambda one: digest(held_here(one)),
        begun=known,
        lost=lambda what: refuse(_LOST.format(what)),
    )
