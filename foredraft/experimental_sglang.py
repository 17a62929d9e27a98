"""Drafts inside SGLang, experimental: never run in a whole SGLang. See docs/how-to/engines.md.

SGLang finds `register` by an entry point in each of its processes: start it with
`--speculative-algorithm FOREDRAFT`.
"""

from foredraft.installation import needing

with needing("sglang"):
    from decoder.engines.experimental_sglang.plugin import ALGORITHM, register

__all__ = ["ALGORITHM", "register"]
