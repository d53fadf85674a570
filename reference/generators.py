"""Random generators: devices' own, and others, as members of modules; their states."""

import pickle
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

Generator = Any  # of torch, Python or numpy, or a keeper of several states, such as Megatron's tracker
OF_ONE_STATE = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)


@dataclass(frozen=True)
class GeneratorState:
    """A generator, and a past state."""

    generator: Generator
    state: Any

    @staticmethod
    def of(generator: Generator) -> "GeneratorState":
        """Capture the current state."""
        if isinstance(generator, torch.Generator | numpy.random.RandomState):
            return GeneratorState(generator, generator.get_state())
        if isinstance(generator, random.Random):
            return GeneratorState(generator, generator.getstate())
        if isinstance(generator, numpy.random.Generator):
            return GeneratorState(generator, generator.bit_generator.state)
        return GeneratorState(generator, {name: _copy_state(state) for name, state in generator.get_states().items()})

    def put_back(self) -> None:
        """Restore the state."""
        if isinstance(self.generator, torch.Generator | numpy.random.RandomState):
            self.generator.set_state(self.state)
        elif isinstance(self.generator, random.Random):
            self.generator.setstate(self.state)
        elif isinstance(self.generator, numpy.random.Generator):
            self.generator.bit_generator.state = self.state
        else:
            self.generator.set_states({name: _as_given(state) for name, state in self.state.items()})

    @property
    def content(self) -> bytes:
        """The state as bytes, for comparison."""
        return content(self.state)

    @property
    def moved(self) -> bool:
        """True if the generator's state has changed."""
        return self.content != GeneratorState.of(self.generator).content


def states_on(devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
    """Random number state by device."""
    return {device: _random(device).get_rng_state(*_at(device)) for device in devices}


def set_states_on(states: Mapping[torch.device, Tensor]) -> None:
    """Set the state of each device."""
    for device, state in states.items():
        _random(device).set_rng_state(state, *_at(device))


def drew(before: Mapping[torch.device, Tensor]) -> bool:
    """True if random numbers were drawn since the states ``before``."""
    now = states_on(before)
    return any(not torch.equal(now[device], state) for device, state in before.items())


def content(state: Any) -> bytes:
    """A state as bytes, for comparison."""
    return pickle.dumps(_plain(state))


def is_generator(one: object) -> bool:
    """True for a source of random numbers with a readable state: a keeper has get_states and set_states."""
    if isinstance(one, OF_ONE_STATE):
        return not isinstance(one, random.SystemRandom)
    return not isinstance(one, type) and all(
        callable(getattr(one, name, None)) for name in ("get_states", "set_states")
    )


def generators_in(module: nn.Module) -> list[Generator]:
    """List generators among the modules' members, each once."""
    members = (one for part in module.modules() for one in vars(part).values())
    return list({id(one): one for one in members if is_generator(one)}.values())


def own_generators(devices: Iterable[torch.device]) -> Iterator[Generator]:
    """Python's, numpy's, and torch's own on ``devices``."""
    yield from (random.random.__self__, numpy.random.random.__self__, torch.default_generator)  # type: ignore[attr-defined]
    for device in devices:
        if device.type != "cpu" and has_generators(device):
            yield from torch.get_device_module(device).default_generators


def has_generators(device: torch.device) -> bool:
    """True if ``device`` has generators."""
    return device.type == "cpu" or hasattr(torch.get_device_module(device), "default_generators")


def _random(device: torch.device) -> Any:
    """The module with random numbers for ``device``."""
    return torch if device.type == "cpu" else torch.get_device_module(device)


def _at(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "cpu" else (device,)


def _copy_state(state: Any) -> Any:
    """Copy a keeper's state: it may be a generator, which moves on."""
    if isinstance(state, torch.Generator):
        return GeneratorState.of(state)
    return state.clone() if isinstance(state, Tensor) else state


def _as_given(state: Any) -> Any:
    """Convert a copied state back for its keeper."""
    if isinstance(state, GeneratorState):
        state.put_back()
        return state.generator
    return _copy_state(state)


def _plain(state: Any) -> Any:
    if isinstance(state, GeneratorState):
        return _plain(state.state)
    if isinstance(state, Mapping):
        return {name: _plain(one) for name, one in state.items()}
    return state.cpu().numpy().tobytes() if isinstance(state, Tensor) else state
