"""A decoder from a file: one tensor at a time, each straight into its place, in the layout that the layers want."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.kernels.protocol import Kernels
from penstock.kernels.shares import whole_lanes
from penstock.layers.attention import Attention
from penstock.layers.delta_net import DeltaNet
from penstock.layers.experts import ExpertMLP
from penstock.layers.mlp import GatedMLP
from penstock.models.config import DeltaNetConfig, ExpertsConfig
from penstock.models.decoder import Decoder, DecoderLayer
from penstock.models.expected import check_source
from penstock.models.source import WeightSource


def load_decoder(source: WeightSource, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Build a model from a file."""
    check_source(source)
    return _Loader(source, kernels, dtype, device).decoder()


class _Loader:
    def __init__(
        self, source: WeightSource, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._source = source
        self._names = source.names()
        self._config = source.config
        self._attention_layers = source.config.attention_layers
        self._kernels = kernels
        self._dtype = dtype
        self._device = device

    def decoder(self) -> Decoder:
        config = self._config
        embedding = self._tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = [self._layer(index) for index in range(config.num_layers)]
        head = embedding
        if not config.tied_head:
            head = self._tensor("lm_head.weight", config.vocab_size, config.hidden_size)
        return Decoder(
            config,
            self._kernels,
            embedding,
            layers,
            self._norm("model.norm.weight"),
            self._kernels.pack(head),
        )

    def _layer(self, index: int) -> DecoderLayer:
        config, prefix = self._config, f"model.layers.{index}"
        net, experts = config.delta_net, config.experts
        return DecoderLayer(
            mixer_norm=self._norm(f"{prefix}.input_layernorm.weight"),
            mixer=self._delta_net(f"{prefix}.linear_attn", net, net.layers.index(index))
            if net and index in net.layers
            else self._attention(f"{prefix}.self_attn", self._attention_layers.index(index)),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm.weight"),
            mlp=self._experts(f"{prefix}.mlp", experts)
            if experts and index in experts.layers
            else self._mlp(f"{prefix}.mlp", config.intermediate_size, config.mlp_bias),
        )

    # Attention

    def _attention(self, prefix: str, index: int) -> Attention:
        config = self._config
        query = config.num_heads * config.head_dim
        return Attention(
            index=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
            qkv_weight=self._kernels.pack(self._qkv(prefix, "weight", config.hidden_size)),
            qkv_bias=self._qkv(prefix, "bias") if config.qkv_bias else None,
            out_weight=self._packed(f"{prefix}.o_proj.weight", config.hidden_size, query),
            out_bias=self._tensor(f"{prefix}.o_proj.bias", config.hidden_size) if config.out_bias else None,
            query_norm=self._norm(f"{prefix}.q_norm.weight", config.head_dim) if config.head_norm else None,
            key_norm=self._norm(f"{prefix}.k_norm.weight", config.head_dim) if config.head_norm else None,
            is_gated=config.gated_attention,
        )

    def _qkv(self, prefix: str, kind: str, *rest: int) -> Tensor:
        config = self._config
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        names = [f"{prefix}.{part}_proj.{kind}" for part in "qkv"]
        if not config.gated_attention:
            return self._stacked(names, [query, key, key], [0, query, query + key], query + 2 * key, *rest)
        # Files have each head's gate after its query; here all gates come last.
        joined = self._tensor(names[0], 2 * query, *rest).view(config.num_heads, 2, config.head_dim, *rest)
        out = self._stacked(names[1:], [key, key], [query, query + key], 2 * query + 2 * key, *rest)
        out[:query] = joined[:, 0].flatten(0, 1)
        out[query + 2 * key :] = joined[:, 1].flatten(0, 1)
        return out

    # Delta net

    def _delta_net(self, prefix: str, net: DeltaNetConfig, index: int) -> DeltaNet:
        heads = net.num_value_heads
        lanes = whole_lanes(heads)
        conv = self._float32(f"{prefix}.conv1d.weight", net.conv_size, 1, net.conv_kernel)
        rate, bias = torch.zeros(2, lanes, device=self._device)
        rate[:heads] = -self._float32(f"{prefix}.A_log", heads).exp()
        bias[:heads] = self._float32(f"{prefix}.dt_bias", heads)
        return DeltaNet(
            index=index,
            num_key_heads=net.num_key_heads,
            num_value_heads=heads,
            key_head_dim=net.key_head_dim,
            value_head_dim=net.value_head_dim,
            norm_eps=self._config.norm_eps,
            in_weight=self._kernels.pack(self._delta_inputs(prefix, net, lanes)),
            conv_weight=conv[:, 0].t().contiguous(),
            decay_rate=rate,
            decay_bias=bias,
            norm=self._float32(f"{prefix}.norm.weight", net.value_head_dim),
            out_weight=self._packed(f"{prefix}.out_proj.weight", self._config.hidden_size, net.value_size),
        )

    def _delta_inputs(self, prefix: str, net: DeltaNetConfig, lanes: int) -> Tensor:
        """All input projections as one. Some files have them in two, key head by key head."""
        hidden, heads = self._config.hidden_size, net.num_value_heads
        gates_end = net.conv_size + net.value_size
        out = torch.zeros(gates_end + 2 * lanes, hidden, dtype=self._dtype, device=self._device)
        beta, decay = out[gates_end : gates_end + heads], out[gates_end + lanes : gates_end + lanes + heads]
        if (joined := f"{prefix}.in_proj_qkvz.weight") in self._names:
            value = net.value_size // net.num_key_heads
            sizes = [net.key_head_dim, net.key_head_dim, value, value]
            parts = self._by_key_head(joined, net, sizes)
            torch.cat(parts, out=out[:gates_end])
        else:
            self._source.load_into(f"{prefix}.in_proj_qkv.weight", out[: net.conv_size])
            self._source.load_into(f"{prefix}.in_proj_z.weight", out[net.conv_size : gates_end])
        if (joined := f"{prefix}.in_proj_ba.weight") in self._names:
            group = heads // net.num_key_heads
            for part, place in zip(
                self._by_key_head(joined, net, [group, group]), (beta, decay), strict=True
            ):
                place.copy_(part)
        else:
            self._source.load_into(f"{prefix}.in_proj_b.weight", beta)
            self._source.load_into(f"{prefix}.in_proj_a.weight", decay)
        return out

    def _by_key_head(self, name: str, net: DeltaNetConfig, sizes: list[int]) -> list[Tensor]:
        """The parts of a tensor whose rows are, for each key head, `sizes` rows of one part after the other."""
        hidden, num_key_heads = self._config.hidden_size, net.num_key_heads
        joined = self._tensor(name, num_key_heads * sum(sizes), hidden)
        return [
            part.flatten(0, 1) for part in torch.split(joined.view(num_key_heads, -1, hidden), sizes, dim=1)
        ]

    # Feed-forward blocks

    def _mlp(self, prefix: str, inner: int, has_bias: bool) -> GatedMLP:
        hidden, width = self._config.hidden_size, whole_lanes(inner)

        def gate_up(kind: str, *rest: int) -> Tensor:
            names = [f"{prefix}.gate_proj.{kind}", f"{prefix}.up_proj.{kind}"]
            return self._stacked(names, [inner, inner], [0, width], 2 * width, *rest)

        down = torch.zeros(hidden, width, dtype=self._dtype, device=self._device)
        self._source.load_into(f"{prefix}.down_proj.weight", down[:, :inner])
        return GatedMLP(
            gate_up_weight=self._kernels.pack(gate_up("weight", hidden)),
            gate_up_bias=gate_up("bias") if has_bias else None,
            down_weight=self._kernels.pack(down),
            down_bias=self._tensor(f"{prefix}.down_proj.bias", hidden) if has_bias else None,
        )

    def _experts(self, prefix: str, experts: ExpertsConfig) -> ExpertMLP:
        hidden, count, shared = (
            self._config.hidden_size,
            experts.num_experts,
            experts.shared_intermediate_size,
        )
        height = count + (whole_lanes(1) if shared else 0)
        router = torch.zeros(height, hidden, dtype=self._dtype, device=self._device)
        self._source.load_into(f"{prefix}.gate.weight", router[:count])
        if shared:
            self._source.load_into(f"{prefix}.shared_expert_gate.weight", router[count : count + 1])
        if f"{prefix}.experts.gate_up_proj" in self._names:
            blocks = self._joined_experts(f"{prefix}.experts", experts)
        else:
            blocks = [
                self._mlp(f"{prefix}.experts.{expert}", experts.intermediate_size, False)
                for expert in range(count)
            ]
        return ExpertMLP(
            router_weight=self._kernels.pack(router),
            experts=tuple(blocks),
            shared=self._mlp(f"{prefix}.shared_expert", shared, False) if shared else None,
            num_active=experts.num_active,
            is_normalised=experts.normalised,
        )

    def _joined_experts(self, prefix: str, experts: ExpertsConfig) -> list[GatedMLP]:
        """Experts that are stored as two tensors for all of them."""
        hidden, count, inner = self._config.hidden_size, experts.num_experts, experts.intermediate_size
        width = whole_lanes(inner)
        gate_up = self._tensor(f"{prefix}.gate_up_proj", count, 2 * inner, hidden)
        if width > inner:
            gate_up = pad(gate_up.view(count, 2, inner, hidden), (0, 0, 0, width - inner)).flatten(1, 2)
        gate_ups = [self._kernels.pack(gate_up[expert]) for expert in range(count)]
        del gate_up
        down = torch.zeros(count, hidden, width, dtype=self._dtype, device=self._device)
        self._source.load_into(f"{prefix}.down_proj", down[:, :, :inner])
        return [
            GatedMLP(gate_ups[expert], None, self._kernels.pack(down[expert]), None)
            for expert in range(count)
        ]

    # Tensors

    def _tensor(self, name: str, *shape: int) -> Tensor:
        out = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._source.load_into(name, out)
        return out

    def _packed(self, name: str, *shape: int) -> Tensor:
        return self._kernels.pack(self._tensor(name, *shape))

    def _float32(self, name: str, *shape: int) -> Tensor:
        out = torch.empty(shape, dtype=torch.float32, device=self._device)
        self._source.load_into(name, out)
        return out

    def _norm(self, name: str, size: int = 0) -> Tensor:
        """A norm's weight. A zero-centred one is close to 1 once 1 is added, and would lose what matters of it in a
        shorter dtype."""
        size = size or self._config.hidden_size
        if self._config.zero_centred_norm:
            return self._float32(name, size).add_(1)
        return self._tensor(name, size)

    def _stacked(
        self, names: list[str], heights: list[int], places: list[int], height: int, *rest: int
    ) -> Tensor:
        """Several tensors as one [height, *rest], each at its place; zeros between."""
        out = torch.zeros(height, *rest, dtype=self._dtype, device=self._device)
        for name, rows, place in zip(names, heights, places, strict=True):
            self._source.load_into(name, out[place : place + rows])
        return out
