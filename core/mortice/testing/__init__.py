"""For authors of plugins: conformance suites to subclass in pytest, and small batches by hand.

Needs pytest, which mortice itself does not depend on.
"""

from mortice.testing.batches import arrange, make_batch, make_group, make_scores
from mortice.testing.heads import HeadCase, HeadSuite, plain_scores
from mortice.testing.layouts import LayoutSuite
from mortice.testing.losses import LossSuite, loss_value

__all__ = [
    "HeadCase",
    "HeadSuite",
    "LayoutSuite",
    "LossSuite",
    "arrange",
    "loss_value",
    "make_batch",
    "make_group",
    "make_scores",
    "plain_scores",
]
