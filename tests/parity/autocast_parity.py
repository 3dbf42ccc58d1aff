"""The types that operators return under snug::Autocast against torch.autocast("cpu"), for every operator that LibTorch has a kernel of CPU
autocast for, and for some more that it leaves alone. And under fp32_reductions: every operator that snug adds a kernel for gives FP32,
among them are all that CUDA's autocast runs in FP32, and nothing of the CPU's own lists changes.

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

from autocast_cases import more_operators, reductions  # noqa: E402

NAMES = {torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half", torch.float64: "Double", torch.bool: "Bool",
         torch.int64: "Long", torch.int32: "Int", torch.uint8: "Byte", torch.complex64: "ComplexFloat"}


def full_call(name, arguments, keywords):
    """(name, overload, every argument of the schema)."""
    packet, _, overload = name.partition(".")
    name = f"aten::{packet}"
    overload = overload or torch._C._jit_resolve_packet(name, *arguments, **keywords)
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
    packet, _, overload = name.partition(".")
    operator = getattr(torch.ops.aten, packet)
    with torch.autocast("cpu", dtype):
        try:
            outputs = (getattr(operator, overload) if overload else operator)(*arguments, **keywords)
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


def cuda_fp32(dtype):
    """What CUDA's autocast runs in FP32."""
    lists = AutocastTestLists("cpu")
    lowered = lambda a: a.to(dtype) if isinstance(a, torch.Tensor) and a.dtype == torch.float16 else a  # noqa: E731
    for entry in lists.torch_fp32 + lists.nn_fp32:
        arguments, keywords = tuple(map(lowered, entry[1])), entry[2] if len(entry) > 2 else {}
        if entry[0] == "norm" and "dim" in keywords:  # Python's torch.norm is a function of its own
            arguments, keywords = (arguments[0], keywords.get("p", 2), [keywords["dim"]]), {}
        yield entry[0], arguments, keywords


def operators_of(calls, answers):
    """The operators of the calls that were no errors, but for oneDNN's on processors that it has no 16-bit kernel for."""
    return {name + ("." + overload if overload else "")
            for (name, overload, _), answer in zip(calls, answers)
            if not answer.startswith("error") or "could not create a primitive" in answer}


def compare(calls, expected, found, what):
    assert len(found) == len(calls), (len(found), len(calls))
    for call, theirs, ours in zip(calls, expected, found):
        same = ours.startswith("error") if theirs.startswith("error") else ours == theirs
        if not same:
            sys.exit(f"{what}: {call[0]}.{call[1]} {call[2]}: expected {theirs}, snug gives {ours}")
    errors = sum(theirs.startswith("error") for theirs in expected)
    print(f"{what}: {len(calls)} calls of {len({call[0] for call in calls})} operators equal, {errors} of them errors")


def check_complete(what, wanted, called):
    if wanted - called:
        sys.exit(f"{what}: no call here of {', '.join(sorted(wanted - called))}; add one to autocast_cases.py")
    print(f"{what}: all {len(wanted)} called")


# CUDA's autocast runs these in 16 bits, or in the widest type of their inputs.
NOT_FP32_ON_CUDA = {"aten::" + name for name in (
    "_convolution convolution cudnn_convolution cudnn_convolution_transpose _scaled_dot_product_flash_attention _thnn_fused_gru_cell "
    "_thnn_fused_lstm_cell addmv addr chain_matmul einsum gru_cell linalg_multi_dot lstm_cell mv rnn_relu_cell rnn_tanh_cell addcdiv "
    "addcmul atan2 bilinear cross dot index_put scatter_add tensordot vdot").split()}


if __name__ == "__main__":
    tool = sys.argv[1]
    torch.manual_seed(0)
    registered = {key: set(torch._C._dispatch_get_registrations_for_dispatch_key("Autocast" + key)) for key in ("CPU", "CUDA")}
    added = set(subprocess.run([tool, "--fp32-reductions"], capture_output=True, text=True, check=True).stdout.split())
    if missing := registered["CUDA"] - registered["CPU"] - added - NOT_FP32_ON_CUDA:
        sys.exit(f"fp32_reductions lacks {', '.join(sorted(missing))}, which CUDA's autocast knows")
    called, called_in_fp32 = set(), set()
    for low_dtype in (torch.bfloat16, torch.float16):
        entries = list(cpu_lists(low_dtype))
        count = len(entries)
        entries += more_operators(low_dtype)
        calls = [full_call(*entry) for entry in entries]
        reference = [python_types(entry, low_dtype) for entry in entries]
        compare(calls, reference, snug_types(tool, calls, low_dtype), f"{low_dtype}")
        called |= operators_of(calls, reference)
        in_full = snug_types(tool, calls[:count], low_dtype, "fp32_reductions")
        compare(calls[:count], reference[:count], in_full, f"{low_dtype}, fp32_reductions, CPU's lists")
        in_fp32 = [full_call(*entry) for entry in [*cuda_fp32(low_dtype), *reductions(low_dtype)]]
        in_full = snug_types(tool, in_fp32, low_dtype, "fp32_reductions")
        all_float = [" ".join(["Float"] * len(answer.split())) for answer in in_full]
        compare(in_fp32, all_float, in_full, f"{low_dtype}, fp32_reductions, FP32's list")
        called_in_fp32 |= operators_of(in_fp32, in_full)
    check_complete("CPU autocast", registered["CPU"], called)
    check_complete("fp32_reductions", added, called_in_fp32)
