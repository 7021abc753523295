"""Regular expressions of JSON Schema's `format`s, for strings that are written as plain text.

In JSON strings llguidance enforces the same formats itself. Rust's syntax without anchors, `/` escaped as in Lark.
"""

from __future__ import annotations


def _ipv6() -> str:
    """Write RFC 4291's forms: eight groups, or fewer around one `::`; the last two may be an IPv4 address."""
    group, last = "[0-9A-Fa-f]{1,4}", f"(?:[0-9A-Fa-f]{{1,4}}:[0-9A-Fa-f]{{1,4}}|{_IPV4})"
    ways = [f"(?:{group}:){{6}}{last}", f"::(?:{group}:){{5}}{last}"]
    for after in range(4, -1, -1):  # groups after the `::`, which stands for one at least, and before the last two
        ways.append(f"(?:(?:{group}:){{0,{4 - after}}}{group})?::(?:{group}:){{{after}}}{last}")
    ways.append(f"(?:(?:{group}:){{0,5}}{group})?::{group}")
    ways.append(f"(?:(?:{group}:){{0,6}}{group})?::")
    return f"(?:{'|'.join(ways)})"


_31, _30, _29 = "(?:0[1-9]|[12][0-9]|3[01])", "(?:0[1-9]|[12][0-9]|30)", "(?:0[1-9]|[12][0-9])"
_DATE = f"[0-9]{{4}}-(?:(?:0[13578]|1[02])-{_31}|(?:0[469]|11)-{_30}|02-{_29})"
_HOUR, _MINUTE = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
_TIME = rf"{_HOUR}:{_MINUTE}:(?:{_MINUTE}|60)(?:\.[0-9]+)?(?:[Zz]|[+\-]{_HOUR}:{_MINUTE})"
_DAYS = "(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
_HOURS = "T(?:[0-9]+S|[0-9]+M(?:[0-9]+S)?|[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[A-Za-z0-9!#$%&'*+\/=?^_`{|}~\-]+"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_ESCAPED = "%[0-9A-Fa-f]{2}"
_NAME = rf"(?:[A-Za-z0-9._~!$&'()*+,;=\-]|{_ESCAPED})"
_PCHAR = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@\-]|{_ESCAPED})"
_AUTHORITY = rf"\/\/(?:(?:{_NAME}|:)*@)?(?:\[{_ipv6()}\]|{_NAME}*)(?::[0-9]*)?"
_PATH = rf"(?:\/(?:{_PCHAR}(?:{_PCHAR}|\/)*)?|{_PCHAR}(?:{_PCHAR}|\/)*)?"
_REST = rf"(?:{_PCHAR}|[\/?])*"

TEXT_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOSTNAME}",
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.\-]*:(?:{_AUTHORITY}(?:\/(?:{_PCHAR}|\/)*)?|{_PATH})(?:\?{_REST})?(?:#{_REST})?",
}
