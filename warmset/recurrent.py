"""The gated delta rule row by row, giving the state after every row of a window.

transformers runs several rows at once by chunks of 64, which gives only the state after the last one. A window of T
rows needs every state, since it may be cut after any of its rows; and its rows are few. The arithmetic of a row is that
of transformers' own one-token rule, operation by operation, so a row has the same bits whatever T is. Plain torch on
any device; knows no cache and no module.

    T rows, N value heads, D width of a key, V width of a value; B sequences
"""

from __future__ import annotations

import torch


def delta_rule_by_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of T rows and the states after each.

    Args:
        query, key: [B, T, heads, D], where the value heads are a multiple of `heads`; not yet normalised.
        value: [B, T, N, V].
        g: log decay [B, T, N]; beta: write strength [B, T, N].
        initial_state: float [B, N, D, V], left as it is.

    Returns:
        outputs [B, T, N, V] in the dtype of `query`; states float32 [T, B, N, D, V].
    """
    dtype, repeats = query.dtype, value.shape[2] // key.shape[2]
    if repeats > 1:
        query, key = query.repeat_interleave(repeats, dim=2), key.repeat_interleave(repeats, dim=2)
    query, key = _normalised(query.float()), _normalised(key.float())
    query = query / (query.shape[-1] ** 0.5)
    value, beta, decay = value.float(), beta.float(), g.float().exp()
    state = initial_state.to(value.dtype)
    states, outputs = [], []
    for row in range(value.shape[1]):
        key_BND1 = key[:, row].unsqueeze(-1)
        state = state * decay[:, row, :, None, None]
        known_BNV = (state * key_BND1).sum(dim=-2)
        change_BNV = (value[:, row] - known_BNV) * beta[:, row].unsqueeze(-1)
        state = state + key_BND1 * change_BNV.unsqueeze(-2)
        outputs.append((state * query[:, row].unsqueeze(-1)).sum(dim=-2))
        states.append(state)
    return torch.stack(outputs, dim=1).to(dtype), torch.stack(states)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)
