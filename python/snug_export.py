"""Saves a model for snug::load_exported: its graphs for train() and eval() in one file, the weights once.

    import snug_export
    from torch.export import Dim

    snug_export.save(model, (x, y), "model.pt2", loss=torch.nn.functional.cross_entropy,
                     dynamic_shapes=({0: Dim("batch")}, {0: Dim("batch")}))

Needs torch alone, 2.11 or newer. Nothing is written unless the exported model computes what the model computes, to the bit
(or within a tolerance that you give): torch.export loses torch.no_grad() inside torch.autocast, and the backward() of an autograd.Function, without a word.
"""

import contextlib
import inspect
import math
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.pt2_archive._package import package_pt2


class ExportDiffers(RuntimeError):
    """The exported model computes something else than the model."""


def save(model: torch.nn.Module, example_inputs: tuple[Any, ...], path: str | os.PathLike[str], *, dynamic_shapes: Any = None,
         loss: Callable[[Any, Any], torch.Tensor] | None = None, source_lines: bool = False, sample_inputs: bool = False,
         tolerance: float = 0.0) -> None:
    """Writes `model` to `path`, a name that ends in .pt2. A file that is there is replaced when the new one is whole.

    example_inputs: a tuple of what forward() takes. With `loss` one more, the target: the saved model returns loss(model(*inputs), target).
        Dimensions that may change must be larger than 1 in it.
    dynamic_shapes: as torch.export.export takes it, an entry for each of example_inputs.
    source_lines: keep file names and lines of this machine, for C++'s messages. Off: operators and layers are named all the same.
    sample_inputs: keep example_inputs in the file.
    tolerance: how far an output, gradient or buffer of the exported model may be from the model's, as a share of its largest
        value. Then training in C++ has not the bits of training in Python. 0: the same bits, and nothing else is written.

    Raises ExportDiffers, ValueError for other names and numbers of inputs, and what torch.export raises. Model, gradients and
    random generators are left as they were.
    """
    path = pathlib.Path(path)
    if path.suffix != ".pt2":
        raise ValueError(f"snug_export.save: the name {path} does not end in .pt2, by which snug knows such files")
    if not isinstance(example_inputs, tuple):
        raise ValueError(f"snug_export.save: example_inputs is a {type(example_inputs).__name__}; give a tuple, such as (x, y)")
    if not torch.is_grad_enabled():
        raise RuntimeError("snug_export.save: torch.export drops all regions of no_grad() under no_grad(); call it outside")
    programs = {}
    with _unchanged(model), _returning_loss(model, loss):
        for name, training in (("model", True), ("eval", False)):
            model.train(training)
            program = torch.export.export(model, example_inputs, dynamic_shapes=dynamic_shapes)
            for graph in program.graph_module.modules():
                _clean(graph, source_lines)
            _compare(model, program, example_inputs, training, tolerance)
            if not sample_inputs:
                program._example_inputs = None
            programs[name] = program
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # tensors without bytes: the weights are there by the other graph
        state = programs["eval"].state_dict
        programs["eval"]._state_dict = {name: mode.from_tensor(tensor) for name, tensor in state.items()}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=path.name) as folder:
        package_pt2(pathlib.Path(folder) / path.name, exported_programs=programs)
        os.replace(pathlib.Path(folder) / path.name, path)


@contextlib.contextmanager
def _unchanged(model):
    modes = {module: module.training for module in model.modules()}
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    try:
        with torch.random.fork_rng(), _same_state(model):
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


@contextlib.contextmanager
def _same_state(module):
    """The values of parameters and buffers, those that are not persistent, too."""
    tensors = [*module.parameters(), *module.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before):
                tensor.copy_(value)


@contextlib.contextmanager
def _returning_loss(model, loss):
    """For a while forward() takes a target, too. No module is put around the model, which would change its names."""
    if loss is None:
        yield
        return
    forward, own = model.forward, vars(model).get("forward")

    def forward_with_loss(*inputs):
        return loss(forward(*inputs[:-1]), inputs[-1])

    parameters = [p for p in inspect.signature(forward).parameters.values() if p.default is p.empty]
    target = inspect.Parameter("target", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward_with_loss.__signature__ = inspect.Signature([*parameters, target])
    model.forward = forward_with_loss
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


def _clean(graph, source_lines):
    for node in graph.graph.nodes:
        if node.target is torch.ops.higher_order.wrap_with_autocast:
            # Tracing writes that autocast keeps no weights that it casts. By default it does: other gradients where a weight is used twice.
            node.args = (*node.args[:3], True, *node.args[4:])
        if not source_lines:
            node.meta.pop("stack_trace", None)
    graph.recompile()


def _run(module, inputs, training):
    """All that a step may change: outputs, gradients, buffers, random generator."""
    torch.manual_seed(0)
    module.zero_grad()
    with _same_state(module), torch.set_grad_enabled(training):
        outputs = [t for t in torch.utils._pytree.tree_leaves(module(*inputs)) if isinstance(t, torch.Tensor)]
        differentiable = [t for t in outputs if t.requires_grad]
        if differentiable:
            torch.autograd.backward(differentiable, [_some_gradient(t) for t in differentiable])
        found = {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)}
        found |= {f"gradient of {n}": p.grad for n, p in module.named_parameters() if p.grad is not None}
        found |= {f"buffer {n}": b.detach().clone() for n, b in module.named_buffers()}
        found["random generator"] = torch.get_rng_state()
        leaks = [name for name, buffer in module.named_buffers() if buffer.requires_grad]
    module.zero_grad()
    return found, leaks


def _some_gradient(output):
    return torch.arange(output.numel(), device=output.device).cos().view(output.shape).to(output.dtype)


def _compare(model, program, inputs, training, tolerance):
    expected, _ = _run(model, inputs, training)
    exported = program.module()
    found, leaks = _run(exported, inputs, training)
    constants = {f"buffer {name}" for name, _ in exported.named_buffers()} - expected.keys()
    distances = _distances(expected, found, constants) | {f"gradient of buffer {name}": math.inf for name in leaks}
    distance = max(distances.values(), default=0.0)
    if distance <= tolerance:
        return
    names = list(distances)
    raise ExportDiffers(
        f"snug_export.save: {'train' if training else 'eval'}: the exported model differs in {', '.join(names[:5])}"
        f"{' ...' if len(names) > 5 else ''}{'' if math.isinf(distance) else f', by up to {distance:.1e} of its largest value'}. "
        + _cause(model, found, constants, inputs, training))


def _cause(model, found, constants, inputs, training):
    with mock.patch.multiple(torch.compiler, _is_compiling_flag=True, _is_exporting_flag=True):
        as_exported, _ = _run(model, inputs, training)
    if not _distances(as_exported, found, constants):
        return ("The model asks torch.compiler.is_exporting(), and computes in another way then, as sdpa attention of transformers "
                "does, which may be turned off: model.set_attn_implementation(\"eager\"). Or give a tolerance, which accepts it")
    return ("Known causes: torch.no_grad() inside torch.autocast (put the autocast inside), an autograd.Function (register an "
            "operator), values that change from call to call; or kernels that round in another way, which a tolerance accepts")


def _distances(expected, found, constants):
    """Of all that has other bits: the largest difference, as a share of the largest value; infinity where it cannot be told."""
    names = [*expected, *(name for name in found if name not in expected and name not in constants)]
    return {name: _distance(expected.get(name), found.get(name)) for name in names if not _same(expected.get(name), found.get(name))}


def _distance(a, b):
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype or not (a.is_floating_point() or a.is_complex()):
        return math.inf
    distance = ((a - b).abs().max() / a.abs().max()).item()
    return distance if math.isfinite(distance) else math.inf


def _same(a, b):
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))
