"""`slotfile licenses`: the licence of every part of an executable."""

import click

from runner.bundle.licenses import Notice, collected, of_model
from runner.bundle.locate import current_bundle


@click.command(short_help="Print the licences of the program, its libraries and the model.")
@click.option("--list", "only_names", is_flag=True, help="name the parts and their licences without the texts")
def licenses(*, only_names: bool) -> None:
    """Print the licences of the program, of each library in it, and of the model."""
    bundle = current_bundle()
    notices = collected()
    if bundle is not None and bundle.manifest is not None:
        notices.append(of_model(bundle.manifest))
    for notice in notices:
        click.echo(f"{notice.name}: {notice.license}" if only_names else _page(notice))


def _page(notice: Notice) -> str:
    heading = f"{notice.name} ({notice.license})"
    return f"{heading}\n{'=' * len(heading)}\n\n{notice.text.strip()}\n\n"
