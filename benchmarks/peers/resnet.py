"""snug::ResNet in Python PyTorch, for comparisons."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.stride, self.new_channels = stride, channels - channels_in
        self.branch = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x):
        kept = x[:, :, ::self.stride, ::self.stride] if self.stride > 1 else x
        kept = F.pad(kept, (0, 0, 0, 0, 0, self.new_channels)) if self.new_channels else kept
        return torch.relu(self.branch(x) + kept)


class ResNet(nn.Module):
    def __init__(self, depth, widths=(16, 32, 64), classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU())
        before = (widths[0],) + tuple(widths)
        self.blocks = nn.ModuleList(
            Block(before[stage] if i == 0 else width, width, 2 if stage > 0 and i == 0 else 1)
            for stage, width in enumerate(widths) for i in range((depth - 2) // 6))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x, run_block):
        x = self.stem(x)
        for block in self.blocks:
            x = run_block(block, x)
        return self.head(x.mean((2, 3)))
