"""A model file written by snug loads in Python, and a forward pass there agrees to 1e-5.

usage: gpt_parity.py PARITY_TOOL
"""

import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
    import torch.nn.functional as F
    from safetensors.torch import load_file
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

HEADS = 4
LAYERS = 3


def gpt(weights, tokens):
    """GPT-2's forward pass, written out; attention by its definition."""

    def norm(name, x):
        weight, bias = weights[name + ".weight"], weights[name + ".bias"]
        mean = x.mean(-1, keepdim=True)
        variance = x.var(-1, unbiased=False, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * weight + bias

    def linear(name, x):
        return x @ weights[name + ".weight"].T + weights[name + ".bias"]

    def attention(name, x):
        batch, time, width = x.shape
        query, key, value = (
            part.view(batch, time, HEADS, width // HEADS).transpose(1, 2)
            for part in linear(name + ".qkv", x).split(width, dim=-1)
        )
        scores = query @ key.transpose(-1, -2) / (width // HEADS) ** 0.5
        later = torch.ones(time, time, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ value
        return linear(name + ".projection", mixed.transpose(1, 2).reshape(batch, time, width))

    def mlp(name, x):
        return linear(name + ".down", F.gelu(linear(name + ".up", x), approximate="tanh"))

    x = weights["token_embedding.weight"][tokens]
    x = x + weights["position_embedding.weight"][: tokens.shape[1]]
    for i in range(LAYERS):
        x = x + attention(f"blocks.{i}.attention", norm(f"blocks.{i}.attention_norm", x))
        x = x + mlp(f"blocks.{i}.mlp", norm(f"blocks.{i}.mlp_norm", x))
    return norm("norm", x) @ weights["token_embedding.weight"].T


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        subprocess.run([sys.argv[1], "write-gpt", name], check=True)
        weights = load_file(folder / "step-00000001" / "model.safetensors")
        example = load_file(folder / "example.safetensors")
    assert len(weights) == 2 + 12 * LAYERS + 2, sorted(weights)
    found = gpt(weights, example["tokens"])
    difference = (found - example["logits"]).abs().max().item()
    spread = example["logits"].std().item()
    print(f"largest difference {difference:.2e}, deviation of the logits {spread:.2f}")
    assert spread > 0.1, "logits too small to tell anything"
    assert difference < 1e-5, difference


if __name__ == "__main__":
    main()
