"""snug: steps of training within a number of bytes, with the bits of plain training.

    import snug

    plan = snug.plan(lambda: loss_of(batch), budget="8GiB")            # a loop of one's own
    stepper = snug.Stepper(model, optimizer, memory="8GiB")            # whole steps

See docs/python.md.
"""

from ._build import SNUG as __version__
from ._environment import prepare as _prepare

_prepare()  # first: it tells whether _snug, which is linked to torch's libraries, can be loaded

from ._adamw8bit import AdamW8bit
from ._errors import BudgetExceeded, ConfigError, CorruptFile, Error
from ._memory import MemoryLimit, MemoryMeter, live_bytes
from ._plan import curve, fits, plan
from ._snug import Loss, Plan, StepResult
from ._stepper import Stepper

del _prepare

__all__ = ["AdamW8bit", "BudgetExceeded", "ConfigError", "CorruptFile", "Error", "Loss", "MemoryLimit", "MemoryMeter", "Plan",
           "StepResult", "Stepper", "curve", "fits", "live_bytes", "plan"]
