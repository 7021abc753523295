"""What the trial process (trial.py) answers to the checker (checker.py). Never: imports of llguidance or numpy."""

from __future__ import annotations

import msgspec


class Verdict(msgspec.Struct, omit_defaults=True):
    """message "": the constraint can be used. Else the RequestError."""

    message: str = ""
    remedy: str = ""
    param: str | None = None
