"""The runtime: a table from kind to handler, and the loop over the program. Nothing else decides order."""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import NamedTuple, TypeVar

from torch import Tensor

from pipeline.action import COMPUTE, Action, Kind
from pipeline.boundary import Gradients, Tensors, signature
from pipeline.dataflow import Product, need_of, product_of
from pipeline.links import Links
from pipeline.lower import Program
from pipeline.stage import Goal, LossFn, Stage
from pipeline.transport import Transport

_T = TypeVar("_T")


class Microbatch(NamedTuple):
    """One microbatch: what the first stage takes, and what the loss compares the last stage's output with."""

    inputs: Tensors
    target: object


class Objective(NamedTuple):
    """How losses are formed: ``loss_fn``, and the number that each microbatch's loss is divided by."""

    loss_fn: LossFn
    divisor: float


class Run(NamedTuple):
    """What one pass over the program gave on this rank."""

    losses: Mapping[int, Tensor]  # by microbatch, undivided; empty unless the last stage is here
    executed: tuple[Action, ...]  # the compute actions, in the order in which they ran
    compute_s: float
    communication_s: float
    idle_s: float


class Runtime:
    """Executes one rank's part of a program. Kept over steps; holds no state of a step between them."""

    def __init__(self, program: Program, stages: Sequence[Stage], transport: Transport) -> None:
        self._program = program
        self._stages = {stage.index: stage for stage in stages}
        self._transport = transport
        self._links = Links(transport, program.schedule.placement)

    def run(self, microbatches: Sequence[Microbatch], objective: Objective, *, forward_only: bool = False) -> Run:
        """One pass: gradients are added to the parameters'. With ``forward_only``, call it under ``no_grad``."""
        for stage in self._stages.values():
            stage.begin()
        self._links.begin([signature(microbatch.inputs) for microbatch in microbatches])
        program = self._program.forward_only if forward_only else self._program
        return _Pass(program, self._stages, self._links, microbatches, objective).run(self._transport)


class _Pass:
    """One pass over the program, and what is on its way between stages meanwhile."""

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        links: Links,
        microbatches: Sequence[Microbatch],
        objective: Objective,
    ) -> None:
        self._program = program
        self._n_stages = program.schedule.n_stages
        self._stages = stages
        self._links = links
        self._microbatches = microbatches
        self._objective = objective
        self._activations: dict[Product, Tensors] = {}
        self._gradients: dict[Product, Gradients] = {}
        self._idle_s = 0.0
        self._handlers: dict[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.SEND_F: self._send_f,
            Kind.SEND_B: self._send_b,
            Kind.RECV_F: links.post_activation,
            Kind.RECV_B: links.post_gradient,
        }

    def run(self, transport: Transport) -> Run:
        actions = self._program.ranks[transport.rank]
        compute_s = communication_s = 0.0
        executed = []
        for action in actions:
            began, idle_s = perf_counter(), self._idle_s
            self._handlers[action.kind](action)
            spent = perf_counter() - began - (self._idle_s - idle_s)
            if action.kind in COMPUTE:
                executed.append(action)
                compute_s += spent
            else:
                communication_s += spent
        began = perf_counter()
        transport.flush()
        communication_s += perf_counter() - began
        losses = {m: loss for stage in self._stages.values() for m, loss in stage.losses.items()}
        return Run(losses, tuple(executed), compute_s, communication_s, self._idle_s)

    def _forward(self, action: Action) -> None:
        stage, _, microbatch = action
        goal = None
        if stage == self._n_stages - 1:
            goal = Goal(self._objective.loss_fn, self._microbatches[microbatch].target, self._objective.divisor)
        self._activations[_product(action)] = self._stages[stage].forward(microbatch, self._inputs(action), goal)

    def _backward(self, action: Action) -> None:
        inputs = self._stages[action.stage].backward(action.microbatch, self._output_gradients(action))
        self._gradients[_product(action)] = inputs

    def _inputs(self, action: Action) -> Tensors:
        need = need_of(action, self._n_stages)
        if need is None:
            return self._microbatches[action.microbatch].inputs
        if need.stage in self._stages:
            # Cut the graph where the boundary is, as if the tensors had travelled.
            here = self._activations.pop(need)
            return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in here)
        return self._waited(self._links.receive_activation, Action(action.stage, Kind.RECV_F, action.microbatch))

    def _output_gradients(self, action: Action) -> Gradients:
        need = need_of(action, self._n_stages)
        if need is None:
            return ()
        if need.stage in self._stages:
            return self._gradients.pop(need)
        return self._waited(self._links.receive_gradient, Action(action.stage, Kind.RECV_B, action.microbatch))

    def _waited(self, receive: Callable[[Action], _T], action: Action) -> _T:
        began = perf_counter()
        received = receive(action)
        self._idle_s += perf_counter() - began
        return received

    def _send_f(self, action: Action) -> None:
        self._links.send_activation(action, self._activations.pop(Product(action.stage, Kind.FORWARD, action.microbatch)))

    def _send_b(self, action: Action) -> None:
        product = Product(action.stage, Kind.BACKWARD_INPUT, action.microbatch)
        self._links.send_gradient(action, self._gradients.pop(product))


def _product(action: Action) -> Product:
    product = product_of(action)
    assert product is not None, f"{action} hands nothing on"
    return product
