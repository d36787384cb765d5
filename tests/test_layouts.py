"""The layouts that ship with mortice, against the plain sequences."""

from __future__ import annotations

from mortice.testing import LayoutSuite
from mortice_plugins.layouts.prefix_shared import PrefixShared
from mortice_plugins.layouts.separate import Separate


class TestSeparate(LayoutSuite):
    layout = Separate()


class TestPrefixShared(LayoutSuite):
    layout = PrefixShared()
