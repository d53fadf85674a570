"""The single-device model beside a running job: rank 0 makes it, with the weights of all ranks, and lays out a step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipeproof.core.contract import DEFAULTS, Contract, ContractError
from pipeproof.core.ledger import NOWHERE
from pipeproof.core.nudged import Nudged
from pipeproof.core.observe.shards import Shard, gathered, untiled
from pipeproof.core.old_weights import Given
from pipeproof.records.rank_part import Arrival, places_of
from pipeproof.records.record import Record, RecordError
from pipeproof.records.record_file import described, restored
from pipeproof.records.step_record import LossFn, Pairs, check_repeated, loss_of, moved, recipe_of, recorded
from pipeproof.reference.accumulation import Accumulation
from pipeproof.reference.copied import copied
from pipeproof.reference.copies import copies_apart
from pipeproof.reference.data import Batch
from pipeproof.reference.snapshot import Snapshot, unchanged
from pipeproof.reference.step import Loss, Recipe
from pipeproof.whitebox.reference_run import computed_in
from pipeproof.whitebox.task import (
    LossOfAll,
    WhiteBoxError,
    check_builds,
    check_loss_fn,
    check_module,
    form,
    name_of,
    repeated,
)
from pipeproof.worlds.accelerator import CPU
from pipeproof.worlds.settings import drawing_apart
from pipeproof.worlds.side_store import Exchange

if TYPE_CHECKING:
    from pipeproof.explain.atoms import Update
    from pipeproof.records.record_evidence import RecordedStep

_NO_ROOM = "; SingleDevice(..., device='cpu') runs it on the host, and check_step(against=Composed(...)) needs none"

Held = Mapping[str, Mapping[Shard | None, int]]  # by name, where parts lie (None: all), and the rank that gives it


def lying_at(arrivals: Sequence[Arrival]) -> Held:
    """Of each parameter, the first rank that has it, or the first that has each of its parts."""
    found: dict[str, dict[Shard | None, int]] = {}
    for rank, arrival in enumerate(arrivals):
        for name in arrival.held:
            found.setdefault(name, {}).setdefault(arrival.shards.get(name), rank)
    return found


def _weight(name: str, rank: int) -> str:
    return f"weight {name} of rank {rank}"


@dataclass(frozen=True)
class SingleDevice:
    """How the reference is made: ``build()`` gives the whole model; its weights are then the job's.

    ``loss_fn`` and ``floors`` are those of ``record_step``. contract: what the job claims; ``loss_divisor``,
    ``loss_scale`` and ``accumulation`` are read, but for the shares of its replicas. Of what depends on the data,
    ``loss_fn`` is a ``LossOfAll``, and the contract a function of the model and all microbatches. device: where the
    reference computes, as ``torch.device`` has it. None: where ``build`` puts the model, and where that is the host, on
    the device of rank 0's own weights: other devices round otherwise, and autocast is for one type of them. During the
    step itself it lies on the host.
    """

    build: Callable[[], nn.Module]
    loss_fn: LossFn | LossOfAll
    contract: Contract | Callable[[Any, Pairs], Contract] = DEFAULTS
    floors: bool = True
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        given: Any = self.contract
        if isinstance(given, int | float | None):  # the divisor alone
            object.__setattr__(self, "contract", Contract(loss_divisor=given))

    def check(self) -> None:
        """Raise ``WhiteBoxError`` for what no reference can be made of."""
        check_builds("build", self.build)
        if not isinstance(self.loss_fn, LossOfAll):
            check_loss_fn(self.loss_fn)
        if not isinstance(self.contract, Contract) and not callable(self.contract):
            raise WhiteBoxError(f"contract is {self.contract!r}: expected a pipeproof.Contract")
        try:
            torch.device(self.device or CPU)
        except (RuntimeError, TypeError):
            raise WhiteBoxError(f"device is {self.device!r}: expected one of torch's, such as cpu or cuda:0") from None

    def for_framework(self, accumulation: Accumulation | None) -> "SingleDevice":
        """The same, of a job that adds gradients up like this, where the contract does not say how."""
        if accumulation is None:
            return self
        given = self.contract

        def contract(model: Any, every: Pairs) -> Contract:
            said = given if isinstance(given, Contract) else given(model, every)
            return said if said.accumulation is not None else replace(said, accumulation=accumulation)

        return replace(self, contract=contract)

    def placed(self, model: nn.Module, beside: torch.device) -> nn.Module:
        """``model`` where it is to compute, the job's own weights being ``beside``."""
        own = {parameter.device.type for parameter in model.parameters()}
        place = torch.device(self.device) if self.device is not None else beside if own == {CPU} else None
        return model if place is None else model.to(place)


class ReferenceBeside:
    """What rank 0 makes of ``source`` for one step; ``timeout_s`` bounds each wait.

    renamable: whether names may be cured by rename=.

    ``model``: on rank 0 the reference, with the weights that the step began with; ``microbatches`` are what it runs.
    """

    def __init__(self, source: SingleDevice, exchange: Exchange, *, timeout_s: float, renamable: bool = True) -> None:
        self.source = source
        self._renamable = renamable
        self._roots: list[object] = [source.build, source.loss_fn, source.contract]
        self.model: nn.Module | None = None
        self.microbatches: Pairs = ()
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._laid_out: dict[str, Tensor] = {}
        self._loss_fn: LossFn | None = None
        self._start: Snapshot | None = None  # what the reference ran with, as the step began
        self._losses: tuple[float, ...] = ()
        self._shares: tuple[tuple[int, ...], ...] = ()
        self._stages: dict[str, set[int]] = {}
        self._beside = self._place = torch.device(CPU)  # where this rank's own weights are, and the reference computes

    @contextmanager
    def apart(self) -> Iterator[None]:
        """While this is open, the reference runs; then the job is as it was."""
        with drawing_apart(), unchanged(*self._roots):
            yield

    def record(
        self,
        parameters: Mapping[str, Tensor],
        arrivals: Sequence[Arrival],
        microbatches: Pairs | None,
        *,
        shares: tuple[tuple[int, ...], ...] = (),
        beside: object = None,
    ) -> tuple[Record | None, dict[int, str]]:
        """What a correct step gives, or why there is nothing to say.

        ``parameters`` are this rank's, by name; ``shares`` the microbatches of each replica, where that is known.
        ``beside``: the job's modules; nothing that these and the loss lead to changes.
        """
        self._roots += [beside, microbatches]
        held, own = lying_at(arrivals), self._exchange.rank
        self._beside = next((one.device for one in parameters.values()), torch.device(CPU))
        given = [name for name, parts in held.items() if own in parts.values()]
        for name in given:
            self._exchange.give(_weight(name, own), parameters[name])
        self._shares = shares
        self._stages = {name: {stage for _, stage in places} for name, places in places_of(arrivals).items()}
        found = self._of_first(lambda: self._made(parameters, held, microbatches), "the reference of the checked step")
        self._exchange.clear(_weight(name, own) for name in given)
        return found

    def measured(self, record: Record) -> tuple[Record | None, dict[int, str]]:
        """``record`` with floors, or why there are none: the reference runs again from the state that it began with."""
        found, problems = self._of_first(self._with_floors, "what rounding does to the checked step")
        if found is None:
            return None, problems
        operation = replace(record.operations[0], floors=found.operations[0].floors)
        return replace(record, config=found.config, operations=(operation,)), {}

    def fetch(self, name: str) -> Tensor:
        """What any rank laid out under ``name``."""
        return self._exchange.take(name, bound_s=self._timeout_s)

    def clear(self) -> None:
        """Take back what was laid out, and let go what was kept to run again."""
        self._exchange.clear(self._laid_out)
        self._start = None

    def update(self, step: "RecordedStep") -> "Update":
        """The step as attribution sees it, on rank 0. The model is made to run each microbatch once more.

        Raises ``RecordError`` for microbatches that only their loop can tell how to use.
        """
        from pipeproof.reference.traced import Traced  # it is for explaining, as all that knows updates

        model = self._there
        held = [step.site(name) for name in step.places]
        batches = [self._batch(number) for number in range(len(self.microbatches))]
        now = Traced(model, held=held, batches=batches, loss=self._loss, losses=step.due.losses, ends={})
        stage_of = {name: stage for stage, name in held}
        owner = {name: stage_of.get(name, NOWHERE) for name, _ in model.named_parameters(remove_duplicate=False)}
        return replace(step.of_record, now=now, tied=copies_apart(model, owner), computed_in=lambda: self._computed_in)

    def weights(self) -> dict[str, Tensor]:
        """Those that the step began with, on the host of rank 0; empty on all others."""
        named = {} if self.model is None else dict(self.model.named_parameters(remove_duplicate=False))
        return {name: one.detach().to(CPU) for name, one in named.items()}

    def with_weights(self, weights: Mapping[str, Tensor]) -> Given:
        """What the step gives with these weights in place of its own, on rank 0."""
        model = copied(self._there)
        with torch.no_grad():
            for name, weight in weights.items():
                model.get_parameter(name).copy_(weight)
        with drawing_apart(), unchanged(*self._roots):
            (due,) = recorded(model, self.microbatches, self._recipe, floors=False, stages=self._stages).operations
        return Given(due.losses, due.loss or 0.0, due.gradients)

    def moved(self, number: int) -> Nudged | None:
        """How far weights that are one rounding off move the step, which is one; on rank 0."""
        return moved(self._there, self.microbatches, self._recipe, stages=self._stages)

    @property
    def _computed_in(self) -> torch.dtype | None:
        return computed_in(copied(self._there), [self._batch(0)], self._loss)

    def repeated(self) -> frozenset[str]:
        """The parameters that the model uses in several places, on rank 0: these may have copies in several stages."""
        model = self._there
        with self.apart():
            found = repeated(copied(model), self._batch(0), self.loss_fn)
        model.to(CPU)  # this is before the step
        return found

    @property
    def _there(self) -> nn.Module:
        """The model, on the device where it computes."""
        assert self.model is not None, "a step was compared with what this model gave"
        return self.model.to(self._place)

    @property
    def loss_fn(self) -> LossFn:
        """A microbatch's loss, in this step."""
        assert self._loss_fn is not None, "a step was compared with what this model gave"
        return self._loss_fn

    @property
    def _loss(self) -> Loss:
        return loss_of(self._contract, self.loss_fn, len(self.microbatches))

    @property
    def _recipe(self) -> Recipe:
        return recipe_of(self._contract, self._loss, self._shares)

    def _of_first(self, make: Callable[[], Record], what: str) -> tuple[Record | None, dict[int, str]]:
        """What rank 0 can ``make`` there, on every rank, or why it cannot."""
        outcome = self._described(make) if self._exchange.rank == 0 else ("", "")
        text, problem = self._exchange.gather(outcome, what=what, bound_s=self._timeout_s)[0]
        return (None, {0: problem}) if problem else (restored(text, self.fetch), {})

    def _described(self, make: Callable[[], Record]) -> tuple[str, str]:
        laid_out: dict[str, Tensor] = {}
        try:
            self.source.check()
            with self.apart():
                record = make()
                self._there.to(CPU)  # the step needs the device's memory
            text = described(record, laid_out)
        except (RecordError, WhiteBoxError, ContractError) as error:
            return "", str(error)
        except Exception as error:  # the user's own code runs in it
            cure = _NO_ROOM if isinstance(error, torch.OutOfMemoryError) else ""
            return "", f"the reference raised {type(error).__name__}: {error}{cure}"
        for address, tensor in laid_out.items():
            self._laid_out[address] = tensor.cpu()
            self._exchange.give(address, self._laid_out[address])
        return text, ""

    def _made(self, own: Mapping[str, Tensor], held: Held, microbatches: Pairs | None) -> Record:
        """What a correct step gives, without floors; ``own`` are this rank's parameters."""
        if microbatches is None:
            raise RecordError("the reference runs here, and there are no microbatches: pass them on rank 0")
        self.model, self.microbatches = self._with_weights(own, held), microbatches
        given, contract = self.source.loss_fn, self.source.contract
        self._loss_fn = given.of(microbatches) if isinstance(given, LossOfAll) else given
        self._contract = contract if isinstance(contract, Contract) else contract(self.model, microbatches)
        self._contract.reads(("loss_divisor", "loss_scale", "accumulation"), "beside a SingleDevice")
        if self.source.floors:
            self._start = Snapshot([self._loss_fn, microbatches], lean=[self.model], host=True)
        record = self._recorded(floors=False)
        self._losses = record.operations[0].losses
        return record

    def _with_floors(self) -> Record:
        assert self._start is not None, "floors are asked for where they were promised"
        self._start.put_back()
        record = self._recorded(floors=True)
        (operation,) = record.operations
        check_repeated(self._losses, operation.losses)
        return replace(record, operations=(replace(operation, gradients={}),))

    def _recorded(self, *, floors: bool) -> Record:
        record = recorded(self._there, self.microbatches, self._recipe, floors=floors, stages=self._stages)
        return replace(record, operations=tuple(replace(one, buffers={}, before={}) for one in record.operations))

    def _with_weights(self, own: Mapping[str, Tensor], held: Held) -> nn.Module:
        """The reference with the weights of ``held``, which ranks have; these must be the model's parameters."""
        model = self.source.build()
        check_module(f"build, {name_of(self.source.build)}, returned", model)
        if {id(one) for one in own.values()} & set(map(id, model.parameters())):
            model = copied(model)  # what the step does to its weights may not reach the reference
        named = dict(model.named_parameters(remove_duplicate=False))
        for what, names in (("no rank holds", named.keys() - held), ("the reference lacks", held.keys() - named)):
            if names:
                cure = (
                    ", or give rename= if names differ" if self._renamable else ", in the same sizes and with its names"
                )
                raise RecordError(f"{what} {', '.join(sorted(names))}: build both alike{cure}")
        with torch.no_grad():
            for name, parameter in named.items():
                weight = self._whole(name, held[name])
                if (ours := form(parameter)) != (theirs := form(weight)):
                    raise RecordError(f"the reference's {name} is of {ours}, the job's of {theirs}: build both alike")
                parameter.copy_(weight)
        model = self.source.placed(model, self._beside)
        self._place = next(model.parameters()).device
        return model

    def _whole(self, name: str, held: Mapping[Shard | None, int]) -> Tensor:
        """The weight that ranks have, put together of their parts."""
        parts = [(shard, self.fetch(_weight(name, rank))) for shard, rank in held.items()]
        lying = [(shard, part) for shard, part in parts if shard is not None]
        if len(lying) < len(parts):
            return next(part for shard, part in parts if shard is None)
        if why := untiled([shard for shard, _ in lying]):
            raise RecordError(f"what ranks have of the weights of {name} is not all of them: {why}")
        whole = gathered(lying)
        assert whole is not None, "every rank has given its part"
        return whole

    def _batch(self, number: int) -> Batch:
        assert self.model is not None, "it runs what the model runs"
        batch = Batch.of(*self.microbatches[number])
        if not batch.of_tensors:
            raise RecordError(f"microbatch {number} is not of tensors alone")
        return batch.to(str(next(self.model.parameters()).device))
