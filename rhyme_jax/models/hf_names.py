"""Where each parameter lies in a Hugging Face checkpoint: its name and its layout.

Hugging Face stores a linear layer as [out, in] and gives heads no axis of their own; we store [in..., out...] with
heads apart (`params.declare`). `_LAYER`, `_POST_NORMS` and `_TOP` name both sides once, and reading and writing derive
from them.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.models.params import declare

# Our name -> (Hugging Face's, how many of our leading axes are inputs of a linear layer). Inputs and outputs are
# each flattened and then swapped. None: the same numbers in the same order, heads flattened.
_LAYER = {
    "attn_norm": ("input_layernorm.weight", None),
    "q": ("self_attn.q_proj.weight", 1),
    "k": ("self_attn.k_proj.weight", 1),
    "v": ("self_attn.v_proj.weight", 1),
    "o": ("self_attn.o_proj.weight", 2),
    "q_bias": ("self_attn.q_proj.bias", None),
    "k_bias": ("self_attn.k_proj.bias", None),
    "v_bias": ("self_attn.v_proj.bias", None),
    "q_norm": ("self_attn.q_norm.weight", None),
    "k_norm": ("self_attn.k_norm.weight", None),
    "mlp_norm": ("post_attention_layernorm.weight", None),
    "gate": ("mlp.gate_proj.weight", 1),
    "up": ("mlp.up_proj.weight", 1),
    "down": ("mlp.down_proj.weight", 1),
}
# The norms of a layer that has four of them (Gemma 2 and 3). Its "post_attention_layernorm" comes after attention and
# before the residual is added, where that of other families is the one before the MLP.
_POST_NORMS = {
    "attn_post_norm": ("post_attention_layernorm.weight", None),
    "mlp_norm": ("pre_feedforward_layernorm.weight", None),
    "mlp_post_norm": ("post_feedforward_layernorm.weight", None),
}
_TOP = {
    "embed": ("model.embed_tokens.weight", None),
    "final_norm": ("model.norm.weight", None),
    "head": ("lm_head.weight", 1),
}


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where one parameter lies in our tree, and its shape on either side."""

    path: tuple[str, ...]  # in our tree
    shape: tuple[int, ...]  # of our array
    hf_name: str
    inputs: int | None  # of our leading axes; see `_LAYER`

    @property
    def hf_shape(self) -> tuple[int, ...]:
        if self.inputs is None:
            return self.shape if self.path == ("embed",) else (math.prod(self.shape),)
        return math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs])

    def to_hf(self, value: np.ndarray) -> np.ndarray:
        if self.inputs is None:
            return value.reshape(self.hf_shape)
        return value.reshape(self.hf_shape[::-1]).T

    def from_hf(self, value: np.ndarray) -> np.ndarray:
        return (value if self.inputs is None else value.T).reshape(self.shape)


def slots(config: DecoderConfig) -> Iterator[Slot]:
    """Every parameter of `config`, layer by layer.

    A generator, so that a file that claims a billion layers is refused at its first missing weight.
    """
    one_layer = declare(dataclasses.replace(config, layers=1, rope_layers=(), local_layers=()))
    names = _LAYER | _POST_NORMS if config.post_norms else _LAYER
    for name, (hf_name, inputs) in _TOP.items():
        if name in one_layer:
            yield Slot((name,), one_layer[name].shape, hf_name, inputs)
    for i in range(config.layers):
        for name, param in one_layer["layers"]["0"].items():
            hf_name, inputs = names[name]
            yield Slot(("layers", str(i), name), param.shape, f"model.layers.{i}.{hf_name}", inputs)
