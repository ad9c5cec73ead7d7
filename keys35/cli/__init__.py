"""The terminal: parse, call a stage, print. Each command imports the stage it runs, so that a refusal is fast."""

from keys35.cli import job, proof, publish
from keys35.cli.frame import app, main

__all__ = ["app", "job", "main", "proof", "publish"]
