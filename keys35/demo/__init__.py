"""The bundled trained checkpoint (9.3 M parameters) and its text."""

from importlib.resources import files
from pathlib import Path

MODEL = Path(str(files("keys35"))) / "demo" / "model"
