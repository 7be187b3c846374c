"""Where keys, values and states live: of the shared prefix (`HotPool`) and of rows (`ColdPool`)."""

from hf_granikv.pools.cold import ColdPool
from hf_granikv.pools.hot import HotPool, Prefix
from hf_granikv.pools.row_states import RowStates
from hf_granikv.pools.slots import SlotAllocator
from hf_granikv.pools.token_table import TokenTable

__all__ = ["ColdPool", "HotPool", "Prefix", "RowStates", "SlotAllocator", "TokenTable"]
