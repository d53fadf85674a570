"""The runtime: a table from kind to handler, and the loop over the program. Nothing else decides order."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from pipeproof.pipeline.action import COMPUTE, Action, Kind
from pipeproof.pipeline.boundary import Gradients, Tensors, signature
from pipeproof.pipeline.clocks import now
from pipeproof.pipeline.links import Links
from pipeproof.pipeline.program import Program
from pipeproof.pipeline.stage import Goal, LossFn, Stage
from pipeproof.pipeline.transport import Transport


class Microbatch(NamedTuple):
    """One microbatch: the first stage's inputs, and the loss's target."""

    inputs: Tensors
    target: object


class Objective(NamedTuple):
    """Formation of losses: ``loss_fn``, and each microbatch loss's divisor."""

    loss_fn: LossFn
    divisor: float


# An action, when it began and ended (``perf_counter``, in seconds), and how long of that, at first, it waited for its
# message. A plain tuple, for one is made per action of every step; ``trace.Span`` is the public form.
OwnSpan = tuple[Action, float, float, float]


class Run(NamedTuple):
    """Results from a pass over the program on this rank."""

    losses: Mapping[int, Tensor]  # by microbatch, undivided; empty unless the last stage is here
    spans: Sequence[OwnSpan]  # every action, in the order in which they ran
    compute_s: float
    communication_s: float
    idle_s: float


class Runtime:
    """Executes a rank's part in a program. Kept over steps; holds no state of a step between them."""

    def __init__(self, program: Program, stages: Sequence[Stage], transport: Transport) -> None:
        self._program = program
        self._stages = {stage.index: stage for stage in stages}
        self._transport = transport
        self._links = Links(transport, program.schedule.placement)

    def run(self, microbatches: Sequence[Microbatch], objective: Objective, *, forward_only: bool = False) -> Run:
        """Run one pass: gradients are added to the parameters'. With ``forward_only``, call it under ``no_grad``."""
        for stage in self._stages.values():
            stage.begin()
        self._links.begin([signature(microbatch.inputs) for microbatch in microbatches])
        program = self._program.forward_only if forward_only else self._program
        return _Pass(program, self._stages, self._links, microbatches, objective).run(self._transport)


class _Pass:
    """One pass over the program, with its tensors between stages."""

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
        # Products of stages here not taken yet, by (stage that made it, microbatch).
        self._outputs: dict[tuple[int, int], Tensors] = {}
        self._input_gradients: dict[tuple[int, int], Gradients] = {}
        self._began = 0.0  # the action that runs
        self._idle_s = 0.0

    def run(self, transport: Transport) -> Run:
        # Not kept on the object: it would refer to itself, and hold a step's tensors until the garbage collector runs.
        handlers: dict[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_F: self._send_f,
            Kind.SEND_B: self._send_b,
            Kind.RECV_F: self._links.post,
            Kind.RECV_B: self._links.post,
            Kind.WAIT_SEND_F: _keep,
            Kind.WAIT_SEND_B: _keep,
        }
        compute_s = communication_s = 0.0
        spans: list[OwnSpan] = []
        idle_s = 0.0
        self._began = now()
        for action in self._program.ranks[transport.rank]:
            handlers[action.kind](action)
            began, ended = self._began, now()
            spans.append((action, began, ended, self._idle_s - idle_s))
            if action.kind in COMPUTE:
                idle_s = self._idle_s
                compute_s += ended - began
            else:
                communication_s += ended - began
            self._began = ended
        transport.flush()
        communication_s += now() - self._began
        losses = {m: loss for stage in self._stages.values() for m, loss in stage.losses.items()}
        # All waiting for messages happens inside compute actions, from their beginning until the message is there.
        return Run(losses, spans, compute_s - self._idle_s, communication_s, self._idle_s)

    def _forward(self, action: Action) -> None:
        stage, _, microbatch = action
        goal = None
        if stage == self._n_stages - 1:
            goal = Goal(self._objective.loss_fn, self._microbatches[microbatch].target, self._objective.divisor)
        outputs = self._stages[stage].forward(microbatch, self._inputs(stage, microbatch), goal)
        self._outputs[stage, microbatch] = outputs

    def _backward(self, action: Action) -> None:
        stage, kind, microbatch = action
        own = self._stages[stage]
        run = own.backward if kind is Kind.BACKWARD else own.backward_input
        self._input_gradients[stage, microbatch] = run(microbatch, self._output_gradients(stage, microbatch))

    def _backward_weight(self, action: Action) -> None:
        self._stages[action.stage].backward_weight(action.microbatch)

    def _inputs(self, stage: int, microbatch: int) -> Tensors:
        if stage == 0:
            return self._microbatches[microbatch].inputs
        if stage - 1 in self._stages:
            # Cut the graph where the boundary is, as if the tensors had travelled.
            here = self._outputs.pop((stage - 1, microbatch))
            return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in here)
        received = self._links.receive_activation(Action(stage, Kind.RECV_F, microbatch))
        self._idle_s += now() - self._began
        return received

    def _output_gradients(self, stage: int, microbatch: int) -> Gradients:
        if stage == self._n_stages - 1:
            return ()  # it starts from its own loss
        if stage + 1 in self._stages:
            return self._input_gradients.pop((stage + 1, microbatch))
        received = self._links.receive_gradient(Action(stage, Kind.RECV_B, microbatch))
        self._idle_s += now() - self._began
        return received

    def _send_f(self, action: Action) -> None:
        self._links.send_activation(action, self._outputs.pop((action.stage, action.microbatch)))

    def _send_b(self, action: Action) -> None:
        self._links.send_gradient(action, self._input_gradients.pop((action.stage, action.microbatch)))


def _keep(action: Action) -> None:
    """Do nothing for a wait: the buffer lasts until the step ends."""
