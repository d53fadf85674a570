"""What became of gradients that nobody should have touched is told from what else could have become of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pipeproof.diagnosis.interference import Sources, changed
from tests.support.golden import golden


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


OLD = {"weight": drawn(0, 24, 16), "same": drawn(1, 24, 16), "bias": drawn(2, 16), "norm": drawn(3, 16)}
EARLIER = {name: drawn(number, *old.shape) for number, (name, old) in enumerate(OLD.items(), start=10)}
PARAMETERS = {name: drawn(number, *old.shape) for number, (name, old) in enumerate(OLD.items(), start=20)}
KNOWN = Sources(EARLIER, {(1, "next"): drawn(30, 24, 16)}, PARAMETERS)


def half_zero(old: Tensor) -> Tensor:
    return torch.cat([old[:12] * 0, old[12:]])


def half_stale(old: Tensor) -> Tensor:
    return torch.cat([old[:12] + EARLIER["weight"][:12], old[12:]])


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (half_zero, "altered", "set to zero in rows 0 to 11"),
        (half_stale, "stale-gradient", "given 1 of an earlier step's gradients more in rows 0 to 11"),
        (lambda old: torch.where(old.abs() < old.abs().median(), 0.0, old), "altered", "set to zero"),
        (lambda old: (old * 300).half().float() / 300, "rounded", "fp16-rounded at some other scale"),
        (lambda old: OLD["same"].clone(), "misplaced", "replaced by that of same"),
        (lambda old: drawn(30, 24, 16), "misplaced", "replaced by that of next of stage 1"),
        (lambda old: 0.5 * OLD["same"], "misplaced", "replaced by 0.5 times that of same"),
        (lambda old: 0.5 * (old + OLD["same"]), "extra-term", "made 0.5 of its own and 0.5 of that of same"),
        (lambda old: old - old.mean(), "altered", "rid of its mean"),
        (lambda old: old + 0.1, "extra-term", "given the same number more in every element"),
        (lambda old: old + 0.01 * PARAMETERS["weight"], "extra-term", "given 0.01 of the parameters themselves more"),
        (lambda old: old + EARLIER["weight"], "stale-gradient", "given 1 of an earlier step's gradients more"),
        (lambda old: old / 3, "scale", "multiplied by 0.3333"),
        (lambda old: -old, "sign", "multiplied by -1"),
        (lambda old: old.flip(0), "altered", "put in another order"),
        (lambda old: old * 0, "zero", "cleared"),
        (lambda old: old / 0, "not-finite", "made not finite"),
        (lambda old: old + drawn(99, 24, 16), "altered", "like nothing known"),
        (lambda old: old * (1 + 1e-5 * drawn(99, 24, 16)), "altered", "given noise of 1.2e-05 times its size"),
        (lambda old: old.clamp(-0.1, 0.1) + 0.7 * drawn(99, 24, 16), "altered", "like nothing known"),
    ],
)
def test_what_became_of_a_gradient_is_told(change: Callable[[Tensor], Tensor], kind: str, words: str) -> None:
    (found,) = changed(0, OLD, {**OLD, "weight": change(OLD["weight"])}, "meanwhile", sources=KNOWN)
    assert (found.kind, found.parameters) == (kind, ("weight",))
    assert words in found.detail


def test_gradients_that_stayed_are_not_mentioned() -> None:
    assert changed(0, OLD, {name: old.clone() for name, old in OLD.items()}, "meanwhile", sources=KNOWN) == []
    assert changed(0, OLD, {**OLD, "bias": -OLD["bias"]}, "meanwhile", sources=KNOWN, leaving=["bias"]) == []


def test_an_exchange_is_two_gradients_in_each_others_place() -> None:
    (found,) = changed(0, OLD, {**OLD, "bias": OLD["norm"], "norm": OLD["bias"]}, "meanwhile")
    assert (found.kind, found.parameters) == ("misplaced", ("bias", "norm"))
    golden(found.detail)


def test_several_changes_at_once_are_no_one_thing() -> None:
    new = {**OLD, "weight": 2 * OLD["weight"], "bias": OLD["bias"].flip(0)}
    (found,) = changed(0, OLD, new, "meanwhile")
    assert found.kind == "altered"
    golden(found.detail)


def test_what_was_too_small_for_a_narrower_type_was_rounded_too() -> None:
    small = {**OLD, "norm": 1e-9 * OLD["norm"]}
    (found,) = changed(0, small, {name: old.half().float() for name, old in small.items()}, "meanwhile")
    assert (found.kind, found.parameters, found.detail) == ("rounded", (), "fp16-rounded meanwhile")


def test_one_factor_is_one_however_each_gradient_is_rounded() -> None:
    old = {name: gradient.bfloat16() for name, gradient in OLD.items()}
    (found,) = changed(0, old, {name: gradient / 3 for name, gradient in old.items()}, "meanwhile")
    assert (found.kind, found.factor) == ("scale", pytest.approx(1 / 3, rel=1e-2))
    (found,) = changed(0, OLD, {**OLD, "bias": 2 * OLD["bias"], "norm": 3 * OLD["norm"]}, "meanwhile")
    assert (found.kind, found.factor) == ("scale", None)


def test_little_that_was_added_to_all_is_seen_in_all_together() -> None:
    old = {name: gradient.bfloat16() for name, gradient in OLD.items()}
    new = {name: (gradient + 0.05 * PARAMETERS[name]).bfloat16() for name, gradient in old.items()}
    (found,) = changed(0, old, new, "meanwhile", sources=KNOWN)
    assert (found.kind, found.parameters) == ("extra-term", ())
    golden(found.detail, numbers=False)
    noisy = {name: (gradient + 0.05 * drawn(5, *gradient.shape)).bfloat16() for name, gradient in old.items()}
    (found,) = changed(0, old, noisy, "meanwhile", sources=KNOWN)
    assert found.kind == "altered"
    golden(found.detail)
