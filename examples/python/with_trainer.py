"""Trainer of the library transformers in half of the memory that activations take, with the same losses, to the bit. One marked
line makes it so. Accumulation, clipping, the schedule, bfloat16 and checkpoints are Trainer's own.

Needs transformers and accelerate: pip install transformers accelerate.
"""

import gc
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import snug

CONFIG = LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4,
                     max_position_embeddings=64, attention_dropout=0.1, use_cache=False)


def rows(count):
    """Rows of tokens that count up from anywhere."""
    generator = torch.Generator().manual_seed(1)
    tokens = (torch.randint(CONFIG.vocab_size, (count, 1), generator=generator) + torch.arange(64)) % CONFIG.vocab_size
    return [{"input_ids": row, "labels": row} for row in tokens]


def train(folder, memory_budget=None, resume=False):
    """The losses, the most bytes of tensors that were alive, and the bytes of activations among them."""
    gc.collect()  # trainers and models of runs before
    torch.manual_seed(1)
    model = LlamaForCausalLM(CONFIG)
    if memory_budget:
        model = snug.auto_checkpoint(model, memory_budget)  # the line
    arguments = TrainingArguments(
        folder, max_steps=6, per_device_train_batch_size=8, gradient_accumulation_steps=2, max_grad_norm=0.5, learning_rate=3e-3,
        lr_scheduler_type="cosine", bf16=True, save_steps=3, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = Trainer(model, arguments, train_dataset=rows(128))
    level = snug.live_bytes()
    with snug.MemoryMeter(model) as meter:
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if resume else None)
    report = meter.report()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, *(p.detach().sum().item() for p in model.parameters())], level + report.peak_bytes, report.activations


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        plain, peak, activations = train(folder)
        budget = peak - activations // 2
        print(f"{peak / 2**20:.1f} MiB, {activations / 2**20:.1f} MiB of it activations; within {budget / 2**20:.1f} MiB:")
        planned, planned_peak, _ = train(folder, budget)
        print(f"{planned_peak / 2**20:.1f} MiB, losses {planned[0]:.4f} to {planned[5]:.4f}")
        assert planned == plain and planned_peak <= budget, "the same bits, within the budget"
        resumed, _, _ = train(folder, budget, resume=True)
        assert resumed == plain, "the same bits after a checkpoint"
