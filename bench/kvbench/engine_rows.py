"""What `kvbench engine` makes of engines' answers: rows, whether they are right, and their ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from statistics import median
from typing import Final

from kvbench.engine_modes import PEERS, Mode

EXACT_DTYPE: Final = "float32"  # where a hit gives a cold run's numbers; others round by how a prompt is cut
LOGPROB_DIFF_MAX: Final = 1e-3

# What a hit in the store may take beside others, and a saving run beside a cold one.
TARGETS: Final = (
    (Mode.KVSTORE, Mode.EXAMPLE_CONNECTOR, 0.9),
    (Mode.KVSTORE, Mode.LMCACHE_MP, 0.7),
    (Mode.KVSTORE, Mode.MOONCAKE_STORE, 0.5),
    (Mode.KVSTORE, Mode.PREFIX_CACHE, 1.3),
)
PAIR_AT_MOST: Final = 1.3  # a hit over one in the same engine's own cache
SAVING_AT_MOST: Final = 1.05


@dataclass(frozen=True, slots=True)
class Answer:
    """One request."""

    hit_tokens: int
    ttft_s: float
    decode_s: float  # for all tokens after the first
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    engine_cpu_s: float
    store_cpu_s: float


@dataclass(slots=True)
class Taken:
    """What was measured of one mode: rounds of one answer a prompt."""

    saving: list[Answer] = field(default_factory=list[Answer])  # the first run, by the engine that saves
    answers: list[list[Answer]] = field(default_factory=list[list[Answer]])
    in_process: list[list[Answer]] = field(default_factory=list[list[Answer]])  # the same prompt again, at once
    reason: str | None = None  # why there is no more


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One mode with one dtype. Times: medians over rounds and prompts. Without a figure: the reason, and None."""

    mode: str
    dtype: str
    prompt_tokens: int
    hit_tokens: int | None  # the fewest
    ttft_ms: float | None
    tokens_per_s: float | None  # of those after the first
    tokens_equal: bool | None  # to the cold run's
    logprob_max_abs_diff: float | None  # to the cold run's, up to the first token that differs; None: that is the first
    bytes: int | None  # of KV that a hit brings
    ttft_min_ms: float | None
    ttft_max_ms: float | None
    in_process_ms: float | None  # a hit in the same engine's own cache, right after each hit
    over_in_process: (
        float | None
    )  # a hit over its neighbour there, each pair by itself: what the machine did, it did to both
    saving_ttft_ms: float | None
    engine_cpu_s: float | None  # while a request runs, the polling of vLLM's processes included
    store_cpu_s: float | None
    equal_to_prefix_cache: bool | None  # tokens; with fewer bits than float32 it is this that a hit must reach
    checked: bool
    samples: int
    ttft_samples_ms: tuple[float, ...]
    in_process_samples_ms: tuple[float, ...]
    saving_samples_ms: tuple[float, ...]
    reason: str | None


@dataclass(frozen=True, slots=True)
class EngineRatio:
    """A mode's time over another's, both medians of the same run."""

    dtype: str
    mode: str
    over: str
    what: str
    ratio: float
    at_most: float
    reached: bool


@dataclass(frozen=True, slots=True)
class LookupCost:
    """What our connector's lookups cost the scheduler's loop."""

    prompt_tokens: int
    count: int
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class EngineResult:
    """All rows, the ratios that can be told from them, and the versions of the engine's environment."""

    rows: list[EngineRow]
    ratios: list[EngineRatio]
    versions: dict[str, str]
    lookup: LookupCost | None = None

    @property
    def checked(self) -> bool:
        """Whether every row that isn't another project's was measured and right."""
        ours = [row for row in self.rows if row.mode not in PEERS]
        return bool(self.rows) and all(row.checked for row in ours)


def engine_rows(
    modes: Sequence[Mode], dtype: str, prompt_tokens: int, token_bytes: int, taken: Mapping[Mode, Taken]
) -> list[EngineRow]:
    """A row a mode. The engine without a connector, `taken[Mode.COLD]`, gives two: cold, and its own cache."""
    bare = taken[Mode.COLD]
    all_taken = {**taken, Mode.PREFIX_CACHE: Taken(answers=bare.in_process, in_process=bare.in_process)}
    return [engine_row(mode, dtype, prompt_tokens, all_taken[mode], bare, token_bytes) for mode in modes]


def engine_row(mode: Mode, dtype: str, prompt_tokens: int, taken: Taken, bare: Taken, token_bytes: int) -> EngineRow:
    """The row of what was taken, compared with the engine without a connector."""
    answers = [answer for turn in taken.answers for answer in turn]
    again = [answer for turn in taken.in_process for answer in turn] if mode is not Mode.COLD else []
    if not answers or taken.reason is not None:
        return _row_without_figures(mode, dtype, prompt_tokens, taken)
    cold = bare.answers[0] * len(taken.answers)
    warm = bare.in_process[0] * len(taken.answers)
    hit_tokens = min(answer.hit_tokens for answer in answers)
    times = tuple(answer.ttft_s * 1e3 for answer in answers)
    diff = _largest_logprob_diff(answers, cold)
    equal = _tokens_equal(answers, cold)
    as_warm = _tokens_equal(answers, warm)
    exact = equal and diff is not None and diff <= LOGPROB_DIFF_MAX
    right = exact if dtype == EXACT_DTYPE else as_warm or mode is Mode.COLD
    return EngineRow(
        mode=mode.value,
        dtype=dtype,
        prompt_tokens=prompt_tokens,
        hit_tokens=hit_tokens,
        ttft_ms=median(times),
        tokens_per_s=median((len(answer.tokens) - 1) / answer.decode_s for answer in answers),
        tokens_equal=equal,
        logprob_max_abs_diff=diff,
        bytes=hit_tokens * token_bytes,
        ttft_min_ms=min(times),
        ttft_max_ms=max(times),
        in_process_ms=first_token_ms(again) if again else None,
        over_in_process=median(map(_over, answers, again)) if again else None,
        saving_ttft_ms=first_token_ms(taken.saving) if taken.saving else None,
        engine_cpu_s=median(answer.engine_cpu_s for answer in answers),
        store_cpu_s=median(answer.store_cpu_s for answer in answers),
        equal_to_prefix_cache=as_warm,
        checked=right and (mode is Mode.COLD) == (hit_tokens == 0),
        samples=len(answers),
        ttft_samples_ms=times,
        in_process_samples_ms=tuple(answer.ttft_s * 1e3 for answer in again),
        saving_samples_ms=tuple(answer.ttft_s * 1e3 for answer in taken.saving),
        reason=None,
    )


def _row_without_figures(mode: Mode, dtype: str, prompt_tokens: int, taken: Taken) -> EngineRow:
    return EngineRow(
        mode=mode.value,
        dtype=dtype,
        prompt_tokens=prompt_tokens,
        hit_tokens=None,
        ttft_ms=None,
        tokens_per_s=None,
        tokens_equal=None,
        logprob_max_abs_diff=None,
        bytes=None,
        ttft_min_ms=None,
        ttft_max_ms=None,
        in_process_ms=None,
        over_in_process=None,
        saving_ttft_ms=None,
        engine_cpu_s=None,
        store_cpu_s=None,
        equal_to_prefix_cache=None,
        checked=False,
        samples=0,
        ttft_samples_ms=(),
        in_process_samples_ms=(),
        saving_samples_ms=(),
        reason=taken.reason or "nothing was measured",
    )


def engine_ratios(dtype: str, rows: Sequence[EngineRow]) -> list[EngineRatio]:
    """Hits beside those of other modes, saving runs beside cold ones, as far as both were measured.

    A hit of fewer tokens than the one that it is compared with reaches nothing, however fast it was.
    """
    by_mode = {row.mode: row for row in rows if row.dtype == dtype and row.ttft_ms is not None}
    ratios: list[EngineRatio] = []

    def compare(what: str, mode: str, over: str, ms: float | None, over_ms: float | None, at_most: float) -> None:
        if ms is not None and over_ms is not None:
            as_full = (by_mode[mode].hit_tokens or 0) >= (by_mode[over].hit_tokens or 0)
            ratio = ms / over_ms
            ratios.append(EngineRatio(dtype, mode, over, what, ratio, at_most, reached=as_full and ratio <= at_most))

    for mode, over, at_most in TARGETS:
        if mode in by_mode and over in by_mode:
            compare("hit", mode, over, by_mode[mode].ttft_ms, by_mode[over].ttft_ms, at_most)
    if Mode.KVSTORE in by_mode and Mode.PREFIX_CACHE in by_mode:
        pair = by_mode[Mode.KVSTORE].over_in_process
        compare("pair", Mode.KVSTORE, Mode.PREFIX_CACHE, pair, 1.0, PAIR_AT_MOST)
    if Mode.COLD in by_mode:
        for mode, row in by_mode.items():
            compare("saving", mode, Mode.COLD, row.saving_ttft_ms, by_mode[Mode.COLD].ttft_ms, SAVING_AT_MOST)
    return ratios


def _tokens_equal(answers: Sequence[Answer], others: Sequence[Answer]) -> bool:
    return all(answer.tokens == other.tokens for answer, other in zip(answers, others, strict=True))


def _largest_logprob_diff(answers: Sequence[Answer], others: Sequence[Answer]) -> float | None:
    """Of each pair, as long as its tokens are the same; None where the first ones aren't."""
    largest = 0.0
    for answer, other in zip(answers, others, strict=True):
        same = list(takewhile(lambda pair: pair[0] == pair[1], zip(answer.tokens, other.tokens, strict=True)))
        if not same:
            return None
        diffs = [abs(mine - its) for mine, its in zip(answer.logprobs, other.logprobs, strict=True)]
        largest = max(largest, *diffs[: len(same)])
    return largest


def _over(answer: Answer, other: Answer) -> float:
    return answer.ttft_s / other.ttft_s


def first_token_ms(answers: Sequence[Answer]) -> float:
    """The median."""
    return median(answer.ttft_s for answer in answers) * 1e3
