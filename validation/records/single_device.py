"""The single-device model beside a running job: it takes the job's weights and makes the step that the job makes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from reference.copied import copied
from reference.data import Batch
from reference.step import Loss, Site
from reference.traced import Traced
from validation.foreign.reference_run import repeated
from validation.records.record import Record, RecordError
from validation.records.step_record import LossFn, Pairs, record_step


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
