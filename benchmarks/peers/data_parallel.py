"""The cases of benchmarks/data_parallel.cpp in Python PyTorch, with DistributedDataParallel and its no_sync. Speaks the protocol of
benchmarks/serve.h."""

import contextlib
import functools
import os
import subprocess
import sys

if "RANK" not in os.environ:  # this process becomes rank 0, its child is rank 1
    environment = dict(os.environ, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000),
                       OMP_NUM_THREADS="1", OMP_PROC_BIND="false", GLOO_SOCKET_IFNAME="lo")
    subprocess.Popen([sys.executable] + sys.argv, env=dict(environment, RANK="1"), stdin=subprocess.DEVNULL)
    os.execve(sys.executable, [sys.executable] + sys.argv, dict(environment, RANK="0"))

import torch
import torch.distributed as dist
import torch.nn.functional as F

import serve
from gpt import Gpt

dist.init_process_group("gloo")
torch.manual_seed(1)
model = Gpt(256, 128, 6, 8, 256)
tokens = torch.randint(256, (2, 128))
ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def call(block, x):
    return block(x)


def step(micro_batches, loud):
    model.zero_grad()
    for i in range(micro_batches):
        with ddp.no_sync() if i < micro_batches - loud else contextlib.nullcontext():
            F.cross_entropy(ddp(tokens, call).flatten(0, 1), tokens.flatten()).backward()


cases = [(f"k{k}_{name}", functools.partial(step, k, loud)) for k in (1, 2, 4, 8) for name, loud in (("once", 1), ("each", k))]
order = torch.zeros(1, dtype=torch.int64)


def tell(number):
    order.fill_(number)
    dist.broadcast(order, 0)


def told(number):
    tell(number)
    cases[number][1]()


if dist.get_rank() == 0:
    serve.serve({name: functools.partial(functools.partial, told, i) for i, (name, _) in enumerate(cases)})
    tell(-1)
else:
    while True:
        tell(0)
        if order.item() < 0:
            break
        cases[order.item()][1]()
dist.destroy_process_group()
