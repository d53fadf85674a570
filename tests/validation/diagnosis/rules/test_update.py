"""An optimizer that takes little notice of the size of gradients: what it moved does not tell how they were clipped."""

import torch
from torch import Tensor, nn

from pipeproof.records.step_check import check_step
from pipeproof.records.step_record import record_step

loss_fn = nn.functional.cross_entropy


def build() -> nn.Sequential:
    torch.manual_seed(0)
    first = (nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(*first, nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    model[0].bias.requires_grad_(False)
    return model


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, 5, 5, generator=draw), torch.randint(0, 3, (4,), generator=draw)) for _ in range(4)
    ]  # fmt: skip


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)


def test_a_factor_that_is_the_right_one_is_no_clipping() -> None:
    model = build()
    record = record_step(model, data(), loss_fn=loss_fn, optimizer=optimizer_of(model), max_norm=0.5)
    job = build()
    optimizer, losses = optimizer_of(job), []
    with check_step(job, data(), against=record) as check:
        for x, target in data():
            loss = loss_fn(job(x), target)
            (loss / 4).backward()
            losses.append(loss.item())
        check.gradients()
        norm = nn.utils.clip_grad_norm_(job.parameters(), 1e9)  # which clips nothing
        optimizer.step()
        check.report(losses=losses, norm=float(norm))
    assert check.verdict.verdict != "pass"
    assert "multiplied by 0.6341, expected 0.6341" not in str(check.verdict)
    assert [cause.kind for cause in check.verdict.cause] == ["update"]
    assert [[cause.kind for cause in one] for one in check.verdict.alternatives] == [["clip"]]
