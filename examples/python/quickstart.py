"""A loop of torch that uses snug. With everything kept, a step takes 62 MiB of tensors; the budget is 32 MiB."""

import torch
from torch import nn
from torch.nn import functional as F

import snug

model = nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
inputs = torch.randn(4096, 16)
loader = 20 * [(inputs, inputs.sin().sum(1, keepdim=True))]

stepper = snug.Stepper(model, optimizer, memory="32MiB")
for x, y in loader:
    result = stepper.step((x, y), lambda x, y: F.mse_loss(model(x), y))
    print(f"loss {result.loss:.4f}, peak {result.peak_bytes / 2**20:.1f} MiB")
print(stepper.plan)
