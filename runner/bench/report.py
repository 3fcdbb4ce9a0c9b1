"""What `slotfile bench` measures and how it is shown."""

import os
import platform

import msgspec

from runner.bench.raw import RawBench, RawFigures
from runner.errors import ConfigError

WARM_UP_STEPS = 8


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and its figures; rates in tokens a second."""

    model: str
    machine: str
    cpu_library: str
    llama_cpp: str
    n_threads: int
    n_slots: int
    n_ctx_slot: int
    n_gpu_layers: int
    n_prompt: int
    n_steps: int
    prompt_tok_s: float
    decode: list[RawFigures]

    def json(self) -> str:
        """One object, indented."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    def table(self) -> str:
        """Facts, then figures with their columns aligned."""
        rows = [("measured", "tokens/s", "Python's share"), (f"prompt of {self.n_prompt:,} tokens", f"{self.prompt_tok_s:,.1f}", "")]
        rows += [(_sequences(found.n_sequences), f"{found.decode_tok_s:,.1f}", f"{found.python_share:.1%}") for found in self.decode]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{name:<12} {value}" for name, value in self._facts()]
        lines.append("")
        lines += [f"{what:<{widths[0]}}  {rate:>{widths[1]}}  {share:>{widths[2]}}".rstrip() for what, rate, share in rows]
        return "\n".join(lines)

    def _facts(self) -> list[tuple[str, str]]:
        gpu = f", {self.n_gpu_layers} layers on the GPU" if self.n_gpu_layers else ""
        return [
            ("model", self.model),
            ("machine", self.machine),
            ("cpu library", f"{self.cpu_library or 'unknown'} of llama.cpp {self.llama_cpp}"),
            ("threads", f"{self.n_threads}{gpu}"),
            ("slots", f"{self.n_slots} x {self.n_ctx_slot:,} tokens"),
        ]


def report(bench: RawBench, n_prompt: int, n_steps: int) -> Report:
    """Measure a prompt, then 1, 2, 4 … sequences up to all slots. Raises ConfigError where a slot cannot hold them."""
    info = bench.info
    needed = max(n_prompt + 2, bench.n_tokens_needed(max(n_steps, WARM_UP_STEPS)))
    if needed > info.n_ctx_slot:
        raise ConfigError(
            f"A slot holds {info.n_ctx_slot:,} tokens; this measurement needs {needed:,}",
            hint="--ctx makes slots larger, --prompt-tokens and --steps the measurement smaller",
        )
    bench.decode(range(info.n_slots), n_generate=WARM_UP_STEPS)
    return Report(
        model=f"{info.name}, {info.description}",
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        cpu_library=info.cpu_library,
        llama_cpp=info.llama_cpp_version,
        n_threads=info.n_threads,
        n_slots=info.n_slots,
        n_ctx_slot=info.n_ctx_slot,
        n_gpu_layers=info.n_gpu_layers,
        n_prompt=n_prompt,
        n_steps=n_steps,
        prompt_tok_s=bench.prefill(n_prompt),
        decode=[bench.decode(range(n), n_generate=n_steps) for n in counts(info.n_slots)],
    )


def counts(n_slots: int) -> list[int]:
    """1, 2, 4 … and all."""
    powers = [1 << power for power in range(n_slots.bit_length()) if 1 << power < n_slots]
    return [*powers, n_slots]


def _sequences(n: int) -> str:
    return f"generated, {n} sequence{'' if n == 1 else 's'}"
