"""Writes small files of torch.export, and data for them, into a folder: what exported_test.py trains. Or prints the held-out loss that Python
finds with trained weights for the model in rows.pt2 on the data in rows/, in batches of 6.

usage: exported_models.py FOLDER [WEIGHTS]     with a Python that has torch
"""

import pathlib
import sys

try:
    import torch
    from safetensors.torch import load_file, load_model, save_file
    from torch import nn
    from torch.nn import functional as F
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "python")]

import snug_export  # noqa: E402


class Words(nn.Module):
    """Its loss of bytes and the bytes that follow them."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(256, 32), nn.LayerNorm(32), nn.Linear(32, 256)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(4))

    def forward(self, tokens, target):
        h = self.embedding(tokens)
        for layer in self.layers:
            h = h + layer(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), target.flatten())


class OneInput(Words):
    """The same of one input, which it shifts by itself."""

    def forward(self, tokens):
        return super().forward(tokens[:, :-1], tokens[:, 1:])


def of_rows():
    return nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 3))


def held_out_loss(folder, weights):
    model = of_rows()
    load_model(model, weights, strict=True)
    model.eval()
    files = [load_file(folder / "rows" / name) for name in ("a.safetensors", "b.safetensors")]
    x, y = (torch.cat([file[name][-(len(file[name]) // 10):] for file in files]) for name in ("input", "target"))
    total = 0.0
    with torch.no_grad():
        for inputs, targets in zip(x.split(6), y.split(6)):
            total += F.cross_entropy(model(inputs), targets).item() * len(targets)
    return total / len(y)


def main(folder):
    torch.manual_seed(1)
    batch = torch.export.Dim("batch", max=1024)
    words = torch.zeros(4, 24, dtype=torch.long)
    snug_export.save(Words(), (words, words), folder / "words.pt2", dynamic_shapes=({0: batch}, {0: batch}))
    x, y = torch.randn(8, 6), torch.zeros(8, dtype=torch.long)
    without_dropout = nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 3))
    snug_export.save(without_dropout, (x, y), folder / "without_dropout.pt2", loss=F.cross_entropy,
                     dynamic_shapes=({0: batch}, {0: batch}))
    snug_export.save(OneInput(), (words,), folder / "one.pt2", dynamic_shapes=({0: batch},))
    snug_export.save(Words(), (words, words), folder / "fixed.pt2")
    x, y = torch.randn(150, 6), torch.randint(0, 3, (150,))
    shapes = ({0: batch}, {0: batch})
    torch.manual_seed(2)
    model = of_rows()
    snug_export.save(model, (x[:8], y[:8]), folder / "rows.pt2", loss=F.cross_entropy, dynamic_shapes=shapes)
    snug_export.save(model, (x[:8],), folder / "scores.pt2", dynamic_shapes=({0: batch},))
    torch.export.save(torch.export.export(Words(), (words, words)), folder / "without_eval.pt2")
    (folder / "rows").mkdir()
    save_file({"input": x[:100], "target": y[:100]}, folder / "rows" / "a.safetensors")
    save_file({"input": x[100:], "target": y[100:]}, folder / "rows" / "b.safetensors")
    save_file({"input": x, "label": y}, folder / "other_name.safetensors")
    save_file({"input": x, "target": y.int()}, folder / "other_type.safetensors")
    save_file({"input": x[:, :5].contiguous(), "target": y}, folder / "other_size.safetensors")
    save_file({"input": x[:7], "target": y[:9]}, folder / "other_rows.safetensors")
    save_file({"input": x[:9], "target": y[:9]}, folder / "few.safetensors")


if __name__ == "__main__":
    if sys.argv[2:]:
        print(held_out_loss(pathlib.Path(sys.argv[1]), sys.argv[2]))
    else:
        main(pathlib.Path(sys.argv[1]))
