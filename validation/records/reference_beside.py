"""The record of the model beside a job: rank 0 makes it, with the weights of all ranks, and lays it out for them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from validation.records.arrivals import Arrival
from validation.records.record import Record, RecordError
from validation.records.record_file import described, restored
from validation.records.single_device import SingleDevice
from validation.records.step_record import Pairs
from validation.worlds.exchange import Exchange


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
