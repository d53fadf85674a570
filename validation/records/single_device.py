"""The single-device model beside a running job: it takes the job's weights and makes the step that the job makes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

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

    def record(self, held: Mapping[str, object], fetch: Callable[[str], Tensor], microbatches: Pairs) -> Record:
        """What a correct step from the job's weights gives, but for the optimizer, whose state stays with the job.

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
        record = record_step(
            model, microbatches, loss_fn=self.loss_fn, loss_divisor=self.loss_divisor, floors=self.floors
        )
        return replace(record, operations=tuple(replace(one, buffers={}) for one in record.operations))
