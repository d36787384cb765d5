"""mlx-lm's architectures as a model adapter of mortice."""

from __future__ import annotations

from mortice.hookspecs import hookimpl


@hookimpl
def register_models(register):
    register("mlx-lm", "mortice_mlx_lm.adapter:MlxLmAdapter", help="Decoders of mlx-lm that no other adapter knows.")
