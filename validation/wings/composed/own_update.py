"""What an optimizer makes of a rank's gradients: a copy of it takes the step on copies of the weights."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as torch_optimizer

from pipeproof.core.tolerance import same_bits
from pipeproof.core.verdict import raised
from pipeproof.observers.shards import added_up, held_here
from pipeproof.reference.copied import copied

_BY_ELEMENTS = (  # what these make of an element depends on no other
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)


@dataclass(frozen=True)
class OwnUpdate:
    """Parameters by the model's names, ``before`` the step and as they must be ``after`` it; ``why`` none knows it.

    Of those in shards it is what this rank has of them.
    """

    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    why: str = ""

    @staticmethod
    def unknown(why: str) -> "OwnUpdate":
        """Nobody knows what the optimizer makes of them: that is ``why``."""
        return OwnUpdate({}, {}, why)

    @staticmethod
    def by(
        optimizers: Sequence[Optimizer],
        parameters: Mapping[str, Tensor],
        *,
        factor: float | None,
        given: Mapping[str, Any] = MappingProxyType({}),
    ) -> "OwnUpdate":
        """What ``optimizers`` are going to make of ``parameters``, whose gradients are multiplied by ``factor`` first.

        None: their steps are skipped, as where gradients overflowed. ``given``: gradients that are not in ``.grad``
        yet. To be called before their steps. It takes as much memory as they and their states do once more.
        """
        name = " and ".join(dict.fromkeys(type(one).__name__ for one in optimizers))
        try:
            parts = [_parts(one) for one in optimizers]
            if obstacle := next((why for those in parts for one in those if (why := _obstacle(one))), ""):
                return OwnUpdate.unknown(f"what {name} makes of gradients is not known: {obstacle}")
            if whole := [one for those in parts for one in those if type(one) not in _BY_ELEMENTS and _in_shards(one)]:
                kind = type(whole[0]).__name__
                return OwnUpdate.unknown(f"what {kind} makes of shards is not known: it may look at whole weights")
            return _foreseen(parts, parameters, given, factor)
        except Exception as error:  # no one type: it is the user's code
            return OwnUpdate.unknown(f"a copy of {name} cannot take its step: it raised {raised(error)}")


def _foreseen(
    optimizers: Sequence[Sequence[Optimizer]],
    parameters: Mapping[str, Tensor],
    given: Mapping[str, Any],
    factor: float | None,
) -> OwnUpdate:
    """What ``optimizers``, each with those that it has inside, make of ``parameters``."""
    parts = [part for one in optimizers for part in one]
    own = {id(one) for part in parts for group in part.param_groups for one in group["params"]}
    some = {name: one for name, one in parameters.items() if id(one) in own}
    before = {name: held_here(one).detach().clone() for name, one in some.items()}
    if factor is None:
        return OwnUpdate(before, before)
    copies, twins = _twins(some, parts)
    for name, one in copies.items():
        gradient = given[name] if name in given else some[name].grad
        here = None if gradient is None else held_here(added_up(gradient, some[name])).detach()
        one.grad = None if here is None else here.to(one.dtype) * factor
    with torch.enable_grad():
        for first, *_ in optimizers:  # those inside it are its own to step
            twins[id(first)].step()
    moved = [name for name, one in some.items() if not same_bits(held_here(one).detach(), before[name])]
    if moved:  # by a function that the copy shares
        with torch.no_grad():
            for name in moved:
                held_here(some[name]).copy_(before[name])
        return OwnUpdate.unknown(f"a copy of {type(parts[0]).__name__} moved the weights themselves: they are put back")
    return OwnUpdate(before, {name: one.detach() for name, one in copies.items()})


def _in_shards(optimizer: Optimizer) -> bool:
    return any(held_here(one) is not one for group in optimizer.param_groups for one in group["params"])


def _parts(optimizer: Optimizer) -> list[Optimizer]:
    """``optimizer``, and those that it has inside."""
    found = [optimizer]
    for one in found:
        found += [inner for inner in _held(vars(one).values()) if all(inner is not other for other in found)]
    return found


def _held(values: Any) -> Iterator[Optimizer]:
    for one in values:
        if isinstance(one, Optimizer):
            yield one
        elif isinstance(one, list | tuple):
            yield from (inner for inner in one if isinstance(inner, Optimizer))


def _obstacle(optimizer: Optimizer) -> str:
    """Why a copy would not do what ``optimizer`` does, or would do it to others."""
    own = vars(optimizer)
    hooks = [own.get("_optimizer_step_pre_hooks"), own.get("_optimizer_step_post_hooks")]
    hooks += [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    if any(hooks):
        return "it has hooks around its step, which may change more than a copy"
    step = own.get("step")
    return "" if step is None or _counts_alone(step, type(optimizer)) else "its step was replaced by another function"


def _counts_alone(step: object, kind: type[Optimizer]) -> bool:
    """Whether ``step`` is what a learning rate's schedule puts in place of the step, which notes that it was called."""
    ours = isinstance(step, FunctionType) and step.__code__.co_filename == lr_scheduler.__file__
    return ours and getattr(step, "__wrapped__", None) is kind.step


def _twins(
    parameters: Mapping[str, Tensor], parts: Sequence[Optimizer]
) -> tuple[dict[str, nn.Parameter], dict[int, Optimizer]]:
    """Copies of ``parameters``, and by id of ``parts``, with all attributes: torch's own leave some out.

    What is in shards is what this rank has of it.
    """
    blank = [type(one).__new__(type(one)) for one in parts]
    given: Any = dict(parameters), [_attributes(one) for one in parts]
    instead: dict[int, object] = {id(one): twin for one, twin in zip(parts, blank, strict=True)}
    for one in _tensors(given):
        if (own := held_here(one)) is not one:
            own = own.detach().clone()
            instead[id(one)] = nn.Parameter(own, one.requires_grad) if isinstance(one, nn.Parameter) else own
    copies, attributes = copied(given, instead=instead)
    for twin, own in zip(blank, attributes, strict=True):
        twin.__dict__.update(own)
    return copies, {id(one): twin for one, twin in zip(parts, blank, strict=True)}


def _tensors(given: Any) -> Iterator[Tensor]:
    """Those in dictionaries and lists, also among the keys: a state is by its parameter."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping):
        yield from (one for pair in given.items() for inner in pair for one in _tensors(inner))
    elif isinstance(given, list | tuple):
        yield from (one for inner in given for one in _tensors(inner))


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What a copy is to have. A hook may have the whole job in it; a step that was put in place is the original's."""
    own = {name: one for name, one in vars(optimizer).items() if name != "step"}
    return {n: OrderedDict() if n.startswith("_optimizer_") and n.endswith("_hooks") else one for n, one in own.items()}
