"""One step of a running job that a framework runs: what its adapter sees of it, held against one device."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipeproof.foreign.handed_back import FlatShard, Gradient
from pipeproof.foreign.reference_run import WhiteBoxError
from pipeproof.records.rank_part import Rename
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_check import StepCheck, own_name
from pipeproof.records.step_record import Pairs


class JobSight:
    """Shows ``check`` what an adapter sees of one step; what goes wrong in it is the check's own, and ends no job."""

    def __init__(self, check: StepCheck, names: Mapping[nn.Parameter, str]) -> None:
        self._check, self._names = check, names
        self.steps = 0

    def gradients(self, seen: Callable[[], Mapping[nn.Parameter, Gradient]]) -> None:
        """What the optimizer is about to take."""
        self.steps += 1
        if self.steps > 1:
            self._check.refuse("the block took more than one step of the optimizer: put check_step around one")
            return
        with self._check.noting():
            self._check.gradients({self._names[one]: _whole(gradient) for one, gradient in seen().items()})

    def losses(self, seen: Callable[[], list[Any]]) -> None:
        """The microbatches' losses, undivided, where this rank has them."""
        with self._check.noting():
            if self.steps <= 1 and (losses := [float(one) for one in seen()]):
                self._check.report(losses=losses)

    def norm(self, norm: Any) -> None:
        """The norm that was told."""
        with self._check.noting():
            if self.steps <= 1 and norm is not None:
                self._check.report(norm=float(norm))


def _whole(gradient: Gradient) -> Tensor | None:
    assert not isinstance(gradient, FlatShard), "a job with shards is refused before its step"
    return gradient


@dataclass(frozen=True)
class JobStep:
    """A framework's step on a rank, as a check is made of it.

    stages: this rank's by number, with ``rename`` as for ``check_step``. watching: what makes a ``JobSight`` see the
    step while it is open.
    """

    stages: Mapping[int, nn.Module]
    microbatches: Pairs | None
    against: SingleDevice
    watching: Callable[[JobSight], AbstractContextManager[object]]
    rename: Rename = own_name

    @property
    def names(self) -> dict[nn.Parameter, str]:
        """What the whole model calls this rank's parameters."""
        return {
            parameter: self.rename(stage, name)
            for stage, module in self.stages.items()
            for name, parameter in module.named_parameters()
        }


@contextmanager
def checking(step: Callable[[], JobStep], *, timeout_s: float) -> Iterator[StepCheck]:
    """The check of what ``step`` gives. What that raises is the verdict's, and no other rank waits for this one."""
    made, why = _made(step)
    if made is None:
        check = StepCheck({}, None, against=SingleDevice(nn.Identity, nn.functional.mse_loss), timeout_s=timeout_s)
        check.refuse(why)
        with check:
            yield check
        return
    check = StepCheck(made.stages, made.microbatches, against=made.against, rename=made.rename, timeout_s=timeout_s)
    with check, ExitStack() as stack:
        with check.noting():
            stack.enter_context(made.watching(JobSight(check, made.names)))
        yield check


def _made(step: Callable[[], JobStep]) -> tuple[JobStep | None, str]:
    try:
        return step(), ""
    except WhiteBoxError as error:
        return None, str(error)
    except Exception as error:  # no one type: what is given may be anything
        return None, f"the check cannot be made of this: {type(error).__name__}: {error}"
