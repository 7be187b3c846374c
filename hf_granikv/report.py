"""The figures of one turn of a `MultiAgentRunner`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from hf_granikv.wording import counted


@dataclass(frozen=True, slots=True)
class RunReport:
    """What one turn computed, how long it took and what it holds.

    Times are None where `generate` gives no signal between its steps (beam search).

    Attributes:
        num_agents: Agents that were asked.
        prefix_tokens: Tokens of the prefixes they read, each prefix counted once.
        suffix_tokens: Prompt tokens after the prefixes, over all agents.
        kept_tokens: How many of those the agents held from earlier turns, and nobody computed.
        shared_tokens: How many of the others another agent held or computed, and they did not.
        promoted_tokens: Tokens that agents held each for itself and share from this turn on.
        once_tokens: Tokens that one agent computed for several in this turn.
        generated_tokens: Tokens of all answers.
        decode_steps: Forward passes after the one over the suffixes.
        decoded_tokens: Tokens that those passes gave; each answer's first token is not among them.
        prefix_prefill_s: Seconds that the prefixes took when they were shared.
        suffix_prefill_s: Seconds until each agent's first token.
        decode_s: Seconds from there to the last token.
        generate_s: Seconds altogether.
        hot_bytes: Bytes of the stored prefixes, and of what agents share after them.
        cold_bytes: Bytes of the private tokens of the agents asked.
        dense_equivalent_bytes: Bytes that a `DynamicCache` would hold for the same rows.
        backend_steps: How many steps each backend ran.
    """

    num_agents: int = 0
    prefix_tokens: int = 0
    suffix_tokens: int = 0
    kept_tokens: int = 0
    shared_tokens: int = 0
    promoted_tokens: int = 0
    once_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int | None = 0
    decoded_tokens: int | None = 0
    prefix_prefill_s: float = 0.0
    suffix_prefill_s: float | None = 0.0
    decode_s: float | None = 0.0
    generate_s: float = 0.0
    hot_bytes: int = 0
    cold_bytes: int = 0
    dense_equivalent_bytes: int = 0
    backend_steps: dict[str, int] = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Sequence["RunReport"]) -> "RunReport":
        """Gives the sum of the reports of several prefixes; unknown where one of them is unknown."""
        total: dict[str, object] = {}
        for item in fields(cls):
            values = [getattr(part, item.name) for part in parts]
            if item.name == "backend_steps":
                total[item.name] = dict(sum(map(Counter, values), Counter()))
            else:
                total[item.name] = None if None in values else sum(values)
        return cls(**total)  # type: ignore[arg-type]

    @classmethod
    def of_batches(cls, parts: Sequence["RunReport"]) -> "RunReport":
        """Gives the report of one prefix whose agents were asked in batches, one after another.

        Bytes are those of the batch that held the most.
        """
        largest = max(parts, key=lambda part: part.held_bytes)
        once = ("prefix_tokens", "prefix_prefill_s", "hot_bytes", "cold_bytes")
        shared = {name: getattr(largest, name) for name in (*once, "dense_equivalent_bytes")}
        return replace(cls.joined(parts), **shared)

    @property
    def held_bytes(self) -> int:
        """Bytes held for prefixes and private tokens together."""
        return self.hot_bytes + self.cold_bytes

    @property
    def dense_ratio(self) -> float | None:
        """How many times the held bytes a `DynamicCache` would hold."""
        return self.dense_equivalent_bytes / self.held_bytes if self.held_bytes else None

    @property
    def s_per_step(self) -> float | None:
        """Seconds per decode step, all agents together."""
        return self.decode_s / self.decode_steps if self.decode_s and self.decode_steps else None

    @property
    def s_per_token(self) -> float | None:
        """Seconds per decoded token, over all agents."""
        return (
            self.decode_s / self.decoded_tokens if self.decode_s and self.decoded_tokens else None
        )

    def __str__(self) -> str:
        ratio = f"{self.dense_ratio:.2f}x" if self.dense_ratio else "-"
        steps = ", ".join(f"{name} {count}" for name, count in self.backend_steps.items()) or "none"
        decode = "not separated from the prefill"
        if self.decode_s is not None:
            decode = (
                f"{self.decode_s:.2f} s in {self.decode_steps} steps "
                f"({_ms(self.s_per_step)} per step, {_ms(self.s_per_token)} per token)"
            )
        kept = f" ({self.kept_tokens} held before)" if self.kept_tokens else ""
        shared = []
        if self.shared_tokens or self.promoted_tokens:
            shared = [
                f"shared     {self.promoted_tokens} held before, {self.once_tokens} computed by one "
                f"agent for several; {self.shared_tokens} were not computed again"
            ]
        suffix = "-" if self.suffix_prefill_s is None else f"{self.suffix_prefill_s:.2f} s"
        return "\n".join(
            [
                f"{counted(self.num_agents, 'agent')}",
                f"tokens     prefix {self.prefix_tokens} (computed once), "
                f"suffixes {self.suffix_tokens}{kept}, generated {self.generated_tokens}",
                *shared,
                f"prefill    prefix {self.prefix_prefill_s:.2f} s, suffixes {suffix}",
                f"decode     {decode}",
                f"generate   {self.generate_s:.2f} s",
                f"bytes      hot {self.hot_bytes:,}, cold {self.cold_bytes:,}; "
                f"dense would hold {self.dense_equivalent_bytes:,} ({ratio})",
                f"backends   {steps}",
            ]
        )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
