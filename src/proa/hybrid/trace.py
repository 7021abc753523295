"""The file format of a trace of chosen experts: hybrid/counting.py writes it, a benchmark reads it. Never: counting.

uint16 [looks, layers, experts of the largest layer], little-endian, appended look by look: how often each expert was
chosen since the look before, capped at MOST_TRACED.
"""

from __future__ import annotations

import numpy as np

TRACE_DTYPE = np.dtype("<u2")
MOST_TRACED = 65535
