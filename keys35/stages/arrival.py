"""Wait for a source that is still being downloaded: its index is there, its shards arrive one by one."""

import time
from pathlib import Path

from keys35.errors import IncompleteError, SourceError
from keys35.files.atomic import read_json
from keys35.files.headers import read_header
from keys35.files.index import AGAIN, read_weight_map
from keys35.files.shards import INDEX_NAME
from keys35.files.source import SINGLE_NAME
from keys35.progress import Progress

POLL_S = 30.0


def wait_for_source(root: Path, progress: Progress, poll_s: float = POLL_S) -> None:
    """Return when every shard of the index, or the only one, is whole, looking every `poll_s` seconds.

    Raises SourceError at once for anything that waiting does not mend: no index, a malformed shard.
    """
    path = root / INDEX_NAME
    if not path.exists() and (root / SINGLE_NAME).exists():
        missing = [SINGLE_NAME]
    else:
        missing = sorted(set(read_weight_map(path, read_json(path, SourceError, AGAIN)).values()))
    meter = progress.meter("download", len(missing))
    while missing:
        for file in [file for file in missing if _is_whole(root / file)]:
            missing.remove(file)
            meter.count(file)
        if missing:
            meter.beat()
            time.sleep(poll_s)


def _is_whole(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        read_header(path)
    except IncompleteError:
        return False
    return True
