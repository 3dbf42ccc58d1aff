"""Files written by snug load in Python's safetensors, and the other way round; also several files with an index.

usage: safetensors_parity.py PARITY_TOOL
"""

import json
import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

DTYPES = [
    "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64",
]  # fmt: skip


def known_tensors():
    """What parity_tool's known_tensors() holds."""
    count = torch.arange(6).view(2, 3)
    tensors = {name: count.to(getattr(torch, name)) for name in DTYPES}
    tensors["bool"] = (count % 2).to(torch.bool)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(3, 0)
    tensors["transposed"] = count.to(torch.float32).t().contiguous()
    return tensors


def check(found, expected):
    assert sorted(found) == sorted(expected), sorted(set(found) ^ set(expected))
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, (name, found[name].dtype)
        assert found[name].shape == tensor.shape, (name, found[name].shape)
        wide = torch.complex128
        assert torch.equal(found[name].to(wide), tensor.to(wide)), name


def main():
    def tool(*arguments):
        subprocess.run([sys.argv[1], *map(str, arguments)], check=True)

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)

        tool("write-tensors", folder / "snug")
        check(load_file(folder / "snug"), known_tensors())
        with safe_open(folder / "snug", framework="pt") as file:
            assert file.metadata() == {"format": "pt"}, file.metadata()
            check({key: file.get_tensor(key) for key in file.keys()}, known_tensors())
            assert torch.equal(file.get_slice("float32")[1:, :2], torch.tensor([[3.0, 4.0]]))

        save_file(known_tensors(), folder / "python", metadata={"format": "pt"})
        tool("check-tensors", folder / "python")

        # Shards with an index, as transformers' save_pretrained writes them.
        tensors, weight_map = known_tensors(), {}
        names = sorted(tensors)
        for i, part in enumerate((names[:7], names[7:8], names[8:]), 1):
            shard = f"model-{i:05}-of-00003.safetensors"
            save_file({name: tensors[name] for name in part}, folder / shard, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(part, shard))
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        tool("check-tensors", folder / "model.safetensors.index.json")

        # Of one dtype, the two writers agree to the byte.
        same = {f"layer.{i}.weight": torch.randn(i, 3) for i in range(12)}
        save_file(same, folder / "python", metadata={"format": "pt"})
        tool("copy", folder / "python", folder / "snug")
        assert (folder / "snug").read_bytes() == (folder / "python").read_bytes()
    print(f"{len(known_tensors())} tensors agree both ways")


if __name__ == "__main__":
    main()
