"""What the fetch_*.py scripts share: an archive from a fixed address, checked, and a folder that is there whole or not at all."""

import contextlib
import hashlib
import pathlib
import shutil
import sys
import urllib.error
import urllib.request


def archive(program: str, url: str, sha256: str, otherwise: str) -> bytes:
    """What is at `url`. If it cannot be read or is not what it should be, ends the program; `otherwise` tells how to go on without it."""
    print(f"fetching {url.rsplit('/', 1)[1]}")
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            content = response.read()
    except (urllib.error.URLError, TimeoutError) as error:
        sys.exit(f"{program}: cannot read {url}: {error}. {otherwise}")
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        sys.exit(f"{program}: {url} has SHA-256 {found}, not {sha256}; it was changed or cut short on its way")
    return content


@contextlib.contextmanager
def new_folder(folder: pathlib.Path):
    """A folder to write into, which becomes `folder` if nothing fails."""
    unfinished = folder.with_name(folder.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    yield unfinished
    unfinished.rename(folder)


def run(script_help: str, main) -> None:
    """Calls main(FOLDER) with the one argument of the program, unless that folder is there already."""
    if len(sys.argv) != 2:
        sys.exit(script_help)
    folder = pathlib.Path(sys.argv[1])
    if not folder.is_dir():
        main(folder)
