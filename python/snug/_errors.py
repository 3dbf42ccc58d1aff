"""The errors of snug, as in C++ (include/snug/core.h)."""

import torch


class Error(RuntimeError):
    """The base of all errors that snug raises on purpose."""


class ConfigError(Error, ValueError):
    """An option, argument or call order that cannot work."""


class CorruptFile(Error):
    """A file, or a state, whose content does not follow its format."""


class BudgetExceeded(Error, torch.OutOfMemoryError):
    """A step that does not fit into the bytes that it was given. What catches torch.OutOfMemoryError, to go on with a smaller
    batch, catches it, too."""

    #: The smallest budget, in bytes, that would do; 0: it is not known, since nothing is run beyond the budget to find out.
    smallest_feasible: int = 0
