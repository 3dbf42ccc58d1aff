"""What planning puts back of a model that replaces, adds, removes and resizes its buffers, and models that it refuses."""

import copy
import gc
import random
import unittest
import weakref

import numpy
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import snug
from models import KINDS, Mlp


class Replaced(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("calls", None, persistent=False)

    def forward(self, x):
        self.calls = torch.ones(()) if self.calls is None else self.calls + 1
        self.mean.mul_(0.9)
        self.mean = self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean / self.calls


class Added(nn.Module):
    def forward(self, x):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.detach().mean(0))
            self.register_buffer("scale", torch.ones(()), persistent=False)
        self.scale = self.scale * 0.9
        self.mean.mul_(1.1)
        return (x - self.mean) * self.scale


class Removed(nn.Module):
    """And what is registered again is the last one then."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.full((64,), 3.0))
        self.register_buffer("second", torch.ones(()), persistent=False)
        self.register_buffer("third", torch.ones(()))

    def forward(self, x):
        if isinstance(self.first, torch.Tensor):
            x = x + self.first
            del self.first
            self.first = "was used"
        again = self.second * 1.25
        del self.second
        self.register_buffer("second", again)
        return x * self.second


class Resized(nn.Module):
    """One for `out`, and one that grows with each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("room", torch.empty(0))
        self.register_buffer("seen", torch.empty(0))

    def forward(self, x):
        torch.add(x[:1].detach(), 1, out=self.room)
        with torch.no_grad():
            count = self.seen.numel()
            self.seen.resize_(count + 64)
            self.seen[count:] = x[0]
        return x + self.room / 2 + self.seen[:64] / self.seen.numel()


KEEPERS = [Replaced, Added, Removed, Resized]


class Model(nn.Module):
    def __init__(self, keeper):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(keeper(), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)])

    def forward(self, x):
        return self.blocks(x)


def problem(keeper):
    torch.manual_seed(1)
    return Model(keeper), [torch.randn(256, 64) + 3 for _ in range(4)]


def loss_of(model, x):
    return model(x).square().mean()


def sgd(model, make=torch.optim.SGD):
    return make(model.parameters(), lr=1e-3)


def by_hand(model, batches, plan=None, make=torch.optim.SGD):
    optimizer, losses = sgd(model, make), []
    for x in batches:
        optimizer.zero_grad()
        if plan is None:
            loss = loss_of(model, x)
        else:
            with plan:
                loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def kept(model):
    """Names, in their order, which of them a state_dict has, and values."""
    return {"persistent": list(model.state_dict()), "buffers": {name: b.tolist() for name, b in model.named_buffers()},
            "order": [name for name, _ in model.named_buffers()], "parameters": [p.tolist() for p in model.parameters()]}


def budget_for(model, x):
    """Two thirds of what the activations take."""
    probe = copy.deepcopy(model)
    result = snug.Stepper(probe, torch.optim.SGD(probe.parameters(), lr=0)).step(x, lambda x: loss_of(probe, x))
    own = sum(t.nbytes for t in [*probe.parameters(), *probe.buffers()])
    del probe
    gc.collect()
    return result.peak_bytes - own - result.activation_peak_bytes // 3


def stepper_for(model, x):
    return snug.Stepper(model, sgd(model), memory=budget_for(model, x), micro_batch=len(x))


def for_each_keeper(check):
    """Each in a frame of its own, so that budgets have nothing of the one before."""

    def test(self):
        for keeper in KEEPERS:
            with self.subTest(keeper.__name__):
                gc.collect()
                check(self, keeper)

    return test


class Buffers(unittest.TestCase):
    @for_each_keeper
    def test_are_as_before_a_plan_and_training_under_it_has_plain_trainings_bits(self, keeper):
        model, batches = problem(keeper)
        plain = copy.deepcopy(model)
        before, tensors = kept(model), list(model.buffers())
        largest = snug.plan(lambda: loss_of(model, batches[0]), "1GiB")
        plan = snug.plan(lambda: loss_of(model, batches[0]), largest.peak_bytes * 2 // 3)
        snug.curve(lambda: loss_of(model, batches[0]), 3)
        self.assertEqual(kept(model), before)
        self.assertTrue(all(a is b for a, b in zip(model.buffers(), tensors)))
        self.assertEqual(by_hand(model, batches, plan), by_hand(plain, batches))
        self.assertEqual(kept(model), kept(plain))
        self.assertLess(plan.peak_bytes, largest.peak_bytes)

    @for_each_keeper
    def test_of_a_stepper_that_plans_are_those_of_the_plain_loop(self, keeper):
        model, batches = problem(keeper)
        plain = copy.deepcopy(model)
        stepper = stepper_for(model, batches[0])
        losses = [stepper.step(x, lambda x: loss_of(model, x)).loss for x in batches]
        self.assertEqual(losses, by_hand(plain, batches))
        self.assertEqual(kept(model), kept(plain))
        self.assertIn("rebuilt", stepper.plan)

    @for_each_keeper
    def test_are_put_back_after_a_step_that_failed(self, keeper):
        model, batches = problem(keeper)
        plain = copy.deepcopy(model)
        stepper = stepper_for(model, batches[0])

        def broken(x):
            loss_of(model, x)
            raise KeyError("mine")

        losses = []
        for x in batches:
            before, tensors = kept(model), list(model.buffers())
            with self.assertRaisesRegex(KeyError, "mine"):
                stepper.step(x, broken)
            self.assertEqual(kept(model), before)
            self.assertTrue(all(a is b for a, b in zip(model.buffers(), tensors)))
            losses.append(stepper.step(x, lambda x: loss_of(model, x)).loss)
        self.assertEqual(losses, by_hand(plain, batches))

    @for_each_keeper
    def test_are_put_back_before_a_step_is_made_again(self, keeper):
        model, batches = problem(keeper)
        plain = copy.deepcopy(model)
        stepper, calls = stepper_for(model, batches[0]), []

        def out_of_memory_once(x):
            calls.append(1)
            loss = loss_of(model, x)
            if len(calls) == 1:
                torch.empty(1 << 30, dtype=torch.uint8)
            return loss

        # The second step may have other operators than the first, and the third may plan for them.
        losses = [stepper.step(x, lambda x: loss_of(model, x)).loss for x in batches[:3]]
        again = stepper.step(batches[3], out_of_memory_once)
        self.assertEqual(again.step_downs, 1)
        losses.append(again.loss)
        self.assertEqual(losses, by_hand(plain, batches))
        self.assertEqual(kept(model), kept(plain))

    def test_that_were_replaced_are_not_kept_alive(self):
        for memory in (None, "1GiB"):
            model, batches = problem(Replaced)
            stepper = snug.Stepper(model, sgd(model), memory=memory)
            for x in batches:
                before = [weakref.ref(b) for b in model.buffers()]
                stepper.step(x, lambda x: loss_of(model, x))
                self.assertEqual([one() for one in before], [None] * len(before))

    def test_that_are_replaced_take_no_more_than_predicted(self):
        model, batches = problem(Replaced)
        plan = snug.plan(lambda: loss_of(model, batches[0]), "1GiB")
        with snug.MemoryMeter() as meter:
            with plan:
                loss = loss_of(model, batches[0])
            loss.backward()
        replaced = sum(b.nbytes for b in model.buffers())
        self.assertLessEqual(meter.report().peak_bytes, plan.peak_bytes)
        self.assertGreaterEqual(meter.report().peak_bytes, plan.peak_bytes - replaced)

    def test_of_a_module_beside_the_model_are_put_back_by_plan(self):
        """A Stepper knows the model alone."""
        model, batches = problem(nn.Identity)
        beside = Replaced()
        before = [b.clone() for b in beside.buffers()]
        snug.plan(lambda: loss_of(model, beside(batches[0])), "1GiB")
        self.assertIsNone(beside.calls)
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(before, beside.buffers())))


def scripted():
    return torch.jit.script(Scripted())


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class BuffersOfTorchScript(unittest.TestCase):
    def test_are_put_back(self):
        model, batches = problem(scripted)
        plain = copy.deepcopy(model)
        everything = snug.plan(lambda: loss_of(model, batches[0]), "1GiB")
        plan = snug.plan(lambda: loss_of(model, batches[0]), everything.peak_bytes * 2 // 3)
        self.assertEqual(kept(model), kept(plain))
        self.assertEqual(by_hand(model, batches, plan), by_hand(plain, batches))


class OfFsdp(FullyShardedDataParallel):
    """Which cannot be made without an accelerator."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self._fsdp_wrapped_module = module

    def forward(self, x):
        return self._fsdp_wrapped_module(x)


class ShardedModels(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    @classmethod
    def tearDownClass(cls):
        dist.destroy_process_group()

    def fully_sharded(self):
        torch.manual_seed(1)
        model = nn.Sequential(Mlp(dropout=0, layers=1), Mlp(dropout=0, layers=1))
        return fully_shard(nn.Sequential(fully_shard(model)))

    def gradients(self, model, x):
        model.zero_grad()
        loss_of(model, x).backward()
        result = [p.grad.to_local().clone() for p in model.parameters()]
        model.zero_grad()
        return result

    def test_are_refused_by_plan(self):
        x = torch.randn(32, 64)
        for model in (self.fully_sharded(), OfFsdp(Mlp())):
            with self.subTest(type(model).__name__):
                for call in (lambda: snug.plan(lambda: loss_of(model, x), "1GiB"), lambda: snug.curve(lambda: loss_of(model, x))):
                    with self.assertRaisesRegex(snug.ConfigError, "is sharded by FSDP"):
                        call()

    def test_are_refused_by_a_stepper_that_plans(self):
        for model in (self.fully_sharded(), nn.Sequential(OfFsdp(Mlp()))):
            with self.subTest(type(model).__name__):
                with self.assertRaisesRegex(snug.ConfigError, "is sharded by FSDP"):
                    snug.Stepper(model, sgd(model), memory="1GiB")

    def test_train_after_the_refusal_as_before(self):
        model, x = self.fully_sharded(), torch.randn(32, 64)
        plain = self.gradients(model, x)
        with self.assertRaises(snug.ConfigError):
            snug.plan(lambda: loss_of(model, x), "1GiB")
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(plain, self.gradients(model, x))))

    def test_train_within_a_limit_that_is_not_planned_for(self):
        plain, model, x = self.fully_sharded(), self.fully_sharded(), torch.randn(32, 64)
        stepper = snug.Stepper(model, sgd(model), memory="1GiB", plan=False)
        losses = [stepper.step(x, lambda x: loss_of(model, x)).loss for _ in range(3)]
        self.assertEqual(losses, by_hand(plain, [x] * 3))

    def test_beside_another_that_is_planned_are_left_alone(self):
        sharded, x = self.fully_sharded(), torch.randn(32, 64)
        model = Mlp()
        snug.plan(lambda: loss_of(model, x), "1GiB")
        self.assertEqual(len(self.gradients(sharded, x)), 8)


class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = 1e-3 * random.random() * numpy.random.random()
        super().step(closure)


class RandomNumbers(unittest.TestCase):
    def test_that_an_optimizer_draws_are_those_of_the_plain_loop(self):
        """A Stepper has a copy of it make a step, to see its state."""
        model, batches = problem(nn.Identity)
        plain = copy.deepcopy(model)
        random.seed(2), numpy.random.seed(2)
        losses = by_hand(plain, batches, make=Noisy)
        random.seed(2), numpy.random.seed(2)
        stepper = snug.Stepper(model, sgd(model, Noisy), memory="1GiB", plan=False)
        self.assertEqual([stepper.step(x, lambda x: loss_of(model, x)).loss for x in batches], losses)


class ForwardDerivatives(unittest.TestCase):
    """By torch.func.jvp, and by dual numbers."""

    @staticmethod
    def dual(model, x):
        with forward_ad.dual_level():
            y, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
            return y.square().mean() + tangent.square().mean()

    def test_have_plain_trainings_bits_in_a_stepper_that_plans(self):
        for name, loss_of in {"dual": self.dual, "jvp": KINDS["jvp"], "hessian": KINDS["hessian"]}.items():
            with self.subTest(name):
                torch.manual_seed(1)
                model, x = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())]), torch.randn(256, 64)
                plain = copy.deepcopy(model)
                optimizer = sgd(plain)
                for _ in range(2):
                    optimizer.zero_grad()
                    loss_of(plain, x).backward()
                    optimizer.step()
                probe = copy.deepcopy(model)
                result = snug.Stepper(probe, sgd(probe)).step(x, lambda x: snug.Loss.whole(loss_of(probe, x)))
                stepper = snug.Stepper(model, sgd(model), memory=result.peak_bytes - result.activation_peak_bytes // 8)
                for _ in range(2):
                    stepper.step(x, lambda x: snug.Loss.whole(loss_of(model, x)))
                self.assertTrue(all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters())))


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
