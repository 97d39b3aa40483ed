"""`scene`: an operator over a store in virtual time."""

from tests.unit.console.operations.operator_scene import scene

__all__ = ["scene"]
