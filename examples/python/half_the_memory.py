"""A transformer, trained in half of the memory that its activations take: the same losses, to the bit."""

import torch
from torch import nn
from torch.nn import functional as F

import snug

CONFIG = {"vocab": 256, "width": 128, "heads": 4, "layers": 6, "context": 128, "dropout": 0.1}
BATCH, STEPS = 8, 5


class LanguageModel(nn.Module):
    def __init__(self, vocab, width, heads, layers, context, dropout):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        time = tokens.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(time)
        return self.head(self.layers(self.tokens(tokens) + self.places[:time], mask=causal, is_causal=True))


def train(memory):
    torch.manual_seed(1)
    model = LanguageModel(**CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # micro_batch: so that both trainings draw the same dropout. Without it, the batch is cut where that is faster.
    stepper = snug.Stepper(model, optimizer, memory=memory, micro_batch=BATCH)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(CONFIG["vocab"], (BATCH, CONFIG["context"] + 1))
        result = stepper.step(tokens, lambda t: F.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()))
        losses.append(result.loss)
    print(f"losses {losses[0]:.6f} to {losses[-1]:.6f}, peak {result.peak_bytes / 2**20:.1f} MiB, "
          f"{result.activation_peak_bytes / 2**20:.1f} MiB of it activations; {result.seconds:.3f} s for the last step")
    return losses, result


if __name__ == "__main__":
    losses, plainly = train(memory=None)
    budget = plainly.peak_bytes - plainly.activation_peak_bytes // 2
    print(f"within {budget / 2**20:.1f} MiB:")
    again, _ = train(memory=budget)
    assert losses == again, "the same bits"
