"""Small models of Python's, with a batch and a loss, and a plain loop, for tests of the package snug."""

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
import torch.utils.checkpoint
from torch import func, nn


def by_hand(model, optimizer, x, y, steps):
    """The losses of plain training."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Mlp(nn.Module):
    def __init__(self, width=64, layers=6, dropout=0.1):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout),
                                                   nn.Linear(4 * width, width)) for _ in range(layers)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class Convolutions(nn.Sequential):
    def __init__(self):
        blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(5)]
        super().__init__(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        h = c = torch.zeros(x.shape[0], 32)
        out = 0
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            out = out + self.head(h)
        return out


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(x).mean(1)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.middle, self.head = nn.Embedding(50, 32), Mlp(32, 4), nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.middle(self.embedding(tokens))).flatten(0, 1)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x


class Shown(torch.autograd.Function):
    """Its gradient is what it has saved, or a view of that."""

    @staticmethod
    def forward(ctx, x, saved, taken):
        ctx.save_for_backward(saved)
        ctx.taken = taken
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return ctx.taken(ctx.saved_tensors[0]), None, None


class WithFunction(Mlp):
    def forward(self, x):
        for layer in self.layers:
            x = Cube.apply(torch.tanh(x + layer(x)))
        return x


class Checkpointed(Mlp):
    def __init__(self, use_reentrant):
        super().__init__(layers=2)
        self.use_reentrant, self.last = use_reentrant, Mlp(layers=6)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return self.last(x)


class Autocast(Mlp):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Cond(Mlp):
    def forward(self, x):
        x = super().forward(x)
        return torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,))


class Wrapper(torch.Tensor):
    """A tensor that has no memory of its own, and hands operators on to another."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=False)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = lambda value: value.inner if isinstance(value, Wrapper) else value
        result = func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs or {}))
        return pytree.tree_map(lambda value: Wrapper(value) if isinstance(value, torch.Tensor) else value, result)


class OwnMemory(torch.Tensor):
    """A tensor whose memory is its own, and that sees operators."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def jagged(x):
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, 10, len(x)]))


class Unwrapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.inner

    @staticmethod
    def backward(ctx, gradient):
        return Wrapper(gradient)


class Wrapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return Wrapper(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.inner if isinstance(gradient, Wrapper) else gradient


#: name: the loss of a model and a batch, made of derivatives by torch.func or of tensors of a kind of their own
KINDS = {
    "jvp": lambda f, x: sum(part.square().mean() for part in func.jvp(f, (x,), (torch.cos(x),))),
    "jacfwd": lambda f, x: sum(func.jacfwd(f)(row).square().sum() for row in x[:2]),
    "jacrev": lambda f, x: sum(func.jacrev(f)(row).square().sum() for row in x[:2]),
    "hessian": lambda f, x: func.hessian(lambda row: f(row).sum())(x[0, :]).diagonal().sum().square() + f(x).mean(),
    "vmap": lambda f, x: func.vmap(f)(x).square().mean(),
    "vmap of grad": lambda f, x: func.vmap(func.grad(lambda row: f(row).square().sum()))(x).square().mean(),
    "vmap of jvp": lambda f, x: func.vmap(lambda row: func.jvp(f, (row,), (torch.ones_like(row),))[1])(x).square().mean(),
    "functionalize": lambda f, x: func.functionalize(f)(x).square().mean(),
    "jagged": lambda f, x: f(jagged(x)).values().square().mean(),
    "nested": lambda f, x: torch.cat(f[0](torch.nested.as_nested_tensor([x[:3], x[3:]])).unbind()).square().mean() + f(x).mean(),
    "wrapper": lambda f, x: Unwrapped.apply(Wrapped.apply(f(x)).sin() * 2).square().mean() + f(x).mean(),
    "own memory": lambda f, x: f(x.as_subclass(OwnMemory)).as_subclass(torch.Tensor).square().mean(),
    "sparse": lambda f, x: torch.sparse.mm(f(x).detach().relu().to_sparse(), f(x).T).square().mean(),
    "oneDNN": lambda f, x: (f(x).to_mkldnn().relu().to_dense() + f(x)).square().mean(),
}


def vectors(items=64):
    return torch.randn(items, 64, requires_grad=True)


def targets(y):
    return F.mse_loss(y, torch.zeros_like(y))


#: name: (model, input, loss of the output)
MODELS = {
    "mlp": lambda: (Mlp(), vectors(), targets),
    "convolutions": lambda: (Convolutions(), torch.randn(4, 3, 16, 16), targets),
    "lstm": lambda: (Lstm(), torch.randn(8, 20, 32), targets),
    "transformer": lambda: (Transformer(), torch.randn(4, 16, 32), targets),
    "tied": lambda: (Tied(), torch.randint(50, (4, 16)), lambda y: F.cross_entropy(y, torch.zeros(64, dtype=torch.long, device=y.device))),
    "function": lambda: (WithFunction(), vectors(), targets),
    "checkpoint": lambda: (Checkpointed(use_reentrant=False), vectors(), targets),
    "autocast": lambda: (Autocast(), vectors(), targets),
    "cond": lambda: (Cond(), vectors(), targets),
}


def made(name):
    """The model in training mode, and a function without arguments that returns its loss."""
    torch.manual_seed(1)
    model, x, loss_of_output = MODELS[name]()
    return model.train(), lambda: loss_of_output(model(x))
