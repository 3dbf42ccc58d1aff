"""snug's C interface from Python's ctypes, without torch: python/snug has more where there is torch.

usage: python3 snug_c.py libsnug_c.so.1 MODEL.pt2        trains on numbers that it makes up
"""

import array
import ctypes
import random
import sys

FLOAT32, INT64 = 1, 5
BUDGET_EXCEEDED = 5


class Array(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("sizes", ctypes.POINTER(ctypes.c_int64)), ("dimensions", ctypes.c_size_t),
                ("dtype", ctypes.c_int)]


class Step(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("loss", ctypes.c_double), ("grad_norm", ctypes.c_double), ("seconds", ctypes.c_double),
                ("stepped", ctypes.c_int64), ("micro_batches", ctypes.c_int64), ("items", ctypes.c_int64), ("peak_bytes", ctypes.c_int64)]


class SnugError(RuntimeError):
    def __init__(self, status, text, smallest_budget):
        super().__init__(text)
        self.status, self.smallest_budget = status, smallest_budget


class Snug:
    """The functions of snug/c.h; a status that is not 0 is raised as SnugError."""

    def __init__(self, library):
        self.library = ctypes.CDLL(library)
        for name in ("snug_last_error", "snug_model_tensor_name", "snug_stepper_explain"):
            getattr(self.library, name).restype = ctypes.c_char_p
        for name in ("snug_last_smallest_budget", "snug_live_bytes"):
            getattr(self.library, name).restype = ctypes.c_int64
        self.library.snug_model_tensor_count.restype = ctypes.c_size_t

    def __call__(self, name, *arguments):
        """Calls snug_NAME, which returns a status."""
        status = getattr(self.library, "snug_" + name)(*arguments)
        if status != 0:
            raise SnugError(status, self.library.snug_last_error().decode(), self.library.snug_last_smallest_budget())

    def load(self, file):
        model = ctypes.c_void_p()
        self("model_load", str(file).encode(), ctypes.byref(model))
        return model

    def stepper(self, model, **settings):
        texts = [f"{name}={value}".encode() for name, value in settings.items()]
        stepper = ctypes.c_void_p()
        self("stepper_new", model, (ctypes.c_char_p * (len(texts) + 1))(*texts, None), ctypes.byref(stepper))
        return stepper

    def step(self, stepper, inputs):
        result = Step(size=ctypes.sizeof(Step))
        self("stepper_step", stepper, inputs, ctypes.c_size_t(len(inputs)), ctypes.byref(result))
        return result

    def free(self, kind, handle):
        getattr(self.library, f"snug_{kind}_free")(handle)


def arrays(*values):
    """For each (data, sizes, dtype): data is an array.array, which must live as long as the result is used."""
    result = (Array * len(values))()
    for one, (data, sizes, dtype) in zip(result, values):
        one.data, one.sizes = data.buffer_info()[0], (ctypes.c_int64 * len(sizes))(*sizes)
        one.dimensions, one.dtype = len(sizes), dtype
    return result


def main(library, file):
    snug = Snug(library)
    model = snug.load(file)
    stepper = snug.stepper(model, optimizer="adamw", lr=1e-2, memory="64MiB")
    random.seed(1)
    x, y = array.array("f"), array.array("q")
    for _ in range(64):
        row = [random.uniform(-1, 1) for _ in range(16)]
        x.extend(row)
        y.append(row.index(max(row[:4])))
    batch = arrays((x, (64, 16), FLOAT32), (y, (64,), INT64))
    for step in range(50):
        result = snug.step(stepper, batch)
        if step % 10 == 9:
            print(f"step {step + 1}  loss {result.loss:.6f}")
    snug("model_save_weights", model, b"trained.safetensors")
    snug.free("stepper", stepper)
    snug.free("model", model)


if __name__ == "__main__":
    main(*sys.argv[1:])
