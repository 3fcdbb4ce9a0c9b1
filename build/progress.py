"""A progress bar on standard error that keeps quiet where nobody watches."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from runner.bundle.copying import Progress as Report


@contextmanager
def progress_bar(what: str, n_bytes: int) -> Iterator[Report]:
    """Yields the function to call with the bytes done since the last call."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=n_bytes or None)
        yield lambda n: progress.advance(task, n)
