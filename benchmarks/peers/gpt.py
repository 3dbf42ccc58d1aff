"""snug::Gpt in Python PyTorch, for comparisons."""

import torch
import torch.nn.functional as F


class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.projection = torch.nn.Linear(width, width)
        self.mlp_norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        batch, time, width = x.shape
        query, key, value = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).split(width, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Gpt(torch.nn.Module):
    def __init__(self, vocab, context, layers, heads, width):
        super().__init__()
        self.token_embedding = torch.nn.Embedding(vocab, width)
        self.position_embedding = torch.nn.Embedding(context, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, tokens, run_block):
        x = self.token_embedding(tokens) + self.position_embedding(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = run_block(block, x)
        return self.norm(x) @ self.token_embedding.weight.T
