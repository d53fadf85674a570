"""A rank's own stages in a running job, by the names that the record has for what is in them."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from validation.records.compare import other_weights
from validation.records.record import RecordedOperation, RecordError

Rename = Callable[[int, str], str]


@dataclass(frozen=True)
class RankStages:
    """``modules`` by stage; ``rename`` gives the record's name, from a stage's number and a name in it."""

    modules: Mapping[int, nn.Module]
    rename: Rename

    @cached_property
    def places(self) -> dict[str, int]:
        """The stage that each parameter is in."""
        return {name: stage for name, stage, _ in self._named}

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters themselves, as they are whenever they are looked at."""
        return {name: parameter for name, _, parameter in self._named}

    @property
    def gradients(self) -> dict[str, Tensor | None]:
        """What is in ``.grad`` now."""
        return {name: parameter.grad for name, parameter in self.parameters.items()}

    @property
    def buffers(self) -> dict[str, tuple[int, Tensor]]:
        """The stage that each buffer is in, and the buffer as it is now."""
        return {
            self.rename(stage, name): (stage, buffer)
            for stage, module in self.modules.items()
            for name, buffer in module.named_buffers()
        }

    def check_names(self) -> None:
        """Raise ``RecordError`` where two parameters have one name."""
        twice = [name for name, count in Counter(name for name, *_ in self._named).items() if count > 1]
        if twice:
            stages = " and ".join(str(stage) for name, stage, _ in self._named if name == twice[0])
            raise RecordError(f"stages {stages} both have a parameter {twice[0]}: give rename=, from stage and name")

    def check_start(self, expected: RecordedOperation) -> None:
        """Raise ``RecordError`` where weights are not the recorded ones."""
        if found := other_weights(expected.before, self.parameters):
            raise RecordError(
                f"weights that differ from the record's before the step: {found}; start from the recorded ones"
            )

    @cached_property
    def _named(self) -> list[tuple[str, int, Tensor]]:
        return [
            (self.rename(stage, name), stage, parameter)
            for stage, module in self.modules.items()
            for name, parameter in module.named_parameters(remove_duplicate=False)
        ]
