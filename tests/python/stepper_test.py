"""Steps within a budget, and AdamW and AdamW8bit, of the Python package."""

import copy
import gc
import pickle
import random
import subprocess
import sys
import tempfile
import threading
import unittest
import warnings

import numpy
import torch
import torch.nn.functional as F
from torch import nn

import snug
from models import Convolutions, Cube, Mlp, Tied, by_hand

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adamw8bit": lambda p: snug.AdamW8bit(p, lr=1e-2),
    "adamw of snug": lambda p: snug.AdamW(p, lr=1e-2),
}
#: Bytes of state for each byte of parameters.
STATE = {"adamw": 2, "sgd": 1, "adamw8bit": 0.6, "adamw of snug": 2}


class MyAdamW(torch.optim.AdamW):
    pass


class StateAsItWrites(torch.optim.Optimizer):
    """As optimizers of third parties do: state is made where a parameter is first met, between the updates of others."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["mean"].lerp_(parameter.grad, 0.1)
            state["square"].lerp_(parameter.grad.square(), 0.001)
            parameter.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-8), value=-1e-3)


class Interrupted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, in_backward):
        ctx.in_backward = in_backward
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.in_backward:
            raise KeyboardInterrupt
        return gradient, None


class LargeWorkspace(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter -= 1e-3 * parameter.grad.sign()
            torch.empty(16 << 20, dtype=torch.uint8)


def problem(dropout=0.1):
    torch.manual_seed(1)
    model = Mlp(dropout=dropout)
    return model, torch.randn(128, 64), torch.randn(128, 64)


def bits(model):
    return [p.detach().clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))


def budget_for(model, share_of_activations, x, y, state=0):
    gc.collect()
    with snug.MemoryMeter(model) as meter:
        F.mse_loss(model(x), y).backward()
    model.zero_grad()
    parameters = sum(p.nbytes for p in model.parameters())
    return snug.live_bytes() + int((1 + state) * parameters) + int(share_of_activations * (meter.report().peak_bytes - parameters))


def smallest_budget(step, memory, more):
    """What the refusal of a step names. Where not even parts of it run, no refusal names any."""
    while True:
        try:
            step(memory)
        except snug.BudgetExceeded as error:
            if error.smallest_feasible > 0:
                return error.smallest_feasible
        else:
            raise AssertionError(f"{memory} bytes were not refused")
        memory += more


class Steps(unittest.TestCase):
    def test_within_a_budget_have_the_bits_of_the_plain_loop(self):
        for name, make in OPTIMIZERS.items():
            with self.subTest(name):
                self.check_budget(make, STATE[name])

    def check_budget(self, make, state):
        plain, x, y = problem()
        model = copy.deepcopy(plain)
        torch.manual_seed(2)
        expected = by_hand(plain, make(plain.parameters()), x, y, 4)
        budget = budget_for(model, 0.6, x, y, state)
        stepper = snug.Stepper(model, make(model.parameters()), memory=budget, micro_batch=128)
        torch.manual_seed(2)
        losses = []
        for _ in range(4):
            result = stepper.step((x, y), lambda x, y: F.mse_loss(model(x), y))
            self.assertLessEqual(result.peak_bytes, budget)
            losses.append(result.loss)
        self.assertEqual(losses, expected)
        self.assertTrue(same(bits(plain), bits(model)))
        self.assertIn("rebuilt", stepper.plan)

    def test_take_micro_batches_as_a_loop_by_hand_does(self):
        plain, x, y = problem(dropout=0)
        model = copy.deepcopy(plain)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            for part_x, part_y in zip(x.split(32), y.split(32)):
                (F.mse_loss(plain(part_x), part_y) * 32 / 128).backward()
            optimizer.step()
        stepper = snug.Stepper(model, torch.optim.AdamW(model.parameters(), lr=1e-2), micro_batch=32)
        for _ in range(3):
            result = stepper.step({"x": x, "y": y}, lambda x, y: F.mse_loss(model(x), y))
            self.assertEqual(result.micro_batches, 4)
        for a, b in zip(plain.parameters(), model.parameters()):
            self.assertTrue(torch.allclose(a, b, atol=1e-6))

    def test_count_items_as_the_loss_says(self):
        model, x, y = problem(dropout=0)
        stepper = snug.Stepper(model, torch.optim.SGD(model.parameters(), lr=0), micro_batch=32)
        result = stepper.step([x, y], lambda x, y: snug.Loss.sum(F.mse_loss(model(x), y, reduction="sum"), y.numel()))
        self.assertEqual(result.items, y.numel())
        self.assertAlmostEqual(result.loss, F.mse_loss(model(x), y).item(), places=5)

    def test_clip_as_torch_does(self):
        plain, x, y = problem(dropout=0)
        model = copy.deepcopy(plain)
        optimizer = torch.optim.SGD(plain.parameters(), lr=1)
        F.mse_loss(plain(x), y).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        optimizer.step()
        result = snug.Stepper(model, torch.optim.SGD(model.parameters(), lr=1), clip_norm=0.01).step(
            (x, y), lambda x, y: F.mse_loss(model(x), y))
        self.assertAlmostEqual(result.grad_norm, norm.item(), places=5)
        for a, b in zip(plain.parameters(), model.parameters()):
            self.assertTrue(torch.allclose(a, b, atol=1e-6))

    def test_run_under_schedules(self):
        for name, make in OPTIMIZERS.items():
            with self.subTest(name):
                plain, x, y = problem()
                model = copy.deepcopy(plain)

                def train(model, make_step):
                    torch.manual_seed(2)
                    optimizer = make(model.parameters())
                    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
                    step = make_step(optimizer)
                    for _ in range(3):
                        step()
                        schedule.step()

                def of_stepper(optimizer):
                    stepper = snug.Stepper(model, optimizer, "1GiB", micro_batch=128)
                    return lambda: stepper.step((x, y), lambda x, y: F.mse_loss(model(x), y))

                with warnings.catch_warnings():
                    warnings.simplefilter("error")  # of schedules that step before their optimizer
                    train(plain, lambda optimizer: lambda: by_hand(plain, optimizer, x, y, 1))
                    train(model, of_stepper)
                self.assertTrue(same(bits(plain), bits(model)))

    def test_do_not_cut_a_batch_that_the_model_normalises_by(self):
        torch.manual_seed(1)
        model, x = Convolutions(), torch.randn(32, 3, 16, 16)
        stepper = snug.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), memory=snug.live_bytes() + (1 << 20))

        def loss_of(x):
            return model(x).square().mean()

        try:
            self.assertEqual(stepper.step(x, loss_of).micro_batches, 1)
        except snug.BudgetExceeded as error:
            self.assertIn("the batch is not split", str(error))

    def test_tell_what_does_not_fit(self):
        model, x, y = problem()
        before = bits(model)
        stepper = snug.Stepper(model, torch.optim.AdamW(model.parameters()), memory=snug.live_bytes() + 1000)
        with self.assertRaises(snug.BudgetExceeded):
            stepper.step((x, y), lambda x, y: F.mse_loss(model(x), y))
        self.assertTrue(same(before, bits(model)))
        self.assertTrue(all(p.grad is None for p in model.parameters()))

    def test_plan_a_model_whose_own_function_runs_out_of_memory(self):
        torch.manual_seed(1)

        class Deep(Mlp):
            def forward(self, x):
                for layer in self.layers:
                    x = Cube.apply(torch.tanh(layer(x)))
                return x

        model, x, y = Deep(dropout=0), torch.randn(512, 64), torch.randn(512, 64)
        plain = copy.deepcopy(model)
        expected = by_hand(plain, torch.optim.SGD(plain.parameters(), lr=0.1), x, y, 2)
        stepper = snug.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), memory=budget_for(model, 0.5, x, y),
                               micro_batch=512)
        losses = [stepper.step((x, y), lambda x, y: F.mse_loss(model(x), y)).loss for _ in range(2)]
        self.assertEqual(losses, expected)

    def test_are_planned_with_the_state_that_any_optimizer_will_make(self):
        x = torch.randn(16, 256)
        for make in (torch.optim.NAdam, torch.optim.Adadelta, torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adafactor,
                     MyAdamW, StateAsItWrites):
            with self.subTest(make.__name__):
                torch.manual_seed(1)
                model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
                optimizer = make(model.parameters())
                before = bits(model)
                gradients = sum(p.nbytes for p in model.parameters())
                memory = smallest_budget(
                    lambda memory: snug.Stepper(model, optimizer, memory=memory).step(x, lambda x: model(x).square().mean()),
                    snug.live_bytes() + gradients, gradients // 64)
                self.assertTrue(same(before, bits(model)))
                self.assertEqual(len(optimizer.state), 0)
                stepper = snug.Stepper(model, optimizer, memory=memory)
                for _ in range(3):
                    self.assertLessEqual(stepper.step(x, lambda x: model(x).square().mean()).peak_bytes, memory)

    def test_are_refused_before_the_update_where_the_state_does_not_fit_into_a_limit(self):
        torch.manual_seed(1)
        model, x = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]), torch.randn(16, 256)
        before = bits(model)
        memory = snug.live_bytes() + 2 * sum(p.nbytes for p in model.parameters())
        stepper = snug.Stepper(model, StateAsItWrites(model.parameters()), memory=memory, plan=False)
        with self.assertRaisesRegex(snug.BudgetExceeded, "state"):
            stepper.step(x, lambda x: model(x).square().mean())
        self.assertTrue(same(before, bits(model)))

    def test_make_an_update_whole_where_the_optimizer_takes_more_than_it_has_shown(self):
        torch.manual_seed(1)
        model, x = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]), torch.randn(16, 256)
        before = bits(model)
        memory = snug.live_bytes() + (8 << 20)
        result = snug.Stepper(model, LargeWorkspace(model.parameters()), memory=memory).step(x, lambda x: model(x).square().mean())
        self.assertGreater(result.peak_bytes, memory)
        self.assertFalse(any(torch.equal(a, b) for a, b in zip(before, bits(model))))

    def test_mix_a_batch_by_random_numbers_of_numpy(self):
        plain, x, y = problem(dropout=0)
        model = copy.deepcopy(plain)

        def loss_of(model, x, y):
            share = numpy.random.beta(0.2, 0.2)
            return F.mse_loss(model(share * x + (1 - share) * x.flip(0)), y) * random.random()

        def trained(step):
            random.seed(2), numpy.random.seed(2)
            return [step() for _ in range(3)]

        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

        def by_hand():
            optimizer.zero_grad()
            loss = loss_of(plain, x, y)
            loss.backward()
            optimizer.step()
            return loss.item()

        expected = trained(by_hand)
        stepper = snug.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), memory=budget_for(model, 0.6, x, y), micro_batch=128)
        self.assertEqual(trained(lambda: stepper.step((x, y), lambda x, y: loss_of(model, x, y)).loss), expected)
        self.assertTrue(same(bits(plain), bits(model)))
        self.assertIn("rebuilt", stepper.plan)

    def test_name_options_that_there_are_where_a_model_keeps_state(self):
        model, x, y = problem(dropout=0)
        calls = []

        def warmed_up(x, y):
            calls.append(1)
            return F.mse_loss(model(x), y) * len(calls)

        def stepper(**options):
            return snug.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), memory=budget_for(model, 0.6, x, y), **options)

        with self.assertRaisesRegex(snug.ConfigError, "plan = false"):
            stepper(micro_batch=128).step((x, y), warmed_up)
        self.assertEqual(stepper(micro_batch=32, plan=False).step((x, y), warmed_up).micro_batches, 4)

    def test_pass_on_errors_and_go_on(self):
        model, x, y = problem()
        stepper = snug.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), memory="1GiB")

        def broken(x, y):
            model(x)
            raise KeyError("mine")

        before = bits(model)
        with self.assertRaisesRegex(KeyError, "mine"):
            stepper.step((x, y), broken)
        self.assertTrue(same(before, bits(model)))
        with self.assertRaisesRegex(snug.ConfigError, "returned str"):
            stepper.step((x, y), lambda x, y: "text")
        stepper.step((x, y), lambda x, y: F.mse_loss(model(x), y))

    def test_tell_an_error_of_libtorchs_without_the_frames_of_cpp(self):
        model, x, y = problem(dropout=0)
        stepper = snug.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def written_in_place(x, y):
            hidden = model(x).exp()
            loss = F.mse_loss(hidden, y)
            hidden.detach().add_(1)
            return loss

        with self.assertRaises(RuntimeError) as raised:
            stepper.step((x, y), written_in_place)
        self.assertIn("modified by an inplace operation", str(raised.exception))
        self.assertNotRegex(str(raised.exception), "frame #|most recent call first")

    def test_end_where_somebody_interrupts(self):
        for in_backward in (False, True):
            sizes = self.calls_until(None, in_backward)
            self.assertLess(min(sizes), max(sizes))  # planning has tried parts of the batch
            for size in set(sizes):
                call = sizes.index(size) + 1
                interrupted = self.calls_until(call, in_backward)
                self.assertEqual(len(interrupted), call)
                # Measured times choose the micro-batch of the call after the trials.
                self.assertEqual(interrupted[:-1], sizes[:call - 1])

    def calls_until(self, last, in_backward):
        """The items in each call of a step that is interrupted in call number `last`; None: in none."""
        model, x, y = problem(dropout=0)
        calls, before = [], bits(model)
        stepper = snug.Stepper(model, torch.optim.AdamW(model.parameters()), memory=budget_for(model, 0.4, x, y, state=2))

        def loss_of(x, y):
            calls.append(len(x))
            is_last = len(calls) == last
            if is_last and not in_backward:
                raise KeyboardInterrupt
            return F.mse_loss(Interrupted.apply(model(x), is_last), y)

        if last is None:
            stepper.step((x, y), loss_of)
        else:
            with self.assertRaises(KeyboardInterrupt):
                stepper.step((x, y), loss_of)
            self.assertTrue(same(before, bits(model)))
        return calls

    def test_cast_weights_in_each_micro_batch_inside_of_autocast(self):
        model, _, _ = problem(dropout=0)
        x, y = torch.randn(1024, 64), torch.randn(1024, 64)
        stepper = snug.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), memory=budget_for(model, 0.12, x, y), micro_batch=256)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                result = stepper.step((x, y), lambda x, y: F.mse_loss(model(x).float(), y))
            self.assertEqual(result.micro_batches, 4)
            self.assertIn("rebuilt", stepper.plan)
            self.assertEqual(result.plan_deviation, "")

    def test_plan_as_if_no_earlier_pass_in_the_region_of_autocast_had_cast_weights(self):
        model, _, _ = problem(dropout=0)
        x, y = torch.randn(1024, 64), torch.randn(1024, 64)
        memory = budget_for(model, 0.12, x, y)
        stepper = snug.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), memory=memory, micro_batch=256)
        calls = []

        def loss_of(x, y):
            calls.append(len(x))
            return F.mse_loss(model(x).float(), y)

        for _ in range(2):
            calls.clear()
            with torch.autocast("cpu", torch.bfloat16):
                model(x)  # an evaluation
                self.assertLessEqual(stepper.step((x, y), loss_of).peak_bytes, memory)
        self.assertEqual(calls, 4 * [256])  # nothing is planned again

    def test_refuse_hooks_of_a_step_that_cpp_makes(self):
        model, x, y = problem(dropout=0)
        optimizer = snug.AdamW8bit(model.parameters(), lr=1e-2)
        stepper, seen = snug.Stepper(model, optimizer), []
        handle = optimizer.register_step_post_hook(lambda *_: seen.append(1))
        before = bits(model)
        with self.assertRaisesRegex(snug.ConfigError, "hooks"):
            stepper.step((x, y), lambda x, y: F.mse_loss(model(x), y))
        self.assertTrue(same(before, bits(model)))
        handle.remove()
        stepper.step((x, y), lambda x, y: F.mse_loss(model(x), y))
        of_torch = torch.optim.SGD(model.parameters(), lr=0.1)
        of_torch.register_step_post_hook(lambda *_: seen.append(1))
        snug.Stepper(model, of_torch).step((x, y), lambda x, y: F.mse_loss(model(x), y))
        self.assertEqual(seen, [1])

    def test_refuse_what_they_cannot_take(self):
        model, x, y = problem()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with self.assertRaisesRegex(snug.ConfigError, "8000000.0 is no whole number"):
            snug.Stepper(model, optimizer, memory=8e6)
        with self.assertRaisesRegex(snug.ConfigError, "float8"):
            snug.Stepper(model, optimizer, precision="float8")
        with self.assertRaises(snug.ConfigError):
            snug.Stepper(model, optimizer, micro_batch=-1)
        with self.assertRaisesRegex(snug.ConfigError, "LBFGS.* asks for a closure"):
            snug.Stepper(model, torch.optim.LBFGS(model.parameters()))
        stepper = snug.Stepper(model, optimizer)
        for batch, says in ((None, "batch is a NoneType"), ("text", r"batch\[0\] is a str"), ((x, None), r"batch\[1\] is a NoneType"),
                            ((x, (y, y)), r"batch\[1\] is a tuple"), ({"x": x, "name": "text"}, r"batch\['name'\] is a str")):
            with self.assertRaisesRegex(snug.ConfigError, says):
                stepper.step(batch, lambda x, y: F.mse_loss(model(x), y))
        optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
        with self.assertRaisesRegex(snug.ConfigError, "other parameters"):
            stepper.step((x, y), lambda x, y: F.mse_loss(model(x), y))


class SteppersOnThreads(unittest.TestCase):
    def test_do_not_disturb_each_other(self):
        """One each on a thread. Each has the bits that it has alone; budgets are of the process, so none is set."""
        plain, x, y = problem(dropout=0)
        expected = copy.deepcopy(plain)
        by_hand(expected, torch.optim.AdamW(expected.parameters(), lr=1e-2), x, y, 3)
        models, errors = [copy.deepcopy(plain) for _ in range(3)], []

        def train(model):
            try:
                stepper = snug.Stepper(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
                for _ in range(3):
                    stepper.step((x, y), lambda x, y: F.mse_loss(model(x), y))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=train, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        self.assertEqual(errors, [])
        for model in models:
            self.assertTrue(same(bits(expected), bits(model)))


class Tying(unittest.TestCase):
    def test_is_seen(self):
        torch.manual_seed(1)
        plain, tokens = Tied(), torch.randint(50, (4, 16))
        model = copy.deepcopy(plain)

        def loss_of(model, tokens):
            return F.cross_entropy(model(tokens), torch.zeros(tokens.numel(), dtype=torch.long))

        torch.manual_seed(2)
        optimizer = torch.optim.AdamW(plain.parameters())
        loss_of(plain, tokens).backward()
        optimizer.step()
        torch.manual_seed(2)
        snug.Stepper(model, torch.optim.AdamW(model.parameters())).step(tokens, lambda tokens: loss_of(model, tokens))
        self.assertTrue(same(bits(plain), bits(model)))


class AdamW(unittest.TestCase):
    def test_has_the_bits_of_torchs_and_takes_its_state(self):
        plain, x, y = problem(dropout=0)
        model, options = copy.deepcopy(plain), {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
        theirs, ours = torch.optim.AdamW(plain.parameters(), fused=True, **options), snug.AdamW(model.parameters(), **options)
        self.assertEqual(by_hand(model, ours, x, y, 3), by_hand(plain, theirs, x, y, 3))
        again = snug.AdamW(model.parameters(), lr=7)
        again.load_state_dict(copy.deepcopy(theirs.state_dict()))
        self.assertEqual(again.param_groups[0]["lr"], 1e-2)
        self.assertEqual(by_hand(model, again, x, y, 3), by_hand(plain, theirs, x, y, 3))
        self.assertTrue(same(bits(plain), bits(model)))

    def test_may_keep_its_state_in_a_file_and_copies_do_too(self):
        for make in (snug.AdamW, snug.AdamW8bit):
            with self.subTest(make.__name__), tempfile.TemporaryDirectory() as folder:
                plain, x, y = problem(dropout=0)
                model = copy.deepcopy(plain)
                expected = by_hand(plain, make(plain.parameters(), lr=1e-2), x, y, 4)
                optimizer, place = make(model.parameters(), lr=1e-2), snug.StateFile(folder, "1MiB")
                gc.collect()
                before = snug.live_bytes()
                optimizer.keep_state_in(place)
                found = by_hand(model, optimizer, x, y, 2)
                model.zero_grad()
                self.assertLess(snug.live_bytes(), before + (64 << 10))
                self.assertEqual(optimizer.state_placement, snug.StateFile(folder, 1 << 20))
                for model, again in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
                    self.assertEqual(again.state_placement, snug.StateFile(folder, 1 << 20))
                    self.assertEqual(found + by_hand(model, again, x, y, 2), expected)
                    self.assertTrue(same(bits(plain), bits(model)))

    def test_lets_weights_and_state_leave_memory(self):
        """The budget is less than weights and state. On a CPU both go to files."""
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(1)
            plain = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())])
            x, y, model = torch.randn(16, 256), torch.randn(16, 256), copy.deepcopy(plain)
            expected = by_hand(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), x, y, 3)
            weights = sum(p.nbytes for p in model.parameters())
            gc.collect()
            budget = snug.live_bytes() + weights // 2  # for state, gradients and activations
            stepper = snug.Stepper(model, snug.AdamW(model.parameters(), lr=1e-2), memory=budget, micro_batch=16, offload=folder)
            results = [stepper.step((x, y), lambda x, y: F.mse_loss(model(x), y)) for _ in range(3)]
            self.assertEqual([result.loss for result in results], expected)
            self.assertLessEqual(max(result.peak_bytes for result in results), budget)
            self.assertTrue(same(bits(plain), bits(model)))


class AdamW8bit(unittest.TestCase):
    def test_goes_on_with_the_same_bits_from_its_state(self):
        plain, x, y = problem(dropout=0)
        optimizer = snug.AdamW8bit(plain.parameters(), lr=1e-2, min_elements=256)
        by_hand(plain, optimizer, x, y, 3)
        model = copy.deepcopy(plain)
        state = copy.deepcopy(optimizer.state_dict())
        self.assertEqual(state["state"][0]["exp_avg"].dtype, torch.uint8)
        again = snug.AdamW8bit(model.parameters(), lr=1, min_elements=256)
        again.load_state_dict(state)
        self.assertEqual(again.param_groups[0]["lr"], 1e-2)
        self.assertEqual(by_hand(plain, optimizer, x, y, 3), by_hand(model, again, x, y, 3))
        self.assertTrue(same(bits(plain), bits(model)))

    def test_updates_as_adamw_does_in_its_first_step(self):
        """For which the moments were not yet rounded."""
        torch.manual_seed(1)
        values, gradient = torch.randn(512), torch.randn(512)
        ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        snug.AdamW8bit([ours], lr=1e-2, min_elements=256).step()
        torch.optim.AdamW([theirs], lr=1e-2).step()
        self.assertTrue(torch.allclose(ours, theirs, rtol=0, atol=1e-6))

    def test_goes_on_with_the_same_bits_from_a_copy_and_from_a_pickle(self):
        plain, x, y = problem(dropout=0)
        optimizer = snug.AdamW8bit(plain.parameters(), lr=1e-2, min_elements=256)
        by_hand(plain, optimizer, x, y, 3)
        copies = [copy.deepcopy((plain, optimizer)), pickle.loads(pickle.dumps((plain, optimizer)))]
        expected = by_hand(plain, optimizer, x, y, 3)
        for model, again in copies:
            self.assertEqual(by_hand(model, again, x, y, 3), expected)
            self.assertTrue(same(bits(plain), bits(model)))

    def test_stays_as_it_was_where_a_state_does_not_fit(self):
        plain, x, y = problem(dropout=0)
        optimizer = snug.AdamW8bit(plain.parameters(), lr=1e-2, min_elements=256)
        by_hand(plain, optimizer, x, y, 2)
        state = copy.deepcopy(optimizer.state_dict())
        other = copy.deepcopy(state)
        other["state"][0]["exp_avg"].zero_()
        other["param_groups"][0]["params"] = "as text"
        model = copy.deepcopy((plain, optimizer))
        with self.assertRaises(Exception):
            optimizer.load_state_dict(other)
        self.assertEqual(by_hand(plain, optimizer, x, y, 2), by_hand(*model, x, y, 2))

    def test_stays_as_it_was_where_a_hook_of_loading_raises(self):
        plain, x, y = problem(dropout=0)
        optimizer = snug.AdamW8bit(plain.parameters(), lr=1e-2, min_elements=256)
        by_hand(plain, optimizer, x, y, 2)
        other = copy.deepcopy(optimizer.state_dict())
        other["state"][0]["exp_avg"].zero_()
        other["param_groups"][0]["lr"] = 7
        model = copy.deepcopy((plain, optimizer))

        def refuse(_):
            raise KeyError("mine")

        optimizer.register_load_state_dict_post_hook(refuse)
        with self.assertRaisesRegex(KeyError, "mine"):
            optimizer.load_state_dict(other)
        self.assertEqual(optimizer.param_groups[0]["lr"], 1e-2)
        self.assertEqual(by_hand(plain, optimizer, x, y, 2), by_hand(*model, x, y, 2))

    def test_shows_its_state_to_hooks_and_takes_what_they_make_of_it(self):
        plain, x, y = problem(dropout=0)
        optimizer = snug.AdamW8bit(plain.parameters(), lr=1e-2, min_elements=256)
        by_hand(plain, optimizer, x, y, 2)
        state, model = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(plain)
        doubled = copy.deepcopy(state)
        for of_one in doubled["state"].values():
            for name in ("exp_avg_max", "exp_avg"):
                if name in of_one and of_one[name].is_floating_point():
                    of_one[name] *= 2
        optimizer.load_state_dict(doubled)
        self.assertTrue(torch.equal(optimizer.state_dict()["state"][0]["exp_avg_max"], 2 * state["state"][0]["exp_avg_max"]))

        again = snug.AdamW8bit(model.parameters(), lr=1e-2, min_elements=256)
        again.register_load_state_dict_pre_hook(lambda _, given: {**given, "state": doubled["state"]})
        again.register_state_dict_post_hook(lambda _, made: {**made, "moments": len(made["state"])})
        again.load_state_dict(state)
        self.assertEqual(again.state_dict()["moments"], len(state["state"]))
        self.assertEqual(by_hand(plain, optimizer, x, y, 2), by_hand(model, again, x, y, 2))

    def test_stays_near_adamw(self):
        plain, x, y = problem(dropout=0)
        model = copy.deepcopy(plain)
        expected = by_hand(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), x, y, 60)
        losses = by_hand(model, snug.AdamW8bit(model.parameters(), lr=1e-3, min_elements=256), x, y, 60)
        self.assertLess(losses[-1], 0.9 * losses[0])
        self.assertAlmostEqual(losses[-1], expected[-1], delta=0.1 * expected[-1])

    def test_refuses_what_it_cannot_take(self):
        with self.assertRaises(snug.ConfigError):
            snug.AdamW8bit([torch.zeros(4, requires_grad=True)], lr=-1)
        optimizer = snug.AdamW8bit([torch.zeros(4, requires_grad=True)])
        with self.assertRaises(snug.ConfigError):
            optimizer.add_param_group({"params": [torch.zeros(4, requires_grad=True)]})
        with self.assertRaises(snug.CorruptFile):
            optimizer.load_state_dict({"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": optimizer.state_dict()["param_groups"]})


class Import(unittest.TestCase):
    def test_is_refused_beside_another_torch(self):
        code = "import torch; torch.__version__ = '9.8.0'; import snug"
        run = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
        self.assertRegex(run.stderr, r"ImportError: snug \d.* built against torch 2\..*, and this is torch 9.8.0")
        self.assertRegex(snug.__version__, r"^\d+\.\d+\.\d+$")

    def test_may_come_after_backward_passes_and_hooks(self):
        code = """
import torch
x = torch.ones(4, requires_grad=True)
with torch.autograd.graph.save_on_cpu():
    y = (x * x).exp()
y.sum().backward()
import snug
with snug.MemoryMeter() as meter:
    loss = (x * x).exp().sum()
    assert meter.report().activations == 4 * 4
loss.backward()
"""
        subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
