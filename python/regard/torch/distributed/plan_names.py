"""Plans by name: how a compiled program, which holds a string, finds its plan."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakSet

from ...checks import shown
from ...errors import refuse

if TYPE_CHECKING:
    from .plan_value import Plan

_named: WeakSet[Plan] = WeakSet()
_naming = Lock()  # of the set: a thread may make a plan while another one looks for its own


def remember(plan: Plan) -> None:
    """As long as the plan lives."""
    with _naming:
        _named.add(plan)


def plan_of(name: str) -> Plan:
    """The plan whose `name` this is. Errors: InvalidArgument where there is none any more."""
    with _naming:
        found = next((plan for plan in _named if plan.name == name), None)
    if found is None:
        raise refuse("plan", shown(name), "is not a plan of this process: a compiled program needs "
                     "the plan that it was compiled with, or an equal one, to be there")
    return found
