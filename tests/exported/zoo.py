"""Ten models of torch, torchvision, timm and transformers, with random weights.

MODELS[name] -> (module, inputs(items, generator)). Each module takes a batch and its targets, and returns the loss.
script/setup --zoo installs the libraries.
"""

import importlib.util
import pathlib

import torch
from torch import nn
from torch.nn import functional as F


def _prepare_torchvision():
    """torchvision's wheel on PyPI is for CUDA. Beside a torch for CPUs its operators do not load, but it asks for two
    of them by name."""
    try:
        torch.ops.load_library(pathlib.Path(importlib.util.find_spec("torchvision").origin).parent / "_C.so")
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library


for library in ("torchvision", "timm", "transformers"):
    if importlib.util.find_spec(library) is None:
        raise ModuleNotFoundError(f"no {library}; script/setup --zoo installs it", name=library)
_torchvision = _prepare_torchvision()

import timm  # noqa: E402
import torchvision  # noqa: E402
import transformers  # noqa: E402

transformers.logging.set_verbosity_error()

WORDS, TIME, CLASSES, PIXELS = 128, 32, 10, 64


def images(items, generator):
    pixels = torch.randn(items, 3, PIXELS, PIXELS, generator=generator)
    return pixels, torch.randint(0, CLASSES, (items,), generator=generator)


def tokens(items, generator):
    words = torch.randint(1, WORDS, (items, TIME), generator=generator)
    return words, words.clone()


def padded_tokens(items, generator):
    words, targets = tokens(items, generator)
    padding = torch.arange(TIME) >= torch.randint(TIME // 2, TIME + 1, (items, 1), generator=generator)
    return words.masked_fill(padding, 0), targets.masked_fill(padding, -100)


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(WORDS, 64), nn.LSTM(64, 96, 4, dropout=0.1, batch_first=True)
        self.head = nn.Linear(96, WORDS)

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.lstm(self.embedding(x))[0]).flatten(0, 1), y.flatten())


class Classifier(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, y):
        return F.cross_entropy(self.net(x), y)


class Transformer(nn.Module):
    """A model of transformers, which computes its loss itself. Token 0 is padding."""

    def __init__(self, name, config, **sizes):
        super().__init__()
        self.net = getattr(transformers, name)(getattr(transformers, config)(vocab_size=WORDS, **sizes))

    def forward(self, x, y):
        return self.net(input_ids=x, attention_mask=(x != 0).long(), labels=y).loss


def densenet():
    return Classifier(torchvision.models.DenseNet(
        growth_rate=16, block_config=(4, 6, 8, 6), num_init_features=32, drop_rate=0.1, num_classes=CLASSES))


def mobilenet():
    return Classifier(torchvision.models.mobilenet_v3_small(num_classes=CLASSES))


def swin():
    return Classifier(torchvision.models.SwinTransformer(
        patch_size=[4, 4], embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], dropout=0.1,
        attention_dropout=0.1, stochastic_depth_prob=0.2, num_classes=CLASSES))


def vit():
    return Classifier(timm.create_model(
        "vit_tiny_patch16_224", img_size=PIXELS, patch_size=8, depth=4, num_classes=CLASSES, proj_drop_rate=0.1,
        attn_drop_rate=0.1, drop_path_rate=0.1))


def convnext():
    return Classifier(timm.create_model("convnext_atto", num_classes=CLASSES, drop_rate=0.1, drop_path_rate=0.1))


def gpt2():
    return Transformer("GPT2LMHeadModel", "GPT2Config", n_positions=TIME, n_embd=64, n_layer=2, n_head=4)


def llama():
    return Transformer("LlamaForCausalLM", "LlamaConfig", hidden_size=64, intermediate_size=160, num_hidden_layers=2,
                       num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TIME,
                       attention_dropout=0.1)


def bert():
    return Transformer("BertForMaskedLM", "BertConfig", hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                       num_attention_heads=4, max_position_embeddings=TIME)


def t5():
    return Transformer("T5ForConditionalGeneration", "T5Config", d_model=64, d_kv=16, d_ff=128, num_layers=2,
                       num_heads=4, decoder_start_token_id=0)


MODELS = {
    "lstm": (Lstm, tokens),
    "densenet": (densenet, images),
    "mobilenet": (mobilenet, images),
    "swin": (swin, images),
    "vit": (vit, images),
    "convnext": (convnext, images),
    "gpt2": (gpt2, tokens),
    "llama": (llama, tokens),
    "bert": (bert, padded_tokens),
    "t5": (t5, padded_tokens),
}


def build(name):
    torch.manual_seed(1)
    return MODELS[name][0]()
