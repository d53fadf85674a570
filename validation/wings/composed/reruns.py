"""Reruns of all stages on a rank, and the notes that ranks exchange about them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from pipeproof.core.cause import Cause
from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.own_losses import OwnLoss, weights_among
from pipeproof.core.reason import Reason
from pipeproof.pipeline.sizes import first_few
from pipeproof.records.record import RecordError
from pipeproof.records.step_record import Pairs
from pipeproof.reference.model import LossFn
from pipeproof.whitebox.task import LossOfAll
from pipeproof.wings.composed.chain import Chain
from pipeproof.wings.composed.link import TARGETS
from pipeproof.wings.composed.loss import Division, LossLink
from pipeproof.wings.composed.rerun import StageRerun

_ALIKE = (
    "microbatches {} have the same inputs and other targets, and what flowed back does not fit the order in which they "
    "were given: pass them in the order in which they run, or give them other inputs"
)
_OWN_LOSS = (
    "a backward{} comes to {} stage {} past what the stage gave: let the stage itself add the gradient of such a loss, "
    "or hand the loss on to the last stage"
)
_NO_TARGETS = "the last stage is here, and its targets are not: pass microbatches on its rank, too"


@dataclass(frozen=True)
class RerunNote:
    """A rank's note to others about its stages: first, stages with unknown results.

    ``factors``: of each last stage, the observed gradient of the loss in multiples of the expected. ``scaled``: the
    rank's factor on losses. ``pairs``: microbatches whose losses met other targets.
    """

    lost: Sequence[int]
    factors: Sequence[float | None]
    scaled: Sequence[float]
    pairs: Mapping[int, int] = field(default_factory=dict)


@dataclass
class Reruns:
    """Stages from ``modules``, by number, with their ``calls``.

    ``given``: the microbatches, if known. ``only``: the one stage to rerun; None for all. ``sums``: the type of summed
    gradients, for stages with narrower weights. ``others``: for a stage cut inside, its calls on each other rank in the
    replica; else None. ``own_losses``: losses inside stages.
    """

    division: Division
    modules: Mapping[int, nn.Module]
    calls: Mapping[int, Sequence[Call]]
    given: Pairs | None
    chain: Chain
    loss_fn: LossFn | LossOfAll | None
    only: int | None
    sums: Mapping[int, torch.dtype]
    others: Mapping[int, Sequence[Sequence[Call]]] | None
    own_losses: Mapping[int, OwnLoss]
    stages: list[StageRerun] = field(default_factory=list)
    _last: list[StageRerun] = field(default_factory=list)  # the last stage, if on this rank

    def run(self) -> None:
        """Run the stages, last first. This changes the job.

        Raises ``RecordError`` if its targets are missing or cannot be matched with calls, or if ranks pass on parts of
        a stage's output.
        """
        for stage, calls in sorted(self.calls.items(), reverse=True):
            compared, every = self.only in (None, stage), range(len(calls))
            if not compared:  # one call tells by what losses were divided, unless nothing flowed
                if stage != self.chain.last or not calls:
                    continue
                flowed = (k for k in every if any(one.norm for one in calls[k].output_gradients.values()))
                every = range(k := next(flowed, 0), k + 1)
            own = self._rerun(stage, every)
            if stage == self.chain.last:
                self._last = [own]
                if own.pairs and (alike := self._alike):
                    raise RecordError(Reason.CALLS.doubt(_ALIKE.format(first_few(alike))))
            if not compared:
                continue
            if self.others is not None and own.other_form:
                raise RecordError(Reason.RERUN.doubt(own.other_form))
            self.stages.append(own)
            if self.others is not None:
                own.doubt_alike(self.others.get(stage, ()))
            weights = weights_among(own.trained.values(), self.modules[stage])
            if (loss := self.own_losses.get(stage)) is not None and not loss.is_of(weights):
                where = "the weights of" if loss.weights else "what was given to"
                at = f" at {loss.stack[0].place}" if loss.stack else ""
                own.doubt(Reason.OWN_BACKWARD.doubt(_OWN_LOSS.format(at, where, stage)))

    def _rerun(self, stage: int, numbers: Sequence[int]) -> StageRerun:
        loss, accumulation = None, replace(self.division.accumulation, bundles={})  # those go by microbatches
        if accumulation.dtype is None and stage in self.sums:
            accumulation = replace(accumulation, dtype=self.sums[stage])
        if stage == self.chain.last:
            assert not isinstance(self.loss_fn, LossOfAll), "it was made of all microbatches when the step began"
            if self.given is None:
                raise RecordError(_NO_TARGETS)
            targets = [self.given[m][1] if m >= 0 else None for m in self.chain.orders[stage].numbers]
            loss = LossLink(self.loss_fn, self.division.divisor, [targets[k] for k in numbers])
        flowing, parts, calls = self.chain.flowing(stage), self.others is not None, list[Call]()
        for k, call in ((k, self.calls[stage][k]) for k in numbers):
            again, more = call.again, flowing[k] - call.needing
            calls.append(call if again is None else replace(call, again=replace(again, wanting=again.wanting | more)))
        found = StageRerun(stage, self.modules[stage], calls, loss=loss, accumulation=accumulation, in_parts=parts)
        found.run()
        return found

    @property
    def note(self) -> RerunNote:
        """The note for other ranks."""
        lost = [own.stage for own in self.stages if not own.closed]
        factors = [one for own in self._last for one in own.factors]
        return RerunNote(lost, factors, [self.division.scaled for _ in self._last], self._pairs)

    @property
    def of_the_loss(self) -> list[str]:
        """Weights trained by the loss and absent from this rank's stages, by shape."""
        own = {id(one) for module in self.modules.values() for one in module.parameters()}
        trained = [one for stage in self.stages for key, one in stage.trained.items() if key not in own]
        return [f"one of shape {list(one.shape)}" for one in trained]

    @property
    def _pairs(self) -> dict[int, int]:
        """Microbatches whose losses met each other's targets; empty if other calls are wrong too."""
        found: dict[int, int] = {}
        for own in self._last:
            numbers = self.chain.orders[own.stage].numbers
            pairs = {numbers[k]: numbers[pair[0]] for k, pair in own.pairs.items() if pair is not None}
            found |= pairs if len(pairs) == len(own.pairs) else {}
        return found

    def find_exchanged_targets(self, rank: int) -> list[Cause]:
        """Report exchanged targets, unless messages crossed instead."""
        pairs = {} if any(here.meant for here in self.chain.stages.values()) else self._pairs
        detail = first_few([f"the loss of microbatch {m} has the target of microbatch {of}" for m, of in pairs.items()])
        which = tuple(sorted(pairs))
        return [Cause("swapped-data", rank, self.chain.last, microbatches=which, detail=detail)] if pairs else []

    def agree(self, of_replica: Sequence[RerunNote]) -> None:
        """Read the chain with crossed messages in this replica."""
        pairs = next((note.pairs for note in of_replica if note.pairs), {})
        if pairs and (meant := self.chain.as_meant(pairs)) is not None:
            self.chain = meant
            for own in self._last:
                own.take_pairs()

    @property
    def _alike(self) -> list[str]:
        """Microbatches with the inputs of another, and not its targets: these may be exchanged."""
        contents = [{number: one.digest for number, one in brought.items()} for brought in self.chain.data]
        pairs = [({n: one for n, one in whole.items() if n < TARGETS}, whole) for whole in contents]
        return [
            f"{m}" for m, (one, whole) in enumerate(pairs) if any(one == it and whole != other for it, other in pairs)
        ]
