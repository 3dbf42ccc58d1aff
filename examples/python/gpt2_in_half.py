"""GPT-2 of the library transformers, from a config: an ordinary training loop in half of the memory that its
activations take, with the same losses, to the bit. Two marked lines make it so.

Needs transformers: pip install transformers.
"""

import contextlib

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import snug

CONFIG = GPT2Config(vocab_size=256, n_positions=128, n_embd=192, n_layer=6, n_head=6, bos_token_id=None,
                    eos_token_id=None)
BATCH, STEPS = 8, 10


def batch():
    """Rows of tokens that count up from anywhere."""
    return (torch.randint(CONFIG.vocab_size, (BATCH, 1)) + torch.arange(CONFIG.n_positions)) % CONFIG.vocab_size


def train(budget=None):
    """The losses, and by how many bytes memory rises in forward and backward, of which `budget` is the most."""
    torch.manual_seed(1)
    model = GPT2LMHeadModel(CONFIG).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = batch()
    plan = contextlib.nullcontext()
    if budget:
        plan = snug.plan(lambda: model(input_ids=tokens, labels=tokens).loss, budget)  # the first line
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with snug.MemoryMeter(model) as meter:
            with plan:  # the second line
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        tokens = batch()
    report = meter.report()
    print(f"losses {losses[0]:.6f} to {losses[-1]:.6f}, memory rises by {report.peak_bytes / 2**20:.1f} MiB")
    return losses, report.peak_bytes, sum(parameter.nbytes for parameter in model.parameters())


if __name__ == "__main__":
    losses, peak, gradients = train()
    budget = (peak + gradients) // 2
    print(f"within {budget / 2**20:.1f} MiB, the gradients and half of the activations:")
    again, planned_peak, _ = train(budget)
    assert losses == again and planned_peak <= budget, "the same bits, within the budget"
