"""The demo, whole: trains, samples and compares as a newcomer would, and holds it to what the README says.

usage: demo_test.py ROOT-OF-THE-PROJECT
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(sys.argv[1]).resolve()


def records(run):
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()[1:]]
    return [line for line in lines if "event" not in line]


def main():
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        printed = subprocess.run([ROOT / "script" / "demo", out], check=True, capture_output=True, text=True, errors="replace").stdout
        trained = records(out / "shakespeare")
        assert trained[-1]["validation_loss"] < 2.0, trained[-1]
        assert max(r["peak_bytes"] for r in trained) <= 200 << 20
        plain, checkpointed = records(out / "plain"), records(out / "checkpointed")
        assert len(plain) == len(checkpointed) == 20
        for a, b in zip(plain, checkpointed):
            assert abs(a["loss"] - b["loss"]) <= 1e-5 * a["loss"], (a, b)
        peak = lambda run: max(r["activation_peak_bytes"] for r in run)
        assert peak(checkpointed) <= 0.4 * peak(plain), (peak(plain), peak(checkpointed))
        assert re.search(r"peak of activations .*-\d", printed), printed
        assert (out / "shakespeare" / "report.html").stat().st_size > 10_000

        # In 35 % of what plain training takes: the same bits, and the report shows the plan.
        budget = max(r["peak_bytes"] for r in plain) * 35 // 100
        subprocess.run([ROOT / "build" / "dev" / "cli" / "snug", "train", "--data", ROOT / "build" / "data" / "shakespeare", "--out", out / "planned",
                        "--steps", "20", "--micro-batch", "64", "--memory", str(budget)], check=True, capture_output=True)
        planned = records(out / "planned")
        assert [r["loss"] for r in planned] == [r["loss"] for r in plain]
        assert (out / "planned" / "model.safetensors").read_bytes() == (out / "plain" / "model.safetensors").read_bytes()
        assert max(r["peak_bytes"] for r in planned) <= budget
        assert "The plan" in (out / "planned" / "report.html").read_text()
        print("demo: done")


if __name__ == "__main__":
    main()
