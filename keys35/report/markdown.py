"""The quality table inside a Markdown file, between two marks, rewritten from a run's own figures."""

from pathlib import Path

from keys35.errors import PlanError
from keys35.files.atomic import write_bytes
from keys35.report.terminal import QUALITY_COLUMNS, markdown_table, own_figures, quality_rows

BEGIN, END = "<!-- quality: written by `make demo` -->", "<!-- /quality -->"


def text_with_marks(path: Path) -> str:
    """A file's text; raises PlanError if it lacks the marks, which is better known before the run than after it."""
    if not path.is_file():
        raise PlanError(f"{path}: no such file; give one with the marks {BEGIN} and {END}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); give a Markdown file") from None
    if END not in text.partition(BEGIN)[2]:
        raise PlanError(f"{path} lacks the marks {BEGIN} and {END} around its quality table")
    return text


def update_quality_table(path: Path, result: dict) -> None:
    """Replace what stands between the marks."""
    head, rest = text_with_marks(path).split(BEGIN, 1)
    table = markdown_table(QUALITY_COLUMNS, quality_rows(result["baselines"], own_figures(result)))
    write_bytes(path, f"{head}{BEGIN}\n\n{table}\n\n{END}{rest.split(END, 1)[1]}".encode())
