import argparse

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pipeproof import record_run

parser = argparse.ArgumentParser()
parser.add_argument("to")
parser.add_argument("--save")
parser.add_argument("--load")
parser.add_argument("--order", default="0123")
parser.add_argument("--wrong", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
if torch.distributed.is_torchelastic_launched():
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
if options.load:
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, torch.load(options.load), options=whole)
if options.wrong:
    with torch.no_grad():
        rows = model[0].weight.to_local()
        rows.copy_(rows.roll(1, 0))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with record_run(model, options.to, optimizer=optimizer) as run:
    for number in range(3, 5) if options.load else range(3):
        draw = torch.Generator().manual_seed(number)
        microbatches = [(torch.randn(8, 8, generator=draw), torch.zeros(8, 8)) for _ in options.order]
        with run.step(microbatches, number=number) as step:
            optimizer.zero_grad()
            losses = [0.0] * len(microbatches)
            for k in map(int, options.order):
                inputs, target = microbatches[k]
                loss = nn.functional.mse_loss(model(inputs), target)
                (loss / len(microbatches)).backward()
                losses[k] = loss.item()
            step.gradients()
            optimizer.step()
            step.report(losses=losses)
if options.save:
    torch.save(model.state_dict(), options.save)
