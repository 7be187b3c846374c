"""One shared prefix for many agents: a key/value cache for Hugging Face transformers.

Importing this package registers the attention implementation `"granikv"`.
"""

from hf_granikv.accounting import CacheStats
from hf_granikv.attention import register
from hf_granikv.cache import AsymmetricPagedCache
from hf_granikv.compiling import compile_decode
from hf_granikv.generation import generate
from hf_granikv.multi_agent import Agent, MultiAgentRunner, Reply
from hf_granikv.pools import Prefix

__all__ = [
    "Agent",
    "AsymmetricPagedCache",
    "CacheStats",
    "MultiAgentRunner",
    "Prefix",
    "Reply",
    "compile_decode",
    "generate",
]
__version__ = "0.1.0"

register()
