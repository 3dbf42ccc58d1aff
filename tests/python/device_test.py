"""The package on a device: the simulated accelerator of the C++ tests, whose allocator gives blocks of 512 bytes.

The environment has the path of its library, SNUG_SIM_DEVICE.
"""

import copy
import ctypes
import gc
import os
import types
import unittest

import torch
import torch.nn.functional as F

import snug
from models import MODELS, Mlp
from plan_test import as_small_as, same_bits, trained

BLOCK, ITEMS = 512, 1024


def load_simulated_accelerator():
    torch.ops.load_library(os.environ["SNUG_SIM_DEVICE"])
    library = ctypes.CDLL(os.environ["SNUG_SIM_DEVICE"])
    module = types.ModuleType("torch.sim")  # what torch asks of a device in Python
    module.is_available, module.device_count, module.current_device = lambda: True, lambda: 2, lambda: 0
    module._is_in_bad_fork, module.manual_seed_all = lambda: False, lambda seed: library.sim_device_manual_seed(ctypes.c_uint64(seed))
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module("sim", module)
    return torch.device("sim:0")


DEVICE = load_simulated_accelerator()


def on_device(name):
    torch.manual_seed(1)
    model, x, loss_of_output = MODELS[name]()
    model, x = model.to(DEVICE).train(), x.detach().to(DEVICE)
    return model, lambda: loss_of_output(model(x))


def problem():
    torch.manual_seed(1)
    return Mlp().to(DEVICE), torch.randn(ITEMS, 64, device=DEVICE), torch.randn(ITEMS, 64, device=DEVICE)


def loop(model, x, y, steps=3):
    """Losses and weights of a loop of its own, and the most bytes that forward and backward of each step had alive."""
    optimizer, losses, peaks = torch.optim.AdamW(model.parameters(), lr=1e-2), [], []
    torch.manual_seed(2)
    for _ in range(steps):
        before = snug.live_bytes(DEVICE)
        with snug.MemoryMeter(model) as meter:
            loss = F.mse_loss(model(x), y)
            loss.backward()
        losses.append(loss.item())
        del loss
        peaks.append(before + meter.report().peak_bytes)
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().cpu() for p in model.parameters()], peaks


def budget_for(model, x, y):
    """With state and gradients, and six tenths of the activations."""
    with snug.MemoryMeter(model) as meter:
        F.mse_loss(model(x), y).backward()
    model.zero_grad()
    parameters = sum(p.nbytes for p in model.parameters())
    return snug.live_bytes(DEVICE) + 3 * parameters + int(0.6 * (meter.report().peak_bytes - parameters))


class OnDevice(unittest.TestCase):
    def setUp(self):
        gc.collect()

    def test_bytes_are_those_of_the_allocators_blocks(self):
        before = snug.live_bytes(DEVICE)
        with snug.MemoryMeter(device=DEVICE) as meter:
            kept = torch.zeros(BLOCK // 4 + 1, device=DEVICE)
        self.assertEqual(snug.live_bytes(DEVICE), before + 2 * BLOCK)
        self.assertEqual(meter.report().peak_bytes, 2 * BLOCK)
        with self.assertRaises(torch.OutOfMemoryError):
            with snug.MemoryLimit(snug.live_bytes(DEVICE) + (1 << 20), DEVICE):
                kept = torch.zeros(1 << 20, device=DEVICE)
        del kept

    def test_plans_have_the_bits_of_plain_training_and_the_predicted_peak(self):
        for name in ("mlp", "convolutions", "transformer", "tied", "function"):
            with self.subTest(name):
                model, loss_of = on_device(name)
                plain, plain_peak = trained(model, loss_of)
                plan = as_small_as(loss_of, 0.6)
                planned, peak = trained(model, loss_of, plan)
                self.assertTrue(same_bits(plain, planned))
                self.assertEqual(plan.deviation, "")
                self.assertEqual(peak, plan.peak_bytes)
                self.assertEqual(peak % BLOCK, 0)
                self.assertLess(peak, plain_peak)
                self.assertGreater(plan.replayed_operators, 0)

    def test_auto_checkpoint_keeps_a_loop_within_its_budget(self):
        plain, x, y = problem()
        model = copy.deepcopy(plain)
        losses, weights, _ = loop(plain, x, y)
        del plain
        gc.collect()
        budget = budget_for(model, x, y)
        found = loop(snug.auto_checkpoint(model, memory_budget=budget), x, y)
        self.assertEqual(found[0], losses)
        self.assertTrue(same_bits(found[1], weights))
        self.assertLessEqual(max(found[2]), budget)
        self.assertGreater(model.auto_checkpoint.plan.replayed_operators, 0)

    def test_a_stepper_keeps_to_its_budget_with_and_without_offloading(self):
        for offload in (None, ""):
            with self.subTest(offload):
                plain, x, y = problem()
                model = copy.deepcopy(plain)
                losses, weights, _ = loop(plain, x, y)
                del plain
                gc.collect()
                budget = budget_for(model, x, y)
                stepper = snug.Stepper(model, torch.optim.AdamW(model.parameters(), lr=1e-2), memory=budget, micro_batch=ITEMS, offload=offload)
                torch.manual_seed(2)
                results = [stepper.step((x, y), lambda x, y: F.mse_loss(model(x), y)) for _ in range(3)]
                self.assertEqual([result.loss for result in results], losses)
                self.assertTrue(same_bits([p.detach().cpu() for p in model.parameters()], weights))
                self.assertLessEqual(max(result.peak_bytes for result in results), budget)
                self.assertIn("rebuilt" if offload is None else "goes to host memory", stepper.plan)

    def test_estimate_memory_is_the_peak_of_later_steps(self):
        model, x, y = problem()
        estimate = snug.estimate_memory(lambda: F.mse_loss(model(x), y), torch.optim.AdamW(model.parameters(), lr=1e-2))
        self.assertEqual(estimate.total_bytes, loop(model, x, y)[2][-1])
        self.assertLess(estimate.least_bytes, estimate.total_bytes)

    def test_meters_and_plans_work_within_torchs_profiler(self):
        model, loss_of = on_device("function")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            plan = snug.plan(loss_of, "1TiB")
            _, peak = trained(model, loss_of)
            loss_of()
        self.assertEqual(peak, plan.peak_bytes)
        self.assertIn("aten::addmm", [event.name for event in profiler.events()])

    def test_profiles_begin_and_end_around_steps_of_auto_checkpoint(self):
        for steps_before in (0, 1):  # the first step plans, and measures the loss outside of the model
            with self.subTest(steps_before):
                model, x, y = problem()
                snug.auto_checkpoint(model, memory_budget=budget_for(model, x, y))
                for _ in range(steps_before):
                    F.mse_loss(model(x), y).backward()
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                    F.mse_loss(model(x), y).backward()
                self.assertIn("aten::mse_loss", [event.name for event in profiler.events()])


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
