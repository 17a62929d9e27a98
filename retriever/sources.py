"""What a sequence of a tenant is drafted from, found by the tenant's name."""

from numpy.typing import ArrayLike

from indexer.reader import Vocabulary
from retriever.bindings import Bindings
from retriever.databases import Context, Corpus, Databases
from retriever.drafter import TokenIds
from retriever.limits import Limits, check_length, check_tenant_name, checked_tokens
from retriever.pool import Pool
from retriever.pools import Pools


class Sources:
    """The databases of every tenant.

    Args:
        pools: recent outputs.
        live: indexes and listed phrases.
        vocabulary: of the tokens; None where it is not known.
        limits: what is accepted at most.
    """

    def __init__(
        self, pools: Pools, live: Bindings, vocabulary: Vocabulary | None, limits: Limits
    ) -> None:
        self._pools = pools
        self._live = live
        self._vocabulary_size = vocabulary.size if vocabulary else None
        self._limits = limits

    def databases(self, prompt: ArrayLike, tenant: str, *, remember: bool = False) -> Databases:
        """Return what a sequence that begins with integers[n] is drafted from.

        Raises:
            InvalidRequestError: the tokens or the tenant cannot be.
        """
        tokens = self.checked(prompt)
        check_length(len(tokens), self._limits)
        pool = self.pool(tenant)
        phrases = self._live.phrases(tenant)
        return Databases(
            Context(tokens),
            pool,
            self.corpus(tenant),
            learns=remember,
            phrases=phrases.cursor(tokens) if phrases else None,
        )

    def corpus(self, tenant: str) -> Corpus:
        """Return the corpus that a tenant drafts from now."""
        return self._live.corpora(tenant).current.corpus

    def pool(self, tenant: str) -> Pool:
        """Return the recent outputs of a tenant, from the log where they are not in memory."""
        check_tenant_name(tenant)
        return self._pools.get(tenant)

    def checked(self, tokens: ArrayLike) -> TokenIds:
        """Return int32[n], having checked that they are tokens of the vocabulary."""
        return checked_tokens(tokens, self._vocabulary_size)
