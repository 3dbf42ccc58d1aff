"""snug: steps of training within a number of bytes, with the bits of plain training.

    import snug

    model = snug.auto_checkpoint(model, memory_budget="8GiB")          # a loop that stays as it is
    plan = snug.plan(lambda: loss_of(batch), budget="8GiB")            # a plan by hand
    stepper = snug.Stepper(model, optimizer, memory="8GiB")            # whole steps

See docs/python.md.
"""

from ._build import SNUG as __version__
from ._environment import prepare as _prepare

_prepare()  # first: it tells whether _snug, which is linked to torch's libraries, can be loaded

from ._auto_checkpoint import AutoCheckpoint, auto_checkpoint
from ._errors import BudgetExceeded, ConfigError, CorruptFile, Error
from ._estimate import MemoryEstimate, estimate_memory
from ._memory import MemoryLimit, MemoryMeter, live_bytes, move_with_weights_on_host
from ._optimizers import AdamW, AdamW8bit, StateFile, StateOnDevice, StateOnHost
from ._plan import curve, fits, plan
from ._snug import Loss, Plan, StepResult
from ._stepper import Stepper

del _prepare

__all__ = ["AdamW", "AdamW8bit", "AutoCheckpoint", "BudgetExceeded", "ConfigError", "CorruptFile", "Error", "Loss", "MemoryEstimate",
           "MemoryLimit", "MemoryMeter", "Plan", "StateFile", "StateOnDevice", "StateOnHost", "StepResult", "Stepper", "auto_checkpoint",
           "curve", "estimate_memory", "fits", "live_bytes", "move_with_weights_on_host", "plan"]
