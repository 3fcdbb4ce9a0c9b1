"""`slotfile bench`: tokens a second of this machine, in this process and without HTTP."""

from typing import TYPE_CHECKING, Final

import click

from runner.cli.options import settings_options
from runner.config import MODEL_SETTINGS

if TYPE_CHECKING:
    from runner.bench.report import Report

SETTINGS: Final = (
    "model",
    "slots",
    "ctx",
    "threads",
    "threads-batch",
    "batch",
    "gpu-layers",
    "device",
    "flash-attn",
    "cache-type-k",
    "cache-type-v",
    "swa-full",
    "kv",
    "kv-pool",
)


@click.command()
@click.option("--prompt-tokens", type=click.IntRange(1, 1 << 20), default=512, metavar="N", show_default=True, help="Length of the prompt.")
@click.option("--steps", type=click.IntRange(1, 1 << 20), default=64, metavar="N", show_default=True, help="Steps of decoding that count.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@settings_options([setting for setting in MODEL_SETTINGS if setting.name in SETTINGS])
@click.pass_context
def bench(ctx: click.Context, /, *, prompt_tokens: int, steps: int, as_json: bool, **_: object) -> None:
    """Measure tokens a second: of a prompt, and of 1, 2, 4 … sequences that decode together.

    Nothing else heavy should run meanwhile. Python's share is the time of a step outside llama.cpp.
    """
    report = measured(ctx, prompt_tokens, steps)
    click.echo(report.json() if as_json else report.table())


def measured(ctx: click.Context, n_prompt: int, n_steps: int) -> "Report":
    """Load the model and measure it. Raises RunnerError."""
    import msgspec

    from runner.bench.raw import RawBench  # help needs none of it
    from runner.bench.report import report
    from runner.bundle.cpu_library import unpack_own_cpu_library
    from runner.cli.options import cache_type, chosen_model, known, kv_mode
    from runner.config import EngineConfig, FlashAttn, check_kv, parse_gpu_layers

    model, chosen = chosen_model(ctx)
    unpack_own_cpu_library()
    config = EngineConfig(
        model=model.file,
        model_name=model.name,
        n_slots=chosen.number("slots"),
        n_ctx_slot=chosen.number("ctx"),
        n_threads=chosen.number("threads"),
        n_threads_batch=chosen.number("threads-batch"),
        n_batch=known(chosen.number("batch")),
        n_gpu_layers=parse_gpu_layers(known(chosen.text("gpu-layers"))),
        device=chosen.text("device"),
        flash_attn=msgspec.convert(chosen.text("flash-attn"), FlashAttn),
        cache_type_k=cache_type(chosen, "cache-type-k"),
        cache_type_v=cache_type(chosen, "cache-type-v"),
        swa_full=chosen.flag("swa-full"),
        kv=kv_mode(chosen),
        kv_pool=chosen.number("kv-pool"),
    )
    check_kv(config)
    return report(RawBench(config), n_prompt, n_steps)
