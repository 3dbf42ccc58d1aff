"""auto_checkpoint around loops that know nothing of it, and estimate_memory."""

import copy
import gc
import logging
import pickle
import tempfile
import unittest
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import snug
from models import Mlp, Transformer

MODELS = {
    "mlp": (lambda: Mlp(layers=8), lambda items: torch.randn(items, 64)),
    "transformer": (Transformer, lambda items: torch.randn(items // 8, 24, 32)),
}


class WithLoss(nn.Module):
    """As models of transformers: the loss comes with the outputs."""

    def __init__(self):
        super().__init__()
        self.body = Mlp(layers=8)

    def forward(self, x, labels=None):
        outputs = self.body(x)
        return {"loss": None if labels is None else F.mse_loss(outputs, labels), "outputs": outputs}


def with_loss(model, x):
    return model(x, labels=x.cos())["loss"]


class Tree(nn.Module):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        self.leaf, self.inner = Mlp(layers=2), nn.Linear(128, 64)

    def forward(self, x, depth=2):
        if depth == 0:
            return self.leaf(x)
        return torch.tanh(self.inner(torch.cat([self(x, depth - 1), self(x + depth, depth - 1)], 1)))


def mean_square(model, x):
    return model(x).square().mean()


def trained(model, batches, loss_of=mean_square, optimizer_of=lambda p: torch.optim.AdamW(p, lr=1e-3), accumulate=1):
    """An ordinary loop. Losses, weights, buffers, optimizer state and generator after it; the most bytes that were alive in
    forward and backward, and the most that these took."""
    torch.manual_seed(7)
    optimizer = optimizer_of(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    found, peak, most = [], 0, 0
    for i, batch in enumerate(batches):
        level = snug.live_bytes()
        with snug.MemoryMeter() as meter:
            loss = loss_of(model, batch)
            (loss / accumulate).backward()
        taken = meter.report().peak_bytes
        peak, most = max(peak, level + taken), max(most, taken)
        found.append(loss.detach())
        if (i + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    found += [*model.parameters(), *model.buffers(), torch.get_rng_state()]
    found += [tensor for state in optimizer.state.values() for tensor in state.values()]
    return [tensor.detach().clone() for tensor in found], peak, most


def made(name="mlp", steps=4, items=512):
    torch.manual_seed(1)
    model_of, batch_of = MODELS[name]
    return model_of(), [batch_of(items) for _ in range(steps)]


def planned_for(model, batches, share, **options):
    """What the plain loop finds, and the same model under a budget with a share of its activations."""
    plain, peak, most = trained(copy.deepcopy(model), batches, **options)
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    gc.collect()
    planned = snug.auto_checkpoint(copy.deepcopy(model), memory_budget=peak - int((1 - share) * (most - gradients)))
    return plain, planned


class Choices(logging.Handler):
    """Counts the plans that are made."""

    def __enter__(self):
        self.count = 0
        logger = logging.getLogger("snug")
        self.level_before = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("snug").removeHandler(self)
        logging.getLogger("snug").setLevel(self.level_before)

    def emit(self, record):
        self.count += 1


class AutoCheckpoint(unittest.TestCase):
    def assertSameBits(self, a, b):
        self.assertEqual(len(a), len(b))
        self.assertTrue(all(torch.equal(x, y) for x, y in zip(a, b)))

    def check(self, model, batches, share=0.6, **options):
        """The loop has the same bits, within the budget. Returns how many plans were made."""
        plain, model = planned_for(model, batches, share, **options)
        with Choices() as choices:
            found, peak, _ = trained(model, batches, **options)
        self.assertSameBits(plain, found)
        self.assertLessEqual(peak, model.auto_checkpoint.memory_budget)
        self.assertGreater(model.auto_checkpoint.plan.replayed_operators, 0)
        return choices.count

    def test_keeps_an_unmodified_loop_within_the_budget_with_the_same_bits(self):
        for name in MODELS:
            with self.subTest(name):
                # Again after the first step, where the optimizer has made its state.
                self.assertEqual(self.check(*made(name)), 2)

    def test_plans_a_loss_that_the_model_computes(self):
        _, batches = made()
        self.check(WithLoss(), batches, loss_of=with_loss)

    def test_leaves_room_for_a_loss_outside_the_model(self):
        model, batches = made(items=256)

        def loss_of(model, x):
            found = model(x)  # which lives on, as in most loops
            return sum(((found + i).exp() * found).mean() for i in range(12))

        self.check(model, batches, share=0.85, loss_of=loss_of)

    def test_keeps_to_the_loop_s_accumulation(self):
        model, batches = made()
        self.check(model, batches, accumulate=2)

    def test_is_made_within_autocast(self):
        model, batches = made(steps=2, items=1024)

        def loss_of(model, x):
            with torch.autocast("cpu", torch.bfloat16):
                return mean_square(model, x)

        self.check(model, batches, share=0.7, loss_of=loss_of)

    def test_casts_weights_in_each_call_of_a_region_of_autocast(self):
        def trained_in_one_region(model, batches):
            with torch.autocast("cpu", torch.bfloat16):
                return trained(model, batches, accumulate=len(batches))

        model, batches = made(items=1024)
        plain, peak, most = trained_in_one_region(copy.deepcopy(model), batches)
        gc.collect()
        budget = peak - (most - sum(p.nbytes for p in model.parameters())) // 3
        snug.auto_checkpoint(model, memory_budget=budget)
        with Choices() as choices, warnings.catch_warnings():
            warnings.simplefilter("error")
            planned, planned_peak, _ = trained_in_one_region(model, batches)
        self.assertSameBits(plain, planned)
        self.assertLessEqual(planned_peak, budget)
        self.assertEqual(choices.count, 2)
        self.assertGreater(model.auto_checkpoint.plan.replayed_operators, 0)

    def test_goes_backward_to_what_is_before_the_model(self):
        _, batches = made()
        model, before = Mlp(layers=8), nn.Linear(64, 64)

        def loss_of(model, x):
            before.zero_grad()
            return mean_square(model, before(x))

        plain, model = planned_for(model, batches, 0.7, loss_of=loss_of)
        gradient = before.weight.grad.clone()
        found, _, _ = trained(model, batches, loss_of=loss_of)
        self.assertSameBits(plain, found)
        self.assertTrue(torch.equal(before.weight.grad, gradient))

    def test_plans_again_for_larger_batches_and_not_for_smaller_ones(self):
        _, (x, y, *_) = made()
        batches = [x[:100], x, y[:100], y[:7], y]
        options = {"loss_of": with_loss, "optimizer_of": lambda p: torch.optim.SGD(p, lr=1e-3)}
        model = WithLoss()
        plain, _, _ = trained(copy.deepcopy(model), batches, **options)
        with Choices() as choices:
            found, _, _ = trained(snug.auto_checkpoint(model, memory_budget="1GiB"), batches, **options)
            self.assertEqual(choices.count, 2)
        self.assertSameBits(plain, found)

    def test_plans_for_smaller_batches_that_take_other_operators(self):
        class Branching(Mlp):
            def forward(self, x):
                return super().forward(x if x.shape[0] > 200 else x.flip(0).tanh()).square().mean()

        model, x = snug.auto_checkpoint(Branching(), memory_budget="1GiB"), torch.randn(256, 64)
        with Choices() as choices:
            for items in (256, 100, 256, 100, 100):
                model(x[:items]).backward()
                model.zero_grad()
            self.assertEqual(choices.count, 2)
        self.assertEqual(model.auto_checkpoint.plan.deviation, "")

    def test_plans_the_step_that_it_has_measured_the_loss_in_for_speed_afterwards(self):
        model, (x, *_) = made()
        snug.auto_checkpoint(model, memory_budget="1GiB")
        replayed = []
        for _ in range(3):
            mean_square(model, x).backward()
            model.zero_grad()
            replayed.append(model.auto_checkpoint.plan.replayed_operators)
        self.assertGreater(replayed[0], 0)
        self.assertEqual(replayed[1:], [0, 0])

    def test_is_around_what_torch_compile_returns_and_says_where_it_is_inside(self):
        _, (x, *_) = made()
        results = []
        for around in (lambda model: torch.compile(model, backend="aot_eager"),
                       lambda model: snug.auto_checkpoint(torch.compile(model, backend="aot_eager"), memory_budget="1GiB"),
                       lambda model: torch.compile(snug.auto_checkpoint(model, memory_budget="1GiB"), backend="aot_eager")):
            torch._dynamo.reset()
            torch.manual_seed(1)
            model = Mlp(layers=2, dropout=0)
            run = around(model)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                losses = [mean_square(run, x) for _ in range(2)]
            results.append((losses, any("other operators than were planned" in str(one.message) for one in told)))
        (plain, _), (outside, told_outside), (inside, told_inside) = results
        self.assertSameBits(plain, outside)
        self.assertSameBits(plain, inside)
        self.assertEqual((told_outside, told_inside), (False, True))

    def test_takes_a_model_that_calls_itself(self):
        _, batches = made()
        self.check(Tree(), batches, share=0.8)

    def test_tells_the_budget_that_would_do(self):
        x, model = torch.randn(512, 64), snug.auto_checkpoint(WithLoss(), memory_budget=1000)
        with self.assertRaisesRegex(snug.BudgetExceeded, "memory_budget is 0.0 MiB; .* alive before forward") as raised:
            model(x, labels=x)
        least = raised.exception.smallest_feasible
        del raised
        snug.auto_checkpoint(model, memory_budget=least)
        for _ in range(2):  # the first one plans
            model.zero_grad()
            level = snug.live_bytes()
            with snug.MemoryMeter() as meter:
                model(x, labels=x)["loss"].backward()
        self.assertLessEqual(level + meter.report().peak_bytes, least)
        with self.assertRaisesRegex(ValueError, "12 apples"):
            snug.auto_checkpoint(model, memory_budget="12 apples")
        with self.assertRaisesRegex(snug.ConfigError, "a function is no torch.nn.Module"):
            snug.auto_checkpoint(lambda x: x, memory_budget="1GiB")

    def test_leaves_a_model_as_it_was(self):
        model, (x, *_) = made()
        names, forward = list(model.state_dict()), model.forward
        self.assertIs(snug.auto_checkpoint(model, memory_budget="1GiB"), model)
        self.assertIn("no step was made", str(model.auto_checkpoint))
        self.assertEqual((list(model.state_dict()), model.forward), (names, forward))
        with torch.no_grad():
            model(x)
        self.assertIsNone(model.auto_checkpoint.plan)
        mean_square(model, x).backward()
        self.assertIn("rebuilt", str(model.auto_checkpoint))
        first = model.auto_checkpoint
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            self.assertIsNone(twin.auto_checkpoint.plan)
            mean_square(twin, x).backward()
            self.assertIsNotNone(twin.auto_checkpoint.plan)
            self.assertIs(model.auto_checkpoint, first)
        snug.auto_checkpoint(model, memory_budget="2GiB").auto_checkpoint.remove()
        self.assertFalse(model._forward_hooks or model._forward_pre_hooks)

    def test_leaves_nothing_behind_a_forward_pass_that_raised(self):
        model, (x, *_) = made()
        model = snug.auto_checkpoint(nn.Sequential(model, nn.Linear(64, 1)), memory_budget="1GiB")
        mean_square(model, x).backward()
        model.zero_grad()
        gc.collect()
        level, weight = snug.live_bytes(), model[1].weight
        del model[1].weight
        with self.assertRaises(AttributeError):
            model(x)
        with self.assertRaises(AttributeError):
            model(x.repeat(2, 1))  # while it plans
        model[1].weight = weight
        gc.collect()
        self.assertEqual(snug.live_bytes(), level)
        mean_square(model, x).backward()

    def test_refuses_a_model_without_outputs_to_go_backward_from(self):
        class Nothing(Mlp):
            def forward(self, x):
                return super().forward(x).detach()

        with self.assertRaisesRegex(snug.ConfigError, "returns no tensor that requires a gradient"):
            snug.auto_checkpoint(Nothing(), memory_budget="1GiB")(torch.randn(8, 64))


class EstimateMemory(unittest.TestCase):
    def check(self, optimizer_of):
        model, batches = made(steps=3)
        optimizer = optimizer_of(model.parameters())
        torch.manual_seed(3)
        generator = torch.get_rng_state()
        estimate = snug.estimate_memory(lambda: mean_square(model, batches[0]), optimizer)
        self.assertTrue(torch.equal(torch.get_rng_state(), generator))
        peak = 0
        for x in batches:
            level = snug.live_bytes()
            with snug.MemoryMeter() as meter:
                mean_square(model, x).backward()
            peak = max(peak, level + meter.report().peak_bytes)
            optimizer.step()
            optimizer.zero_grad()
        self.assertEqual(estimate.total_bytes, peak)
        self.assertTrue(estimate.fits(estimate.total_bytes) and not estimate.fits(estimate.total_bytes - 1))
        self.assertTrue(estimate.fits(estimate.least_bytes, planned=True))
        self.assertFalse(estimate.fits(estimate.least_bytes - 1, planned=True))
        self.assertLess(estimate.least_bytes, estimate.total_bytes)
        self.assertIn("optimizer state to come", str(estimate))
        self.assertEqual(snug.estimate_memory(lambda: mean_square(model, batches[0]), optimizer).optimizer_bytes, 0)

    def test_is_the_peak_of_the_loop_with_the_optimizers_state(self):
        self.check(lambda p: torch.optim.AdamW(p, lr=1e-3))
        self.check(lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9))
        self.check(lambda p: snug.AdamW8bit(p, min_elements=256))


def on_rank(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model, batches = made(items=256 * (rank + 1))  # the ranks have other plans
    plain, peak, most = trained(DistributedDataParallel(copy.deepcopy(model)), batches)
    budget = peak + sum(tensor.nbytes for tensor in plain) - most // 3  # with the results of the plain loop
    for planned in (lambda one: DistributedDataParallel(snug.auto_checkpoint(one, budget)),
                    lambda one: snug.auto_checkpoint(DistributedDataParallel(one), budget)):
        gc.collect()
        found, peak, _ = trained(planned(copy.deepcopy(model)), batches)
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True)), "the same bits"
        assert peak <= budget, f"{peak} bytes, of {budget}"
        del found
    dist.destroy_process_group()


class OnRanks(unittest.TestCase):
    def test_keeps_inside_and_outside_of_distributed_data_parallel_to_the_budget(self):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(on_rank, (folder,), nprocs=2)


class OwnCheckpoints(unittest.TestCase):
    def test_of_a_model_are_told_where_they_are_planned(self):
        class Checkpointing(Mlp):
            gradient_checkpointing = False

            def forward(self, x):
                run = super().forward
                return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False) if self.gradient_checkpointing else run(x)

        model, x = Checkpointing(layers=2), torch.randn(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0)
        for plan in (lambda: snug.plan(lambda: mean_square(model, x), "1GiB"),
                     lambda: snug.Stepper(model, optimizer, "1GiB").step(x, lambda x: mean_square(model, x))):
            model.gradient_checkpointing = True
            with self.assertWarnsRegex(UserWarning, "Checkpointing .*gradient_checkpointing_disable"):
                plan()
            model.gradient_checkpointing = False
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                plan()


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
