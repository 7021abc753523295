"""The file of a trace of chosen experts: what engine/ writes step by step and a benchmark reads. Never: counting.

Unsigned numbers of 16 bits, [looks, layers, experts of the largest layer], one look after another: how often each
expert was chosen since the look before, at most MOST_TRACED.
"""

from __future__ import annotations

import numpy as np

TRACE_DTYPE = np.dtype("<u2")
MOST_TRACED = 65535
