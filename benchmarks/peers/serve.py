"""The protocol of benchmarks/serve.h."""

import sys
import time


def serve(cases):
    prepared = {}
    print("ready", flush=True)
    for line in sys.stdin:
        name, repeats = line.split()
        if name not in prepared:
            prepared[name] = cases[name]()
            prepared[name]()
            prepared[name]()
        start = time.perf_counter()
        for _ in range(int(repeats)):
            prepared[name]()
        print(time.perf_counter() - start, flush=True)
