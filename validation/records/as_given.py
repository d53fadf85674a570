"""What a user gives to the check of a step, once it is known to be of use; what is not raises one sentence."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pipeproof.core.verdict import raised
from pipeproof.pipeline.sizes import first_few
from pipeproof.records.rank_part import AdapterNames, Rename
from pipeproof.records.record import Record, RecordError
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_record import Pairs
from pipeproof.whitebox.handed_back import Gradient
from pipeproof.whitebox.task import pair_of, shown
from pipeproof.worlds.timeout import seconds


def bound_of(timeout_s: Any) -> float:
    """The bound of a wait, in seconds."""
    try:
        return seconds(timeout_s)
    except ValueError as error:
        raise RecordError(str(error)) from None


def stages_of(modules: Any, rank: int) -> Mapping[int, nn.Module]:
    """The stages of this ``rank`` by number. A single module is the stage of this rank's number."""
    if isinstance(modules, nn.Module):
        return {rank: modules}
    if not isinstance(modules, Mapping):
        raise RecordError(
            f"modules is {shown(modules)}: expected this rank's stage, or its stages as {{number: stage}}"
        )
    for stage, module in modules.items():
        if not isinstance(stage, int) or stage < 0:
            raise RecordError(f"modules has the stage {shown(stage)}: expected its number, from 0")
        if not isinstance(module, nn.Module):
            raise RecordError(f"stage {stage} in modules is {shown(module)}: expected a torch.nn.Module")
    return modules


def named_by(rename: Any) -> Rename:
    """``rename``, which says so where it gives no name."""
    if isinstance(rename, AdapterNames):
        return rename
    if not callable(rename):
        raise RecordError(f"rename is {shown(rename)}: expected a function of a stage's number and a name in it")

    def named(stage: int, name: str) -> str:
        try:
            found = rename(stage, name)
        except Exception as error:  # no one type: it is the user's code
            why = f"raised {raised(error)}"
        else:
            if isinstance(found, str):
                return found
            why = f"gave {shown(found)}"
        raise RecordError(f"rename {why} for {name} of stage {stage}: expected the parameter's name in the whole model")

    return named


def source_of(against: Any) -> str | Path | Record | SingleDevice:
    """What a step is held against."""
    if not isinstance(against, str | Path | Record | SingleDevice):
        wanted = "a record, the path of its file, SingleDevice(build, loss_fn) or Composed(loss_fn)"
        raise RecordError(f"against is {shown(against)}: expected {wanted}")
    return against


def check_operation(operation: Any, against: object) -> None:
    """Raise for what is no number of an operation."""
    if not isinstance(operation, int) or isinstance(operation, bool):
        raise RecordError(f"operation is {shown(operation)}: expected the number of one of the record's, from 0")
    if operation and isinstance(against, SingleDevice):
        raise RecordError(f"operation is {operation}: a SingleDevice makes one step, so leave operation= out")


def pairs_of(microbatches: Any) -> Pairs | None:
    """Microbatches as pairs of inputs and target; None where a rank does not have them."""
    if microbatches is None:
        return None
    if not isinstance(microbatches, Sequence) or isinstance(microbatches, str):
        raise RecordError(f"microbatches is {shown(microbatches)}: expected a list of pairs of inputs and target")
    return [pair_of(number, one) for number, one in enumerate(microbatches)]


def gradients_of(named: Any, known: Mapping[str, Any]) -> Mapping[str, Gradient]:
    """Gradients by name, of parameters that are ``known``."""
    if not isinstance(named, Mapping):
        raise RecordError(f"gradients is {shown(named)}: expected a mapping from names of parameters to gradients")
    if named and known and not any(name in known for name in named):
        names = first_few([*named])
        raise RecordError(f"gradients is of {names}, which are no parameters: expected names as {next(iter(known))}")
    return named


def optimizers_of(given: Any) -> tuple[Optimizer, ...]:
    """This rank's optimizers: one, several, or none where nobody says."""
    every = () if given is None else tuple(given) if isinstance(given, Sequence) else (given,)
    for one in every:
        if not isinstance(one, Optimizer):
            raise RecordError(
                f"optimizer is {shown(one)}: expected this rank's torch.optim.Optimizer, or a list of them"
            )
    return every


def number(what: str, told: Any) -> float:
    """The number that is reported as ``what``."""
    try:
        return float(told.detach() if isinstance(told, Tensor) else told)
    except (TypeError, ValueError, RuntimeError):
        raise RecordError(f"{what} is {_seen(told)}: expected one number") from None


def losses_of(told: Any) -> list[float]:
    """The losses that are reported."""
    if isinstance(told, str) or not hasattr(told, "__iter__") or (isinstance(told, Tensor) and told.dim() != 1):
        raise RecordError(f"losses is {_seen(told)}: expected a list of one number for each microbatch")
    return [number(f"losses[{place}]", one) for place, one in enumerate(told)]


def _seen(told: Any) -> str:
    return f"a tensor of shape {list(told.shape)}" if isinstance(told, Tensor) else shown(told)
