"""Training through snug/c.h, from ctypes in a process without torch, has the bits of Python's; so do plans and snapshots.

usage: train_test.py LIBRARY TRAIN_C
       train_test.py --make FOLDER        with torch: the models, batches and what Python finds
"""

import array
import ctypes
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STEPS, LR = 4, 1e-2


def make(folder):
    try:
        import torch
        from torch import nn
    except ImportError:
        sys.exit(77)
    sys.path.insert(0, str(ROOT / "python"))
    import snug_export

    def saved(name, *layers):
        torch.manual_seed(1)
        model = nn.Sequential(*layers)
        x, y = torch.randn(512, 16), torch.randint(4, (512,))
        batch = torch.export.Dim("batch", max=1024)
        shapes = ({0: batch}, {0: batch})
        snug_export.save(model, (x, y), folder / f"{name}.pt2", loss=nn.functional.cross_entropy, dynamic_shapes=shapes)
        return model, x, y

    blocks = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
    model, x, y = saved("model", nn.Linear(16, 64), *blocks, nn.Linear(64, 4))
    saved("without_dropout", nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    torch.manual_seed(5)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=LR, fused=True), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}
    (folder / "found.json").write_text(json.dumps({"x": x.flatten().tolist(), "y": y.tolist(), "losses": losses, "state": state}))


class CTest(unittest.TestCase):
    def setUp(self):
        self.model = snug.load(FOLDER / "model.pt2")
        self.addCleanup(lambda: snug.free("model", self.model))

    def stepper(self, **settings):
        stepper = snug.stepper(self.model, lr=LR, **settings)
        self.addCleanup(lambda: snug.free("stepper", stepper))
        return stepper

    def train(self, stepper, steps=STEPS, seed=5):
        if seed is not None:
            snug("manual_seed", ctypes.c_uint64(seed))
        return [snug.step(stepper, BATCH) for _ in range(steps)]

    def state(self):
        result = {}
        for i in range(snug.library.snug_model_tensor_count(self.model)):
            name, tensor = snug.library.snug_model_tensor_name(self.model, ctypes.c_size_t(i)), snug_c.Array()
            snug("model_tensor", self.model, name, ctypes.byref(tensor))
            self.assertEqual(tensor.dtype, snug_c.FLOAT32)
            items = 1
            for k in range(tensor.dimensions):
                items *= tensor.sizes[k]
            result[name.decode()] = list((ctypes.c_float * items).from_address(tensor.data))
        return result

    def refuses(self, status, says, call):
        with self.assertRaises(snug_c.SnugError) as raised:
            call()
        self.assertEqual(raised.exception.status, status, raised.exception)
        self.assertIn(says, str(raised.exception))
        return raised.exception


class Training(CTest):
    def test_has_pythons_bits(self):
        self.assertEqual([step.loss for step in self.train(self.stepper())], FOUND["losses"])
        self.assertEqual(self.state(), FOUND["state"])

    def test_within_a_budget_has_them_too(self):
        plainly = snug.stepper(self.model, lr=LR)
        plain = max(step.peak_bytes for step in self.train(plainly))
        snug.free("stepper", plainly)
        budget = plain * 7 // 10
        snug.free("model", self.model)
        self.model = snug.load(FOLDER / "model.pt2")
        stepper = self.stepper(memory=budget, micro_batch=512)
        found = self.train(stepper)
        self.assertEqual([step.loss for step in found], FOUND["losses"])
        self.assertLessEqual(max(step.peak_bytes for step in found), budget)
        self.assertIn("rebuilt", snug.library.snug_stepper_explain(stepper).decode())
        self.assertEqual(self.state(), FOUND["state"])

    def test_that_does_not_fit_changes_nothing(self):
        before = self.state()
        budget = snug.library.snug_live_bytes() + 100_000
        error = self.refuses(snug_c.BUDGET_EXCEEDED, "", lambda: self.train(self.stepper(memory=budget), 1))
        self.assertGreater(error.smallest_budget, budget)
        limit = ctypes.c_void_p()
        snug("limit_new", ctypes.c_int64(snug.library.snug_live_bytes() + 100_000), ctypes.byref(limit))
        self.refuses(4, "MemoryLimit", lambda: self.train(self.stepper(), 1))
        snug.free("limit", limit)
        self.assertEqual(self.state(), before)
        self.assertEqual([step.loss for step in self.train(self.stepper())], FOUND["losses"])

    def test_goes_on_from_a_snapshot(self):
        with tempfile.TemporaryDirectory() as folder:
            stepper, step = self.stepper(), ctypes.c_int64()
            snug("stepper_load", stepper, folder.encode(), ctypes.byref(step))
            self.assertEqual(step.value, -1)
            self.train(stepper, 2)
            snug("stepper_save", stepper, folder.encode(), ctypes.c_int64(2))
            self.train(stepper, 1, seed=None)
            again = self.stepper()
            snug("stepper_load", again, folder.encode(), ctypes.byref(step))
            self.assertEqual(step.value, 2)
            self.assertEqual([one.loss for one in self.train(again, 2, seed=None)], FOUND["losses"][2:])
            self.assertEqual(self.state(), FOUND["state"])

    def test_on_two_threads_does_not_mix_errors(self):
        texts = {}

        def fail(name):
            for _ in range(20):
                try:
                    snug.load(name)
                except snug_c.SnugError as error:
                    texts.setdefault(name, set()).add(name in str(error))

        threads = [threading.Thread(target=fail, args=(name,)) for name in ("one.pt2", "two.pt2")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(texts, {"one.pt2": {True}, "two.pt2": {True}})

    def test_of_the_example_in_c_lowers_the_loss(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([TRAIN_C, FOLDER / "without_dropout.pt2"], cwd=folder, capture_output=True, text=True, check=True)
            losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
            self.assertEqual(len(losses), 5)
            self.assertLess(losses[-1], 0.5 * losses[0])
            self.assertTrue((pathlib.Path(folder) / "trained.safetensors").exists())


# In a new process, which has no torch: signals that are caught, and variables, before the library is there and after.
LOOKS_AROUND = """
import ctypes, sys
def caught_and_set():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    environ, texts = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ"), []
    while environ[len(texts)] is not None:
        texts.append(environ[len(texts)])
    return status["SigCgt"], status["SigIgn"], status["SigBlk"], sorted(texts)
before = caught_and_set()
library = ctypes.CDLL(sys.argv[1])
assert library.snug_c_version() == 1
assert caught_and_set() == before, (before, caught_and_set())
"""


class Loading(unittest.TestCase):
    def test_leaves_signals_and_the_environment_as_they_are(self):
        subprocess.run([sys.executable, "-c", LOOKS_AROUND, LIBRARY], check=True)


class Models(CTest):
    def test_keep_their_weights_in_files(self):
        before = self.state()
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/weights.safetensors".encode()
            snug("model_save_weights", self.model, file)
            self.train(self.stepper(), 1)
            self.assertNotEqual(self.state(), before)
            snug("model_load_weights", self.model, file)
            self.assertEqual(self.state(), before)
            other = snug.load(FOLDER / "without_dropout.pt2")
            self.refuses(2, "weights.safetensors", lambda: snug("model_load_weights", other, file))
            snug.free("model", other)

    def test_compute_outputs(self):
        snug("model_train", self.model, 0)
        results = ctypes.c_void_p()
        snug("model_forward", self.model, BATCH, ctypes.c_size_t(2), ctypes.byref(results))
        loss = snug_c.Array()
        snug("results_get", results, ctypes.c_size_t(0), ctypes.byref(loss))
        self.assertEqual(loss.dimensions, 0)
        self.assertGreater(ctypes.c_float.from_address(loss.data).value, 0)
        self.refuses(2, "no result 1", lambda: snug("results_get", results, ctypes.c_size_t(1), ctypes.byref(loss)))
        snug.free("results", results)

    def test_refuse_what_does_not_fit(self):
        stepper = self.stepper()
        flat = snug_c.arrays((X, (8192,), snug_c.FLOAT32), (Y, (512,), snug_c.INT64))
        self.refuses(2, "8192 and 512", lambda: snug.step(stepper, flat))
        self.refuses(2, "1 arrays", lambda: snug.step(stepper, snug_c.arrays((X, (512, 16), snug_c.FLOAT32))))
        self.refuses(2, "dtype 77", lambda: snug.step(stepper, snug_c.arrays((X, (512, 16), 77), (Y, (512,), snug_c.INT64))))
        self.refuses(2, "-1", lambda: snug.step(stepper, snug_c.arrays((X, (-1, 16), snug_c.FLOAT32), (Y, (512,), snug_c.INT64))))
        self.refuses(2, "momentun", lambda: self.stepper(momentun=0.9))
        self.refuses(2, "lion", lambda: self.stepper(optimizer="lion"))
        self.refuses(2, "clip_norm", lambda: self.stepper(clip_norm="much"))
        self.refuses(2, "is null", lambda: snug("stepper_new", None, None, ctypes.byref(ctypes.c_void_p())))


if __name__ == "__main__":
    if sys.argv[1] == "--make":
        make(pathlib.Path(sys.argv[2]))
        sys.exit()
    LIBRARY, TRAIN_C = sys.argv.pop(1), sys.argv.pop(1)
    sys.path.insert(0, str(ROOT / "examples" / "c"))
    import snug_c

    with tempfile.TemporaryDirectory() as folder:
        FOLDER = pathlib.Path(folder)
        made = subprocess.run([sys.executable, __file__, "--make", folder])
        if made.returncode != 0:
            sys.exit(made.returncode)
        FOUND = json.loads((FOLDER / "found.json").read_text())
        X, Y = array.array("f", FOUND["x"]), array.array("q", FOUND["y"])
        snug = snug_c.Snug(LIBRARY)
        snug("set_threads", 1)
        BATCH = snug_c.arrays((X, (512, 16), snug_c.FLOAT32), (Y, (512,), snug_c.INT64))
        unittest.main()
