"""`slotfile cache`: what lies in a directory of parked cells, and its end."""

import time
from pathlib import Path
from typing import Final

import click

from runner.cli.options import settings_options
from runner.config import KV_DIR_SETTING
from runner.errors import ConfigError
from runner.serving.kv_inventory import Stored, clear, take_inventory

MIB: Final = 1 << 20


@click.group(short_help="List or delete conversations kept on disk.")
def cache() -> None:
    """List or delete the conversations that --kv-dir keeps on disk."""


@cache.command("list", short_help="List what is kept, by model.")
@settings_options([KV_DIR_SETTING])
def list_states(*, kv_dir: Path | None) -> None:
    """List by model and settings: conversations, size, and when the longest unused one was of use."""
    found = take_inventory(_named(kv_dir))
    for stored in found.stored:
        click.echo(_line(stored))
    if found.n_unusable:
        click.echo(f"unusable: {_amount(found.n_unusable, found.n_unusable_bytes)}")
    if not (found.stored or found.n_unusable):
        click.echo(f"nothing in {kv_dir}")


@cache.command("clear", short_help="Delete all that is kept.")
@settings_options([KV_DIR_SETTING])
def clear_states(*, kv_dir: Path | None) -> None:
    """Delete the conversations of all models. Files that are none of ours stay, and so does what a server is writing."""
    path = _named(kv_dir)
    cleared = clear(path)
    click.echo(f"deleted {_amount(cleared.n_files, cleared.n_bytes)} in {path}")
    if cleared.n_kept:
        raise ConfigError(f"{cleared.n_kept} files in {path} could not be deleted")


def _named(kv_dir: Path | None) -> Path:
    if kv_dir is None:
        raise ConfigError("No directory is named", hint=f"{KV_DIR_SETTING.flag} DIR, or the variable {KV_DIR_SETTING.env}")
    return kv_dir


def _line(stored: Stored) -> str:
    key = stored.key
    oldest = time.strftime("%Y-%m-%d %H:%M", time.localtime(stored.oldest_at))
    settings = (
        f"{key.n_streams} slots of {key.n_ctx_slot:,} tokens, {key.cache_type_k}/{key.cache_type_v}, llama.cpp {key.llama_cpp_version}"
    )
    return f"{stored.model_name or 'unnamed'}  {_amount(stored.n_states, stored.n_bytes)}  oldest {oldest}  {settings}"


def _amount(n_files: int, n_bytes: int) -> str:
    return f"{n_files:,} {'file' if n_files == 1 else 'files'}, {n_bytes / MIB:.1f} MiB"
