"""What random walks over living rows have in common."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from hf_granikv.live_rows import Row


class RowWalk(RuleBasedStateMachine):
    """Rows that are watched, some of which leave for good."""

    held: Any

    @property
    def rows(self) -> list[Row]:
        return list(self.held.taken)

    @precondition(lambda self: self.held.taken)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        self.held.live.drop(row)
        self.held.leave(row)
