"""The class that vLLM loads. It has two lives: in the scheduler's process, and in each worker's.

A worker reads its geometry off its KV caches and introduces itself with the namespace that follows; the scheduler makes
keys in that namespace, and its plan for each step tells the workers which blocks to move. Where the store can't be
reached, or can't hold such KV, the engine runs without it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import KVCacheConfig

from engine_adapters.late_client import LateClients
from engine_adapters.vllm.geometry import Geometry, Ranks, Unsupported, measure, probes_of
from engine_adapters.vllm.identity import identify
from engine_adapters.vllm.matching import Parts
from engine_adapters.vllm.options import Options
from engine_adapters.vllm.scheduling import Scheduling
from engine_adapters.vllm.sight import PromMetrics, Stats, stored_events
from engine_adapters.vllm.step import Introduction, StepPlan, StepReport
from engine_adapters.vllm.worker import Moving
from kvstore import ConfigError, KvStoreError, Namespace

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["KvStoreConnector"]

log = logging.getLogger("vllm.kvstore")  # below vLLM's own, whose handler prints it


class KvStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Blocks of prompts and answers in a store that all engines share; see docs/vllm.md."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises ConfigError for a wrong `kv_connector_extra_config`: the engine does not start then."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._options = Options.parse(transfer.kv_connector_extra_config)
        if transfer.kv_load_failure_policy != "recompute":
            raise ConfigError(
                f"kv_load_failure_policy={transfer.kv_load_failure_policy!r}: set it to 'recompute', or a block that "
                f"the store loses ends its request"
            )
        self._reads = self._options.load and transfer.is_kv_consumer
        self._writes = self._options.save and transfer.is_kv_producer
        self._introduction: Introduction | None = None
        self._clients: LateClients | None = None
        self._scheduling: Scheduling | None = None
        self._geometry: Geometry | None = None
        self._moving: Moving | None = None
        self._unreached: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what does not arrive is computed."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:  # noqa: ARG003 - vLLM's signature
        """Layers are waited for and saved one by one, which a graph of the whole pass would leave out."""
        return True

    # --- worker ------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Find out how the KV lies in memory, and connect."""
        self._introduction = self._introduce(kv_caches)
        if self._introduction.namespace is None:
            log.warning("the store is not used: %s", self._introduction.why_not)
            return
        assert self._geometry is not None
        self._geometry.memory.make_present()
        self._clients = LateClients([Namespace.from_description(self._introduction.namespace)], self._connection)

    def _introduce(self, kv_caches: dict[str, Tensor]) -> Introduction:
        config = self._vllm_config
        parallel, model = config.parallel_config, config.model_config
        try:
            if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
                raise Unsupported("context parallelism")
            layers = get_layers_from_vllm_config(config, AttentionLayerBase, list(kv_caches))
            probes, backend = probes_of(layers)
            ranks = Ranks(
                get_tensor_model_parallel_rank(), parallel.tensor_parallel_size, model.get_total_num_kv_heads()
            )
            self._geometry = geometry = measure(
                self._kv_cache_config, kv_caches, probes, ranks, wanted=self._options.layout, backend=backend
            )
            name, revision = identify(config, self._options)
            pipeline = get_pp_group()
            namespace = Namespace(
                model=name,
                revision=revision,
                dtype=geometry.memory.dtype,
                block_tokens=geometry.block_tokens,
                layout=geometry.layout,
                pipeline=(pipeline.rank_in_group, pipeline.world_size),
                tenant=self._options.tenant.encode(),
            )
        except (Unsupported, KvStoreError) as reason:
            return Introduction(None, str(reason))
        except Exception as fault:  # a model or backend that nobody has thought of must start all the same
            log.exception("looking at the KV cache met a bug; the engine runs without the store")
            return Introduction(None, f"{type(fault).__name__}: {fault}".splitlines()[0])
        return Introduction(namespace.describe())

    def get_handshake_metadata(self) -> Introduction | None:
        """The namespace of this worker's blocks, for the scheduler."""
        return self._introduction

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ARG002 - vLLM's signature
        """Begin the step's loads."""
        if (moving := self._mover()) is not None:
            moving.start(self._plan())
        else:
            self._unreached.update(self._plan().load.block_ids.tolist())  # only the scheduler has met the store

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for one layer's blocks."""
        if self._moving is not None:
            self._moving.before_layer(self._plan(), layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ARG002 - vLLM's signature
        """Hand one layer of the blocks that this step completes to the store."""
        if (moving := self._mover()) is not None:
            moving.after_layer(self._plan(), layer_name)

    def wait_for_save(self) -> None:
        """Complete the step."""
        if self._moving is not None:
            self._moving.end(self._plan())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that did not come."""
        failed, self._unreached = self._unreached, set()
        return failed if self._moving is None else failed | self._moving.take_failed()

    def build_connector_worker_meta(self) -> StepReport | None:
        """What came of the step."""
        return None if self._moving is None else self._moving.take_report()

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan

    def _mover(self) -> Moving | None:
        """What moves blocks, once the store has been reached."""
        if self._moving is None and self._clients is not None and self._geometry is not None:
            client = self._clients.first
            if client is not None:
                self._moving = Moving(client, self._geometry, client.namespace.pipeline[0])
        return self._moving

    # --- scheduler ---------------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """The workers have introduced themselves: connect, if they have a namespace in common."""
        introductions = [metadata[place] for place in sorted(metadata)]
        reasons = [told.why_not for told in introductions if told.namespace is None]
        if reasons:
            log.warning("the store is not used: %s", reasons[0])
            return
        parts: dict[int, Namespace] = {}
        for (pipeline_rank, tp_rank), told in sorted(metadata.items()):
            namespace = Namespace.from_description(told.namespace)
            ours = parts.setdefault(pipeline_rank, namespace)
            if ours != namespace and namespace.layout.describe()["kind"] == "canonical":
                log.warning("the store is not used: rank %d's blocks are laid out unlike the others'", tp_rank)
                return
        self._clients = LateClients([parts[rank] for rank in sorted(parts)], self._connection)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """As `set_xfer_handshake_metadata_pp_aware`, without pipeline parallelism."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): told for rank, told in metadata.items()})

    def on_new_request(self, request: Request) -> None:
        """Ask the store about it at once."""
        if (scheduling := self._scheduler()) is not None:
            scheduling.arrive(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded while the step computes; None while the store has not answered."""
        scheduling = self._scheduler()
        return (0 if scheduling is None else scheduling.matched_tokens(request, num_computed_tokens)), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:  # noqa: ARG002 - vLLM's signature
        """The engine has room for them."""
        if self._scheduling is not None:
            self._scheduling.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the workers are to do in this step."""
        if self._scheduling is None:
            return StepPlan(0, scheduler_output.total_num_scheduled_tokens)
        return self._scheduling.plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What they did."""
        report = connector_output.kv_connector_worker_meta
        if self._scheduling is not None and isinstance(report, StepReport):
            self._scheduling.learn(report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002 - vLLM's signature
        """Its blocks may be freed: saves end with their step."""
        if self._scheduling is not None:
            self._scheduling.finish(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, for models with several groups of layers."""
        return self.request_finished(request, list(block_ids[0]) if block_ids else [])

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What routers should know: blocks that are in the store now."""
        if self._scheduling is None:
            return ()
        return stored_events(self._scheduling.take_stored(), self._scheduling.block_tokens)

    def reset_cache(self) -> bool | None:
        """Remove this engine's blocks from the store, everybody's: the weights have changed, or are about to."""
        if self._scheduling is None:
            return False
        log.info("removed %d blocks from the store", self._scheduling.forget())
        return True

    def _scheduler(self) -> Scheduling | None:
        """What decides, once the store has been reached."""
        if self._scheduling is None and self._clients is not None:
            clients = self._clients.clients
            if clients is not None:
                events = self._vllm_config.kv_events_config
                self._scheduling = Scheduling(
                    Parts(tuple(clients)),
                    self._options,
                    reads=self._reads,
                    writes=self._writes,
                    events=events is not None and events.enable_kv_cache_events,
                )
        return self._scheduling

    # --- both --------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Stats | None:
        """Counts since the last call."""
        side = self._moving or self._scheduling
        return None if side is None else side.tally.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Counts that came from another process."""
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """The counts in Prometheus."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Let go of everything."""
        for side in (self._moving, self._scheduling, self._clients):
            if side is not None:
                side.close()

    @property
    def _connection(self) -> dict[str, Any]:
        options = self._options
        return {
            "address": options.address,
            "transport": options.transport,
            "timeout_s": options.timeout_s,
            "checksums": options.checksums,
            "auth_token": options.auth_token,
        }
