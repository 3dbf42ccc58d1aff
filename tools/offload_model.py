#!/usr/bin/env python3
"""Tokens per second of training with state, gradients and weights on the host, predicted from the speeds of card, link and host.

usage: offload_model.py                    the tables of benchmarks/results/offload-model.md
       offload_model.py --parameters 7e9 --memory 24e9 --flops 100e12 --link 25e9 --host 60e9 --tokens 8192
                                           one row, for numbers of your own: parameters, bytes of the card, operations per second, bytes
                                           per second of the link in one direction, bytes per second of the host's memory, tokens a step
       offload_model.py --self-test        the formula of the window against a simulation of its copies

The arithmetic is that of a Stepper with 16-bit weights, FP32 masters (Weights::Low) and AdamW, in one micro-batch, with P parameters:
- Computing takes 8 P operations a token: forward, backward, and forward again, because plans drop activations.
- On the card: weights 2 P bytes, masters 4 P, FP32 gradients 4 P, moments 8 P. With the state on the host 10 P. With all on the host
  two layers of the weights.
- Weights come for forward, and again for backward with the recomputation: 4 P bytes, beside the operators. The first layer comes before
  the first operator.
- A gradient leaves in 16 bits, 2 P bytes in all, beside the operators of backward, which with the recomputation are three quarters of all.
  The host widens it meanwhile: 2 P read, 4 P written. Nothing hides copy and widening of the last layer's.
- The host updates masters and moments (12 P read, 12 P written, gradients 4 P read) and rounds the masters (4 P read, 2 P written). With
  the weights on the card, gradients and masters (8 P) go to the host and masters (4 P) come back, beside the update. With the weights on
  the host, the host updates a weight before the weight's copy in the next forward pass, a quarter of all operators, while the card computes
  with the layer before. Then the copy waits for the layer before. So updates, or copies and operators, set the pace of this pass.
"""

import argparse
import dataclasses


@dataclasses.dataclass
class Machine:
    name: str
    memory: float  # bytes of the card
    flops: float  # operations per second that training reaches
    link: float  # bytes per second to the card, and at the same time from the card
    host: float  # bytes per second of the host's memory
    activations: float  # bytes of the card that activations and libraries need


# None of the speeds is measured. They are what training reaches of the nominal speeds, roughly: 0.6 of the operations, 0.8 of the link.
MACHINES = (Machine("24 GB, 100 TFLOP/s, PCIe 4 (25 GB/s), host 60 GB/s", 24e9, 100e12, 25e9, 60e9, 4e9),
            Machine("80 GB, 400 TFLOP/s, PCIe 5 (50 GB/s), host 300 GB/s", 80e9, 400e12, 50e9, 300e9, 8e9))
LAYERS = 32


def passes(computing, link, layers):
    """Seconds of forward and backward through a window of two layers. `computing`, `link`: seconds of all operators and of all copies."""
    return max(computing, link) + min(computing, link) / (2 * layers)


def simulated_passes(computing, link, layers):
    """The same, copy by copy: a copy waits for the copy before it, and for the operators of the layer whose place it takes."""
    order = list(range(layers)) + list(range(layers))[::-1]
    copied, computed = 0.0, [0.0]
    for i in range(len(order)):
        place = computed[max(0, i - 1)]  # the operators of the layer before the last one have ended
        copied = max(copied, place) + link / len(order)
        computed.append(max(copied, computed[-1]) + computing / len(order))
    return computed[-1]


def updated_pass(computing, link, update, layers):
    """Seconds of a forward pass whose weights are updated on the host first."""
    device = computing + link  # a copy that has waited for an update waits for the layer before, too
    return max(device, update) + min(device, update) / layers


def simulated_updated_pass(computing, link, update, layers):
    computed = 0.0
    for i in range(layers):
        copied = max((i + 1) * update / layers, computed) + link / layers
        computed = copied + computing / layers
    return computed


def predict(parameters, machine, tokens):
    """The place, and the seconds of a step: as it is, and if the update hid behind the operators, too."""
    room = machine.memory - machine.activations
    computing = 8 * parameters * tokens / machine.flops
    if 18 * parameters <= room:
        return "all on the card", computing, computing
    if 10 * parameters <= room:
        update = max(28 * parameters / machine.host, 12 * parameters / machine.link)
        return "state on the host", computing + update, max(computing, update)
    weights, gradients = 4 * parameters / machine.link, 2 * parameters / machine.link
    widening, update = 6 * parameters / machine.host, 34 * parameters / machine.host
    window = passes(computing, weights, LAYERS)
    backward = max(3 / 4 * window, gradients, widening) + (gradients + widening) / LAYERS
    forward = updated_pass(computing / 4, weights / 2, update, LAYERS)
    return "all on the host", forward + backward, max(window, gradients, widening + update)


def row(parameters, machine, tokens):
    place, seconds, hidden = predict(parameters, machine, tokens)
    computing = 8 * parameters * tokens / machine.flops
    return f"| {parameters / 1e9:g} billion | {place} | {computing:.2f} s | {seconds:.2f} s | {tokens / seconds:,.0f} | {tokens / hidden:,.0f} |"


HEADER = "| parameters | place | computing | step | tokens/s | all copies and the update hidden |\n|---|---|---|---|---|---|"


def print_tables():
    for machine, tokens in zip(MACHINES, (8192, 16384)):
        print(f"## {machine.name}, {tokens} tokens a step\n\n{HEADER}")
        for parameters in (1.3e9, 7e9, 13e9):
            print(row(parameters, machine, tokens))
        print()


def self_test():
    for layers in (2, 8, 32):
        for link in (0.01, 0.5, 1.0, 2.0, 30.0):
            a, b = passes(1.0, link, layers), simulated_passes(1.0, link, layers)
            assert abs(a - b) < 1e-9 * a, (layers, link, a, b)
            for update in (0.01, 0.5, 3.0, 40.0):
                a, b = updated_pass(1.0, link, update, layers), simulated_updated_pass(1.0, link, update, layers)
                assert abs(a - b) < 1e-9 * a, (layers, link, update, a, b)
    small, large = Machine("", 24e9, 1e14, 25e9, 60e9, 4e9), Machine("", 1e12, 1e14, 25e9, 60e9, 4e9)
    assert predict(7e9, small, 8192)[1] > predict(7e9, large, 8192)[1] == 8 * 7e9 * 8192 / 1e14


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--self-test", action="store_true")
    numbers = ("parameters", "memory", "flops", "link", "host", "tokens")
    for name in numbers:
        parser.add_argument(f"--{name}", type=float)
    arguments = parser.parse_args()
    given = [name for name in numbers if getattr(arguments, name) is not None]
    if arguments.self_test:
        self_test()
    elif not given:
        print_tables()
    elif len(given) < len(numbers) or min(getattr(arguments, name) for name in numbers) <= 0:
        parser.error(f"give all of {', '.join('--' + name for name in numbers)}, each above 0")
    else:
        machine = Machine("", arguments.memory, arguments.flops, arguments.link, arguments.host, arguments.memory / 8)
        print(f"{HEADER}\n{row(arguments.parameters, machine, int(arguments.tokens))}")


if __name__ == "__main__":
    main()
