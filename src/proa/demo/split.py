"""Reads split.npz, which assigns MLP neurons to experts; tools/make_demo_split.py makes it."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO

import numpy as np
import numpy.typing as npt

from proa.demo.made import split_bytes


@dataclass(frozen=True)
class Split:
    """The split of all layers' MLPs.

    neurons: uint16 [layers, width], neuron numbers of the shared expert, then of each routed expert in turn. router:
    float16 [layers, experts, hidden]; its logits have a root mean square of 1 on the calibration text.
    """

    neurons: npt.NDArray[np.uint16]
    router: npt.NDArray[np.float16]

    @property
    def num_experts(self) -> int:
        return int(self.router.shape[1])

    def parts(self, layer: int, num_shared: int) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[np.int64]]]:
        """Return the neuron numbers of the shared expert (`num_shared` of them) and of each routed expert."""
        order = self.neurons[layer].astype(np.int64)
        return order[:num_shared], np.split(order[num_shared:], self.num_experts)


def load_split() -> Split:
    with np.load(BytesIO(split_bytes())) as data:
        return Split(data["neurons"], data["router"])
