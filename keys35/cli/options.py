"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from keys35.glm.config import refuse_other_architectures


def _supported(source: Path) -> Path:
    """Refuse an unsupported architecture before anything heavy is imported."""
    refuse_other_architectures(source)
    return source


Source = Annotated[Path, typer.Argument(help="directory of the BF16 checkpoint", callback=_supported)]


def _recipes(incomplete: str) -> list[str]:
    """Shipped recipes for the shell's completion."""
    from keys35.recipe import shipped_recipes

    return [name for name in shipped_recipes() if name.startswith(incomplete)]


RecipeName = Annotated[
    str, typer.Option("--recipe", help="TOML file, or the name of a shipped recipe", autocompletion=_recipes)
]
Work = Annotated[Path, typer.Option("--work", help="work directory; the same command again resumes in it")]
Out = Annotated[Path, typer.Option("--out", help="directory of the finished checkpoint")]
Count = Annotated[
    int, typer.Option("--workers", min=0, help="processes that encode; 0: one per GPU, or this one alone without")
]
Place = Annotated[Literal["local", "ray"], typer.Option("--engine", help="on this machine, or on a Ray cluster")]
Address = Annotated[str, typer.Option("--address", help="the Ray cluster's HOST:PORT; auto: the one of this host")]
Kept = Annotated[
    Literal["all", "errors"],
    typer.Option("--keep", help="encodings that stay on disk: of all widths, or errors and one width (chosen ones are "
                 "encoded again)"),
]
Fp8 = Annotated[bool, typer.Option("--fp8", help="the source holds FP8 weights; sets the recipe's source.fp8")]
Wait = Annotated[bool, typer.Option("--wait", help="wait for a source that is still being downloaded")]
Tp = Annotated[int, typer.Option("--tp", min=1, help="tensor-parallel ranks")]
PanelFiles = Annotated[list[Path], typer.Option("--panel", help="a text; give it again for each domain")]
Rows = Annotated[int, typer.Option("--rows", min=1, help="windows of each --panel text")]
Length = Annotated[int, typer.Option("--len", min=3, help="tokens of each of these windows")]
Scratch = Annotated[Path | None, typer.Option(help="where reference states are kept; beside OUT")]
Device = Annotated[Literal["auto", "cuda", "cpu"], typer.Option(help="where ranks compute; auto: GPUs, if enough")]
Dtype = Annotated[Literal["float32", "bfloat16"], typer.Option(help="what products are made in")]
