"""One epoch of sin-cos in FP32 and under autocast, in the lines of program/measure/two_tasks.cpp. Speaks the protocol of
benchmarks/serve.h."""

import functools
import math

import torch

import serve

points = 20000
torch.manual_seed(1)
x = torch.linspace(-2 * math.pi, 2 * math.pi, points)[torch.randperm(points)].unsqueeze(1)
y = torch.cat((x.sin(), x.cos()), 1)
y = y + 0.02 * torch.rand_like(y) - 0.01


class TwoTasks(torch.nn.Module):
    def __init__(self, width=150):
        super().__init__()
        linear, relu = torch.nn.Linear, torch.nn.ReLU
        self.trunk = torch.nn.Sequential(linear(1, width), relu(), linear(width, width), relu(), linear(width, width), relu())
        self.sine = torch.nn.Sequential(linear(width, width), relu(), linear(width, 1))
        self.cosine = torch.nn.Sequential(linear(width, width), relu(), linear(width, 1))

    def forward(self, x):
        h = self.trunk(x)
        return torch.cat((self.sine(h), self.cosine(h)), 1)


def prepare(autocast):
    model = TwoTasks()
    adam = torch.optim.Adam(model.parameters(), 0.01, fused=True)

    def epoch():
        adam.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = (model(x).float() - y).square().mean(0).sum()
        loss.backward()
        adam.step()

    return epoch


serve.serve({"float32": functools.partial(prepare, False), "bfloat16": functools.partial(prepare, True)})
