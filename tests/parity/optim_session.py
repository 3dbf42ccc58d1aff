"""Drives optim_tool, and compares its answers with what Python's torch gives for the same commands."""

import json
import struct
import subprocess
import sys
import zlib

try:
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)


def bits(tensor):
    return " ".join(f"{struct.unpack('<I', struct.pack('<f', value))[0]:08x}" for value in tensor.detach().flatten().tolist())


def state_text(state):
    """A scaler's state in one line: doubles as the hex digits of their bits."""
    numbers = {name: struct.pack(">d", value).hex() if isinstance(value, float) else value for name, value in state.items()}
    return " ".join(f"{name}={value}" for name, value in numbers.items())


def state_from(text):
    values = dict(word.split("=") for word in text.split())
    return {name: struct.unpack(">d", bytes.fromhex(v))[0] if len(v) == 16 else int(v) for name, v in values.items()}


def answers_of(tool, commands):
    given = "\n".join(commands) + "\n"
    return subprocess.run([tool], input=given, capture_output=True, text=True, check=True).stdout.splitlines()


def first_difference(expected, answer):
    for i, (theirs, ours) in enumerate(zip(expected.split(), answer.split())):
        if theirs != ours:
            return f"word {i}: Python gives {theirs}, snug {ours}\n  Python: {expected[:300]}\n  snug:   {answer[:300]}"
    return f"  Python: {expected[:300]}\n  snug:   {answer[:300]}"


PART = "optimizer.safetensors"


def without_lists(value):
    """As a snapshot has it: a list is a dictionary with the names 0, 1, ..., and what is None is not there."""
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        return {str(name): without_lists(entry) for name, entry in value.items() if entry is not None}
    return value


def with_lists(state):
    groups = [
        {**group, "params": list(group["params"].values())}
        | {name: tuple(group[name].values()) for name in ("betas", "ns_coefficients") if name in group}
        for group in state["param_groups"].values()
    ]
    return {"state": {int(index): entry for index, entry in state["state"].items()}, "param_groups": groups}


def save_snapshot(state, folder):
    """An optimizer's state_dict as the snapshot of step 1."""
    tensors = {}

    def structure(entry, path):
        if isinstance(entry, dict):
            return {name: structure(inner, [*path, name]) for name, inner in entry.items()}
        if isinstance(entry, torch.Tensor):
            tensors[".".join(path)] = entry.contiguous()
            return None
        return entry

    text = json.dumps(structure(without_lists(state), []))
    step = folder / "step-00000001"
    step.mkdir(parents=True)
    save_file(tensors, step / PART, metadata={"snug.state": text})
    content = (step / PART).read_bytes()
    part = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    manifest = {"format": "snug snapshot", "version": 1, "step": 1, "files": {"optimizer": part}}
    (step / "manifest.json").write_text(json.dumps(manifest))


def load_optimizer(optimizer, folder):
    with safe_open(folder / "step-00000001" / PART, framework="pt") as file:

        def filled(entry, path):
            if isinstance(entry, dict):
                return {name: filled(inner, [*path, name]) for name, inner in entry.items()}
            return file.get_tensor(".".join(path)) if entry is None else entry

        state = with_lists(filled(json.loads(file.metadata()["snug.state"]), []))
    optimizer.load_state_dict(state)
    for group in optimizer.param_groups if not isinstance(optimizer, torch.optim.Muon) else ():
        group["fused"] = True  # how a step is computed is not in a state of snug's


class Session:
    """The commands of optim_tool, carried out in Python. Each call of `do` records the command and Python's answer."""

    def __init__(self):
        self.commands = []
        self.answers = []
        self.new()

    def new(self):
        self.parameters = []
        self.optimizers = []
        self.scaler = None
        self.record("new", "ok")

    def record(self, command, answer):
        self.commands.append(command)
        self.answers.append(answer)

    def do(self, command, action):
        """`action` returns the answer's words, or raises one of the errors that torch raises for a wrong call."""
        try:
            self.record(command, f"ok {action() or ''}".rstrip())
        except (RuntimeError, AssertionError, ValueError) as error:
            self.record(command, f"error {error}")

    def listed(self, indices):
        return [self.parameters[i] for i in indices]

    def param(self, values):
        self.parameters.append(values.clone().requires_grad_())
        shape = " ".join(["matrix", *map(str, values.shape)]) if values.dim() == 2 else "param"
        self.record(f"{shape} {bits(values)}", f"ok {len(self.parameters) - 1}")

    def sgd(self, lr, indices):
        self.optimizers.append(torch.optim.SGD(self.listed(indices), lr=lr))
        self.record(f"sgd {lr} {' '.join(map(str, indices))}", f"ok {len(self.optimizers) - 1}")

    def fused(self, command, kind, indices, options):
        numbers = [number for value in options.values() for number in (value if isinstance(value, tuple) else (value,))]
        self.optimizers.append(kind(self.listed(indices), **options, fused=True))
        words = [*(repr(float(number)) for number in numbers), *map(str, indices)]
        self.record(f"{command} {' '.join(words)}", f"ok {len(self.optimizers) - 1}")

    def adamw(self, indices, lr, betas, eps, weight_decay):
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.fused("adamw", torch.optim.AdamW, indices, options)

    def adam(self, indices, lr, betas, eps, weight_decay):
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.fused("adam", torch.optim.Adam, indices, options)

    def fused_sgd(self, indices, lr, momentum, dampening, weight_decay, nesterov):
        options = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        self.fused("fused_sgd", torch.optim.SGD, indices, options)

    def muon(self, indices, lr, weight_decay, momentum, nesterov, adjust_lr_fn):
        options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        self.optimizers.append(torch.optim.Muon(self.listed(indices), **options, adjust_lr_fn=adjust_lr_fn))
        numbers = [*options.values(), adjust_lr_fn == "match_rms_adamw"]
        words = [*(repr(float(number)) for number in numbers), *map(str, indices)]
        self.record(f"muon {' '.join(words)}", f"ok {len(self.optimizers) - 1}")

    def make_scaler(self, init, growth, backoff, interval, ours=""):
        """`ours`: what follows in the command, which only snug's scaler has."""
        self.scaler = torch.amp.GradScaler("cpu", init, growth, backoff, interval)
        self.record(f"scaler {init!r} {growth!r} {backoff!r} {interval} {ours}".rstrip(), "ok")

    def grad(self, index, values):
        self.parameters[index].grad = values.clone()
        self.record(f"grad {index} {bits(values)}", "ok")

    def nograd(self, index):
        self.parameters[index].grad = None
        self.record(f"nograd {index}", "ok")

    def scale(self, losses=(1.0,)):
        losses = torch.tensor(losses)
        self.do(f"scale {bits(losses)}", lambda: " ".join(map(bits, self.scaler.scale(losses.unbind()))))

    def unscale(self, index):
        self.do(f"unscale {index}", lambda: self.scaler.unscale_(self.optimizers[index]))

    def step(self, index):
        optimizer = self.optimizers[index]

        def action():
            if self.scaler is None:
                optimizer.step()
                return "1"
            self.scaler.step(optimizer)
            found = self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            return str(int(sum(f.item() for f in found.values()) == 0))

        self.do(f"step {index}", action)

    def update(self, new_scale=None):
        command = "update" if new_scale is None else f"update_to {new_scale!r}"
        self.do(command, lambda: self.scaler.update(new_scale))

    def state(self):
        self.record("state", f"ok {state_text(self.scaler.state_dict())}")

    def load(self, state):
        self.do(f"load {state_text(state)}", lambda: self.scaler.load_state_dict(state))

    def clip(self, max_norm, norm_type, indices):
        def action():
            return bits(torch.nn.utils.clip_grad_norm_(self.listed(indices), max_norm, norm_type))

        self.do(f"clip {max_norm!r} {norm_type!r} {' '.join(map(str, indices))}", action)

    def save_optimizer(self, index, snug, python):
        """Each into a folder of its own."""
        save_snapshot(self.optimizers[index].state_dict(), python)
        self.record(f"save_optimizer {index} {snug}", "ok")

    def load_optimizer(self, index, snug, python):
        load_optimizer(self.optimizers[index], python)
        self.record(f"load_optimizer {index} {snug}", "ok")

    def values(self):
        self.record("values", "ok " + " ".join(bits(p) for p in self.parameters))

    def grads(self):
        self.record("grads", "ok " + " ".join("none" if p.grad is None else bits(p.grad) for p in self.parameters))

    def compare(self, tool):
        """Fails at the first answer that differs. Of errors only that there is one is compared: the texts are our own."""
        found = answers_of(tool, self.commands)
        assert len(found) == len(self.answers), (len(found), len(self.answers))
        start = 0
        for i, (answer, expected) in enumerate(zip(found, self.answers)):
            if self.commands[i] == "new":
                start = i
            same = answer.split()[0] == "error" if expected.startswith("error") else answer == expected
            if not same:
                for command, earlier in zip(self.commands[start:i], self.answers[start:i]):
                    print(f"{command[:100]}  ->  {earlier[:100]}")
                sys.exit(f"{self.commands[i]}\n{first_difference(expected, answer)}")
        errors = sum(answer.startswith("error") for answer in self.answers)
        print(f"{len(found)} answers equal, {errors} of them errors")
