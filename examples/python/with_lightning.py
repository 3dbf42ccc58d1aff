"""A LightningModule in half of the memory that activations take, with the same losses, to the bit. One marked line makes it so.
Accumulation, clipping, the schedule, bfloat16 and checkpoints are Lightning's own.

Needs lightning: pip install lightning.
"""

import gc
import logging
import tempfile
import warnings

import lightning
import torch
from torch import nn
from torch.nn import functional as F

import snug

BATCHES = 8


class Regression(lightning.LightningModule):
    def __init__(self, memory_budget=None):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.TransformerEncoder(layer, 8, enable_nested_tensor=False), nn.Linear(32, 1))
        if memory_budget:
            snug.auto_checkpoint(self.model, memory_budget)  # the line: around what training_step calls
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        loss = F.mse_loss(self.model(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


def train(folder, memory_budget=None, checkpoint=None):
    """The losses and weights, the most bytes of tensors that were alive, and the bytes of activations among them."""
    gc.collect()  # trainers and models of runs before
    torch.manual_seed(1)
    module = Regression(memory_budget)
    inputs = torch.randn(BATCHES * 16, 32, 16)
    data = torch.utils.data.TensorDataset(inputs, inputs.sin().sum(2, keepdim=True))
    checkpoints = lightning.pytorch.callbacks.ModelCheckpoint(folder, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=1.0, precision="bf16-mixed", logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[checkpoints])
    level = snug.live_bytes()
    with snug.MemoryMeter(module) as meter:
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=16), ckpt_path=checkpoint)
    report = meter.report()
    found = [*module.losses, *(p.detach().sum().item() for p in module.parameters())]
    return found, level + report.peak_bytes, report.activations


if __name__ == "__main__":
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    with tempfile.TemporaryDirectory() as folder:
        plain, peak, activations = train(folder)
        budget = peak - activations // 2
        print(f"{peak / 2**20:.1f} MiB, {activations / 2**20:.1f} MiB of it activations; within {budget / 2**20:.1f} MiB:")
        planned, planned_peak, _ = train(folder, budget)
        print(f"{planned_peak / 2**20:.1f} MiB, losses {planned[0]:.4f} to {planned[2 * BATCHES - 1]:.4f}")
        assert planned == plain and planned_peak <= budget, "the same bits, within the budget"
        resumed, _, _ = train(folder, budget, f"{folder}/epoch=0-step={BATCHES // 2}.ckpt")
        assert resumed == plain[BATCHES:], "the same bits after a checkpoint"
