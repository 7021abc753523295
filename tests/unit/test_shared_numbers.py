"""Numbers that stand both in csrc and in Python, or in two packages, are equal."""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path

import pytest

from proa.config.options import DUMMY_FORMATS
from proa.engine.scheduling.phases import LEAST_ROWS_ON_CPU
from proa.hybrid.gpu_ways import FAILED
from proa.native.doorbell import FORESEEN_ROWS, Way
from proa.native.formats import ANY_GROUP, DUMMY, PANEL_ROWS, Format, Order, facts, layout, stored_types
from proa.native.library import ABI_VERSION
from proa.native.program import Regime, RouterRule
from proa.native.tables import limits
from proa.native.weights import Activation
from proa.ops import sizes
from proa.ops.routing import SCORES
from proa.plan.kernels import CPU_MOST_DIM
from proa.plan.packed_size import COLUMN_UNIT
from proa.plan.vram import SLOTS_BYTES
from proa.types import MOST_LOGPROBS

CSRC = Path(__file__).parents[2] / "csrc"
HEADERS = "".join(path.read_text() for path in sorted((CSRC / "include" / "proa").glob("*.h")))


def constants(prefix: str) -> dict[str, int]:
    """The constants of the headers whose names begin with `prefix`, by the rest of the name."""
    found = re.findall(rf"#define {prefix}(\w+) \(?(-?\d+)\)?", HEADERS)
    return {name: int(value) for name, value in found}


def test_limits() -> None:
    assert limits() == {
        "panel_rows": PANEL_ROWS, "column_unit": COLUMN_UNIT, "head_dim": CPU_MOST_DIM,
        "direct_queries": LEAST_ROWS_ON_CPU - 1, "delta_taps": 8, "foreseen_rows": FORESEEN_ROWS,
        "doorbell_failed": FAILED - (1 << 32), "result_bytes": SLOTS_BYTES, "activations": len(Activation),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("prefix", "kind"), [("PROA_REGIME_", Regime), ("PROA_ACTIVATION_", Activation), ("PROA_WAY_", Way)]
)
def test_enumerations(prefix: str, kind: type[IntEnum]) -> None:
    assert constants(prefix) == {member.name: member.value for member in kind}


def test_other_constants_of_the_headers() -> None:
    assert constants("PROA_SCORE_") == {name.upper(): value for name, value in SCORES.items()}
    assert constants("PROA_ABI_") == {"VERSION": ABI_VERSION}
    assert constants("PROA_ANY_") == {"GROUP": ANY_GROUP}


def test_most_logprobs() -> None:
    assert MOST_LOGPROBS == sizes.MOST_LOGPROBS


def test_orders_of_stored_matrices() -> None:
    code = (CSRC / "src" / "coded.h").read_text()
    values = re.findall(r"^    k\w+ = (\d+),", code.partition("enum class Order")[2].partition("};")[0], re.M)
    assert [int(value) for value in values] == [order.value for order in Order]


def test_the_fields_of_a_rule_are_those_of_the_header() -> None:
    struct = re.search(r"typedef struct proa_router_rule \{(.*?)\}", HEADERS, re.S)
    assert struct is not None
    names = re.sub(r"int32_t|float|const|\*|;", " ", struct[1]).replace(",", " ").split()
    assert names == [name for name, *_ in RouterRule._fields_]


def test_dummy_formats_are_those_of_the_option() -> None:
    assert ["bf16", *(name.removeprefix("dummy ") for name in DUMMY)] == list(DUMMY_FORMATS)


@pytest.mark.parametrize("of", Format, ids=lambda of: of.name)
def test_facts_give_the_bytes_of_a_panel(of: Format) -> None:
    known = facts(of)
    panel = layout(of, PANEL_ROWS, 2048, known.usual_group)
    groups = panel.padded_columns // (known.usual_group or panel.padded_columns)
    codes = panel.padded_columns * known.code_bits * PANEL_ROWS // 8
    scales = known.tail_bytes + groups * known.scale_bytes + groups // known.block_groups * known.block_scale_bytes
    assert panel.panel_bytes == codes + -(-scales // 64) * 64
    assert known.code_bits * known.unit_values == 32 * known.unit_words


def test_a_type_is_kept_in_a_format_with_its_group() -> None:
    for of in stored_types().values():
        if of.format >= 0:
            assert facts(Format(of.format)).group in (of.group, ANY_GROUP), of.name
