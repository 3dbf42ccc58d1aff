"""Training through snug/c.h, from ctypes in a process without torch, has the bits of Python's; so do plans and snapshots.

usage: train_test.py LIBRARY TRAIN_C
       train_test.py --make FOLDER        with torch: the models, batches and what Python finds
"""

import array
import ctypes
import json
import math
import mmap
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STEPS, LR = 4, 1e-2


def write_safetensors(file, tensors):
    """`tensors`: name to (sizes, floats)."""
    header, data = {}, b""
    for name, (sizes, floats) in tensors.items():
        more = array.array("f", floats).tobytes()
        header[name] = {"dtype": "F32", "shape": sizes, "data_offsets": [len(data), len(data) + len(more)]}
        data += more
    text = json.dumps(header).encode()
    pathlib.Path(file).write_bytes(len(text).to_bytes(8, "little") + text + data)


def on_threads(*functions, stack=0):
    """Runs them at once. What they raise is raised here."""
    errors = []

    def run(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    before = threading.stack_size(stack)
    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    threading.stack_size(before)
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


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
    wide = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())]
    saved("wide", nn.Linear(16, 256), *wide, nn.Linear(256, 4))
    saved("without_dropout", nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    tied = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    tied[2].weight = tied[0].weight
    snug_export.save(tied, (torch.randn(4, 16),), folder / "tied.pt2")
    torch.manual_seed(5)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=LR, fused=True), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    outputs = [nn.functional.cross_entropy(model(x), y).item()]
    state = {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}
    (folder / "found.json").write_text(json.dumps({"x": x.flatten().tolist(), "y": y.tolist(), "losses": losses, "outputs": outputs, "state": state}))


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

    def tensors(self, model):
        """Of all, name to (sizes, floats)."""
        result = {}
        for i in range(snug.library.snug_model_tensor_count(model)):
            name, tensor = snug.library.snug_model_tensor_name(model, ctypes.c_size_t(i)), snug_c.Array()
            snug("model_tensor", model, name, ctypes.byref(tensor))
            self.assertEqual(tensor.dtype, snug_c.FLOAT32)
            sizes = [tensor.sizes[k] for k in range(tensor.dimensions)]
            result[name.decode()] = sizes, list((ctypes.c_float * math.prod(sizes)).from_address(tensor.data))
        return result

    def state(self, model=None):
        return {name: floats for name, (_, floats) in self.tensors(model or self.model).items()}

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

    def test_is_planned_before_it_begins(self):
        peak = ctypes.c_int64(-1)
        snug("stepper_plan", self.stepper(), BATCH, ctypes.c_size_t(2), ctypes.byref(peak))
        self.assertEqual(peak.value, 0)  # there is no budget
        with tempfile.TemporaryDirectory() as folder:
            budget = snug.library.snug_live_bytes() + (4 << 20)
            stepper = self.stepper(memory=budget, plan_folder=folder, micro_batch=512)
            snug("stepper_plan", stepper, BATCH, ctypes.c_size_t(2), ctypes.byref(peak))
            self.assertTrue(0 < peak.value <= budget)
            self.assertEqual(len(list(pathlib.Path(folder).iterdir())), 1)
            self.assertEqual(self.train(stepper, 1)[0].loss, FOUND["losses"][0])

    def test_keeps_nothing_of_the_arrays_that_it_was_given(self):
        stepper, losses = self.stepper(memory=snug.library.snug_live_bytes() + (4 << 20), micro_batch=512), []
        snug("manual_seed", ctypes.c_uint64(5))
        for _ in range(STEPS):
            memory = mmap.mmap(-1, len(X) * X.itemsize)
            memory.write(X.tobytes())
            batch = snug_c.arrays((X, (512, 16), snug_c.FLOAT32), (Y, (512,), snug_c.INT64))
            batch[0].data = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            losses.append(snug.step(stepper, batch).loss)
            memory.close()  # who reads it from now on ends the process
        self.assertEqual(losses, FOUND["losses"])

    def test_on_a_small_stack_and_freed_on_another_thread(self):
        stepper = snug.stepper(self.model, lr=LR, memory=snug.library.snug_live_bytes() + (4 << 20), micro_batch=512)
        found, meter = [], ctypes.c_void_p()
        snug("meter_new", ctypes.byref(meter))
        on_threads(lambda: found.extend(self.train(stepper)), stack=512 << 10)
        on_threads(lambda: snug.free("stepper", stepper), lambda: snug.free("meter", meter))
        self.assertEqual([step.loss for step in found], FOUND["losses"])

    def test_of_two_models_at_once_has_the_bits_of_one(self):
        models = [snug.load(FOLDER / "without_dropout.pt2") for _ in range(3)]
        steppers, before = [snug.stepper(model, lr=LR) for model in models], self.state(models[0])
        self.train(steppers[0], 20, seed=None)
        on_threads(*[lambda stepper=stepper: self.train(stepper, 20, seed=None) for stepper in steppers[1:]])
        self.assertNotEqual(self.state(models[0]), before)
        for model in models:
            self.assertEqual(self.state(model), self.state(models[0]))
        for model, stepper in zip(models, steppers):
            snug.free("model", model)
            self.train(stepper, 1, seed=None)  # the stepper keeps it alive
            snug.free("stepper", stepper)

    def test_takes_settings(self):
        stepper, before = self.stepper(optimizer="sgd", momentum=0.9, weight_decay=0.1), self.state()
        snug("stepper_set_lr", stepper, ctypes.c_double(0))
        self.train(stepper, 1)
        self.assertEqual(self.state(), before)
        for lr in (-1, math.inf, math.nan):
            self.refuses(2, "lr is", lambda: snug("stepper_set_lr", stepper, ctypes.c_double(lr)))
        usual = self.train(self.stepper(), 3)
        others = [dict(beta1=0.5), dict(beta2=0.5), dict(eps=1), dict(weight_decay=10), dict(optimizer="adam", weight_decay=1)]
        weights = FOLDER / "before.safetensors"
        for settings in others:
            with self.subTest(settings):
                write_safetensors(weights, {name: (sizes, before[name]) for name, (sizes, _) in self.tensors(self.model).items()})
                snug("model_load_weights", self.model, str(weights).encode())
                self.assertNotEqual(self.train(self.stepper(**settings), 3)[2].loss, usual[2].loss)

    def test_tells_a_caller_what_it_has_room_for(self):
        stepper, small = self.stepper(), snug_c.Step(size=0)
        self.refuses(2, "size of result", lambda: snug("stepper_step", stepper, BATCH, ctypes.c_size_t(2), ctypes.byref(small)))
        small.size, small.grad_norm = snug_c.Step.grad_norm.offset, -1  # of a version that had the loss alone
        snug("manual_seed", ctypes.c_uint64(5))
        snug("stepper_step", stepper, BATCH, ctypes.c_size_t(2), ctypes.byref(small))
        self.assertEqual((small.loss, small.grad_norm), (FOUND["losses"][0], -1))

        class Later(ctypes.Structure):
            _fields_ = [("known", snug_c.Step), ("more", ctypes.c_int64)]

        later = Later(snug_c.Step(size=ctypes.sizeof(Later)), 7)
        snug("stepper_step", stepper, BATCH, ctypes.c_size_t(2), ctypes.byref(later))
        self.assertEqual((later.known.items, later.known.size, later.more), (512, ctypes.sizeof(Later), 7))
        snug("stepper_step", stepper, BATCH, ctypes.c_size_t(2), None)

    def test_that_does_not_fit_changes_nothing(self):
        before = self.state()
        budget = snug.library.snug_live_bytes() + 300_000
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


class Offload(CTest):
    """Weights, gradients and the optimizer's state outside of memory: six weights of 256 KiB."""

    WEIGHT, ITEMS = 4 * 256 * 256, 16

    def steps_of(self, model, folder, **settings):
        """What four steps found, the text of the plan, and the file of the weights."""
        stepper = snug.stepper(model, lr=LR, clip_norm=0.5, **settings)
        x, y = X[:16 * self.ITEMS], Y[:self.ITEMS]
        batch = snug_c.arrays((x, (self.ITEMS, 16), snug_c.FLOAT32), (y, (self.ITEMS,), snug_c.INT64))
        found = [snug.step(stepper, batch) for _ in range(STEPS)]
        file = pathlib.Path(folder) / "weights.safetensors"
        snug("model_save_weights", model, str(file).encode())
        plan = snug.library.snug_stepper_explain(stepper).decode()
        snug.free("stepper", stepper)
        return [(step.loss, step.grad_norm) for step in found], max(step.peak_bytes for step in found), plan, file.read_bytes()

    def test_to_files_and_to_the_host_has_the_bits_of_plain_training(self):
        ctypes.CDLL(os.environ["SNUG_SIM_DEVICE"])
        with tempfile.TemporaryDirectory() as folder:
            for name in ("8bit", ""):
                plain = snug.load(FOLDER / "wide.pt2")
                expected, _, _, weights = self.steps_of(plain, folder, optimizer=f"adamw{name}")
                snug.free("model", plain)
                for device, offload in (("cpu", folder), ("sim:0", "")):
                    with self.subTest(f"adamw{name} on {device}"):
                        model = snug.load(FOLDER / "wide.pt2")
                        budget = 5 * self.WEIGHT + snug.library.snug_live_bytes() - 6 * self.WEIGHT if device == "cpu" else 5 * self.WEIGHT
                        if device != "cpu":
                            snug("model_move_with_weights_on_host", model, device.encode())
                        found, peak, plan, file = self.steps_of(model, folder, optimizer=f"adamw{name}", memory=budget,
                                                                offload=offload, micro_batch=self.ITEMS)
                        self.assertEqual(found, expected)
                        self.assertTrue(file == weights)
                        self.assertLessEqual(peak, budget)
                        self.assertIn("eights and gradients are in", plan)
                        if device != "cpu":
                            self.refuses(2, "on sim:0", lambda: snug("model_tensor", model, b"0.bias", ctypes.byref(snug_c.Array())))
                        snug.free("model", model)

    def test_of_a_model_is_told_what_cannot_be(self):
        self.refuses(2, "'gpu' is no device", lambda: snug("model_to", self.model, b"gpu"))
        self.refuses(2, "the device is the CPU", lambda: snug("model_move_with_weights_on_host", self.model, b"cpu"))
        self.stepper()
        self.refuses(2, "before a stepper is made", lambda: snug("model_to", self.model, b"cpu"))


# In a new process, which has no torch: signals that are caught, variables and threads, before the library is there and
# after; then while a planned step has run, and when the library was closed.
LOOKS_AROUND = """
import array, ctypes, os, sys
sys.path.insert(0, sys.argv[2])
import snug_c
def caught_and_set():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    environ, texts = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ"), []
    while environ[len(texts)] is not None:
        texts.append(environ[len(texts)])
    return status["SigCgt"], status["SigIgn"], status["SigBlk"], sorted(texts)
def threads():
    return len(os.listdir("/proc/self/task"))
before = caught_and_set()
snug = snug_c.Snug(sys.argv[1])
assert snug.library.snug_c_version() == 1
assert threads() == 1, threads()
snug("set_threads", 1)
model = snug.load(sys.argv[3])
stepper = snug.stepper(model, memory=snug.library.snug_live_bytes() + (4 << 20))
x, y = array.array("f", [0.5] * 512 * 16), array.array("q", [1] * 512)
assert snug.step(stepper, snug_c.arrays((x, (512, 16), snug_c.FLOAT32), (y, (512,), snug_c.INT64))).loss > 0
assert caught_and_set() == before, (before, caught_and_set())
assert threads() == 1, threads()
close = ctypes.CDLL(None).dlclose
close.argtypes = [ctypes.c_void_p]
assert close(snug.library._handle) == 0
assert "libsnug." in open("/proc/self/maps").read()
"""


class Loading(unittest.TestCase):
    def test_leaves_signals_variables_and_threads_as_they_are(self):
        subprocess.run([sys.executable, "-c", LOOKS_AROUND, LIBRARY, ROOT / "examples" / "c", FOLDER / "model.pt2"], check=True)


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

    def test_load_weights_of_several_files_by_their_index(self):
        with tempfile.TemporaryDirectory() as name:
            folder, weight_map = pathlib.Path(name), {}
            halves = {n: (sizes, [0.5] * len(floats)) for n, (sizes, floats) in self.tensors(self.model).items()}
            for i, (tensor, values) in enumerate(halves.items()):
                weight_map[tensor] = f"{i}.safetensors"
                write_safetensors(folder / weight_map[tensor], {tensor: values})
            index = folder / "model.safetensors.index.json"
            index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
            snug("model_load_weights", self.model, str(index).encode())
            self.assertEqual(self.tensors(self.model), halves)

    def test_take_the_weights_that_they_have_and_no_others(self):
        tied = snug.load(FOLDER / "tied.pt2")
        self.addCleanup(lambda: snug.free("model", tied))
        tensors = self.tensors(tied)
        self.assertEqual(sorted(tensors), ["0.bias", "0.weight", "2.bias"])
        sizes, floats = tensors["0.weight"]
        halves = {**tensors, "0.weight": (sizes, [0.5] * len(floats))}
        file = FOLDER / "weights.safetensors"

        def load(weights):
            write_safetensors(file, weights)
            snug("model_load_weights", tied, str(file).encode())

        self.refuses(2, "'more', which the model lacks", lambda: load({**halves, "more": halves["0.bias"]}))
        self.refuses(2, "no tensor '2.bias'", lambda: load({n: t for n, t in halves.items() if n != "2.bias"}))
        self.refuses(2, "'0.bias' has another type", lambda: load({**halves, "0.bias": ([15], [0.5] * 15)}))
        self.assertEqual(self.tensors(tied), tensors)
        load({name.replace("0.weight", "2.weight"): tensor for name, tensor in halves.items()})
        self.assertEqual(self.tensors(tied), halves)
        stepper = snug.stepper(tied)
        self.addCleanup(lambda: snug.free("stepper", stepper))
        self.refuses(2, "no loss", lambda: snug.step(stepper, snug_c.arrays((X, (4, 16), snug_c.FLOAT32))))

    def test_compute_outputs(self):
        self.train(self.stepper())
        snug("model_train", self.model, 0)
        results = ctypes.c_void_p()
        snug("model_forward", self.model, BATCH, ctypes.c_size_t(2), ctypes.byref(results))
        loss = snug_c.Array()
        snug("results_get", results, ctypes.c_size_t(0), ctypes.byref(loss))
        self.assertEqual(loss.dimensions, 0)
        self.assertEqual([ctypes.c_float.from_address(loss.data).value], FOUND["outputs"])
        self.refuses(2, "no result 1", lambda: snug("results_get", results, ctypes.c_size_t(1), ctypes.byref(loss)))
        snug.free("results", results)

    def test_refuse_what_does_not_fit(self):
        stepper = self.stepper()
        flat = snug_c.arrays((X, (8192,), snug_c.FLOAT32), (Y, (512,), snug_c.INT64))
        self.refuses(2, "8192 and 512", lambda: snug.step(stepper, flat))
        wide = snug_c.arrays((X, (128, 64), snug_c.FLOAT32), (Y, (128,), snug_c.INT64))
        self.refuses(2, "64 in dimension 1", lambda: snug.step(stepper, wide))
        long = snug_c.arrays((X, (512, 16), snug_c.FLOAT32), (Y, (512,), snug_c.FLOAT32))
        self.refuses(2, "'target' is Float, but was Long", lambda: snug.step(stepper, long))
        off = snug_c.arrays((X, (16, 16), snug_c.FLOAT32), (Y, (16,), snug_c.INT64))
        off[0].data += 1
        self.refuses(2, "multiple of its type's size", lambda: snug.step(stepper, off))
        self.refuses(2, "1 arrays", lambda: snug.step(stepper, snug_c.arrays((X, (512, 16), snug_c.FLOAT32))))
        self.refuses(2, "dtype 77", lambda: snug.step(stepper, snug_c.arrays((X, (512, 16), 77), (Y, (512,), snug_c.INT64))))
        self.refuses(2, "-1", lambda: snug.step(stepper, snug_c.arrays((X, (-1, 16), snug_c.FLOAT32), (Y, (512,), snug_c.INT64))))
        self.refuses(2, "momentun", lambda: self.stepper(momentun=0.9))
        self.refuses(2, "eps is '1,5'", lambda: self.stepper(eps="1,5"))
        self.refuses(2, "beta1", lambda: self.stepper(beta1="nan"))
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
