"""Gemma 4 checkpoints as a user has them: the reference ones in every piece and layout, and whole runs of the command
line whose adapters mlx-lm loads."""

from __future__ import annotations

import mlx.core as mx
import pytest
from test_gemma4 import NAMES, engine, folder_of, reference_of, relative
from tiny_llama import PLUGINS

from mortice.batch import Completion, Group
from mortice.objective import WeightedLoss
from mortice.pretrained import load
from mortice.step import Engine
from mortice_plugins.backwards.checkpoint import Checkpoint
from mortice_plugins.backwards.full import Full
from mortice_plugins.backwards.segmented import KEEP, Segmented
from mortice_plugins.heads.dense import Dense
from mortice_plugins.heads.flash_cce import FlashCCE
from mortice_plugins.layouts.packed import Packed
from mortice_plugins.layouts.prefix_shared import PrefixShared
from mortice_plugins.layouts.separate import Separate
from mortice_plugins.losses.sft import SFT

BLOCKS = 12
"""Of each reference checkpoint: six layers, attention and MLP. In E2B and E4B layers 3 and 4 share the keys and values
of 1, layer 5 those of 2."""


def gradients_of(reference) -> dict[str, mx.array]:
    """The reference's, under mortice's names and in its orientation."""
    ours = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b"}
    return {
        name.removeprefix("grad.").removesuffix(theirs) + ours[theirs]: value.T
        for name, value in reference.items()
        for theirs in ours
        if name.startswith("grad.") and name.endswith(theirs)
    }


BACKWARDS = {
    "full": Full(),
    **{f"cut {cut}, keep {KEEP[cut % 3]}": Segmented(cuts=(cut,), keep=KEEP[cut % 3]) for cut in range(1, BLOCKS)},
    **{f"cut {cut}, traced": Segmented(cuts=(cut,), eager=False) for cut in range(1, BLOCKS)},
    **{f"cut everywhere, keep {keep}": Segmented(segment_size=1, keep=keep) for keep in KEEP},
    **{f"checkpoint {size}": Checkpoint(segment_size=size) for size in (1, 2, 5)},
}


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_and_backward_gives_the_reference_gradient(shared, name):
    folder = folder_of(shared, name)
    reference = reference_of(folder)
    ids, expected = reference["input_ids"].tolist(), gradients_of(reference)
    found = load(folder, plugins=PLUGINS, adapter=folder / "adapter")
    assert len(found.model.blocks) == BLOCKS
    groups = [Group("a", ids[:16], [Completion(ids[16:])])]
    losses = (WeightedLoss("sft", SFT()),)
    for label, backward in BACKWARDS.items():
        run = Engine(found.model, FlashCCE(token_tile=7, vocab_tile=100), backward, PrefixShared(), losses)
        tally, gradients = run.gradients(found.params, groups)
        assert tally.loss == pytest.approx(reference["loss_tokens_16_on"].item(), abs=1e-5), label
        assert relative(gradients, expected) < 1e-4, label


@pytest.mark.parametrize("name", NAMES)
def test_shared_and_packed_rows_equal_separate_ones(shared, name):
    """Prompts longer and shorter than the window of 8; a completion of one token, which has no span."""
    folder = folder_of(shared, name)
    ids = reference_of(folder)["input_ids"].tolist()
    found = load(folder, plugins=PLUGINS, adapter=folder / "adapter")
    groups = [
        Group("a", ids[:13], [Completion(ids[13:24]), Completion(ids[30:36]), Completion(ids[24:25])], ((0, 1), (0, 2))),
        Group("b", ids[24:28], [Completion(ids[28:40]), Completion(ids[3:7])], ((0, 1),)),
    ]  # fmt: skip
    plain, expected = engine(found.model, Full(), Separate(), Dense()).gradients(found.params, groups)
    for backward in (Full(), Checkpoint(segment_size=2), Segmented(segment_size=3), Segmented(segment_size=1)):
        # Each way of attention is 1e-5 to 2e-5 from the float64 reference, whose log-probabilities go down to −22.
        tolerance = 1e-5 if isinstance(backward, Full) else 3e-5
        for layout in (Separate(), PrefixShared(), Packed()):
            tally, gradients = engine(found.model, backward, layout, FlashCCE()).gradients(found.params, groups)
            assert tally.loss == pytest.approx(plain.loss, abs=1e-5)
            assert flat(tally, groups) == pytest.approx(flat(plain, groups), abs=tolerance)
            assert relative(gradients, expected) < 1e-4


def flat(tally, groups) -> list[float]:
    """Every log-probability."""
    return [float(value) for group in tally.logprobs(groups) for tokens in group for value in tokens]
