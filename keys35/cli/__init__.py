"""The terminal: parse, call a stage, print. Each command imports the stage it runs, so that a refusal is fast."""

from keys35 import interrupt

try:
    from keys35.cli import job, proof, publish
    from keys35.cli.frame import app, main
except KeyboardInterrupt:
    interrupt.say()
    raise SystemExit(interrupt.INTERRUPTED) from None

__all__ = ["app", "job", "main", "proof", "publish"]
