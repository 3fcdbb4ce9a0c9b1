"""`python -m build.wheel NAME==VERSION DIRECTORY`: one wheel as `pip download` gets it, except that a broken download goes on.

pip chooses the file and opens the connection, so that the person's own indexes, find-links, proxy, certificates and passwords hold; pip's
own download starts from zero each time. These are pip's inner parts: where a pip has others, `pip download` does it.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from build.download import AGAIN, READ_BYTES, Answer, Source, fetch
from runner.errors import ConfigError, RunnerError

OPTIONS: Final = ("--no-deps", "--only-binary", ":all:")


@dataclass(frozen=True, slots=True)
class Link:
    """A file of an index or a folder. `sha256` is None where the index tells none."""

    url: str
    filename: str
    sha256: str | None


def download_wheel(requirement: str, directory: Path) -> Path | None:
    """The wheel under its own name in `directory`; None where this pip does not let itself be asked. Raises ConfigError."""
    try:
        from pip._internal.commands import create_command
        from pip._vendor.packaging.requirements import Requirement

        command: Any = create_command("download")
        options, _ = command.parse_args([*OPTIONS, "--no-cache-dir", requirement])
        wanted = Requirement(requirement)
        with command.main_context():
            session = command.get_default_session(options)
            finder = command._build_package_finder(options, session)  # noqa: SLF001 - see above
            best = finder.find_best_candidate(wanted.name, wanted.specifier).best_candidate
            if best is None:
                raise ConfigError(f"pip finds no wheel of {requirement}", hint="python -m pip config debug shows where it looks")
            link = Link(best.link.url_without_fragment, best.link.filename, _sha256(best.link))
            return fetch(_source(session, link), directory / link.filename)
    except (ImportError, AttributeError, TypeError):
        return None


def _sha256(link: Any) -> str | None:
    return str(link.hash) if link.hash_name == "sha256" else None


def _source(session: Any, link: Link) -> Source:
    def open_at(start: int) -> Answer:
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        try:
            response = session.get(link.url, headers=headers, stream=True)
        except OSError as error:  # the errors of pip's HTTP library are of this kind
            raise ConfigError(f"{link.filename} cannot be reached: {error}", hint=AGAIN) from error
        length = response.headers.get("Content-Length")
        return Answer(response.status_code, int(length) if length else None, response.iter_content(READ_BYTES))

    return Source(link.filename, open_at, link.sha256)


def main(requirement: str, directory: Path) -> int:
    """The exit code."""
    try:
        if download_wheel(requirement, directory) is not None:
            return 0
    except RunnerError as error:
        print(f"Error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    command = [sys.executable, "-m", "pip", "download", *OPTIONS, "--dest", str(directory), requirement]
    return subprocess.run(command, stdout=sys.stderr).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
