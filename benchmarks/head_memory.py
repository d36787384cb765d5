"""Peak memory and time of the heads as the vocabulary grows; fails where `flash-cce` is not flat within 10 %.

    python benchmarks/head_memory.py [--tokens 2048] [--width 256] [--vocab 32768 131072 262144] [--dense]

Every cell is a fresh process. Its peak is what the call adds to its inputs: the larger of the rise of MLX's peak and
the rise of the process's resident memory, because MLX does not see what libraries allocate. The time is that of a
second call. `--dense` adds full logits, for comparison; they take 8 GiB and more at 262,144.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

FLAT = 1.10
HEADS = {
    "flash-cce": ({"backend": "auto"}, False),
    "flash-cce, mlx": ({"backend": "mlx"}, False),
    "flash-cce, traced": ({"backend": "mlx"}, True),
    "dense": ({}, False),
}


def resident() -> int:
    """Resident memory in bytes; on systems without /proc its high-water mark."""
    status = Path("/proc/self/status")
    if not status.exists():
        return high_water()
    return _kib(status, "VmRSS")


def high_water() -> int:
    """The most resident memory there was (on Linux: since `reset_high_water`)."""
    status = Path("/proc/self/status")
    if status.exists():
        return _kib(status, "VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def reset_high_water() -> None:
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def _kib(status: Path, key: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def measure(name: str, tokens: int, width: int, vocab: int) -> dict[str, float]:
    """Peak bytes above the inputs, and seconds, of one scoring with its unit gradient."""
    from mortice import blas

    blas.load()
    import mlx.core as mx

    from mortice.model import Output
    from mortice_plugins.heads.dense import Dense
    from mortice_plugins.heads.flash_cce import FlashCCE

    options, traced = HEADS[name]
    head = Dense() if name == "dense" else FlashCCE(**options)
    mx.random.seed(0)
    hidden = mx.random.normal((tokens, width))
    targets = mx.random.randint(0, vocab, (tokens,))
    output = Output(mx.random.normal((vocab, width)) * 0.05, "head.weight")
    mx.eval(hidden, targets, output.weight)

    def score() -> None:
        scores = head.score(hidden, targets, output, grad=True, traced=traced)
        mx.eval(scores.logprobs, scores.dhidden)

    mx.clear_cache()
    mx.reset_peak_memory()
    reset_high_water()
    active, rss = mx.get_active_memory(), resident()
    score()
    peak = max(mx.get_peak_memory() - active, high_water() - rss)
    start = time.perf_counter()
    score()
    return {"peak": peak, "seconds": time.perf_counter() - start}


def measured_in_a_fresh_process(name: str, tokens: int, width: int, vocab: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--worker", name, *map(str, (tokens, width, vocab))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_768, 131_072, 262_144])
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        name, *sizes = args.worker
        print(json.dumps(measure(name, *map(int, sizes))))
        return 0

    print(f"{args.tokens} tokens, hidden size {args.width}: MiB above the inputs / seconds\n")
    print("| head | " + " | ".join(f"V {vocab:,}" for vocab in args.vocab) + " | largest / smallest |")
    print("|---|" + "---:|" * (len(args.vocab) + 1))
    flat = True
    for name in HEADS:
        if name == "dense" and not args.dense:
            continue
        found = [measured_in_a_fresh_process(name, args.tokens, args.width, vocab) for vocab in args.vocab]
        peaks = [cell["peak"] / 2**20 for cell in found]
        ratio = max(peaks) / min(peaks)
        flat = flat and (name == "dense" or ratio <= FLAT)
        cells = [f"{peak:.1f} / {cell['seconds']:.2f}" for peak, cell in zip(peaks, found)]
        print(f"| {name} | " + " | ".join(cells) + f" | {ratio:.2f} |", flush=True)
    print(f"\nflash-cce is {'flat' if flat else 'NOT flat'} within {FLAT - 1:.0%}")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
