"""The checkers of notebook 04 reject every wrong answer of the zoo at the right stage, and pass every right one."""

from __future__ import annotations

from zoo.rules import ZooRules


class TestZoo(ZooRules):
    NUMBER = "04"
