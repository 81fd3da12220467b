"""The encoder's input: the visible rows of the tokens, with their positions added."""

from torch import Tensor


def gather_tokens(x: Tensor, ids: Tensor, table: Tensor | None) -> Tensor:
    """x [B, N, D], ids int64 [B, K], table [N, D] or None -> x[b, ids] + table[ids], [B, K, D] in x's dtype."""
    return definition(x, ids, table)


def definition(x: Tensor, ids: Tensor, table: Tensor | None) -> Tensor:
    batch, tokens, width = x.shape
    flat_ids = (ids + tokens * ids.new_ones(batch).cumsum(0).sub(1)[:, None]).flatten()
    rows = x.flatten(0, 1).index_select(0, flat_ids).view(batch, -1, width)
    if table is None:
        return rows
    return rows + table.index_select(0, ids.flatten()).view(batch, -1, width).to(x.dtype)
