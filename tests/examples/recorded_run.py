import argparse

import torch
from torch import nn

from pipeproof import record_run

parser = argparse.ArgumentParser()
parser.add_argument("to")
parser.add_argument("--order", default="0123")
parser.add_argument("--rate-from", type=int, default=99)
options = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
draw = torch.Generator().manual_seed(0)
with record_run(model, options.to, optimizer=optimizer) as run:
    for number in range(20):
        microbatches = [(torch.randn(8, 8, generator=draw), torch.zeros(8, 8)) for _ in options.order]
        if number == options.rate_from:
            optimizer.param_groups[0]["lr"] = 0.011
        with run.step(microbatches) as step:
            optimizer.zero_grad()
            losses = [0.0] * len(microbatches)
            for k in map(int, options.order):
                inputs, target = microbatches[k]
                loss = nn.functional.mse_loss(model(inputs), target)
                (loss / len(microbatches)).backward()
                losses[k] = loss.item()
            step.gradients()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step.report(losses=losses, norm=norm)
