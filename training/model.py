"""The training form of the embedded model: transformers' modules hold the parameters, fast parts do the arithmetic.

Equal to transformers' own forward while a text fits the indexer's budget (then every block is picked, so the indexer is
left out). Every tensor keeps its shape from step to step and nothing reads the device, so that a step can be captured.

Shape letters: B sequences, L positions, S streams, H hidden, T = B * L tokens, E experts, K picks a token.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

from training.delta import gated_delta_rule
from training.experts import Sorted, counts_of, run_experts, sort_picks
from training.loss import HeadLoss, Lookup
from training.mtp import Mtp
from training.parts import Parts, rms

CONTEXT = 8192


def tiny_config(**changes) -> Qwen4ExpTextConfig:
    """The configuration of `builtin:tiny`, or a smaller one for tests."""
    shape = {
        "vocab_size": 8192,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 64,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "hc_count": 4,
        "hc_lowrank": 32,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": CONTEXT,
        "indexer_compress_ratio": 16,
        "tie_word_embeddings": True,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": 0,
        "ple_layer_ids": [1],
        "ple_embed_dim": 128,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 4000,
        "split_ngram_parts": 4,
    }
    return Qwen4ExpTextConfig(**(shape | changes))


@dataclass
class Run:
    """How one forward runs, and what it leaves behind."""

    dtype: torch.dtype = torch.float32
    form: str = "loop"
    dropout: float = 0.0
    parts: Parts = field(default_factory=Parts)
    keep_logits: bool = False
    balance: list[Tensor] = field(
        default_factory=list
    )  # one scalar a layer: 1 where every expert is used alike
    counts: list[Tensor] = field(default_factory=list)  # picks by expert, [E] a layer
    logits: list[Tensor] = field(default_factory=list)  # router logits [T, E] a layer, if kept


class TinyModel(nn.Module):
    """Trunk and MTP layer. `trunk` is transformers' own class, so its state dict is what loads there."""

    def __init__(self, config: Qwen4ExpTextConfig):
        super().__init__()
        self.config = config
        self.trunk = Qwen4ExpForCausalLM(config)
        self.mtp = Mtp(config)
        self.mtp.apply(self.trunk._init_weights)

    @property
    def embedding(self) -> Tensor:
        return self.trunk.model.embed_tokens.weight

    def hidden(self, ids: Tensor, run: Run) -> Tensor:
        """ids [B, L] -> the trunk's mixed hidden state before the head, [B, L, H] in the working dtype."""
        model = self.trunk.model
        streams = drop(Lookup.apply(self.embedding, ids), run)
        streams = streams.unsqueeze(2).repeat(1, 1, self.config.hc_count, 1)
        rope = rotation(model, ids)
        for layer in model.layers:
            streams = decoder_layer(layer, streams, ids, rope, run)
        return read_streams(model.hyper_connection_mixer, streams, run)[0]

    def mtp_hidden(self, hidden: Tensor, following: Tensor, run: Run) -> Tensor:
        """hidden [B, L, H] and the ids [B, L] that follow each position -> the MTP layer's state before the head."""
        entry = self.mtp.entry(hidden, self.embedding[following].detach())
        streams = entry.unsqueeze(2).repeat(1, 1, self.config.hc_count, 1)
        rope = rotation(self.trunk.model, following)
        streams = decoder_layer(self.mtp.layers[0], streams, following, rope, run)
        mixed = read_streams(self.mtp.hyper_connection_mixer, streams, run)[0]
        return rms(mixed, self.mtp.norm.weight, self.mtp.norm.eps).to(run.dtype)

    def losses(self, window: Tensor, run: Run, with_mtp: bool) -> dict[str, Tensor]:
        """window [B, L + 2] -> mean losses: `lm`, `balance` (mean over layers), `mtp`.

        The MTP layer learns from the trunk (state, embedding and head detached) and never moves it.
        """
        length = window.shape[1] - 2
        hidden = self.hidden(window[:, :length], run)
        labels = window[:, 1 : length + 1]
        losses = {"lm": HeadLoss.apply(hidden.flatten(0, 1), self.embedding, labels.flatten())}
        if with_mtp:
            ahead = self.mtp_hidden(hidden.detach(), labels, run)
            head = self.embedding.detach()
            losses["mtp"] = HeadLoss.apply(ahead.flatten(0, 1), head, window[:, 2:].flatten())
        losses["balance"] = torch.stack(run.balance).sum()
        return losses


def drop(x: Tensor, run: Run) -> Tensor:
    return F.dropout(x, run.dropout) if run.dropout else x


def rotation(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of positions 0..L-1, float32 [L, D]."""
    angles = (
        torch.arange(ids.shape[1], device=ids.device).float()[:, None] * model.rotary_emb.inv_freq.float()
    )
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def read_streams(mixer: nn.Module, streams: Tensor, run: Run) -> tuple[Tensor, Tensor | None]:
    """streams [B, L, S, H] -> mixed [B, L, H], injection weights [T, S, 1]."""
    mixed, injection = run.parts.hc_read(
        streams.flatten(0, 1),
        mixer.hc_norm.weight,
        mixer.input_mix_weight_down.weight,
        mixer.input_mix_weight_up.weight,
        None if mixer.block_inject_weight is None else mixer.block_inject_weight.weight,
        mixer.hc_norm.eps,
        run.dtype,
    )
    return mixed.view(*streams.shape[:2], -1), injection


def write_streams(streams: Tensor, out: Tensor, injection: Tensor, run: Run) -> Tensor:
    return run.parts.hc_write(streams.flatten(0, 1), drop(out, run).flatten(0, 1), injection).view_as(streams)


def decoder_layer(
    layer: nn.Module, streams: Tensor, ids: Tensor, rope: tuple[Tensor, Tensor], run: Run
) -> Tensor:
    """streams [B, L, S, H] float32 -> the same after one layer."""
    if layer.ple is not None:
        streams = streams + ngram_features(layer.ple, streams, ids, run)
    mixed, injection = read_streams(layer.attn_hyper_connection, streams, run)
    if layer.layer_type == "linear_attention":
        out = delta_net(layer.linear_attn, mixed, run)
    else:
        out = attention(layer.self_attn, mixed, rope, run)
    streams = write_streams(streams, out, injection, run)
    mixed, injection = read_streams(layer.mlp_hyper_connection, streams, run)
    return write_streams(streams, moe(layer.mlp, mixed, run), injection, run)


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, module.weight.to(x.dtype))


def delta_net(net: nn.Module, x: Tensor, run: Run) -> Tensor:
    batch, length, _ = x.shape
    mixed = run.parts.causal_conv_silu(linear(net.in_proj_qkv, x), net.conv1d.weight, 1)
    query, key, value = mixed.split((net.key_dim, net.key_dim, net.value_dim), -1)
    gate = linear(net.in_proj_z, x).view(batch, length, -1, net.head_v_dim)
    g, beta = run.parts.delta_gates(
        linear(net.in_proj_a, x), linear(net.in_proj_b, x), net.A_log, net.dt_bias
    )
    keys = (batch, length, net.num_k_heads, net.head_k_dim)
    out = gated_delta_rule(query.reshape(keys), key.reshape(keys), value.reshape(gate.shape), g, beta)
    out = run.parts.gated_norm(out, gate, net.norm.weight, net.norm.variance_epsilon, run.dtype)
    return linear(net.out_proj, out.reshape(batch, length, -1))


def attention(net: nn.Module, x: Tensor, rope: tuple[Tensor, Tensor], run: Run) -> Tensor:
    """Causal attention over everything: what the indexed layer does while the text fits its budget."""
    batch, length, _ = x.shape
    query, gate = linear(net.q_proj, x).view(batch, length, -1, 2 * net.head_dim).chunk(2, -1)
    key = linear(net.k_proj, x).view(batch, length, -1, net.head_dim)
    value = linear(net.v_proj, x).view(batch, length, -1, net.head_dim).transpose(1, 2)
    query = run.parts.head_norm_rope(query, net.q_norm.weight, *rope, net.q_norm.eps, run.dtype)
    key = run.parts.head_norm_rope(key, net.k_norm.weight, *rope, net.k_norm.eps, run.dtype)
    groups = net.num_key_value_groups
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=net.scaling)
    out = out.transpose(1, 2) * torch.sigmoid(gate)
    return linear(net.o_proj, out.reshape(batch, length, -1))


def moe(block: nn.Module, x: Tensor, run: Run) -> Tensor:
    flat = x.flatten(0, 1)
    # float32: logits in bf16 have ties among the ranks
    logits = F.linear(flat.float(), block.gate.weight)
    top, ids = logits.topk(block.gate.top_k, dim=-1)
    picks = sort_picks(ids, block.gate.num_experts)
    record_routing(logits, picks, run)
    experts = block.experts
    # softmax over the picks is the softmax over all experts, renormalised over the picks
    out = run_experts(flat, experts.gate_up_proj, experts.down_proj, top.softmax(-1), picks, run.form)
    shared = block.shared_expert
    weights = (
        part.weight for part in (shared.gate_proj, shared.up_proj, shared.down_proj, block.shared_expert_gate)
    )
    return (out + run.parts.swiglu(flat, *weights)).view_as(x)


def record_routing(logits: Tensor, picks: Sorted, run: Run) -> None:
    counts = counts_of(picks)
    share = counts.float() / picks.order_S.numel()
    run.counts.append(counts)
    run.balance.append(share.numel() * (share * run.parts.mean_softmax(logits)).sum())
    if run.keep_logits:
        run.logits.append(logits.detach())


def ngram_ids(table: nn.Module, ids: Tensor) -> Tensor:
    """Rows of the n-gram table that each position reads, [B, L, heads]; a text starts after each end-of-text token."""
    eos, size = table.eos_token_id, table.ngram_size
    history = F.pad(ids, (size - 1, 0), value=eos)
    shifted = [table._shift_right_ignore_eos(history, shift) for shift in range(size)]
    mixed, blocks = shifted[0] * table.layer_multipliers[0], []
    for order in range(1, size):
        mixed = mixed ^ (shifted[order] * table.layer_multipliers[order])
        heads = slice((order - 1) * table.heads_per_ngram, order * table.heads_per_ngram)
        rows = torch.remainder(mixed.unsqueeze(-1), table.ngram_heads_vocab_sizes[heads])
        blocks.append(rows + table.ngram_heads_offsets[heads])
    return torch.cat(blocks, -1)[:, size - 1 :]


def ngram_features(ple: nn.Module, streams: Tensor, ids: Tensor, run: Run) -> Tensor:
    table = ple.ple_embedding
    rows = Lookup.apply(table.ngram_embedding.weight, ngram_ids(table, ids)).flatten(-2)
    rows = drop(rows, run).to(run.dtype)
    key = linear(ple.key_proj, rows).view(streams.shape)
    norms = (ple.norm_key.weight, ple.norm_query.weight, ple.norm_conv.weight)
    gated, normed = run.parts.ple_value(key, streams, linear(ple.value_proj, rows), norms, ple.norm_key.eps)
    local = run.parts.causal_conv_silu(normed.flatten(-2), ple.conv1d.weight, table.ngram_size)
    return gated + local.view_as(gated)
