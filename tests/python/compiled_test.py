"""Plans for regions that torch.compile has compiled with inductor: each forward pass of a region is an operator that runs again."""

import unittest

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import snug
from plan_test import same_bits, trained

ITEMS, WIDTH, BLOCKS = 512, 32, 4


class Block(nn.Module):
    def __init__(self, normal):
        super().__init__()
        self.wide, self.narrow, self.normal, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), normal, nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.narrow(torch.tanh(self.wide(self.normal(x)).exp())))


class Compiled(nn.Module):
    """Blocks that are compiled one by one."""

    def __init__(self, normal, **options):
        super().__init__()
        self.blocks = nn.ModuleList([Block(normal(WIDTH)) for _ in range(BLOCKS)])
        self.compiled = [torch.compile(block, **options) for block in self.blocks]
        self.checkpoints = False

    def forward(self, x):
        for block in self.compiled:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x.square().mean()


def made(normal, **options):
    torch.manual_seed(1)
    torch._dynamo.reset()
    return Compiled(normal, **options), torch.randn(ITEMS, WIDTH)


def smallest(loss_of):
    try:
        return snug.plan(loss_of, 1)
    except snug.BudgetExceeded as error:
        return snug.plan(loss_of, error.smallest_feasible)


class CompiledRegions(unittest.TestCase):
    def test_run_again_in_the_memory_of_checkpointed_blocks_with_the_same_bits(self):
        for options in {}, {"dynamic": True}:
            with self.subTest(options):
                model, x = made(nn.LayerNorm, **options)
                loss_of = lambda: model(x)
                trained(model, loss_of)  # which compiles it
                plain, plain_peak = trained(model, loss_of)
                model.checkpoints = True
                trained(model, loss_of)
                _, checkpointed_peak = trained(model, loss_of)
                model.checkpoints = False
                for plan in snug.plan(loss_of, checkpointed_peak), snug.plan(loss_of, (plain_peak + checkpointed_peak) // 2), smallest(loss_of):
                    planned, peak = trained(model, loss_of, plan)
                    self.assertTrue(same_bits(plain, planned))
                    self.assertEqual(peak, plan.peak_bytes)
                    self.assertEqual(plan.deviation, "")
                    self.assertGreater(plan.replayed_operators, 0)

    def test_may_be_compiled_while_they_are_planned(self):
        model, x = made(nn.LayerNorm)
        plan = smallest(lambda: model(x))
        planned, peak = trained(model, lambda: model(x), plan)
        self.assertTrue(same_bits(trained(model, lambda: model(x))[0], planned))
        self.assertEqual(peak, plan.peak_bytes)

    def test_that_write_buffers_are_kept(self):
        model, x = made(nn.BatchNorm1d)
        loss_of = lambda: model(x)
        trained(model, loss_of)
        plain, _ = trained(model, loss_of)
        plan = smallest(loss_of)
        planned, peak = trained(model, loss_of, plan)
        self.assertTrue(same_bits(plain, planned))
        self.assertLessEqual(peak, plan.peak_bytes)

    def test_are_planned_by_auto_checkpoint(self):
        model, x = made(nn.LayerNorm)
        trained(model, lambda: model(x))
        plain, plain_peak = trained(model, lambda: model(x))
        before = snug.live_bytes()
        snug.auto_checkpoint(model, before + plain_peak * 3 // 4)
        trained(model, lambda: model(x))  # which plans
        planned, peak = trained(model, lambda: model(x))
        self.assertTrue(same_bits(plain, planned))
        self.assertLessEqual(peak, plain_peak * 3 // 4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
