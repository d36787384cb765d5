"""The core's own tables of a run file: every option with its default, its validator and one line of help.

Tables of strategies are the strategies' own classes. What this leaves out: reading them (`config.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from attrs import frozen

from mortice.hookspecs import HOOKS
from mortice.options import and_, ge, gt, in_, le, option, optional
from mortice.sizes import size

_share = and_(gt(0.0), le(1.0))


@frozen
class PluginOptions:
    """Which plugins a run uses."""

    enable: list[str] | None = option(None, help="entry points to enable (name, or dist:name); default: all installed")
    disable: list[str] = option(factory=list, help="entry points to leave out")
    strict: bool = option(False, help="stop when any enabled plugin fails to import")


@frozen
class ModelOptions:
    """The model."""

    path: str | None = option(None, help="model folder, or hub id")
    config: str | None = option(None, help='config.json of a model to start from nothing (init = "random")')
    init: str = option(
        "pretrained", help='"pretrained" weights, or "random" ones', validator=in_(("pretrained", "random"))
    )
    dtype: str = option(
        "auto",
        help='type of the float weights; "auto" keeps them as stored and computes in float32 on the CPU',
        validator=in_(("auto", "float32", "bfloat16", "float16")),
    )
    chat_template: str | None = option(
        None, help="chat template: a name among the checkpoint's own, or a .jinja file (default: its default one)"
    )
    template_variables: Mapping[str, str | int | float | bool] = option(
        factory=dict, help="what the chat template is given, such as { enable_thinking = false }"
    )

    def __attrs_post_init__(self) -> None:
        if self.init == "random" and self.config is None:
            raise ValueError('init = "random" needs config: the config.json of the model to make')
        if self.init == "pretrained" and self.config is not None:
            raise ValueError('config is for init = "random"; a pretrained model brings its own')
        if self.init == "pretrained" and self.path is None:
            raise ValueError('path is required: a model folder or a hub id (or init = "random" with config)')


@frozen
class DataOptions:
    """The data; further keys are options of the format."""

    format: str = option(help="kind of records (`mortice list data`)")
    train: Path | None = option(None, help="training file: JSON Lines, or a .json list")
    valid: Path | None = option(None, help="validation file; without it there is no evaluation")
    max_length: int = option(2048, help="most tokens of prompt and longest completion together", validator=ge(2))
    truncation: str = option(
        "keep-end",
        help='which end of a prompt that is too long stays: "keep-end" or "keep-start"',
        validator=in_(("keep-end", "keep-start")),
    )
    limit: int | None = option(None, help="read only the first rows of each file", validator=optional(ge(1)))


@frozen
class TrainOptions:
    """The loop."""

    steps: int | None = option(None, help="optimizer steps (or give epochs)", validator=optional(ge(1)))
    epochs: float | None = option(None, help="times every row is visited (default 1)", validator=optional(gt(0)))
    batch_size: int = option(8, help="groups a step: examples, pairs or prompts", validator=ge(1))
    micro_batch_size: int = option(1, help="groups that run at once; any number gives the same step", validator=ge(1))
    seed: int = option(0, help="names every random draw: order, initial values, dropout")
    clip_norm: float = option(1.0, help="largest norm of a step's gradient; 0 turns clipping off", validator=ge(0))
    max_nonfinite: int = option(5, help="steps in a row with a non-finite gradient that end a run", validator=ge(1))
    validate_every: int | None = option(
        None, help="steps between validations (default: ten in a run)", validator=optional(ge(1))
    )
    save_every: int = option(100, help="steps between checkpoints", validator=ge(1))
    keep: int = option(
        2, help="checkpoints that stay, the best and the newest always among them; 0 for all", validator=ge(0)
    )
    keep_every: int | None = option(
        None, help="checkpoints of steps that are multiples of this stay too", validator=optional(ge(1))
    )
    best: str | None = option(None, help="metric of the best checkpoint (default valid/loss)")
    best_mode: str | None = option(
        None,
        help='"min" or "max" of it is better (default: min; of the reward of a run that samples, max)',
        validator=optional(in_(("min", "max"))),
    )
    cache_limit: float | None = option(
        None,
        help="most GB that MLX's allocator keeps unused (default: 0.032 on the CPU, where more is slower; 2 on a GPU)",
        validator=optional(and_(ge(0), le(1e6))),
    )

    memory_limit: str | None = option(
        None,
        help='most memory of the run, such as "16GB"; options that are left open are chosen so that it fits',
        validator=optional(size),
    )

    leaner: ClassVar = {"micro_batch_size": (64, 32, 16, 8, 4, 2, 1)}
    """Values of options, most memory first, among which `memory_limit` may choose."""

    def __attrs_post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs both say how long to train; give one of them")


@frozen
class ContextOptions:
    """How a forward pass goes through a row. None of these changes a result."""

    attention_chunk: str | int = option(
        "auto", help='queries a chunk in full attention; 0 never, "auto": by size on the CPU (16 to 256), else 0'
    )
    mlp_chunk: int = option(0, help="tokens a chunk in MLPs, recomputed in the backward; 0 for whole", validator=ge(0))

    leaner: ClassVar = {"mlp_chunk": (0, 2048, 1024, 512, 256, 128), "attention_chunk": ("auto", 16)}

    @attention_chunk.validator
    def _auto_or_size(self, attribute: Any, value: Any) -> None:
        if value != "auto" and (isinstance(value, str) or value < 0):
            raise ValueError(f'must be "auto" or a number of queries, found {value!r}')


@frozen
class ReferenceOptions:
    """The reference policy, where a loss needs one."""

    policy: str = option(
        "initial",
        help='"initial": the adapter a run starts from; "base": adapters off; or a folder: an adapter of any shape, or '
        "another model of the same tokenizer",
    )
    cache: bool | str = option(
        True,
        help="keep its log-probabilities on disk for other runs: true (in .mortice/reference beside the training "
        "file), false, or a folder",
    )


@frozen
class SamplingOptions:
    """How answers are sampled in a run that samples. These stand in `[rollout]`, beside the options of the engine."""

    temperature: float = option(
        1.0,
        help="divides the logits: of sampling, and of the scores of policy, old policy and reference alike",
        validator=gt(0.0),
    )
    max_tokens: int = option(256, help="most tokens of an answer", validator=ge(1))
    samples: int = option(8, help="answers to each prompt (G)", validator=ge(1))
    top_p: float = option(1.0, help="sample from the likeliest tokens of this much probability", validator=_share)
    top_k: int = option(0, help="sample from so many likeliest tokens; 0 from all", validator=ge(0))
    min_p: float = option(
        0.0,
        help="leave out tokens below this share of the likeliest one's probability",
        validator=and_(ge(0.0), le(1.0)),
    )
    repetition_penalty: float = option(
        1.0, help="divides positive logits of tokens that occurred, multiplies negative ones", validator=gt(0.0)
    )
    presence_penalty: float = option(0.0, help="subtracted from the logits of tokens that were sampled before")
    stop: list[str] = option(factory=list, help="texts that end an answer")


@frozen
class RunOptions:
    """Where a run is kept."""

    path: Path | None = option(None, help="run folder (default: runs/ and the run file's name, numbered)")


CORE_TABLES: dict[str, type] = {
    "plugins": PluginOptions,
    "model": ModelOptions,
    "data": DataOptions,
    "train": TrainOptions,
    "context": ContextOptions,
    "reference": ReferenceOptions,
    "run": RunOptions,
}
STRATEGY_TABLES = tuple(k for k in HOOKS if k not in ("model", "data"))
LISTS = ("loss", "tracker", "filter", "reward", "controller")
"""Kinds of which a run may take several, as `[[kind]]`."""
PATHS = {
    ("model", "path"), ("model", "config"), ("model", "chat_template"), ("reference", "policy"), ("reference", "cache"),
}  # fmt: skip
"""Keys that may hold a path or something else; options of the type Path need not stand here."""
BESIDE: dict[str, type] = {"rollout": SamplingOptions}
"""Options of the core that stand in a strategy's table, beside its own."""
OPTIONAL = ("filter", "rollout", "reward", "controller", "task")
"""Kinds that a run may do without."""
