"""The decoder's input: visible features, then mask tokens, each with its position, not un-shuffled (SPEC §3)."""

import torch
from torch import Tensor


def scatter_tokens(
    features: Tensor, mask_token: Tensor, table: Tensor, visible_ids: Tensor, masked_ids: Tensor
) -> Tensor:
    """features [B, K, E], mask_token [E], table [N, E], ids int64 [B, K] and [B, M] -> [B, K + M, E].

    Row j is features[b, j] + table[visible_ids[b, j]] for j < K, then mask_token + table[masked_ids[b, j - K]].
    """
    return definition(features, mask_token, table, visible_ids, masked_ids)


def definition(features: Tensor, mask_token: Tensor, table: Tensor, visible_ids: Tensor, masked_ids: Tensor) -> Tensor:
    batch, _, width = features.shape
    table = table.to(features.dtype)
    visible = features + table.index_select(0, visible_ids.flatten()).view(batch, -1, width)
    masked = mask_token.to(features.dtype) + table.index_select(0, masked_ids.flatten()).view(batch, -1, width)
    return torch.cat([visible, masked], dim=1)
