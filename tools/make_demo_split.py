"""Makes src/proa/demo/split.npz and tests/data/demo_eval.txt: how SmolLM2's MLPs are cut into experts.

    python tools/make_demo_split.py SmolLM2-135M-Instruct.Q4_1.gguf        (transformers, accelerate; 1 minute, 3 GB)

Nothing is trained. Half the topics of Python's own help (`pydoc_data.topics`) run through the dense model, and for
each layer
1. a neuron's contribution to a token is |activation| x the norm of its down-projection column; the half of the
   neurons with the largest mean square becomes the shared expert, which every token passes;
2. the others are clustered by when they contribute (cosine between contributions over tokens) into experts of
   equal size, by a k-means that fills each cluster to the brim;
3. the router is a ridge regression from the MLP's input to the norm of each expert's output.
The other half of the topics is never seen here; its beginning is the text that tests measure perplexity on.
The result depends on the Python release (its help text) and, in the last bits, on the BLAS; both are recorded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
SPLIT_PATH = ROOT / "src/proa/demo/split.npz"
EVAL_PATH = ROOT / "tests/data/demo_eval.txt"

SEED = 0
NUM_EXPERTS = 16
SHARED_FRACTION = 0.5
WINDOW_TOKENS = 512
NUM_WINDOWS = 32
CLUSTER_EVERY_TOKENS = 8  # clustering looks at every 8th token: 2048 are plenty for 768 neurons
CLUSTER_ROUNDS = 8
RIDGE = 1e-3  # times the mean diagonal of X'X
EVAL_CHARS = 26_000


def texts() -> tuple[str, str]:
    """Calibration and evaluation text: topics in alphabetical order, taken by turns."""
    ordered = [text for _, text in sorted(topics.items())]
    evaluation = "\n".join(ordered[1::2])[:EVAL_CHARS]
    return "\n".join(ordered[0::2]), evaluation[: evaluation.rindex("\n") + 1]


@torch.no_grad()
def mlp_inputs(model: torch.nn.Module, tokens: Tensor) -> list[Tensor]:
    """Run windows [N, T] through the dense model; per layer the MLP's inputs, float32 [N * T, hidden]."""
    inputs: list[list[Tensor]] = [[] for _ in model.model.layers]
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].flatten(0, 1)))
        for layer, seen in zip(model.model.layers, inputs, strict=True)
    ]
    for windows in tokens.split(4):
        model(windows)
    for hook in hooks:
        hook.remove()
    return [torch.cat(seen) for seen in inputs]


def balanced_clusters(features: Tensor, num_clusters: int, generator: torch.Generator) -> Tensor:
    """k-means on unit rows [N, F] with exactly N / num_clusters members each; the cluster of every row, int64 [N].

    Rows choose in order of how sure they are; a full cluster sends them to their next best.
    """
    room = len(features) // num_clusters
    centres = features[torch.randperm(len(features), generator=generator)[:num_clusters]]
    for _ in range(CLUSTER_ROUNDS):
        similarity = features @ centres.T
        preferences = similarity.argsort(dim=1, descending=True).tolist()
        members: list[list[int]] = [[] for _ in range(num_clusters)]
        for row in similarity.amax(dim=1).argsort(descending=True).tolist():
            next(members[c] for c in preferences[row] if len(members[c]) < room).append(row)
        centres = torch.stack([features[rows].mean(dim=0) for rows in members])
    assignment = torch.empty(len(features), dtype=torch.int64)
    for cluster, rows in enumerate(members):
        assignment[rows] = cluster
    return assignment


@torch.no_grad()
def split_mlp(mlp: torch.nn.Module, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Neuron order int64 [width] (shared half, then the experts) and router float32 [experts, hidden].

    The router's rows are centred over the experts (that changes no choice, and keeps logits small) and scaled so
    that its logits on the calibration text have a root mean square of 1.
    """
    down = mlp.down_proj.weight  # [hidden, width]
    activation = torch.nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)  # [tokens, width]
    contribution = activation.abs() * down.norm(dim=0)
    by_size = contribution.square().mean(dim=0).argsort(descending=True)
    num_shared = int(len(by_size) * SHARED_FRACTION)
    shared, rest = by_size[:num_shared].sort().values, by_size[num_shared:].sort().values

    signature = torch.nn.functional.normalize(contribution[::CLUSTER_EVERY_TOKENS, rest].T, dim=1)
    assignment = balanced_clusters(signature, NUM_EXPERTS, generator)
    experts = [rest[assignment == e] for e in range(NUM_EXPERTS)]

    output_norm = torch.stack([(activation[:, e] @ down[:, e].T).norm(dim=1) for e in experts], dim=1)
    gram = x.T @ x
    gram += torch.eye(len(gram)) * gram.diag().mean() * RIDGE
    router = torch.linalg.solve(gram, x.T @ output_norm)  # [hidden, experts]
    router -= router.mean(dim=1, keepdim=True)
    router /= (x @ router).square().mean().sqrt()
    return torch.cat([shared, *experts]), router.T


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    gguf = parser.parse_args().gguf
    calibration, evaluation = texts()

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    tokens = tokenizer(calibration, return_tensors="pt").input_ids[0, : NUM_WINDOWS * WINDOW_TOKENS]
    inputs = mlp_inputs(model, tokens.view(NUM_WINDOWS, WINDOW_TOKENS))

    generator = torch.Generator().manual_seed(SEED)
    orders, routers = [], []
    for i, (layer, x) in enumerate(zip(model.model.layers, inputs, strict=True)):
        order, router = split_mlp(layer.mlp, x, generator)
        orders.append(order.numpy().astype(np.uint16))
        routers.append(router.numpy().astype(np.float16))
        print(f"layer {i} done", flush=True)

    made_from = {
        "gguf": gguf.name,
        "calibration": f"{NUM_WINDOWS * WINDOW_TOKENS} tokens of every second topic of pydoc_data.topics",
        "calibration_sha256": hashlib.sha256(calibration.encode()).hexdigest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": SEED,
    }
    np.savez_compressed(
        SPLIT_PATH, neurons=np.stack(orders), router=np.stack(routers), made_from=np.array(json.dumps(made_from))
    )
    EVAL_PATH.write_text(evaluation)
    print(f"{SPLIT_PATH.stat().st_size} bytes in {SPLIT_PATH.name}, {len(evaluation)} characters of evaluation text")


if __name__ == "__main__":
    main()
