"""Everything that is refused before the first byte leaves: a broken checkpoint, a size, a secret, a dead link."""

from collections import Counter
from pathlib import Path, PurePosixPath

from keys35.errors import ContractError, PublishError
from keys35.files.atomic import read_json
from keys35.progress import Progress
from keys35.publish.card import broken_links
from keys35.publish.files import Hashes, LocalFile, published_names
from keys35.publish.scan import scan_file
from keys35.report.facts import REPORT, REPOSITORY
from keys35.report.schema import SCHEMAS, read_report
from keys35.stages.check import check

# https://huggingface.co/docs/hub/storage-limits: repository recommendations.
MAX_FILE_BYTES = 50 * 10**9
MAX_ENTRIES = 10_000
SHOWN = 10


def preflight(out: Path, repo: str, progress: Progress | None = None) -> tuple[LocalFile, ...]:
    """The files to publish with sizes and SHA-256, once nothing speaks against publishing them.

    Raises ContractError if `check` finds anything or a report file is damaged, PublishError naming every file with a
    size or count over the hub's limits, a credential, a local path, a dead link in README.md, or bytes other than the
    report records.
    """
    out = Path(out)
    if not REPOSITORY.fullmatch(repo):  # the hub says so, too, but after every byte has been hashed
        raise PublishError(f"{repo!r} is no repository's name; give it as OWNER/NAME")
    findings = check(out).findings
    if findings:
        raise ContractError("\n".join([f"{out}: breaks its contract and is not published:", *map(str, findings)]))
    names = published_names(out)
    _refuse(out, over_limits({name: (out / name).stat().st_size for name in names}))
    local = tuple({str(Path.home()), str(out.resolve()), str(out.resolve().parent)})
    problems = [problem for name in names for problem in scan_file(out / name, name, local)]
    if "README.md" in names:
        problems += broken_links((out / "README.md").read_text(errors="replace"), repo, names)
    _refuse(out, problems)
    for name in sorted(SCHEMAS.keys() & set(names)):
        read_report(out / name, "write it again before it is published")
    hashes = Hashes(out)
    steps = (progress or Progress()).walk("hash", names)
    files = tuple(hashes.file(step.unit) for step in steps)
    recorded = {shard["file"]: shard["sha256"] for shard in read_json(out / REPORT)["shards"]}
    _refuse(out, [f"{file.name}: SHA-256 is {file.sha256}, {REPORT} records {recorded[file.name]}"
                  for file in files if recorded.get(file.name, file.sha256) != file.sha256])
    return files


def over_limits(sizes: dict[str, int]) -> list[str]:
    """Files and folders beyond what the hub takes; `sizes` in bytes by name."""
    large = [f"{name}: {size} bytes, the hub takes {MAX_FILE_BYTES}" for name, size in sizes.items()
             if size > MAX_FILE_BYTES]
    # Folders are entries too: each name counts once in every folder above it.
    paths = {path for name in sizes for path in (PurePosixPath(name), *PurePosixPath(name).parents[:-1])}
    entries = Counter(path.parent for path in paths)
    return large + [f"{folder}: {count} entries, the hub takes {MAX_ENTRIES} in a folder"
                    for folder, count in entries.items() if count > MAX_ENTRIES]


def _refuse(out: Path, problems: list[str]) -> None:
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise PublishError("\n  ".join([f"{out}: is not published; correct these files first:",
                                        *problems[:SHOWN], *more]))
