"""Overlap of communication and computation (G20): launch early, wait late, within a bounded window.

In: a graph whose communication nodes carry tags. Out: the same nodes in another order; no value changes. Gathers are
launched one unit ahead; a reduction is waited for when the next unit's reduction has been launched. Collectives keep
an order that depends on tags alone, so it is the same on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, ClassVar

from torch.fx import GraphModule, Node

from hp_compile.passes.base import GraphPass
from hp_compile.passes.parallel.views import is_view_of_first


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
    return getattr(source.target, "_opname", "") == "wait_tensor" and is_view_of_first(node, source)


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
        order = {node: at for at, node in enumerate(self.graph.nodes)}
        for node in reversed(list(self.graph.nodes)):
            waits = getattr(node.target, "_opname", "") == "wait_tensor" and "hp_comm" not in node.meta
            if not node.users or not (waits or _is_view_of_wait(node)):
                continue
            launch = node.all_input_nodes[0]
            # An operation in place may be read through the tensor that it writes, without the wait's result.
            if waits and getattr(getattr(launch.target, "_schema", None), "is_mutable", False):
                continue
            first = min(node.users, key=lambda user: order[user])
            first.prepend(node)
            order[node] = order[first]

    def launch_gathers_early(self) -> None:
        """The launch of each gather moves to where the gather before it is waited for.

        Then at most two gathers are on their way or in use ahead of time: the one that computation waits for and the
        next one. Launching right before that wait, not after it, lets the two run side by side.
        """
        gathers = self._units("all_gather")
        anchors = [self._first(buckets, "wait") for buckets in gathers]
        for before, buckets in zip(anchors, gathers[1:], strict=False):
            for bucket in buckets:
                for node in self._stages(bucket, "prepare", "launch"):
                    before.prepend(node)

    def wait_for_reductions_late(self) -> None:
        """What follows a reduction's launch moves behind the launch of the next unit's reduction, or to the end.

        No later: until it is waited for, a reduction holds the whole gradients of its unit.
        """
        reductions = self._units("reduce_scatter", "all_reduce")
        order = {node: at for at, node in enumerate(self.graph.nodes)}
        output = next(node for node in reversed(self.graph.nodes) if node.op == "output")
        for at, buckets in enumerate(reductions):
            following = reductions[at + 1] if at + 1 < len(reductions) else None
            if following is None:
                anchor = output
            else:
                launches = [node for bucket in following for node in self._stages(bucket, "launch")]
                anchor = max(launches, key=lambda node: order[node]).next
            for bucket in buckets:
                moved = self._after_first_launch(bucket)
                # A pass of the user's own may read reduced gradients earlier than that.
                readers = {user for node in moved for user in node.users} - {*moved, output}
                before = min((anchor, *readers), key=lambda node: order[node])
                for node in moved:
                    before.prepend(node)

    def wait_right_before_use(self) -> None:
        """Each gather's wait sinks to its first reader; views of the result sink with it."""
        for nodes in self.buckets.values():
            if nodes[0].meta["hp_comm"].kind != "all_gather":
                continue
            order = {node: at for at, node in enumerate(self.graph.nodes)}
            for node in reversed(nodes):
                if node.meta["hp_comm"].stage in ("wait", "finish") and node.users:
                    first = min(node.users, key=lambda user: order[user])
                    first.prepend(node)
                    order[node] = order[first] - 0.5  # type: ignore[assignment]

    def _units(self, *kinds: str) -> list[list[int]]:
        """Buckets of one unit that follow each other, in the order of their first launch."""
        found: list[list[int]] = []
        last: tuple[str, str] | None = None
        for node in self.graph.nodes:
            tag = node.meta.get("hp_comm")
            if tag is None or tag.kind not in kinds or tag.stage != "launch":
                continue
            if any(tag.bucket in group for group in found):
                continue
            if last == (tag.unit, tag.region):
                found[-1].append(tag.bucket)
            else:
                found.append([tag.bucket])
                last = (tag.unit, tag.region)
        return found

    def _stages(self, bucket: int, *stages: str) -> list[Node]:
        return [node for node in self.buckets[bucket] if node.meta["hp_comm"].stage in stages]

    def _first(self, buckets: list[int], stage: str) -> Node:
        order = {node: at for at, node in enumerate(self.graph.nodes)}
        return min((node for bucket in buckets for node in self._stages(bucket, stage)), key=lambda node: order[node])

    def _after_first_launch(self, bucket: int) -> list[Node]:
        nodes = self.buckets[bucket]
        at = next(place for place, node in enumerate(nodes) if node.meta["hp_comm"].stage == "launch")
        return nodes[at + 1 :]
