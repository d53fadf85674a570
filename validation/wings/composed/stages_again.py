"""A rank's stages, run once more in the way that all ranks agree on: how replicas divide, and what was meant."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from pipeproof.core.ledger import Ledger
from pipeproof.core.reason import Reason
from pipeproof.observers.calls import Call
from pipeproof.observers.own_losses import OwnLoss, weights_among
from pipeproof.pipeline.sizes import first_few
from pipeproof.records.record import RecordError
from pipeproof.records.step_record import Pairs
from pipeproof.reference.snapshot import Snapshot
from pipeproof.wings.composed.chain import Chain
from pipeproof.wings.composed.crossed import crossed
from pipeproof.wings.composed.obstacles import draws_in_backward
from pipeproof.wings.composed.own_links import OwnStage
from pipeproof.wings.composed.shards import in_doubt
from pipeproof.wings.composed.sources import TARGETS
from pipeproof.wings.composed.way import Way, targets_of, wanting

_ALIKE = (
    "microbatches {} have the same inputs and other targets, and what flowed back is not theirs in the order in which "
    "they were given: whose is whose is not known; pass them in the order in which they run, or give them other inputs"
)

_OWN_LOSS = (
    "a backward{} comes to {} stage {}, and not by what the stage gave, so that nobody knows what that adds; if it is "
    "a loss of its own, let the stage itself add that gradient, or hand that loss on to the last stage"
)
_TIMES = "all losses are {:g} times the contract's: if that is meant, loss_scale={:g}"
_OR_ELSE = ", or loss_divisor={:g} where gradients are not divided by it"
_NO_SCALE = "all losses are {:g} times the contract's, which no contract says: let loss_fn give what is trained"
UNEQUAL = (
    "replicas have unequal numbers of microbatches, and losses are not divided by these and averaged: say "
    "loss_divisor={:g}, or what it is"
)


@dataclass(frozen=True)
class Told:
    """What a rank tells others of its stages: those of which it is not known what they give, and how losses go.

    ``scaled`` and ``factors``: as in ``Way``, ``scaled`` of the last stage's rank alone. ``crossed``: the targets are
    those of microbatches that messages were meant for, and not of those that they are of.
    """

    lost: Sequence[int]
    scaled: Sequence[float]
    crossed: bool
    factors: Sequence[float | None]


@dataclass
class StagesAgain:
    """The stages of ``modules``, by number, as their ``calls`` used them.

    ``given``: the microbatches, where they are known. ``only``: the one stage that is run again, if not all are.
    ``in_parts``: stages are cut inside, among ranks; so may be what passes between them. ``others``: by stage, its
    calls on each other rank of the replica. ``own_losses``: those that stages have.
    ``chain`` is of this rank's replica, and is read as messages were meant once ranks have agreed on that.
    """

    way: Way
    modules: Mapping[int, nn.Module]
    calls: Mapping[int, Sequence[Call]]
    given: Pairs | None
    chain: Chain
    only: int | None = None
    in_parts: bool = False
    others: Mapping[int, Sequence[Sequence[Call]]] = field(default_factory=dict)
    own_losses: Mapping[int, OwnLoss] = field(default_factory=dict)
    stages: list[OwnStage] = field(default_factory=list)
    lost: frozenset[int] = frozenset()
    times: float | None = None  # what losses are multiplied by besides what the contract says
    unsaid: bool = False  # replicas are unequal, and divide in a way that the contract does not say
    _crossed: bool = False

    def run(self, snapshot: Snapshot, note: Callable[[OwnStage, Callable[[Tensor], bool]], None]) -> None:
        """Run them, the last one first, put the job back, and ``note`` each, with which tensors were written to.

        Raises ``RecordError`` if its targets are not here, if nothing tells which of its calls has which, or if ranks
        pass on parts of what a stage gives.
        """
        for stage, made in sorted(self.calls.items(), reverse=True):
            targets = targets_of(self.given, self.chain, stage)
            if self.only in (None, stage):
                own = self.way.run_again(stage, self.modules[stage], self._wanting(stage), targets)
                if self.in_parts and own.other_form:
                    raise RecordError(Reason.RERUN.doubt(own.other_form))
                self.stages.append(self._as_meant(own))
                self._note_doubts(self.stages[-1])
            elif targets is not None:  # one call tells by what losses were divided, unless nothing flowed there
                flowed = (k for k, call in enumerate(made) if any(one.norm for one in call.output_gradients.values()))
                k = next(flowed, 0)
                self.way.run_again(stage, self.modules[stage], made[k : k + 1], targets[k : k + 1])
        snapshot.put_back()
        for own in self.stages:
            note(own, snapshot.wrote)

    @property
    def told(self) -> Told:
        """What other ranks must know."""
        lost = [own.stage for own in self.stages if not own.closed]
        scaled = [self.way.scaled] * (self.chain.last in self.calls)
        return Told(lost, scaled, self._crossed, self.way.factors)

    def agree(self, every: Sequence[Told], of_replica: Sequence[Told]) -> None:
        """Take what ranks told of themselves: ``every`` one, and those of this replica."""
        self.lost = frozenset(stage for one in every for stage in one.lost)
        if any(one.crossed for one in of_replica):
            self.chain = crossed(self.chain) or self.chain
        factors = [factor for one in every for factor in one.factors]
        self.times = self.way.agree(factors, [scaled for one in every for scaled in one.scaled])
        self.unsaid = not self.way.alike and any(one != 1.0 for one in factors)

    def doubt_times(self, ledger: Ledger, *, declared: bool) -> None:
        """Enter what losses are multiplied by besides what the contract says; if it is ``declared``, that is wrong.

        Where nothing is, gradients are still to be what the contract says: so they tell whether it was made good.
        """
        if self.times is None:
            return
        scale = self.way.scaled * self.times
        told = (_TIMES if scale > 0 else _NO_SCALE).format(self.times, scale)
        if declared:
            ledger.remark("boundaries", told)
            return
        more = scale > 0 and not self.way.by.accumulation.late
        told += more * _OR_ELSE.format(self.way.whole / self.times)
        ledger.doubt("boundaries", told, Reason.LOSS_SCALE)
        self.way.scaled = scale

    def as_agreed(self, snapshot: Snapshot) -> None:
        """Run again what was run in another way than ranks agreed upon."""
        for k, own in enumerate(self.stages):
            targets = targets_of(self.given, self.chain, own.stage)
            self.stages[k] = self.way.as_agreed(own, self.modules[own.stage], self._wanting(own.stage), targets)
            if self.stages[k] is not own:
                self._note_doubts(self.stages[k])
        snapshot.put_back()

    @property
    def of_the_loss(self) -> list[str]:
        """The weights that the loss has, and that no stage of this rank holds, by their shapes."""
        modules = [*self.modules.values(), *(own.model for own in self.stages)]
        held = {id(one) for module in modules for one in module.parameters()}
        leaves = [one for own in self.stages for one in own.loss_leaves or ()]
        return [f"one of shape {list(one.shape)}" for one in leaves if id(one) not in held]

    @property
    def _alike(self) -> list[int]:
        """The microbatches that have another one's inputs, and not its target."""
        contents = [{number: one.digest for number, one in brought.items()} for brought in self.chain.data]
        inputs = [{n: one for n, one in own.items() if n < TARGETS} for own in contents]
        pairs = list(zip(inputs, contents, strict=True))
        return [m for m, (own, whole) in enumerate(pairs) if any(own == it and whole != all_ for it, all_ in pairs)]

    def _note_doubts(self, own: OwnStage) -> None:
        """Note why it is not known what a stage gives, though it runs again."""
        if self.in_parts and (doubt := in_doubt(own, self.others.get(own.stage, ()))):
            own.doubt(doubt)
        if own.first_run.draws_anew:
            own.doubt(draws_in_backward(own.stage))
        weights = weights_among(own.loss_leaves or (), own.model)
        if (loss := self.own_losses.get(own.stage)) is not None and not loss.is_of(weights):
            own.doubt(_told(own.stage, loss))

    def _wanting(self, stage: int) -> list[Call]:
        return wanting(self.calls[stage], self.chain.lost(stage))

    def _as_meant(self, own: OwnStage) -> OwnStage:
        """``own``; the last stage with the targets of what messages were meant for, if those explain all flows."""
        if own.stage != self.chain.last or own.factor is not None or own.fitting == own.flowing or own.speaks:
            return own
        if alike := self._alike:
            raise RecordError(Reason.CALLS.doubt(_ALIKE.format(first_few([f"{m}" for m in alike]))))
        if (meant := crossed(self.chain)) is None:
            return own
        other = replace(self.way, factors=[], _ran=None)
        targets = targets_of(self.given, meant, own.stage)
        found = other.run_again(own.stage, self.modules[own.stage], self._wanting(own.stage), targets)
        if not found.flowing or (found.fitting < found.flowing and found.factor is None):
            return own
        self.way, self._crossed = other, True
        return found


def _told(stage: int, loss: OwnLoss) -> str:
    where = "the weights of" if loss.weights else "what was given to"
    at = f" at {loss.stack[0].place}" if loss.stack else ""
    return Reason.OWN_BACKWARD.doubt(_OWN_LOSS.format(at, where, stage))
