"""The ways in which one prompt is run, each with all that it left behind: logits, keys and values, states."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.bench.verify_watch import WatchedDecoder
from penstock.cache import SequenceCache
from penstock.cache.kv import KV
from penstock.engine.batch import Canon
from penstock.engine.run import Run
from penstock.engine.space import CacheSpace
from penstock.models.decoder import Decoder
from penstock.models.text.tokenizer import Tokenizer
from penstock.plan import STATE_GRID, ChunkedPrefillConfig

# Logits that are kept of one way, at most. Keys and values are compared at every token, whatever this is.
_LOGITS_BYTES = 256 * 2**20
_EDGE = 256  # attention's pieces begin and end on multiples of this
_RANDOM_CUTS = 9


@dataclass(frozen=True)
class Subject:
    """A model and what it reads: `num_generated` tokens follow the prompt, the greedy ones of the whole prompt."""

    model: Decoder
    canon: Canon
    tokenizer: Tokenizer
    prompt: tuple[int, ...]
    num_generated: int

    @property
    def prompt_positions(self) -> tuple[int, ...]:
        """Prompt tokens whose logits are compared, the last one aside: all, or as many as memory is set aside for,
        those at the edges of attention's pieces first."""
        last = len(self.prompt) - 1
        most = max(_LOGITS_BYTES // (4 * self.model.config.vocab_size) - self.num_generated, 2)
        if last <= most:
            return tuple(range(last))
        edges = [
            position
            for edge in range(0, last, _EDGE)
            for position in (edge - 1, edge, edge + 1)
            if position >= 0
        ]
        spread = [index * last // most for index in range(most)]
        return tuple(
            sorted([position for position in dict.fromkeys([*edges, *spread]) if position < last][:most])
        )

    @property
    def positions(self) -> tuple[int, ...]:
        """The tokens after which logits are compared, those that are generated among them, but for the last."""
        end = len(self.prompt) - 1
        return (*self.prompt_positions, *range(end, end + self.num_generated))


@dataclass(frozen=True)
class Recomputed:
    """Keys and values of tokens that chunks had in common: as the earlier chunk left them, and the later one."""

    positions: tuple[int, ...]
    before: tuple[KV, ...]  # of each layer
    after: tuple[KV, ...]


@dataclass(frozen=True)
class Trace:
    """What one way left behind."""

    logits: Tensor  # [positions, vocab], float32
    layers: tuple[KV, ...]  # of every token that was run
    states: tuple[Tensor, ...]  # where the prompt ended; none without recurrent layers
    generated: tuple[int, ...]  # the greedy choices
    keeps_bits: bool  # whether its chunks lie where its bits must be those of any others
    recomputed: Recomputed | None = None


class Recorder:
    """Gathers what becomes a trace. The token that follows is the one it was told, whatever was sampled."""

    def __init__(self, subject: Subject, forced: Sequence[int] | None) -> None:
        self.subject = subject
        self._forced = forced
        self._num_seen = len(subject.prompt_positions)
        # What is never written stays no number, and is equal to nothing.
        self._logits = torch.full((len(subject.positions), subject.model.config.vocab_size), torch.nan)
        self.model = WatchedDecoder(
            subject.model, subject.canon, subject.prompt_positions, self._logits[: self._num_seen]
        )
        self._states: tuple[Tensor, ...] = ()
        self._chosen: list[int] = []

    @property
    def is_done(self) -> bool:
        return len(self._chosen) == self.subject.num_generated

    def see(self, position: int, logits: Tensor) -> None:
        """Logits [vocab] after a prompt token that ran as a decode."""
        if position in self.model.index_of:
            self._logits[self.model.index_of[position]] = logits

    def take(self, logits: Tensor, cache: SequenceCache, space: CacheSpace) -> int:
        """Logits [vocab] after all that was run so far. Returns the token to go on with."""
        if not self._chosen:
            self._states = states_of(cache, space)
        self._logits[self._num_seen + len(self._chosen)] = logits
        self._chosen.append(int(logits.argmax()))
        return self._chosen[-1] if self._forced is None else self._forced[len(self._chosen) - 1]

    def trace(
        self,
        cache: SequenceCache,
        space: CacheSpace,
        *,
        keeps_bits: bool,
        recomputed: Recomputed | None = None,
    ) -> Trace:
        layers = kv_of(cache, space, 0, len(self.subject.prompt) + self.subject.num_generated - 1)
        return Trace(self._logits, layers, self._states, tuple(self._chosen), keeps_bits, recomputed)


def run_chunks(
    subject: Subject,
    forced: Sequence[int] | None = None,
    *,
    chunk_size: int = 0,
    chunk_ends: Sequence[int] | None = None,
    overlap: int = 0,
) -> Trace:
    """The prompt alone, in chunks; 0: whole. Where they overlap, what is run twice is kept as it was both times."""
    recorder = Recorder(subject, forced)
    run = Run(
        recorder.model,
        subject.prompt,
        config=ChunkedPrefillConfig(chunk_size, overlap),
        canon=subject.canon,
        max_tokens=subject.num_generated + 1,  # one more than is sampled: a run that ends frees its cache
        chunk_ends=chunk_ends,
    )
    recomputed: list[tuple[range, tuple[KV, ...], tuple[KV, ...]]] = []
    while not recorder.is_done:
        old_end = run.cache.num_tokens
        before = kv_of(run.cache, run.space, max(old_end - overlap, 0), old_end) if overlap else ()
        step = run.step()
        again = range(step.span.start, old_end)
        if len(again):  # the whole overlap
            recomputed.append((again, before, kv_of(run.cache, run.space, again.start, old_end)))
        if run.logits is not None and step.token is not None:
            run.tokens[-1] = recorder.take(run.logits, run.cache, run.space)
    trace = recorder.trace(
        run.cache,
        run.space,
        keeps_bits=not subject.model.config.has_state or run.prefill.lies_on(STATE_GRID),
        recomputed=_joined(recomputed) if recomputed else None,
    )
    run.cancel()
    return trace


def run_decodes(subject: Subject, forced: Sequence[int]) -> Trace:
    """The prompt alone, each token after the first as a decode: other kernels, the same mathematics."""
    recorder = Recorder(subject, forced)
    prompt = subject.prompt
    run = Run(
        recorder.model,
        prompt[:1],
        config=ChunkedPrefillConfig(0),
        canon=subject.canon,
        max_tokens=len(prompt) + subject.num_generated,
    )
    while not recorder.is_done:
        run.step()
        position = run.cache.num_tokens - 1
        assert run.logits is not None
        if position < len(prompt) - 1:
            recorder.see(position, run.logits)
            run.tokens[-1] = prompt[position + 1]
        else:
            run.tokens[-1] = recorder.take(run.logits, run.cache, run.space)
    trace = recorder.trace(run.cache, run.space, keeps_bits=False)
    run.cancel()
    return trace


def random_ends(num_tokens: int, seed: int, grid: int = 1) -> list[int]:
    """A prompt cut at some places, each a multiple of the grid; the same ones for the same seed."""
    places = range(grid, num_tokens, grid)
    cuts = random.Random(seed).sample(places, min(_RANDOM_CUTS, len(places)))
    return [*sorted(cuts), num_tokens]


def kv_of(cache: SequenceCache, space: CacheSpace, start: int, end: int) -> tuple[KV, ...]:
    """A copy of the keys and values of tokens [start, end), layer by layer."""
    places, kv = cache.blocks.locate(start, end), space.tensors.kv
    layers = (kv.read(layer, places) for layer in range(kv.spec.num_layers))
    return tuple(KV(layer.keys.clone(), layer.values.clone()) for layer in layers)


def states_of(cache: SequenceCache, space: CacheSpace) -> tuple[Tensor, ...]:
    """A copy of the convolution tail and the matrix of each recurrent layer."""
    if cache.state is None:
        return ()
    states, slot = space.tensors.states, cache.state.slot
    return tuple(
        part.clone()
        for layer in range(states.spec.num_layers)
        for part in (states.tail(layer, slot), states.matrix(layer, slot))
    )


def _joined(parts: Sequence[tuple[range, tuple[KV, ...], tuple[KV, ...]]]) -> Recomputed:
    def cat(sides: Sequence[tuple[KV, ...]]) -> tuple[KV, ...]:
        return tuple(
            KV(torch.cat([kv.keys for kv in layer]), torch.cat([kv.values for kv in layer]))
            for layer in zip(*sides, strict=True)
        )

    positions = tuple(position for again, _, _ in parts for position in again)
    return Recomputed(
        positions, cat([before for _, before, _ in parts]), cat([after for _, _, after in parts])
    )
