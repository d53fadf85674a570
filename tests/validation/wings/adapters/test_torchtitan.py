"""What pipeproof.torchtitan knows of torchtitan, without it: microbatches, the loss, names, and what is not covered."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.wings.adapters import torchtitan
from pipeproof.wings.adapters.torchtitan import TorchtitanError, UnitLoss, tokens_in, whole_of
from tests.support.like_framework import install


class ChunkedLossWrapper:
    def __call__(self, *_: Any) -> None: ...


class MoE(nn.Module):
    pass


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {
        "components.loss": {"IGNORE_INDEX": -100, "ChunkedLossWrapper": ChunkedLossWrapper},
        "models.common.moe": {"MoE": MoE},
    }
    install(monkeypatch, "torchtitan", "0.3.0", contents)


ONE = ({"positions": torch.arange(2), "input": torch.ones(2)}, torch.tensor([3, -100]))


def test_microbatches_come_back_as_they_were_and_tokens_that_count_are_counted() -> None:
    whole = whole_of(Added, len, [ONE, ONE])
    assert tokens_in([ONE[1], ONE[1]]) == 2
    (given, labels), _ = map(whole.given, whole.microbatches)
    assert given["input"].equal(torch.ones(2))
    assert given["positions"].equal(torch.arange(2))
    assert labels is ONE[1]


@pytest.mark.parametrize(
    ("microbatches", "sentence"),
    [
        ([torch.ones(2)], "^microbatch 0 is a Tensor: expected a pair of input_dict"),
        ([ONE, (torch.ones(2), torch.ones(2))], "^microbatch 1 is a tuple: expected a pair of input_dict"),
        (
            [ONE, ({"input": torch.ones(2)}, ONE[1])],
            r"^microbatch 1 is a dict of \['input'\], microbatch 0 is a dict of ",
        ),
    ],
)
def test_microbatches_of_another_kind_are_said(microbatches: Any, sentence: str) -> None:
    with pytest.raises(TorchtitanError, match=sentence):
        whole_of(Added, len, microbatches)


def test_labels_of_which_none_counts_are_said() -> None:
    with pytest.raises(TorchtitanError, match=r"^every label is -100, which the loss ignores"):
        tokens_in([torch.tensor([-100])])


def test_the_loss_is_told_of_all_tokens_and_its_metrics_are_left_out() -> None:
    def loss_fn(output: Tensor, labels: Tensor, tokens: Tensor) -> Any:
        return (output - labels).sum() / tokens, {}

    assert UnitLoss(loss_fn, 4)(torch.full((2,), 5.0), torch.ones(2)).item() == 2
    with pytest.raises(TorchtitanError, match=r"^loss_fn returned a Tensor: expected \(loss, metrics\)"):
        UnitLoss(lambda output, *_: output, 4)(torch.ones(2), torch.ones(2))


class Added(nn.Module):
    def forward(self, first: Tensor, *, positions: Tensor) -> Tensor:
        return first + positions


def test_the_reference_is_given_keyword_arguments_by_their_names() -> None:
    whole = whole_of(Added, len, [ONE])
    assert whole.build()(*whole.microbatches[0][0]).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: 3, "^the reference is a int: expected the whole model"),
        (lambda: nn.Sequential(MoE()), "^0 has experts: pipeproof.torchtitan covers dense models only$"),
        (lambda: nn.Sequential(nn.Dropout(0.1)), "^0 drops out with p=0.1: set p to 0 for the check$"),
    ],
)
def test_models_that_are_not_covered_are_said(build: Any, sentence: str) -> None:
    with pytest.raises(TorchtitanError, match=sentence):
        whole_of(build, len, []).build()


@pytest.mark.parametrize(
    ("loss_fn", "sentence"), [(3, "^loss_fn is a int"), (ChunkedLossWrapper(), "^loss_fn is a Ch")]
)
def test_loss_functions_that_are_not_covered_are_said(loss_fn: Any, sentence: str) -> None:
    with pytest.raises(TorchtitanError, match=sentence):
        torchtitan.validate(
            lambda *_: None, reference=lambda: nn.Linear(1, 1), loss_fn=loss_fn, microbatches=[ONE], ranks=2
        )


def test_what_is_no_schedule_is_said() -> None:
    with (
        pytest.raises(TorchtitanError, match=r"^pp_schedule is a int: expected the schedule"),
        torchtitan.observe(3, [], nn.Linear(1, 1)),
    ):
        pass


def test_a_model_part_has_the_weights_and_names_of_the_whole_model() -> None:
    part, whole = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    torchtitan.TORCHTITAN.load([(f"model.{name}", one) for name, one in part.named_parameters()], whole)
    assert part[0].weight.equal(whole[0].weight)
    wrapped = "layers.1._checkpoint_wrapped_module._orig_mod.wo.weight"
    assert torchtitan.TORCHTITAN.in_whole(wrapped) == "model.layers.1.wo.weight"
    with pytest.raises(TorchtitanError, match=r"^a stage has a parameter model.0.weight of shape \[2, 2\]"):
        torchtitan.TORCHTITAN.load([("model.0.weight", part[0].weight)], nn.Sequential(nn.Linear(2, 3)))


def test_what_torch_adds_up_before_fsdp_takes_it_is_a_bundle() -> None:
    """A backward of inputs, or a whole one, makes FSDP take what there is; the first stage's weights go one by one."""
    order = "0I0 1I0 1I1 1W0 1W1 1I2 1W2 1B3 1W4 1W5 0W0 0I1 0W1"
    told = [(int(one[0]), one[1], int(one[2])) for one in order.split()]
    assert torchtitan.bundles(told) == {0: [], 1: [[0, 1], [2, 3], [4, 5]]}
