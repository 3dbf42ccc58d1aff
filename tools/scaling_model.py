#!/usr/bin/env python3
"""How data parallelism scales, by a formula and by a simulation, and whether both are right about 1 to 4 measured ranks; and what each
way of dividing a model over ranks keeps, sends and takes.

usage: scaling_model.py                      the tables of benchmarks/results/scaling-model.md, up to 4,096 ranks
       scaling_model.py --measure BUILD_DIR  runs BUILD_DIR/benchmarks/data_parallel on ranks whose links `tc` slows down, each in a
                                             network namespace, and compares; needs root
       scaling_model.py --self-test          the formula against the simulation, and the bytes against published figures
"""

import argparse
import dataclasses
import json
import math
import os
import random
import statistics
import subprocess
import sys


@dataclasses.dataclass
class Network:
    bandwidth: float  # bytes per second, that a rank can send while it receives as many
    latency: float  # seconds per message
    trees: bool = False  # whether the library may take a tree instead of a ring, as NCCL does for many ranks

    def all_reduce(self, size, ranks):
        """Seconds. Ring: each rank sends 2 (N - 1) messages of 1/N of the bytes (Patarasuk & Yuan 2009). Double tree: 2 log2 N messages deep,
        the bytes up and down (Sanders, Speck & Traeff 2009)."""
        if ranks == 1:
            return 0.0
        ring = 2 * (ranks - 1) * (self.latency + size / ranks / self.bandwidth)
        tree = 2 * math.ceil(math.log2(ranks)) * self.latency + 2 * size / self.bandwidth
        return min(ring, tree) if self.trees else ring


@dataclasses.dataclass
class Job:
    size: float  # bytes of gradients
    buckets: int
    forward: float  # seconds of one micro-batch
    backward: float
    micro_batches: int  # K; all but the last are inside NoSync
    each: bool = False  # without NoSync: all of them communicate


def exposed(job, network, ranks):
    """Seconds of communication that one backward does not hide: a bucket is ready every backward / buckets seconds, and goes when the one
    before it is through."""
    once = network.all_reduce(job.size / job.buckets, ranks)
    return once + max(0.0, (job.buckets - 1) * (once - job.backward / job.buckets))


def formula(job, network, ranks):
    """Seconds of a step in which all ranks are equally fast. The optimizer is left out."""
    compute = job.micro_batches * (job.forward + job.backward)
    return compute + (job.micro_batches if job.each else 1) * exposed(job, network, ranks)


def simulate(job, network, ranks, jitter=0.0, seed=1):
    """The same, event by event. `jitter`: standard deviation of a micro-batch's time on a rank, of its mean. A bucket goes when the
    last rank has it."""
    random_numbers = random.Random(seed)
    clocks = [0.0] * ranks
    for k in range(job.micro_batches):
        paces = [max(0.1, random_numbers.gauss(1.0, jitter)) if jitter else 1.0 for _ in range(ranks)]
        starts = [clock + job.forward * pace for clock, pace in zip(clocks, paces)]
        clocks = [start + job.backward * pace for start, pace in zip(starts, paces)]
        if job.each or k + 1 == job.micro_batches:
            through = 0.0
            for bucket in range(1, job.buckets + 1):
                ready = max(start + job.backward * pace * bucket / job.buckets for start, pace in zip(starts, paces))
                through = max(through, ready) + network.all_reduce(job.size / job.buckets, ranks)
            clocks = [max(clock, through) for clock in clocks]
    return max(clocks)


@dataclasses.dataclass
class Model:
    """Bytes."""
    weights: float
    gradients: float
    state: float


WAYS = ("replicated", "state", "gradients and state", "all")  # in shards


def kept(way, model, ranks, tensors=math.inf):
    """Bytes that a rank keeps, activations and windows aside. `tensors`: so many, of equal size, and none of them is cut."""
    parts = (model.state, model.gradients, model.weights)  # in the order in which the ways divide them
    divided = WAYS.index(way)
    return sum(part / min(ranks, tensors) if i < divided else part for i, part in enumerate(parts))


def sent(way, model, ranks, passes, group=None):
    """Bytes that a rank sends in a step, on average. `passes`: how often each weight comes to each rank, if weights are in shards. `group`: the
    ranks that share the model out, if not all of them; then the sum of each gradient goes round the groups, and round again when it is whole."""
    group = group or ranks
    sums = 2 if way in ("replicated", "state") else 1  # an all-reduce is a reduce-scatter and an all-gather
    weights = {"replicated": 0, "all": passes}.get(way, 1)
    return (group - 1) / group * (sums * model.gradients + weights * model.weights) + between_groups(model, ranks, group) / group


def between_groups(model, ranks, group):
    """Bytes that a group sends to other groups in a step, on average."""
    return 2 * (ranks - group) / ranks * model.gradients


def network_seconds(way, model, network, ranks, passes, at_once, tensors):
    """Seconds of a step in the network, hidden or not, as snug sends: (all links busy all the time, all ranks in step). In step, all ranks
    want a weight of one owner at a time, and gradients go to as many owners as tensors are on their way; a broadcast is a tree."""
    if ranks == 1:
        return 0.0, 0.0
    least = sent(way, model, ranks, passes) / network.bandwidth
    owners = min(ranks, max(1.0, at_once / (model.gradients / tensors)))
    gradients = (network.all_reduce(model.gradients, ranks) if way in ("replicated", "state") else
                 (ranks - 1) * model.gradients / owners / network.bandwidth + tensors * network.latency)
    weights = {"replicated": 0.0,
               "all": passes * ((ranks - 1) * model.weights / network.bandwidth + 2 * tensors * network.latency)}.get(
                   way, math.ceil(math.log2(ranks)) * model.weights / network.bandwidth)
    return least, gradients + weights


# Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), table 1: gigabytes on each device for 7.5 billion parameters with weights and gradients of
# 2 bytes and a state of 12, by devices; and section 7: parameters sent in a step.
ZERO_MODEL = Model(2 * 7.5, 2 * 7.5, 12 * 7.5)
ZERO_TABLE = {4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88), 256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12)}
ZERO_SENT = {"replicated": 2, "gradients and state": 2, "all": 3}

# FSDP2, torchtitan's benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: Llama 3.1 8B with weights, gradients and AdamW's state in FP32,
# gathered in BF16, two sequences of 8192 tokens a GPU, links of 400 Gbit/s a GPU between machines. GiB and tokens/s of a GPU, for 8 and 128 GPUs:
# plain, with torch.compile, and with Float8 too.
FSDP2_PARAMETERS = 8.03e9
FSDP2_TOKENS = 2 * 8192
FSDP2_TABLES = ((82.4, 67.0, 5762, 5605), (77.0, 62.0, 6667, 6514), (76.8, 61.8, 8532, 8380))


def fsdp2_comparison():
    """For each row of the tables: published and computed GiB by which a GPU needs less on 128 GPUs than on 8; published share of the speed that stays,
    and the computed share if the network were hidden not at all. The computed seconds of the network, beside those of the step."""
    kept_model = Model(*(bytes_each * FSDP2_PARAMETERS for bytes_each in (4, 4, 8)))
    less = (kept("all", kept_model, 8) - kept("all", kept_model, 128)) / 2**30
    moved = Model(2 * FSDP2_PARAMETERS, 4 * FSDP2_PARAMETERS, 0)
    network = sent("all", moved, 128, passes=2) / GPUS.bandwidth
    rows = []
    for gib_8, gib_128, speed_8, speed_128 in FSDP2_TABLES:
        step = FSDP2_TOKENS / speed_8
        rows.append((gib_8 - gib_128, less, speed_128 / speed_8, step / (step + network), network, step))
    return rows


def check_published():
    for published, computed, stays, not_hidden, network, step in fsdp2_comparison():
        assert 0.9 < computed / published < 1, (computed, published)
        assert network < step and not_hidden < stays < 1, (network, step, not_hidden, stays)
    assert kept("replicated", ZERO_MODEL, 64) == 120
    for ranks, published in ZERO_TABLE.items():
        for way, gigabytes in zip(WAYS[1:], published):
            assert abs(kept(way, ZERO_MODEL, ranks) - gigabytes) < 0.06, (way, ranks, kept(way, ZERO_MODEL, ranks))
    for way, parameters in ZERO_SENT.items():
        assert abs(sent(way, Model(1, 1, 6), 1 << 20, passes=2) - parameters) < 1e-4, way
    # As measured: ShardedGradients.TakeTheMemoryOfAShardInBackwardInTwoGroups and ...AreSentTwiceByTheFirstOfManyGroups, 12 layers on 4 ranks.
    for group, layers in ((4, 9), (2, 12), (1, (24 + 24 + 12 + 12) / 4)):
        assert sent("gradients and state", Model(0, 12, 24), 4, 1, group) == layers, group


def self_test():
    check_published()
    network = Network(1e9, 1e-5)
    for buckets in (1, 3, 25):
        for ranks in (1, 2, 8, 100):
            for size in (1e6, 1e9):
                for each in (False, True):
                    job = Job(size, buckets, 0.1, 0.2, 4, each)
                    a, b = formula(job, network, ranks), simulate(job, network, ranks)
                    assert abs(a - b) < 1e-9 * a, (job, ranks, a, b)
    assert network.all_reduce(8e9, 2) > 8.0 > Network(1e9, 0).all_reduce(8e9 / 1.001, 2)
    assert simulate(Job(0, 1, 0.1, 0.2, 1), network, 64, jitter=0.05) > 0.3 * 1.05


# A model of 1.3 billion parameters, gradients in BF16, one micro-batch of 8 x 2048 tokens on a GPU that does 400 TFLOP/s: 6 operations a
# parameter and token. Eight GPUs a node, each with a card of 400 Gbit/s, of which 80 % arrive.
PARAMETERS = 1.3e9
TOKENS = 8 * 2048
COMPUTE = 6 * PARAMETERS * TOKENS / 400e12
GPUS = Network(bandwidth=0.8 * 50e9, latency=5e-6, trees=True)
JITTER = 0.03
COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def gpu_job(micro_batches, each=False, network_bytes=2):
    size = network_bytes * PARAMETERS
    return Job(size, math.ceil(size / (25 << 20)), COMPUTE / 3, COMPUTE * 2 / 3, micro_batches, each)


def share(job, seconds):
    return 100 * job.micro_batches * (job.forward + job.backward) / seconds


def print_tables():
    print(f"{PARAMETERS / 1e9:g} billion parameters, {1000 * COMPUTE:.0f} ms a micro-batch of {TOKENS} tokens, BF16 gradients, "
          f"{8 * GPUS.bandwidth / 1e9:.0f} Gbit/s and {1e6 * GPUS.latency:g} us per GPU, jitter {100 * JITTER:g} %\n")
    for title, network in (("at that speed", GPUS), ("a quarter of the bandwidth", dataclasses.replace(GPUS, bandwidth=GPUS.bandwidth / 4))):
        print(f"Share of the step that computes, {title}: formula (simulation with jitter)\n")
        print("| GPUs | K = 1 | K = 4 | K = 16 | K = 4, all communicate |\n|---|---|---|---|---|")
        for ranks in COUNTS:
            cells = []
            for job in (gpu_job(1), gpu_job(4), gpu_job(16), gpu_job(4, each=True)):
                cells.append(f"{share(job, formula(job, network, ranks)):.0f} % ({share(job, simulate(job, network, ranks, JITTER)):.0f} %)")
            print(f"| {ranks} | " + " | ".join(cells) + " |")
        print()
    print("A fixed global batch of 4,096 micro-batches, at a quarter of the bandwidth\n")
    print("| GPUs | K | seconds a step | speed-up over 8 GPUs |\n|---|---|---|---|")
    slow = dataclasses.replace(GPUS, bandwidth=GPUS.bandwidth / 4)
    first = None
    for ranks in COUNTS:
        seconds = simulate(gpu_job(4096 // ranks), slow, ranks, JITTER)
        first = first or seconds
        print(f"| {ranks} | {4096 // ranks} | {seconds:.2f} | {first / seconds:.0f} of {ranks // 8} |")


# The same model in FP32 with AdamW, as snug shards it on CPUs: 24 tensors in each of 24 blocks, two passes (forward and backward of one
# micro-batch of 2048 tokens) on machines of 2 TFLOP/s with cards of 25 Gbit/s.
CPU_MODEL = Model(4 * PARAMETERS, 4 * PARAMETERS, 8 * PARAMETERS)
CPU_TENSORS = 24 * 24
CPU_COMPUTE = 6 * PARAMETERS * 2048 / 2e12
CPUS = Network(bandwidth=0.8 * 25e9 / 8, latency=5e-5)


def print_ways():
    print(f"\nFour ways to divide {PARAMETERS / 1e9:g} billion parameters in FP32 with AdamW: GB that a rank keeps, and sends in a step of two passes\n")
    print("| ranks | " + " | ".join(WAYS) + " |\n|---|---|---|---|---|")
    counts = (2, 4, 8, 16, 64, 256, 1024, 4096)
    for ranks in counts:
        cells = (f"{kept(way, CPU_MODEL, ranks, CPU_TENSORS) / 1e9:.2f}, sends {sent(way, CPU_MODEL, ranks, 2) / 1e9:.1f}" for way in WAYS)
        print(f"| {ranks} | " + " | ".join(cells) + " |")
    print(f"\nSeconds in the network beside {CPU_COMPUTE:.1f} s of computation, at {8 * CPUS.bandwidth / 1e9:.0f} Gbit/s: all links busy, to all ranks in step\n")
    print("| ranks | " + " | ".join(WAYS) + " |\n|---|---|---|---|---|")
    for ranks in counts:
        cells = ("{:.1f} to {:.1f}".format(*network_seconds(way, CPU_MODEL, CPUS, ranks, 2, 25 << 20, CPU_TENSORS)) for way in WAYS)
        print(f"| {ranks} | " + " | ".join(cells) + " |")


def print_groups():
    in_machine = 8
    print(f"\nMachines of {in_machine} ranks: GB that a rank keeps, and that a machine sends to other machines in a step of two passes\n")
    print("| ranks | all, one group | all, a group in each machine |\n|---|---|---|")
    for ranks in COUNTS[1:]:
        leaves = (ranks - in_machine) / (ranks - 1)  # the part of a rank's messages that goes to other machines
        one = in_machine * leaves * sent("all", CPU_MODEL, ranks, 2)
        cells = ((kept("all", CPU_MODEL, ranks, CPU_TENSORS), one),
                 (kept("all", CPU_MODEL, in_machine, CPU_TENSORS), between_groups(CPU_MODEL, ranks, in_machine)))
        print(f"| {ranks} | " + " | ".join(f"{keeps / 1e9:.2f}, sends {sends / 1e9:.1f}" for keeps, sends in cells) + " |")


def print_fsdp2():
    print("\nFSDP2 as published, Llama 3.1 8B on 8 and on 128 H100, and the same by this model\n")
    print("| | less memory on 128: published, computed | speed that stays: published | computed, nothing hidden | network, step |\n|---|---|---|---|---|")
    for name, (published, computed, stays, not_hidden, network, step) in zip(("plain", "torch.compile", "and Float8"), fsdp2_comparison()):
        print(f"| {name} | {published:.1f} GiB, {computed:.1f} GiB | {100 * stays:.0f} % | {100 * not_hidden:.0f} % | {network:.1f} s, {step:.1f} s |")


def run(*command, check=True):
    subprocess.run(command, check=check, stdout=subprocess.DEVNULL, stderr=None if check else subprocess.DEVNULL)


class Namespaces:
    """Network namespaces snugm0, snugm1, ... on one bridge, each sending at most `rate`."""

    def __init__(self, count, megabits):
        self.count = count
        self.stop()
        run("ip", "link", "add", "snugm", "type", "bridge")
        run("ip", "link", "set", "snugm", "up")
        for i in range(count):
            run("ip", "netns", "add", f"snugm{i}")
            run("ip", "link", "add", f"snugm{i}", "type", "veth", "peer", "name", "eth0", "netns", f"snugm{i}")
            run("ip", "link", "set", f"snugm{i}", "master", "snugm", "up")
            self.inside(i, "ip", "addr", "add", f"10.98.7.{i + 1}/24", "dev", "eth0")
            self.inside(i, "ip", "link", "set", "eth0", "up")
            self.inside(i, "ip", "link", "set", "lo", "up")
            self.inside(i, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", f"{megabits}mbit", "burst", "16kb", "latency", "200ms")

    def inside(self, i, *command):
        run("ip", "netns", "exec", f"snugm{i}", *command)

    def stop(self):
        for i in range(8):
            run("ip", "netns", "del", f"snugm{i}", check=False)
        run("ip", "link", "del", "snugm", check=False)


def measured(program, ranks, megabits, arguments):
    namespaces = Namespaces(ranks, megabits)
    try:
        processes = []
        for rank in range(ranks):
            environment = dict(os.environ, RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(ranks), MASTER_ADDR="10.98.7.1", MASTER_PORT="29517",
                               GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")
            processes.append(subprocess.Popen(["ip", "netns", "exec", f"snugm{rank}", program, "measure", *arguments],
                                              env=environment, stdout=subprocess.PIPE, text=True))
        texts = [process.communicate(timeout=300)[0] for process in processes]
        return json.loads(texts[0])
    finally:
        namespaces.stop()


def compare(build, megabits, ks):
    """Small gradients on slow links, so that the network rules and not the two or more ranks that share a core."""
    program = os.path.join(build, "benchmarks", "data_parallel")
    print(f"Links of {megabits} Mbit/s, measured / predicted\n\n| ranks | K | computes | all-reduces | the last communicates | all communicate |\n|---|---|---|---|---|---|")
    ratios = []
    for ranks in (1, 2, 3, 4):
        result = measured(program, ranks, megabits, ["64", "2", "100000", *map(str, ks)])
        network = Network(bandwidth=0.95 * megabits / 8 * 1e6, latency=2e-4)  # what headers leave; a switch of threads and a timer
        whole = network.all_reduce(result["bytes"], ranks)
        for step in result["steps"]:
            job = Job(result["bytes"], math.ceil(result["bytes"] / result["bucket"]), step["none"] / step["k"] / 3,
                      step["none"] / step["k"] * 2 / 3, step["k"])
            cells = [f"{1000 * step['none']:.0f} ms"]
            for time, prediction in ((result["all_reduce"], whole), (step["once"], formula(job, network, ranks)),
                                     (step["each"], formula(dataclasses.replace(job, each=True), network, ranks))):
                cells.append(f"{1000 * time:.0f} / {1000 * prediction:.0f} ms")
                if ranks > 1:
                    ratios.append(time / prediction)
            print(f"| {ranks} | {step['k']} | " + " | ".join(cells) + " |", flush=True)
    print(f"\nmeasured / predicted with 2 to 4 ranks: {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", metavar="BUILD_DIR")
    parser.add_argument("--megabits", type=int, default=40)
    parser.add_argument("--k", default="1,2,4", help="micro-batches to measure")
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_test:
        self_test()
        print("the formula and the simulation agree, and the bytes are the published bytes")
    elif arguments.measure:
        compare(arguments.measure, arguments.megabits, [int(k) for k in arguments.k.split(",")])
    else:
        print_tables()
        print_ways()
        print_groups()
        print_fsdp2()


if __name__ == "__main__":
    sys.exit(main())
