"""The package on a device: the simulated accelerator of the C++ tests, or CUDA. Their allocators give blocks of 512 bytes.

The environment has the path of the accelerator's library, SNUG_SIM_DEVICE, or SNUG_ACCELERATOR=cuda.
"""

import copy
import ctypes
import gc
import os
import types
import unittest

import torch
import torch.nn.functional as F
from torch import nn

import snug
from models import MODELS, Mlp, by_hand
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


DEVICE = torch.device("cuda:0") if os.environ.get("SNUG_ACCELERATOR") == "cuda" else load_simulated_accelerator()


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
    return losses, numbers_of(model), peaks


def budget_for(model, x, y):
    """With state and gradients, and six tenths of the activations."""
    with snug.MemoryMeter(model) as meter:
        F.mse_loss(model(x), y).backward()
    model.zero_grad()
    parameters = sum(p.nbytes for p in model.parameters())
    return snug.live_bytes(DEVICE) + 3 * parameters + int(0.6 * (meter.report().peak_bytes - parameters))


WIDE, LAYERS = 256, 6
WEIGHT = 4 * WIDE * WIDE


def wide():
    """On the CPU: six weights of 256 KiB between two of 32 KiB, and a batch."""
    torch.manual_seed(1)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDE, WIDE), nn.ReLU())]
    return nn.Sequential(nn.Linear(32, WIDE), nn.ReLU(), *layers, nn.Linear(WIDE, 32)), torch.randn(16, 32), torch.randn(16, 32)


def numbers_of(model):
    return [p.detach().cpu() for p in model.parameters()]


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

    def test_a_model_larger_than_its_device_has_the_bits_of_plain_training(self):
        for name, of_torch, make in (("AdamW", lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), snug.AdamW),
                                     ("AdamW8bit", lambda p: snug.AdamW8bit(p, lr=1e-2), snug.AdamW8bit)):
            with self.subTest(name):
                gc.collect()
                plain, x, y = wide()
                losses = by_hand(plain, of_torch(plain.parameters()), x, y, 4)
                model, x, y = wide()[0], x.to(DEVICE), y.to(DEVICE)
                before = snug.live_bytes(DEVICE)
                self.assertIs(snug.move_with_weights_on_host(model, DEVICE), model)
                self.assertLess(snug.live_bytes(DEVICE), before + WEIGHT)
                self.assertEqual({p.device for p in model.parameters()}, {DEVICE})
                with self.assertRaisesRegex(RuntimeError, "move_with_weights_on_host"):
                    model[2].weight.cpu()
                budget = before + 5 * WEIGHT  # the weights alone are more
                stepper = snug.Stepper(model, make(model.parameters(), lr=1e-2), memory=budget, micro_batch=16, offload="")
                results = [stepper.step((x, y), lambda x, y: F.mse_loss(model(x), y)) for _ in range(4)]
                self.assertEqual([result.loss for result in results], losses)
                self.assertTrue(same_bits(numbers_of(model), numbers_of(plain)))
                self.assertLessEqual(max(result.peak_bytes for result in results), budget)
                self.assertIn("Weights and gradients are in the host's memory", stepper.plan)
                with torch.no_grad():
                    self.assertTrue(torch.equal(model(x).cpu(), plain(x.cpu())))
                self.assertTrue(torch.equal(model.state_dict()["2.weight"].cpu(), plain[2].weight))

    def test_an_optimizer_of_torchs_keeps_weights_on_the_device(self):
        model, x, y = wide()
        model, x, y = model.to(DEVICE), x.to(DEVICE), y.to(DEVICE)
        stepper = snug.Stepper(model, torch.optim.AdamW(model.parameters()), memory=snug.live_bytes(DEVICE) + WEIGHT, micro_batch=16, offload="")
        with self.assertRaises(snug.BudgetExceeded):
            stepper.step((x, y), lambda x, y: F.mse_loss(model(x), y))

    def test_the_state_of_an_optimizer_may_be_on_the_host(self):
        for make in (snug.AdamW, snug.AdamW8bit):
            with self.subTest(make.__name__):
                plain, x, y = wide()
                losses = by_hand(plain, make(plain.parameters(), lr=1e-2), x, y, 4)
                model, x, y = wide()[0].to(DEVICE), x.to(DEVICE), y.to(DEVICE)
                optimizer = make(model.parameters(), lr=1e-2)
                self.assertEqual(optimizer.state_placement, snug.StateOnDevice())
                optimizer.keep_state_in(snug.StateOnHost(window="1MiB"))
                self.assertEqual(optimizer.state_placement, snug.StateOnHost(1 << 20))
                found = by_hand(model, optimizer, x, y, 2)
                before = snug.live_bytes(DEVICE)
                found += by_hand(model, optimizer, x, y, 2)
                self.assertEqual(snug.live_bytes(DEVICE), before)
                self.assertEqual(found, losses)
                self.assertTrue(same_bits(numbers_of(model), numbers_of(plain)))
                self.assertEqual({t.device.type for of_one in optimizer.state_dict()["state"].values() for t in of_one.values()}, {"cpu"})

    def test_the_place_of_a_state_is_refused_where_the_state_cannot_be_there(self):
        model, x, y = wide()
        model, x, y = model.to(DEVICE), x.to(DEVICE), y.to(DEVICE)
        optimizer = snug.AdamW8bit(model.parameters())
        with self.assertRaisesRegex(snug.ConfigError, "StateOnHost"):
            by_hand(model, optimizer, x, y, 1)
        optimizer.keep_state_in(snug.StateOnHost())
        with self.assertRaisesRegex(snug.ConfigError, "StateOnDevice"):
            optimizer.keep_state_in(snug.StateOnDevice())
        with self.assertRaisesRegex(snug.ConfigError, "1.00 KiB"):
            optimizer.keep_state_in(snug.StateOnHost(1024))
        with self.assertRaisesRegex(snug.ConfigError, "'host' is no place"):
            optimizer.keep_state_in("host")
        self.assertEqual(optimizer.state_placement, snug.StateOnHost(16 << 20))
        with self.assertRaisesRegex(snug.ConfigError, "the device is the CPU"):
            snug.move_with_weights_on_host(wide()[0], "cpu")

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
