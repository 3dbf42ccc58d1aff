"""Exports the models of models.py, trains them in Python, and runs a program that finds both in the folder SNUG_EXPORTED_MODELS.

usage: with_models.py [--zoo] PROGRAM [ARGUMENT...]

  --zoo   the models of zoo.py instead
"""

import importlib
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "python")]
ZOO, PROGRAM = sys.argv[1:2] == ["--zoo"], [argument for argument in sys.argv[1:] if argument != "--zoo"]

try:
    import torch
    from safetensors.torch import save_file

    models = importlib.import_module("zoo" if ZOO else "models")
except ModuleNotFoundError as missing:
    if missing.name not in ("torch", "safetensors", "torchvision", "timm", "transformers"):
        raise
    print(f"skipped: {missing}")
    sys.exit(77)

import snug_export  # noqa: E402

ITEMS, BATCHES = 8, {"same": (8, 8, 8, 8), "other": (11, 1, 5, 8), "micro": (8, 8, 8, 8)}
MICRO_BATCH = 4


def loss_in(result):
    return result["loss"] if isinstance(result, dict) else result


def named(tensors):
    """Clones, tied tensors once, as a file of safetensors wants them."""
    found = {}
    for name, tensor in tensors:
        if all(tensor is not other for _, other in found.values()):
            found[name] = (tensor.detach().clone().contiguous(), tensor)
    return {name: clone for name, (clone, _) in found.items()}


def backward(model, batch, micro_batch):
    """The mean of the micro-batches' losses, which have one size."""
    parts = list(zip(*(tensor.split(micro_batch) for tensor in batch)))
    loss = 0
    for part in parts:
        own = loss_in(model(*part)) / len(parts)
        own.backward()
        loss = loss + own.detach()
    return loss


def train(name, batches, prefix):
    model = models.build(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    torch.manual_seed(1234)
    found = {}
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        found[f"{prefix}.loss{step}"] = backward(model, batch, MICRO_BATCH if prefix == "micro" else len(batch[0]))
        if step == 0:
            gradients = named((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
            found |= {f"{prefix}.gradient.{n}": t for n, t in gradients.items()}
        optimizer.step()
    found |= {f"{prefix}.state.{n}": t for n, t in named(model.state_dict(keep_vars=True).items()).items()}
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{prefix}.optimizer.{index}.{n}": t for n, t in state.items()}
    found[f"{prefix}.generator"] = torch.get_rng_state()
    with torch.no_grad():
        found[f"{prefix}.eval"] = loss_in(model.eval()(*batches[0])).clone()
    return found


def export(name, folder):
    inputs = models.MODELS[name][1]
    batch = torch.export.Dim("batch", max=64)
    generator = torch.Generator().manual_seed(5)
    example = inputs(ITEMS, generator)
    shapes = tuple({0: batch} for _ in example)
    snug_export.save(models.build(name), example, folder / f"{name}.pt2", dynamic_shapes=shapes, source_lines=name == "mlp")
    found = {}
    for prefix, sizes in BATCHES.items():
        batches = [inputs(items, generator) for items in sizes]
        found |= {f"{prefix}.input{s}.{i}": t.clone() for s, batch in enumerate(batches) for i, t in enumerate(batch)}
        found |= train(name, batches, prefix)
    save_file(found, folder / f"{name}.safetensors")


def main():
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(os.environ.get("SNUG_EXPORTED_MODELS", temporary))
        folder.mkdir(exist_ok=True)
        for name in models.MODELS:
            export(name, folder)
        if PROGRAM:
            environment = {**os.environ, "SNUG_EXPORTED_MODELS": str(folder)}
            sys.exit(subprocess.run(PROGRAM, env=environment).returncode)


if __name__ == "__main__":
    main()
