"""How much memory a process takes: MLX's own counter and the process's resident memory, in bytes.

numpy's memory is invisible to MLX, and what MLX's allocator keeps for later is invisible to its peak, so a figure is
always the larger of the two. Imports nothing of mortice: the peers' processes use it too.
"""

from __future__ import annotations

import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident() -> int:
    """Resident memory; on systems without /proc its high-water mark."""
    return _kib("VmRSS") if _STATUS.exists() else high_water()


def high_water() -> int:
    """The most resident memory there was (on Linux: since `PeakMeter.restart`)."""
    if _STATUS.exists():
        return _kib("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def _kib(key: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


class PeakMeter:
    """What a process takes above what it held when the meter was made; `restart` leaves out what was between.

    Made before a model is loaded and restarted after, it tells the peak of the steps with the weights in it, without
    the transients of loading. The first product of a process makes the BLAS's own buffers: it is made before.
    """

    def __init__(self) -> None:
        import mlx.core as mx

        mx.eval(mx.ones((512, 512)) @ mx.ones((512, 512)))
        mx.clear_cache()
        self._active, self._resident = mx.get_active_memory(), resident()
        self.restart()

    def restart(self) -> None:
        import mlx.core as mx

        mx.clear_cache()
        mx.reset_peak_memory()
        clear = Path("/proc/self/clear_refs")
        if clear.exists():
            clear.write_text("5")

    def read(self, weights: int = 0) -> dict[str, int]:
        """`peak`, the larger one of `peak_mlx` and `peak_resident`, and `above`, what it is above the `weights`."""
        import mlx.core as mx

        mlx, rise = mx.get_peak_memory() - self._active, high_water() - self._resident
        peak = max(mlx, rise)
        return {"peak": peak, "peak_mlx": mlx, "peak_resident": rise, "weights": weights, "above": peak - weights}
