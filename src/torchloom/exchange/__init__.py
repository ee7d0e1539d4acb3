"""What ranks tell each other outside of collectives: short texts, each under a name.

    Exchange       how texts travel: `StoreExchange` over a key-value store, `Alone` for one rank
    Agreement      compares facts over an exchange
    text_from      one rank makes a text, all hold it

A collective would hang in just the case that these are for: a rank that failed, or took another branch.
"""

from __future__ import annotations

from torchloom.exchange.agreement import Agreement
from torchloom.exchange.base import Alone, Exchange, late, text_from
from torchloom.exchange.store import RankWatch, StoreExchange

__all__ = [
    "Agreement",
    "Alone",
    "Exchange",
    "RankWatch",
    "StoreExchange",
    "late",
    "text_from",
]
