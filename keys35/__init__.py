"""keys35: stream a BF16 mixture-of-experts checkpoint into a small EXL3 one."""

__version__ = "0.1.0"
