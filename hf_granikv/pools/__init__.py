"""Where keys and values live: the shared prefix (`HotPool`) and private tokens (`ColdPool`)."""

from hf_granikv.pools.cold import ColdPool
from hf_granikv.pools.hot import HotPool, Prefix
from hf_granikv.pools.slots import SlotAllocator
from hf_granikv.pools.token_table import TokenTable

__all__ = ["ColdPool", "HotPool", "Prefix", "SlotAllocator", "TokenTable"]
