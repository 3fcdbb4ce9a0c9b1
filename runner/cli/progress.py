"""A progress bar on standard error for work that is counted in bytes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from runner.bundle.copying import Progress


@contextmanager
def byte_progress(what: str, n_bytes: int) -> Iterator[Progress]:
    """Yields the function that is told the bytes done since the last call. Shows nothing where nobody watches."""
    with click.progressbar(
        length=n_bytes,
        label=what,
        file=sys.stderr,
        hidden=not sys.stderr.isatty(),
        show_eta=True,
        update_min_steps=max(1, n_bytes // 200),
    ) as bar:
        yield bar.update
