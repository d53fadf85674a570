"""Common base of framework adapters: the package, and messages for unsupported use."""

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from traceback import walk_tb
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.dropout import _DropoutNd

from pipeproof.core.verdict import Verdict
from pipeproof.whitebox.task import WhiteBoxError, check_builds, form, show
from pipeproof.whitebox.validator import WhiteBox
from pipeproof.whitebox.validator import validate as validated
from pipeproof.worlds.shipping import FIRST

_ON_CPU: set[str] = set()  # frameworks that this process had run without a GPU


class AdapterError(WhiteBoxError):
    """A framework is missing, of an unknown version, or used in an unsupported way."""


@dataclass(frozen=True)
class Framework:
    """A framework's package, and the versions supported by its adapter.

    child: attribute of the reference that holds the user's model. axes: in the order of its rank numbers; neighbours
    differ along the last; none: any. own: packages with state that each simulated rank needs for itself; None: its own.
    shim: prepares a run without a GPU; may be called again. wrappers: attributes of modules that wrap a user's.
    """

    name: str
    package: str
    known: tuple[str, ...]
    install: str
    child: str = ""
    axes: tuple[str, ...] = ("pp", "dp")
    own: tuple[str, ...] | None = None
    shim: Callable[[], None] | None = None
    wrappers: tuple[str, ...] = ()

    @property
    def root(self) -> str:
        return self.package.partition(".")[0]

    @property
    def adapter(self) -> str:
        """Name of the adapter for users."""
        return f"pipeproof.{self.root}"

    @contextmanager
    def imports(self) -> Iterator[None]:
        """Import the framework's dependents while open. Afterwards it also runs without a GPU.

        Each framework's module has this. Raises its error, in one sentence, if the framework or a dependency is
        missing. Changes nothing on a machine with a GPU.
        """
        __tracebackhide__ = True
        try:
            self.module()
            self.on_cpu()
            yield
        except ModuleNotFoundError as error:
            by = {frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)}
            if self.root not in by:  # another's import
                raise
            raise AdapterError(f"{self.name} needs {error.name}, which is not installed: {self.install}") from None

    def on_cpu(self) -> None:
        """Prepare it for a machine without a GPU."""
        if self.shim is not None and torch.accelerator.current_accelerator(check_available=True) is None:
            _ON_CPU.add(self.name)
            self.shim()

    def module(self, name: str = "") -> ModuleType:
        """Import its package, or the module ``name`` in it."""
        try:
            package = importlib.import_module(self.package)
        except ModuleNotFoundError as error:
            if error.name not in (self.package, self.root):
                raise
            raise AdapterError(f"{self.name} is not installed: {self.install}") from None
        found = getattr(package, "__version__", "of no version")
        if not f"{found}.".startswith(tuple(f"{one}." for one in self.known)):
            known = ", ".join(self.known)
            raise AdapterError(f"{self.name} is {found}: this pipeproof knows {known}, so install one of it")
        return importlib.import_module(f"{self.package}.{name}") if name else package

    @property
    def installed(self) -> str:
        """Its name and version."""
        return f"{self.name} {self.module().__version__}"

    def own_name(self, name: str) -> str:
        """Translate a parameter's name from the reference to the user's model."""
        return name.removeprefix(f"{self.child}.") if self.child else name

    def in_whole(self, name: str) -> str:
        """Translate a parameter's name from the user's model, without its wrappers, to the reference."""
        own = ".".join(part for part in name.split(".") if part not in self.wrappers)
        return f"{self.child}.{own}" if self.child else own

    def covers(self, given: Mapping[str, Any], covered: Mapping[str, Any]) -> None:
        """Raise for a ``given`` option with a value other than the ``covered``."""
        for name, value in covered.items():
            if given.get(name, value) != value:
                raise AdapterError(
                    f"{name} is {given[name]}: {self.adapter} covers {value} only; set it so for the check"
                )

    def mesh(self, ranks: int | Sequence[int] | Mapping[str, int]) -> int | Sequence[int] | Mapping[str, int]:
        """Return ranks in the framework's numbering."""
        if not self.axes or not isinstance(ranks, Mapping):
            return ranks
        if other := [axis for axis in ranks if axis not in self.axes]:
            raise AdapterError(f"ranks has the axis {other[0]!r}: {self.adapter} covers pp and dp")
        return {axis: ranks.get(axis, 1) for axis in self.axes}

    def judge(self, whitebox: Any) -> Callable[..., Verdict]:
        """Return a validator on the ranks of ``whitebox``, or on separate ranks if None."""
        if not isinstance(whitebox, WhiteBox | None):
            raise AdapterError(f"whitebox is {show(whitebox)}: expected pytest's fixture of that name, or None")
        if whitebox is not None:
            whitebox.world.own_modules |= {self.root} if self.own is None else set(self.own)
        validate = validated if whitebox is None else whitebox.validate
        if self.name not in _ON_CPU:
            return validate

        def on_ranks(*given: Any, **named: Any) -> Verdict:
            FIRST.append(self.on_cpu)  # a test's functions are imported where a rank unpacks them: for nanotron, later
            try:
                return validate(*given, **named)
            finally:
                FIRST.remove(self.on_cpu)

        return on_ranks

    @staticmethod
    def expect(what: str, given: Any, kinds: Any, expected: str) -> None:
        """Raise unless ``given`` has one of these ``kinds``; ``expected``: the kinds in words."""
        if not isinstance(given, kinds):
            raise AdapterError(f"{what} is a {type(given).__name__}: expected {expected}")

    @staticmethod
    def expect_function(what: str, given: Any, expected: str) -> None:
        """Raise unless ``given`` is a function; ``expected``: the function in words."""
        if not callable(given) or isinstance(given, type):
            raise AdapterError(f"{what} is {show(given)}: expected {expected}")

    @staticmethod
    def expect_count(option: str, count: int | None, expected: int, what: str = "microbatches") -> None:
        """Raise unless the ``option`` has the step's ``count``; None: unknown."""
        if count is not None and count != expected:
            raise AdapterError(f"{option} is {count}, and the step has {expected} {what}: let both be the same")

    @staticmethod
    def list_microbatches(microbatches: Any, *, what: str = "microbatches") -> Sequence[Any]:
        """Return ``microbatches`` in a list. Raises for an iterator, which belongs to the job and stays untouched."""
        if not isinstance(microbatches, Sequence) or isinstance(microbatches, str):
            found = "None" if microbatches is None else f"a {type(microbatches).__name__}"
            raise AdapterError(f"{what} is {found}: expected a list of those of the step")
        if not microbatches:
            raise AdapterError(f"{what} is empty: expected at least one")
        return microbatches

    @staticmethod
    def build(build: Any, *given: Any) -> Any:
        """Call ``build``, the user's reference, with these arguments. Raises unless it is a function."""
        check_builds("reference", build, AdapterError)
        return build(*given)

    @staticmethod
    def check_neighbours(stage: int, replicas: int, numbering: str) -> None:
        """Raise if this rank, with ``stage``, has a number that differs from ``whitebox.validate``'s."""
        rank = dist.get_rank()
        if stage != rank // replicas:
            raise AdapterError(
                f"rank {rank} has stage {stage}, expected {rank // replicas}: ranks of a stage have to be neighbours, "
                f"as in {numbering}"
            )

    @staticmethod
    def check_dropout(model: nn.Module, *, what: str = "") -> None:
        """Raise for an active torch dropout module; ``what`` precedes its name."""
        for name, module in model.named_modules():
            if isinstance(module, _DropoutNd) and module.p:
                raise AdapterError(f"{what}{name} drops out with p={module.p}: set p to 0 for the check")

    @staticmethod
    def check_types(module: nn.Module, reference: nn.Module, which: str) -> None:
        """Raise if the framework cast ``module`` but not the reference; ``which``: its description."""
        types = [{one.dtype for one in part.parameters()} for part in (module, reference)]
        if theirs := sorted(map(str, types[0] - types[1])):
            ours = ", ".join(sorted(map(str, types[1])))
            raise AdapterError(f"{which} {theirs[0]}, the reference in {ours}: pass dtype={theirs[0]} to validate")

    @staticmethod
    def check_dtype(dtype: Any) -> None:
        """Raise unless ``dtype`` is None or a torch type."""
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise AdapterError(f"dtype is {dtype!r}: expected a torch.dtype, as torch.bfloat16")

    def load(self, parameters: Iterable[tuple[str, nn.Parameter]], reference: nn.Module) -> None:
        """Load weights of ``reference`` into parameters, by its names; shards get their part.

        ``reference`` may be the user's model. Raises for a missing parameter, or another shape or type.
        """
        weights = dict(reference.named_parameters(remove_duplicate=False))
        for name, one in parameters:
            theirs, weight = form(one), weights.get(name, weights.get(self.own_name(name)))
            if weight is None or form(weight) != theirs:
                ours = "none" if weight is None else f"one of {form(weight)}"
                raise AdapterError(
                    f"a stage has a parameter {name} of {theirs}, the reference has {ours}: build both by the same "
                    "function, with the same sizes and types"
                )
            whole = weight.detach()
            if isinstance(one, DTensor):
                whole = distribute_tensor(whole, one.device_mesh, one.placements, src_data_rank=None)
            with torch.no_grad():
                one.copy_(whole)


def around(place: Any, name: str, by: Callable[..., Any]) -> AbstractContextManager[object]:
    """Wrap function ``name`` in ``place`` while open: ``by`` gets the original and its arguments."""
    inner = getattr(place, name)
    return mock.patch.object(place, name, wraps(inner)(partial(by, inner)))


@contextmanager
def launch_environment(**more: str) -> Iterator[None]:
    """Set a launcher's environment for this rank, and ``more``, while open."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    wanted = {"LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": ranks, **more}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
