"""The composed check: what it is told."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeproof.core.contract import DEFAULTS, Contract
from pipeproof.core.observe.digest import digest
from pipeproof.core.observe.shards import held_here
from pipeproof.records.step_expectation import StepExpectation
from pipeproof.reference.accumulation import PLAIN, Accumulation
from pipeproof.reference.generators import Generator, is_generator
from pipeproof.reference.model import LossFn
from pipeproof.reference.snapshot import Snapshot, unchanged
from pipeproof.reference.step import clip_factor
from pipeproof.whitebox.expectation import OF_A_MODEL
from pipeproof.whitebox.task import LossOfAll, WhiteBoxError, check_builds, check_loss_fn, check_module, name_of
from pipeproof.worlds.settings import drawing_apart

_LOST = (
    "stages were run again, and what this changed in the job cannot be put back: {}; keep it where neither they nor "
    "the loss lead to, or check against a SingleDevice"
)
_ONE_BY_ONE = "one by one"
_OF_A_JOB = ("optimizer", "masters", "scaler", "generators", "every", "stages")
_READ = ("loss_divisor", "loss_scale", "accumulation", "warmup", "ties", "names", "stages")


@dataclass(frozen=True)
class AgainstItself(StepExpectation):
    """A step is held against itself, link by link, so that no rank needs more of the model than it has.

    Every rank runs its own stages again, on the inputs that they had in the step. What a stage gave must be what it
    gives again; what a stage received must be what another sent; gradients must be the sums of what microbatches give.
    If every link holds, the step is what one device would have made.

    loss_fn: of the last stage's output and the target, a microbatch's loss, undivided. None: the last stage gives it.
    build: makes the whole model; on the meta device, so that it takes no memory. With it, stages must hold each of its
    parameters once. host: inputs of stages are kept in the host's memory. every: one step of so many is checked, the
    first one first; the others run as without a check, and are not ``due``. stages: "all" are run again in a checked
    step, or "one by one", so that a step costs little more. optimizer: this rank's, or a list of several. With it,
    weights after its step are compared with what a copy of it makes of the gradients, clipped to ``max_norm`` of the
    contract. masters: the copies in a wider type that the optimizer holds in place of weights, by weight. scaler: what
    scales this rank's losses, such as a ``torch.amp.GradScaler``; call its ``unscale_`` before ``gradients()``.
    generators: what stages draw from besides torch's, Python's, numpy's and their modules' own generators: generators
    of these three, and keepers with ``get_states`` and ``set_states``, such as Megatron's tracker. contract: what the
    step claims; ``loss_divisor``, which is that of all replicas together, ``loss_scale``, ``accumulation``,
    ``max_norm``, ``warmup``, ``ties``, ``names`` and ``stages`` are read.

    As ``reference=`` of ``whitebox.validate`` it takes neither ``optimizer``, nor ``masters``, ``scaler`` and
    ``generators``, nor ``every`` and ``stages``: these are of a running job.
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
        """The same, of a step that is run to be checked, with what was said beside it. Raises ``WhiteBoxError``."""
        for one in fields(self):
            if one.name in _OF_A_JOB and getattr(self, one.name) != one.default:
                raise WhiteBoxError(f"{one.name}= of Composed is for a running job: leave it out, or use check_step")
        twice = ["contract"] if DEFAULTS not in (contract, self.contract) else []
        twice += ["loss_fn"] if None not in (loss_fn, self.loss_fn) else []
        if twice:
            raise WhiteBoxError(f"{twice[0]} is given twice, also to Composed: give it once")
        said = contract if self.contract == DEFAULTS else self.contract
        said.reads(_READ, "where a step is held against itself up to its gradients", OF_A_MODEL)
        found = replace(self, loss_fn=loss_fn or self.loss_fn, contract=said)
        found.check()
        return found

    def whole(self) -> nn.Module | None:
        """The whole model, on the meta device; None where nobody makes it. Raises ``WhiteBoxError``."""
        if self.build is None:
            return None
        with drawing_apart(), torch.device("meta"):
            model = self.build()
        check_module(f"build, {name_of(self.build)}, returned", model)
        return model

    def turn(self) -> int | None:
        """The number of the next step among those that are checked; None where it is not. Every call is a step."""
        step, every = self._steps[0], self.every if _is_count(self.every) else 1
        self._steps[0] += 1
        return None if step % every else step // every

    def check(self) -> None:
        """Raise ``WhiteBoxError`` for what no step can be held against."""
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
        """All of this rank's; none where nobody says."""
        if self.optimizer is None:
            return ()
        return tuple(self.optimizer) if isinstance(self.optimizer, Sequence) else (self.optimizer,)

    @property
    def accumulation(self) -> Accumulation:
        """How gradients are added up."""
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
        """What gradients are clipped to; infinite where they are not."""
        return self.contract.max_norm or math.inf

    @property
    def scale(self) -> float:
        """What losses are multiplied by before their backwards, as the scaler has it now, or the contract."""
        return float(self.contract.loss_scale or 1.0) if self.scaler is None else float(self.scaler.get_scale())

    @property
    def needs_norm(self) -> bool:
        """Whether what the optimizer is given depends on all ranks' gradients."""
        return self.max_norm < math.inf or self.scaler is not None

    def factor(self, norm: float) -> float | None:
        """What gradients of this norm are multiplied by before the step; None where they overflow: it is skipped."""
        if self.scaler is not None and not math.isfinite(norm):
            return None
        return clip_factor(norm, self.max_norm)

    def only(self, turn: int, stages: int) -> int | None:
        """The one stage, of so many, that is run again in the checked step of this number; None: all are."""
        return turn % stages if self.stages == _ONE_BY_ONE else None

    def unchanged(
        self,
        modules: Mapping[int, nn.Module],
        given: object,
        begun: Mapping[int, Mapping[str, bytes]],
        refuse: Callable[[str], None],
    ) -> AbstractContextManager[Snapshot]:
        """When it closes, all that ``modules``, the loss and optimizers lead to, and what is ``given``, is as it was.

        begun: digests of the weights that the step began with, by stage and name. ``refuse`` is told what is lost.
        """
        every = {k: modules[k].named_parameters(remove_duplicate=False) for k in begun}
        return unchanged(
            *(modules, self.loss_fn, self.generators, given),
            lean=[self.optimizers, self.masters, self.scaler],
            host=self.host,
            digest=lambda one: digest(held_here(one)),
            begun={id(one): begun[k][name] for k, named in every.items() for name, one in named},
            lost=lambda what: refuse(_LOST.format(what)),
        )

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor``, where it is kept, that autograd can use wherever this was made."""
        with torch.inference_mode(False):
            return tensor.detach().to("cpu", copy=True) if self.host else tensor.detach().clone()


def _is_count(given: object) -> bool:
    return type(given) is int and given >= 1
