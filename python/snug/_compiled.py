"""A forward pass that torch.compile has compiled with inductor runs as one operator, snug::compiled_region: a plan sees the tensors that go
in and come out, drops what came out, and runs the region again."""

import contextlib
import functools
import importlib
import sys
import threading
import weakref

import torch
from torch import Tensor

_library = torch.library.Library("snug", "FRAGMENT")  # a CUDA build of the library defines operators, too
_library.define("compiled_region(int region, Device device, Tensor?[] tensors, Tensor(a!)[] written, int[] numbers, *, "
                "Generator? generator=None) -> Tensor[]", tags=[torch.Tag.nondeterministic_seeded])
_regions = weakref.WeakValueDictionary()  # by id()
_SEAM = torch._C._parse_dispatch_key("Fake")  # on which snug sees operators
_of_thread = threading.local()  # results: gets what the next region returns


def show_compiled_regions() -> None:
    """For all regions, whenever compiled. Nothing is done as long as nothing in the process uses torch.compile."""
    if "torch._dynamo" not in sys.modules:
        return
    region = importlib.import_module("torch._inductor.output_code").CompiledFxGraph
    run = region.__call__
    if hasattr(run, "of_snug"):
        return

    @functools.wraps(run)
    def shown(self, inputs):
        if not torch._C._dispatch_tls_is_dispatch_key_included(_SEAM) or not _can_run_again(self, inputs):
            return run(self, inputs)
        _regions[id(self)] = self
        written = [inputs[i] for i in sorted(self.mutated_input_idxs)]
        tensors = [one if isinstance(one, Tensor) and i not in self.mutated_input_idxs else None for i, one in enumerate(inputs)]
        numbers = [one for one in inputs if not isinstance(one, Tensor)]
        device = next(one.device for one in inputs if isinstance(one, Tensor))
        inputs.clear()
        _of_thread.results = results = []
        try:
            torch.ops.snug.compiled_region(id(self), device, tensors, written, numbers)
        finally:
            del _of_thread.results
        return results

    def compiled_region(region, device, tensors, written, numbers, generator=None):
        region, written, numbers = _regions[region], iter(written), iter(numbers)
        inputs = [one if one is not None else next(written if i in region.mutated_input_idxs else numbers) for i, one in enumerate(tensors)]
        memory = [torch._C._storage_address(one) for one in inputs if isinstance(one, Tensor)]
        with _drawing_from(generator):
            returned = run(region, inputs)
        if hasattr(_of_thread, "results"):  # also what is no tensor, or on memory that went in
            _of_thread.results.extend(returned)
        came_out = {torch._C._storage_address(one): one for one in returned if isinstance(one, Tensor)}
        return [one for address, one in came_out.items() if address not in memory]

    shown.of_snug = True
    region.__call__ = shown
    _library.impl("compiled_region", compiled_region, "CompositeExplicitAutograd")


def _can_run_again(region, inputs):
    options = region.fx_kwargs
    is_forward = not options.get("is_backward") and not options.get("cudagraphs")
    return is_forward and any(isinstance(one, Tensor) for one in inputs) and all(isinstance(one, (Tensor, int)) for one in inputs)


@contextlib.contextmanager
def _drawing_from(generator):
    """The default generator has the state of `generator`, unless that is None."""
    if generator is None:
        yield
        return
    device = generator.device
    default = torch.default_generator if device.type == "cpu" else torch.get_device_module(device).default_generators[device.index]
    state = default.get_state()
    default.set_state(generator.get_state())
    try:
        yield
    finally:
        default.set_state(state)
