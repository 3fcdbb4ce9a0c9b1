"""`make soak`: see soak.py. Prints the seed, a line every 30 s and a report; exit code 1 where anything was not as it must be."""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from build.fetch import Cache, fetch_model
from runner.bundle.catalogue import find_entry, read_catalogue
from tests.soak.server import FAULT_RATE, ROOT, Plan
from tests.soak.soak import Soak


def main() -> int:
    """Soak, and say what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None, help="of the clients and the failures (default: a new one)")
    parser.add_argument("--executable", type=Path, help="soak this file instead of the source; its back end is not made to fail")
    parser.add_argument("--fault-rate", type=float, default=FAULT_RATE, help="share of the back end's calls that fail")
    parser.add_argument("--leak-kib", type=int, default=0, help="lose so much with every decode, to see that it is found")
    parser.add_argument("--log-dir", type=Path, help="keep the server's log there")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else time.time_ns() % 1_000_000
    found, entry = find_entry(read_catalogue(ROOT / "models.toml"), "smollm2-135m")
    model = fetch_model(found, entry, Cache(root=ROOT / ".cache", base=ROOT))
    plan = Plan(model, options.seconds, seed, options.executable, options.fault_rate, options.leak_kib)
    print(f"seed {seed}, {options.seconds:g} s", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        soak = Soak(plan, options.log_dir or Path(directory), tell=lambda line: print(line, flush=True))
        ledger = asyncio.run(soak.run())
    print("\n".join(soak.report))
    print(f"{ledger.n_violations} violations, seed {seed}")
    return 1 if ledger.n_violations else 0


if __name__ == "__main__":
    sys.exit(main())
