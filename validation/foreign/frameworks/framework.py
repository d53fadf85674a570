"""What every adapter of a framework needs: its package, and sentences for what it does not cover."""

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from traceback import walk_tb
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map_only

from pipeproof.core.verdict import Verdict
from pipeproof.foreign.on_a_world import validate as validated
from pipeproof.foreign.task import WhiteBoxError, check_builds, name_of
from pipeproof.foreign.validator import WhiteBox
from pipeproof.worlds.shipping import FIRST

_ON_CPU: set[str] = set()  # frameworks that this process had run without a GPU


@dataclass(frozen=True)
class Framework:
    """A framework, as it is installed and imported, and the versions that its adapter knows.

    error: what is raised where it is missing, or used in a way that is not covered. axes: in the order in which it
    numbers ranks; neighbours differ along the last. child: what its reference calls the user's model, which is in it.
    own: packages that keep a rank's state, of which simulated ranks have one each; None: its own. shim: has it run
    without a GPU; may be called again.
    """

    name: str
    package: str
    adapter: str
    known: tuple[str, ...]
    install: str
    error: type[WhiteBoxError]
    axes: tuple[str, ...] = ("pp", "dp")
    child: str = ""
    own: tuple[str, ...] | None = None
    shim: Callable[[], None] | None = None

    @contextmanager
    def imports(self) -> Iterator[None]:
        """While this is open, import what imports the framework. From then on it runs without a GPU, too.

        Each framework's module has this. Raises its error, in one sentence, where the framework is not installed, or
        what it needs is not. Where there is a GPU, nothing is changed.
        """
        __tracebackhide__ = True
        root = self.package.partition(".")[0]
        try:
            self.module()
            self.on_cpu()
            yield
        except ModuleNotFoundError as error:
            by = {frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)}
            if root not in by:  # another's import
                raise
            raise self.error(f"{self.name} needs {error.name}, which is not installed: {self.install}") from None

    def on_cpu(self) -> None:
        """Have it run without a GPU, where there is none."""
        if self.shim is not None and torch.accelerator.current_accelerator(check_available=True) is None:
            _ON_CPU.add(self.name)
            self.shim()

    def module(self, name: str = "") -> ModuleType:
        """Its package, or the module ``name`` in it."""
        try:
            package = importlib.import_module(self.package)
        except ModuleNotFoundError as error:
            if error.name not in (self.package, self.package.partition(".")[0]):
                raise
            raise self.error(f"{self.name} is not installed: {self.install}") from None
        found = getattr(package, "__version__", "of no version")
        if not f"{found}.".startswith(tuple(f"{one}." for one in self.known)):
            known = ", ".join(self.known)
            raise self.error(f"{self.name} is {found}: this pipeproof knows {known}, so install one of it")
        return importlib.import_module(f"{self.package}.{name}") if name else package

    @property
    def installed(self) -> str:
        """Its name and version."""
        return f"{self.name} {self.module().__version__}"

    def own_name(self, name: str) -> str:
        """What the user's model calls the parameter that the reference calls ``name``."""
        return name.removeprefix(f"{self.child}.") if self.child else name

    def covers(self, given: Mapping[str, Any], covered: Mapping[str, Any]) -> None:
        """Raise for an option that is not as it is ``covered``. What is not ``given`` is not looked at."""
        for name, value in covered.items():
            if given.get(name, value) != value:
                raise self.error(
                    f"{name} is {given[name]}: {self.adapter} covers {value} only; set it so for the check"
                )

    def mesh(self, ranks: int | Mapping[str, int]) -> int | dict[str, int]:
        """Ranks as the framework numbers them."""
        if not isinstance(ranks, Mapping):
            return ranks
        if other := [axis for axis in ranks if axis not in self.axes]:
            raise self.error(f"ranks has the axis {other[0]!r}: {self.adapter} covers pp and dp")
        return {axis: ranks.get(axis, 1) for axis in self.axes}

    def built(self, build: Any, *given: Any) -> Any:
        """What ``build``, the user's reference, gives for what it is ``given``. Raises where it is no function."""
        check_builds("reference", build, self.error)
        return build(*given)

    def listed(self, microbatches: Any, *, what: str = "microbatches") -> Sequence[Any]:
        """The ``microbatches``. Raises where they are no list: one that is drawn from is the job's, and left alone."""
        if not isinstance(microbatches, Sequence) or isinstance(microbatches, str):
            found = "None" if microbatches is None else f"a {type(microbatches).__name__}"
            raise self.error(f"{what} is {found}: expected a list of those of the step")
        if not microbatches:
            raise self.error(f"{what} is empty: expected at least one")
        return microbatches

    def check_function(self, what: str, given: Any, due: str) -> None:
        """Raise where what is ``given`` as ``what`` is no function; ``due`` says in words which one it is to be."""
        if not callable(given) or isinstance(given, type):
            raise self.error(f"{what} is {shown(given)}: expected {due}")

    def judge(self, whitebox: Any) -> Callable[..., Verdict]:
        """What judges a step: on the ranks of ``whitebox``, or where that is None, on ranks of its own."""
        if not isinstance(whitebox, WhiteBox | None):
            raise self.error(f"whitebox is {shown(whitebox)}: expected pytest's fixture of that name, or None")
        if whitebox is not None:
            whitebox.world.own_modules |= {self.package.partition(".")[0]} if self.own is None else set(self.own)
        validate = validated if whitebox is None else whitebox.validate
        # A test's functions are imported where a rank unpacks them, which for nanotron has to be later.
        return partial(self._on_ranks, validate) if self.name in _ON_CPU else validate

    def _on_ranks(self, validate: Callable[..., Verdict], *given: Any, **named: Any) -> Verdict:
        FIRST.append(self.on_cpu)
        try:
            return validate(*given, **named)
        finally:
            FIRST.remove(self.on_cpu)

    def check_count(self, option: str, count: int | None, due: int, what: str = "microbatches") -> None:
        """Raise unless ``count``, which the ``option`` has, is that of the step; None: nobody says."""
        if count is not None and count != due:
            raise self.error(f"{option} is {count}, and the step has {due} {what}: let both be the same")

    def check_neighbours(self, stage: int, replicas: int, numbering: str) -> None:
        """Raise where this rank, which has ``stage``, is numbered otherwise than ``whitebox.validate`` numbers it."""
        rank = dist.get_rank()
        if stage != rank // replicas:
            raise self.error(
                f"rank {rank} has stage {stage}, expected {rank // replicas}: ranks of a stage have to be neighbours, "
                f"as in {numbering}"
            )

    def check_dropout(self, model: nn.Module, *, what: str = "") -> None:
        """Raise for a module of torch's that drops out; ``what`` stands before its name."""
        for name, module in model.named_modules():
            if isinstance(module, _DropoutNd) and module.p:
                raise self.error(f"{what}{name} drops out with p={module.p}: set p to 0 for the check")

    def check_types(self, module: nn.Module, reference: nn.Module, which: str) -> None:
        """Raise where the framework cast ``module``, and the reference was not; ``which`` it is, in words."""
        types = [{one.dtype for one in part.parameters()} for part in (module, reference)]
        if theirs := sorted(map(str, types[0] - types[1])):
            ours = ", ".join(sorted(map(str, types[1])))
            raise self.error(f"{which} {theirs[0]}, the reference in {ours}: pass dtype={theirs[0]} to validate")

    def check_dtype(self, dtype: Any) -> None:
        """Raise where ``dtype`` is neither None nor a type of torch's."""
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise self.error(f"dtype is {dtype!r}: expected a torch.dtype, as torch.bfloat16")

    def load(self, parameters: Iterable[tuple[str, nn.Parameter]], reference: nn.Module) -> None:
        """Give the parameters, by their names in the reference, its weights.

        Raises where the reference has no such parameter, or one of another shape or type.
        """
        weights = dict(reference.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, parameter in parameters:
                theirs, weight = form(parameter), weights.get(name)
                if weight is None or form(weight) != theirs:
                    ours = "none" if weight is None else f"one of {form(weight)}"
                    raise self.error(
                        f"a stage has a parameter {name} of {theirs}, the reference has {ours}: build both by the same "
                        "function, with the same sizes and types"
                    )
                parameter.copy_(weight)


@dataclass(frozen=True)
class Packed:
    """How mappings of tensors become tuples: ``first``, if any, and then what else all of them have, by these names."""

    names: tuple[str, ...]
    first: str | None = None

    @classmethod
    def of(
        cls, inputs: Sequence[Mapping[str, Any]], *, error: type[WhiteBoxError], first: str | None = None
    ) -> "Packed":
        """How to pack these, one for each microbatch. Raises ``error`` where one has other names than the first."""
        names = [sorted(set(given) - {first}) for given in inputs]
        beside = "" if first is None else f" beside its {first}"
        for number, found in enumerate(names):
            if found != names[0]:
                raise error(f"microbatch {number} has {found}{beside}, microbatch 0 {names[0]}")
        return cls(tuple(names[0]) if names else (), first)

    def pack(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The tensors of a microbatch."""
        return tuple(inputs[name] for name in self._order)

    def unpack(self, tensors: Any) -> dict[str, Tensor]:
        """They by their names again."""
        every = tensors if isinstance(tensors, tuple | list) else (tensors,)
        return dict(zip(self._order, every, strict=True))

    @property
    def _order(self) -> tuple[str, ...]:
        return self.names if self.first is None else (self.first, *self.names)


@dataclass(frozen=True)
class OfMicrobatch:
    """``criterion``, of outputs and the number of their microbatch, in place of what is no single tensor of targets."""

    criterion: Callable[[Any, Any], Tensor]
    microbatches: Mapping[tuple[int, ...], Any]

    def __call__(self, outputs: Any, number: Tensor) -> Tensor:
        microbatch = self.microbatches[tuple(number.tolist())]
        return self.criterion(outputs, tree_map_only(Tensor, lambda tensor: tensor.to(number.device), microbatch))


def unwrapped(name: str, *wrappers: str) -> str:
    """A parameter's name without the parts that are ``wrappers`` around modules."""
    return ".".join(part for part in name.split(".") if part not in wrappers)


def shown(value: Any) -> str:
    """A value in words: itself where it is short, else what it is."""
    return repr(value) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"


def form(parameter: Tensor) -> str:
    """Its shape and type, in words."""
    return f"shape {list(parameter.shape)} in {parameter.dtype}".replace("torch.", "")


@dataclass(frozen=True)
class Named:
    """``run``, that is called what the user's ``function`` is called."""

    function: Callable[..., Any]
    run: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return name_of(self.function)

    def __call__(self, *given: Any) -> Any:
        return self.run(*given)


_NOTHING = object()


@contextmanager
def replaced(place: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """While this is open, ``place`` has ``by`` under that name; then again what it had of its own, or nothing."""
    own = vars(place).get(name, _NOTHING)
    setattr(place, name, by)
    try:
        yield
    finally:
        if own is _NOTHING:
            delattr(place, name)
        else:
            setattr(place, name, own)


@contextmanager
def around(place: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """While this is open, a call of ``name`` in ``place`` is one of ``by``, which is given what was there, and all."""
    inner = getattr(place, name)
    with replaced(place, name, wraps(inner)(partial(by, inner))):
        yield


def loss_of_its_own(output: Tensor, _: Tensor) -> Tensor:
    """For a reference that gives the loss itself."""
    return output


@contextmanager
def launched(**more: str) -> Iterator[None]:
    """While this is open, the environment has what a launcher would have set on this rank, and ``more``."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    wanted = {"LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": ranks, **more}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
