"""Where a layer's states and rows lie while it is worked on: on the host, or on a GPU with room for them."""

import torch

from keys35.stages.job import Job
from keys35.stages.needs import rows_stay, states_stay


def rows_home(job: Job, nbytes: int) -> torch.device:
    """For so many bytes of rows; from a GPU's own memory picking an expert's takes no time."""
    return _home(job, job.device.type == "cuda" and rows_stay(nbytes, job.recipe, _memory(job)))


def states_home(job: Job) -> torch.device:
    """For the states that go through the layers."""
    return _home(job, job.device.type == "cuda" and states_stay(job.config, job.recipe, _memory(job)))


def _home(job: Job, stay: bool) -> torch.device:
    return job.device if stay else torch.device("cpu")


def _memory(job: Job) -> int:
    return torch.cuda.get_device_properties(job.device).total_memory
