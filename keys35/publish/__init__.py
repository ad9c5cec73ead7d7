"""Publishing: what may leave this machine, how it gets to the hub and how a source comes from there."""
