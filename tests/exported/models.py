"""Small models of what torch.export has to carry over, each with its inputs: MODELS[name] -> (module, inputs(items, generator))."""

import torch
from torch import nn
from torch.nn import functional as F


def vectors(items, generator):
    return torch.randn(items, 6, generator=generator), torch.randint(0, 3, (items,), generator=generator)


def images(items, generator):
    return torch.randn(items, 3, 8, 8, generator=generator), torch.randint(0, 5, (items,), generator=generator)


def tokens(items, generator):
    words = torch.randint(0, 20, (items, 7), generator=generator)
    return words, words.roll(-1, 1)


def of_tokens(scores, words):
    return F.cross_entropy(scores.flatten(0, 1), words.flatten())


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))

    def forward(self, x, y):
        return F.cross_entropy(self.layers(x), y)


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norms, self.head = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)]), nn.Linear(8, 5)

    def forward(self, x, y):
        x = F.relu(self.norms[0](self.first(x)), inplace=True)
        x = F.relu(self.norms[1](self.second(x)) + x)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(20, 8), nn.LSTM(8, 12, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(12, 20)

    def forward(self, x, y):
        return of_tokens(self.head(self.lstm(self.embedding(x))[0]), y)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x, y):
        return of_tokens(self.head(self.encoder(self.embedding(x))), y)


class Tied(nn.Module):
    """A tied weight, a frozen one, buffers of both kinds, constants that differ in train and eval, arithmetic on sizes, named results."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.place = nn.Parameter(torch.randn(9, 16), requires_grad=False)
        self.register_buffer("mask", torch.ones(9, 9).tril().bool(), persistent=False)
        self.register_buffer("seen", torch.zeros(20))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x, y):
        length = x.shape[1]
        h = self.embedding(x) * 0.5 + self.place[:length]
        h = h * (torch.tensor([0.5, 0.25]) if self.training else torch.tensor([0.125, 2.0])).sum()
        scores = (h @ h.mT / h.shape[-1] ** 0.5).masked_fill(~self.mask[:length, :length], float("-inf"))
        h = h + scores.softmax(-1) @ h
        if self.training:
            with torch.no_grad():
                self.seen.index_add_(0, x.flatten(), torch.ones(x.shape[0] * length))
                self.steps += 1
        scores = self.head(h)
        return {"loss": of_tokens(scores, y), "mean": scores.sum() / (x.shape[0] * length // 2 + 1)}


class Cond(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, y):
        h = torch.cond(x.sum() > 0, lambda x: self.left(x).relu(), lambda x: self.right(x).tanh(), (x,))
        return F.cross_entropy(self.head(h), y)


class Autocast(nn.Module):
    """A weight that is used twice in BF16, and FP32 within."""

    def __init__(self):
        super().__init__()
        self.first, self.twice, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            h = self.twice(self.twice(self.first(x)).relu())
            with torch.autocast("cpu", enabled=False):
                h = self.twice(h.float())
        return F.cross_entropy(self.head(h), y)


class NoGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x, y):
        with torch.no_grad():
            target = self.teacher(x).softmax(-1)
            with torch.enable_grad():
                inner = self.student(x)
        return F.cross_entropy(self.student(x), y) + (inner.log_softmax(-1) * target).mean()


class Checkpoint(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Tanh()), nn.Linear(16, 3)

    def forward(self, x, y):
        return F.cross_entropy(self.head(torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)), y)


MODELS = {
    "mlp": (Mlp, vectors),
    "conv": (Conv, images),
    "lstm": (Lstm, tokens),
    "encoder": (Encoder, tokens),
    "tied": (Tied, tokens),
    "cond": (Cond, vectors),
    "autocast": (Autocast, vectors),
    "no_grad": (NoGrad, vectors),
    "checkpoint": (Checkpoint, vectors),
}


def build(name):
    torch.manual_seed(1)
    return MODELS[name][0]()
