"""The MTP layer: from the trunk's mixed hidden state at t and the embedding of token t + 1, predict token t + 2.

Holds parameters only, under the names they have on disk (`mtp.*`); `training.model` runs the decoder layer.
"""

import torch
from torch import nn
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen


def attention_layer(config: Qwen4ExpTextConfig) -> int:
    """Index of the last attention layer; releases differ in what they call its type."""
    return max(index for index, kind in enumerate(config.layer_types) if kind != "linear_attention")


class Mtp(nn.Module):
    def __init__(self, config: Qwen4ExpTextConfig):
        super().__init__()
        hidden = config.hidden_size
        self.pre_fc_norm_embedding = qwen.Qwen4ExpTextRMSNorm(hidden, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = qwen.Qwen4ExpTextRMSNorm(hidden, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([qwen.Qwen4ExpTextDecoderLayer(config, attention_layer(config))])
        self.hyper_connection_mixer = qwen.Qwen4ExpTextGatedResidual(config, use_combine=False)
        self.norm = qwen.Qwen4ExpTextRMSNorm(hidden, eps=config.rms_norm_eps)

    def entry(self, hidden: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """The layer's input from hidden [B, L, H] at t and the embedding [B, L, H] of token t + 1, as one stream."""
        joined = (self.pre_fc_norm_embedding(embedding.float()), self.pre_fc_norm_hidden(hidden.float()))
        return torch.nn.functional.linear(torch.cat(joined, -1), self.fc.weight)
