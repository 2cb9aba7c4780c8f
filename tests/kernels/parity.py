"""What kernels must give: what plain formulas give in float64, which the reference kernels are held to as well, and
the same bits whatever stands beside a row. Neither pytest nor hypothesis is needed here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.cache import BLOCK_TOKENS, TokenRange
from penstock.cache.tensors import KV
from penstock.kernels.experts import GroupedExperts, Router, route
from penstock.kernels.interface import Kernels
from penstock.kernels.probe import Random
from penstock.kernels.quantised import F8_ROW, FLOAT_FORMS, BlockForm, QuantisedWeight, quantise
from penstock.kernels.reference.kernels import TorchKernels
from penstock.kernels.spans import AttendedSpan, AttentionWork, HeadLayout, Scoring, WrittenPlaces
from penstock.plan.grids import whole_lanes
from penstock.plan.model import ExpertsConfig

if TYPE_CHECKING:
    from penstock.kernels.cuda.quantised import GpuProducts
    from penstock.kernels.native.quantised import NativeProducts

EPS = 1e-5
SCALE = 0.3
# Of the largest value: two or three roundings to the dtype. Triton's interpreter rounds to bfloat16 towards zero, so
# that one is off by up to 2**-7.
_ROWS_ERROR = {torch.float32: 2e-6, torch.bfloat16: 3 * 2**-7}
_ATTENTION_ERROR = {torch.float32: 2e-5, torch.bfloat16: 3 * 2**-7}


@dataclass(frozen=True)
class Subject:
    """Kernels, and what to try them with."""

    kernels: Kernels
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def implementations(self) -> tuple[Kernels, ...]:
        return self.kernels, TorchKernels(tile_size=self.kernels.law.tile_size)

    def normal(self, *shape: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(self.device, self.dtype)


def check_close(ours: Tensor, exact: Tensor, most: float) -> None:
    assert ours.shape == exact.shape, f"{list(ours.shape)} is not {list(exact.shape)}"
    error = float((ours.double() - exact).abs().max() / exact.abs().max())
    assert error <= most, f"off by {error:.2g} of the largest, more than {most:.2g}"


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def check_norms(subject: Subject, num_rows: int, size: int) -> None:
    """Of rows, of heads, and of rows that lie apart; with a weight in the dtype and one in float32."""
    x, delta = subject.normal(num_rows, size), subject.normal(num_rows, size, seed=1)
    rows = {
        "rows": x,
        "heads": subject.normal(num_rows, 3, size),
        "heads that lie apart": subject.normal(num_rows, 5, size)[:, 1:4],
        "rows that lie apart": subject.normal(num_rows, 2 * size)[:, size // 2 : size // 2 + size],
    }
    most = _ROWS_ERROR[subject.dtype]
    for weight in (subject.normal(size, seed=2), subject.normal(size, seed=2).float()):
        for kernels in subject.implementations:
            for given in rows.values():
                normed = kernels.rms_norm(given, weight, EPS)
                assert normed.dtype == subject.dtype
                check_close(normed, exact_norm(given, weight), most)
            total, normed = kernels.add_norm(x, delta, weight, EPS)
            check_close(total, x.double() + delta.double(), most)
            assert normed.dtype == subject.dtype
            check_close(normed, exact_norm(total, weight), most)
            # A pipeline's next stage norms the sum that it is handed: to the same bits.
            assert torch.equal(kernels.rms_norm(total, weight, EPS), normed)
            # Written over what they are made of.
            own, other = x.clone(), delta.clone()
            into = kernels.add_norm(own, other, weight, EPS, into=(own, other))
            assert [each.data_ptr() for each in into] == [own.data_ptr(), other.data_ptr()]
            assert torch.equal(own, total)
            assert torch.equal(other, normed)


def check_activation(subject: Subject, num_rows: int, width: int) -> None:
    """The gate is large enough for the exponential to overflow at its ends."""
    gate_up = subject.normal(num_rows, 2 * width)
    gate_up[:, :width] *= 40
    gate, up = gate_up.double().chunk(2, dim=-1)
    for kernels in subject.implementations:
        activated = kernels.silu_and_mul(gate_up.clone())
        assert activated.dtype == subject.dtype
        check_close(activated, gate * torch.sigmoid(gate) * up, _ROWS_ERROR[subject.dtype])


def check_product(subject: Subject, num_rows: int, num_out: int, num_in: int, *, has_bias: bool) -> None:
    """In the way that is the fastest for so many rows."""
    x, weight = subject.normal(num_rows, num_in), subject.normal(num_out, num_in, seed=1)
    bias = subject.normal(num_out, seed=2) if has_bias else None
    exact = x.double() @ weight.double().T
    if bias is not None:
        exact += bias.double()
    product = subject.kernels.linear(x, weight, bias, is_canonical=False)
    assert product.dtype == subject.dtype
    check_close(product, exact, _ROWS_ERROR[subject.dtype])


@dataclass(frozen=True)
class Heads:
    """Of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None  # as large as the keys, unless said

    def scorings(self, device: torch.device) -> dict[str, Scoring]:
        """What layers may have beside plain attention, each alone and all at once."""
        sinks = torch.linspace(-2, 3, self.num_heads, device=device)
        return {
            "plain": PLAIN,
            "a window within a block": Scoring(SCALE, window=1 + 64 // 3),
            "a window of a block": Scoring(SCALE, window=64),
            "a window of several": Scoring(SCALE, window=201),
            "sinks": Scoring(SCALE, sinks=sinks),
            "a soft cap": Scoring(SCALE, soft_cap=1.5),
            "all": Scoring(SCALE, window=130, soft_cap=2.0, sinks=sinks),
        }


PLAIN = Scoring(SCALE)


def exact_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = cos.shape[-1]
    first, second = x[..., : size // 2], x[..., size // 2 : size]
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    turned = torch.cat((first, second), -1) * cos + torch.cat((second, first), -1) * sin
    return torch.cat((turned, x[..., size:]), dim=-1)


def check_placed_heads(
    subject: Subject, heads: Heads, *, rotary_dim: int, norm_dtype: torch.dtype | None, num_extra: int = 0
) -> None:
    """Rows of which some are padding, written to three places; the projection has more beyond the values, if any."""
    ranges = (TokenRange(64, 71), TokenRange(5, 6), TokenRange(256, 259))
    num_tokens, num_rows = 11, 14
    num_placed = heads.num_heads + 2 * heads.num_kv_heads
    projected = subject.normal(num_rows, (num_placed + num_extra) * heads.head_dim)
    cos, sin = (subject.normal(num_rows, rotary_dim, seed=seed) for seed in (1, 2))
    query_norm, key_norm = (
        None if norm_dtype is None else subject.normal(heads.head_dim, seed=seed).to(norm_dtype)
        for seed in (3, 4)
    )
    layout = HeadLayout(heads.num_heads, heads.num_kv_heads, heads.head_dim, query_norm, key_norm, EPS)

    rows = projected.double().view(num_rows, -1, heads.head_dim)
    queries, keys, values, _ = rows.split(
        [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads, num_extra], dim=1
    )
    if query_norm is not None and key_norm is not None:
        queries, keys = exact_norm(queries, query_norm), exact_norm(keys, key_norm)
    queries, keys = exact_rotation(queries, cos, sin), exact_rotation(keys, cos, sin)

    for kernels in subject.implementations:
        before = subject.normal(320, heads.num_kv_heads, heads.head_dim, seed=5)
        kv = KV(before.clone(), before.clone())
        ours = kernels.place_heads(projected, layout, cos, sin, kv, WrittenPlaces(ranges))
        most = _ROWS_ERROR[subject.dtype]
        check_close(ours, queries, most)
        written = kv.read(ranges)
        check_close(written.keys, keys[:num_tokens], most)
        assert torch.equal(written.values.double(), values[:num_tokens])
        is_other = torch.ones(len(before), dtype=torch.bool)
        for place in ranges:
            is_other[place.start : place.end] = False
        assert torch.equal(kv.keys[is_other], before[is_other])
        assert torch.equal(kv.values[is_other], before[is_other])


# Attention


@dataclass(frozen=True)
class Rows:
    """Queries at positions [first, end) of a sequence, whose tokens lie in these blocks of the cache."""

    first: int
    end: int
    blocks: tuple[int, ...]
    is_prompt: bool = True

    @property
    def places(self) -> tuple[TokenRange, ...]:
        """Blocks that follow each other are one place."""
        found: list[TokenRange] = []
        for index, block in enumerate(self.blocks):
            start = block * BLOCK_TOKENS
            end = start + min(BLOCK_TOKENS, self.end - index * BLOCK_TOKENS)
            if found and found[-1].end == start:
                start = found.pop().start
            found.append(TokenRange(start, end))
        return tuple(found)


def in_one_place(first: int, end: int, *, is_prompt: bool = True) -> Rows:
    return Rows(first, end, tuple(range(-(-end // BLOCK_TOKENS))), is_prompt)


def work_of(batch: Sequence[Rows], tile_size: int) -> AttentionWork:
    spans: list[AttendedSpan] = []
    row = 0
    for rows in batch:
        end = row + rows.end - rows.first
        spans.append(
            AttendedSpan(
                row, end, rows.first, rows.places, rows.is_prompt, tile_size, rows.first, is_joined=True
            )
        )
        row = end
    return AttentionWork(tuple(spans))


def attend(
    subject: Subject,
    queries: Tensor,
    batch: Sequence[Rows],
    kv: KV,
    num_padding: int = 0,
    scoring: Scoring = PLAIN,
) -> Tensor:
    """With rows of padding behind, which must be zero, and are left away."""
    padding = subject.normal(num_padding, *queries.shape[1:])
    work = work_of(batch, subject.kernels.law.tile_size)
    attended = subject.kernels.attend(torch.cat((queries, padding)), work, kv, scoring)
    assert attended.dtype == subject.dtype
    assert not attended[len(queries) :].any()
    return attended[: len(queries)]


def exact_attention(queries: Tensor, batch: Sequence[Rows], kv: KV, scoring: Scoring = PLAIN) -> Tensor:
    group = queries.shape[1] // kv.keys.shape[1]
    found: list[Tensor] = []
    for rows, own in zip(batch, queries.split([rows.end - rows.first for rows in batch]), strict=True):
        seen = kv.read(rows.places)
        keys, values = (part.double().repeat_interleave(group, dim=1) for part in (seen.keys, seen.values))
        positions = torch.arange(rows.end, device=queries.device)
        behind = positions[rows.first :, None] - positions
        is_hidden = (behind < 0) | (behind >= (scoring.window or rows.end))
        scores = torch.einsum("qhd,khd->hqk", own.double(), keys) * scoring.scale
        if scoring.soft_cap:
            scores = (scores / scoring.soft_cap).tanh() * scoring.soft_cap
        scores = scores.masked_fill(is_hidden, -torch.inf)
        if scoring.sinks is not None:
            sinks = scoring.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., : rows.end]
        found.append(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
    return torch.cat(found)


def _num_rows(batch: Sequence[Rows]) -> int:
    return sum(rows.end - rows.first for rows in batch)


def random_kv(subject: Subject, heads: Heads, num_blocks: int) -> KV:
    shape = (num_blocks * BLOCK_TOKENS, heads.num_kv_heads)
    keys = subject.normal(*shape, heads.head_dim, seed=1)
    return KV(keys, subject.normal(*shape, heads.value_dim or heads.head_dim, seed=2))


def check_attention(
    subject: Subject,
    heads: Heads,
    batch: Sequence[Rows],
    num_padding: int = 3,
    scoring: Scoring = PLAIN,
) -> None:
    kv = random_kv(subject, heads, 1 + max(max(rows.blocks) for rows in batch))
    queries = subject.normal(_num_rows(batch), heads.num_heads, heads.head_dim)
    exact = exact_attention(queries, batch, kv, scoring)
    for kernels in subject.implementations:
        one = Subject(kernels, subject.dtype, subject.device)
        ours = attend(one, queries, batch, kv, num_padding, scoring)
        check_close(ours, exact, _ATTENTION_ERROR[subject.dtype])


def check_cuts(
    subject: Subject,
    heads: Heads,
    num_tokens: int,
    cuts: Sequence[tuple[int, int]],
    scoring: Scoring = PLAIN,
) -> None:
    """A prompt's queries have the same bits in any chunk. Behind a chunk lies what others left; blocks before its
    window are gone, and hold no numbers."""
    whole = in_one_place(0, num_tokens)
    kv = random_kv(subject, heads, len(whole.blocks))
    queries = subject.normal(num_tokens, heads.num_heads, heads.head_dim)
    expected = attend(subject, queries, [whole], kv, 0, scoring)
    for first, end in cuts:
        known = KV(kv.keys.clone(), kv.values.clone())
        known.keys[end:] = 100
        known.values[end:] = -100
        gone = scoring.first_seen(first) // BLOCK_TOKENS * BLOCK_TOKENS
        for part in (known.keys, known.values):
            part[:gone] = torch.nan
        ours = attend(subject, queries[first:end], [in_one_place(first, end)], known, 0, scoring)
        assert torch.equal(ours, expected[first:end]), f"tokens {first} to {end} differ from the whole's"
        if gone:  # and nothing lies before what is left
            left, tile = (
                KV(known.keys[gone:].clone(), known.values[gone:].clone()),
                subject.kernels.law.tile_size,
            )
            places = [TokenRange(0, end - gone)]
            span = AttendedSpan(0, end - first, first, places, True, tile, first, first_token=gone)
            ours = subject.kernels.attend(queries[first:end], AttentionWork((span,)), left, scoring)
            assert torch.equal(ours, expected[first:end]), f"tokens {first} to {end} need what is gone"


def check_beside(
    subject: Subject,
    heads: Heads,
    batch: Sequence[Rows],
    num_padding: int = 0,
    scoring: Scoring = PLAIN,
) -> None:
    """Rows have the bits that they have alone, with all that they see in one place."""
    kv = random_kv(subject, heads, 1 + max(max(rows.blocks) for rows in batch))
    queries = subject.normal(_num_rows(batch), heads.num_heads, heads.head_dim)
    together = attend(subject, queries, batch, kv, num_padding, scoring)
    start = 0
    for rows in batch:
        end = start + rows.end - rows.first
        alone = in_one_place(rows.first, rows.end, is_prompt=rows.is_prompt)
        own = kv.read_padded(rows.places, len(alone.blocks) * BLOCK_TOKENS)
        expected = attend(subject, queries[start:end], [alone], own, 0, scoring)
        assert torch.equal(together[start:end], expected), f"{rows} differ from those alone"
        start = end


def scattered(batch: Sequence[Rows], order: Sequence[int]) -> Iterator[Rows]:
    """The same rows with their blocks taken from a common order, so that no two share one."""
    start = 0
    for rows in batch:
        end = start + len(rows.blocks)
        yield Rows(rows.first, rows.end, tuple(order[start:end]), rows.is_prompt)
        start = end


# Experts

ROUTERS = {
    "softmax": ExpertsConfig(1, 12, 96, num_active=3),
    "one of each, not normalised": ExpertsConfig(1, 5, 64, num_active=1, normalised=False),
    "a shared one": ExpertsConfig(1, 8, 64, 64, num_active=2, shared_gate=False),
    "a shared one with a gate": ExpertsConfig(1, 8, 64, 64, num_active=8),
    "softmax with a bias": ExpertsConfig(1, 12, 96, num_active=4, choice_bias=True),
    "scales of experts": ExpertsConfig(1, 12, 64, num_active=3, normed_apart=True),
    "sigmoid in groups": ExpertsConfig(
        1,
        12,
        64,
        num_active=3,
        scores="sigmoid",
        choice_bias=True,
        num_groups=4,
        num_active_groups=2,
        scale=2.5,
    ),
}


@dataclass(frozen=True)
class ExpertRows:
    """Rows on their way through experts, and what comes out of them in float64."""

    subject: Subject
    config: ExpertsConfig
    num_rows: int
    hidden: int = 96
    form: BlockForm | None = None  # of the weights; hidden and width are multiples of a block then
    is_canonical: bool = True

    @cached_property
    def experts(self) -> GroupedExperts:
        gate_up, down = self.blocks or (self.gate_up, self.down)
        return self.subject.kernels.stacked_experts(self.router, gate_up, down)

    @cached_property
    def blocks(self) -> tuple[QuantisedWeight, ...]:
        if (form := self.form) is None:
            return ()
        count, width, products = self.config.num_experts, self.config.intermediate_size, self.products
        random, found = Random(torch.bfloat16, self.subject.device), []
        for height, num_in in ((2 * count * width, self.hidden), (count * self.hidden, width)):
            weight = products.zeros(form, height, num_in, self.subject.device)
            if form in FLOAT_FORMS:
                blocks = quantise(random.normal(height, num_in), F8_ROW)
            else:
                blocks = random.cancelling_blocks(height, num_in // form.block_size, form.block_bytes)
            products.place(weight, torch.arange(height), blocks)
            found.append(weight)
        return tuple(found)

    @property
    def products(self) -> "NativeProducts | GpuProducts":
        assert self.subject.kernels.quantised is not None
        return self.subject.kernels.quantised

    def _values(self, index: int) -> Tensor:
        weight = self.blocks[index]
        outputs = torch.arange(weight.shape[0], device=self.subject.device)
        values = self.products.rows(weight, outputs, torch.float32)
        return values.view(self.config.num_experts, -1, weight.shape[1])

    @cached_property
    def router(self) -> Router:
        config = self.config
        drawn = [self.subject.normal(config.num_experts, seed=seed).float() for seed in (3, 6)]
        bias = drawn[0].mul_(0.3) if config.choice_bias else None
        return Router(config, bias, drawn[1].add_(2) if config.normed_apart else None)

    @cached_property
    def gate_up(self) -> Tensor:
        if self.form is not None:
            return self._values(0)
        width = whole_lanes(self.config.intermediate_size)
        return self.subject.normal(self.config.num_experts, 2 * width, self.hidden).div_(self.hidden**0.5)

    @cached_property
    def down(self) -> Tensor:
        if self.form is not None:
            return self._values(1)
        width = whole_lanes(self.config.intermediate_size)
        return self.subject.normal(self.config.num_experts, self.hidden, width, seed=1).div_(width**0.5)

    @cached_property
    def x(self) -> Tensor:
        """Whose products with gates are about as large as for plain weights."""
        x = self.subject.normal(self.num_rows, self.hidden, seed=2)
        return x if self.form is None else x / float(self.gate_up.square().mean() * self.hidden) ** 0.5

    @cached_property
    def scores(self) -> Tensor:
        """Of which no two are the same: either might be chosen. The last is the shared expert's gate."""
        generator = torch.Generator().manual_seed(4)
        rows = [
            torch.randperm(self.config.num_experts + 1, generator=generator) for _ in range(self.num_rows)
        ]
        return (torch.stack(rows) / 4).to(self.subject.device, self.subject.dtype)

    @cached_property
    def shared(self) -> Tensor | None:
        has_shared = self.config.shared_intermediate_size
        return self.subject.normal(self.num_rows, self.hidden, seed=5) if has_shared else None

    def run(self, rows: slice = slice(None)) -> Tensor:
        shared = None if self.shared is None else self.shared[rows]
        return self.experts.run(self.x[rows], self.scores[rows], shared, is_canonical=self.is_canonical)

    def exact(self) -> Tensor:
        num_experts = self.config.num_experts
        weights, chosen = route(self.scores[:, :num_experts].double(), self.router)
        inner = torch.einsum("eoh,rh->reo", self.gate_up.double(), self.x.double())
        gate, up = inner.chunk(2, dim=-1)
        out = torch.einsum("ehw,rew->reh", self.down.double(), torch.nn.functional.silu(gate) * up)
        total = (out * torch.zeros_like(out[..., 0]).scatter(1, chosen, weights)[..., None]).sum(dim=1)
        if self.shared is not None and self.config.shared_gate:
            return total + torch.sigmoid(self.scores[:, num_experts:].double()) * self.shared.double()
        return total if self.shared is None else total + self.shared.double()


def check_experts(rows: ExpertRows) -> None:
    found, dtype = rows.run(), rows.subject.dtype
    assert found.dtype == dtype
    # Twice as many roundings; those to 8-bit floats, of rows, too, are up to 2**-4 of a number each.
    most = 0.12 if rows.form in FLOAT_FORMS and rows.is_canonical else 2 * _ROWS_ERROR[dtype]
    check_close(found, rows.exact(), most)


def check_experts_alone(rows: ExpertRows, counts: Sequence[int]) -> None:
    """Rows have the bits that they have among others, wherever they stand and however many they are."""
    whole, num_rows = rows.run(), rows.num_rows
    for count in counts:
        for start in {0, (num_rows - count) // 2, num_rows - count}:
            part = slice(start, start + count)
            assert torch.equal(rows.run(part), whole[part]), f"rows {start} to {start + count} of {num_rows}"
