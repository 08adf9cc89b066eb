"""Frozen settings, built once in `cli` (or by the Python API) and passed down; reads nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and in what form.

    Attributes:
        model: hub id, folder, `.gguf` file, or `demo`.
        revision: hub revision; None takes the default branch.
        dtype: `auto`, `float32`, `float16` or `bfloat16`; anything but auto expands quantized
            weights to that type.
        max_model_len: longest prompt plus output in tokens; None takes the model's own.
        adapter: folder of a LoRA or DoRA adapter to put into the model.
        embeddings: `auto` (the checkpoint's files say whether and how it embeds), `mean` or `last`.
    """

    model: str = "demo"
    revision: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    adapter: str | None = None
    embeddings: str = "auto"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Where keys and values live.

    Attributes:
        block_size: tokens per block.
        kv_memory: upper limit of all layers' keys and values in bytes; None decides by machine.
        kv_dtype: `auto` stores what the model computes; otherwise a dtype name, or `int8` or
            `int4` for codes in groups of 32.
        prefix_cache: share blocks between requests with equal prefixes.
        shared_prompts: files of prompts that are shared by all users.
        ssd_cache: folder that evicted and idle blocks are written to; None for none.
        ssd_cache_size: most bytes of that folder; None takes a share of the disk.
        ssd_daily_writes: most bytes written to it per day; None takes a cautious default.
    """

    block_size: int = 16
    kv_memory: int | None = None
    kv_dtype: str = "auto"
    prefix_cache: bool = True
    shared_prompts: tuple[str, ...] = ()
    ssd_cache: str | None = None
    ssd_cache_size: int | None = None
    ssd_daily_writes: int | None = None


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Who runs in a step.

    Attributes:
        policy: `continuous` or `fair` (requests join and leave at every step, users share the
            machine), `priority`, `fcfs`, or `static` (a batch is fixed until its last request
            ends: the baseline).
        max_num_seqs: most requests running at once.
        max_running_per_user: most of one user's requests running at once; None for no such cap.
        control: `auto` lets the control loop act on early signs; `frozen` begins without.
        max_num_batched_tokens: most rows in one step; None lets predicted step time decide.
        itl_target_ms: the gap between two tokens of a stream that the step time is kept under.
        max_queue_wait_s: longest predicted wait that is still accepted.
        pipelined: launch step n+1 before the tokens of step n are read; None does so where MLX
            runs beside the host (a GPU) and not where launching a step waits for it (the CPU).
        tile_rows: rows that a matrix product computes whether they are there or not; a step's size
            is rounded to them. None takes what is known of the machine and the model.
    """

    policy: str = "continuous"
    max_num_seqs: int = 64
    max_running_per_user: int | None = None
    control: str = "auto"
    max_num_batched_tokens: int | None = None
    itl_target_ms: float = 100.0
    max_queue_wait_s: float = 60.0
    pipelined: bool | None = None
    tile_rows: int | None = None
    journal_steps: int = 4096


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that an engine process needs to start."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    attention: str = "auto"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """All that the HTTP front needs to start.

    Attributes:
        keys_file: who has a key; None for a server of this machine alone, without keys.
        usage_file: SQLite file of what each user took; None keeps it in memory only.
        conversations_file: SQLite file of the web chat; None keeps it in memory only.
        lan: listens on every address and is announced by Bonjour.
        tls: certificate and key, `auto` for a local authority's, None for none.
        request_timeout_s: when an answer ends at the latest, for clients that name no time.
        max_input_tokens, max_output_tokens: of one request, whoever asks.
        max_queued_per_user: requests of one user that may wait for their first token.
        allowed_hosts: further `Host` names that are ours.
        allowed_origins: web pages elsewhere that may use the server, like `https://a.example`.
        reasoning_key: where chat completions put reasoning: `reasoning_content`, `reasoning`,
            `both`, or `inline` (in the text, between <think> marks).
    """

    host: str = "127.0.0.1"
    port: int = 8080
    served_model_name: str | None = None
    aliases: tuple[tuple[str, str], ...] = ()
    strict_model: bool = False
    keys_file: Path | None = None
    usage_file: Path | None = None
    conversations_file: Path | None = None
    lan: bool = False
    tls: tuple[Path, Path] | str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    reasoning_key: str = "reasoning_content"
    log_format: str = "text"
    log_prompts: bool = False
    max_body_bytes: int = 32 * 2**20
    keep_alive_s: float = 10.0
    step_timeout_s: float = 120.0
    request_timeout_s: float | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    max_queued_per_user: int | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)
