"""Every refusal a user can meet, each with its own exit code.

A message says what was found, which names it concerns, and what to do.
"""


class Keys35Error(Exception):
    """A refusal the user can act on; the terminal prints it without a traceback."""

    exit_code = 1


class UsageError(Keys35Error):
    """The command line names no command, or an option or a value that it does not have."""

    exit_code = 2


class RecipeError(Keys35Error):
    """The recipe is malformed or asks for something impossible."""

    exit_code = 3


class SourceError(Keys35Error):
    """The source checkpoint is missing, damaged, inconsistent or unsupported."""

    exit_code = 4


class IncompleteError(SourceError):
    """The source is still being downloaded, or its download was broken off; waiting for it may help."""


class PlanError(Keys35Error):
    """The job cannot be planned: a tensor without a rule, a shape that cannot be cut, no room on disk."""

    exit_code = 5


class ResumeError(Keys35Error):
    """The work directory belongs to another job, is locked, or is damaged."""

    exit_code = 6


class BudgetError(Keys35Error):
    """No allocation of whole experts meets the bit budget exactly."""

    exit_code = 7


class EncodeError(Keys35Error):
    """A tensor cannot be encoded: NaN or Inf in the weights, or an unsupported shape or width."""

    exit_code = 8


class ContractError(Keys35Error):
    """A finished checkpoint breaks a rule that serving engines insist on."""

    exit_code = 9


class RankError(Keys35Error):
    """A rank of the tensor-parallel runtime failed or disagrees with the others."""

    exit_code = 10


class PublishError(Keys35Error):
    """Something must not be published as it is, or the hub refused, stayed away or holds other bytes."""

    exit_code = 11


class WorkerError(Keys35Error):
    """Workers cannot be had, die again and again over one unit of work, or have too little memory for it."""

    exit_code = 12


def out_of_memory(error: Exception) -> WorkerError | None:
    """The refusal that running out of memory is, on the host or on a GPU; None for any other error.

    torch's own errors are known by name and words: importing torch takes longer than most refusals.
    """
    text = " ".join(str(error).split())
    torchs = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator: can't allocate memory" in text
    if not (isinstance(error, MemoryError) or torchs):
        return None
    return WorkerError(f"out of memory ({text[:120]}); finished work is kept. `keys35 plan` says what a job needs: let "
                       "nothing else use the memory, start fewer --workers, or begin anew with encoder.low_memory or a "
                       "smaller experts.group")
