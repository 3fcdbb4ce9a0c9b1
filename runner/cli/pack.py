"""`slotfile pack`: another model in a copy of this executable."""

import re
from pathlib import Path

import click

from runner.bundle.arguments import parse_arguments
from runner.bundle.locate import Bundle, current_bundle, find_bundle
from runner.bundle.pack import Label
from runner.bundle.pack import pack as pack_model
from runner.bundle.source import open_source
from runner.cli.progress import byte_progress
from runner.errors import ConfigError

MAX_TEXT_BYTES = 4 * 1024 * 1024


@click.command(short_help="Make an executable of another model.")
@click.option("-m", "--model", type=click.Path(path_type=Path), required=True, help="GGUF file; of a model in parts, any part")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="file to write")
@click.option("--name", help="the model's name on the wire (default: the GGUF file's name)")
@click.option("--license", "license_name", default="unknown", show_default=True, help="name of the model's licence")
@click.option("--license-file", type=click.Path(path_type=Path), help="text of the model's licence")
@click.option("--chat-template", type=click.Path(path_type=Path), help="Jinja chat template that replaces the model's own")
@click.option(
    "--arg", "arguments", multiple=True, metavar="NAME=VALUE", help="default for an option, as in ctx=4096; may be given several times"
)
@click.option("--runtime", type=click.Path(path_type=Path), help="executable whose program part is copied (default: the running one)")
def pack(
    model: Path,
    output: Path,
    name: str | None,
    license_name: str,
    license_file: Path | None,
    chat_template: Path | None,
    arguments: tuple[str, ...],
    runtime: Path | None,
) -> None:
    """Write an executable that holds MODEL and the program of this one. Needs no Python, compiler or network."""
    source = open_source(model)
    label = Label(
        name or model_name(model),
        license_name,
        _text(license_file) or "",
        _text(chat_template),
        parse_arguments(arguments),
    )
    with byte_progress(f"packing {label.name}", 2 * source.length) as progress:
        packed = pack_model(_runtime(runtime), source, label, output, progress)
    for note in source.notes:
        click.echo(note, err=True)
    click.echo(f"{output}: {packed.size / 1e6:.1f} MB, of which {source.length / 1e6:.1f} MB model")


def model_name(path: Path) -> str:
    """A name for the wire from a file's name: without what says that it is a GGUF or a part of one."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", path.name) or path.name


def _runtime(path: Path | None) -> Bundle:
    runtime = current_bundle() if path is None else find_bundle(path)
    if runtime is None:
        what = "A source checkout is no executable to pack from" if path is None else f"{path} is no executable of this program"
        raise ConfigError(what, hint="make exe builds one; --runtime FILE names one")
    return runtime


def _text(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        if not path.is_file():
            raise ConfigError(f"{path} is no file")
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes; the limit is {MAX_TEXT_BYTES}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
