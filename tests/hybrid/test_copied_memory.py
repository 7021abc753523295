"""Memory outlives the copies of a simulated GPU. An engine may be discarded during a pass or a move of experts: copies
went on, from memory that had been unmapped, and ended the process."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path

import torch

from engines import request
from hybrid_engines import hybrid_of
from proa.config.options import CacheOptions, EngineOptions, GpuOptions, MachineOptions, ModelOptions
from proa.engine.building.load import load_engine
from proa.engine.engine import Engine
from proa.hybrid.copies import HostCopier
from proa.hybrid.uploads import HostUploads, Transfer
from quick_plan import prepare
from tiny import make_tiny

NBYTES = 400_000


class Owner:
    """Owns the memory that a transfer reads and writes, as layers and a ring do."""

    def __init__(self) -> None:
        self.source, self.to = (torch.full((NBYTES,), fill, dtype=torch.uint8) for fill in (1, 0))


def test_memory_outlives_a_copy() -> None:
    copier, owner = HostCopier(4e6), Owner()
    seen = weakref.ref(owner.to)
    copy = copier.start([(owner.to, owner.source)])
    del owner
    assert seen() is not None
    copier.close()
    assert copy.done()
    assert bool(copy.owners[0][0].all())  # type: ignore[attr-defined]


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


def test_memory_outlives_a_pass(tmp_path: Path) -> None:
    engine = load(make_tiny("qwen3-moe", tmp_path, hidden_size=256, moe_intermediate_size=256), pcie="10MB/s")
    engine.submit(request("a", list(range(1, 200)), 2))
    engine.step()  # the experts of the next layer, 3 MB, are being copied
    engine.abort("a")
    engine.settle()
    seen = weakref.ref(hybrid_of(engine).streaming.ring)
    del engine
    gc.collect()
    assert seen() is not None
    end = time.monotonic() + 20
    while seen() is not None:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_memory_outlives_a_move(tmp_path: Path) -> None:
    """A copy holds tensors of the expert's bytes in RAM, and these did not hold the memory."""
    engine = load(make_tiny("qwen3-moe", tmp_path))
    layer = hybrid_of(engine).layers[0].memory
    seen, parts = weakref.ref(layer.stacks.up._memory), layer.in_place(0)
    held = [part.clone() for part in parts[0] + parts[1]]
    del engine, layer
    gc.collect()
    assert seen() is not None
    assert all(map(torch.equal, held, parts[0] + parts[1]))
    del parts
    gc.collect()
    assert seen() is None


def load(folder: Path, pcie: str = "1GB/s") -> Engine:
    options = EngineOptions(
        ModelOptions(dtype="bfloat16"),
        CacheOptions(context=512),
        machine=MachineOptions(threads=2, cpu_binding="none"),
        gpus=GpuOptions(gpu=f"sim:64MiB,pcie={pcie}", gpu_experts="none", prefill="stream"),
    )
    return load_engine(prepare(str(folder), options).plan, lambda loading: None)[0]
