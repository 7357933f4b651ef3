"""Which samples share a row."""

import random
from collections.abc import Sequence


def pack(lengths: Sequence[int], max_length: int, seed: int) -> list[list[int]]:
    """Rows of sample indices with at most `max_length` tokens: best fit over a seeded order, no sample split.

    Each sample goes to the row whose free space it fills best, or to a new row if it fits none.
    """
    order = list(range(len(lengths)))
    random.Random(f"packing of seed {seed}").shuffle(order)
    rows: list[list[int]] = []
    with_space: list[list[int]] = [[] for _ in range(max_length)]
    spaces = 0  # bit s is set if a row has s tokens of free space: best fit is then one shift, not a search
    for index in order:
        length = lengths[index]
        assert 0 < length <= max_length, (length, max_length)
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = with_space[space].pop()
            if not with_space[space]:
                spaces ^= 1 << space
        else:
            space, row = max_length, len(rows)
            rows.append([])
        rows[row].append(index)
        if space > length:
            with_space[space - length].append(row)
            spaces |= 1 << (space - length)
    return rows
