"""`slotfile info`: what an executable or a GGUF file holds."""

from pathlib import Path
from typing import Any

import click
import msgspec

from runner.bundle.gguf import read_header
from runner.bundle.header import Header
from runner.bundle.locate import Bundle, current_bundle, find_bundle
from runner.bundle.manifest import Manifest
from runner.bundle.pack import verify as verify_model
from runner.cli.progress import byte_progress
from runner.errors import ConfigError

Facts = dict[str, Any]


@click.command(short_help="Show what an executable or a GGUF file holds.")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--verify", is_flag=True, help="hash the whole model and compare with the manifest")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def info(file: Path | None, *, verify: bool, as_json: bool) -> None:
    """Show what FILE (default: this executable) holds. FILE is an executable of this program or a GGUF."""
    bundle = current_bundle() if file is None else find_bundle(file)
    if bundle is None and file is None:
        raise ConfigError("A source checkout holds no model", hint="slotfile info FILE")
    facts = _facts_of_gguf(file) if bundle is None and file is not None else _facts_of_bundle(bundle)
    if verify:
        facts["verified"] = _verified(bundle)
    click.echo(msgspec.json.format(msgspec.json.encode(facts), indent=2).decode() if as_json else "\n".join(_lines(facts)))


def _verified(bundle: Bundle | None) -> str:
    if bundle is None or bundle.model is None:
        raise ConfigError("Only an executable with a model can be verified: a plain GGUF carries no hash of itself")
    with byte_progress("verifying", bundle.model.length) as progress:
        verify_model(bundle, progress)
    return "the model has the SHA-256 of its manifest"


def _facts_of_gguf(path: Path) -> Facts:
    header = read_header(path)
    return {"file": str(path), "size": header.size, "gguf": _facts_of_header(header)}


def _facts_of_bundle(bundle: Bundle | None) -> Facts:
    assert bundle is not None
    facts: Facts = {"file": str(bundle.path), "size": bundle.size, "program_bytes": bundle.runtime_bytes}
    if bundle.model is None or bundle.manifest is None:
        return facts | {"model": "none: start it with --model FILE.gguf"}
    header = read_header(bundle.model)
    header.check_usable()
    place = {"offset": bundle.model.offset, "length": bundle.model.length}
    return facts | {"model": _facts_of_manifest(bundle.manifest) | place, "gguf": _facts_of_header(header)}


def _facts_of_manifest(manifest: Manifest) -> Facts:
    return {
        "name": manifest.name,
        "sha256": manifest.sha256,
        "license": manifest.license,
        "arguments": manifest.arguments,
        "chat_template": "its own" if manifest.chat_template is None else "from the manifest",
    }


def _facts_of_header(header: Header) -> Facts:
    facts: Facts = {
        "version": header.version,
        "name": header.name,
        "kind": header.kind,
        "file_type": header.file_type,
        "parameters": header.n_params,
        "tensors": len(header.tensors),
        "alignment": header.alignment,
        "vocabulary": header.n_vocab,
        "has_chat_template": header.chat_template is not None,
    }
    if header.split_count > 1:
        facts["part"] = f"{header.split_no + 1} of {header.split_count}"
    if header.text("general.architecture") is None or header.kind != "model":
        return facts
    return facts | {
        "architecture": header.architecture,
        "layers": header.block_count,
        "context": header.n_ctx_train,
        "sliding_window": header.n_swa,
        "kv_bytes_per_token": header.kv_bytes_per_token,
    }


def _lines(facts: Facts, indent: str = "") -> list[str]:
    lines = []
    for key, value in facts.items():
        if isinstance(value, dict) and value and key != "arguments":
            lines += [f"{indent}{key.replace('_', ' ')}", *_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key.replace('_', ' '):<{24 - len(indent)}}{_shown(value)}")
    return lines


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return " ".join(f"{name}={entry}" for name, entry in value.items()) or "none"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else str(value)
