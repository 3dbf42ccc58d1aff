"""The protocol of benchmarks/serve.h, and the device that a peer runs on."""

import sys
import time

import torch


def take_device():
    """Takes --device and its value out of the arguments; the CPU without one."""
    if "--device" not in sys.argv[:-1]:
        return torch.device("cpu")
    at = sys.argv.index("--device")
    device = torch.device(sys.argv[at + 1])
    del sys.argv[at:at + 2]
    return device


def wait_for(device):
    if device.type != "cpu":
        torch.accelerator.synchronize()


def serve(cases, device=torch.device("cpu")):
    prepared = {}
    print("ready", flush=True)
    for line in sys.stdin:
        name, repeats = line.split()
        if name not in prepared:
            prepared[name] = cases[name]()
            prepared[name]()
            prepared[name]()
        wait_for(device)
        start = time.perf_counter()
        for _ in range(int(repeats)):
            prepared[name]()
        wait_for(device)
        print(time.perf_counter() - start, flush=True)
