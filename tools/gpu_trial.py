#!/usr/bin/env python3
"""Runs on a GPU what has only been compiled: tests, sanitizer, plans, benchmarks. script/gpu-trial packs it with the programs that it runs.

usage: run RESULTS [--device cuda]    RESULTS: a folder; each step leaves a JSON file, and all together index.html

A step whose file is there is not run again, so a trial that was cut goes on; delete a file to repeat its step. With
--device cpu the steps that can run on a CPU are tried, smaller, and the others say why not. Exit status: 0 if no step
failed, else 1.
"""

import argparse
import dataclasses
import html
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
TAIL = 20_000  # characters of a step's output that are kept


@dataclasses.dataclass
class Step:
    """`command`: words, in which {device}, {python}, {scratch} and those of `sizes` are replaced. A folder `scratch` is the step's own."""
    name: str
    about: str
    command: list
    limit_s: int
    on_cpu: str = ""                                  # why it cannot run on a CPU; empty: it can
    environment: dict = dataclasses.field(default_factory=dict)
    gpu_environment: dict = dataclasses.field(default_factory=dict)
    needs: str = ""                                   # a program that must be on PATH
    gpus: int = 1                                     # so many are needed


def tests(name, limit_s, words="*"):
    return Step(f"test_{name}", f"Tests of {name}", [f"tests/test_{name}", f"--gtest_filter={words}"], limit_s,
                on_cpu="the project's own tests run this on a CPU")


def sanitized(name, words, limit_s):
    return Step(f"sanitizer_{name}", f"compute-sanitizer on {words}",
                ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", f"tests/test_{name}", f"--gtest_filter={words}"],
                limit_s, on_cpu="a CPU has no compute-sanitizer", needs="compute-sanitizer",
                gpu_environment={"SNUG_ACCELERATOR": "cuda", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


RANKS = ("train() {{ bin/snug launch -n 2 -- bin/snug train --data benchmarks/peers --model {small} --batch {sequences} --steps 10 --device {device} "
         "--out {scratch}/$1 $2 && tail -n 1 {scratch}/$1/log.jsonl; }}; train whole && train shares --shard-optimizer")
OFFLOAD = ("train() {{ bin/snug train --data benchmarks/peers --model {model} --batch 1 --steps 5 --device {device} --out {scratch}/$1 $2 && "
           "cat {scratch}/$1/log.jsonl; }}; train plain && train outside '--memory 300MiB --offload'")
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
PLANNED = ["benchmarks/planned_gpt", "{model}", "{sequences}", "--device", "{device}"]
TURNS = ["{python}", "benchmarks/run.py", ".", "--device", "{device}", "--pairs", "{pairs}", "--only"]
STEPS = [
    Step("machine", "The machine", ["{python}", "-c", "import torch; print(torch.__version__, torch.accelerator.current_accelerator())"], 30),
    Step("driver", "The driver", ["nvidia-smi"], 20, on_cpu="a CPU has no driver", needs="nvidia-smi"),
    Step("test_accelerator", "Tests of accelerators; on a CPU with the simulated one",
         ["tests/test_accelerator", "--gtest_filter=*Accelerator*:-SimDevice*"], 150, gpu_environment={"SNUG_ACCELERATOR": "cuda"}),
    tests("memory", 20, "*OnDevice*"),
    tests("activations", 40, "*Gpu*:SaveOnHost.*"),
    tests("distributed", 40, "*OnAGpu*"),
    tests("precision", 60, "*Cuda*:LongDotProduct.*:*AccumulatesInFp32*"),
    Step("python", "Tests of the Python package", ["{python}", "python/tests/device_test.py"], 60, environment={"PYTHONPATH": "python", **DETERMINISTIC},
         on_cpu="the project's own tests run this on the simulated accelerator", gpu_environment={"SNUG_ACCELERATOR": "cuda"}),
    sanitized("accelerator", "OffloadFromAnAccelerator.ComesBack*:*AreInOrderHowever*:UpdateKernels*", 60),
    Step("planned", "Planned GPT, deterministic: bits, allocated and reserved peaks against the prediction", PLANNED, 90, environment=DETERMINISTIC),
    Step("planned_fixed", "The same without segments that grow", PLANNED, 90, on_cpu="a CPU has no segments",
         environment=DETERMINISTIC, gpu_environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}),
    Step("sweep", "Time of a step over its bytes", ["benchmarks/budget_sweep", "{sweep}", "{pairs}", "--device", "{device}"], 90),
    Step("sweep_python", "The same for Python's ways: checkpoint, selective, save_on_cpu, torch.compile",
         ["{python}", "benchmarks/peers/budget_sweep.py", "{sweep}", "{pairs}", "--device", "{device}"], 150),
    Step("optimizers", "Fused AdamW, unscaling and clipping, in turns with Python's", [*TURNS, "Python fused"], 50),
    Step("sin_cos", "Sine and cosine, 20,000 points: seconds and losses in FP16 with the scaler, then in FP32",
         ["sh", "-c", "printf 'float16 {epochs}\\nfloat32 {epochs}\\n' | benchmarks/sin_cos --device {device}"], 30),
    Step("plan", "snug plan", ["bin/snug", "plan", "--model", "{small}", "--batch", "{sequences}", "--device", "{device}"], 30),
    Step("train", "snug train in 16 bits: autocast, scaler, a plan for the limit",
         ["bin/snug", "train", "--data", "benchmarks/peers", "--out", "{scratch}/run", "--model", "{small}", "--batch", "{sequences}",
          "--steps", "10", "--precision", "{precision}", "--memory", "{memory}", "--device", "{device}"], 60),
    Step("train_offload", "snug train in fewer bytes than the weights take, beside plain training: losses, seconds and peaks of each step",
         ["sh", "-c", OFFLOAD], 60, on_cpu="the weights of a CPU go to a directory", environment=DETERMINISTIC),
    Step("train_ranks", "snug train on two ranks (on GPUs: over NCCL), with the optimizer's state whole and in shares; the last losses should be close",
         ["sh", "-c", RANKS], 120, gpus=2),
]
SIZES = {
    "cuda": {"model": "gpt-base", "small": "gpt-small", "sweep": "gpt-base", "sequences": "8", "pairs": "5", "memory": "1GiB", "precision": "float16", "epochs": "1000"},
    "cpu": {"model": "gpt-tiny", "small": "gpt-tiny", "sweep": "gpt-tiny", "sequences": "2", "pairs": "1", "memory": "1GiB", "precision": "bfloat16", "epochs": "2"},
}


def libraries():
    """The folders of libraries: our own, torch's, and those of the packages that torch needs."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        sys.exit(f"gpu-trial: {sys.executable} has no torch; run it with a Python that has: PYTHON=... run RESULTS")
    packages = pathlib.Path(found.origin).parent.parent
    return [HERE / "lib", packages / "torch/lib", *sorted(packages.glob("nvidia/*/lib"))]


def gpus():
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False) if shutil.which("nvidia-smi") else None
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed and listed.returncode == 0 else 0


def why_not(step, device):
    """Why the step is skipped; empty: it is not."""
    if device == "cpu" and step.on_cpu:
        return step.on_cpu
    if step.needs and shutil.which(step.needs) is None:
        return f"{step.needs} is not on PATH"
    if device == "cuda" and step.gpus > 1 and gpus() < step.gpus:
        return f"there are fewer than {step.gpus} GPUs"
    return ""


def run(step, device, base):
    """What became of the step, as its JSON file has it."""
    why = why_not(step, device)
    if why:
        return {"status": "skipped", "why": why}
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile("w+", errors="replace") as output:
        words = {"device": device, "python": sys.executable, "scratch": scratch, **SIZES[device]}
        command = [word.format(**words) if "{" in word else word for word in step.command]
        own = {**step.environment, **(step.gpu_environment if device != "cpu" else {})}
        start = time.monotonic()
        result = {"command": command, "environment": own}
        try:
            program = subprocess.Popen(command, cwd=HERE, env={**base, **own}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            code = program.wait(step.limit_s)
            result |= {"status": "done" if code == 0 else "failed", "why": "" if code == 0 else f"it ended with status {code}"}
        except OSError as error:
            result |= {"status": "failed", "why": str(error)}
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
            result |= {"status": "failed", "why": f"it ran longer than {step.limit_s} s"}
        output.seek(0)
        text = output.read()
        if result["status"] == "done" and "Running 0 tests" in text:
            result |= {"status": "failed", "why": "no test has such a name"}
        return {**result, "seconds": round(time.monotonic() - start, 1), "output": text[-TAIL:]}


def write(path, text):
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def page(device, results):
    rows = "".join(f"<tr><td><a href='#{s.name}'>{html.escape(s.about)}</a><td class={r['status']}>{r['status']}<td>{r.get('seconds', '')}"
                   f"<td>{html.escape(r['why'])}" for s, r in results)
    parts = "".join(f"<h2 id='{s.name}'>{html.escape(s.about)}</h2><p><code>{html.escape(' '.join(r['command']))}</code>"
                    f"<pre>{html.escape(r['output'])}</pre>" for s, r in results if "output" in r)
    style = "body{font:15px sans-serif;margin:2em}td{padding:.2em .8em}pre{background:#eee;padding:1em;overflow:auto}.failed{color:#b00}.done{color:#070}"
    return (f"<!doctype html><meta charset=utf-8><title>snug on {device}</title><style>{style}</style><h1>snug on {device}</h1>"
            f"<table><tr><th>step<th>result<th>seconds<th>{rows}</table>{parts}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--device", choices=SIZES, default="cuda")
    arguments = parser.parse_args()
    paths = [*map(str, libraries()), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]  # the last may have the driver's
    base = dict(os.environ, LD_LIBRARY_PATH=":".join(paths), OMP_WAIT_POLICY="passive")
    arguments.results.mkdir(parents=True, exist_ok=True)
    results = []
    for step in STEPS:
        path = arguments.results / f"{step.name}.json"
        if path.exists():
            result = json.loads(path.read_text())
        else:
            result = run(step, arguments.device, base)
            write(path, json.dumps({"step": step.name, "device": arguments.device, **result}, indent=1) + "\n")
        print(f"{step.name}: {result['status']}{': ' if result['why'] else ''}{result['why']}", flush=True)
        results.append((step, result))
        write(arguments.results / "index.html", page(arguments.device, results))
    return 1 if any(result["status"] == "failed" for _, result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
