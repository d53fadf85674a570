"""The composed check: its options."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeproof.core.contract import DEFAULTS, Contract
from pipeproof.records.step_expectation import StepExpectation
from pipeproof.reference.accumulation import PLAIN, Accumulation
from pipeproof.reference.generators import Generator, is_generator
from pipeproof.reference.model import LossFn
from pipeproof.reference.step import clip_factor
from pipeproof.whitebox.expectation import OF_A_MODEL
from pipeproof.whitebox.task import LossOfAll, WhiteBoxError, check_builds, check_loss_fn, check_module, name_of
from pipeproof.worlds.settings import drawing_apart

_ONE_BY_ONE = "one by one"
_OF_A_JOB = ("optimizer", "masters", "scaler", "generators", "every", "stages")
_READ = ("loss_divisor", "loss_scale", "accumulation", "warmup", "ties", "names", "stages")


@dataclass(frozen=True)
class AgainstItself(StepExpectation):
    """Check a step link by link, without a reference: each rank needs only its part of the model.

    Every rank runs its own stages again, on their inputs in the step. Three things must agree: a stage's outputs with
    its outputs in the rerun, a stage's inputs with another's outputs, and gradients with the sums over microbatches. If
    all do, the step equals the step on one device.

    loss_fn: a microbatch's undivided loss, from the last stage's output and the target; None: the stage returns it.
    build: makes the whole model, without memory on the meta device; stages must then hold each parameter once.
    host: keeps inputs of stages in host memory.
    every: checks every n-th step, beginning with the first; others run unchecked, and are not ``expected``.
    stages: "all" reruns all stages in a checked step, "one by one" a single stage, at little cost.
    optimizer: this rank's, or a list. Weights after its step are compared with a copy's update from the gradients,
    clipped to ``max_norm`` of the contract.
    masters: the optimizer's copies of weights in a wider type, by weight.
    scaler: scales this rank's losses, like ``torch.amp.GradScaler``; call its ``unscale_`` before ``gradients()``.
    generators: further sources of random numbers, besides the default ones of torch, Python, numpy and modules: their
    generators, or keepers with ``get_states`` and ``set_states``, like Megatron's tracker.
    contract: the step's claims; it reads ``loss_divisor`` (over all replicas), ``loss_scale``, ``accumulation``,
    ``max_norm``, ``warmup``, ``ties``, ``names`` and ``stages``.

    ``whitebox.validate`` takes no ``optimizer``, ``masters``, ``scaler``, ``generators``, ``every`` or ``stages``:
    they belong to a running job.
    """

    loss_fn: Callable[[Any, Any], Tensor] | LossOfAll | None = None
    build: Callable[[], nn.Module] | None = None
    host: bool = False
    optimizer: Optimizer | Sequence[Optimizer] | None = None
    masters: Mapping[nn.Parameter, Tensor] | None = None
    scaler: Any = None
    generators: Sequence[Generator] = ()
    every: int = 1
    stages: Literal["all", "one by one"] = "all"
    contract: Contract = DEFAULTS
    _steps: list[int] = field(default_factory=lambda: [0], init=False, repr=False, compare=False)

    def of_a_step(self, loss_fn: LossFn | None, contract: Contract) -> Self:
        """Return this check for a single step, with the options given beside it. Raises ``WhiteBoxError``."""
        for one in fields(self):
            if one.name in _OF_A_JOB and getattr(self, one.name) != one.default:
                raise WhiteBoxError(
                    f"{one.name}= of StageByStage is for a running job: leave it out, or use check_step"
                )
        twice = ["contract"] if DEFAULTS not in (contract, self.contract) else []
        twice += ["loss_fn"] if None not in (loss_fn, self.loss_fn) else []
        if twice:
            raise WhiteBoxError(f"{twice[0]} is given twice, also to StageByStage: give it once")
        said = contract if self.contract == DEFAULTS else self.contract
        said.reads(_READ, "where a step is held against itself up to its gradients", OF_A_MODEL)
        found = replace(self, loss_fn=loss_fn or self.loss_fn, contract=said)
        found.check()
        return found

    def whole(self) -> nn.Module | None:
        """Build the whole model on the meta device; None without ``build``. Raises ``WhiteBoxError``."""
        if self.build is None:
            return None
        with drawing_apart(), torch.device("meta"):
            model = self.build()
        check_module(f"build, {name_of(self.build)}, returned", model)
        return model

    def turn(self) -> int | None:
        """Count a step and return its number among checked steps; None for an unchecked step."""
        step, every = self._steps[0], self.every if _is_count(self.every) else 1
        self._steps[0] += 1
        return None if step % every else step // every

    def check(self) -> None:
        """Raise ``WhiteBoxError`` for options that fit no step."""
        if self.loss_fn is not None and not isinstance(self.loss_fn, LossOfAll):
            check_loss_fn(self.loss_fn)
        masters = self.masters is None or isinstance(self.masters, Mapping)
        optimizers = all(isinstance(one, Optimizer) for one in self.optimizers)
        scaler = self.scaler is None or callable(getattr(self.scaler, "get_scale", None))
        generators = isinstance(self.generators, Sequence) and all(map(is_generator, self.generators))
        keepers = "generators of torch, Python or numpy, or of keepers that have get_states() and set_states()"
        fits = {
            "contract": (isinstance(self.contract, Contract), "a pipeproof.Contract"),
            "optimizer": (optimizers, "this rank's torch.optim.Optimizer"),
            "every": (_is_count(self.every), "a number of steps, from 1"),
            "stages": (self.stages in ("all", _ONE_BY_ONE), f'"all" or "{_ONE_BY_ONE}"'),
            "masters": (masters, "a mapping of weights to their copies, such as dict(zip(...))"),
            "scaler": (scaler, "a torch.amp.GradScaler, or one that has get_scale()"),
            "generators": (generators, f"a list of {keepers}"),
        }
        for word, (fit, wanted) in fits.items():
            if not fit:
                raise WhiteBoxError(f"{word} is {getattr(self, word)!r}: expected {wanted}")
        for weight, copy in (self.masters or {}).items():
            if not (isinstance(weight, Tensor) and isinstance(copy, Tensor) and copy.shape == weight.shape):
                raise WhiteBoxError("masters has what is no copy of a weight: expected copies of its shape, by weight")
        self.contract.reads((*_READ, "max_norm"), "where a step is held against itself")
        if self.build is not None:
            check_builds("build", self.build)
            if self.contract.ties is not None:
                raise WhiteBoxError("ties is given beside build=, which tells which weights are one: leave one out")

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """This rank's optimizers; empty if not given."""
        if self.optimizer is None:
            return ()
        return tuple(self.optimizer) if isinstance(self.optimizer, Sequence) else (self.optimizer,)

    @property
    def accumulation(self) -> Accumulation:
        """How gradients are accumulated."""
        return self.contract.accumulation or PLAIN

    def in_framework(self, claims: Mapping[str, Any], **known: Any) -> Self:
        return replace(self, contract=replace(self.contract, **claims), **known)

    def for_framework(self, accumulation: Accumulation | None) -> Self:
        said = replace(self.contract, accumulation=self.contract.accumulation or accumulation)
        if self.build is None and said.ties is None:
            said = replace(said, ties=())
        return replace(self, contract=said)

    @property
    def max_norm(self) -> float:
        """The norm to which gradients are clipped; infinite without clipping."""
        return self.contract.max_norm or math.inf

    @property
    def scale(self) -> float:
        """Factor on losses before their backwards, from the scaler or the contract."""
        return float(self.contract.loss_scale or 1.0) if self.scaler is None else float(self.scaler.get_scale())

    @property
    def needs_norm(self) -> bool:
        """True if the optimizer's input depends on all ranks' gradients."""
        return self.max_norm < math.inf or self.scaler is not None

    def factor(self, norm: float) -> float | None:
        """Return the factor on gradients with this norm; None on overflow, when the step is skipped."""
        if self.scaler is not None and not math.isfinite(norm):
            return None
        return clip_factor(norm, self.max_norm)

    def keep(self, tensor: Tensor) -> Tensor:
        """Copy ``tensor`` to the place for kept ones; autograd accepts the copy, wherever made."""
        with torch.inference_mode(False):
            return tensor.detach().to("cpu", copy=True) if self.host else tensor.detach().clone()


def _is_count(given: object) -> bool:
    return type(given) is int and given >= 1
