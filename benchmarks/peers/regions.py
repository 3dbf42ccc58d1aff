"""CPU seconds of a step under PyTorch's checkpoint: the rows of `benchmarks/regions.cpp times`. One thread."""

import time

import torch
from torch.utils.checkpoint import checkpoint


def seconds_of(loss):
    loss().backward()
    seconds = []
    for _ in range(7):
        begin = time.process_time()
        loss().backward()
        seconds.append(time.process_time() - begin)
    return sorted(seconds)[len(seconds) // 2]


def report(name, forward, x):
    plain = seconds_of(lambda: forward(x).sum())
    region = seconds_of(lambda: checkpoint(forward, x, use_reentrant=False).sum())
    again = seconds_of(lambda: forward(x).sum())
    print(f"{name:24} plain {plain:.4f} s, checkpointed {region:.4f} s: {region / plain:.2f} of plain; plain again {again / plain:.2f}")


def main():
    torch.set_num_threads(1)
    input_weight, weight = (torch.randn(32, 128, requires_grad=True) for _ in range(2))

    def unrolled(x):
        h, c = torch.zeros(8, 32), torch.zeros(8, 32)
        for _ in range(1000):
            gates = (x.mm(input_weight) + h.mm(weight)).chunk(4, 1)
            c = gates[0].sigmoid() * c + gates[1].sigmoid() * gates[2].tanh()
            h = gates[3].sigmoid() * c.tanh()
        return h

    report("LSTM of 1,000 cells", unrolled, torch.randn(8, 32))
    layers = [layer for _ in range(16) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    mlp = torch.nn.Sequential(*layers).to(torch.bfloat16)
    report("MLP in BF16", mlp, torch.randn(32, 64).to(torch.bfloat16))


if __name__ == "__main__":
    main()
