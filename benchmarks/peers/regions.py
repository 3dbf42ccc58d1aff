"""CPU seconds of a step under PyTorch's checkpoint: the rows of `benchmarks/regions.cpp times`. One thread."""

import time

import torch
from torch.utils.checkpoint import checkpoint


def seconds_of(loss):
    begin = time.process_time()
    loss().backward()
    return time.process_time() - begin


def median(values):
    return sorted(values)[len(values) // 2]


def report(name, forward, x):
    turns = []
    for _ in range(22):
        plain = seconds_of(lambda: forward(x).sum())
        region = seconds_of(lambda: checkpoint(forward, x, use_reentrant=False).sum())
        turns.append((plain, region / plain, seconds_of(lambda: forward(x).sum()) / plain))
    seconds, ratio, again = (median(column) for column in zip(*turns[1:]))
    print(f"{name:20} plain {seconds:.4f} s; checkpointed over plain {ratio:.2f}; plain over plain {again:.2f}")


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
