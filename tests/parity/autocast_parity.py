"""The types that operators return under snug::Autocast against torch.autocast("cpu"), for every operator of PyTorch's own lists of what
CPU autocast does, and for some more that it leaves alone. And under fp32_reductions: what PyTorch's lists for CUDA have in FP32 is in
FP32, and nothing of the CPU's lists changes.

usage: autocast_parity.py AUTOCAST_TOOL
"""

import subprocess
import sys
import tempfile
import types

try:
    import torch
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

# The lists are in PyTorch's test code, which wants a package of its own tests.
stand_in = types.ModuleType("torch.testing._internal.common_utils")
stand_in.TEST_WITH_ROCM = False
stand_in.TestCase = object
sys.modules.setdefault(stand_in.__name__, stand_in)
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists  # noqa: E402

NAMES = {torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half", torch.float64: "Double", torch.bool: "Bool",
         torch.int64: "Long", torch.complex64: "ComplexFloat"}


def full_call(name, arguments, keywords):
    """(name, overload, every argument of the schema)."""
    name = f"aten::{name}"
    overload = torch._C._jit_resolve_packet(name, *arguments, **keywords)
    overload = "" if overload == "default" else overload
    schema = torch._C._get_schema(name, overload)
    values = []
    for i, argument in enumerate(schema.arguments):
        value = arguments[i] if i < len(arguments) else keywords.get(argument.name, argument.default_value)
        if value is not None and "List[int]" in str(argument.type) and not isinstance(value, (list, tuple)):
            value = (value,) * (argument.N or 1)
        if isinstance(value, torch.dtype):
            value = {torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}[value]
        values.append(tuple(value) if isinstance(value, list) else value)
    return name, overload, tuple(values)


def python_types(entry, dtype):
    name, arguments, keywords = entry
    with torch.autocast("cpu", dtype):
        try:
            outputs = getattr(torch.ops.aten, name)(*arguments, **keywords)
        except (RuntimeError, NotImplementedError) as error:
            return f"error {error}"
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    return " ".join(NAMES[output.dtype] if isinstance(output, torch.Tensor) else "other" for output in outputs)


def snug_types(tool, calls, dtype, *options):
    with tempfile.NamedTemporaryFile() as file:
        torch.save(tuple(calls), file.name)
        command = [tool, file.name, str(dtype).removeprefix("torch."), *options]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def cpu_lists(dtype):
    """Of PyTorch's lists: every entry as (name, arguments, keywords)."""
    lists = AutocastCPUTestLists("cpu")
    for name in ("torch_16", "torch_fp32", "nn_16", "nn_fp32"):
        for entry in getattr(lists, name):
            arguments = tuple(a.to(dtype) if isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16 else a for a in entry[1])
            yield entry[0], arguments, entry[2] if len(entry) > 2 else {}
    for entry in lists.torch_expect_builtin_promote + lists.torch_need_autocast_promote:
        yield entry[0], entry[1] if dtype == torch.bfloat16 else entry[2], {}


def more_operators(dtype):
    """What those lists lack: the rest of CPU autocast's own lists, and what it leaves in the type of the input."""
    low, full = torch.rand(4, 4, dtype=dtype), torch.rand(4, 4)
    image, volume = torch.rand(2, 4, 8, 8, dtype=dtype), torch.rand(2, 4, 8, 8, 8, dtype=dtype)
    heads = torch.rand(2, 2, 4, 8)
    row = torch.rand(4)
    yield from ((name, (low,), {}) for name in ("exp", "log", "sum", "mean", "norm", "gelu", "relu", "prod", "abs", "sigmoid", "tanh"))
    yield from ((name, (low, 1), {}) for name in ("softmax", "log_softmax", "sum", "cumsum", "prod", "mean"))
    yield "logsumexp", (low, [1]), {}
    yield "layer_norm", (low, [4]), {}
    yield "layer_norm", (low, [4], row, row), {}
    yield "rms_norm", (low, [4]), {}
    yield "group_norm", (image, 2), {}
    yield "batch_norm", (image, None, None, None, None, True, 0.1, 1e-5, False), {}
    yield "cross_entropy_loss", (low, torch.arange(4)), {}
    yield "ctc_loss", (torch.rand(8, 1, 4).log_softmax(2).to(dtype), torch.ones(1, 2, dtype=torch.long), [8], [2]), {}
    yield "kl_div", (low, low), {}
    yield "linalg_vecdot", (full, full), {}
    yield "scaled_dot_product_attention", (heads, heads, heads), {}
    yield "einsum", ("ij,jk->ik", [full, full]), {}
    yield "conv2d", (torch.rand(1, 3, 8, 8), torch.rand(2, 3, 3, 3), None, [1, 1], "same"), {}
    yield "index_copy", (full, 0, torch.tensor([1]), full[:1].to(dtype)), {}
    yield "cdist", (low, low), {}
    yield "quantile", (low, 0.5), {}
    yield "nanquantile", (low, 0.5), {}
    yield "polar", (low, low), {}
    yield "grid_sampler", (image, torch.rand(2, 4, 4, 2, dtype=dtype), 0, 0, False), {}
    yield "stft", (torch.rand(64, dtype=dtype), 16), {"return_complex": True, "window": torch.ones(16, dtype=dtype)}
    yield "replication_pad2d", (image, [1, 1, 1, 1]), {}
    yield "max_pool3d", (volume, [2, 2, 2]), {}
    yield "adaptive_avg_pool3d", (volume, [2, 2, 2]), {}
    yield from ((name, (low,), {}) for name in ("fft_fft", "fft_rfft", "fft_ifft"))
    square = (low + 4 * torch.eye(4, dtype=dtype)).to(dtype)
    symmetric = square @ square.T
    yield from ((name, (square,), {}) for name in ("linalg_inv", "linalg_det", "linalg_qr", "linalg_svdvals", "inverse"))
    yield from ((name, (symmetric,), {}) for name in ("linalg_cholesky", "linalg_eigvalsh"))
    yield "linalg_solve", (square, low), {}


def cuda_fp32(dtype):
    """What CUDA's autocast runs in FP32."""
    lists = AutocastTestLists("cpu")
    lowered = lambda a: a.to(dtype) if isinstance(a, torch.Tensor) and a.dtype == torch.float16 else a  # noqa: E731
    for entry in lists.torch_fp32 + lists.nn_fp32:
        arguments, keywords = tuple(map(lowered, entry[1])), entry[2] if len(entry) > 2 else {}
        if entry[0] == "norm" and "dim" in keywords:  # Python's torch.norm is a function of its own
            arguments, keywords = (arguments[0], keywords.get("p", 2), [keywords["dim"]]), {}
        yield entry[0], arguments, keywords


def compare(calls, expected, found, what):
    assert len(found) == len(calls), (len(found), len(calls))
    for call, theirs, ours in zip(calls, expected, found):
        same = ours.startswith("error") if theirs.startswith("error") else ours == theirs
        if not same:
            sys.exit(f"{what}: {call[0]} {call[1]}: expected {theirs}, snug gives {ours}")
    errors = sum(theirs.startswith("error") for theirs in expected)
    print(f"{what}: {len(calls)} calls of {len({call[0] for call in calls})} operators equal, {errors} of them errors")


if __name__ == "__main__":
    tool = sys.argv[1]
    torch.manual_seed(0)
    for low_dtype in (torch.bfloat16, torch.float16):
        entries = list(cpu_lists(low_dtype))
        count = len(entries)
        entries += more_operators(low_dtype)
        calls = [full_call(*entry) for entry in entries]
        reference = [python_types(entry, low_dtype) for entry in entries]
        compare(calls, reference, snug_types(tool, calls, low_dtype), f"{low_dtype}")
        in_full = snug_types(tool, calls[:count], low_dtype, "fp32_reductions")
        compare(calls[:count], reference[:count], in_full, f"{low_dtype}, fp32_reductions, CPU's lists")
        on_cuda = [full_call(*entry) for entry in cuda_fp32(low_dtype)]
        in_full = snug_types(tool, on_cuda, low_dtype, "fp32_reductions")
        compare(on_cuda, ["Float"] * len(on_cuda), in_full, f"{low_dtype}, fp32_reductions, CUDA's list")
