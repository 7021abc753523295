"""A loaded model that is bound to its executor. Never: how it was built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proa.engine.count_saver import CountSaver
from proa.engine.executors.executor import Executor

if TYPE_CHECKING:  # it imports what only a start with a GPU needs
    from proa.engine.building.lending import Lender


@dataclass(frozen=True)
class Bound:
    """saver: the writer of expert counts, if the plan saves them. lender: lends idle KV pages to experts, if the plan
    does."""

    executor: Executor[Any]
    saver: CountSaver | None = None
    lender: Lender | None = None
