"""Uploads of a simulated GPU. An engine may be discarded in the middle of a pass: its copies went on, from memory that
had been unmapped, and ended the process."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path

import torch

from engines import request
from proa.config.options import CacheOptions, EngineOptions, GpuOptions, MachineOptions, ModelOptions
from proa.engine.building.load import load_engine
from proa.hybrid.ring import Ring
from proa.hybrid.uploads import HostUploads, Transfer
from quick_plan import prepare
from tiny import make_tiny

NBYTES = 400_000


class Owner:
    """Owns the memory that a transfer reads and writes, as layers and a ring do."""

    def __init__(self) -> None:
        self.source, self.to = (torch.full((NBYTES,), fill, dtype=torch.uint8) for fill in (1, 0))


def test_memory_outlives_an_upload() -> None:
    uploads, owner = HostUploads(4e6), Owner()
    seen, to = weakref.ref(owner), owner.to
    upload = uploads.start([Transfer(to.data_ptr(), owner.source.data_ptr(), NBYTES)], None, owner)
    del owner
    assert seen() is not None
    upload.join()
    assert bool(to.all())
    del upload
    uploads.close()
    assert seen() is None


def test_memory_outlives_an_engine_whose_pass_was_not_finished(tmp_path: Path) -> None:
    ring = begin_pass(make_tiny("qwen3-moe", tmp_path, hidden_size=256, moe_intermediate_size=256))
    gc.collect()
    assert ring() is not None
    end = time.monotonic() + 20
    while ring() is not None:
        assert time.monotonic() < end
        time.sleep(0.01)


def begin_pass(folder: Path) -> weakref.ref[Ring]:
    """Discard an engine while the experts of a prompt's next layer, 3 MB, are copied at 10 MB/s."""
    options = EngineOptions(
        ModelOptions(dtype="bfloat16"),
        CacheOptions(context=512),
        machine=MachineOptions(threads=2, cpu_binding="none"),
        gpus=GpuOptions(gpu="sim:64MiB,pcie=10MB/s", gpu_experts="none", prefill="stream"),
    )
    engine, _ = load_engine(prepare(str(folder), options).plan, lambda loading: None)
    engine.submit(request("a", list(range(1, 200)), 2))
    engine.step()
    engine.abort("a")
    engine.settle()
    return weakref.ref(engine.runner.executor._session._session.streaming.ring)  # type: ignore[attr-defined]
