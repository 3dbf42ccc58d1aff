"""Ten models of torch, torchvision, timm and transformers train in half of their activations, with the bits of plain
training.

usage: zoo_test.py [--table]

  --table   prints the bytes and times of each model instead, for benchmarks/results
"""

import copy
import gc
import pathlib
import runpy
import statistics
import sys
import time
import unittest

import torch

import snug

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "exported"))
try:
    import zoo
except ModuleNotFoundError as missing:
    if missing.name not in ("torchvision", "timm", "transformers"):
        raise
    print(f"skipped: {missing}")
    sys.exit(77)

ITEMS, STEPS, TURNS = 8, 4, 15


def made(name):
    """A model in training mode, batches, and the bytes of its gradients."""
    generator = torch.Generator().manual_seed(5)
    batches = [zoo.MODELS[name][1](ITEMS, generator) for _ in range(STEPS)]
    model = zoo.build(name).train()
    return model, batches, sum(p.nbytes for p in model.parameters() if p.requires_grad)


def backward(model, batch, plan):
    if plan is None:
        loss = model(*batch)
    else:
        with plan:
            loss = model(*batch)
    loss.backward()
    return loss.detach()


def trained(model, batches, plan=None):
    """Losses, gradients, weights, buffers, optimizer state and generator after some steps, and each step's peak."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1234)
    found, peaks = [], []
    for batch in batches:
        optimizer.zero_grad()
        with snug.MemoryMeter(model) as meter:
            found.append(backward(model, batch, plan))
        peaks.append(meter.report().peak_bytes)
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    found += [*model.parameters(), *model.buffers(), torch.get_rng_state()]
    found += [tensor for state in optimizer.state.values() for tensor in state.values()]
    return found, peaks


def bits(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8)


class Comparison:
    """A model's plain training, and the same with a plan for half of the activations."""

    def __init__(self, name):
        self.model, self.batches, self.gradients = made(name)
        self.plain, (self.plain_peak, *_) = trained(copy.deepcopy(self.model), self.batches)
        self.budget = (self.plain_peak + self.gradients) // 2
        self.plan = snug.plan(lambda: self.model(*self.batches[0]), self.budget)
        self.planned, self.peaks = trained(copy.deepcopy(self.model), self.batches, self.plan)

    def same_bits(self):
        pairs = zip(self.plain, self.planned, strict=True)
        return all(bits(plain).equal(bits(planned)) for plain, planned in pairs)


class Zoo(unittest.TestCase):
    def test_trains_in_half_of_its_activations_with_the_same_bits_and_the_predicted_peak(self):
        for name in zoo.MODELS:
            with self.subTest(name):
                compared = Comparison(name)
                self.assertTrue(compared.same_bits())
                self.assertEqual(compared.plan.deviation, "")
                self.assertLessEqual(compared.plan.peak_bytes, compared.budget)
                self.assertEqual(compared.peaks, [compared.plan.peak_bytes] * STEPS)


class Example(unittest.TestCase):
    def test_of_gpt2_keeps_to_half(self):
        runpy.run_path(str(ROOT / "examples" / "python" / "gpt2_in_half.py"), run_name="__main__")  # it asserts that


def seconds(run):
    begin = time.process_time()
    run()
    return time.process_time() - begin


def row(name):
    compared = Comparison(name)
    model, batch, plan = compared.model, compared.batches[0], compared.plan
    backward(model, batch, None)  # the first one in a process takes longer
    turns = [(seconds(lambda: backward(model, batch, None)), seconds(lambda: backward(model, batch, plan)))
             for _ in range(TURNS)]
    ratios = sorted(planned / plain for plain, planned in turns)
    peaks = compared.plain_peak, compared.budget, plan.peak_bytes, max(compared.peaks)
    return [name, f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}", f"{compared.gradients / 2**20:.2f}",
            *(f"{peak / 2**20:.2f}" for peak in peaks), "equal" if compared.same_bits() else "DIFFER",
            f"{1e3 * statistics.median(plain for plain, _ in turns):.0f}",
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"]


def print_table():
    gc.disable()  # its pauses are longer than a step
    columns = ["model", "million parameters", "gradients, MiB", "plain peak, MiB", "budget, MiB", "predicted, MiB",
               "measured, MiB", "bits", "plain, ms", "time of the plan"]
    for cells in (columns, ["---"] * len(columns), *map(row, zoo.MODELS)):
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["--table"]:
        print_table()
    else:
        unittest.main()
