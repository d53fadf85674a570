"""The single-device model beside a running job: rank 0 builds it, with all ranks' weights, and publishes a step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipeproof.core.contract import DEFAULTS, Contract, ContractError
from pipeproof.core.ledger import NOWHERE
from pipeproof.core.nudged import Nudged
from pipeproof.core.observe.shards import Shard, find_untiled, join_shards
from pipeproof.core.old_weights import Given
from pipeproof.records.rank_part import Arrival, places_of
from pipeproof.records.record import Record, RecordError
from pipeproof.records.record_file import describe, restore
from pipeproof.records.step_record import LossFn, OneDevice, Pairs, check_repeated, recipe_of
from pipeproof.reference.accumulation import Accumulation
from pipeproof.reference.copied import deep_copy
from pipeproof.reference.copies import copies_apart
from pipeproof.reference.data import Batch
from pipeproof.reference.snapshot import Snapshot, keep_unchanged
from pipeproof.reference.step import Loss
from pipeproof.whitebox.reference_run import narrowest_type
from pipeproof.whitebox.task import (
    LossOfAll,
    WhiteBoxError,
    check_builds,
    check_loss_fn,
    check_module,
    form,
    name_of,
    repeated_parameters,
)
from pipeproof.worlds.accelerator import CPU
from pipeproof.worlds.settings import drawing_apart
from pipeproof.worlds.side_store import Exchange

if TYPE_CHECKING:
    from pipeproof.explain.atoms import Update
    from pipeproof.records.record_evidence import RecordedStep

_NO_ROOM = "; SingleDevice(..., device='cpu') runs it on the host, and check_step(against=StageByStage(...)) needs none"

Held = Mapping[str, Mapping[Shard | None, int]]  # by name, where parts lie (None: all), and the first rank with it


def _weight(name: str, rank: int) -> str:
    return f"weight {name} of rank {rank}"


@dataclass(frozen=True)
class SingleDevice:
    """How to build the reference: ``build()`` returns the whole model; its weights then come from the job.

    ``loss_fn`` and ``floors``: as in ``record_step``. contract: the job's claims; ``loss_divisor``, ``loss_scale`` and
    ``accumulation`` are read, but for the shares of its replicas. If they depend on the data, ``loss_fn`` is a
    ``LossOfAll``, and the contract a function of the model and all microbatches. device: the reference's device, as
    ``torch.device`` has it. None: ``build``'s own, or, if that is the host, the device of rank 0's own weights: other
    devices round differently, and autocast is for one type of them. During the step itself the model lies on the host.
    """

    build: Callable[[], nn.Module]
    loss_fn: LossFn | LossOfAll
    contract: Contract | Callable[[Any, Pairs], Contract] = DEFAULTS
    floors: bool = True
    device: torch.device | str | None = None

    def check(self) -> None:
        """Raise ``WhiteBoxError`` for input that cannot make a reference."""
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
        """Set the job's ``accumulation``, unless declared in the contract."""
        if accumulation is None:
            return self
        given = self.contract

        def contract(model: Any, every: Pairs) -> Contract:
            said = given if isinstance(given, Contract) else given(model, every)
            return said if said.accumulation is not None else replace(said, accumulation=accumulation)

        return replace(self, contract=contract)

    def place(self, model: nn.Module, beside: torch.device) -> nn.Module:
        """Move ``model`` to its device; ``beside``: the device of the job's weights."""
        own = {parameter.device.type for parameter in model.parameters()}
        place = torch.device(self.device) if self.device is not None else beside if own == {CPU} else None
        return model if place is None else model.to(place)


class ReferenceBeside:
    """Rank 0's results from ``source`` for one step; ``timeout_s`` bounds each wait; rename= may cure names."""

    def __init__(self, source: SingleDevice, exchange: Exchange, *, timeout_s: float, renamable: bool = True) -> None:
        self.source = source
        self._exchange, self._timeout_s, self._renamable = exchange, timeout_s, renamable
        self._roots: list[object] = [source.build, source.loss_fn, source.contract]
        self._step: OneDevice | None = None  # on rank 0, with the initial weights
        self._place = torch.device(CPU)  # where it computes
        self._start: Snapshot | None = None  # its initial state
        self._laid_out: dict[str, Tensor] = {}

    @contextmanager
    def set_apart(self) -> Iterator[None]:
        """Isolate the reference's run; afterwards the job is unchanged."""
        with drawing_apart(), keep_unchanged(*self._roots):
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
        """Record a correct step, without floors, or return problems by rank.

        ``parameters``: this rank's, by name; ``shares``: each replica's microbatches, if known. ``beside``: the job's
        modules; no object reachable from these and the loss changes.
        """
        self._roots += [beside, microbatches]
        held, own = dict[str, dict[Shard | None, int]](), self._exchange.rank
        for rank, arrival in enumerate(arrivals):
            for name in arrival.held:
                held.setdefault(name, {}).setdefault(arrival.shards.get(name), rank)
        given = [name for name, parts in held.items() if own in parts.values()]
        for name in given:
            self._exchange.give(_weight(name, own), parameters[name])

        def make() -> Record:
            if microbatches is None:
                raise RecordError("the reference runs here, and there are no microbatches: pass them on rank 0")
            model, loss_fn, said = self._with_weights(parameters, held), self.source.loss_fn, self.source.contract
            loss_fn = loss_fn.of(microbatches) if isinstance(loss_fn, LossOfAll) else loss_fn
            contract = said if isinstance(said, Contract) else said(model, microbatches)
            contract.reads(("loss_divisor", "loss_scale", "accumulation"), "beside a SingleDevice")
            recipe = recipe_of(contract, loss_fn, len(microbatches), shares)
            stages = {name: {stage for _, stage in places} for name, places in places_of(arrivals).items()}
            self._step = OneDevice(model, microbatches, recipe, stages=stages)
            if self.source.floors:
                self._start = Snapshot([loss_fn, microbatches], lean=[model], host=True)
            return self._step.record(floors=False)

        found = self._of_first(make, "the reference of the checked step")
        self._exchange.clear(_weight(name, own) for name in given)
        return found

    def measure(self, record: Record) -> tuple[Record | None, dict[int, str]]:
        """Add floors to ``record``, or return problems: the reference runs again from its initial state."""

        def again() -> Record:
            assert self._start is not None, "floors are asked for where they were promised"
            self._start.put_back()
            found = self._there.record(floors=True)
            check_repeated(record.operations[0].losses, found.operations[0].losses)
            return replace(found, operations=(replace(found.operations[0], gradients={}),))

        found, problems = self._of_first(again, "what rounding does to the checked step")
        if found is None:
            return None, problems
        operation = replace(record.operations[0], floors=found.operations[0].floors)
        return replace(record, config=found.config, operations=(operation,)), {}

    def fetch(self, name: str) -> Tensor:
        """Fetch a tensor published by any rank under ``name``."""
        return self._exchange.take(name, bound_s=self._timeout_s)

    def clear(self) -> None:
        """Withdraw published tensors, and release state for a rerun."""
        self._exchange.clear(self._laid_out)
        self._start = None

    def update(self, step: "RecordedStep") -> "Update":
        """Build attribution's view of the step, on rank 0. The model runs each microbatch once more.

        Raises ``RecordError`` for microbatches that only their loop knows how to use.
        """
        from pipeproof.reference.traced import Traced  # it is for explaining, as all that knows updates

        own, held = self._there, [step.site(name) for name in step.places]
        batches = [self._batch(number) for number in range(len(own.microbatches))]
        now = Traced(own.model, held=held, batches=batches, loss=self._loss, losses=step.record.losses, ends={})
        stage_of = {name: stage for stage, name in held}
        owner = {name: stage_of.get(name, NOWHERE) for name, _ in own.model.named_parameters(remove_duplicate=False)}

        def computed_in() -> torch.dtype | None:
            return narrowest_type(deep_copy(self._there.model), [self._batch(0)], self._loss)

        return replace(step.of_record, now=now, tied=copies_apart(own.model, owner), computed_in=computed_in)

    def weights(self) -> dict[str, Tensor]:
        """Return the step's initial weights, on the host of rank 0; empty on all others."""
        named = {} if self._step is None else dict(self._step.model.named_parameters(remove_duplicate=False))
        return {name: one.detach().to(CPU) for name, one in named.items()}

    def with_weights(self, weights: Mapping[str, Tensor]) -> Given:
        """Compute the step with replaced weights, on rank 0."""
        model = deep_copy(self._there.model)
        with torch.no_grad():
            for name, weight in weights.items():
                model.get_parameter(name).copy_(weight)
        with self.set_apart():
            (expected,) = replace(self._there, model=model).record(floors=False).operations
        return Given(expected.losses, expected.loss or 0.0, expected.gradients)

    def nudged(self, number: int) -> Nudged | None:
        """Measure the effect of weights one rounding off, on rank 0."""
        return self._there.nudged()

    def repeated_parameters(self) -> frozenset[str]:
        """Return parameters that the model uses in several places, on rank 0: possible copies in several stages."""
        model = self._there.model
        with self.set_apart():
            found = repeated_parameters(deep_copy(model), self._batch(0), self._loss.function)
        model.to(CPU)  # this is before the step
        return found

    @property
    def _there(self) -> OneDevice:
        """The step on one device, with its model there."""
        assert self._step is not None, "a step was compared with what this model gave"
        self._step.model.to(self._place)
        return self._step

    @property
    def _loss(self) -> Loss:
        assert self._step is not None, "a step was compared with what this model gave"
        assert isinstance(self._step.recipe.loss, Loss), "it has a function of its own"
        return self._step.recipe.loss

    def _of_first(self, make: Callable[[], Record], what: str) -> tuple[Record | None, dict[int, str]]:
        """Run ``make`` on rank 0, and share its record, or its problem, with every rank."""
        text = problem = ""
        laid_out: dict[str, Tensor] = {}
        if self._exchange.rank == 0:
            try:
                self.source.check()
                with self.set_apart():
                    record = make()
                    self._there.model.to(CPU)  # the step needs the device's memory
                # Weights and buffers are the job's own: no rank needs them from here.
                every = (replace(one, buffers={}, before={}) for one in record.operations)
                text = describe(replace(record, operations=tuple(every)), laid_out)
            except (RecordError, WhiteBoxError, ContractError) as error:
                problem = str(error)
            except Exception as error:  # the user's own code runs in it
                cure = _NO_ROOM if isinstance(error, torch.OutOfMemoryError) else ""
                problem = f"the reference raised {type(error).__name__}: {error}{cure}"
        for address, tensor in laid_out.items() if text else ():
            self._laid_out[address] = tensor.cpu()
            self._exchange.give(address, self._laid_out[address])
        text, problem = self._exchange.gather((text, problem), what=what, bound_s=self._timeout_s)[0]
        return (None, {0: problem}) if problem else (restore(text, self.fetch), {})

    def _with_weights(self, own: Mapping[str, Tensor], held: Held) -> nn.Module:
        """Build the reference with the ranks' weights in ``held``; names must match its parameters.

        ``own``: this rank's parameters.
        """
        model = self.source.build()
        check_module(f"build, {name_of(self.source.build)}, returned", model)
        if {id(one) for one in own.values()} & set(map(id, model.parameters())):
            model = deep_copy(model)  # the step's changes to its weights must not reach the reference
        named = dict(model.named_parameters(remove_duplicate=False))
        cure = ", or give rename= if names differ" if self._renamable else ", in the same sizes and with its names"
        for what, names in (("no rank holds", named.keys() - held), ("the reference lacks", held.keys() - named)):
            if names:
                raise RecordError(f"{what} {', '.join(sorted(names))}: build both alike{cure}")
        with torch.no_grad():
            for name, parameter in named.items():
                weight = self._whole(name, held[name])
                if (ours := form(parameter)) != (theirs := form(weight)):
                    raise RecordError(f"the reference's {name} is of {ours}, the job's of {theirs}: build both alike")
                parameter.copy_(weight)
        beside = next((one.device for one in own.values()), torch.device(CPU))
        model = self.source.place(model, beside)
        self._place = next(model.parameters()).device
        return model

    def _whole(self, name: str, held: Mapping[Shard | None, int]) -> Tensor:
        """Join a weight from its parts on ranks."""
        parts = [(shard, self.fetch(_weight(name, rank))) for shard, rank in held.items()]
        lying = [(shard, part) for shard, part in parts if shard is not None]
        if len(lying) < len(parts):
            return next(part for shard, part in parts if shard is None)
        if why := find_untiled([shard for shard, _ in lying]):
            raise RecordError(f"what ranks have of the weights of {name} is not all of them: {why}")
        whole = join_shards(lying)
        assert whole is not None, "every rank has given its part"
        return whole

    def _batch(self, number: int) -> Batch:
        assert self._step is not None, "it runs what the model runs"
        batch = Batch.of(*self._step.microbatches[number])
        if not batch.of_tensors:
            raise RecordError(f"microbatch {number} is not of tensors alone")
        return batch.to(str(next(self._step.model.parameters()).device))
