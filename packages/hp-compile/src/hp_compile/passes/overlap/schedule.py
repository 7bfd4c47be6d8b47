"""Overlap of communication and computation (G20): launch early, wait late, within a bounded window.

In: a graph whose communication nodes carry tags. Out: the same nodes in another order; no value changes. Gathers are
launched one unit ahead; a reduction is waited for when the next unit's reduction has been launched. Collectives keep
an order that depends on tags alone, so it is the same on all ranks. Nodes of a graph compare by place (`a < b`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, ClassVar

from torch.fx import GraphModule, Node

from hp_compile import _torch_compat as compat
from hp_compile.passes.base import GraphPass
from hp_compile.passes.parallel.views import is_view_of_first
from hp_compile.tracer.repair import done


class AutoOverlapPass(GraphPass):
    """Moves nodes of collectives; everything else stays where it is."""

    name: ClassVar[str] = "auto_overlap"

    def run(self, graph_module: GraphModule, pass_config: Any, **context: Any) -> GraphModule:
        schedule = _Schedule(graph_module)
        schedule.sink_waits_of_forward()
        if not schedule.buckets:
            return graph_module
        schedule.launch_gathers_early()
        schedule.wait_for_reductions_late()
        schedule.wait_right_before_use()
        return graph_module


def _is_view_of_wait(node: Node) -> bool:
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or "hp_comm" in source.meta:
        return False
    return compat.is_wait(source.target) and is_view_of_first(node, source)


class _Schedule:
    def __init__(self, graph_module: GraphModule) -> None:
        self.graph = graph_module.graph
        self.buckets: dict[int, list[Node]] = defaultdict(list)
        for node in self.graph.nodes:
            tag = node.meta.get("hp_comm")
            if tag is not None:
                self.buckets[tag.bucket].append(node)

    def sink_waits_of_forward(self) -> None:
        """Waits that came with the captured forward (tensor parallelism) sink to their first reader, views too."""
        waits = [node for node in self.graph.nodes if compat.is_wait(node.target) and "hp_comm" not in node.meta]
        if not waits:
            return
        writes = [(node, _storages(node.all_input_nodes)) for node in self.graph.nodes if _is_mutable(node)]
        for node in reversed(list(self.graph.nodes)):
            wait = compat.is_wait(node.target) and "hp_comm" not in node.meta
            if not node.users or not (wait or _is_view_of_wait(node)):
                continue
            launch = node.all_input_nodes[0]
            # An operation in place may be read through the tensor that it writes, without the wait's result.
            if wait and _is_mutable(launch):
                continue
            # The collective reads its inputs until it is waited for.
            held = _storages(launch.all_input_nodes if wait else [launch])
            overwriting = [write for write, touched in writes if node < write and held & touched]
            min([*node.users, *overwriting]).prepend(node)

    def launch_gathers_early(self) -> None:
        """The launch of each gather moves to where the gather before it is waited for.

        Then at most two gathers are on their way or in use ahead of time: the one that computation waits for and the
        next one. Launching right before that wait, not after it, lets the two run side by side.
        """
        gathers = self._units("all_gather")
        if not gathers:
            return
        # The first unit has none before it; its buckets go together.
        places = [min(self._stages(gathers[0], "launch"))]
        places += [min(self._stages(buckets, "wait")) for buckets in gathers[:-1]]
        last = places[0]
        for place, buckets in zip(places, gathers, strict=True):
            for bucket in buckets:
                for node in self._stages([bucket], "prepare", "launch"):
                    # No earlier than what it reads (a pass of the user's own may have put something before a gather),
                    # nor than the launch before it.
                    after = max([last, *node.all_input_nodes])
                    target = place if after < place else after.next
                    if target < node:
                        target.prepend(node)
                    last = max(last, node)

    def wait_for_reductions_late(self) -> None:
        """What follows a reduction's launch moves behind the launch of the next unit's reduction, or to the end.

        No later: until it is waited for, a reduction holds the whole gradients of its unit.
        """
        reductions = self._units("reduce_scatter", "all_reduce")
        output = self.graph.output_node()
        for at, buckets in enumerate(reductions):
            following = reductions[at + 1] if at + 1 < len(reductions) else []
            anchor = max(self._stages(following, "launch")).next if following else output
            for bucket in buckets:
                moved = self._after_first_launch(bucket)
                # A pass of the user's own may read reduced gradients earlier than that.
                readers = {user for node in moved for user in node.users} - {*moved, output}
                before = min([anchor, *readers])
                for node in moved:
                    before.prepend(node)

    def wait_right_before_use(self) -> None:
        """Each gather's wait sinks to its first reader; views of the result sink with it."""
        for nodes in self.buckets.values():
            if nodes[0].meta["hp_comm"].kind != "all_gather":
                continue
            for node in reversed(nodes):
                if node.meta["hp_comm"].stage in ("wait", "finish") and node.users:
                    min(node.users).prepend(node)

    def _units(self, *kinds: str) -> list[list[int]]:
        """Buckets of one unit that follow each other, in the order of their first launch."""
        found: list[list[int]] = []
        seen: set[int] = set()
        last: tuple[str, str] | None = None
        for node in self.graph.nodes:
            tag = node.meta.get("hp_comm")
            if tag is None or tag.kind not in kinds or tag.stage != "launch" or tag.bucket in seen:
                continue
            seen.add(tag.bucket)
            if last == (tag.unit, tag.region):
                found[-1].append(tag.bucket)
            else:
                found.append([tag.bucket])
                last = (tag.unit, tag.region)
        return found

    def _stages(self, buckets: list[int], *stages: str) -> list[Node]:
        return [node for bucket in buckets for node in self.buckets[bucket] if node.meta["hp_comm"].stage in stages]

    def _after_first_launch(self, bucket: int) -> list[Node]:
        nodes = self.buckets[bucket]
        at = next(place for place, node in enumerate(nodes) if node.meta["hp_comm"].stage == "launch")
        return nodes[at + 1 :]


def _is_mutable(node: Node) -> bool:
    operation = node.args[0] if node.target is done else node.target
    return bool(getattr(compat.schema_of(operation), "is_mutable", False))


def _storages(nodes: Iterable[Node]) -> set[int]:
    return {compat.storage_id(value) for node in nodes for value in compat.tensors_in(node.meta.get("val"))}
