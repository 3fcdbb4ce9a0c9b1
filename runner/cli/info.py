"""`slotfile info`: what an executable or a GGUF file holds."""

from pathlib import Path
from typing import Any, Final

import click
import msgspec

from runner.bundle.gguf import read_header
from runner.bundle.header import Header
from runner.bundle.kv_cells import cell_bytes, check_cache_types
from runner.bundle.locate import Bundle, current_bundle, find_bundle
from runner.bundle.manifest import Manifest
from runner.bundle.pack import verify as verify_model
from runner.cli.options import Chosen, cache_type, known, kv_mode, settings_options
from runner.cli.progress import byte_progress
from runner.config import MODEL_SETTINGS, EngineConfig, ModelFile, check_kv
from runner.engine.capacity import DEFAULT_SLOTS, SlotMemory
from runner.errors import ConfigError

Facts = dict[str, Any]

KV_SETTINGS: Final = ("slots", "ctx", "batch", "cache-type-k", "cache-type-v", "swa-full", "kv", "kv-pool")


@click.command(short_help="Show what an executable or a GGUF file holds.")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--verify", is_flag=True, help="hash the whole model and compare with the manifest")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@settings_options([setting for setting in MODEL_SETTINGS if setting.name in KV_SETTINGS])
@click.pass_context
def info(ctx: click.Context, /, file: Path | None, *, verify: bool, as_json: bool, **_: object) -> None:
    """Show what FILE (default: this executable) holds. FILE is an executable of this program or a GGUF.

    With --slots and --ctx, or their defaults, also what the KV cache will take.
    """
    bundle = current_bundle() if file is None else find_bundle(file)
    if bundle is None and file is None:
        raise ConfigError("A source checkout holds no model", hint="slotfile info FILE")
    facts = _facts_of_gguf(ctx, file) if bundle is None and file is not None else _facts_of_bundle(ctx, bundle)
    if verify:
        facts["verified"] = _verified(bundle)
    click.echo(msgspec.json.format(msgspec.json.encode(facts), indent=2).decode() if as_json else "\n".join(_lines(facts)))


def _verified(bundle: Bundle | None) -> str:
    if bundle is None or bundle.model is None:
        raise ConfigError("Only an executable with a model can be verified: a plain GGUF carries no hash of itself")
    with byte_progress("verifying", bundle.model.length) as progress:
        verify_model(bundle, progress)
    return "the model has the SHA-256 of its manifest"


def _facts_of_gguf(ctx: click.Context, path: Path) -> Facts:
    header = read_header(path)
    facts = {"file": str(path), "size": header.size, "gguf": _facts_of_header(header)}
    return facts | _facts_of_kv_cache(header, Chosen(ctx, {})) if _is_language_model(header) else facts


def _facts_of_bundle(ctx: click.Context, bundle: Bundle | None) -> Facts:
    assert bundle is not None
    facts: Facts = {"file": str(bundle.path), "size": bundle.size, "program_bytes": bundle.runtime_bytes}
    if bundle.model is None or bundle.manifest is None:
        return facts | {"model": "none: start it with --model FILE.gguf"}
    header = read_header(bundle.model)
    header.check_usable()
    place = {"offset": bundle.model.offset, "length": bundle.model.length}
    model = _facts_of_manifest(bundle.manifest) | place
    return facts | {"model": model, "gguf": _facts_of_header(header)} | _facts_of_kv_cache(header, Chosen(ctx, bundle.manifest.arguments))


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
    if not _is_language_model(header):
        return facts
    return facts | {
        "architecture": header.architecture,
        "layers": header.block_count,
        "context": header.n_ctx_train,
        "sliding_window": header.n_swa,
    }


def _is_language_model(header: Header) -> bool:
    return header.text("general.architecture") is not None and header.kind == "model"


def _facts_of_kv_cache(header: Header, chosen: Chosen) -> Facts:
    """What the slots would take that were asked for, or are the default where memory holds them."""
    config = EngineConfig(
        model=ModelFile("", 0, header.size),
        model_name="",
        n_slots=chosen.number("slots"),
        n_ctx_slot=chosen.number("ctx"),
        n_batch=known(chosen.number("batch")),
        cache_type_k=cache_type(chosen, "cache-type-k"),
        cache_type_v=cache_type(chosen, "cache-type-v"),
        swa_full=chosen.flag("swa-full"),
        kv=kv_mode(chosen),
        kv_pool=chosen.number("kv-pool"),
    )
    check_cache_types(header, config)
    check_kv(config)
    memory = SlotMemory.of(header, config)
    n_slots, n_ctx = config.n_slots or DEFAULT_SLOTS, config.n_ctx_slot or memory.default_ctx(header.n_ctx_train)
    pool = {"tokens_of_pool": memory.pool_tokens(n_slots, n_ctx)} if memory.is_unified else {}
    return {
        "kv_cache": {
            "slots": n_slots,
            "tokens_per_slot": n_ctx,
            **pool,
            "keys": config.cache_type_k,
            "values": config.cache_type_v,
            "bytes_per_token": cell_bytes(header, config).total,
            "bytes": memory.total_bytes(n_slots, n_ctx),
        }
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
