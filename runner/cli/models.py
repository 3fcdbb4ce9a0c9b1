"""`slotfile models`: what can be built from a checkout, or what lies in the executable."""

from pathlib import Path
from typing import Final

import click

from runner.bundle.catalogue import CatalogueEntry, read_catalogue
from runner.bundle.locate import Bundle, current_bundle
from runner.errors import ConfigError

CATALOGUE: Final = Path(__file__).parent.parent.parent / "models.toml"


@click.command(short_help="List the models that can be built by name.")
def models() -> None:
    """List the models of models.toml in a source checkout; in an executable, the one inside."""
    bundle = current_bundle()
    for line in _of_checkout() if bundle is None else _of_bundle(bundle):
        click.echo(line)


def _of_bundle(bundle: Bundle) -> list[str]:
    if bundle.manifest is None:
        return ["no model inside; start it with --model FILE.gguf"]
    manifest = bundle.manifest
    return [f"{manifest.name}  {manifest.size / 1e6:.1f} MB  {manifest.license}  inside this executable"]


def _of_checkout() -> list[str]:
    if not CATALOGUE.is_file():
        raise ConfigError("There is no models.toml here: this is neither a source checkout nor an executable")
    entries = read_catalogue(CATALOGUE)
    width = max(len(name) for name in entries)
    return [_line(name.ljust(width), entry) for name, entry in entries.items()]


def _line(name: str, entry: CatalogueEntry) -> str:
    form = f", built as {entry.quantize}" if entry.quantize else ""
    default = ", default" if entry.default else ""
    return f"{name}  {entry.size / 1e6:.1f} MB{form}{default}  {entry.license}  {entry.description}"
