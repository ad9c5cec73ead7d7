"""Who does the units of work: this process, processes of this machine, or a Ray cluster.

Knows nothing but tasks that end with a receipt. A task is a name and JSON arguments; its result lies in the work
directory, so a task that is done twice, by a worker that was thought dead, leaves the same bytes.
"""
