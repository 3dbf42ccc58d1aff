"""A loop of one's own in half of the memory that activations take, with the same losses, to the bit. One marked line makes it so.
Accumulation, clipping, the schedule and bfloat16 are the loop's own.
"""

import torch
from torch import nn
from torch.nn import functional as F

import snug

MICRO_BATCHES = 12


def train(memory_budget=None):
    """The losses and weights, the most bytes of tensors that were alive, and the bytes of activations among them."""
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.1, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.TransformerEncoder(layer, 8, enable_nested_tensor=False), nn.Linear(32, 1))
    if memory_budget:
        model = snug.auto_checkpoint(model, memory_budget)  # the line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, MICRO_BATCHES // 2)
    inputs, losses, level = torch.randn(MICRO_BATCHES, 16, 32, 16), [], snug.live_bytes()
    with snug.MemoryMeter(model) as meter:
        for i, x in enumerate(inputs):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model(x), x.sin().sum(2, keepdim=True))
            (loss / 2).backward()
            losses.append(loss.item())
            if i % 2 == 1:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    report = meter.report()
    return [*losses, *(p.detach().sum().item() for p in model.parameters())], level + report.peak_bytes, report.activations


if __name__ == "__main__":
    plain, peak, activations = train()
    budget = peak - activations // 2
    print(f"{peak / 2**20:.1f} MiB, {activations / 2**20:.1f} MiB of it activations; within {budget / 2**20:.1f} MiB:")
    planned, planned_peak, _ = train(budget)
    print(f"{planned_peak / 2**20:.1f} MiB, losses {planned[0]:.4f} to {planned[MICRO_BATCHES - 1]:.4f}")
    assert planned == plain and planned_peak <= budget, "the same bits, within the budget"
