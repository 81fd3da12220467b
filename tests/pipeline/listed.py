"""A plan of which batch reads which samples."""

from pipeline.planning.plan import ClipPlan, PlanRow


class Listed(ClipPlan):
    """`later`: batches until a shard is read again."""

    def __init__(self, batches: list[list[int]], later: dict[int, float] | None = None, lanes: int = 1) -> None:
        self._batches, self._later, self.lanes = batches, later or {}, lanes

    def videos(self, index: int) -> list[int]:
        return self._batches[index] if index < len(self._batches) else []

    def next_use(self, shard: int, index: int) -> float | None:
        return self._later.get(shard)

    def batch(self, index: int) -> list[PlanRow]:
        raise NotImplementedError

    def replacement(self, row: PlanRow, attempt: int) -> None:
        return None
