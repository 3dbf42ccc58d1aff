"""The demo, whole: trains, samples and compares as a newcomer would, and holds it to docs/start.md.

usage: demo_test.py ROOT-OF-THE-PROJECT
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(sys.argv[1]).resolve()


def records(run):
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()[1:]]
    return [line for line in lines if "event" not in line]


# Weights of 151 MiB in 60 MiB, killed in the third step and resumed: the bits of a run in memory.
def train_in_less_than_the_weights(out):
    train = [ROOT / "build" / "dev" / "bin" / "snug", "train", "--data", ROOT / "build" / "data" / "shakespeare", "--model", "gpt-medium",
             "--batch", "2", "--micro-batch", "2", "--steps", "4", "--snapshot-every", "2"]
    subprocess.run([*train, "--out", out / "in memory"], check=True, capture_output=True)
    in_files = [*train, "--out", out / "in files", "--memory", "60MiB", "--offload"]
    run = subprocess.Popen(in_files, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in run.stdout:
        if line.startswith("step 2/"):
            break
    deadline = time.monotonic() + 600
    while not list((out / "in files" / "snapshots").glob("*2*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    run.kill()
    run.wait()
    assert records(out / "in files")[-1]["step"] < 4
    resumed = subprocess.run([*in_files, "--resume"], check=True, capture_output=True, text=True).stdout
    assert "resumed after step 2" in resumed, resumed
    assert (out / "in files" / "model.safetensors").read_bytes() == (out / "in memory" / "model.safetensors").read_bytes()
    assert max(r["peak_bytes"] for r in records(out / "in files")) <= 60 << 20
    assert min(r["peak_bytes"] for r in records(out / "in memory")) > 500 << 20


def main():
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        printed = subprocess.run([ROOT / "script" / "demo", out], check=True, capture_output=True, text=True, errors="replace").stdout
        trained = records(out / "shakespeare")
        assert trained[-1]["validation_loss"] < 2.0, trained[-1]
        assert max(r["peak_bytes"] for r in trained) <= 64 << 20
        plain, planned = records(out / "plain"), records(out / "planned")
        assert len(plain) == len(planned) == 20
        for a, b in zip(plain, planned):
            assert abs(a["loss"] - b["loss"]) <= 1e-5 * a["loss"], (a, b)
        assert max(r["peak_bytes"] for r in planned) <= 96 << 20 < min(r["peak_bytes"] for r in plain)
        assert re.search(r"peak of all tensors .*-\d", printed), printed
        assert (out / "shakespeare" / "report.html").stat().st_size > 10_000

        # In 35 % of what plain training takes: the same bits, and the report shows the plan.
        budget = max(r["peak_bytes"] for r in plain) * 35 // 100
        subprocess.run([ROOT / "build" / "dev" / "bin" / "snug", "train", "--data", ROOT / "build" / "data" / "shakespeare", "--out", out / "to the bit",
                        "--steps", "20", "--micro-batch", "64", "--memory", str(budget)], check=True, capture_output=True)
        exact = records(out / "to the bit")
        assert [r["loss"] for r in exact] == [r["loss"] for r in plain]
        assert (out / "to the bit" / "model.safetensors").read_bytes() == (out / "plain" / "model.safetensors").read_bytes()
        assert max(r["peak_bytes"] for r in exact) <= budget
        assert "The plan" in (out / "to the bit" / "report.html").read_text()
        train_in_less_than_the_weights(out)
        print("demo: done")


if __name__ == "__main__":
    main()
