"""Values stay as they are made: whoever holds one, on whichever thread, need not copy it."""

import importlib
import inspect
import pkgutil
from dataclasses import is_dataclass
from typing import Any

from penstock import engine
from tests.numbers_of import numbers_of

# Numbers that are neither 0 nor false, where nobody gives others.
NUMBERS = {
    "(0.1, 3600.0)": "stages.control._TIMEOUTS_S",
    "(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)": "graphs.passes.DECODE_ROWS",
    "256": "graphs.passes.MOST_DECODE_ROWS",
    "(8, 32, 256, 1024)": "graphs.passes.DECODE_BLOCKS",
    "0.03": "self_check._MOST_ELSE",
    "-1": "stages.header._AS_ALL",
    "0.05": "stages.worker._TELL_S",
    "0.1": "stages.control._RETRY_S",
    "0.5": """
        capacity._SHARE run._STAGE_RETRY_S service._RETRY_S stages.peer._LOOK_S
        stages.pipeline._REASON_S
    """,
    "0.9": "capacity._SHARE_ON_GPU",
    "1": """
        fingerprint._VERSION profile._SCHEMA run.Run.max_tokens stages.link._FAILED
        stages.workers._PR_SET_PDEATHSIG
    """,
    "1.0": """
        sampler.SamplingParams.repetition_penalty sampler.SamplingParams.top_p stages.pipeline._REOPEN_S
    """,
    "1.25": "capacity._STEP_MARGIN",
    "10.0": """
        stages.control.DEFAULT_STAGE_TIMEOUT_S stages.control.connect.stage_timeout_s
        stages.control.connect.timeout_s stages.pipeline.Pipeline.stage_timeout_s
        stages.workers.WorkerPlace.open.stage_timeout_s stages.workers.WorkerPlace.open.timeout_s
    """,
    "100.0": "sampler.MAX_BIAS",
    "1000": "fingerprint._MOST_MEMOS schema_limits.MAX_PROPERTIES",
    "1000000000.0": "sampler.MAX_REPETITION",
    "1024": "graphs.passes._MOST_SEEN reuse.SNAPSHOT_TOKENS stages.control._MOST_WAITING",
    "1048576": "fingerprint._MOST_MEMO_BYTES stages.control._MOST_JSON_BYTES",
    "1073741824": "reuse.KEPT_WINDOW_BYTES",
    "128": "self_check.NUM_TOKENS",
    "16": """
        constraint.NUM_KEPT graphs.passes._MOST_CHUNK_GRAPHS reuse.MAX_SNAPSHOTS
        service.ServiceConfig.max_snapshots stages.control.LEAST_TOKEN_CHARACTERS
        stages.control._MOST_HANDSHAKES
    """,
    "16777216": "profile._MOST_FILE_BYTES prompt_rows._PARTS_OF_ONE",
    "1e-06": "sampler.MIN_TEMPERATURE",
    "1e-09": "sampler.MIN_REPETITION",
    "2": "batcher.SUSPICIOUS_LOSSES stages.header._VERSION",
    "2.0": "sampler.MAX_PENALTY",
    "2000000000": "fingerprint._SETTLED_NS",
    "2147483648": "sampler._require_int.limit",
    "240": "batcher.STEPS_SHOWN",
    "262144": "grammar.MAX_GRAMMAR_BYTES",
    "268435456": "capacity._MARGIN_BYTES",
    "30.0": "stages.pipeline._WRITE_S",
    "300": "constraint._MAX_REASON",
    "32": "stages.control._MAC_BYTES stages.control._NONCE_BYTES",
    "4": "constraint.NUM_QUEUED",
    "4096": "cache_choice._RECORDED_GRID stages.control._MOST_TOKEN_BYTES",
    "4194304": "fingerprint._SLICE_BYTES",
    "5": "batcher.MOST_LOSSES graphs.decode._COLUMNS",
    "5.0": "stages.control._HANDSHAKE_S stages.pipeline._END_S",
    "512": "llm.DEFAULT_MAX_TOKENS reuse.MOST_FOUND sampler._FEW_TOKENS stages.pipeline._STEPS_KEPT",
    "60": "stages.joining._SHORT",
    "60.0": "run._STAGE_PATIENCE_S stages.workers._START_S",
    "64": """
        batcher.ENDED_EXPLAINED prompt_rows.SLICE_ROWS schema_limits.MAX_PATTERN_PROPERTIES
        stages.link._HEAD_BYTES
    """,
    "65536": "schema_limits.MAX_BYTES stages.control._PIECE_BYTES",
    "67108864": "reuse.PIECE_BYTES stages.control._MOST_DATA_BYTES",
    "8": "schema_limits.MAX_JOINED_PATTERNS stages.link._MOST_SENT",
    "8.0": "service.MOST_PREPARING_S",
    "True": """
        constraint.TokenConstraint.is_holding constraint._Vocabulary.is_tokenizer_wrapper
        grammar.CallGrammar.grammar.is_parallel reuse.Prefix._snapshot.in_memory
        service.ServiceConfig.reuse stages.pipeline.Pipeline.same_machine
    """,
}


def test_dataclasses_are_frozen_but_for_steps_in_flight_recordings_and_times() -> None:
    names = [found.name for found in pkgutil.walk_packages(engine.__path__, "penstock.engine.")]
    modules = [importlib.import_module(name) for name in names]
    classes: set[Any] = {
        kind
        for module in modules
        for _, kind in inspect.getmembers(module, is_dataclass)
        if kind.__module__.startswith("penstock.engine")
    }
    changeable = {kind.__qualname__ for kind in classes if not kind.__dataclass_params__.frozen}
    assert changeable == {"_InFlight", "Peer", "_Recording", "StageTimes"}
    assert len(classes) > 30


def test_numbers_are_those_that_were_meant() -> None:
    assert numbers_of(engine) == {number: set(names.split()) for number, names in NUMBERS.items()}
