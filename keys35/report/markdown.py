"""The quality table inside a Markdown file, between two marks, rewritten from a run's own figures."""

from pathlib import Path

from keys35.errors import Keys35Error
from keys35.files.atomic import write_bytes
from keys35.report.terminal import QUALITY_COLUMNS, markdown_table, quality_rows

BEGIN, END = "<!-- quality: written by `make demo` -->", "<!-- /quality -->"


def update_quality_table(path: Path, result: dict) -> None:
    """Replace what stands between the marks; raises Keys35Error if the file lacks them."""
    text = path.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise Keys35Error(f"{path} lacks the marks {BEGIN} and {END} around its quality table")
    head, rest = text.split(BEGIN, 1)
    table = markdown_table(QUALITY_COLUMNS, quality_rows(result["baselines"]))
    write_bytes(path, f"{head}{BEGIN}\n\n{table}\n\n{END}{rest.split(END, 1)[1]}".encode())
