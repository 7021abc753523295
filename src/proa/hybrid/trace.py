"""The file of a trace of chosen experts: hybrid/counting.py writes it, a benchmark reads it. Never: counting.

Unsigned numbers of 16 bits, [looks, layers, experts of the largest layer], one look after another: how often each
expert was chosen since the look before, at most MOST_TRACED.
"""

from __future__ import annotations

import numpy as np

TRACE_DTYPE = np.dtype("<u2")
MOST_TRACED = 65535
