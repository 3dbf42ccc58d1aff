"""Plans, meters and limits of the Python package, on models of Python's."""

import copy
import gc
import multiprocessing
import random
import threading
import unittest

import numpy
import torch
from torch import nn

import snug
from models import KINDS, MODELS, Checkpointed, Mlp, Shown, made, targets, vectors


def trained(model, loss_of, plan=None):
    """A pass: loss, gradients, buffers, the generator's next number, and the peak."""
    model.zero_grad()
    buffers = copy.deepcopy([b for b in model.buffers()])
    torch.manual_seed(5)
    with snug.MemoryMeter(model) as meter:
        if plan is None:
            loss = loss_of()
        else:
            with plan:
                loss = loss_of()
        loss.backward()
    result = [loss.detach(), *[p.grad.clone() for p in model.parameters()], *[b.clone() for b in model.buffers()], torch.rand(1)]
    model.zero_grad()
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers):
            buffer.copy_(before)
    return result, meter.report().peak_bytes


def same_bits(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def as_small_as(loss_of, share):
    """A plan for so much of the plain peak, or for the least that there is."""
    plain = snug.plan(loss_of, "1TiB").peak_bytes
    try:
        return snug.plan(loss_of, int(plain * share))
    except snug.BudgetExceeded as error:
        return snug.plan(loss_of, error.smallest_feasible)


class Plans(unittest.TestCase):
    def test_have_the_bits_of_plain_training_and_the_predicted_peak(self):
        for name in MODELS:
            with self.subTest(name):
                model, loss_of = made(name)
                plain, plain_peak = trained(model, loss_of)
                plan = as_small_as(loss_of, 0.5)
                planned, peak = trained(model, loss_of, plan)
                self.assertTrue(same_bits(plain, planned))
                self.assertEqual(plan.deviation, "")
                self.assertEqual(peak, plan.peak_bytes)
                self.assertLess(peak, plain_peak)
                self.assertGreater(plan.replayed_operators, 0)
                self.assertTrue(same_bits(plain, trained(model, loss_of)[0]), "a pass without the plan, afterwards")

    def test_leave_alone_a_reentrant_checkpoint(self):
        torch.manual_seed(1)
        model, x = Checkpointed(use_reentrant=True), vectors()
        plain, _ = trained(model, lambda: targets(model(x)))
        plan = snug.plan(lambda: targets(model(x)), "1GiB")
        self.assertTrue(same_bits(plain, trained(model, lambda: targets(model(x)), plan)[0]))

    def test_work_inside_and_outside_of_pythons_hooks(self):
        model, loss_of = made("mlp")
        plain, _ = trained(model, loss_of)
        plan = as_small_as(loss_of, 0.5)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            self.assertTrue(same_bits(plain, trained(model, loss_of, plan)[0]))
        seen = []

        def inner():
            with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(1) or t, lambda t: t):
                return loss_of()

        self.assertTrue(same_bits(plain, trained(model, inner, plan)[0]))
        self.assertTrue(seen)

    def test_work_on_several_threads_at_once(self):
        model, loss_of = made("lstm")  # without random numbers, which threads share
        plain, _ = trained(model, loss_of)
        plan = as_small_as(loss_of, 0.5)
        results = [None] * 3

        torch.manual_seed(1)
        _, data, _ = MODELS["lstm"]()

        def work(i):
            own = copy.deepcopy(model)
            with plan:
                loss = targets(own(data))
            loss.backward()
            results[i] = [loss.detach(), *[p.grad for p in own.parameters()]]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            self.assertTrue(same_bits(result, plain[:len(result)]))

    def test_are_kept_as_text(self):
        model, loss_of = made("mlp")
        plain, _ = trained(model, loss_of)
        plan = as_small_as(loss_of, 0.5)
        again = snug.Plan.from_json(plan.to_json())
        self.assertEqual(again.peak_bytes, plan.peak_bytes)
        self.assertTrue(same_bits(plain, trained(model, loss_of, again)[0]))
        self.assertIn("rebuilt", str(plan))

    def test_tell_what_would_fit(self):
        model, loss_of = made("mlp")
        with self.assertRaises(snug.BudgetExceeded) as raised:
            snug.plan(loss_of, 1000)
        self.assertIsInstance(raised.exception, torch.OutOfMemoryError)
        least = raised.exception.smallest_feasible
        self.assertTrue(snug.fits(loss_of, least))
        self.assertFalse(snug.fits(loss_of, 1000))
        points = snug.curve(loss_of, points=4)
        self.assertEqual(points[0][0], snug.plan(loss_of, "1GiB").peak_bytes)
        self.assertEqual(sorted(points, reverse=True), points)

    def test_name_a_budget_that_does_where_results_are_other_when_they_are_rebuilt(self):
        torch.manual_seed(1)
        layers = [(nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU()) for i in range(5)]
        model, x = nn.Sequential(*[layer for three in layers for layer in three]), torch.randn(4, 3, 24, 24)

        def loss_of():
            with torch.backends.mkldnn.flags(enabled=False):  # the replay has other convolutions
                return model(x).square().mean()

        with self.assertRaises(snug.BudgetExceeded) as raised:
            snug.plan(loss_of, 1 << 20)
        least = raised.exception.smallest_feasible
        plan = snug.plan(loss_of, least)
        self.assertLessEqual(plan.peak_bytes, least)
        self.assertTrue(same_bits(trained(model, loss_of)[0], trained(model, loss_of, plan)[0]))

    def test_put_back_the_states_of_random_and_numpy(self):
        model, _ = made("mlp")
        x = vectors()

        def loss_of():
            share = numpy.random.beta(0.2, 0.2)
            return targets(model(share * x + (1 - share) * x.flip(0))[random.sample(range(64), 32)])

        before = random.getstate(), numpy.random.get_state()[1:]
        plan = as_small_as(loss_of, 0.5)
        self.assertEqual(random.getstate(), before[0])
        self.assertTrue(all(numpy.array_equal(a, b) for a, b in zip(before[1], numpy.random.get_state()[1:])))
        results = []
        for of in (None, plan):
            random.seed(3), numpy.random.seed(3)
            results.append(trained(model, loss_of, of)[0])
        self.assertTrue(same_bits(*results))

    def test_refuse_a_model_that_keeps_state_which_planning_has_moved_on(self):
        model, loss_of = made("mlp")
        calls = []

        def warmed_up():
            calls.append(1)
            return loss_of() * len(calls) / 100

        with self.assertRaisesRegex(snug.ConfigError, "gave the losses .* a counter"):
            snug.plan(warmed_up, "1GiB")

    def test_pass_on_what_the_model_raises_and_leave_nothing_behind(self):
        model, loss_of = made("mlp")
        before = snug.live_bytes()

        def broken():
            loss_of()
            raise KeyError("mine")

        with self.assertRaisesRegex(KeyError, "mine"):
            snug.plan(broken, "1GiB")
        self.assertEqual(snug.live_bytes(), before)
        self.assertTrue(all(p.grad is None for p in model.parameters()))

    def test_refuse_what_they_cannot_take(self):
        model, loss_of = made("mlp")
        with self.assertRaisesRegex(snug.ConfigError, "returned int"):
            snug.plan(lambda: 3, "1GiB")
        with self.assertRaisesRegex(ValueError, "12 apples"):
            snug.plan(loss_of, "12 apples")
        with self.assertRaisesRegex(ValueError, "1000000.0 is no whole number"):
            snug.plan(loss_of, 1e6)
        with self.assertRaises(snug.ConfigError):
            snug.Plan.from_json("{}")

    def test_take_compiled_regions(self):
        torch.manual_seed(1)
        model, x = Mlp(dropout=0), vectors()
        compiled = torch.compile(model, backend="aot_eager")

        def loss_of():
            return targets(compiled(x))

        plain, _ = trained(model, loss_of)
        plan = as_small_as(loss_of, 0.5)
        self.assertTrue(same_bits(plain, trained(model, loss_of, plan)[0]))

    def test_take_derivatives_by_torch_func_and_tensors_of_every_kind(self):
        for name, loss_of_kind in KINDS.items():
            with self.subTest(name):
                torch.manual_seed(1)
                model, x = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())]), vectors()
                loss_of = lambda: loss_of_kind(model, x)
                plain, _ = trained(model, loss_of)
                plan = as_small_as(loss_of, 0.7)
                planned, peak = trained(model, loss_of, plan)
                self.assertTrue(same_bits(plain, planned))
                self.assertEqual(plan.deviation, "")
                self.assertLessEqual(peak, plan.peak_bytes)

    def test_of_compiled_regions_take_what_plain_training_takes(self):
        for items in (32, 1024):  # most of what is saved are parameters, and most are activations
            with self.subTest(items):
                torch.manual_seed(1)
                torch._dynamo.reset()
                model, x = Mlp(dropout=0), vectors(items)
                compiled = torch.compile(lambda: targets(model(x)), backend="aot_eager")
                trained(model, compiled)  # which compiles it
                plain, plain_peak = trained(model, compiled)
                plan = snug.plan(compiled, "1GiB")
                planned, peak = trained(model, compiled, plan)
                self.assertTrue(same_bits(plain, planned))
                self.assertEqual(peak, plan.peak_bytes)
                self.assertLessEqual(peak, plain_peak)

    def test_give_a_function_no_gradient_that_is_somebody_elses_memory(self):
        for taken in (lambda t: t, lambda t: t.t()):
            with self.subTest(taken):
                torch.manual_seed(1)
                model = nn.Linear(64, 64, bias=False)
                shown = nn.Parameter(torch.randn(64, 64))

                def loss_of():
                    return (Shown.apply(shown, model.weight, taken) + Shown.apply(shown, torch.tanh(model.weight), taken)).sum()

                with snug.plan(loss_of, "1GiB"):
                    loss = loss_of()
                weight = model.weight.detach().clone()
                loss.backward()
                self.assertTrue(torch.equal(shown.grad, taken(weight) + taken(torch.tanh(weight))))
                shown.grad = None
                with snug.plan(loss_of, "1GiB"):
                    loss = Shown.apply(shown, model.weight, taken).sum()
                loss.backward()
                self.assertTrue(torch.equal(shown.grad, taken(weight)))
                shown.grad.zero_()
                self.assertTrue(torch.equal(model.weight, weight))

    def test_refuse_compiled_autograd(self):
        import torch._dynamo.compiled_autograd as compiled_autograd

        model, loss_of = made("mlp")
        plan = snug.plan(loss_of, "1GiB")
        stepper = snug.Stepper(model, torch.optim.SGD(model.parameters(), lr=0))
        with compiled_autograd._enable(lambda graph: graph):
            with self.assertRaisesRegex(snug.ConfigError, "compiled autograd"):
                snug.plan(loss_of, "1GiB")
            with self.assertRaisesRegex(snug.ConfigError, "compiled autograd"):
                with plan:
                    self.fail("the block began")
            with self.assertRaisesRegex(snug.ConfigError, "compiled autograd"):
                stepper.step(vectors(), lambda x: targets(model(x)))
        with plan:
            loss_of()

    def test_are_made_and_used_inside_of_autocast(self):
        model, loss_of = made("mlp")
        with torch.autocast("cpu", torch.bfloat16):
            plain, _ = trained(model, loss_of)
            plan = as_small_as(loss_of, 0.5)
            planned, peak = trained(model, loss_of, plan)
        self.assertTrue(same_bits(plain, planned))
        self.assertEqual(peak, plan.peak_bytes)
        self.assertEqual(plan.deviation, "")

    def test_made_inside_of_autocast_are_for_steps_that_cast_weights(self):
        torch.manual_seed(1)
        model, x = Mlp(), torch.randn(1024, 64)  # activations take more than the casts, which autocast holds
        loss_of = lambda: model(x).float().square().mean()
        level = snug.live_bytes()
        with torch.autocast("cpu", torch.bfloat16):
            plan = as_small_as(loss_of, 0.5)
            self.assertEqual(snug.live_bytes(), level)

        def step():
            with torch.autocast("cpu", torch.bfloat16):
                return loss_of()

        plain, _ = trained(model, step)
        planned, peak = trained(model, step, plan)
        self.assertTrue(same_bits(plain, planned))
        self.assertEqual(plan.deviation, "")
        self.assertLessEqual(peak, plan.peak_bytes)
        self.assertLess(plan.peak_bytes, plan.plain_peak_bytes)

    def test_keep_to_the_budget_after_an_earlier_pass_in_the_region_of_autocast(self):
        torch.manual_seed(1)
        model, x = Mlp(), torch.randn(1024, 64)
        loss_of = lambda: model(x).float().square().mean()
        with torch.autocast("cpu", torch.bfloat16):
            plain = snug.plan(loss_of, "1TiB").peak_bytes
            level = snug.live_bytes()
            loss_of()
            cast = snug.live_bytes() - level
            self.assertGreater(cast, 0)
            budget = plain - cast // 2
            with snug.MemoryMeter() as meter:
                snug.plan(loss_of, budget)
        self.assertLessEqual(cast + meter.report().peak_bytes, budget)

    def test_end_where_somebody_interrupts(self):
        model, loss_of = made("mlp")
        for budget in ("1TiB", as_small_as(loss_of, 0.5).peak_bytes):
            calls = []

            def interrupted():
                calls.append(1)
                if len(calls) == last:
                    raise KeyboardInterrupt
                return loss_of()

            for last in (1, 2):
                calls.clear()
                with self.assertRaises(KeyboardInterrupt):
                    snug.plan(interrupted, budget)
                self.assertEqual(len(calls), last)

    def test_are_as_before_after_a_forward_pass_that_raised(self):
        model, loss_of = made("mlp")
        plain, _ = trained(model, loss_of)
        plan = as_small_as(loss_of, 0.5)
        level = snug.live_bytes()
        with self.assertRaisesRegex(KeyError, "mine"):
            with plan:
                loss_of()
                raise KeyError("mine")
        gc.collect()
        self.assertEqual(snug.live_bytes(), level)
        planned, peak = trained(model, loss_of, plan)
        self.assertTrue(same_bits(plain, planned))
        self.assertEqual(peak, plan.peak_bytes)

    def test_work_in_a_forked_child(self):
        model, loss_of = made("lstm")
        plain, _ = trained(model, loss_of)  # the parent has its threads by now
        plan = as_small_as(loss_of, 0.5)
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=lambda: queue.put(same_bits(plain, trained(model, loss_of, plan)[0])))
        child.start()
        child.join(120)
        self.assertEqual(child.exitcode, 0)
        self.assertTrue(queue.get())


class Memory(unittest.TestCase):
    def test_is_counted_by_kind(self):
        model, loss_of = made("mlp")
        parameters = sum(p.nbytes for p in model.parameters())
        with snug.MemoryMeter(model) as meter:
            loss_of().backward()
            report = meter.report()
        self.assertEqual(report.parameters, parameters)
        self.assertEqual(report.live_bytes, parameters + 64 * 64 * 4)  # gradients: of the model, and of the input
        self.assertGreater(report.activations, 0)
        kinds = (report.parameters, report.gradients, report.optimizer_state, report.activations, report.workspace,
                 report.outputs, report.before)
        self.assertEqual(sum(kinds), snug.live_bytes() - report.live_bytes + report.peak_bytes)

    def test_of_an_optimizers_state_is_counted(self):
        model, loss_of = made("mlp")
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of().backward()
        optimizer.step()
        with snug.MemoryMeter(model, optimizer) as meter:
            _ = torch.empty(1 << 20)
        state = sum(v.nbytes for s in optimizer.state.values() for v in s.values())
        self.assertEqual(meter.report().optimizer_state, state)

    def test_of_adamw8bits_state_is_counted(self):
        model, loss_of = made("mlp")
        optimizer = snug.AdamW8bit(model.parameters(), min_elements=256)
        loss_of().backward()
        optimizer.step()
        with snug.MemoryMeter(model, optimizer) as meter:
            _ = torch.empty(1 << 20)
        state = sum(v.nbytes for s in optimizer.state_dict()["state"].values() for v in s.values() if isinstance(v, torch.Tensor))
        self.assertEqual(meter.report().optimizer_state, state)

    def test_of_blocks_within_blocks_of_one_meter(self):
        meter = snug.MemoryMeter()
        with self.assertRaisesRegex(snug.ConfigError, "no block has begun"):
            meter.report()
        with meter:
            kept = torch.empty(1 << 20)
            with meter:
                torch.empty(1 << 18)
            self.assertEqual(meter.report().live_bytes, kept.nbytes)
        self.assertEqual(meter.report().peak_bytes, kept.nbytes + (1 << 20))

    def test_limits_end_with_their_own_blocks(self):
        limit = snug.MemoryLimit(snug.live_bytes() + (1 << 20))
        with limit:
            with limit:
                pass
            with self.assertRaises(torch.OutOfMemoryError):
                torch.empty(1 << 20)
        torch.empty(1 << 20)

    def test_is_limited(self):
        model, loss_of = made("mlp")
        before = snug.live_bytes()
        with self.assertRaises(torch.OutOfMemoryError):
            with snug.MemoryLimit(before + (64 << 10)):
                loss_of().backward()
        model.zero_grad()
        self.assertEqual(snug.live_bytes(), before)
        with self.assertRaises(snug.ConfigError):
            with snug.MemoryLimit(1):
                pass
        loss_of().backward()


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
