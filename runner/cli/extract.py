"""`slotfile extract`: the model inside an executable as a GGUF of its own."""

from pathlib import Path

import click

from runner.bundle.locate import current_bundle, find_bundle
from runner.bundle.pack import extract as extract_model
from runner.cli.progress import byte_progress
from runner.errors import ConfigError


@click.command(short_help="Write the model inside an executable to a file.")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="GGUF file to write")
def extract(file: Path | None, output: Path) -> None:
    """Write the model inside FILE (default: this executable) to a GGUF file and check its hash on the way."""
    bundle = current_bundle() if file is None else find_bundle(file)
    if bundle is None or bundle.model is None:
        raise ConfigError(f"{file or 'A source checkout'} holds no model")
    with byte_progress("extracting", bundle.model.length) as progress:
        extract_model(bundle, output, progress)
    click.echo(f"{output}: {bundle.model.length / 1e6:.1f} MB")
    manifest = bundle.manifest
    if manifest is not None and (manifest.chat_template or manifest.arguments):
        note = "The executable's chat template and default arguments are no part of a GGUF: pack takes them as --chat-template and --arg."
        click.echo(note, err=True)
