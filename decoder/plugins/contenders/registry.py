"""Contenders of a benchmark by name, and how each is made for a run.

All contenders except those of transformers share the loop, the target, the acceptance rule and the
budget. They differ only in the drafter. Speed-up is over `plain`, as in the tables of papers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from decoder.assembly import (
    connect_drafter,
    draft_limits,
    draft_readers,
    fusion_for,
    warn_of_unapplied,
)
from decoder.budget.budget import Budget, FixedBudget, MeasuredBudget
from decoder.budget.cost_store import CostStore, known_costs
from decoder.budget.costs import CostSurface
from decoder.drafters.asking import StepCosts
from decoder.drafters.following import NoDrafter, Verified, states_of
from decoder.drafters.fusion import FusedDrafter, FusedSequence
from decoder.drafters.kernels.siblings import Hints
from decoder.drafters.options import MAX_NODES, DraftOptions
from decoder.drafters.recycling import NO_HINTS, RecycledLogits
from decoder.errors import ContradictoryOptionsError, InvalidSettingsError
from decoder.loop import Decoder
from decoder.model.capability_check import FOUND_HERE
from decoder.model.pretrained import LanguageModel
from decoder.model.target import Target
from decoder.plugins.contenders import drafting_rules
from decoder.plugins.contenders.contender import (
    FOREDRAFT,
    PLAIN,
    PROMPT_LOOKUP,
    PROMPT_LOOKUP_TOKENS,
    UNDRAFTED,
    Contender,
    DrawnByPrompt,
    LibraryContender,
    OwnContender,
)
from decoder.plugins.contenders.drafting_rules import PublishedRule
from decoder.sampling.constraint import Grammar
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.sampling.verification import AcceptRule
from indexer.flags import flag_of
from retriever.commands.factories import (
    DrafterFactory,
    UnknownDrafterError,
    find_drafter,
    known_drafters,
)
from retriever.drafter import Drafter, TokenIds

TABLES: Final = "foredraft-tables"
"""Our own drafter without any draft model or head, as the baseline for their gain."""

FREE: Final = StepCosts(target_s=1.0, pass_s=0.0)
"""Costs of draft models and heads if the number of nodes is fixed. So their gain does not depend on
the load of the machine."""

DEFAULT: Final = (PLAIN, PROMPT_LOOKUP, UNDRAFTED, FOREDRAFT)
"""The default contenders."""


@dataclass(frozen=True, slots=True)
class Means:
    """The inputs for making drafters.

    Attributes:
        language_model: the target.
        drafts: the sources of drafts.
        max_nodes: largest number of nodes in a draft.
        sampling: sampling settings of the output.
        costs: costs of passes of draft models and heads; measured by default.
    """

    language_model: LanguageModel
    drafts: DraftOptions
    max_nodes: int
    sampling: SamplingSettings
    costs: StepCosts | None = None

    def without(self, *settings: str) -> DraftOptions:
        """Return the sources of drafts without some settings."""
        return self.drafts.model_copy(update=dict.fromkeys(settings))


Opened = Callable[[Means], AbstractContextManager[Drafter]]
"""Opens a fresh drafter during a block."""


@dataclass(frozen=True, slots=True)
class ContenderEntry:
    """A contender to choose from.

    Attributes:
        name: name of the contender.
        summary: short description.
        paper: publication of the contender; empty for our own.
        opened: opens the drafter; `None` for contenders of transformers.
        options: options of `model.generate`, for contenders of transformers.
        needs: settings of draft sources; at least one of them must be given.
    """

    name: str
    summary: str
    paper: str = ""
    opened: Opened | None = None
    options: dict[str, int] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    @property
    def takes_many(self) -> bool:
        """Whether it can decode several prompts at a time, in our loop or in plain batches."""
        return self.opened is not None or not self.options

    def check(self, drafts: DraftOptions) -> None:
        """Refuse the contender if the options give it nothing to draft with.

        Raises:
            ContradictoryOptionsError: it has nothing to draft with; the message says what to give.
        """
        if self.needs and not any(getattr(drafts, name, None) for name in self.needs):
            wanted = " or ".join(map(flag_of, self.needs))
            raise ContradictoryOptionsError(
                f"--contender {self.name} has nothing to draft with: give {wanted}"
            )


@contextmanager
def _nothing(_: Means) -> Iterator[Drafter]:
    yield NoDrafter()


def _of_texts(make: DrafterFactory, means: Means) -> AbstractContextManager[Drafter]:
    vocabulary = means.language_model.vocabulary
    return drafting_rules.opened(make, means.drafts.index, vocabulary, means.max_nodes)


@contextmanager
def _alone(means: Means, *, without: str) -> Iterator[Drafter]:
    """Draft only with the draft model or head that `without` does not leave out."""
    model, drafts = means.language_model, means.without(without)
    fusion = fusion_for(drafts, model, means.sampling)
    yield fusion([], readers=draft_readers(drafts, model), costs=means.costs)


@contextmanager
def _recycled_alone(means: Means) -> Iterator[Drafter]:
    yield FusedDrafter([], draft_limits(means.language_model), recycled=RecycledLogits())


@contextmanager
def _own(means: Means) -> Iterator[Drafter]:
    with connect_drafter(
        means.drafts, means.language_model, means.sampling, means.costs
    ) as drafter:
        yield drafter


@contextmanager
def _tables(means: Means, *, recycle: bool) -> Iterator[Drafter]:
    """Open our own drafter without any draft model or head, and without the state on disk."""
    drafts = means.without(*MODELS, "draft_vocabulary", "state")
    drafts = drafts.model_copy(update={"draft_sampling": False, "recycle": recycle})
    with connect_drafter(drafts, means.language_model) as drafter:
        yield drafter


class UntaughtDrafter(FusedDrafter):
    """A fused drafter that keeps its initial weights."""

    def _learn_weights(self, sequence: FusedSequence, came: TokenIds) -> None:
        """Learn nothing."""


class UnhintedDrafter(FusedDrafter):
    """A fused drafter that ignores other probable tokens at the last position."""

    def take_in(self, sequence: FusedSequence, verified: Verified) -> Hints:
        """Learn, but return no hints."""
        super().take_in(sequence, verified)
        return NO_HINTS


@contextmanager
def _fused(
    means: Means, *, kind: type[FusedDrafter] = FusedDrafter, recycles: bool = True
) -> Iterator[Drafter]:
    """Open a fused drafter of another kind, over retrieval."""
    with _tables(means, recycle=False) as retrieval:
        recycled = RecycledLogits() if recycles else None
        yield kind([retrieval], draft_limits(means.language_model), recycled=recycled)


MODELS: Final = ("draft_model", "speculator")
"""Settings that name a draft model or a head."""


def _entry(name: str, drafter: ContenderEntry | DrafterFactory) -> ContenderEntry:
    """Return an entry of a module's `DRAFTERS` as a contender."""
    if isinstance(drafter, ContenderEntry):
        return replace(drafter, name=name)
    summary = paper = ""
    if isinstance(drafter, PublishedRule):
        summary, paper = drafter.summary, drafter.paper
    return ContenderEntry(name, summary, paper, partial(_of_texts, drafter))


ENTRIES: Final[dict[str, ContenderEntry]] = {
    entry.name: entry
    for entry in (
        ContenderEntry(
            PLAIN, "transformers' own generation: the baseline for speed-up and outputs"
        ),
        ContenderEntry(
            PROMPT_LOOKUP,
            "transformers' own prompt lookup, of 10 tokens",
            options={"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS},
        ),
        ContenderEntry(UNDRAFTED, "our own loop and target without drafts", opened=_nothing),
        *(_entry(name, rule) for name, rule in drafting_rules.DRAFTERS.items()),
        ContenderEntry(
            "model",
            "only --draft-model: best-first trees that grow while growing pays off",
            "arXiv:2406.02532, 2405.19715",
            partial(_alone, without="speculator"),
            needs=("draft_model",),
        ),
        ContenderEntry(
            "speculator",
            "only --speculator: trees of a head that reads the target's states",
            "arXiv:2406.16858, 2503.01840",
            partial(_alone, without="draft_model"),
            needs=("speculator",),
        ),
        ContenderEntry(FOREDRAFT, "all given sources, fused into one tree", opened=_own),
        ContenderEntry(
            TABLES,
            "retrieval fused with recycled logits, without a draft model",
            opened=partial(_tables, recycle=True),
        ),
        ContenderEntry(
            "foredraft-retrieval",
            "only retrieval: context, answers and --index",
            opened=partial(_tables, recycle=False),
        ),
        ContenderEntry(
            "foredraft-recycling",
            "only recycled logits: after the last token, the last two and the last three",
            opened=_recycled_alone,
        ),
        ContenderEntry(
            "foredraft-reweighed",
            "only retrieval, with nodes reweighted as in fusion",
            opened=partial(_fused, recycles=False),
        ),
        ContenderEntry(
            "foredraft-untaught",
            "foredraft-tables with fixed initial weights",
            opened=partial(_fused, kind=UntaughtDrafter),
        ),
        ContenderEntry(
            "foredraft-unhinted",
            "foredraft-tables without other probable tokens at the last position",
            opened=partial(_fused, kind=UnhintedDrafter),
        ),
    )
}
"""The contenders of this package."""

PAPERS: Final = "benchmarks.papers.contenders"
"""The module in a checkout whose contenders can be chosen by name alone."""

ASKING_SERVERS: Final = frozenset(
    {
        FOREDRAFT,
        TABLES,
        "foredraft-retrieval",
        "foredraft-reweighed",
        "foredraft-untaught",
        "foredraft-unhinted",
    }
)
"""Contenders that draft from services, if the options name any."""


def known_entries() -> tuple[dict[str, ContenderEntry], list[str]]:
    """Return all named contenders, and the reasons why those of a module are missing.

    These are the contenders of this package, and in a checkout also those of `benchmarks.papers`.
    """
    drafters, missing = known_drafters([PAPERS])
    papers = {name: _entry(name, each) for name, each in drafters.items() if name not in ENTRIES}
    return ENTRIES | papers, missing


def chosen(names: Sequence[str]) -> list[ContenderEntry]:
    """Return contenders by name, each only once, in order.

    Args:
        names: known names, or `MODULE:NAME` for an entry in a module's mapping `DRAFTERS`.

    Raises:
        InvalidSettingsError: a name is unknown.
    """
    return [_named(name) for name in dict.fromkeys(names)]


def _named(name: str) -> ContenderEntry:
    if name in ENTRIES:
        return ENTRIES[name]
    try:
        if ":" in name:
            return _entry(name, find_drafter(name))
    except UnknownDrafterError as error:
        raise InvalidSettingsError(f"--contender {name}: {error}") from error
    known, missing = known_entries()
    if name not in known:
        listed = f"there is no such contender, choose from {', '.join(known)}"
        raise InvalidSettingsError("; ".join([f"--contender {name}: {listed}", *missing]))
    return known[name]


def parallel_default(drafts: DraftOptions) -> list[str]:
    """Return the default contenders of a parallel run.

    With a draft model or a head, our drafter without it is included. It is left out if there is a
    service, because a service would show the answers of one contender to the other.
    """
    without = [TABLES] if drafts.names_readers and not drafts.server else []
    return [PLAIN, UNDRAFTED, *without, FOREDRAFT]


def possible(drafts: DraftOptions) -> list[str]:
    """Return the names of all contenders that have something to draft with."""
    names = []
    known, _ = known_entries()
    for entry in known.values():
        with suppress(ContradictoryOptionsError):
            entry.check(drafts)
            names.append(entry.name)
    return names


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of a comparison.

    Attributes:
        nodes: largest number of nodes in a draft; `None` for as many as pay off by measured costs.
        temperature: sampling temperature; 0 is greedy decoding.
        seed: sampling seed.
    """

    nodes: int | None = None
    temperature: float = 0.0
    seed: int = 0

    def sampling(self, *, coupled: bool = True) -> SamplingSettings:
        """Return the sampling settings.

        Args:
            coupled: whether random numbers depend on prompt and position. Then all contenders
                sample the same tokens as decoding without drafts, and drafts are compared with the
                target's own choice. Otherwise sampled drafts are accepted by their distributions.
        """
        return SamplingSettings(
            self.temperature, seed=self.seed if self.temperature else None, coupled=coupled
        )


@dataclass(frozen=True, slots=True)
class Lineup:
    """Contenders that are ready to decode.

    Attributes:
        ways: contenders by name.
        target: target of this package's contenders.
        surface: costs of passes; `None` if the number of nodes is fixed.
    """

    ways: dict[str, Contender]
    target: Target
    surface: CostSurface | None

    @property
    def drafting(self) -> dict[str, OwnContender]:
        """Contenders that draft and may remember answers."""
        own = {name: way for name, way in self.ways.items() if isinstance(way, OwnContender)}
        return {name: way for name, way in own.items() if way.drafts}


class Contest:
    """Makes the chosen contenders for each setting, with fresh drafters.

    All settings share the same target and the same costs.

    Args:
        language_model: the model of all contenders.
        names: names of the contenders.
        drafts: the sources of drafts.
        max_new_tokens: most tokens of an answer.
        costs: store of measured costs of passes for the next start; `None` to always measure.
        grammar: grammar that outputs must match; None for no grammar.

    Raises:
        InvalidSettingsError: a contender is unknown.
        ContradictoryOptionsError: a contender has nothing to draft with.
    """

    def __init__(  # noqa: PLR0913, PLR0917  (the last two are options)
        self,
        language_model: LanguageModel,
        names: Sequence[str],
        drafts: DraftOptions,
        max_new_tokens: int,
        costs: CostStore | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        self._grammar = grammar
        self._entries = chosen(names)
        for entry in self._entries:
            entry.check(drafts)
        self._language_model = language_model
        self._drafts = drafts
        self._max_new_tokens = max_new_tokens
        self._costs = costs
        self._target: Target | None = None
        self._surface: CostSurface | None = None

    @contextmanager
    def opened(self, setting: Setting) -> Iterator[Lineup]:
        """Open the contenders during the block.

        Raises:
            IndexerError: an index cannot be opened or was built for another tokenizer.
            VocabularyMismatchError: the draft model has another tokenizer.
            UnsupportedModelError: this package cannot decode the model.
        """
        means = self._means(setting)
        with ExitStack() as stack:
            drafters = {
                entry.name: stack.enter_context(entry.opened(means))
                for entry in self._entries
                if entry.opened is not None
            }
            target = self._target_for(drafters.values())
            if setting.nodes is None and self._surface is None:
                self._surface = known_costs(target, self._language_model.model, self._costs)
            rule = accept_rule(means.sampling, (), self._grammar)
            warn_of_unapplied(self._language_model, rule)
            ways: dict[str, Contender] = {}
            for entry in self._entries:
                if entry.name in drafters:
                    decoder = self._decoder(drafters[entry.name], target, setting, rule)
                    ways[entry.name] = OwnContender(decoder, self._max_new_tokens)
                else:
                    ways[entry.name] = self._library(entry, target, setting)
            yield Lineup(ways, target, None if setting.nodes else self._surface)

    def _means(self, setting: Setting) -> Means:
        """Return the inputs for making drafters; with fixed nodes, draft models always draft."""
        costs = None if setting.nodes is None else FREE
        sampling = setting.sampling(coupled=not self._drafts.draft_sampling)
        return Means(self._language_model, self._drafts, MAX_NODES, sampling, costs)

    def _target_for(self, drafters: Iterable[Drafter]) -> Target:
        """Return the target, which records the states that any of the drafters needs."""
        if self._target is None:
            states = {number for drafter in drafters for number in states_of(drafter)}
            self._target = Target(
                self._language_model.model,
                states=states,
                reuse_prefixes=True,
                verdicts=self._costs or FOUND_HERE,
            )
        return self._target

    def _decoder(
        self, drafter: Drafter, target: Target, setting: Setting, rule: AcceptRule
    ) -> Decoder:
        return Decoder(
            target,
            drafter,
            self._budget(drafter, setting),
            rule if setting.temperature == 0 else DrawnByPrompt(rule),
            self._language_model.stop_ids,
            drafter_vocabulary=self._language_model.vocabulary.size,
            num_ahead=self._drafts.draft_ahead,
        )

    def _budget(self, drafter: Drafter, setting: Setting) -> Budget:
        if isinstance(drafter, NoDrafter):
            return FixedBudget(0)
        if setting.nodes is not None or self._surface is None:
            return FixedBudget(setting.nodes or 0)
        return MeasuredBudget(self._surface)

    def _library(self, entry: ContenderEntry, target: Target, setting: Setting) -> LibraryContender:
        return LibraryContender(
            self._language_model,
            target,
            self._max_new_tokens,
            entry.options,
            setting.temperature,
            setting.seed,
            self._grammar,
        )
