"""Coefficients of microbatches' contributions in words."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from pipeproof.diagnosis.interference import Broken
from pipeproof.diagnosis.sums import broken_additions, counted
from pipeproof.observers.recording import Addition
from pipeproof.pipeline.action import Action, Kind
from tests.support.golden import golden


@pytest.mark.parametrize(
    ("coefficients", "repeated", "kinds"),
    [
        ([1.0, 1.0, 1.0, 1.0], (), []),
        ([1.0, 0.0, 1.0, 1.0], (), [("dropped", (1,))]),
        ([1.0, 2.0, 1.0, 1.0], (), [("doubled", (1,))]),
        ([1.0, 3.0, 1.0, 1.0], (), [("doubled", (1,))]),
        ([1.0, 4.0, 4.0, 1.0], (), [("scale", (1, 2))]),  # not divided by the number of microbatches
        ([1.0, 4.0, 1.0, 1.0], (1,), [("doubled", (1,))]),  # seen to run four times
        ([1.0, 2.0], (), [("doubled", (1,))]),
        ([0.25, 0.25, 0.25, 0.25], (), [("scale", ())]),
        ([-1.0, -1.0, -1.0, -1.0], (), [("sign", ())]),
        ([0.0, 2.0, 1.0, 1.0], (), [("dropped", (0,)), ("doubled", (1,))]),
        ([0.5, 1.5, 1.0, 1.0], (), [("unequal-weights", (0, 1))]),
    ],
)
def test_coefficients_are_told(
    coefficients: list[float], repeated: tuple[int, ...], kinds: list[tuple[str, tuple[int, ...]]]
) -> None:
    found = counted(3, coefficients, repeated=repeated)
    assert [(one.kind, one.microbatches) for one in found] == kinds
    assert all(one.stage == 3 for one in found)


def test_the_halves_of_a_backward_add_what_rounding_lets_them() -> None:
    draw = torch.Generator().manual_seed(0)
    parts = [{(0, name): torch.randn(30, generator=draw) for name in ("one", "two")} for _ in range(3)]
    additions, sums = [], {name: torch.zeros(30) for name in ("one", "two")}
    for m, part in enumerate(parts):
        additions.append(Addition(Action(0, Kind.BACKWARD_INPUT, m), None, dict(sums)))
        factor = 2.0 if m == 1 else 1.0
        sums = {"one": sums["one"] + factor * part[0, "one"], "two": sums["two"] + part[0, "two"]}
        additions.append(Addition(Action(0, Kind.BACKWARD_WEIGHT, m), None, dict(sums)))
    found = broken_additions(0, additions, parts)
    (one,) = found
    assert replace(one, detail="") == Broken("scale", 0, (1,), parameters=("one",), factor=2.0)
    golden(one.detail)


def summed(
    parts: list[dict[tuple[int, str], torch.Tensor]], store: Callable[[torch.Tensor], torch.Tensor]
) -> list[Addition]:
    """The additions of stage 0, whose sums are what ``store`` makes of them."""
    additions, sums = [], dict[str, torch.Tensor | None]()
    for m, part in enumerate(parts):
        for (_, name), gradient in part.items():
            old = sums.get(name)
            sums = {**sums, name: store(gradient if old is None else old + gradient)}
        additions.append(Addition(Action(0, Kind.BACKWARD, m), None, dict(sums)))
    return additions


def drawn(
    names: Sequence[str] = ("one", "two"), dtype: torch.dtype = torch.float32
) -> list[dict[tuple[int, str], torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [{(0, name): torch.randn(64, generator=draw).to(dtype) for name in names} for _ in range(4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_right_sums_are_no_finding(dtype: torch.dtype) -> None:
    parts = drawn(dtype=dtype)
    assert broken_additions(0, summed(parts, lambda one: one), parts) == []


def test_sums_in_a_narrower_type_are_rounded_and_nothing_worse() -> None:
    parts = drawn()
    for store, words in ((torch.Tensor.bfloat16, "bf16"), (torch.Tensor.half, "fp16")):
        (found,) = broken_additions(0, summed(parts, lambda one, store=store: store(one).float()), parts)
        assert (found.kind, found.detail) == ("rounded", f"the sums are {words}-rounded")
    (found,) = broken_additions(0, summed(parts, lambda one: (one * 300).half().float() / 300), parts)
    assert found.kind == "rounded"
    golden(found.detail)
    (found,) = broken_additions(0, summed(parts, lambda one: (one * 1000).round() / 1000), parts)
    assert found.kind == "rounded"
    golden(found.detail)


def test_what_differs_from_its_contribution_by_rounding_alone_is_no_finding() -> None:
    parts = drawn()
    noise = torch.Generator().manual_seed(1)
    little = [
        {site: part * (1 + 1e-5 * torch.randn(part.shape, generator=noise)) for site, part in one.items()}
        for one in parts
    ]
    assert broken_additions(0, summed(little, lambda one: one), parts) == []
    twice = [*parts[:1], {(0, "one"): little[1][0, "one"], (0, "two"): 2 * parts[1][0, "two"]}, *parts[2:]]
    (found,) = broken_additions(0, summed(twice, lambda one: one), parts)
    assert (found.kind, found.microbatches, found.parameters) == ("scale", (1,), ("two",))


def test_what_is_added_besides_is_told_from_another_gradient() -> None:
    parts = drawn()
    more = [{site: part + 0.5 for site, part in one.items()} for one in parts]
    (found,) = broken_additions(0, summed(more, lambda one: one), parts)
    assert found.kind == "extra-term"
    golden(found.detail)
    crossed = [{(0, "one"): one[0, "two"], (0, "two"): one[0, "one"]} for one in parts]
    assert {one.kind for one in broken_additions(0, summed(crossed, lambda one: one), parts)} == {"misplaced"}
    noise = drawn(("one", "two", "three"))
    others = [{(0, name): one[0, "three"] for name in ("one", "two")} for one in noise]
    assert {one.kind for one in broken_additions(0, summed(others, lambda one: one), parts)} == {"computation"}


@pytest.mark.parametrize("factor", [0.5, 2.0, -1.0, 3.0])
def test_coarse_sums_still_tell_a_factor(factor: float) -> None:
    parts = drawn(dtype=torch.bfloat16)
    wrong = [*parts[:1], {site: factor * part for site, part in parts[1].items()}, *parts[2:]]
    (found,) = broken_additions(0, summed(wrong, lambda one: one), parts)
    assert found.microbatches == (1,)
    assert found.factor == pytest.approx(factor, rel=0.02)
    one = [*parts[:1], {(0, "one"): factor * parts[1][0, "one"], (0, "two"): parts[1][0, "two"]}, *parts[2:]]
    (found,) = broken_additions(0, summed(one, lambda one: one), parts)
    assert (found.microbatches, found.parameters) == ((1,), ("one",))
    assert found.factor == pytest.approx(factor, rel=0.02)


def test_what_a_microbatch_does_not_add_to_some_parameters_is_dropped() -> None:
    parts = drawn()
    lost = [*parts[:2], {(0, "one"): 0 * parts[2][0, "one"], (0, "two"): parts[2][0, "two"]}, *parts[3:]]
    (found,) = broken_additions(0, summed(lost, lambda one: one), parts)
    assert (found.kind, found.microbatches, found.parameters) == ("dropped", (2,), ("one",))
    never = [{(0, "one"): 0 * one[0, "one"], (0, "two"): one[0, "two"]} for one in parts]
    (found,) = broken_additions(0, summed(never, lambda one: one), parts)
    assert (found.kind, found.microbatches, found.parameters) == ("zero", (), ("one",))
