"""Python PyTorch's own ways to take fewer bytes, in the lines of benchmarks/budget_sweep.cpp: checkpointed blocks, selective checkpointing
that saves matrix products, save_on_cpu, and torch.compile under activation_memory_budget.

usage: budget_sweep.py gpt|gpt-tiny|gpt-base|resnet PAIRS [--device DEVICE]
"""

import functools
import sys
import time

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import serve
from gpt import Gpt
from resnet import ResNet

DEVICE = serve.take_device()
GPTS = {"gpt": (256, 12, 8, 256, 4), "gpt-tiny": (128, 4, 4, 128, 2), "gpt-base": (1024, 12, 12, 768, 8)}
SAVED = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default,
         torch.ops.aten.convolution.default}


def call(block, x):
    return block(x)


def every_block(block, x):
    return checkpoint(block, x, use_reentrant=False)


def policy(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def on_host(loss):
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return loss()


def save_products(block, x):
    return checkpoint(block, x, use_reentrant=False,
                      context_fn=functools.partial(create_selective_checkpoint_contexts, policy))


def subject(name):
    torch.manual_seed(1)
    if name in GPTS:
        context, layers, heads, width, sequences = GPTS[name]
        model, data = Gpt(256, context, layers, heads, width).to(DEVICE), torch.randint(256, (sequences, context), device=DEVICE)
        return model, lambda run: F.cross_entropy(model(data, run).flatten(0, 1), data.flatten())
    model, data, classes = ResNet(20).to(DEVICE), torch.randn(32, 3, 32, 32).to(DEVICE), (torch.arange(32) % 10).to(DEVICE)
    return model, lambda run: F.cross_entropy(model(data, run), classes)


def peak_bytes(step):
    """The most that was allocated at once above the level before, of tensors: by the device's allocator, on a CPU by PyTorch's profiler."""
    if DEVICE.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        step()
        return torch.accelerator.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak


def now():
    """Seconds of the processor, which others use too; on a device, which computes beside it, elapsed seconds."""
    if DEVICE.type == "cpu":
        return time.process_time()
    serve.wait_for(DEVICE)
    return time.perf_counter()


def main():
    name, pairs = sys.argv[1], int(sys.argv[2])
    model, loss = subject(name)
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())

    def step_of(make_loss):
        def step():
            model.zero_grad(set_to_none=True)
            make_loss().backward()
        return step

    plain = step_of(functools.partial(loss, call))

    def report(method, setting, step):
        step()
        step()
        model.zero_grad(set_to_none=True)
        peak = peak_bytes(step) - gradients
        ratios = []
        for i in range(pairs):
            seconds = {}
            for side in (0, 1) if i % 2 == 0 else (1, 0):
                start = now()
                (plain, step)[side]()
                seconds[side] = now() - start
            ratios.append(seconds[1] / seconds[0])
        ratios.sort()
        print(f"{name},Python,{method},{setting},{peak},{ratios[len(ratios) // 2]:.4f},{ratios[0]:.4f},{ratios[-1]:.4f}", flush=True)

    report("keep everything", "", plain)
    report("every block", "", step_of(functools.partial(loss, every_block)))
    report("save products", "", step_of(functools.partial(loss, save_products)))
    if DEVICE.type != "cpu":
        report("save_on_cpu", "", step_of(functools.partial(on_host, functools.partial(loss, call))))
    for budget in (1.0, 0.5, 0.2, 0.1, 0.05):
        try:
            torch._dynamo.reset()
            torch._functorch.config.activation_memory_budget = budget
            compiled = torch.compile(functools.partial(loss, call))
            report("torch.compile", f"activation_memory_budget {budget}", step_of(compiled))
        except Exception as error:  # no compiler on this machine, say
            print(f"budget_sweep.py: torch.compile does not run here: {str(error).splitlines()[0]}", file=sys.stderr)
            break


if __name__ == "__main__":
    main()
