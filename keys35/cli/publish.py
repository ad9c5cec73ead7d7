"""Commands that talk to the hub."""

from pathlib import Path
from typing import Annotated

import typer

from keys35.cli.frame import app, voice


@app.command()
def upload(
    out: Annotated[Path, typer.Argument(help="finished checkpoint")],
    repo: Annotated[str, typer.Argument(help="repository on the hub, as owner/name; created if it is not there")],
    private: Annotated[bool, typer.Option("--private", help="create it as a private one")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="delete files there that are not the checkpoint's")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only check whether it may be published")] = False,
) -> None:
    """Publish a checkpoint: checked first, compared afterwards, marked complete last; run it again to resume.

    Example: keys35 upload OUT owner/GLM-5.3-EXL3-2.75
    """
    from keys35.publish.hub import Hub
    from keys35.publish.preflight import preflight
    from keys35.publish.upload import upload as run_upload
    from keys35.report.terminal import count, human_bytes

    if dry_run:
        with voice.progress() as progress:
            files = preflight(out, repo, progress)
        size = human_bytes(sum(file.size for file in files))
        voice.say(f"{out}: {count(len(files), 'file')}, {size} may go to {repo}", "passed")
        voice.result({"repo": repo, "files": files})
        return
    with voice.progress() as progress:
        done = run_upload(out, Hub.connect(repo), progress, private=private, prune=prune)
    voice.say(f"{done.repo} at {done.revision}: {count(done.files, 'file')}, "
              f"{human_bytes(done.bytes)}; sent {len(done.sent)} this time", "complete")
    voice.result(done)


@app.command()
def fetch(
    repo: Annotated[str, typer.Argument(help="repository on the hub, as owner/name")],
    to: Annotated[Path, typer.Option("--to", help="directory for the checkpoint")],
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit; the default branch if left out")] = None,
) -> None:
    """Get a source from the hub at one pinned commit and verify every byte; run it again to resume.

    Example: keys35 fetch zai-org/GLM-5.3-BF16 --to GLM-5.3-BF16
    """
    from keys35.publish.fetch import fetch as run_fetch
    from keys35.publish.hub import Hub
    from keys35.report.terminal import count, human_bytes

    hub = Hub.connect(repo)
    pinned = hub.resolve(revision)
    voice.say(f"{repo} at {pinned}")
    with voice.progress() as progress:
        done = run_fetch(hub, to, progress, pinned)
    voice.say(f"{to}: {count(done.files, 'file')}, {human_bytes(done.bytes)}, "
              f"{count(len(done.source.tensors), 'tensor')}", "verified")
    if done.source.fp8:
        voice.say("Its weights are FP8: plan, measure and run want --fp8, and the result inherits that loss")
    voice.result({"repo": repo, "revision": pinned, "to": to, "files": done.files, "bytes": done.bytes})
