"""Claims on CPUs are visible to all processes until they are released."""

from __future__ import annotations

import subprocess
import sys

import pytest

from proa.machine.claims import CpuClaim, claimed_cpus

# CPU numbers that no machine has, so that engines running at the same time do not matter.
FAR = 1_000_000


@pytest.mark.parametrize(
    "cpus", [[FAR], [FAR, FAR + 1, FAR + 5], [FAR + 2 * i for i in range(100)]], ids=["one", "spans", "many spans"]
)
def test_a_claim_is_visible_until_it_is_closed(cpus: list[int]) -> None:
    claim, again = CpuClaim(cpus), CpuClaim(cpus)
    assert {cpu for cpu in claimed_cpus() if cpu >= FAR} == set(cpus)
    claim.close()
    assert {cpu for cpu in claimed_cpus() if cpu >= FAR} == set(cpus)
    again.close()
    assert not {cpu for cpu in claimed_cpus() if cpu >= FAR}


def test_a_claim_ends_with_its_process() -> None:
    code = f"from proa.machine.claims import CpuClaim; c = CpuClaim([{FAR + 7}]); print('here', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert FAR + 7 in claimed_cpus()
        process.kill()
        process.wait(20)
    assert FAR + 7 not in claimed_cpus()
