"""What python/snug_export.py refuses, and that it leaves no trace then. Skipped where Python has no torch.

usage: snug_export_test.py [unittest arguments]
"""

import pathlib
import sys
import tempfile
import unittest

try:
    import torch
    from torch import nn
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2] / "python")]

import snug_export  # noqa: E402


class NoGradInAutocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                target = self.teacher(x)
            return (self.student(x) - target).float().square().mean()


class Doubled(torch.autograd.Function):
    """Its backward is not that of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class OwnBackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return Doubled.apply(self.norm(self.layer(x))).square().mean()


class OtherwiseWhileExported(nn.Module):
    """As attention of transformers is: the same values but for rounding."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x).square()
        return (y / 3 if torch.compiler.is_exporting() else y * (1 / 3)).mean()


class Refusals(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "model.pt2"

    def refuses(self, model, error, says):
        model.train()
        next(model.children()).eval()
        model(torch.ones(3, 4)).backward()
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        modes, generator = [module.training for module in model.modules()], torch.get_rng_state()
        with self.assertRaisesRegex(error, says):
            snug_export.save(model, (torch.randn(3, 4, generator=torch.Generator().manual_seed(1)),), self.path)
        self.assertFalse(self.path.exists())
        self.assertTrue(all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items()))
        self.assertTrue(all(gradients[name] is parameter.grad for name, parameter in model.named_parameters()))
        self.assertEqual(modes, [module.training for module in model.modules()])
        self.assertTrue(torch.equal(generator, torch.get_rng_state()))
        self.assertNotIn("forward", vars(model))

    def test_no_grad_inside_autocast_is_refused(self):
        self.refuses(NoGradInAutocast(), snug_export.ExportDiffers, "teacher.*autocast")

    def test_an_own_backward_is_refused(self):
        self.refuses(OwnBackward(), snug_export.ExportDiffers, "gradient of .*autograd.Function")

    def test_a_model_that_computes_in_another_way_while_it_is_exported_is_refused_with_the_difference(self):
        self.refuses(OtherwiseWhileExported(), snug_export.ExportDiffers, r"by up to .*e-0[78] of .*torch.compiler.is_exporting")

    def test_a_tolerance_accepts_rounding_and_no_more(self):
        torch.manual_seed(1)
        model, inputs = OtherwiseWhileExported(), (torch.randn(3, 4),)
        with self.assertRaises(snug_export.ExportDiffers):
            snug_export.save(model, inputs, self.path, tolerance=1e-9)
        snug_export.save(model, inputs, self.path, tolerance=1e-6)
        self.assertTrue(self.path.read_bytes().startswith(b"PK"))
        with self.assertRaises(snug_export.ExportDiffers):
            snug_export.save(NoGradInAutocast(), inputs, self.path, tolerance=1e-6)

    def test_an_export_under_no_grad_is_refused(self):
        model = nn.Linear(4, 1)
        with torch.no_grad(), self.assertRaisesRegex(RuntimeError, "no_grad"):
            snug_export.save(model, (torch.ones(3, 4),), self.path)
        self.assertFalse(self.path.exists())

    def test_other_names_and_inputs_are_refused(self):
        with self.assertRaisesRegex(ValueError, "model.pt does not end in .pt2"):
            snug_export.save(nn.Linear(4, 1), (torch.ones(3, 4),), self.path.with_suffix(".pt"))
        with self.assertRaisesRegex(ValueError, "a list; give a tuple"):
            snug_export.save(nn.Linear(4, 1), [torch.ones(3, 4)], self.path)
        self.assertEqual(list(self.path.parent.iterdir()), [])

    def test_a_disk_that_is_full_leaves_the_file_that_was_there(self):
        self.path.write_text("before")
        package = snug_export.package_pt2

        def fails(file, **programs):
            package(file, **programs)
            raise OSError("no space left on device")

        snug_export.package_pt2 = fails
        try:
            with self.assertRaisesRegex(OSError, "no space"):
                snug_export.save(nn.Linear(4, 1), (torch.ones(3, 4),), self.path)
        finally:
            snug_export.package_pt2 = package
        self.assertEqual(self.path.read_text(), "before")
        self.assertEqual(list(self.path.parent.iterdir()), [self.path])

    def test_what_it_takes_is_written(self):
        model = nn.Linear(4, 1)
        model.forward = own = lambda x: nn.functional.linear(x, model.weight, model.bias)
        self.path.write_text("before")
        snug_export.save(model, (torch.ones(3, 4), torch.ones(3, 1)), str(self.path), loss=nn.functional.mse_loss)
        self.assertTrue(self.path.read_bytes().startswith(b"PK"))
        self.assertIs(model.forward, own)


if __name__ == "__main__":
    unittest.main()
