"""Whose turn a step is, where some requests have prompt to read and others a token to decode."""

from penstock.plan.policy import ScheduleConfig, SchedulePolicy


class Turns:
    """Counts the steps that were committed, and says what the next one takes where it could take either."""

    def __init__(self, config: ScheduleConfig) -> None:
        self._config = config
        self._chunks_were_last = False
        self._num_chunk_steps = 0  # in a row, while a decode waited
        self._num_decode_steps = 0  # in a row, while a prompt waited

    def takes_decodes(self) -> bool:
        match self._config.policy:
            case SchedulePolicy.MIXED:
                return True
            case SchedulePolicy.PREFILL_FIRST:
                return self._num_chunk_steps >= self._config.max_chunk_steps
            case SchedulePolicy.INTERLEAVED:
                return self._chunks_were_last
            case SchedulePolicy.DECODE_PRIORITY:
                return self._num_decode_steps < self._config.max_decode_steps

    def takes_chunks(self) -> bool:
        return self._config.policy is SchedulePolicy.MIXED or not self.takes_decodes()

    def count(self, *, has_decodes: bool, has_chunks: bool, decodes_wait: bool, prompts_wait: bool) -> None:
        """A step was committed that has these, while these had to wait."""
        self._chunks_were_last = has_chunks
        self._num_chunk_steps = self._num_chunk_steps + 1 if decodes_wait and not has_decodes else 0
        self._num_decode_steps = self._num_decode_steps + 1 if prompts_wait and not has_chunks else 0
