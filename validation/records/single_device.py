"""The single-device model beside a running job: rank 0 makes it, with the weights of all ranks, and lays out a step."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from reference.copied import copied
from reference.data import Batch
from reference.step import Loss, Site
from reference.traced import Traced
from validation.foreign.reference_run import repeated
from validation.records.rank_part import Arrival
from validation.records.record import Record, RecordError
from validation.records.record_file import described, restored
from validation.records.step_record import LossFn, Pairs, record_step
from validation.worlds.exchange import Exchange


@dataclass(frozen=True)
class SingleDevice:
    """How the reference is made: ``build()`` gives the whole model, on any device; its weights are then the job's.

    ``loss_fn``, ``loss_divisor`` and ``floors`` are those of ``record_step``.
    """

    build: Callable[[], nn.Module]
    loss_fn: LossFn
    loss_divisor: float | None = None
    floors: bool = True

    def model(self, held: Mapping[str, object], fetch: Callable[[str], Tensor]) -> nn.Module:
        """The reference with the job's weights.

        ``held`` are the parameters that ranks hold; ``fetch`` gets one. Raises ``RecordError`` where they are not the
        model's.
        """
        model = self.build()
        named = dict(model.named_parameters(remove_duplicate=False))
        for what, names in (("no rank holds", named.keys() - held), ("the reference lacks", held.keys() - named)):
            if names:
                raise RecordError(f"{what} {', '.join(sorted(names))}: give rename= if names differ")
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(fetch(name))
        return model

    def record(self, model: nn.Module, microbatches: Pairs) -> Record:
        """What a correct step of ``model`` gives, but for the optimizer, whose state stays with the job."""
        record = record_step(
            model, microbatches, loss_fn=self.loss_fn, loss_divisor=self.loss_divisor, floors=self.floors
        )
        return replace(record, operations=tuple(replace(one, buffers={}) for one in record.operations))

    def traced(
        self, model: nn.Module, microbatches: Pairs, *, held: Collection[Site], losses: Sequence[float]
    ) -> Traced:
        """What every pairing of ``microbatches`` gives in ``model``, cut into the stages that hold these parameters.

        Raises ``RecordError`` for microbatches that only their loop can tell how to use.
        """
        like = next(model.parameters())
        batches = [_batch(number, *pair).to(str(like.device)) for number, pair in enumerate(microbatches)]
        divisor = float(len(batches) if self.loss_divisor is None else self.loss_divisor)
        return Traced(model, held=held, batches=batches, loss=Loss(self.loss_fn, divisor), losses=losses, ends={})

    def repeated(self, model: nn.Module, microbatches: Pairs) -> frozenset[str]:
        """The parameters that ``model`` uses in several places: these may have copies in several stages."""
        batch = _batch(0, *microbatches[0]).to(str(next(model.parameters()).device))
        return repeated(copied(model), batch, self.loss_fn)


def _batch(number: int, inputs: object, target: object) -> Batch:
    batch = Batch.of(inputs, target)
    if not batch.of_tensors:
        raise RecordError(f"microbatch {number} is not of tensors alone")
    return batch


class ReferenceBeside:
    """What rank 0 makes of ``source`` for one step; ``timeout_s`` bounds each wait.

    ``model``: on rank 0 the reference, with the weights that the step began with.
    """

    def __init__(self, source: SingleDevice, exchange: Exchange, *, timeout_s: float) -> None:
        self.source = source
        self.model: nn.Module | None = None
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._laid_out: dict[str, Tensor] = {}

    def record(
        self, parameters: Mapping[str, Tensor], arrivals: Sequence[Arrival], microbatches: Pairs | None
    ) -> tuple[Record | None, dict[int, str]]:
        """What a correct step gives, or why there is nothing to say; ``parameters`` are this rank's, by name."""
        held = {name: rank for rank, arrival in reversed(list(enumerate(arrivals))) for name in arrival.held}
        given = [name for name, rank in held.items() if rank == self._exchange.rank]
        for name in given:
            self._exchange.give(f"weight {name}", parameters[name])
        outcome = self._made(held, microbatches) if self._exchange.rank == 0 else ("", "")
        what = "the reference of the checked step"
        text, problem = self._exchange.gather(outcome, what=what, bound_s=self._timeout_s)[0]
        self._exchange.clear(f"weight {name}" for name in given)
        return (None, {0: problem}) if problem else (restored(text, self.fetch), {})

    def fetch(self, name: str) -> Tensor:
        """What any rank laid out under ``name``."""
        return self._exchange.take(name, bound_s=self._timeout_s)

    def clear(self) -> None:
        """Take back what was laid out."""
        self._exchange.clear(self._laid_out)

    def _made(self, held: Mapping[str, int], microbatches: Pairs | None) -> tuple[str, str]:
        if microbatches is None:
            return "", "the reference runs here, and there are no microbatches: pass them on rank 0"
        try:
            self.model = self.source.model(held, lambda name: self.fetch(f"weight {name}"))
            record = self.source.record(self.model, microbatches)
            record = replace(record, operations=tuple(replace(one, before={}) for one in record.operations))
            text = described(record, self._laid_out)
        except RecordError as error:
            return "", str(error)
        except Exception as error:  # the user's own code runs in it
            return "", f"the reference raised {type(error).__name__}: {error}"
        for address, tensor in self._laid_out.items():
            self._exchange.give(address, tensor)
        return text, ""
