"""What paired measurements can tell: the median of ratios, an interval for it, and a verdict on a target.

A pair is two times that were taken one right after the other. The same program measured against itself in the same turns
(A/A) tells how far the harness moves by itself.
"""

import random
import statistics

LEVEL = 0.95
RESAMPLES = 2000


def bootstrap_interval(ratios, level=LEVEL, resamples=RESAMPLES):
    """The percentile interval of the median (Efron 1979) over resamples of the pairs, the same at every call."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(resamples))
    out = round((1 - level) / 2 * (resamples - 1))
    return medians[out], medians[-1 - out]


def summary(ratios):
    low, high = bootstrap_interval(ratios)
    return {"median": statistics.median(ratios), "low": low, "high": high, "lowest": min(ratios), "highest": max(ratios)}


def verdict(target, at_most, ratio, same):
    """met, missed, or "cannot be told here", of summaries. The ratio's interval is widened by as much as that of the same program
    against itself reaches away from 1: a difference that the harness makes by itself proves nothing. `same` may be None."""
    if target is None:
        return None
    moves = max(same["high"], 1 / same["low"], 1.0) if same and same["low"] > 0 else 1.0
    low, high = ratio["low"] / moves, ratio["high"] * moves
    if at_most:
        low, high, target = -high, -low, -target
    return "met" if low >= target else "missed" if high < target else "cannot be told here"
