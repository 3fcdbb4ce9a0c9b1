"""Unpacks the one CPU back end that this processor can run best; the others stay compressed in the executable's directory.

llama.cpp brings a library for each CPU generation, 19 MB in all, and would load every one to ask for its score. Choosing here saves
a tenth of a second at each start. It is also safer: Linux lists a feature only where the system lets programs use it, while the
libraries' own scores ask the processor alone.
"""

import os
import platform
import sys
import zlib
from pathlib import Path
from typing import Final

PREFIX: Final = "libggml-cpu-"
SUFFIX: Final = ".so.z"

# What each variant needs, in the words of /proc/cpuinfo: GGML_CPU_ALL_VARIANTS in ggml/src/CMakeLists.txt. The features' values are
# the bits of ggml_backend_cpu_x86_score (ggml/src/ggml-cpu/arch/x86/cpu-feats.cpp).
FEATURES: Final = {
    "fma": (0, {"fma"}),
    "f16c": (1, {"f16c"}),
    "sse42": (2, {"sse4_2"}),
    "bmi2": (3, {"bmi2"}),
    "avx": (4, {"avx"}),
    "avx2": (5, {"avx2"}),
    "avx_vnni": (6, {"avx_vnni"}),
    "avx512": (7, {"avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"}),
    "vbmi": (8, {"avx512vbmi"}),
    "bf16": (9, {"avx512_bf16"}),
    "vnni": (10, {"avx512_vnni"}),
    "amx": (11, {"amx_tile", "amx_int8"}),
}
HASWELL: Final = ("sse42", "avx", "f16c", "fma", "avx2", "bmi2")
VARIANTS: Final = {
    "x64": (),
    "sse42": ("sse42",),
    "sandybridge": ("sse42", "avx"),
    "ivybridge": ("sse42", "avx", "f16c"),
    "piledriver": ("sse42", "avx", "f16c", "fma"),
    "haswell": HASWELL,
    "alderlake": (*HASWELL, "avx_vnni"),
    "skylakex": (*HASWELL, "avx512"),
    "cannonlake": (*HASWELL, "avx512", "vbmi"),
    "cascadelake": (*HASWELL, "avx512", "vnni"),
    "icelake": (*HASWELL, "avx512", "vbmi", "vnni"),
    "cooperlake": (*HASWELL, "avx512", "vnni", "bf16"),
    "zen4": (*HASWELL, "avx512", "vbmi", "vnni", "bf16"),
    "sapphirerapids": (*HASWELL, "avx512", "vbmi", "vnni", "bf16", "amx"),
}


def unpack_own_cpu_library() -> None:
    """The same in the directory that this executable has unpacked itself to; elsewhere there is nothing to do."""
    unpacked = getattr(sys, "_MEIPASS", None)
    if isinstance(unpacked, str):
        unpack_cpu_library(Path(unpacked) / "llama_cpp" / "lib")


def unpack_cpu_library(directory: Path) -> None:
    """Write the fitting library beside its compressed form; all of them where this processor's features cannot be told."""
    packed = {path.name[len(PREFIX) : -len(SUFFIX)]: path for path in directory.glob(f"{PREFIX}*{SUFFIX}")}
    best = best_variant(cpu_flags(), set(packed))
    for name in packed if best is None else [best]:
        _unpack(packed[name])


def best_variant(flags: set[str], available: set[str]) -> str | None:
    """The available variant of the highest score that these flags allow; None where there are no flags or an unknown variant."""
    if not flags or not available <= VARIANTS.keys():
        return None
    fitting = [name for name in available if all(FEATURES[feature][1] <= flags for feature in VARIANTS[name])]
    return max(fitting, key=_score, default=None)


def cpu_flags() -> set[str]:
    """The features of an x86 processor under Linux; none elsewhere."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return set()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return set()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return set(line.partition(":")[2].split())


def _score(name: str) -> int:
    return sum(1 << FEATURES[feature][0] for feature in VARIANTS[name])


def _unpack(packed: Path) -> None:
    """Under its name only when whole: an engine that starts again finds it there, one that was killed meanwhile left nothing."""
    target = packed.with_name(packed.name[: -len(".z")])
    if not target.exists():
        part = target.with_name(f".{target.name}.{os.getpid()}")
        part.write_bytes(zlib.decompress(packed.read_bytes()))
        part.replace(target)
