"""A loop with accelerate in half of the memory that activations take, with the same losses, to the bit. One marked line makes it
so. Accumulation, clipping, the schedule, bfloat16 and checkpoints are accelerate's own.

Needs accelerate: pip install accelerate.
"""

import gc
import tempfile

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

import snug

MICRO_BATCHES = 12


def train(folder, memory_budget=None, resume=False):
    """The losses and weights, the most bytes of tensors that were alive, and the bytes of activations among them."""
    gc.collect()  # trainers and models of runs before
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.1, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.TransformerEncoder(layer, 8, enable_nested_tensor=False), nn.Linear(32, 1))
    if memory_budget:
        model = snug.auto_checkpoint(model, memory_budget)  # the line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, MICRO_BATCHES)
    inputs = torch.randn(MICRO_BATCHES * 16, 32, 16)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sin().sum(2, keepdim=True)), batch_size=16)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if resume:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, MICRO_BATCHES // 2)
    losses, level = [], snug.live_bytes()
    with snug.MemoryMeter(model) as meter:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == MICRO_BATCHES // 2 and not resume:
                accelerator.save_state(folder)
    report = meter.report()
    return [*losses, *(p.detach().sum().item() for p in model.parameters())], level + report.peak_bytes, report.activations


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        plain, peak, activations = train(folder)
        budget = peak - activations // 2
        print(f"{peak / 2**20:.1f} MiB, {activations / 2**20:.1f} MiB of it activations; within {budget / 2**20:.1f} MiB:")
        planned, planned_peak, _ = train(folder, budget)
        print(f"{planned_peak / 2**20:.1f} MiB, losses {planned[0]:.4f} to {planned[MICRO_BATCHES - 1]:.4f}")
        assert planned == plain and planned_peak <= budget, "the same bits, within the budget"
        # accelerate's resumed loop draws other dropout masks than a loop that goes on: a DataLoader draws a number when the loop begins.
        assert train(folder, budget, resume=True)[0] == train(folder, resume=True)[0], "the same bits after a checkpoint"
