from decoder.engines.transformers.custom_generate import (
    Foredraft as Foredraft,
    foredraft_generate as foredraft_generate,
)
from decoder.sampling.constraint import (
    Grammar as Grammar,
    GrammarProcessor as GrammarProcessor,
)
from retriever.predict.grammar.grammars import (
    choice_grammar as choice_grammar,
    lark_grammar as lark_grammar,
    regex_grammar as regex_grammar,
    schema_grammar as schema_grammar,
    tools_grammar as tools_grammar,
)
