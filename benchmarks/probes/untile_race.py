"""How fast a GPU turns expert panels back into rows, for the two layouts of docs/decisions/011. Needs torch and Triton.

rows         a tile is 16 rows x 64 bytes, each row's bytes together
interleaved  a line of 64 bytes holds 4 bytes of each of 16 rows

Words of 4 bytes move as they are: the codes' bits stand the same in both. Compared with a plain copy of as many bytes.
Run: python benchmarks/probes/untile_race.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, WORDS = 16, 16  # of a panel; of 64 bytes


@triton.jit
def untile(src, out, row_words, line_stride, row_stride, word_stride, BLOCK: tl.constexpr) -> None:  # noqa: N803
    """A program moves BLOCK words of all 16 rows of a panel. Strides in words, of a 64-byte tile column or a word."""
    panel, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.arange(0, 16)[:, None]
    word = part * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = (word // 16) * line_stride + row * row_stride + (word % 16) * word_stride
    value = tl.load(src + panel * 16 * row_words + at)
    tl.store(out + (panel * 16 + row) * row_words + word, value)


def main() -> None:
    panels, row_words = 1 << 14, 1024  # 1 GiB: rows of 4096 bytes
    packed = torch.randint(-(2**31), 2**31 - 1, (panels, row_words // WORDS, 256), dtype=torch.int32, device="cuda")
    rows = packed.view(panels, -1, ROWS, WORDS).transpose(1, 2).reshape(panels * ROWS, row_words)
    lines = packed.view(panels, -1, WORDS, ROWS).permute(0, 3, 1, 2).reshape(panels * ROWS, row_words)
    out = torch.empty_like(rows)
    moved = 2 * packed.numel() * 4

    def rate(run) -> float:
        return moved / triton.testing.do_bench(run, return_mode="median") / 1e6

    print(
        torch.cuda.get_device_name(),
        f"copy {rate(lambda: out.view(-1).copy_(packed.view(-1))):.0f} GB/s read and written",
    )
    for name, exact, row_stride, word_stride in (("rows", rows, WORDS, 1), ("interleaved", lines, 1, ROWS)):
        for block in (64, 128, 256, 512):
            grid = (panels, row_words // block)
            run = lambda: untile[grid](packed, out, row_words, 256, row_stride, word_stride, BLOCK=block)  # noqa: B023, E731
            out.zero_()
            run()
            assert torch.equal(out, exact)
            print(f"{name:12} {block * 4:5} bytes of a row at a time: {rate(run):.0f} GB/s")


if __name__ == "__main__":
    main()
