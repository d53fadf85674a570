"""Validate a user's input to the check of a step; a bad value raises an error of one sentence."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pipeproof.core.verdict import describe_error
from pipeproof.pipeline.sizes import first_few
from pipeproof.records.rank_part import AdapterNames, Rename
from pipeproof.records.record import Record, RecordError
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_record import Pairs
from pipeproof.whitebox.handed_back import Gradient
from pipeproof.whitebox.task import pair_of, show


def stages_of(modules: Any, rank: int) -> Mapping[int, nn.Module]:
    """Return stages by number. A single module gets this rank's number."""
    if isinstance(modules, nn.Module):
        return {rank: modules}
    if not isinstance(modules, Mapping):
        raise RecordError(f"modules is {show(modules)}: expected this rank's stage, or its stages as {{number: stage}}")
    for stage, module in modules.items():
        if not isinstance(stage, int) or stage < 0:
            raise RecordError(f"modules has the stage {show(stage)}: expected its number, from 0")
        if not isinstance(module, nn.Module):
            raise RecordError(f"stage {stage} in modules is {show(module)}: expected a torch.nn.Module")
    return modules


def require_names(rename: Any) -> Rename:
    """Wrap ``rename`` with a check: each call must return a name."""
    if isinstance(rename, AdapterNames):
        return rename
    if not callable(rename):
        raise RecordError(f"rename is {show(rename)}: expected a function of a stage's number and a name in it")

    def name_parameter(stage: int, name: str) -> str:
        try:
            found = rename(stage, name)
        except Exception as error:  # no one type: it is the user's code
            why = f"raised {describe_error(error)}"
        else:
            if isinstance(found, str):
                return found
            why = f"gave {show(found)}"
        raise RecordError(f"rename {why} for {name} of stage {stage}: expected the parameter's name in the whole model")

    return name_parameter


def source_of(against: Any, operation: Any) -> str | Path | Record | SingleDevice:
    """Return ``against``, the source of the expectation, if it and the number of its ``operation`` are valid."""
    if not isinstance(against, str | Path | Record | SingleDevice):
        wanted = "a record, the path of its file, SingleDevice(build, loss_fn) or StageByStage(loss_fn)"
        raise RecordError(f"against is {show(against)}: expected {wanted}")
    if not isinstance(operation, int) or isinstance(operation, bool):
        raise RecordError(f"operation is {show(operation)}: expected the number of one of the record's, from 0")
    if operation and isinstance(against, SingleDevice):
        raise RecordError(f"operation is {operation}: a SingleDevice makes one step, so leave operation= out")
    return against


def pairs_of(microbatches: Any) -> Pairs | None:
    """Return microbatches as pairs: inputs and target; None on a rank without them."""
    if microbatches is None:
        return None
    if not isinstance(microbatches, Sequence) or isinstance(microbatches, str):
        raise RecordError(f"microbatches is {show(microbatches)}: expected a list of pairs of inputs and target")
    return [pair_of(number, one) for number, one in enumerate(microbatches)]


def gradients_of(named: Any, known: Mapping[str, Any]) -> Mapping[str, Gradient]:
    """Return gradients by name, for ``known`` parameters."""
    if not isinstance(named, Mapping):
        raise RecordError(f"gradients is {show(named)}: expected a mapping from names of parameters to gradients")
    if named and known and not any(name in known for name in named):
        names = first_few([*named])
        raise RecordError(f"gradients is of {names}, which are no parameters: expected names as {next(iter(known))}")
    return named


def optimizers_of(given: Any) -> tuple[Optimizer, ...]:
    """Return this rank's optimizers: one, several, or none by default."""
    every = () if given is None else tuple(given) if isinstance(given, Sequence) else (given,)
    for one in every:
        if not isinstance(one, Optimizer):
            raise RecordError(
                f"optimizer is {show(one)}: expected this rank's torch.optim.Optimizer, or a list of them"
            )
    return every


def number(what: str, given: Any) -> float:
    """Convert a reported number to float; ``what`` names it in errors."""
    try:
        return float(given.detach() if isinstance(given, Tensor) else given)
    except (TypeError, ValueError, RuntimeError):
        raise RecordError(f"{what} is {_describe(given)}: expected one number") from None


def losses_of(given: Any) -> list[float]:
    """Convert reported losses to floats."""
    if isinstance(given, str) or not hasattr(given, "__iter__") or (isinstance(given, Tensor) and given.dim() != 1):
        raise RecordError(f"losses is {_describe(given)}: expected a list of one number for each microbatch")
    return [number(f"losses[{place}]", one) for place, one in enumerate(given)]


def _describe(given: Any) -> str:
    return f"a tensor of shape {list(given.shape)}" if isinstance(given, Tensor) else show(given)
